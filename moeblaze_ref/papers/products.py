"""What a GPU runs for MegaBlocks' figures 5, 9 and 10."""

from collections.abc import Callable
from typing import Any

from moeblaze_ref import doors
from moeblaze_ref.bench.device import Device
from moeblaze_ref.papers import block_products, squares

ITEMS = {
    "megablocks-fig5": squares.jobs,
    "megablocks-fig9": block_products.figure_9,
    "megablocks-fig10": block_products.figure_10,
}


def jobs(item: str, device: Device) -> list[Callable[[], list[dict[str, Any]]]]:
    """Return the jobs of an item, see `squares.time_square`, `block_products.time_product` and `time_experts`.

    Each item is expected to end within 5 minutes on an H100, compilation included. Figure 5's largest size is bounded
    by its few repetitions: 23 contenders that multiply 22 times each, 8.8 TFLOP a product.

    Parameters
    ----------
    item : str
        One of ``ITEMS``.
    device : Device

    Raises
    ------
    ValueError
        If there is no such item; the message proposes the nearest name.
    """
    return ITEMS[doors.check_name("item", item, ITEMS)](device)
