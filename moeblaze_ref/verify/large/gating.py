"""Large cases of the gating kernels."""

import numpy as np

from moeblaze_ref.backends.numpy_ref import gating as reference
from moeblaze_ref.backends.raw_cuda import gating
from moeblaze_ref.runtime.sparse import ZEROS, Launch, Parts
from moeblaze_ref.verify.large.cases import ALL, Case, exactly, last_block, values

L, E, k = 2**22 + 4, 1024, 2
FEW = 4  # tokens of the last block
SHAPE = f"L={L}, E={E}, k={k}"
COUNTED = 2**30 + 4  # tokens: the counts (L / THREADS, E) are more than 2**32
# A block that walks a column of them touches a page for each tile: fewer tokens, and more experts than dispatch takes.
SHARED, MANY = 2**19 + 2**11, 2**20
WARPS = gating.fused_threads(E) // gating.WARP  # of a block of fused.cu
STRIDE = gating.FUSED_BLOCKS * WARPS  # tokens that its grid takes at a time
LAST = np.s_[-FEW:]
D_LOSSES = (L / E, float(L))  # of order 1 for each token


def cases() -> list[Case]:
    """Every kernel whose indices can pass 2**31; the others see tokens, experts or blocks alone."""
    found = [_choose_experts(), _expert_counts(), _expert_shares()]
    for version in gating.VERSIONS:
        found += [_softmax_top_k(version), _d_logits(version), _load_balancing_terms(version), _router_z_terms(version)]
    return found


def _case(version: str, launch: Launch, call, passes: str = f"L E: {SHAPE}") -> Case:
    return Case("gating", version, passes, "float32", launch, call)


def _chosen() -> tuple[np.ndarray, np.ndarray]:
    """Logits of the last tokens, and their choices."""
    logits = values(FEW, E)
    return logits, reference.top_k(logits, k)


def _softmax_top_k(version: str) -> Case:
    logits, chosen = _chosen()
    probs, _, gates = reference.forward(exactly(logits), k)
    expected = {"probs": [(LAST, probs)], "topk_experts": [(LAST, chosen)], "gates": [(LAST, gates)]}
    launch = Launch("softmax_top_k", last_block, {"logits": [(LAST, logits)]}, expected)
    logits_of = lambda executor: executor.empty((L, E), "float32")
    call = lambda executor: gating.forward.unchecked(logits_of(executor), k, executor=executor, version=version)
    return _case(version, launch, call)


def _choose_experts() -> Case:
    """The last block's warps take many tokens of zeros, which choose the first experts, and one beyond 2**31 each."""
    passes = 2**31 // (E * STRIDE)  # over tokens of zeros
    tokens = (passes + 1) * STRIDE
    logits, last = values(WARPS, E), np.s_[-WARPS:]
    probs, chosen, gates = reference.forward(exactly(logits), k)
    counts = np.bincount(chosen.ravel(), minlength=E) + passes * WARPS * (np.arange(E) < k)
    before = [np.s_[first : tokens - WARPS : STRIDE] for first in range(STRIDE - WARPS, STRIDE)]
    given = {"logits": [*((rows, ZEROS) for rows in before), (last, logits)]}
    expected: dict[str, Parts] = {
        "topk_experts": [*((rows, np.arange(k)) for rows in before), (last, chosen)],
        "gates": [*((rows, 1 / E) for rows in before), (last, gates)],
        "counts": [(np.s_[-1:], counts)],
        "prob_sums": [(np.s_[-1:], probs.sum(axis=0) + passes * WARPS / E)],
    }
    logits_of = lambda executor: executor.empty((tokens, E), "float32")
    call = lambda executor: gating.forward_with_losses.unchecked(logits_of(executor), k, executor=executor)
    launch = Launch("choose_experts", last_block, given, expected)
    return Case("gating", "fused", f"L E: L={tokens}, E={E}, k={k}", "float32", launch, call)


def _shares(chosen: np.ndarray) -> np.ndarray:
    return (np.bincount(chosen.ravel(), minlength=E) / chosen.size).astype(np.float32)


def _d_logits(version: str) -> Case:
    logits, chosen = _chosen()
    d_gates, shares = values(FEW, k), _shares(chosen)
    d_losses = (loss * FEW / L for loss in D_LOSSES)  # the reference means over these tokens alone
    d_logits = reference.backward(exactly(d_gates), exactly(logits), chosen, False, *d_losses)
    given = {"d_gates": [(LAST, d_gates)], "logits": [(LAST, logits)], "topk_experts": [(LAST, chosen)]}
    launch = Launch("d_logits", last_block, given | {"shares": [(ALL, shares)]}, {"d_logits": [(LAST, d_logits)]})

    def call(executor):
        d_gates, logits = executor.empty((L, k), "float32"), executor.empty((L, E), "float32")
        options = {"shares": executor.empty((E,), "float32"), "executor": executor, "version": version}
        gating.backward.unchecked(d_gates, logits, executor.empty((L, k), "int32"), False, *D_LOSSES, **options)

    return _case(version, launch, call)


def _load_balancing_terms(version: str) -> Case:
    probs, shares = np.abs(values(FEW, E)), np.abs(values(E))
    terms = exactly(probs) @ exactly(shares)
    given = {"probs": [(LAST, probs)], "shares": [(ALL, shares)]}
    launch = Launch("load_balancing_terms", last_block, given, {"terms": [(np.s_[-1:], terms.sum())]})

    def call(executor):
        probs, topk_experts = executor.empty((L, E), "float32"), executor.empty((L, k), "int32")
        gating.load_balancing_loss.unchecked(probs, topk_experts, executor.empty((E,), "float32"), executor, version)

    return _case(version, launch, call)


def _router_z_terms(version: str) -> Case:
    logits = values(FEW, E)
    expected = {"terms": [(np.s_[-1:], FEW * reference.router_z_loss(exactly(logits)))]}
    launch = Launch("router_z_terms", last_block, {"logits": [(LAST, logits)]}, expected)
    call = lambda executor: gating.router_z_loss.unchecked(executor.empty((L, E), "float32"), executor, version)
    return _case(version, launch, call)


def _expert_counts() -> Case:
    experts = np.array([3, E - 1, 3, 0])
    given = {"topk_experts": [(LAST, experts[:, None])]}
    launch = Launch("expert_counts", last_block, given, {"counts": [(np.s_[-1:], np.bincount(experts, minlength=E))]})
    return _sums_case(launch, COUNTED, E)


def _expert_shares() -> Case:
    """The last expert's block reads its count of every tile: zeros, but for a few."""
    given = {"counts": [(ALL, ZEROS), (np.s_[-FEW:, -1:], 256)]}
    launch = Launch("expert_shares", last_block, given, {"shares": [(np.s_[-1:], FEW * 256 / SHARED)]})
    return _sums_case(launch, SHARED, MANY)


def _sums_case(launch: Launch, tokens: int, experts: int) -> Case:
    call = lambda executor: gating.expert_shares(executor.empty((tokens, 1), "int32"), experts, executor)
    return _case("sums", launch, call, f"L E / 256: L={tokens}, E={experts}, k=1")
