"""What the tests of several stages share: a strategy of routings, and the layer's shapes."""

from typing import NamedTuple

from hypothesis import strategies as st

from moeblaze_ref.cases import ROUTINGS, Case, make_case, random_topk


@st.composite
def routings(draw, max_tokens=600, max_experts=40):
    """Hypothesis strategy: (topk_experts, num_experts), from no tokens to more than two scan tiles."""
    num_experts = draw(st.integers(1, max_experts))
    k = draw(st.integers(1, num_experts))
    num_tokens = draw(st.integers(0, max_tokens))
    routing, seed = draw(st.sampled_from(ROUTINGS)), draw(st.integers(0, 2**32 - 1))
    return random_topk(num_tokens, num_experts, k, routing, seed), num_experts


class Shape(NamedTuple):
    """One layer's sizes and the routing that its router is biased to."""

    L: int
    d: int
    h: int
    E: int
    k: int
    routing: str = "uniform"

    def __str__(self):
        return f"L{self.L}-d{self.d}-h{self.h}-E{self.E}-k{self.k}-{self.routing}"

    def case(self, activation="swiglu", seed=0) -> Case:
        """Random float64 numbers of this shape."""
        return make_case(*self, activation=activation, seed=seed)

    def topk_experts(self):
        """A random choice (L, k) of the same routing, for the stages that need no router."""
        return random_topk(self.L, self.E, self.k, self.routing)


RAGGED = Shape(37, 12, 20, 5, 3)  # no tile divides 37 tokens or 111 rows
SHAPES = (
    RAGGED,
    Shape(1, 8, 16, 4, 2),
    Shape(33, 8, 16, 4, 1),
    Shape(29, 8, 12, 4, 4),  # k = E
    Shape(19, 8, 12, 1, 1),
    Shape(53, 8, 16, 6, 1, "hot"),  # one expert gets every token
    Shape(53, 8, 16, 6, 2, "hot"),
    Shape(41, 8, 16, 8, 2, "empty"),
    Shape(131, 16, 8, 16, 4, "zipf"),
    Shape(300, 8, 4, 3, 2),  # two scan tiles
)
