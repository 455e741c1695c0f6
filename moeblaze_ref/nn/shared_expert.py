"""The expert that sees every token, in plain torch.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2; Qwen2-MoE multiplies its output by a sigmoid.
"""

import torch
from torch import Tensor, nn

from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.routers import Shared
from moeblaze_ref.nn.activations import activate


class SharedExpert(nn.Module):
    """One expert for all tokens, whose output is added to that of the chosen experts.

    Parameters
    ----------
    d : int
        Model width.
    shared : Shared
        Its width, and whether a sigmoid gates it.
    activation : str
        One of ``config.ACTIVATIONS``.
    device, dtype : optional
        Of the parameters w1 and w2 (d, width), w3 (width, d) and gate (d, 1); w2 is None for ungated activations, gate
        without a sigmoid.
    """

    def __init__(
        self,
        d: int,
        shared: Shared,
        activation: str = "swiglu",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.activation = activation

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, device=device, dtype=dtype) * shape[0] ** -0.5)

        self.w1 = parameter(d, shared.width)
        self.w2 = parameter(d, shared.width) if is_gated(activation) else None
        self.w3 = parameter(shared.width, d)
        self.gate = parameter(d, 1) if shared.gated else None

    def forward(self, x: Tensor) -> Tensor:
        """The output (L, d) for x (L, d)."""
        b = None if self.w2 is None else x @ self.w2  # (L, width)
        y: Tensor = activate(x @ self.w1, b, self.activation) @ self.w3
        return y if self.gate is None else torch.sigmoid(x @ self.gate) * y
