"""Read the launch that a kernel's header states, and evaluate its formulas.

A .cu file has a table in its header, a Numba kernel the lines Grid, Shared bytes and Global bytes
in its docstring. Both write formulas as a paper does, where neighbours are multiplied:

    ceil(L h / THREADS), E        4 R + 2 s R d (1 + G)
"""

import ast
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from moeblaze_ref.core import checks

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "log2": math.log2,
    "min": min,
    "max": max,
}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_TOKEN = re.compile(r"[A-Za-z_]\w*|\d+|[()+,/*-]")
_DOCSTRING_LINES = (
    re.compile(r"^ *Grid +(?P<grid>.+?) blocks? of (?P<block>.+?) threads\b", re.MULTILINE),
    re.compile(r"^ *Shared bytes +(?P<shared_bytes>.+?) *$", re.MULTILINE),
    re.compile(r"^ *Global bytes +reads (?P<bytes_read>.+); writes (?P<bytes_written>.+?) *$", re.MULTILINE),
)


@functools.cache
def table(text: str) -> dict[str, dict[str, str]]:
    """The table in the header of a .cu file.

    Parameters
    ----------
    text : str
        The file. Cells are at least two blanks apart. A row may go on in indented lines below it, as in

            // kernel  grid                     block
            //         bytes read               bytes written
            // d_w     ceil(d / 64), E          THREADS
            //         8 THREADS blocks + 4 R   s E d h

        The table ends at the first row with other than the first row's number of cells.

    Returns
    -------
    dict
        {kernel: {column: cell}}, empty if there is no line "// kernel  grid  ...".
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if _cells(line)[:2] == ["kernel", "grid"]]
    if not starts:
        return {}
    columns, *below = _rows(lines[starts[0] :])
    rows = itertools.takewhile(lambda cells: len(cells) == len(columns), below)
    return {cells[0]: dict(zip(columns, cells, strict=True)) for cells in rows}


def _rows(lines: list[str]) -> list[list[str]]:
    """The cells of each row, those of its indented lines included."""
    rows: list[list[str]] = []
    for line in lines:
        if rows and line.startswith("//  "):
            rows[-1] += _cells(line)
        else:
            rows.append(_cells(line))
    return rows


def _cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line[2:].strip()) if line.startswith("//") else []


def in_docstring(docstring: str | None) -> dict[str, str]:
    """Return the formulas in the docstring of a Numba kernel, by the columns of `table`; empty if it has none."""
    matches = (line.search(docstring or "") for line in _DOCSTRING_LINES)
    stated = [match.groupdict() for match in matches if match]
    return {name.replace("_", " "): formula for part in stated for name, formula in part.items()}


def evaluate(formula: str, symbols: dict[str, int]) -> Fraction | tuple[Fraction, ...]:
    """The value of a formula; several, if there are commas outside of all parentheses.

    Parameters
    ----------
    formula : str
        Numbers, symbols, + - * / // and parentheses, and the functions in ``FUNCTIONS``.
    symbols : dict
        What each symbol stands for.

    Raises
    ------
    ValueError
        If it is no such formula, or a symbol is unknown: the message proposes the nearest one.
    """
    try:
        value: Fraction | tuple[Fraction, ...] = _value(_parsed(formula), symbols)
        return value
    except ZeroDivisionError:
        raise ValueError(f"cannot read the formula {formula!r}: it divides by zero") from None
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"cannot read the formula {formula!r}: {error.args[0]}") from None
    except ValueError as error:
        raise ValueError(f"cannot read the formula {formula!r}: {error}") from None


def number(formula: str, symbols: dict[str, int]) -> Fraction:
    """The value of a formula that has one; errors as in `evaluate`."""
    values = _values(formula, symbols)
    if len(values) != 1:
        raise ValueError(f"the formula {formula!r} has {len(values)} values, but it must have one")
    return values[0]


def sizes(formula: str, symbols: dict[str, int]) -> tuple[int, ...]:
    """The value of a formula as whole sizes, such as those of a grid; fractions are cut off, as in C."""
    return tuple(math.floor(value) for value in _values(formula, symbols))


def _values(formula: str, symbols: dict[str, int]) -> tuple[Fraction, ...]:
    values = evaluate(formula, symbols)
    return values if isinstance(values, tuple) else (values,)


@functools.cache
def _parsed(formula: str) -> ast.expr:
    return ast.parse(_with_products(formula), mode="eval").body


def _with_products(formula: str) -> str:
    """The formula with a * between neighbours."""
    strange = _TOKEN.sub("", formula).strip()
    if strange:
        raise ValueError(f"it has {strange[0]!r}")
    tokens, text = _TOKEN.findall(formula), ""
    for before, token in zip([None, *tokens], tokens, strict=False):
        follows_value = before is not None and (before[-1].isalnum() or before[-1] == "_" or before == ")")
        is_call = before in FUNCTIONS and token == "("
        if follows_value and not is_call and (token[0].isalnum() or token[0] in "_("):
            text += "*"
        text += token
    return text


def _value(node: ast.expr, symbols: dict[str, int]) -> Any:
    """Return a Fraction, or a tuple of them; arithmetic with a tuple raises TypeError."""
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.Name():
            return Fraction(symbols[checks.check_name("symbol", node.id, symbols)])
        case ast.Tuple():
            return tuple(_value(part, symbols) for part in node.elts)
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, symbols)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_value(node.left, symbols), _value(node.right, symbols))
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            function = FUNCTIONS[checks.check_name("function", name, FUNCTIONS)]
            return Fraction(function(*(_value(argument, symbols) for argument in node.args)))
    raise ValueError(f"it may have numbers, symbols, + - * / // and {', '.join(FUNCTIONS)} only")
