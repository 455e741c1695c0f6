"""Checks at the door: every public function states here what it accepts.

Each check raises ValueError or TypeError with the element that is wrong and what is
allowed. Arrays may be numpy or CuPy: only methods that both have are used.
"""

import difflib
import operator

MAX_ROUTED_ROWS = 2**31 - 1
MAX_EXPERTS = 1024
MAX_TOP_K = 32


def check_int(name, value, at_least, at_most=None) -> int:
    """``value`` as an int within [at_least, at_most]."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), but it must be an integer") from None
    if number < at_least or (at_most is not None and number > at_most):
        allowed = f">= {at_least}" if at_most is None else f"{at_least}..{at_most}"
        raise ValueError(f"{name} is {number}, but it must be {allowed}")
    return number


def check_name(kind, name, allowed) -> str:
    """``name`` if it is one of ``allowed``; otherwise an error with the nearest valid name."""
    if name in allowed:
        return name
    near = difflib.get_close_matches(str(name), list(allowed), n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {kind} {name!r}.{hint} Valid: {', '.join(allowed)}")


def check_k(k, num_experts):
    """k experts of num_experts can be chosen."""
    if k > num_experts:
        raise ValueError(f"k is {k}, but there are only {num_experts} experts (k must be 1..{num_experts})")


def check_routed_rows(num_tokens, k):
    """R = L * k fits the int32 index structures."""
    if num_tokens * k > MAX_ROUTED_ROWS:
        raise ValueError(
            f"R = L * k = {num_tokens} * {k} = {num_tokens * k}, but int32 indices allow at most "
            f"2**31 - 1 = {MAX_ROUTED_ROWS} routed rows"
        )


def _first(mask) -> tuple[int, ...]:
    """Index of the first True of a mask, in row-major order."""
    return tuple(int(axis[0]) for axis in mask.nonzero())


def _at(name, index) -> str:
    return f"{name}[{', '.join(map(str, index))}]"


def check_topk_experts(topk_experts, num_experts):
    """``topk_experts`` is (L, k) int32, C-contiguous, ids in range, no expert twice in a row.

    Raises
    ------
    TypeError
        If it is no array or its dtype is not int32.
    ValueError
        If rank, layout, a value, k or R is not allowed.
    """
    check_array("topk_experts", topk_experts, rank=2, dtypes=("int32",))
    check_int("num_experts", num_experts, at_least=1)
    num_tokens, k = topk_experts.shape
    check_int("k", k, at_least=1)
    check_k(k, num_experts)
    check_routed_rows(num_tokens, k)
    if num_tokens == 0:
        return
    if int(topk_experts.min()) < 0 or int(topk_experts.max()) >= num_experts:
        i, j = _first((topk_experts < 0) | (topk_experts >= num_experts))
        raise ValueError(
            f"topk_experts[{i}, {j}] is {int(topk_experts[i, j])}, but there are only {num_experts} "
            f"experts (valid: 0..{num_experts - 1})"
        )
    ordered = topk_experts.copy()
    ordered.sort(axis=1)
    repeated = ordered[:, 1:] == ordered[:, :-1]
    if bool(repeated.any()):
        i, j = _first(repeated)
        raise ValueError(
            f"topk_experts[{i}] names expert {int(ordered[i, j])} twice, but the k = {k} experts of a "
            f"token must be distinct"
        )


def check_kernel_limits(num_experts, k):
    """What the dispatch kernels were built for; the numpy specification has no such limit."""
    check_int("num_experts", num_experts, at_least=1, at_most=MAX_EXPERTS)
    check_int("k", k, at_least=1, at_most=MAX_TOP_K)


def check_array(name, array, rank, dtypes, contiguous=True):
    """``array`` is an array of this rank, one of these dtypes and, if asked, C-contiguous."""
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise TypeError(f"{name} is a {type(array).__name__}, but it must be an array of {' or '.join(dtypes)}")
    if str(array.dtype) not in dtypes:
        raise TypeError(f"{name} has dtype {array.dtype}, but it must be {' or '.join(dtypes)}")
    if array.ndim != rank:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, but it must have {rank} dimensions")
    if contiguous and not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is not C-contiguous (strides {tuple(array.strides)}), but kernels take contiguous "
            f"rows only; pass a contiguous copy"
        )


def check_shape(name, array, shape):
    """``array`` has exactly this shape; ``shape`` maps symbols to sizes, such as {"L": 5, "d": 8}."""
    if tuple(array.shape) != tuple(shape.values()):
        expected = ", ".join(f"{symbol}={size}" for symbol, size in shape.items())
        raise ValueError(f"{name} has shape {tuple(array.shape)}, but it must be ({expected})")


def check_finite(name, array):
    """``array`` holds no NaN and no infinity."""
    bad = ~(abs(array) < float("inf"))
    if array.size and bool(bad.any()):
        index = _first(bad)
        raise ValueError(f"{_at(name, index)} is {float(array[index])}, but {name} must be finite")


def check_writable(name, array):
    """``array`` may be written by a kernel."""
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only, but the kernel writes it; pass a writable array")
