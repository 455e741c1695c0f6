"""Placement maps in the files that serving runtimes and EPLB read.

A runtime counts physical experts: the places of all GPUs, those of the first GPU first. Each place holds one logical
expert, which is what the model calls an expert. So every GPU needs as many experts as the others.

What reads each file was read in the release that is named:

- ``sglang``: SGLang 0.5.23, ``srt/eplb/expert_location.py``, ``compute_initial_expert_location_metadata``.
- ``ascend``: vllm-ascend 0.23.0.post1, ``vllm_ascend/eplb/core/eplb_utils.py``, ``expert_file_to_tensor``.
- ``eplb``: the three tensors that ``rebalance_experts`` returns, as SGLang 0.5.23 has it in
  ``srt/eplb/eplb_algorithms/deepseek.py``, and which ``ExpertLocationMetadata._init_raw`` there takes.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moeblaze_ref.core import checks, records
from moeblaze_ref.core.traces import INTEGERS, MAX_IDS
from moeblaze_ref.placement import maps
from moeblaze_ref.placement.bounds import Bounds
from moeblaze_ref.placement.maps import Copies, Placement
from moeblaze_ref.placement.sources import saved_by_torch

Array = np.ndarray
EPLB_TENSORS = ("phy2log", "log2phy", "logcnt")  # as rebalance_experts names what it returns
NOT_OFFERED = {
    "vllm": "vLLM 0.33.0 reads no map from a file: EplbState.build_initial_global_physical_to_logical_map in "
    "distributed/eplb/eplb_state.py begins with the experts in their order. Its plugin for Ascend reads one: ascend"
}


def physical_experts(placement: Placement | Copies) -> Array:
    """The logical expert in each place, (layers, G, experts of a GPU) int64: a GPU's experts ascend.

    An expert with copies has several places.

    Raises
    ------
    ValueError
        If a GPU has more experts than another in a layer.
    """
    sizes = placement.sizes()
    if uneven := checks.first(sizes != sizes[0, 0]):
        layer, _ = uneven
        raise ValueError(
            f"layer {layer} has {sizes[layer].tolist()} experts on its GPUs, but the runtimes need as many on each: "
            f"{sizes[layer].sum()} places on {placement.num_gpus} GPUs"
        )
    return np.array([placement.hosts(layer) for layer in range(placement.layers)], np.int64)


def with_dense_layers(places: Array, dense: Sequence[int]) -> Array:
    """Add rows for a model's layers without experts, in which place p has expert p % E.

    Parameters
    ----------
    places : array (MoE layers, G, experts of a GPU) int64
    dense : sequence of int
        The layers without experts, counted among all layers of the model.

    Returns
    -------
    array (layers, G, experts of a GPU) int64

    Raises
    ------
    ValueError, TypeError
        If one of ``dense`` is named twice, or is none of the model's layers.
    """
    layers = len(places) + len(dense)
    check_dense(dense, layers)
    every = np.arange(places[0].size) % (places.max() + 1)
    out = np.broadcast_to(every.reshape(places[0].shape), (layers, *places[0].shape)).copy()
    out[np.setdiff1d(np.arange(layers), dense)] = places
    return out


def check_dense(dense: Sequence[int], layers: int) -> None:
    """Layers without experts are layers of the model, each named once."""
    for layer in dense:
        checks.check_int("a dense layer", layer, 0, layers - 1)
    if len(set(dense)) < len(dense):
        raise ValueError(f"the dense layers are {list(dense)}, but each may be named once")


def save(
    path: Path, target: str, placement: Placement | Copies, dense: Sequence[int] = (), force: bool = False
) -> None:
    """Write a map as a runtime reads it.

    Parameters
    ----------
    path : Path
        A file of the same target that is there is replaced; another file only with ``force``.
    target : str
        One of ``TARGETS``.
    placement : Placement or Copies
        With as many experts on each GPU, copies too.
    dense : sequence of int
        The model's layers without experts. SGLang counts them, the others do not.
    force : bool

    Raises
    ------
    ValueError, TypeError
        If the target is unknown or not offered, the name does not end as the target's reader asks, GPUs have different
        numbers of experts, or ``dense`` does not fit.
    OSError
        If the file cannot be written; what was there before stays.
    """
    form = check_target(target, path)
    places = physical_experts(placement)
    if form.counts_dense_layers:
        places = with_dense_layers(places, dense)
    records.replace(Path(path), lambda part: form.write(part, places), form.load, force)


def load(
    path: Path, target: str, num_gpus: int, dense: Sequence[int] = (), model: str = "", num_nodes: int = 1
) -> Placement | Copies:
    """A map from a runtime's file, as `save` writes it: a map with copies if it has more places than experts.

    The files hold no nodes: ``num_nodes`` are those of a map with copies.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError, TypeError
        If it is no file of the target, an expert has no place, or two on one GPU, its places do not go evenly on the
        GPUs, or the nodes do not divide them.
    """
    form = check_target(target, path)
    flat = form.load(Path(path))  # (layers, places)
    if form.counts_dense_layers:
        flat = np.delete(flat, [checks.check_int("a dense layer", layer, 0, len(flat) - 1) for layer in dense], axis=0)
    layers, places = flat.shape
    if places % checks.check_int("num_gpus", num_gpus, 1):
        raise ValueError(f"{Path(path).name} has {places} places, but {num_gpus} GPUs need a multiple of {num_gpus}")
    hosts, E = flat.reshape(layers, num_gpus, -1), int(flat.max()) + 1
    return maps.from_hosts(hosts.tolist(), E, model) if places == E else _with_copies(hosts, E, num_nodes, model)


def _with_copies(hosts: Array, num_experts: int, num_nodes: int, model: str) -> Copies:
    """A map with copies from the experts of each GPU, (layers, G, experts of a GPU)."""
    times = (hosts[..., None] == np.arange(num_experts)).sum(axis=2)  # (layers, G, E)
    if twice := checks.first(times > 1):
        layer, gpu, expert = twice
        raise ValueError(f"layer {layer}: expert {expert} is {times[twice]} times on GPU {gpu}, but may be there once")
    return Copies(np.ascontiguousarray(times.swapaxes(1, 2) > 0), num_nodes, model)


class Output(NamedTuple):
    """A map that is to be written."""

    path: Path
    target: str | None  #: one of ``TARGETS``, or None for our own npz
    dense: tuple[int, ...]

    def load(self, path: Path) -> Any:
        """Read a file of the kind that is to be written."""
        return maps.load(path) if self.target is None else check_target(self.target, path).load(path)

    def save(self, placement: Placement | Copies, force: bool) -> None:
        """Write the map; errors as in `maps.save` and `save`."""
        if self.target is None:
            maps.save(self.path, placement, force)
        else:
            save(self.path, self.target, placement, self.dense, force)


def planned(path: Path | None, target: str | None, dense: tuple[int, ...] = ()) -> Output | None:
    """Return the output to write, or None if no path is named.

    Raises
    ------
    ValueError
        If a target is named without a path, or as in `check_target`. Without a target, if the path has an ending other
        than .npz.
    """
    if target is not None:
        if path is None:
            raise ValueError(f"a map for {target} needs a file to be written to: name it by --out")
        check_target(target, path)
    elif path is not None and path.suffix not in ("", ".npz"):
        raise ValueError(
            f"{path} does not end in .npz: without --to, --out takes .npz or no ending. "
            f"A runtime's map needs --to: {', '.join(TARGETS)}"
        )
    return None if path is None else Output(path, target, dense)


def dense_layers(
    text: str | None, target: str | None, moe_layers: int, recorded: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """A model's layers without experts, from text such as "0-2,5"; where there is no text, those that were recorded.

    Raises
    ------
    ValueError
        If the text is not so, names none of the model's layers, the target does not count these layers, or other layers
        were recorded.
    """
    if text is None:
        return recorded
    if target is None or not (target in TARGETS and TARGETS[target].counts_dense_layers):
        raise ValueError(f"dense layers are {text}, but only a map for sglang counts them: name it by --to")
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdecimal() and (last or first).isdecimal() and int(first) <= int(last or first)):
            raise ValueError(f"dense layers are {text!r}, but they must be numbers or ranges, such as 0-2 or 0,3")
        found += range(int(first), int(last or first) + 1)
    if recorded and tuple(found) != recorded:
        raise ValueError(f"dense layers are {text}, but the record has none of the layers {list(recorded)}")
    check_dense(found, moe_layers + len(found))
    return tuple(found)


def check_even(num_experts: int, num_gpus: int, bounds: Bounds | None) -> None:
    """Every GPU gets as many experts, as the runtimes need it, where each expert has one place.

    Raises
    ------
    ValueError
        If the GPUs do not divide the experts, or the bounds allow other numbers.
    """
    if num_experts % num_gpus:
        raise ValueError(
            f"{num_experts} experts do not go evenly on {num_gpus} GPUs, but the runtimes need as many places on each: "
            f"copies can fill them, by --method dedup-copies"
        )
    even = num_experts // num_gpus
    if bounds is not None and (bounds.least, bounds.most) != (even, even):
        raise ValueError(
            f"{bounds.least} to {bounds.most} experts on a GPU are allowed, but the runtimes need as many on each: "
            f"leave --experts-per-gpu out, or name {even}:{even}"
        )


def check_target(target: str, path: Path) -> "Target":
    """The target of this name, if its reader takes a file of this name."""
    if target in NOT_OFFERED:
        raise ValueError(f"{target} is not a target: {NOT_OFFERED[target]}")
    form = TARGETS[checks.check_name("target", target, TARGETS)]
    if Path(path).suffix not in form.suffixes:
        raise ValueError(f"{path} does not end in {' or '.join(form.suffixes)}, as {target} needs it")
    return form


class Target(NamedTuple):
    """How a runtime's file is written and read."""

    write: Callable[[Path, Array], Any]  #: takes the places (layers, G, experts of a GPU)
    load: Callable[[Path], Array]  #: returns the logical expert of each place, (layers, places) int64
    suffixes: tuple[str, ...]
    counts_dense_layers: bool


def _write_sglang(path: Path, places: Array) -> None:
    path.write_text(json.dumps({"physical_to_logical_map": places.reshape(len(places), -1).tolist()}))


def _load_sglang(path: Path) -> Array:
    return _rows(path, records.read(path, {"physical_to_logical_map"})["physical_to_logical_map"])


def _write_ascend(path: Path, places: Array) -> None:
    path.write_text(
        json.dumps(
            {
                "moe_layer_count": len(places),
                "layer_list": [
                    {
                        "layer_id": layer,
                        "device_count": len(devices),
                        "device_list": [
                            {"device_id": device, "device_expert": experts.tolist()}
                            for device, experts in enumerate(devices)
                        ],
                    }
                    for layer, devices in enumerate(places)
                ],
            },
            indent=1,
        )
    )


def _load_ascend(path: Path) -> Array:
    found = records.read(path, {"moe_layer_count", "layer_list"})
    rows = []
    for number, layer in enumerate(records.check_list("layer_list", found["layer_list"])):
        devices = records.check_object(f"layer_list[{number}]", layer, {"device_list"})["device_list"]
        rows.append(
            [
                expert
                for device in records.check_list("device_list", devices)
                for expert in records.check_list(
                    "device_expert", records.check_object("a device", device, {"device_expert"})["device_expert"]
                )
            ]
        )
    return _rows(path, rows)


def _write_eplb(path: Path, places: Array) -> None:
    import torch

    flat = places.reshape(len(places), -1)
    count = (flat[:, :, None] == np.arange(flat.max() + 1)).sum(axis=1)  # (layers, E)
    tensors = {"phy2log": flat, "log2phy": _places_of_experts(flat, count), "logcnt": count}
    with path.open("wb") as file:
        torch.save({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, file)


def _places_of_experts(flat: Array, count: Array) -> Array:
    """The places of each expert, (layers, E, most copies) int64, ascending; -1 where an expert has fewer."""
    found = np.full((*count.shape, count.max()), -1)
    for layer, experts in enumerate(flat):
        for expert, copies in enumerate(count[layer]):
            found[layer, expert, :copies] = np.flatnonzero(experts == expert)
    return found


def _load_eplb(path: Path) -> Array:
    found = saved_by_torch(path, "file of EPLB's tensors")
    if missing := set(EPLB_TENSORS) - found.keys():
        raise ValueError(f"{path.name} has no {', '.join(sorted(missing))}")
    checks.check_array(f"phy2log of {path.name}", found["phy2log"], 2, INTEGERS, contiguous=False)
    return _rows(path, found["phy2log"].tolist())


def _rows(path: Path, rows: Any) -> Array:
    """Rows of as many places, each a number of an expert."""
    rows = [records.check_list(f"layer {layer}", row) for layer, row in enumerate(records.check_list("the map", rows))]
    if not rows or len(set(map(len, rows))) != 1 or not rows[0]:
        raise ValueError(f"{path.name} has rows of {sorted(set(map(len, rows)))} places, but all must have as many")
    for layer, row in enumerate(rows):
        for place, expert in enumerate(row):
            checks.check_int(f"layer {layer}, place {place}", expert, 0, MAX_IDS - 1)
    return np.array(rows, np.int64)


TARGETS: dict[str, Target] = {
    "sglang": Target(_write_sglang, _load_sglang, (".json",), counts_dense_layers=True),
    "ascend": Target(_write_ascend, _load_ascend, (".json",), counts_dense_layers=False),
    "eplb": Target(_write_eplb, _load_eplb, (".pt",), counts_dense_layers=False),
}
