"""Code under `guard.run` asks before it starts a process: it never outruns the process that watches."""

import errno
import json
import os
import re
import signal
import socket
import sys

import hostile
import processes
import pytest

from moeblaze_ref.verify import guard, starts

# Runs a function `work(send)` under `guard.run`, and shows how it ended, and how many processes it has started.
GUARDED = """
import json, os, signal, subprocess, sys, tempfile, threading, time
from moeblaze_ref.verify import guard, seccomp

LIMIT = 8
MOST = 200  # a bomb starts no more, whatever the guard does

def number():
    return os.stat(os.path.join(folder, "started")).st_size

def note():
    with open(os.path.join(folder, "started"), "ab", buffering=0) as file:
        file.write(b"x")

def bomb(send):
    "Fork without end, though forks are refused. A watcher that is late, or kills slowly, makes no difference."
    while number() < MOST:
        try:
            if os.fork() == 0:
                note()
        except OSError:
            pass
    signal.pause()

def children(count):
    def work(send):
        for _ in range(count):
            if os.fork() == 0:
                signal.pause()
        send(b"all")
    return work

def one_after_another(send):
    for _ in range(5 * LIMIT):
        subprocess.run(["true"], check=True)
    send(b"all")

def threads(send):
    count = [threading.Thread(target=lambda: None) for _ in range(5 * LIMIT)]
    for thread in count:
        thread.start()
    for thread in count:
        thread.join()
    send(b"all")

def files(send):
    links = [f"/dev/fd/{name}" for name in os.listdir("/dev/fd")]
    send(" ".join(os.readlink(link) for link in links if os.path.lexists(link)).encode())

def late():
    "This process counts nothing unless it is asked, and takes its time to kill."
    guard.POLL_SECONDS, guard._processes_of_machine = 10**6, lambda: 0
    kill = guard._kill
    guard._kill = lambda *args: (time.sleep(0.01), kill(*args))

def refuse():
    seccomp.ask_before_starts = lambda: -1

def become_another_user():
    if os.getuid() == 0:
        os.setuid(65534)

for step in sys.argv[2:]:
    globals()[step]()
with tempfile.TemporaryDirectory(dir="/tmp") as folder:
    open(os.path.join(folder, "started"), "x").close()
    try:
        ended = guard.run(eval(sys.argv[1]), guard.Limits(300, processes=LIMIT), folder)
        told = [ended.sent.decode(), ended.status, ended.refused]
    except ChildProcessError as error:
        told = str(error)
    print(json.dumps([told, number()]))
"""
LIMIT = 8
NAME = "processes that are counted before they start (seccomp of Linux 5.19)"
USERS = pytest.mark.parametrize("user", [(), ("become_another_user",)], ids=["this user", "a user without rights"])


def guarded(work, *steps, **environment):
    """How ``work`` ended under `guard.run` after these steps, and how many processes it had started."""
    done = processes.run([sys.executable, "-c", GUARDED, work, *steps], env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def processes_told(message):
    """How many processes a message says that there are, if it says that they are too many."""
    return int(re.fullmatch(rf"the code has (\d+) processes, but {LIMIT} is the limit", message)[1])


@USERS
def test_a_fork_bomb_starts_at_most_twice_as_many_processes_as_it_may(mark, user):
    """Though the process that watches it never looks by itself, as on a machine that is busy."""
    told, started = guarded("bomb", *user, "late", MARK=mark)
    assert LIMIT < processes_told(told) <= 2 * LIMIT and started <= 2 * LIMIT
    assert not hostile.processes_of(mark)


@USERS
def test_a_fork_bomb_ends_where_the_system_does_not_ask(mark, user):
    told, _ = guarded("bomb", *user, "refuse", MARK=mark)
    assert processes_told(told) > LIMIT
    assert not hostile.processes_of(mark)


@USERS
@pytest.mark.parametrize("refused", [(), ("refuse",)], ids=["asked", "refused"])
def test_a_system_that_does_not_ask_is_named(user, refused):
    assert guarded("children(1)", *user, *refused)[0] == ["all", 0, [NAME] if refused else []]


def test_the_limit_is_reached_and_not_passed(mark):
    """The code itself is the first process."""
    assert guarded(f"children({LIMIT - 1})", MARK=mark)[0] == ["all", 0, []]
    told, _ = guarded(f"children({LIMIT})", "late", MARK=mark)
    assert told == f"the code has {LIMIT + 1} processes, but {LIMIT} is the limit"


@pytest.mark.parametrize("work", ["one_after_another", "threads"])
def test_processes_that_have_ended_and_threads_do_not_count(work):
    assert guarded(work, "late")[0] == ["all", 0, []]


def test_the_code_cannot_answer_its_own_questions():
    """It has the pipe, and neither the listener nor the channel through which that went."""
    told, *ended = guarded("files")[0]
    assert "pipe:" in told and "seccomp" not in told and "socket:" not in told and ended == [0, []]


@pytest.fixture
def asking():
    """A process that forks whenever it is told to: its id, a channel to it, and the one that brings the listener."""
    told, tells = socket.socketpair()
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        guard._leave(lambda: fork_and_say(tells, theirs))
    theirs.close()
    with told, ours:
        yield child, told, ours
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def fork_and_say(tells, channel):
    """Fork for each byte, and send the error: 0 if there is none."""
    guard._prctl(guard._PR_SET_NO_NEW_PRIVS, 1)
    assert starts.hand_over(channel)
    while tells.recv(1):
        try:
            if os.fork() == 0:
                os._exit(0)
            tells.send(b"0")
        except OSError as error:
            tells.send(str(error.errno).encode())


def test_no_process_starts_once_the_listener_is_closed(asking):
    """Neither one that waits for its answer, nor one that asks later."""
    _, told, ours = asking
    with starts.received(ours) as listener:
        assert not starts.asked(listener)
        told.send(b"x")
        assert hostile.until(lambda: starts.asked(listener))
    assert int(told.recv(9)) == errno.ENOSYS
    told.send(b"x")
    assert int(told.recv(9)) == errno.ENOSYS


def test_a_process_that_is_allowed_to_starts(asking):
    _, told, ours = asking
    with starts.received(ours) as listener:
        told.send(b"x")
        assert hostile.until(lambda: starts.asked(listener))
        assert starts.allow(listener, 8) == 7
        assert told.recv(9) == b"0" and starts.allow(listener, 8) == 8


def test_who_has_asked_may_be_gone(asking):
    """It is killed between its question and the answer."""
    child, told, ours = asking
    with starts.received(ours) as listener:
        told.send(b"x")
        assert hostile.until(lambda: starts.asked(listener))
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        starts._answer(listener)
        assert not starts.asked(listener)
