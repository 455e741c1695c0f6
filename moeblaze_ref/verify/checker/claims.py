"""Messages from the kernel's process to the comparing process: lines of JSON.

The kernel may write such lines itself. So each is read as what it must be, and none says that an output is right.
"""

import json
from typing import Any

from moeblaze_ref.verify.checker.exam import Exam
from moeblaze_ref.verify.checker.runners import RUNNERS
from moeblaze_ref.verify.checker.trial import Answer, Description
from moeblaze_ref.verify.guard import Send

_ERRORS = {error.__name__: error for error in (ValueError, TypeError, OSError, ChildProcessError)}


def send_launches(exam: Exam, send: Send):
    """Launch the kernel on every case, and send what is said of it, or the error that there is in its place."""
    try:
        for said in exam.launches():
            _send(send, type(said).__name__, said._asdict())
    except tuple(_ERRORS.values()) as error:
        kind = next(name for name in reversed(_ERRORS) if isinstance(error, _ERRORS[name]))
        _send(send, kind, str(error))
    except KeyboardInterrupt:
        _send(send, "ChildProcessError", "the kernel raises KeyboardInterrupt, as only Ctrl-C should")


def _send(send: Send, kind: str, said: Any):
    send(json.dumps([kind, said]).encode() + b"\n")


def read_launches(exam: Exam, sent: bytes) -> tuple[Description, list[Answer]] | None:
    """Read the answers on the launches; None if the process ended before the last one.

    Raises
    ------
    ValueError, TypeError, OSError
        The error that was sent.
    ChildProcessError
        If something else was sent: the kernel has written into the pipe.
    """
    description: Description | None = None
    answers: list[Answer] = []
    for line in sent.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break  # the process ended while it sent this
        match _read(exam, description, line):
            case Exception() as error:
                raise error
            case Description() as description:
                pass
            case answer:
                answers.append(answer)
    done = len(answers) >= exam.num_answers or any(answer.fault for answer in answers)
    return (description, answers[: exam.num_answers]) if done and description else None


def _read(exam: Exam, description: Description | None, line: bytes) -> Description | Answer | Exception:
    """Parse one line: a description, an answer, or the error that it holds."""
    try:
        kind, said = json.loads(line)
        if kind in _ERRORS:
            return _ERRORS[kind](said)
        if kind == "Description":
            return _description(exam, **said)
        if description is None:
            raise ValueError("an answer precedes the description")
        return _answer(RUNNERS[description.runner].quantities, **said)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ChildProcessError("the kernel has written into the pipe of the process that runs it")


def _description(exam: Exam, runner: str, launch: str) -> Description:
    _require(isinstance(launch, str) and runner == exam.runner)
    return exam.text_trial.description if exam.text_trial else Description(runner, launch)


def _answer(quantities: tuple[str, ...], fault: str, counts: Any, symbols: Any, parameters: list[str]) -> Answer:
    _require(isinstance(fault, str) and _whole_numbers(symbols) and {*map(type, parameters)} <= {str})
    _require(fault or (counts.keys() == {*quantities} and all(map(_whole_numbers, counts.values()))))
    return Answer(fault, {} if fault else {name: counts[name] for name in quantities}, symbols, tuple(parameters))


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(type(number) is int and abs(number) < 2**63 for number in value.values())


def _require(holds: Any):
    if not holds:
        raise ValueError
