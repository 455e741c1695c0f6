"""Text that a trained model writes."""

import torch

from moeblaze_ref.core import checks
from moeblaze_ref.lm.model import MoETransformer


@torch.no_grad()
def sample(model: MoETransformer, prompt: bytes, count: int, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Go on with a text, byte by byte.

    Parameters
    ----------
    model : MoETransformer
    prompt : bytes
        At least one.
    count : int
        Bytes to write.
    temperature : float
        Logits are divided by it: the lower, the likelier the bytes; above 0.
    seed : int
        Of the draws.

    Returns
    -------
    bytes
        The prompt and what follows; the model sees the last ``model.config.sequence`` bytes of it at a time.

    Raises
    ------
    ValueError, TypeError
        If the prompt is empty, count is negative or the temperature is not above 0.
    """
    checks.check_type("prompt", prompt, bytes)
    if not prompt:
        raise ValueError("prompt is empty, but a model needs at least one byte to go on from")
    checks.check_int("count", count, at_least=0)
    checks.check_positive("temperature", temperature)
    draws, device = torch.Generator().manual_seed(seed), model.head.weight.device
    text = torch.tensor(list(prompt))
    for _ in range(count):
        logits = model(text[None, -model.config.sequence :].to(device)).logits[0, -1]  # (vocab,)
        probabilities = torch.softmax(logits[:256].float().cpu() / temperature, dim=0)
        text = torch.cat([text, torch.multinomial(probabilities, 1, generator=draws)])
    return bytes(text.tolist())
