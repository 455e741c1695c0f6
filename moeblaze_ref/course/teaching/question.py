"""The questions of the quiz: a choice, or a number that the project computes."""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class _Question:
    """Fields of every question."""

    name: str
    notebook: str  #: file name without its ending
    heading: str  #: of the notebook's section, without its number
    paper: str = ""  #: with its section; empty for a question on the project's own code
    ask: str
    why: str  #: one or two sentences

    @property
    def source(self) -> str:
        """Where the answer stands."""
        return ", ".join(filter(None, [f"notebook {self.notebook[:2]}, *{self.heading}*", self.paper]))


@dataclass(frozen=True, kw_only=True)
class Choice(_Question):
    """A question with one right option."""

    right: str
    wrong: dict[str, str]  #: the other options, each with a sentence that says why it is wrong

    @property
    def options(self) -> list[str]:
        """All options in an order that the question's name decides."""
        mixed = [self.right, *self.wrong]
        random.Random(self.name).shuffle(mixed)
        return mixed


@dataclass(frozen=True, kw_only=True)
class Number(_Question):
    """A question for a number, which the project computes."""

    unit: str
    compute: Callable[[], float]
    computed_by: str  #: the project's function that ``compute`` calls
    slips: dict[float, str]  #: results of frequent mistakes, each with a sentence that says which


Question = Choice | Number
