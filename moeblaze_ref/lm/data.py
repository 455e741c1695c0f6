"""English text as bytes, from the help pages that every Python carries, and windows of it."""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

from moeblaze_ref import doors

VALIDATION_EVERY = 10  # of the topics in alphabetical order, the first of every ten
BREAK = re.compile(r"\n\n+")  # between paragraphs


@dataclass(frozen=True, eq=False)
class Corpus:
    """Two texts, uint8 bytes of UTF-8, that share no paragraph.

    Parameters
    ----------
    training, validation : Tensor (bytes,) uint8
    """

    training: Tensor
    validation: Tensor


@functools.cache
def python_help() -> Corpus:
    """Python's help topics (those that ``help("LOOPING")`` and its like print), split by topic.

    Topics quote each other: a paragraph is kept once, and not for training if a validation
    topic has it. The text, about 370 kB, differs a little from one Python version to another.
    """
    names = sorted(topics)
    held_out = names[::VALIDATION_EVERY]
    validation = _paragraphs(topics[name] for name in held_out)
    training = _paragraphs(topics[name] for name in names if name not in held_out)
    seen = set(validation)
    return Corpus(_as_bytes(p for p in training if p not in seen), _as_bytes(validation))


def _paragraphs(texts: Iterable[str]) -> list[str]:
    """The paragraphs of all texts in order, each once."""
    return list(dict.fromkeys(paragraph for text in texts for paragraph in BREAK.split(text.strip("\n"))))


def _as_bytes(paragraphs: Iterable[str]) -> Tensor:
    return torch.frombuffer(bytearray("\n\n".join(paragraphs), "utf-8"), dtype=torch.uint8)


def sample_windows(text: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of a text, and the same windows one byte later: what to read, what to predict.

    Parameters
    ----------
    text : Tensor (bytes,) uint8
    batch, length : int
        Windows, and bytes of each; 0 windows are valid.
    generator : torch.Generator
        Decides where the windows start.

    Returns
    -------
    inputs, targets : Tensor (batch, length) int64

    Raises
    ------
    ValueError
        If a size is out of range or the text is shorter than a window and its next byte.
    """
    doors.check_int("batch", batch, at_least=0)
    doors.check_int("length", length, at_least=1, at_most=len(text) - 1)
    starts = torch.randint(len(text) - length, (batch, 1), generator=generator)  # (batch, 1)
    windows = text[starts + torch.arange(length + 1)].long()  # (batch, length + 1)
    return windows[:, :-1], windows[:, 1:]
