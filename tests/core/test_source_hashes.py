"""Whether the code that a record speaks of has changed since: what counts as a change, and where it is said."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import unmarked

from moeblaze_ref.backends.raw_cuda import tiles
from moeblaze_ref.bench import findings
from moeblaze_ref.core import documents, provenance, source_hashes
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.core.source_hashes import CUDA, LAYERS, NUMBA, PARALLEL, PARTS, hashes
from moeblaze_ref.course.site import records as page

CU = """// Purpose: copies.
#include "../include/common.cuh"
extern "C" __global__ void f(int* out) {
    out[0] = 1;  // one
    printf("// no comment\\n");
}
"""
PY = '''"""What it is for."""

from moeblaze_ref.backends.raw_cuda import gemm, tiles


def f(executor):
    """Launch it."""
    # the first
    if executor:
        return executor.load(f"combine/{gemm.name}.cu", text="#")  # the file
    return tiles
'''


@pytest.fixture
def tree(tmp_path):
    """A package with one kernel, and one Numba module."""
    (tmp_path / "package" / "backends" / "numba_cuda").mkdir(parents=True)
    (tmp_path / "kernels" / "combine").mkdir(parents=True)
    (tmp_path / "package" / "backends" / "numba_cuda" / "combine.py").write_text(PY)
    (tmp_path / "kernels" / "combine" / "1_gather.cu").write_text(CU)
    return tmp_path


def hashed(tree: Path) -> dict[str, str]:
    hashes.cache_clear()
    return hashes((CUDA, NUMBA, PARALLEL), tree / "package", tree / "kernels")


def edited(tree: Path, file: str, *changes: tuple[str, str]):
    path = tree / file
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


KERNEL, MODULE = "kernels/combine/1_gather.cu", "package/backends/numba_cuda/combine.py"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (KERNEL, "// Purpose: copies.", "/* Another\n   header. */"),
        (KERNEL, "  // one", ""),
        (KERNEL, "    out[0]", "\n        out[0]"),
        (KERNEL, "../include/common.cuh", "common.cuh"),
        (MODULE, '"""What it is for."""', '"""Something else,\n\nand more."""'),
        (MODULE, '"""Launch it."""', '"""Launch."""'),
        (MODULE, "    # the first\n", ""),
        (MODULE, "  # the file", "  # a 'file'"),
        (MODULE, "moeblaze_ref.backends.raw_cuda import", "moeblaze_ref.backends.registry.raw_cuda import"),
        (MODULE, "import gemm, tiles", "import (\n    tiles,\n    gemm,\n)"),
        (MODULE, "combine/{", "kernels/combine/{"),
    ],
)
def test_comments_paths_and_folders_do_not_count(tree, file, old, new):
    before = hashed(tree)
    edited(tree, file, (old, new))
    assert hashed(tree) == before


@pytest.mark.parametrize(
    ("file", "part", "old", "new"),
    [
        (KERNEL, CUDA, "out[0] = 1", "out[0] = 2"),
        (KERNEL, CUDA, "// no comment", "// a comment"),
        (KERNEL, CUDA, "common.cuh", "scalar.cuh"),
        (MODULE, NUMBA, "if executor", "if not executor"),
        (MODULE, NUMBA, "    return tiles", "        return tiles"),
        (MODULE, NUMBA, 'text="#"', 'text="##"'),
        (MODULE, NUMBA, "import gemm, tiles", "import gemm, other as tiles"),
        (MODULE, NUMBA, "}.cu", "}.cuh"),
    ],
)
def test_code_counts_in_its_own_part_alone(tree, file, part, old, new):
    before = hashed(tree)
    edited(tree, file, (old, new))
    after = hashed(tree)
    assert [name for name in before if before[name] != after[name]] == [part]


def test_where_a_file_lies_and_its_name_do_not_count(tree):
    before = hashed(tree)
    shutil.move(tree / "kernels" / "combine", tree / "kernels" / "gather_sum")
    shutil.move(tree / "kernels" / "gather_sum" / "1_gather.cu", tree / "kernels" / "gather_sum" / "first.cu")
    shutil.move(
        tree / "package" / "backends" / "numba_cuda" / "combine.py",
        tree / "package" / "backends" / "numba_cuda" / "sums.py",
    )
    assert hashed(tree) == before
    (tree / "package" / "backends" / "numba_cuda" / "__init__.py").write_text('"""Nothing but words."""\n')
    assert hashed(tree) == before


def test_a_new_file_counts(tree):
    before = hashed(tree)
    (tree / "kernels" / "2_more.cu").write_text(CU)
    assert hashed(tree)[CUDA] != before[CUDA]


def test_kernels_of_the_ranks_are_a_part_of_their_own(tree):
    before = hashed(tree)
    (tree / "kernels" / "parallel").mkdir()
    (tree / "kernels" / "parallel" / "trip.cu").write_text(CU)
    after = hashed(tree)
    assert [name for name in before if before[name] != after[name]] == [PARALLEL]


@pytest.mark.parametrize("part", PARTS)
def test_every_pattern_finds_files(part):
    """A move that forgets the table would leave a part without text, and every record of it changed."""
    for pattern in PARTS[part]:
        found = list(source_hashes._matches(pattern.removeprefix("!"), source_hashes.PACKAGE, kernels_dir()))
        assert found, f"{pattern} of {part} is of no file"


# Marks ----------------------------------------------------------------------------------------------------------------


def record(**code):
    return {"device": "a GPU", "versions": {}, "commit": "abcdef0", "code": code, "rows": []}


def of_now(*parts):
    hashes.cache_clear()
    return dict(hashes(parts))


def test_a_record_of_this_code_has_no_mark():
    found = record(**of_now(*PARTS))
    assert documents.place(found)[-1] == "- commit: abcdef0" and source_hashes.mark_of_all(found) == ""


def test_what_has_changed_stands_behind_the_commit(tmp_path):
    found = record(**of_now(CUDA, LAYERS) | {CUDA: "another"})
    assert documents.place(found)[-1] == "- commit: abcdef0 (code changed since: CUDA kernels)"
    (tmp_path / "bench_x.json").write_text(json.dumps(found))
    assert "| abcdef0 (code changed since: CUDA kernels) |" in page.page(tmp_path)


def test_a_part_that_is_none_any_more_has_changed():
    assert source_hashes.mark({"code": {"old name": "x"}}) == " (code changed since: old name)"


def test_a_record_of_an_earlier_version_says_that_nothing_is_known(tmp_path):
    found = {name: value for name, value in record().items() if name != "code"}
    assert documents.place(found)[-1] == "- commit: abcdef0 (code not recorded)"
    (tmp_path / "bench_x.json").write_text(json.dumps(found))
    assert "| abcdef0 (code not recorded) |" in page.page(tmp_path)


def test_a_file_of_several_runs_is_marked_for_any_of_them():
    old, new = record(**{CUDA: "x"}), record(**of_now(CUDA))
    file = {"device": "a GPU", "items": {"a": [new], "b": [new, old]}}
    assert source_hashes.mark_of_all(file) == " (code changed since some of them: CUDA kernels)"
    assert source_hashes.mark_of_all({"items": {"a": [new]}}) == ""
    assert source_hashes.mark_of_all({"trials": [{"commit": "a"}]}) == " (code not recorded)"


def test_a_page_without_marks_is_the_same_page():
    marked = "\n".join([*documents.place(record(**{CUDA: "x"})), *documents.place({**record(), "code": {}})])
    assert unmarked(marked).count("- commit: abcdef0\n") == 1 and "changed" not in unmarked(marked)


def test_the_tiles_are_marked(monkeypatch, tmp_path):
    table = json.loads(tiles.TABLE.read_text())
    for run in table["runs"]:
        run["code"] = {CUDA: "x"}
    (tmp_path / "tiles.json").write_text(json.dumps(table))
    monkeypatch.setattr(tiles, "TABLE", tmp_path / "tiles.json")
    assert "(code changed since: CUDA kernels)" in findings.chosen_tiles()


# Records --------------------------------------------------------------------------------------------------------------

RESULTS = sorted(page.DOCUMENT.with_suffix("").glob("*.json"))


@pytest.mark.parametrize("path", [*RESULTS, tiles.TABLE], ids=lambda path: path.name)
def test_every_record_notes_the_code_of_its_commit(path):
    found = json.loads(path.read_text())
    runs = (
        [found]
        if "commit" in found
        else [run for name in ("items", "runs", "trials") for run in source_hashes._runs(found.get(name, []))]
    )
    runs = [run for run in runs if "clocks" in run or path.name.startswith("trials")]
    assert runs and all(run["code"] and set(run["code"]) <= PARTS.keys() for run in runs)


def test_a_new_record_has_the_hashes_of_now():
    assert provenance.environment((NUMBA,))["code"] == of_now(NUMBA)
    assert provenance.environment()["code"] == of_now(*source_hashes.MEASURED)


def test_a_check_notes_the_backends_that_it_ran():
    assert source_hashes.of_backends(["numba", "simt", "cuda"]) == (CUDA, NUMBA, LAYERS)
    assert source_hashes.of_backends(["numba"]) == (NUMBA, LAYERS)
