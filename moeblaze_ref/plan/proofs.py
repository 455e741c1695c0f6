"""Which bytes of a plan are compared with torch by a test, and which are formulas that none checks.

Each rule names its tests, of tests/plan or tests/gpu.
"""

from moeblaze_ref.plan import recipes
from moeblaze_ref.plan.attention import Attention, SinkAttention
from moeblaze_ref.plan.experts import FORMULAS, MoEBlock
from moeblaze_ref.plan.run import BUFFERS, MASTER, STATES, WEIGHTS, Run
from moeblaze_ref.plan.timeline import GRADIENTS, PASSING

COMPARED, FORMULA = "compared with torch", "formula, not checked"


def proof(run: Run, kind: str) -> str:
    """Say how bytes of a kind are known: ``COMPARED`` or ``FORMULA``.

    Parameters
    ----------
    run : Run
    kind : str
        A kind of bytes of a `timeline.Instant`: "weights", "passing tensors", the kind of a part, ...
    """
    rule = RULES.get(kind)
    compared = _kept(run, kind) if rule is None else rule(run)
    return COMPARED if compared else FORMULA


def _buffers(run: Run) -> bool:
    """Return False: no test has the buffers of a communication library."""
    return False


def _passing(run: Run) -> bool:
    """Whole steps on one GPU, whose peaks are compared.

    Tests: test_the_peaks_of_a_step_are_within_one_percent, test_checkpointed_layers_keep_what_torch_has_alive,
    test_a_plan_is_what_the_gpu_has (our layers too).
    """
    ours = all(block.system == "moeblaze" and run.step.on_gpu for block in _blocks(run))
    parallel = run.parallel
    alone = parallel.gpus == 1 and parallel.zero == 0 and parallel.micro_batches == 1
    return alone and ours and run.recipe == "bf16" and not run.offload and not _is_masked_on_gpu(run)


def _weights(run: Run) -> bool:
    """Weights and gradients on each rank, as torch divides them.

    FSDP2 has no bfloat16 weights beside float32 ones: of such a recipe the sum alone is compared. Routers' biases of
    the choice, which nothing trains, are not compared. ZeRO 1 divides states as ZeRO 2 does; torch's own gives whole
    tensors to ranks, so only the sum is compared with it.
    Tests: test_one_gpu_holds_what_is_planned, test_zero_1_divides_the_same_states_as_torch,
    test_zero_2_divides_gradients_and_states_as_fsdp1_does, test_zero_3_is_fsdp2_on_every_rank,
    test_fsdp2_holds_what_zero_3_plans, test_each_stage_holds_what_torch_holds, test_a_rank_holds_what_is_planned,
    test_ranks_with_some_of_the_experts_hold_what_is_planned.
    """
    parallel = run.parallel
    if parallel.zero == 0:
        return _are_heads_divided(run) and _are_experts_divided(run)
    has_copy = recipes.RECIPES[run.recipe].master
    return parallel.tensor == parallel.expert == 1 and not (parallel.zero == 3 and has_copy)


def _optimizer(run: Run) -> bool:
    """AdamW's states and the float32 weights, where weights are compared; no test runs Muon or AdamW of 8 bits.

    Tests: those of `_weights`, and test_a_float32_copy_and_its_states_are_those_of_torch.
    """
    return recipes.RECIPES[run.recipe].optimizer == "AdamW" and _weights(run)


RULES = {
    BUFFERS: _buffers,
    PASSING: _passing,
    WEIGHTS: _weights,
    GRADIENTS: _weights,
    MASTER: _optimizer,
    STATES: _optimizer,
}


def _kept(run: Run, kind: str) -> bool:
    """Tensors that the parts of a kind keep: in bfloat16 on a CPU and a GPU, in float32 on a CPU.

    Tests: test_a_whole_model_keeps_what_autograd_keeps, test_a_model_in_float32_keeps_what_autograd_keeps,
    test_attention_step_by_step_keeps_all_probabilities, test_a_plan_is_what_the_gpu_has,
    test_each_stage_holds_what_torch_holds, test_a_rank_holds_what_is_planned; for checkpoints
    test_checkpointed_layers_keep_what_torch_has_alive, without tensor parallelism.
    """
    if "activations" in run.offload or (recipes.RECIPES[run.recipe].dtype == "float32" and run.step.on_gpu):
        return False
    if run.checkpoint != "none":
        return run.parallel.tensor == 1 and _are_experts_kept(run) and not _is_masked_on_gpu(run)
    if kind == "experts":
        return _are_experts_kept(run)
    return kind != "attention" or (_are_heads_divided(run) and not _is_masked_on_gpu(run))


def _are_experts_kept(run: Run) -> bool:
    """Experts in plain torch, and systems whose layers are there.

    Tests: those of `_kept`, test_two_layers_of_qwen3_with_ours_keep_what_is_counted,
    test_ranks_with_some_of_the_experts_hold_what_is_planned. Tensor parallelism is compared without our layers.
    """
    blocks = _blocks(run)
    formulas = any(block.system in FORMULAS for block in blocks)
    return _are_experts_divided(run) and not formulas and not (blocks and run.parallel.tensor > 1)


def _are_experts_divided(run: Run) -> bool:
    """Experts on one GPU, or our own layer on several: transformers has none.

    Test: test_ranks_with_some_of_the_experts_hold_what_is_planned.
    """
    return run.parallel.expert == 1 or (bool(_blocks(run)) and run.parallel.tensor == 1)


def _are_heads_divided(run: Run) -> bool:
    """Each GPU has whole heads of its own: torch neither copies heads of keys nor divides a norm of all heads.

    Test: test_a_rank_holds_what_is_planned.
    """
    tensor = run.parallel.tensor
    attentions = [part for part in run.model.parts if isinstance(part, Attention | SinkAttention)]
    shared = any(part.kv_heads % tensor for part in attentions)
    norms = [norm.width == part.width for part in attentions if isinstance(part, Attention) for norm in part.norms]
    return tensor == 1 or (all(norms) and not shared)


def _is_masked_on_gpu(run: Run) -> bool:
    """Llama 4 beyond its chunk, on a GPU: test_a_sequence_longer_than_a_chunk_has_a_mask runs on a CPU."""
    chunks = [part.chunk for part in run.model.parts if isinstance(part, Attention) and part.chunk is not None]
    return run.step.on_gpu and any(run.step.sequence >= chunk for chunk in chunks)


def _blocks(run: Run) -> list[MoEBlock]:
    return [part for part in run.model.parts if isinstance(part, MoEBlock)]
