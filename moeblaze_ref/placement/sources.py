"""Routing that serving runtimes record, as a trace, or as counts.

What each runtime writes was read in the release that is named:

- ``vllm``: vLLM 0.33.0 with ``enable_return_routed_experts``. ``CompletionOutput.routed_experts`` of
  ``vllm/outputs.py`` is an array (tokens, layers, k) for each request. The file is an npz of such arrays, or the
  server's responses, one a line: there the array is an npy file in base64.
- ``sglang``: SGLang 0.5.23, what ``_DetailAccumulator.dump`` of ``srt/eplb/expert_distribution.py`` writes with
  ``--expert-distribution-recorder-mode per_token``. Its ids are those of places. Of a decode it says which tokens it
  holds, but not of which requests: these are left out. A chunk of a prompt counts as a sequence.
- ``counts``: tokens of each expert alone, from anywhere: `counted.read`.

All record all layers of a model, those without experts too. These hold no choice, and are left out.
"""

import base64
import binascii
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moeblaze_ref.core import checks, records
from moeblaze_ref.core.traces import INTEGERS, MAX_IDS, NPY, RoutingTrace, load_npz
from moeblaze_ref.placement import counted
from moeblaze_ref.placement.counted import Counted
from moeblaze_ref.placement.synthetic import trace_or_synthetic
from moeblaze_ref.placement.trace import load_tensors

Array = np.ndarray
OF_RECORDER = "file of SGLang's recorder"
PLACES = "last_physical_to_logical_map"


class Recorded(NamedTuple):
    """The choices or counts that a runtime recorded."""

    trace: RoutingTrace | Counted
    dense: tuple[int, ...]  #: the model's layers without experts, counted among all layers
    left_out: int  #: tokens of which no request is known, or of which nothing was recorded


class _Choices(NamedTuple):
    """Ids as a runtime records them, with what is no choice in them."""

    ids: Array  #: (tokens, layers, columns) int64; what holds no choice is 0 or -1
    seq: Array  #: (tokens,) int64
    left_out: int = 0
    logical: Array | None = None  #: (layers, places) int64, if the ids are those of places


def read(path: Path, source: str, num_experts: int | None = None, model: str = "") -> Recorded:
    """Read a runtime's record.

    Parameters
    ----------
    path : Path
    source : str
        One of ``SOURCES``.
    num_experts : int, optional
        E; otherwise one more than the largest id. Counts have it already.
    model : str
        Whose routing it is.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError, TypeError
        If the source is unknown, the file is none of it, or holds no choices of experts: the message names the element.
    """
    path = Path(path)
    if checks.check_name("source", source, SOURCES) == COUNTS:
        return _counted(path, num_experts, model)
    return _traced(path, source, num_experts, model)


def saved_by_torch(path: Path, what: str) -> dict[str, Any]:
    """Read what ``torch.save`` wrote, as `trace.load_tensors` does; any other file raises an error of one line.

    Parameters
    ----------
    path : Path
    what : str
        What the file must be, for the message.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If torch does not load it, or it is no dictionary.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's advice on pickles of others
            return load_tensors(path)
    except (OSError, ImportError, MemoryError):
        raise
    except Exception:  # torch's reader of pickles may raise any error
        form = "it must be a dictionary of tensors, numbers, text and lists that torch.save wrote"
        raise ValueError(f"{path.name} is no {what}: {form}") from None


def _counted(path: Path, num_experts: int | None, model: str) -> Recorded:
    if path.suffix != ".npz":
        saved_by_torch(path, OF_RECORDER)
    counts = counted.read(path)
    dense = ~counts.any(axis=(0, 2))  # (layers,)
    if dense.all():
        raise ValueError(f"{path.name} holds no counts: all are 0")
    found = Counted(counts[:, ~dense], model)
    if num_experts not in (None, found.num_experts):
        raise ValueError(f"num_experts is {num_experts}, but {path.name} has counts of {found.num_experts} experts")
    return Recorded(found, tuple(np.flatnonzero(dense).tolist()), 0)


def _traced(path: Path, source: str, num_experts: int | None, model: str) -> Recorded:
    choices = CHOICES[source](path)
    if not choices.ids.size:
        raise ValueError(f"{path.name} holds no token whose experts were recorded")
    ids = choices.ids[:, :, : _columns(choices.ids)]  # (tokens, layers, k)
    dense = _is_dense(ids)  # (layers,)
    if dense.all():
        raise ValueError(f"{path.name} holds no choice of experts: every id is 0 or -1")
    if choices.logical is not None:
        ids = _logical(ids, choices.logical)
    topk = ids[:, ~dense]
    if num_experts is None:
        num_experts = int(topk.max()) + 1
    checks.check_int("num_experts", num_experts, 1, MAX_IDS)
    checks.check_index("the ids", topk, num_experts, "experts")
    info = {"source": source, "file": path.name}
    trace = RoutingTrace(np.ascontiguousarray(topk, np.int16), num_experts, choices.seq, model=model, info=info)
    return Recorded(trace, tuple(np.flatnonzero(dense).tolist()), choices.left_out)


def recorded_or_synthetic(
    path: Path | None, source: str | None, size: str | None, num_experts: int | None = None, model: str | None = None
) -> Recorded:
    """Read a runtime's record; where no source is named, as `synthetic.trace_or_synthetic`.

    Raises
    ------
    ValueError, TypeError, OSError
        If there is neither a file nor a size, or both; if a source is named without a file; or as in `read` and
        `synthetic.trace_or_synthetic`.
    """
    if source is None and (path is None) == (size is None):
        raise ValueError("give either --trace, or --synthetic with LAYERSxExK")
    if source is None:
        return Recorded(_trace_or_synthetic(path, size, num_experts, model), (), 0)
    if path is None or size is not None:
        raise ValueError(f"--from {source} reads a recorded trace: give --trace, and not --synthetic")
    return read(path, source, num_experts, model or "")


def _trace_or_synthetic(
    path: Path | None, size: str | None, num_experts: int | None, model: str | None
) -> RoutingTrace:
    """`synthetic.trace_or_synthetic`, which cannot count the experts of a file without tokens: say that it has none."""
    try:
        return trace_or_synthetic(path, size, num_experts, model)
    except ValueError:
        if path is not None and size is None and _has_no_tokens(path):
            raise ValueError(f"{path.name} has no tokens: there is nothing to place by") from None
        raise


def _has_no_tokens(path: Path) -> bool:
    """Return True if a file holds topk (0, layers, k)."""
    try:
        topk = load_npz(path, "topk")["topk"]
    except ValueError:
        return False
    return topk.ndim == 3 and not len(topk)


def _columns(ids: Array) -> int:
    """k: a record may have more columns than the model has choices, and then the last ones hold nothing above 0."""
    used = np.flatnonzero((ids > 0).any(axis=(0, 1)))
    return int(used[-1]) + 1 if len(used) else 1


def _is_dense(ids: Array) -> Array:
    """(layers,): a layer without experts has no id above 0."""
    return np.logical_not((ids > 0).any(axis=(0, 2)))


def _vllm(path: Path) -> _Choices:
    requests = list(_requests_of_npz(path) if path.suffix == ".npz" else _requests_of_responses(path))
    if not requests:
        raise ValueError(f"{path.name} holds no request")
    for name, ids in requests:
        checks.check_array(name, ids, 3, ("uint8", "uint16", "int32", "int64"), contiguous=False)
        checks.check_shape(
            name, ids, dict(zip(("tokens", "layers", "k"), (None, *requests[0][1].shape[1:]), strict=True))
        )
    lengths = [len(ids) for _, ids in requests]
    ids = np.concatenate([ids.astype(np.int64) for _, ids in requests])
    return _Choices(ids, np.repeat(np.arange(len(requests)), lengths))


def _requests_of_npz(path: Path) -> Iterator[tuple[str, Array]]:
    with path.open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                yield from [(name, arrays[name]) for name in arrays.files]
        except Exception:  # what zipfile, zlib and numpy raise of a damaged file has no other type in common
            raise ValueError(f"{path.name} is not an npz of plain arrays") from None


def _requests_of_responses(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield the name and the array of each choice in each line; a line is a response of the server."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        name = f"line {number} of {path.name}"
        response = records.parse(name, line)
        choices = records.check_object(name, response, {"choices"})["choices"]
        for one, choice in enumerate(records.check_list(f"choices of {name}", choices)):
            where = f"{name}, choice {one}"
            yield where, _decoded(where, records.check_object(where, choice, {"routed_experts"})["routed_experts"])


def _decoded(name: str, text: Any) -> Array:
    if text is None:
        raise ValueError(f"{name} has no routed_experts: start the server with --enable-return-routed-experts")
    try:
        content = base64.b64decode(text, validate=True)
        if not content.startswith(NPY):
            raise ValueError
        return np.load(io.BytesIO(content), allow_pickle=False)
    except (TypeError, ValueError, EOFError, binascii.Error):
        raise ValueError(f"routed_experts of {name} is not an npy file in base64") from None


def _sglang(path: Path) -> _Choices:
    found = _of_choices(path)
    logical = _integers(PLACES, found[PLACES], 2)  # (layers, places)
    checks.check_index(PLACES, logical, MAX_IDS, "experts")
    passes = records.check_list("records", found["records"])
    ids, lengths, left_out = [], [], 0
    for number, passed in enumerate(passes):
        physical, of_prompts = _pass(f"records[{number}]", passed, logical)
        if of_prompts is None:
            left_out += physical.shape[1]
            continue
        lengths += of_prompts
        ids.append(physical.swapaxes(0, 1))
    if not ids:
        raise ValueError(f"{path.name} holds no prefill: of {left_out} tokens of decodes no request is known")
    seq = np.repeat(np.arange(len(lengths)), lengths)
    return _without_padding(_Choices(np.concatenate(ids), seq, left_out, logical))


def _of_choices(path: Path) -> dict[str, Any]:
    """Read a record that SGLang's recorder wrote in mode per_token."""
    found = saved_by_torch(path, OF_RECORDER)
    if "logical_count" in found:
        raise ValueError(f"{path.name} holds counts, not choices: record in mode per_token, or use --from counts")
    if missing := {"records", PLACES} - found.keys():
        raise ValueError(f"{path.name} has no {', '.join(sorted(missing))}, as SGLang's records of mode per_token have")
    return found


def _pass(name: str, passed: Any, logical: Array) -> tuple[Array, list[int] | None]:
    """The places that a pass chose, (layers, tokens, columns), and the tokens of each prompt; None of a decode."""
    passed = records.check_object(name, passed, {"topk_ids_of_layer", "extend_seq_lens"})
    of_ids, of_lengths = f"{name}.topk_ids_of_layer", f"{name}.extend_seq_lens"
    physical = _integers(of_ids, passed["topk_ids_of_layer"], 3)
    checks.check_shape(of_ids, physical, {"layers": len(logical), "tokens": None, "columns": None})
    checks.check_index(of_ids, np.maximum(physical, 0), logical.shape[1], "physical experts")
    if passed["extend_seq_lens"] is None:
        return physical, None
    found = records.check_list(of_lengths, passed["extend_seq_lens"])
    lengths = [checks.check_int(f"{of_lengths}[{one}]", length, 0) for one, length in enumerate(found)]
    if sum(lengths) != physical.shape[1]:
        raise ValueError(f"{name} has {physical.shape[1]} tokens, but extend_seq_lens add up to {sum(lengths)}")
    return physical, lengths


def _integers(name: str, found: Any, rank: int) -> Array:
    """An array or a tensor of integers as int64."""
    checks.check_array(name, found, rank, INTEGERS, contiguous=False)
    return np.asarray(found).astype(np.int64)


def _logical(ids: Array, logical: Array) -> Array:
    """The logical experts in places ``ids`` (tokens, layers, k), by a map (layers, places); what is below 0 stays."""
    flat = np.maximum(ids, 0).swapaxes(0, 1).reshape(len(logical), -1)  # (layers, tokens * k)
    found = np.take_along_axis(logical, flat, axis=1).reshape(len(logical), len(ids), -1)
    return np.where(ids >= 0, found.swapaxes(0, 1), ids)


def _without_padding(choices: _Choices) -> _Choices:
    """Leave out tokens without any choice: a batch may be padded."""
    chosen = (choices.ids >= 0).any(axis=(1, 2))
    left_out = choices.left_out + int((~chosen).sum())
    return choices._replace(ids=choices.ids[chosen], seq=choices.seq[chosen], left_out=left_out)


COUNTS = "counts"
CHOICES: dict[str, Callable[[Path], _Choices]] = {"vllm": _vllm, "sglang": _sglang}
SOURCES = (*CHOICES, COUNTS)
