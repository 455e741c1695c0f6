"""Argument checks of the public functions.

Each check raises ValueError or TypeError with the element that is wrong and what is
allowed. Arrays may be numpy's or CuPy's.
"""

import difflib
import math
import numbers
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from moeblaze_ref.core.arrays import copy_of, is_contiguous, is_writable, strides_of
from moeblaze_ref.core.arrays import dtype_of as dtype_of  # other folders use checks.dtype_of
from moeblaze_ref.core.structures import EMPTY, Array, Dispatch

# Rows and blocks are numbered by int32, and a kernel's last tile may reach up to 1,023 beyond them.
MAX_ROUTED_ROWS = 2**31 - 1024
MAX_EXPERTS = 1024
MAX_TOP_K = 32


def check_type(name: str, value: object, *expected: type) -> None:
    """``value`` is an instance of one of the classes ``expected``."""
    if not isinstance(value, expected):
        allowed = " or ".join(_with_article(each.__name__) for each in expected)
        raise TypeError(f"{name} is {kind(value)}, but it must be {allowed}")


def kind(value: object) -> str:
    """Return the kind of a value, for a message: "None", "an int", "a Linear"."""
    return "None" if value is None else _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_int(name: str, value: Any, at_least: int, at_most: int | None = None) -> int:
    """``value`` as an int within [at_least, at_most]; True and False are none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), but it must be an integer") from None
    if number < at_least or (at_most is not None and number > at_most):
        allowed = f">= {at_least}" if at_most is None else f"{at_least}..{at_most}"
        raise ValueError(f"{name} is {number}, but it must be {allowed}")
    return number


def check_number(name: str, value: Any) -> float:
    """``value`` as a finite float; text is none."""
    try:
        if isinstance(value, str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), but it must be a number") from None
    except OverflowError:  # an integer beyond all floats
        number = math.inf if value > 0 else -math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, but it must be finite")
    return number


def check_float(name: str, value: object) -> float:
    """``value`` as a float: a number, infinite or NaN too, but no array and no None."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), but it must be a number")
    try:
        return float(value)
    except OverflowError:  # an integer beyond all floats
        return -math.inf if value < 0 else math.inf


def check_scalar(name: str, value: Any) -> None:
    """``value`` is a finite number, or a floating-point array of one element without dimensions."""
    if hasattr(value, "dtype") and not isinstance(value, numbers.Real):
        check_array(name, value, 0, ("float32", "float64"))
        value = float(value)
    check_number(name, value)


def check_positive(name: str, value: object) -> float:
    """``value`` as a finite float above zero."""
    number = check_number(name, value)
    if number <= 0:
        raise ValueError(f"{name} is {number}, but it must be above 0")
    return number


def check_within(name: str, value: object, at_least: float, at_most: float = math.inf) -> float:
    """``value`` as a finite float within [at_least, at_most]."""
    number = check_number(name, value)
    if not at_least <= number <= at_most:
        allowed = f">= {at_least}" if at_most == math.inf else f"{at_least} to {at_most}"
        raise ValueError(f"{name} is {number}, but it must be {allowed}")
    return number


def check_name(kind: str, name: object, allowed: Collection[str]) -> str:
    """``name`` if it is one of ``allowed``; otherwise an error with the nearest valid name."""
    if isinstance(name, str) and name in allowed:  # what is no string may have no hash
        return name
    lowered = {valid.lower(): valid for valid in allowed}
    near = difflib.get_close_matches(str(name).lower(), lowered, n=1, cutoff=0.5)
    hint = f" Did you mean {lowered[near[0]]!r}?" if near else ""
    raise ValueError(f"unknown {kind} {name!r}.{hint} Valid: {', '.join(allowed)}")


def check_k(k: int, num_experts: int) -> None:
    """k experts of num_experts can be chosen."""
    if k > num_experts:
        raise ValueError(f"k is {k}, but there are only {num_experts} experts (k must be 1..{num_experts})")


def check_routed_rows(num_tokens: int, k: int) -> None:
    """R = L * k fits the int32 index structures."""
    if num_tokens * k > MAX_ROUTED_ROWS:
        raise ValueError(
            f"R = L * k = {num_tokens} * {k} = {num_tokens * k}, but int32 indices allow at most "
            f"2**31 - 1024 = {MAX_ROUTED_ROWS} routed rows"
        )


def first(mask: Array) -> tuple[int, ...]:
    """Index of the first True of a mask, in row-major order; empty if there is none."""
    return tuple(int(axis[0]) for axis in mask.nonzero()) if bool(mask.any()) else ()


def first_place(mask: Array) -> int | None:
    """Index of the first True of a mask (n,); None if there is none."""
    return next(iter(first(mask)), None)


def _at(name: str, index: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, index))}]"


def numbers_of(indices: Array) -> Array:
    """0, 1, ...: the place of each of the ``indices`` (n,), none negative; an array of their kind."""
    numbers: Array = (indices >= 0).nonzero()[0]
    return numbers


def check_topk_experts(topk_experts: Array, num_experts: int) -> None:
    """``topk_experts`` is (L, k) int32, C-contiguous, ids in range, no expert twice in a row.

    Raises
    ------
    TypeError
        If it is no array or its dtype is not int32.
    ValueError
        If rank, layout, a value, k or R is not allowed.
    """
    check_array("topk_experts", topk_experts, rank=2, dtypes=("int32",))
    check_choice("topk_experts", topk_experts, num_experts)


def check_choice(name: str, chosen: Array, num_experts: int) -> None:
    """The ids ``chosen`` (L, k), of any integers, are in range, and no row has one twice."""
    check_int("num_experts", num_experts, at_least=1)
    num_tokens, k = chosen.shape
    check_int("k", k, at_least=1)
    check_k(k, num_experts)
    check_routed_rows(num_tokens, k)
    if num_tokens:
        check_index(name, chosen, num_experts, "experts")
        check_distinct_rows(name, chosen)


def check_part(topk_experts: Array, num_experts: int, num_routed: int) -> None:
    """``topk_experts`` as in `check_topk_experts`, but ``EMPTY`` for all but ``num_routed`` of its ids."""
    check_array("topk_experts", topk_experts, rank=2, dtypes=("int32",))
    num_tokens, k = topk_experts.shape
    check_int("num_experts", num_experts, at_least=0, at_most=MAX_EXPERTS)
    check_int("k", k, at_least=1, at_most=MAX_TOP_K)
    check_routed_rows(num_tokens, k)
    check_int("num_routed", num_routed, at_least=0, at_most=num_tokens * k)
    there = topk_experts != EMPTY
    _refuse("topk_experts", topk_experts, there & _outside(topk_experts, num_experts), num_experts, "experts")
    found = int(there.sum())
    if found != num_routed:
        raise ValueError(f"num_routed is {num_routed}, but topk_experts names {found} experts")
    check_distinct_rows("topk_experts", topk_experts)


def check_distinct_rows(name: str, chosen: Array) -> None:
    """No expert twice in a row; ``EMPTY`` is none."""
    token, expert = _first_repeated(chosen)
    if token is not None:
        raise ValueError(
            f"{name}[{token}] names expert {expert} twice, but the k = {chosen.shape[1]} experts of a "
            f"token must be distinct"
        )


def _first_repeated(topk_experts: Array) -> tuple[int, int] | tuple[None, None]:
    """(token, expert) of the first row that names an expert twice; (None, None) if there is none. ``EMPTY`` is none."""
    ordered = copy_of(topk_experts)
    ordered.sort(axis=1)
    repeated = first((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != EMPTY))
    return (repeated[0], int(ordered[repeated])) if repeated else (None, None)


def check_counts(counts: Sequence[object], num_tokens: int, num_experts: int, k: int) -> tuple[int, ...]:
    """Rows of each expert as E ints in 0..L (an expert's tokens are distinct) that add up to L * k."""
    if len(counts) != num_experts:
        raise ValueError(f"counts has {len(counts)} entries, but there are {num_experts} experts")
    checked = tuple(check_int(f"counts[{e}]", count, 0, num_tokens) for e, count in enumerate(counts))
    if sum(checked) != num_tokens * k:
        raise ValueError(
            f"counts add up to {sum(checked)}, but L * k = {num_tokens} * {k} = {num_tokens * k} rows are routed"
        )
    return checked


def check_kernel_limits(num_experts: int, k: int) -> None:
    """Check E and k against the limits of the dispatch kernels. The numpy specification has no such limits."""
    check_int("num_experts", num_experts, at_least=1, at_most=MAX_EXPERTS)
    check_int("k", k, at_least=1, at_most=MAX_TOP_K)


def check_array(name: str, array: Array, rank: int, dtypes: Collection[str], contiguous: bool = True) -> None:
    """``array`` is an array of this rank, one of these dtypes and, if asked, C-contiguous."""
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise TypeError(f"{name} is {kind(array)}, but it must be an array of {' or '.join(dtypes)}")
    if dtype_of(array) not in dtypes:
        raise TypeError(f"{name} has dtype {array.dtype}, but it must be {' or '.join(dtypes)}")
    if array.ndim != rank:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, but it must have {rank} dimensions")
    if contiguous and not is_contiguous(array):
        raise ValueError(
            f"{name} is not C-contiguous (strides {strides_of(array)}), but kernels take contiguous "
            f"rows only; pass a contiguous copy"
        )


def check_shape(name: str, array: Array, shape: Mapping[str, int | None]) -> None:
    """``array`` has this shape; ``shape`` maps symbols to sizes, such as {"L": 5, "d": 8}; None is any size."""
    sizes = tuple(shape.values())
    if sizes == array.shape:
        return
    fixed = [size if size is None else n for size, n in zip(sizes, array.shape, strict=False)]
    if len(sizes) != array.ndim or sizes != tuple(fixed):
        expected = ", ".join(symbol if size is None else f"{symbol}={size}" for symbol, size in shape.items())
        raise ValueError(f"{name} has shape {tuple(array.shape)}, but it must be ({expected})")


def check_equal(name: str, array: Array, expected: Array) -> None:
    """``array`` holds the very values of ``expected``, which has its shape."""
    if index := first(array != expected):
        raise ValueError(f"{_at(name, index)} is {array[index]}, but it must be {expected[index]}")


def check_finite(name: str, array: Array) -> None:
    """``array`` holds no NaN and no infinity."""
    bad = ~(abs(array) < float("inf"))
    if index := first(bad):
        raise ValueError(f"{_at(name, index)} is {float(array[index])}, but {name} must be finite")


def check_tensor(name: str, array: Array, shape: Mapping[str, int | None], dtypes: Collection[str]) -> None:
    """An activation, weight or gradient: this shape (see check_shape), one of these dtypes, finite; any strides."""
    check_array(name, array, len(shape), dtypes, contiguous=False)
    check_shape(name, array, shape)
    check_finite(name, array)


def check_second_projection(name: str, array: Array | None, gated: bool, owner: str = "the layer") -> None:
    """``array`` (b, w2 or d_b) is there exactly if ``owner``, an activation by name, is gated."""
    if gated and array is None:
        raise ValueError(f"{name} is None, but {owner} is gated: pass {name}")
    if not gated and array is not None:
        raise ValueError(f"{name} is {kind(array)}, but {owner} is not gated: {name} must be None")


def check_offsets(offsets: Array, num_experts: int, num_routed: int) -> None:
    """``offsets`` (E + 1,) begin at 0, never decrease and end at R = ``num_routed``."""
    name = "expert_token_offsets"
    check_array(name, offsets, rank=1, dtypes=("int32",))
    check_shape(name, offsets, {"E + 1": num_experts + 1})
    check_rise(name, offsets, num_routed, "R")


def check_rise(name: str, offsets: Array, last: int, what: str) -> None:
    """Check that the offsets rise from 0 to ``last``, the number of ``what``, without a step down."""
    for index, valid in ((0, 0), (offsets.shape[0] - 1, last)):
        if int(offsets[index]) != valid:
            raise ValueError(f"{name}[{index}] is {int(offsets[index])}, but it must be {valid} ({what} is {last})")
    if (i := first_place(offsets[1:] < offsets[:-1])) is not None:
        raise ValueError(
            f"{name}[{i + 1}] is {int(offsets[i + 1])}, but {name}[{i}] is {int(offsets[i])} and offsets never decrease"
        )


def check_not_negative(name: str, array: Array) -> None:
    """Every element of ``array`` is 0 or more."""
    if index := first(array < 0):
        raise ValueError(f"{_at(name, index)} is {array[index]}, but it must be >= 0")


def check_index(name: str, indices: Array, limit: int, what: str) -> None:
    """Every element of ``indices`` is one of the ``limit`` valid ids of a ``what``."""
    _refuse(name, indices, _outside(indices, limit), limit, what)


def _outside(indices: Array, limit: int) -> Array:
    outside: Array = (indices < 0) | (indices >= limit)
    return outside


def _refuse(name: str, indices: Array, outside: Array, limit: int, what: str) -> None:
    """Say which of the indices is ``outside``, if one is."""
    if index := first(outside):
        valid = f"valid: 0..{limit - 1}" if limit else "none is valid"
        raise ValueError(f"{_at(name, index)} is {int(indices[index])}, but there are only {limit} {what} ({valid})")


def check_dispatch(dispatch: Dispatch) -> None:
    """A Dispatch whose four arrays fit each other and stay inside the tensors that they index.

    That includes what no shape shows: every slot (token, j) has a position of its own, among those of its
    expert, and expert_token_indices holds its token there.
    """
    check_type("dispatch", dispatch, Dispatch)
    _check_form(dispatch)
    check_index("expert_token_indices", dispatch.expert_token_indices, dispatch.L, "tokens")
    check_index("token_expert_indices", dispatch.token_expert_indices, dispatch.E, "experts")
    check_index("token_index_map", dispatch.token_index_map, dispatch.R, "routed rows")
    # With distinct experts in every token, the map is a permutation: two slots at one position would be of the same
    # token and the same expert.
    _check_distinct(dispatch)
    _check_positions(dispatch)
    _check_tokens(dispatch)


def _check_form(dispatch: Dispatch) -> None:
    """Dtypes and shapes, which a Dispatch never changes, and offsets that rise from 0 to R."""
    check_int("dispatch.k", dispatch.k, at_least=1)
    for name, array in dispatch.arrays().items():
        check_array(name, array, rank=1, dtypes=("int32",))
    for name in ("token_expert_indices", "token_index_map"):
        check_shape(name, getattr(dispatch, name), {"R": dispatch.R})
    if dispatch.R % dispatch.k:
        raise ValueError(f"dispatch has R = {dispatch.R} routed rows, but R must be a multiple of k = {dispatch.k}")
    check_int("E, one less than the expert_token_offsets,", dispatch.E, at_least=1)
    check_offsets(dispatch.expert_token_offsets, dispatch.E, dispatch.R)


def _check_distinct(dispatch: Dispatch) -> None:
    token, expert = _first_repeated(dispatch.token_expert_indices.reshape(dispatch.L, dispatch.k))
    if token is not None:
        first, end = token * dispatch.k, (token + 1) * dispatch.k
        raise ValueError(
            f"token_expert_indices[{first}:{end}] names expert {expert} twice, but the experts of a token must be "
            f"distinct"
        )


def _check_positions(dispatch: Dispatch) -> None:
    offsets, experts, positions = dispatch.expert_token_offsets, dispatch.token_expert_indices, dispatch.token_index_map
    slot = first_place((positions < offsets[experts]) | (positions >= offsets[experts + 1]))
    if slot is not None:
        expert = int(experts[slot])
        begin, end = int(offsets[expert]), int(offsets[expert + 1])
        owned = f"has the positions {begin}..{end - 1}" if begin < end else "has none"
        raise ValueError(
            f"token_index_map[{slot}] is {int(positions[slot])}, but the slot goes to expert {expert}, which {owned}"
        )


def _check_tokens(dispatch: Dispatch) -> None:
    found = dispatch.expert_token_indices[dispatch.token_index_map]  # (R,)
    slot = first_place(found != numbers_of(dispatch.token_index_map) // dispatch.k)
    if slot is not None:
        raise ValueError(
            f"token_index_map[{slot}] is {int(dispatch.token_index_map[slot])}, where expert_token_indices holds "
            f"token {int(found[slot])}, but the slot is of token {slot // dispatch.k}"
        )


def check_writable(name: str, array: Array) -> None:
    """``array`` may be written."""
    if not is_writable(array):
        raise ValueError(f"{name} is read-only, but it is written to; pass a writable array")
