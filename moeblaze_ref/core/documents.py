"""Documents with blocks that are written from results, between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moeblaze_ref.core import source_hashes

NOTHING = "*Not measured yet.*"

_BLOCK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def fill(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """The document with every block written anew.

    Parameters
    ----------
    text : str
    blocks : mapping
        What each block holds, by its name; ``NOTHING`` stands for an empty one.

    Raises
    ------
    ValueError
        If there is no block of that name.
    """

    def written(block: re.Match[str]) -> str:
        start, name, end = block.groups()
        if name not in blocks:
            raise ValueError(f"unknown block {name!r}. Valid: {', '.join(blocks)}")
        return f"{start}{blocks[name]() or NOTHING}\n{end}"

    return _BLOCK.sub(written, text)


def device(found: Mapping[str, Any]) -> str:
    """The name of the device that a result was measured on, without its driver and its memory."""
    name: str = found["device"]
    return name.partition(",")[0]


def devices(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The device of each result, and its commit where another one has the same device."""
    names = [device(one) for one in found]
    commits = [
        f", {one['commit'][:7]}" if names.count(name) > 1 else "" for name, one in zip(names, found, strict=True)
    ]
    return [name + commit for name, commit in zip(names, commits, strict=True)]


def place(found: Mapping[str, Any]) -> list[str]:
    """Where a result was measured, a line of a list each: of what `provenance.environment` says.

    Behind the commit stands which parts of the code have changed since.
    """
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    commit = found["commit"] + source_hashes.mark(found)
    return [f"- device: {found['device']}", f"- versions: {versions}", f"- commit: {commit}"]


def picture_of(record: Path) -> Path:
    """Return the path of a record's picture, in the documents' folder of images."""
    return record.parents[1] / "images" / f"{record.stem}.png"


def table(names: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table in Markdown whose first columns are words, and the others numbers."""
    rules = ["---" if number < words else "---:" for number in range(len(names))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, rules, *rows))
