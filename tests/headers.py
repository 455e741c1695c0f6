"""Reads the table in a kernel file's header, so that tests can hold it against what is counted."""

import math
import re
from typing import NamedTuple

from moeblaze_ref.paths import kernels_dir


class Stated(NamedTuple):
    """What a header says of one kernel."""

    shared: str
    read: str
    written: str


def stated(file):
    """{kernel: Stated} of a file below kernels_cuda/."""
    lines = [line.removeprefix("// ") for line in (kernels_dir() / file).read_text().splitlines()]
    start = next(i for i, line in enumerate(lines) if re.match(r"kernel +grid", line))
    names = re.split(r"\s{2,}", lines[start].strip())
    rows = {}
    for line in lines[start + 1 :]:
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) != len(names):
            break
        row = dict(zip(names, cells, strict=True))
        rows[row["kernel"]] = Stated(row["shared bytes"], row["bytes read"], row["bytes written"])
    return rows


def evaluate(formula, symbols):
    """A formula of the headers: neighbours are multiplied, as in "4 R + 2 s R d (1 + G)"."""
    tokens = re.findall(r"[A-Za-z_]\w*|\d+|[()+,/*-]", formula)
    text = ""
    for before, token in zip([None, *tokens], tokens, strict=False):
        follows_value = before is not None and (before[0].isalnum() or before == ")")
        is_call = before in ("ceil", "min", "max") and token == "("
        if follows_value and not is_call and (token[0].isalnum() or token == "("):
            text += "*"
        text += token
    return eval(text, {"ceil": math.ceil, "min": min, "max": max}, symbols)  # noqa: S307
