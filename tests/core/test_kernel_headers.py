"""The tables in the headers of kernel files."""

import pytest

from moeblaze_ref.core import kernel_headers

ONE_LINE = """// expert_up, in one table.
//
// kernel  grid                 block    bytes read  bytes written
// up      ceil(L h / 64), E    THREADS  8 R         s R h
// d_w     E                    32       0           s E d h
// The first word of this paragraph is not a kernel.
"""
SEVERAL_LINES = """// expert_up, in one table.
//
// kernel  grid                 block
//         bytes read
//         bytes written
// up      ceil(L h / 64), E    THREADS
//         8 R
//         s R h
// d_w     E                    32
//         0
//         s E d h
// The first word of this paragraph is not a kernel.
"""
UP = {"kernel": "up", "grid": "ceil(L h / 64), E", "block": "THREADS", "bytes read": "8 R", "bytes written": "s R h"}
D_W = {"kernel": "d_w", "grid": "E", "block": "32", "bytes read": "0", "bytes written": "s E d h"}


@pytest.mark.parametrize("text", [ONE_LINE, SEVERAL_LINES], ids=["one line", "several lines"])
def test_a_row_may_go_on_in_indented_lines(text):
    assert kernel_headers.table(text) == {"up": UP, "d_w": D_W}


def test_the_table_ends_at_a_row_without_all_cells():
    assert kernel_headers.table(SEVERAL_LINES.replace("//         s E d h\n", "")) == {"up": UP}


def test_a_file_may_have_no_table():
    assert kernel_headers.table("// prose\nint x;\n") == {}


@pytest.mark.parametrize(
    ("formula", "value"), [("8 R", 48), ("4 L E + 2 R (k + 1)", 96), ("4 E + 4", 24), ("8 R / 4", 12)]
)
def test_a_space_multiplies(formula, value):
    assert kernel_headers.number(formula, {"L": 3, "E": 5, "R": 6, "k": 2}) == value


def test_a_formula_may_use_its_symbols_only():
    with pytest.raises(ValueError, match="unknown symbol 'exit'"):
        kernel_headers.number("exit (L)", {"L": 3})
