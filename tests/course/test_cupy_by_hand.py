"""The launch by hand: the page's code, the notebook's and what both print, with a pretended CuPy and without a GPU."""

import json
import re
import sys

import nbformat
import pytest
from hand_launch import pretended_cupy
from helpers import unmarked

from moeblaze_ref.backends import registry
from moeblaze_ref.core.paths import ROOT
from moeblaze_ref.course.site import cupy_by_hand
from moeblaze_ref.verify.cases import relative_error

PAGE = cupy_by_hand.DOCUMENT.read_text()
IMPORTS, INPUTS, LAUNCH = cupy_by_hand.blocks(PAGE)
NOTEBOOK = ROOT / "notebooks" / "03_gather_gemm_swiglu.ipynb"


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU with a pretended CuPy."""
    monkeypatch.setattr(registry, "cuda_device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "cupy", pretended_cupy())


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(registry, "cuda_device_count", lambda: 0)


def launched(launch=LAUNCH):
    """The names that the page's code defines."""
    names = {}
    exec(IMPORTS + INPUTS + launch, names)
    return names


def test_the_launch_gives_what_numpy_gives(gpu, capsys):
    names = launched()
    assert names["by_cupy"].shape == (300, 16) and relative_error(names["by_cupy"], names["by_numpy"]) < 1e-6
    *values, error = capsys.readouterr().out.splitlines()
    assert len({line[5:] for line in values}) == 1 and len(values) == 3  # numpy, torch and cupy print the same
    assert error.startswith("relative error: ") and 0 <= float(error.split()[-1]) < 1e-6


MISTAKES = [  # (in the launch, planted)
    ("(y, gates, positions)", "(gates, y, positions)"),
    ("np.int32(size) for", "size for"),
    ("np.int32(size) for", "np.int64(size) for"),
    ("(L, d, k)]", "(L, k, d)]"),
    ("[cupy.asarray(array) for array in", "[array for array in"),
    ("-(-L * d // threads)", "L * d // threads"),
    ("(threads,), (", "(threads - 1,), ("),
    ("THREADS={threads}", "THREADS={threads // 2}"),
    ("-DScalar=float", "-DScalar=__half"),
    ("np.float32)", "np.float64)"),
    ('"combine")\n', '"d_y")\n'),
    ('backend="nvrtc"', 'backend="nvcc"'),
]


@pytest.mark.parametrize(("right", "wrong"), MISTAKES, ids=[wrong for _, wrong in MISTAKES])
def test_a_mistake_in_the_launch_is_found(gpu, right, wrong):
    assert LAUNCH.count(right) == 1
    with pytest.raises((AssertionError, RuntimeError, ValueError, TypeError)):
        launched(LAUNCH.replace(right, wrong))


def test_the_launch_has_about_ten_lines():
    lines = [line for line in LAUNCH.splitlines() if line.startswith("    ") and "print" not in line]
    taken = lines[lines.index("    import cupy") : [line.split()[0] for line in lines].index("by_cupy") + 1]
    assert 8 <= len(taken) <= 12


def test_without_a_gpu_it_says_what_to_do(no_gpu, capsys):
    assert "by_cupy" not in launched()
    said = capsys.readouterr().out.splitlines()[-2:]
    assert said[0] == "The kernel was not launched: no CUDA device, or no NVIDIA driver."
    assert "make setup-gpu" in said[1]
    assert "\n".join(said) in PAGE


def test_the_notebook_has_the_pages_code():
    cells = {cell.id: cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells}
    assert cells["by-hand-inputs"].source == INPUTS.rstrip("\n")
    assert cells["by-hand-launch"].source == LAUNCH.rstrip("\n")
    said = [output.text for output in cells["by-hand-launch"].outputs]
    assert said == [re.search(r"```text\n(The kernel was not launched.*?)```", PAGE, re.DOTALL)[1]]


# The record -----------------------------------------------------------------------------------------------------------


def test_what_a_gpu_printed_is_recorded_and_shown(gpu, tmp_path):
    found = cupy_by_hand.measure(PAGE)
    assert [line.split()[0] for line in found["printed"].splitlines()] == ["numpy", "torch", "cupy", "relative"]
    record = {"device": "a GPU", "versions": {"cupy-cuda13x": "14"}, "commit": "abc"} | found
    (tmp_path / "cupy_gpu.json").write_text(json.dumps(record))
    filled = cupy_by_hand.fill(PAGE, tmp_path)
    assert f"```text\n{found['printed']}```\n\n- device: a GPU\n" in filled and "Not measured yet" not in filled
    assert cupy_by_hand.fill(filled, tmp_path) == filled and cupy_by_hand.blocks(filled) == [IMPORTS, INPUTS, LAUNCH]


def test_nothing_is_recorded_without_a_gpu(no_gpu, tmp_path, monkeypatch, capsys):
    record = tmp_path / "cupy_none.json"
    monkeypatch.setattr(sys, "argv", ["cupy_by_hand", "--record", str(record)])
    with pytest.raises(SystemExit):
        cupy_by_hand.main()
    assert "nothing is recorded without a GPU and CuPy: no CUDA device" in capsys.readouterr().err
    assert not record.exists()


def test_the_page_shows_every_record_or_says_that_there_is_none(tmp_path):
    assert unmarked(cupy_by_hand.fill(PAGE)) == unmarked(PAGE)
    assert "*Not measured yet.*" in cupy_by_hand.fill(PAGE, tmp_path)


def test_a_record_without_its_text_is_refused(tmp_path):
    (tmp_path / "cupy_gpu.json").write_text("{}")
    with pytest.raises(ValueError, match="cupy_gpu.json has no commit, device, printed, versions"):
        cupy_by_hand.fill(PAGE, tmp_path)
