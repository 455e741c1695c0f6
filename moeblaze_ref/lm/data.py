"""Text as bytes: Python's own, or a folder of one's own; its two parts, and windows of it."""

import functools
import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moeblaze_ref.core import checks

HELP = Path(__file__).with_name("python_help.txt")  # Python 3.11.7's topics, each after a form feed and its name
VALIDATION_EVERY = 10  # of the topics in alphabetical order, the first of every ten; of files, a tenth
# In the standard library's folder, but not in every installation's, or no text to learn from: installed packages,
# what distributions package separately, tables of characters, and the help topics, which are read as such.
LEFT_OUT = {
    *("site-packages", "dist-packages", "test", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils"),
    *("ensurepip", "encodings", "pydoc_data"),
}
BUILT = ("_sysconfigdata", "config-")  # a file and a folder that the making of Python writes
BREAK = re.compile(r"\n\n+")  # between paragraphs


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training text and validation text, uint8 bytes of UTF-8.

    Parameters
    ----------
    training, validation : Tensor (bytes,) uint8
    """

    training: Tensor
    validation: Tensor

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for the same two texts, on any machine: 16 hexadecimal digits of SHA-256."""
        parts = (hashlib.sha256(part.numpy().data).digest() for part in (self.training, self.validation))
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


@functools.cache
def python_help() -> Corpus:
    """Python's help topics (those that ``help("LOOPING")`` and its like print), split by topic.

    The two parts share no paragraph. Topics quote each other: a paragraph is kept once, and not for training if a
    validation topic has it. The text, about 370 kB, is the same with every Python: the package carries it.
    """
    topics = dict(topic.split("\n", 1) for topic in HELP.read_text("utf-8").split("\f")[1:])
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


@functools.cache
def standard_library() -> Corpus:
    """Python's help topics and the source files of its standard library, split by topic and by file.

    About 8 MB; it differs from one Python version to another, as `Corpus.fingerprint` shows.
    """
    prose, code = python_help(), _library_sources()
    return Corpus(torch.cat([prose.training, code.training]), torch.cat([prose.validation, code.validation]))


@functools.cache
def _library_sources() -> Corpus:
    root = _library_folder()
    return _split_by_file({path.relative_to(root).as_posix(): path.read_bytes() for path in _sources(root)})


def _library_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _sources(folder: Path) -> Iterator[Path]:
    """The .py files of a folder, without what is `LEFT_OUT` and without the records of how Python was built."""
    for path in folder.iterdir():
        if path.name.startswith(BUILT):
            continue
        if path.is_dir() and path.name not in LEFT_OUT:
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def held_out_kinds() -> dict[str, Tensor]:
    """Three kinds of text of which `standard_library` has nothing in its training part, each (bytes,) uint8.

    Prose is the help topics of the validation part, code its source files, tables the character maps of ``encodings``.
    """
    files = [path.read_bytes() for path in sorted((_library_folder() / "encodings").glob("*.py"))]
    tables = b"\n".join(content for content in files if b"decoding_table" in content)
    return {
        "prose": python_help().validation,
        "code": _library_sources().validation,
        "tables": torch.frombuffer(bytearray(tables), dtype=torch.uint8),
    }


def folder(path: Path) -> Corpus:
    """Read the text files of a folder, recursively, split by file; ignores names that begin with a dot.

    Raises
    ------
    OSError
        If a file or a folder in it may not be read.
    ValueError
        If it is no folder, a file is no UTF-8 text, or fewer than two files hold text: one is held out.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder, but the data must be one, of text files")
    texts = {found.relative_to(path).as_posix(): _read_text(found) for found in sorted(_visible_files(path))}
    distinct = len({text for text in texts.values() if text})
    if distinct < 2:
        held = "no text" if distinct == 0 else "one text file only"
        raise ValueError(f"{path} holds {held}, but at least two different ones are needed: one is for validation")
    return _split_by_file(texts)


def _visible_files(path: Path) -> Iterator[Path]:
    for found in path.iterdir():  # a glob would pass over a folder that may not be read
        if found.name.startswith("."):
            continue
        if found.is_dir() and not found.is_symlink():  # a link may lead back up
            yield from _visible_files(found)
        elif found.is_file():
            yield found


def _read_text(path: Path) -> bytes:
    """The bytes of a file that are text."""
    content = path.read_bytes()
    try:
        content.decode()
        at = content.find(b"\0")
    except UnicodeDecodeError as error:
        at = error.start
    if at >= 0:
        raise ValueError(
            f"{path} is not text: byte {at} is {content[at]:#04x}, but the data must be UTF-8 without zeros"
        )
    return content


def _split_by_file(texts: dict[str, bytes]) -> Corpus:
    """A tenth of the files, those whose names have the lowest hashes, for validation.

    No file is in both parts, and neither is a copy of it: of files with the same content the first one stays.
    """
    names = {content: name for name, content in sorted(texts.items(), reverse=True) if content}
    shuffled = sorted(names, key=lambda content: hashlib.sha256(names[content].encode()).digest())
    held_out = max(1, len(shuffled) // VALIDATION_EVERY)
    training, validation = (b"\n\n".join(part) for part in (shuffled[held_out:], shuffled[:held_out]))
    return Corpus(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (training, validation)))


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
    checks.check_int("batch", batch, at_least=0)
    checks.check_int("length", length, at_least=1, at_most=len(text) - 1)
    starts = torch.randint(len(text) - length, (batch, 1), generator=generator)  # (batch, 1)
    windows = text[starts + torch.arange(length + 1)].long()  # (batch, length + 1)
    return windows[:, :-1], windows[:, 1:]
