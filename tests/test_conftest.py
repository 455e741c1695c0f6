"""Mutation tests of the rule in conftest.py: each way of not running a test fails the run, also in many processes."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).with_name("conftest.py").read_text()

DID_NOT_RUN = {
    "skip in the test": "def test_it(): pytest.skip('no time')",
    "mark.skip": "@pytest.mark.skip\ndef test_it(): pass",
    "mark.skipif": "@pytest.mark.skipif(True, reason='no time')\ndef test_it(): pass",
    "importorskip": "pytest.importorskip('no_such_module')\ndef test_it(): pass",
    "skip of the module": "pytest.skip('no time', allow_module_level=True)\ndef test_it(): pass",
    "no parameters": "@pytest.mark.parametrize('n', [])\ndef test_it(n): pass",
    "skip in a fixture": "@pytest.fixture\ndef gone(): pytest.skip('no time')\ndef test_it(gone): pass",
    "xfail that fails": "@pytest.mark.xfail\ndef test_it(): assert False",
    "xfail that passes": "@pytest.mark.xfail\ndef test_it(): pass",
    "xfail without running": "@pytest.mark.xfail(run=False)\ndef test_it(): pass",
}


@pytest.fixture(params=[0, 2], ids="{} workers".format)
def run(request, pytester, monkeypatch):
    """Runs pytest over test files with these texts, under conftest.py, on a machine with or without a GPU or wheel."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # half the time

    def run_all(*bodies, folder=".", gpu=False, wheel=False):
        if wheel:
            pytester.mkdir("wheels").joinpath("sglang-1-any.whl").touch()
        pretended = f"def cuda_device_count(): return {int(gpu)}\n\nWHEELS = TESTS / 'wheels'\n"
        pytester.makeconftest(f"{CONFTEST}\n\n{pretended}")
        for number, body in enumerate(bodies):
            test_file = pytester.path / folder / f"test_{number}.py"
            test_file.parent.mkdir(exist_ok=True)
            test_file.write_text(f"import pytest\n\n{body}\n")
        processes = ("-p", "xdist", "--numprocesses", str(request.param))
        return pytester.runpytest_subprocess(*processes, "--continue-on-collection-errors")

    return run_all


def test_not_running_is_a_failure(run):
    """Each in a file of its own. What does not come so far as to call the test is an error, in pytest's words."""
    result = run(*DID_NOT_RUN.values())
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=3, errors=7)
    result.stdout.fnmatch_lines_random([f"*test_{number}.py* did not run*" for number in range(len(DID_NOT_RUN))])


@pytest.mark.parametrize("body", [DID_NOT_RUN["skip of the module"], DID_NOT_RUN["xfail that passes"]])
def test_one_alone_fails_the_run(run, body):
    assert run(body).ret == pytest.ExitCode.TESTS_FAILED


def test_a_passing_test_passes(run):
    assert run("def test_it(): pass").ret == pytest.ExitCode.OK


@pytest.mark.parametrize("body", [DID_NOT_RUN["mark.skip"], DID_NOT_RUN["xfail that fails"]])
def test_without_a_gpu_its_tests_may_be_skipped(run, body):
    assert run(body, folder="gpu").ret == pytest.ExitCode.OK


def test_without_a_gpu_its_modules_may_be_skipped(run):
    result = run(DID_NOT_RUN["importorskip"], folder="gpu")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED  # nothing else was in that folder


@pytest.mark.parametrize("body", [DID_NOT_RUN["mark.skip"], DID_NOT_RUN["importorskip"]])
def test_with_a_gpu_its_tests_must_run(run, body):
    assert run(body, folder="gpu", gpu=True).ret in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)


def test_without_the_wheel_tests_of_other_projects_may_be_skipped(run):
    assert run(DID_NOT_RUN["skip in a fixture"], folder="foreign").ret == pytest.ExitCode.OK


def test_with_the_wheel_they_must_run(run):
    assert run(DID_NOT_RUN["skip in a fixture"], folder="foreign", wheel=True).ret == pytest.ExitCode.TESTS_FAILED


def test_the_wheel_excuses_no_other_test(run):
    assert run(DID_NOT_RUN["mark.skip"]).ret == pytest.ExitCode.TESTS_FAILED
