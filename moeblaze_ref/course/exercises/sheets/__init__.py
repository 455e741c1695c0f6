"""The exercises: a module for each notebook of the course, and one for each sheet of its own."""

from moeblaze_ref.course.exercises.exercise import Exercise, Sheet
from moeblaze_ref.course.exercises.sheets import (
    backward,
    capstone,
    checkpoint,
    dispatch,
    gather_gemm,
    hopper,
    megablocks,
    memory_wall,
    papers_errors,
    parallel,
    placement,
    right_layer,
    routing,
    torch_projects,
    training,
    whole,
)

SHEETS = (
    Sheet("00_memory_wall", "The memory wall", memory_wall.EXERCISES),
    Sheet("01_routing", "Routing", routing.EXERCISES),
    Sheet("02_dispatch_without_sorting", "Dispatch without sorting", dispatch.EXERCISES),
    Sheet("03_gather_gemm_swiglu", "Gather, multiply, activate", gather_gemm.EXERCISES),
    Sheet("04_backward_by_hand", "The backward by hand", backward.EXERCISES),
    Sheet("05_smart_checkpoint", "Smart checkpoints", checkpoint.EXERCISES),
    Sheet("06_hopper", "Hopper, idea by idea", hopper.EXERCISES),
    Sheet("07_megablocks", "Drop, pad or block-sparse", megablocks.EXERCISES),
    Sheet("08_train_a_moe_lm", "Train a Mixture-of-Experts language model", training.EXERCISES),
    Sheet("09_expert_placement", "Which GPU holds which expert", placement.EXERCISES),
    Sheet("10_expert_parallel", "Experts on several GPUs", parallel.EXERCISES),
    Sheet("11_whole_wall", "The whole wall", whole.EXERCISES),
    Sheet("12_is_your_layer_right", "Is your MoE layer right?", right_layer.EXERCISES),
    Sheet(
        "papers_errors",
        "Find the papers' errors",
        papers_errors.EXERCISES,
        "These exercises are for readers of the [paper map](../../docs/paper_map.md).",
    ),
    Sheet(
        "torch_projects",
        "Write it in torch",
        torch_projects.EXERCISES,
        "These exercises are for readers of notebooks [0](../00_memory_wall.ipynb), [4](../04_backward_by_hand.ipynb) "
        "and [5](../05_smart_checkpoint.ipynb).",
    ),
    Sheet(
        "capstone",
        "The capstone",
        capstone.EXERCISES,
        "This exercise is for readers of notebook [3](../03_gather_gemm_swiglu.ipynb) who have solved "
        "[its sheet](03_gather_gemm_swiglu.ipynb).",
    ),
)
EXERCISES: dict[str, Exercise] = {exercise.name: exercise for sheet in SHEETS for exercise in sheet.exercises}
