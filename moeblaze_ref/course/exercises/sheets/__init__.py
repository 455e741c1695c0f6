"""The exercises: a module for each notebook of the course, and one for a sheet of its own on the papers' errors."""

from moeblaze_ref.course.exercises.exercise import Exercise, Sheet
from moeblaze_ref.course.exercises.sheets import (
    backward,
    checkpoint,
    dispatch,
    gather_gemm,
    hopper,
    megablocks,
    memory_wall,
    papers_errors,
    parallel,
    placement,
    routing,
    training,
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
    Sheet("papers_errors", "Find the papers' errors", papers_errors.EXERCISES),
)
EXERCISES: dict[str, Exercise] = {exercise.name: exercise for sheet in SHEETS for exercise in sheet.exercises}
