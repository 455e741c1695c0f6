"""What is installed is what is written down: pyproject.toml, locks, conda's environments, the Makefile, the wheel."""

import importlib.metadata
import json
import os
import re
import shutil
import zipfile

import browser
import processes
import pytest
import yaml
from host import PROJECT, PYPROJECT, ROOT, applies, installed_closure, set_up_cell, undeclared_modules
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

LOCKS = ("requirements.lock", "requirements-gpu.lock")
EXTRAS = PROJECT["optional-dependencies"]
# What `make setup` needs on any machine; it builds the project without a download of its own.
NEEDED = (
    PROJECT["dependencies"]
    + EXTRAS["placement"]
    + EXTRAS["huggingface"]
    + EXTRAS["docs"]
    + EXTRAS["test"]
    + PYPROJECT["build-system"]["requires"]
)

# Where the locks must work.
PLATFORMS = [
    {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": platform}
    for python in ("3.11", "3.12", "3.13")
    for platform in ("linux", "darwin")
]

# torch's CUDA build brings these, pinned by itself; its CPU build has none of them.
LEFT_OUT_OF_THE_LOCK = {
    "cuda-toolkit",
    "nvidia-cudnn-cu13",
    "nvidia-cusparselt-cu13",
    "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu13",
    "triton",
}


def lock_lines(name):
    """The requirements of a lock file, comments removed, in the file's order."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def pins(*names):
    """{canonical name: requirement} of these lock files together."""
    return {canonicalize_name(line.name): line for name in names for line in lock_lines(name)}


BASE = pins("requirements.lock")
WITH_GPU = pins(*LOCKS)


def pinned_version(pin):
    """The one version that a lock line allows."""
    return str(pin.specifier).removeprefix("==")


# The locks


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_line_is_one_exact_version(lock):
    for line in lock_lines(lock):
        assert re.fullmatch(r"==[\w.]+", str(line.specifier)), line  # no range, no wildcard, no local version
        assert not line.extras and line.url is None, line


def test_no_distribution_is_pinned_twice():
    assert len(WITH_GPU) == sum(len(lock_lines(lock)) for lock in LOCKS)


def test_torch_and_numpy_are_the_versions_that_everything_else_was_chosen_for():
    assert pinned_version(BASE["torch"]) == "2.13.0"
    assert pinned_version(BASE["numpy"]) in SpecifierSet("<2.5")


def test_the_base_lock_stays_small_enough_for_a_laptop():
    assert not LEFT_OUT_OF_THE_LOCK & BASE.keys()
    assert not [name for name in BASE if name.startswith("cupy")]


@pytest.mark.parametrize(
    ("requirement", "locked"),
    [(requirement, BASE) for requirement in NEEDED] + [(requirement, WITH_GPU) for requirement in EXTRAS["gpu"]],
    ids=NEEDED + EXTRAS["gpu"],
)
def test_a_dependency_is_pinned_within_its_range(requirement, locked):
    requirement = Requirement(requirement)
    pin = locked[canonicalize_name(requirement.name)]
    assert pinned_version(pin) in requirement.specifier
    for platform in PLATFORMS:
        assert not applies(requirement, platform) or applies(pin, platform), platform


def test_everything_installed_is_pinned_at_the_installed_version():
    for requirement, asked_by in installed_closure(NEEDED, LEFT_OUT_OF_THE_LOCK):
        pin = BASE.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement}, which {asked_by} requires, is not pinned; run `make lock`"
        assert pinned_version(pin) in requirement.specifier, f"{asked_by} requires {requirement}, the lock has {pin}"
        installed = importlib.metadata.version(requirement.name).partition("+")[0]
        assert installed == pinned_version(pin), f"{pin} is locked, {installed} is installed; run `make setup`"


def test_nothing_is_pinned_without_need():
    needed = {canonicalize_name(requirement.name) for requirement, _ in installed_closure(NEEDED, LEFT_OUT_OF_THE_LOCK)}
    here = {name for name, pin in BASE.items() if applies(pin)}
    assert here == needed


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    others = "PSF-2.0 AND MIT"  # of a text and of packages that it comes with
    assert f"{citation['license']} AND {others}" == PROJECT["license"]
    assert f"\n## {PROJECT['version']}\n" in (ROOT / "CHANGELOG.md").read_text()


# environment.yml, environment-gpu.yml

ENVIRONMENTS = {"environment.yml": LOCKS[:1], "environment-gpu.yml": LOCKS}  # the locks that each installs
# What a reader works with: notebooks are opened in the first, and import the others or show their kernels.
NAMED = {"jupyterlab", "matplotlib", "numba", "numba-cuda", "numpy", "torch"}
WITH_CUPY = NAMED | {"cupy-cuda13x"}


def by_pip(text):
    """The lines that conda hands to pip, as a requirements file in this very folder: paths are relative to it."""
    return yaml.safe_load(text)["dependencies"][-1]["pip"]


def wrong_pins(text, names, locked):
    """What is wrong with the packages that an environment names: each is the lock's line, and none is missing."""
    named = [Requirement(line) for line in by_pip(text) if not line.startswith("-")]
    found = {canonicalize_name(requirement.name): requirement for requirement in named}
    if len(found) < len(named) or found.keys() != names:
        yield f"it names {sorted(requirement.name for requirement in named)} in place of {sorted(names)}"
    for name in found.keys() & names:
        if found[name] != locked[name]:
            yield f"it has {found[name]}, the lock {locked[name]}"


@pytest.mark.parametrize("file", ENVIRONMENTS)
def test_conda_installs_the_same_locks(file):
    environment = yaml.safe_load((ROOT / file).read_text())
    assert environment["name"] == PROJECT["name"]
    assert environment["channels"] == ["conda-forge"]
    *by_conda, last = environment["dependencies"]
    assert by_conda == ["python=3.11", "pip", "cxx-compiler", "make"] and last.keys() == {"pip"}
    assert "3.11" in SpecifierSet(PROJECT["requires-python"])
    options = [line for line in last["pip"] if line.startswith("-")]
    assert options == [*(f"-r {lock}" for lock in ENVIRONMENTS[file]), "-e ."]


@pytest.mark.parametrize(
    ("file", "names", "locked"), [("environment.yml", NAMED, BASE), ("environment-gpu.yml", WITH_CUPY, WITH_GPU)]
)
def test_the_named_packages_have_the_versions_of_the_locks(file, names, locked):
    text = (ROOT / file).read_text()
    assert list(wrong_pins(text, names, locked)) == []
    for name in names:  # each line that is lost, changed or free is found
        line = next(line for line in text.splitlines() if line.startswith(f"      - {name}=="))
        for planted in ("", line.replace("==", "==9", 1), line.replace("==", ">=", 1)):
            assert len(list(wrong_pins(text.replace(f"{line}\n", f"{planted}\n"), names, locked))) == 1, planted


def test_the_environment_with_a_gpu_is_the_other_and_cupy():
    plain, with_gpu = ((ROOT / file).read_text() for file in ENVIRONMENTS)
    assert set(by_pip(plain)) < set(by_pip(with_gpu))
    assert WITH_CUPY - NAMED == {name for name in pins("requirements-gpu.lock") if name.startswith("cupy")}


def test_the_environments_are_said_where_conda_is():
    """No one without a GPU downloads CUDA; torch's index is the one that the Makefile's option is shown with."""
    said = (ROOT / "environment.yml").read_text(), (ROOT / "docs" / "install.md").read_text()
    for text in said:
        assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu conda env create\n" in text
        assert "conda env create --file environment-gpu.yml\n" in text
    assert "make setup TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu\n" in said[1]


# The Makefile

STAMP = ".venv/torch-index-url"


def make(*arguments, cwd=ROOT, **environment):
    """Runs make as typed, whatever was passed to the make that may have started these tests."""
    ours = ("MAKE", "MFLAGS", "PYTHON", "TORCH_INDEX_URL", "CXX", "BROWSERS")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return processes.run(["make", *arguments], cwd=cwd, env=clean | environment)


def age(path, seconds):
    """Sets a file's modification time, creating the file where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (seconds, seconds))


@pytest.fixture
def set_up(tmp_path):
    """A folder whose set-up has finished, with torch from the default index."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for path in ("requirements.lock", "pyproject.toml", ".venv/bin/pip"):
        age(tmp_path / path, 1)
    age(tmp_path / STAMP, 2)
    return tmp_path


def must_set_up(folder, *arguments):
    """Whether `make setup` has anything to do; make --question answers without doing it."""
    return {0: False, 1: True}[make("--question", "setup", *arguments, cwd=folder).returncode]


def starts_from_nothing(folder, *arguments):
    """Whether `make setup` would create .venv anew."""
    return "-m venv --clear .venv" in make("--dry-run", "setup", *arguments, cwd=folder).stdout


def test_setup_runs_once(set_up):
    assert not must_set_up(set_up)
    (set_up / STAMP).unlink()
    assert must_set_up(set_up)


@pytest.mark.parametrize("changed", ["requirements.lock", "pyproject.toml"])
def test_setup_runs_again_when_its_inputs_change_and_keeps_the_environment(set_up, changed):
    age(set_up / changed, 3)
    assert must_set_up(set_up)
    assert not starts_from_nothing(set_up, "PYTHON=another-python")
    (set_up / ".venv/bin/pip").unlink()
    assert starts_from_nothing(set_up)


def test_setup_starts_from_nothing_for_another_torch_index_only(set_up):
    index = "TORCH_INDEX_URL=https://index.example/cpu"
    assert must_set_up(set_up, index) and starts_from_nothing(set_up, index)
    (set_up / STAMP).write_text("https://index.example/cpu\n")
    assert not must_set_up(set_up, index)
    assert not must_set_up(set_up), "the index of the last set-up is kept"
    assert must_set_up(set_up, "TORCH_INDEX_URL=") and starts_from_nothing(set_up, "TORCH_INDEX_URL=")


def test_setup_refuses_an_old_python(set_up):
    (set_up / ".venv/bin/pip").unlink()
    (set_up / STAMP).unlink()
    python = set_up / "python3"  # fails when it is asked for its version, and does nothing otherwise
    python.write_text('#!/bin/sh\ncase "$*" in *version_info*) exit 1;; esac\n')
    python.chmod(0o755)
    result = make("setup", f"PYTHON={python}", cwd=set_up)
    assert result.returncode != 0 and "Python 3.11 or newer is needed" in result.stderr
    assert not (set_up / STAMP).exists()


NEEDS = {  # what a target needs of the machine
    "setup": "venv",
    "demo": "venv compiler?",
    "check": "venv compiler?",
    "notebooks": "venv compiler",
    "test": "venv compiler clang browser git",
}


@pytest.mark.parametrize("target", NEEDS)
def test_a_target_looks_for_what_it_needs_before_anything_is_installed(set_up, target):
    """The script says so, and that it is missing."""
    (set_up / STAMP).unlink()
    (set_up / ".venv/bin/pip").unlink()
    script = set_up / "scripts" / "system_packages.sh"
    script.write_text('#!/bin/sh\necho "$CXX, $PYTHON, $BROWSERS: $*"\nexit 1\n')
    result = make(target, "CXX=c++ -m64", "PYTHON=python3.12", "BROWSERS=one another", cwd=set_up)
    assert result.returncode != 0 and result.stdout == f"c++ -m64, python3.12, one another: {NEEDS[target]}\n"


def test_python_keeps_what_it_compiles_whatever_the_environment_says(set_up):
    (set_up / STAMP).unlink()
    (set_up / ".venv/bin/pip").unlink()
    (set_up / "scripts" / "system_packages.sh").write_text(
        '#!/bin/sh\necho "${PYTHONDONTWRITEBYTECODE-kept}"\nexit 1\n'
    )
    result = make("setup", cwd=set_up, PYTHONDONTWRITEBYTECODE="1")
    assert result.returncode != 0 and result.stdout == "kept\n"


@pytest.mark.parametrize("target", ["demo", "check"])
def test_the_compiler_of_pypi_is_installed_where_no_other_is(set_up, target):
    """For what a command of the venv then runs; the version is that of the extra."""
    (zig,) = EXTRAS["compiler"]
    pip = f".venv/bin/pip install {zig}\n"
    assert pip in make("--dry-run", target, cwd=set_up).stdout
    for name, text in (("pip", 'echo pip "$@"'), ("moeblaze", 'echo moeblaze "$@"')):
        (set_up / ".venv/bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (set_up / ".venv/bin" / name).chmod(0o755)
    age(set_up / STAMP, 2**31)
    (set_up / "scripts" / "system_packages.sh").write_text("#!/bin/sh\n")
    missing = make(target, "CXX=no-such-compiler", cwd=set_up).stdout
    assert f"\npip install {zig}\n" in f"\n{missing}" and missing.endswith(f"\nmoeblaze {target}\n")
    assert "pip install" not in make(target, cwd=set_up).stdout


def test_help_lists_every_target_that_is_no_step_of_another():
    makefile = (ROOT / "Makefile").read_text()
    first, second = re.findall(r"^\.PHONY: (.*)", makefile, re.MULTILINE)[:2]
    shown = re.findall(r"^([a-z-]+)  +\S", make("help").stdout, re.MULTILINE)
    assert sorted(shown) == sorted(first.split())
    assert {*first.split(), *second.split()} == {*re.findall(r"^([a-z-]+):(?!=)", makefile, re.MULTILINE)}


def test_the_makefile_accepts_the_projects_pythons_and_knows_the_browsers_of_the_tests():
    makefile = (ROOT / "Makefile").read_text()
    assert PROJECT["requires-python"] == ">=3.11" and "sys.version_info < (3, 11)" in makefile
    assert f"\nBROWSERS := {' '.join(browser.NAMES)}\n" in makefile


# The wheel


def source_files(folder):
    """Every file under a folder of the tree, relative to it, but for what Python and JupyterLab leave there."""
    paths = (path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if {"__pycache__", ".ipynb_checkpoints"}.isdisjoint(path.parts)}


def test_the_wheel_is_the_package_its_kernels_notebooks_and_documents_and_nothing_else(host):
    package = {f"moeblaze_ref/{path}" for path in source_files("moeblaze_ref")}
    kernels = {f"moeblaze_ref/kernels_cuda/{path}" for path in source_files("kernels_cuda")}
    assert any(path.endswith(".cu") for path in kernels) and any(path.endswith(".hpp") for path in package)
    notebooks = {f"moeblaze_ref/notebooks/{path}" for path in source_files("notebooks") if path.endswith(".ipynb")}
    documents = {f"moeblaze_ref/docs/{path}" for path in source_files("docs") if not path.startswith(("_", "conf.py"))}
    members = {name for name in zipfile.ZipFile(host.wheel).namelist() if ".dist-info/" not in name}
    assert members == package | kernels | notebooks | documents


def test_the_set_up_cell_installs_the_wheel_and_nothing_else(host):
    assert host.wheel.name in set_up_cell()
    installed = {path.name for path in host.folder.glob("environment/lib/*/site-packages/*.dist-info")}
    assert installed == {f"{PROJECT['name']}-{PROJECT['version']}.dist-info"}
    copied = {path.relative_to(host.notebooks).as_posix() for path in host.notebooks.rglob("*.ipynb")}
    assert copied == {path for path in source_files("notebooks") if path.endswith(".ipynb")}


def test_what_the_set_up_cell_adds_is_listed():
    """Beside the packages that every host has."""
    text = (ROOT / "docs" / "install.md").read_text()
    (listed,) = re.findall(r"\| for \| packages \|\n(.*?)\n\n", text, re.DOTALL)
    declared = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert set(re.findall(r"`(\S+)`", listed)) == declared - {"torch", "numpy", "numba", "jupyterlab"}


def test_a_host_has_none_of_the_optional_packages(host):
    hidden = {"ortools", "pandas", "pytest", "sphinx", "transformers"}
    assert hidden <= set(undeclared_modules())
    for name in hidden:
        assert "ModuleNotFoundError" in host.run("python", "-c", f"import {name}").stderr


def test_the_wheel_checks_itself_on_a_host(host, tmp_path):
    where = host.run("python", "-c", "import moeblaze_ref as m; print(m.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(host.folder)), where.stderr
    check = host.run("moeblaze", "check", "--stage", "dispatch", "--json", cwd=tmp_path)
    assert check.returncode == 0, check.stdout + check.stderr
    passed = {row["backend"] for row in json.loads(check.stdout) if row["available"] and row["ok"]}
    assert {"numpy", "numba", "simt"} <= passed


def test_the_wheel_starts_jupyterlab_in_an_empty_folder(host, tmp_path):
    lab = host.run("moeblaze", "lab", "--version", cwd=tmp_path)
    assert lab.returncode == 0, lab.stdout + lab.stderr
    assert lab.stdout.endswith(f"\n{importlib.metadata.version('jupyterlab')}\n")
    assert (tmp_path / "moeblaze_course" / "docs" / "install.md").is_file()


def test_what_needs_or_tools_says_what_to_install(host, tmp_path):
    said = host.run("moeblaze", "place", "--synthetic", "2x8x2", "--gpus", "2", cwd=tmp_path)
    assert said.returncode == 2
    assert said.stderr == "error: OR-Tools is not installed: pip install 'moeblaze_ref[placement]'\n"


def test_what_needs_transformers_says_what_to_install(host, tmp_path):
    cell = "from moeblaze_ref.course.notebook import small_qwen; small_qwen.small_qwen()"
    said = host.run("python", "-c", cell, cwd=tmp_path)
    assert said.returncode == 1
    assert said.stderr.endswith("Missing: transformers is not installed: pip install 'moeblaze_ref[huggingface]'\n")
