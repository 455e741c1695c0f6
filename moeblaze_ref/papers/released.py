"""The bytes that a layer saves for backward when it runs: the account's, with the routing that each release keeps.

The account's routing tensors are those of the papers. What the releases keep in their place is listed here.
"""

from collections.abc import Callable

from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.memory.accounting import BLOCK, Assumptions, account

BETWEEN_PRODUCTS = {"x", "routed_x", "a", "b", "act_a", "y_swi", "y"}  # what the papers speak of


def megablocks_routing(c: MoEConfig) -> int:
    """Return the routing's bytes in megablocks 0.10 with grouped products.

    The probabilities (L, E) and the chosen gates (L, k) in the layer's dtype; the choice (L, k) int64; each row's token
    and expert (R,) int32; the ends of the experts' rows (E,) int32, and their lengths (E,) int64.
    """
    return c.itemsize * (c.L * c.E + c.R) + (8 + 4 + 4) * c.R + (4 + 8) * c.E


def sonicmoe_routing(c: MoEConfig) -> int:
    """Return the routing's bytes in sonic-moe 0.1.2.post1.

    The logits (L, E) in the layer's dtype; the chosen gates (L, k) float32; the choice (L, k), each row's token, and
    the map from slots to rows and its inverse (R,) int32 each; the experts' offsets (E + 1,) int32.
    """
    return c.itemsize * c.L * c.E + 5 * 4 * c.R + 4 * (c.E + 1)


ROUTING: dict[str, Callable[[MoEConfig], int]] = {
    "megablocks_published": megablocks_routing,
    "megablocks_memory_optimized": megablocks_routing,
    "sonicmoe": sonicmoe_routing,
}


def saved_bytes(config: MoEConfig, system: str, policy: str | None = None) -> tuple[int, int]:
    """Return the least and the most bytes that a run of a layer may save for backward.

    They are equal but for ``megablocks``, whose padding depends on the routing.
    """
    one = account(config, system, policy)
    least = one.kept_bytes
    if system in ROUTING:
        least = sum(tensor.bytes for tensor in one.tensors if tensor.kept and tensor.name in BETWEEN_PRODUCTS)
        least += ROUTING[system](config)
    if system == "megablocks":
        return least, account(config, system, policy, Assumptions(most_padded(config))).kept_bytes
    return least, least


def most_padded(config: MoEConfig, block: int = BLOCK) -> list[int]:
    """Return rows of each expert that leave the most rows of their blocks empty: R in all, which is at least E."""
    one_over = (config.R - config.E) // (config.E * block) * block + 1
    return [one_over] * (config.E - 1) + [config.R - one_over * (config.E - 1)]
