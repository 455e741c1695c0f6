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

SHEETS: tuple[Sheet, ...] = tuple(
    module.SHEET
    for module in (
        memory_wall,
        routing,
        dispatch,
        gather_gemm,
        backward,
        checkpoint,
        hopper,
        megablocks,
        training,
        placement,
        parallel,
        papers_errors,
    )
)
EXERCISES: dict[str, Exercise] = {exercise.name: exercise for sheet in SHEETS for exercise in sheet.exercises}
