"""scripts/system_packages.sh: what it installs, and what it says where it may not, on made-up machines."""

import shutil
from pathlib import Path

import browser
import processes
import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "system_packages.sh"
ALL = ("make", "python3", "g++", "clang++", "chromium", "git")
PACKAGES = "make python3-venv g++ clang chromium git"
UPDATE, INSTALL = "apt-get update", "apt-get install --yes"


class Machine:
    """A folder of programs, which is the whole PATH. apt-get and sudo write down how they were called."""

    def __init__(self, folder, programs, user=0, sudo=True, apt=True):
        self.programs, self.log = folder / "bin", folder / "log"
        self.programs.mkdir()
        self.log.touch()
        self.release = folder / "os-release"
        self.release.write_text("ID=debian\n")
        for name in ("sh", "grep"):
            (self.programs / name).symlink_to(shutil.which(name))
        self.add("id", f"echo {user}")
        for name in programs:
            self.add(name, "exit 0")
        if apt:
            self.add("apt-get", f'echo apt-get "$@" >> {self.log}')
        if sudo:
            self.add("sudo", f'[ "$1" = -n ] && exit 0; echo sudo >> {self.log}; exec "$@"')

    def add(self, name, text):
        path = self.programs / name
        path.write_text(f"#!{shutil.which('sh')}\n{text}\n")
        path.chmod(0o755)

    def run(self, *needs, **variables):
        environment = {"PATH": str(self.programs), "OS_RELEASE": str(self.release), **variables}
        return processes.run([SCRIPT, *needs], env=environment)

    def called(self):
        return self.log.read_text().splitlines()


def without(*programs):
    return [name for name in ALL if name not in programs]


@pytest.mark.parametrize("user", [0, 1000])
def test_where_nothing_is_missing_nothing_is_run(tmp_path, user):
    machine = Machine(tmp_path, ALL, user)
    result = machine.run()
    assert (result.returncode, result.stdout, result.stderr, machine.called()) == (0, "", "", [])


@pytest.mark.parametrize("sudo", [False, True])
@pytest.mark.parametrize(
    ("programs", "needs", "packages"),
    [
        (without("make"), ["make"], "make"),
        (without("python3"), ["venv"], "python3-venv"),
        (without("g++"), ["compiler"], "g++"),
        (without("g++"), ["compiler?"], "g++"),
        (without("clang++"), ["clang"], "clang"),
        (without("chromium"), ["browser"], "chromium"),
        (without("git"), ["git"], "git"),
        (without("clang++", "chromium"), ["venv", "compiler"], ""),
        *(([name], ["browser"], "") for name in browser.NAMES),  # any that the tests know serves
    ],
)
def test_root_installs_what_is_missing_and_asked_for(tmp_path, programs, needs, packages, sudo):
    machine = Machine(tmp_path, programs, sudo=sudo)
    assert machine.run(*needs).returncode == 0
    assert machine.called() == ([UPDATE, f"{INSTALL} {packages}"] if packages else [])


def test_all_needs_are_installed_at_once_by_sudo(tmp_path):
    machine = Machine(tmp_path, (), user=1000)
    assert machine.run().returncode == 0
    assert machine.called() == ["sudo", UPDATE, f"{INSTALL} {PACKAGES}"]


@pytest.mark.parametrize("lacks", ["sudo", "apt"])
def test_without_the_right_it_prints_the_line_to_type(tmp_path, lacks):
    machine = Machine(tmp_path, (), user=1000, **{lacks: False})
    result = machine.run()
    *errors, line = result.stderr.splitlines()
    assert (result.returncode, result.stdout, machine.called()) == (1, "", [])
    assert line == f"On Debian and Ubuntu, type: sudo {UPDATE} && sudo {INSTALL} {PACKAGES}"
    assert len(errors) == 6 and all(error.startswith("error: missing ") for error in errors)


def test_what_can_be_done_without_is_no_error_but_stands_in_the_line(tmp_path):
    machine = Machine(tmp_path, without("g++"), user=1000, sudo=False)
    assert machine.run("venv", "compiler?").returncode == 0
    (machine.programs / "python3").unlink()
    result = machine.run("venv", "compiler?")
    assert result.returncode == 1 and result.stderr.endswith("--yes python3-venv g++\n")


def test_ubuntu_has_another_name_for_chromium(tmp_path):
    machine = Machine(tmp_path, ())
    machine.release.write_text("NAME=Ubuntu\nID=ubuntu\n")
    machine.run("browser")
    assert machine.called() == [UPDATE, f"{INSTALL} chromium-browser"]


def test_the_makefiles_python_and_compiler_are_looked_for(tmp_path):
    machine = Machine(tmp_path, ["python3.12", "c++-13"])
    assert machine.run("venv", "compiler", PYTHON="python3.12", CXX="c++-13 -m64").returncode == 0
    assert machine.run("venv", PYTHON="/opt/python3.13").returncode == 0
    assert machine.called() == [UPDATE, f"{INSTALL} python3.13-venv"]


@pytest.mark.parametrize("need", ["compiler", "compiler?"])
def test_a_compiler_that_is_named_is_not_replaced(tmp_path, need):
    machine = Machine(tmp_path, ALL)
    result = machine.run(need, CXX="no-such-compiler")
    assert result.returncode == 1 and "CXX names no-such-compiler" in result.stderr and machine.called() == []


def test_an_unknown_need_is_named(tmp_path):
    result = Machine(tmp_path, ALL).run("compilers")
    assert result.returncode == 1 and "unknown need compilers (known: make, venv, compiler" in result.stderr
