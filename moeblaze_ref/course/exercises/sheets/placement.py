"""Exercises of notebook 09: which GPU holds which expert."""

import numpy as np

from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, Prediction
from moeblaze_ref.placement import simulate, trace
from moeblaze_ref.placement.maps import Placement

PATHS = [[0, 0], [0, 0], [0, 1], [1, 1], [1, 1], [1, 0], [2, 2], [2, 3], [3, 3], [0, 1]]


def _crossings(paths, gpu_of_expert):
    profile = trace.profile(RoutingTrace(np.array(paths, np.int16)[:, :, None], len(gpu_of_expert[0])))
    shares = Placement(np.array(gpu_of_expert, np.int32), 2).shares()
    moved = simulate.transitions(profile, shares)[0]
    return {
        "fullest": int(simulate.loads(profile, shares)[0].max()),
        "crossing": int(moved.sum() - np.trace(moved)),
    }


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="crossings",
        title="Load and traffic of a map",
        difficulty=1,
        question="""There are two layers with four experts each, and one expert a token. `paths[i]` names the experts
            of token `i` in the first and in the second layer. `gpu_of_expert[layer][e]` is the GPU of expert `e`. How
            many tokens does the fuller GPU have in the first layer? How many tokens change the GPU between the
            layers?""",
        given={"paths": PATHS, "gpu_of_expert": [[0, 1, 0, 1], [0, 1, 0, 1]]},
        steps=("first, second = gpu_of_expert",),
        asked={
            "fullest": Asked("tokens", "max(sum(first[t[0]] == g for t in paths) for g in (0, 1))"),
            "crossing": Asked("tokens", "sum(first[t[0]] != second[t[1]] for t in paths)"),
        },
        truth=_crossings,
        computed_by="moeblaze_ref.placement.simulate",
        hints=(
            "Experts 0 and 2 are on GPU 0, experts 1 and 3 on GPU 1, in both layers. Go through the ten tokens.",
            """An even expert is on GPU 0, an odd one on GPU 1. Count the tokens whose first expert is even, and
            those with one even and one odd expert.""",
        ),
        why="""Both numbers cost time, in different places: the fullest GPU computes longest, and every crossing goes
            over a link.""",
    ),
    Prediction(
        name="better-map",
        title="A better map",
        difficulty=1,
        question="""The same tokens have another map: in both layers experts 0 and 1 are on GPU 0, and experts 2 and 3
            on GPU 1. How many tokens does the fuller GPU have in the first layer? How many change the GPU between the
            layers?""",
        given={"paths": PATHS, "gpu_of_expert": [[0, 0, 1, 1], [0, 0, 1, 1]]},
        asked={
            "fullest": Asked("tokens", "sum(t[0] < 2 for t in paths)"),
            "crossing": Asked("tokens", "sum((t[0] < 2) != (t[1] < 2) for t in paths)"),
        },
        truth=_crossings,
        computed_by="moeblaze_ref.placement.simulate",
        hints=(
            "Experts 0 and 1 are on GPU 0 now. Does any token leave the pair it began with?",
            """Write the GPU of both experts beside each token. Count those on GPU 0 in the first layer, and
            those where the two differ.""",
        ),
        why="""The crossings are gone, and the fuller GPU has more to do. The links and the experts decide which map is
            cheaper. The integer programs of the notebook weigh load against crossings.""",
    ),
)
