"""What code under `guard.run` can and cannot do to processes, files and memory outside, and what is left of it."""

import contextlib
import errno
import functools
import json
import mmap
import os
import sys
import uuid
from pathlib import Path

import hostile
import processes
import pytest
from test_guard import SYSTEM, WITHOUT_CAPABILITIES, check, check_command, combine_that, environment

from moeblaze_ref.core import folders
from moeblaze_ref.verify import guard, in_subprocess, landlock, seccomp

# Runs a function `work(send)` under `guard.run`, and shows what it sends.
CONFINED = """
import ctypes, errno, json, os, resource, sys, tempfile, threading
from moeblaze_ref.verify import guard, seccomp

outside = sys.argv[1:]
watcher = os.getpid()
libc = ctypes.CDLL(None, use_errno=True)

def failure(call, *args):
    "The name of the error of a function; empty if it did its work."
    try:
        call(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return ""

def call(name, *args):
    "The same of a system call."
    number = seccomp.CALLS[name].numbers[os.uname().machine != "x86_64"]
    return errno.errorcode[ctypes.get_errno()] if libc.syscall(number, *args) < 0 else ""

def work(send):
    send(json.dumps(found()).encode())

{}

with tempfile.TemporaryDirectory() as folder:
    ended = guard.run(work, guard.Limits(60), folder)
print(json.dumps([json.loads(ended.sent), ended.refused]))
"""


def confined(found, *outside):
    """What the function ``found`` returns under `guard.run`, and what the system refuses of the confinement."""
    done = processes.run([sys.executable, "-c", CONFINED.replace("{}", found), *map(str, outside)])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- other processes ----------------------------------------------------------------------------

CALLS_AT_THE_WATCHER = """
def found():
    words = (ctypes.c_uint64 * 16)()  # zeros: a limit, a set of cores, parameters of a scheduler
    words[0] = 1
    args = {
        "prlimit64": (watcher, resource.RLIMIT_CORE, words, None),
        "setpriority": (os.PRIO_PROCESS, watcher, 0),
        "ioprio_set": (1, watcher, 0),
        "sched_setaffinity": (watcher, 8, words),
        "clone": (0x10000000, 0, 0, 0, 0),  # a namespace of users
        "prctl": (4, 0, 0, 0, 0),  # PR_SET_DUMPABLE
    }
    told = {name: call(name, *args.get(name, (watcher, 0, 0, 0, 0, 0))) for name in seccomp.CALLS}
    told["all of the user"] = call("setpriority", os.PRIO_USER, 0, 0), call("ioprio_set", 3, os.getuid(), 0)
    return told
"""


def test_calls_that_act_on_other_processes_are_refused():
    told, refused = confined(CALLS_AT_THE_WATCHER)
    assert not any("seccomp" in name for name in refused)
    assert told.pop("clone3") == "ENOSYS", "the C library then uses clone"
    assert told.pop("all of the user") == ["EPERM", "EPERM"]
    assert told == dict.fromkeys(told, "EPERM") and len(told) == len(seccomp.CALLS) - 1


CALLS_AT_ITSELF = """
def found():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        [
            failure(resource.prlimit, process, resource.RLIMIT_NOFILE, (soft, hard)),
            failure(os.sched_setaffinity, process, os.sched_getaffinity(process)),
            failure(os.setpriority, os.PRIO_PROCESS, process, os.getpriority(os.PRIO_PROCESS, process)),
            failure(os.sched_setscheduler, process, os.SCHED_OTHER, os.sched_param(0)),
        ]
        for process in (0, os.getpid())
    ]
"""


def test_calls_that_act_on_the_process_itself_are_allowed():
    assert confined(CALLS_AT_ITSELF)[0] == [[""] * 4] * 2


def test_a_filter_is_for_the_architectures_that_it_knows(monkeypatch):
    monkeypatch.setattr(seccomp.platform, "machine", lambda: "riscv64")
    assert not seccomp.refuse_calls()


NO_MORE_FILES = """
#include <sys/resource.h>
#include <unistd.h>
"""


@pytest.mark.parametrize("lacking", ["seccomp", "landlock and seccomp"])
def test_a_watcher_that_can_open_no_more_files_ends_all_the_same(mark, monkeypatch, capfd, lacking):
    """As a kernel does to it where no system call is refused."""
    monkeypatch.setattr(in_subprocess, "_supervise", functools.partial(hostile.supervise_without, lacking))
    lowers = (
        f'(void)!system("setsid setsid sleep {mark} &");'
        "const rlimit none = {0, 0}; prlimit(getppid(), RLIMIT_NOFILE, &none, nullptr);"
        "for (volatile int i = 0; i < 1; i = 0);"
    )
    with pytest.raises(ChildProcessError, match="the code's processes cannot be watched any more .*, so they end"):
        check(combine_that(lowers, SYSTEM + NO_MORE_FILES))
    assert hostile.until(lambda: not hostile.processes_of(mark), limit=30)
    printed = capfd.readouterr().err
    assert "the processes of the kernel cannot be listed" in printed and "Traceback" not in printed


@pytest.mark.parametrize("refused", ["wait", "_descendants"])
def test_a_watcher_says_what_the_system_refuses_it(monkeypatch, refused):
    def refuse(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(guard, refused, refuse)
    reading, writing = os.pipe()
    message = "cannot be watched any more .*Invalid argument"
    with open(reading, "rb"), open(writing, "wb"), pytest.raises(ChildProcessError, match=message):
        if refused == "wait":
            guard._watch(0, reading, None, guard.Limits(60), [])
        guard._look(guard.Limits(60), 0)


# ---- files --------------------------------------------------------------------------------------


@pytest.fixture
def shared_file():
    """The path of a file that is not there, in /dev/shm."""
    path = Path("/dev/shm", f"moeblaze-{uuid.uuid4().hex}")
    yield path
    path.unlink(missing_ok=True)


WRITES_FILES = """
def found():
    files = [os.path.join(folder, "own"), "/dev/null", outside[0], os.path.join(outside[1], "new")]
    thread = threading.Thread(target=lambda: named.append(failure(open, f"/proc/{os.getpid()}/task/{tid}/comm", "w")))
    named, tid = [], threading.get_native_id()
    thread.start()
    thread.join()
    own = os.path.join(folder, "inner")
    os.mkdir(own)
    return {
        "written": [failure(open, file, "w") for file in files],
        "moved": [failure(os.replace, outside[0], files[0]), failure(os.replace, files[0], os.path.join(own, "own"))],
        "removed": failure(os.unlink, outside[0]),
        "named": named,
        "shared": failure(open, outside[2], "w"),
        "system": failure(open, "/proc/sys/kernel/core_pattern", "r+"),
        "watcher": failure(open, f"/proc/{watcher}/comm", "w"),
    }
"""


def test_only_temporary_files_and_what_cuda_needs_can_be_written(tmp_path, shared_file):
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    told, refused = confined(WRITES_FILES, outside, tmp_path, shared_file)
    assert not any("Linux 6.2" in name for name in refused)
    assert told["written"] == ["", "", "EACCES", "EACCES"]
    assert told["moved"][0] in ("EACCES", "EXDEV") and told["moved"][1] == ""
    assert told["named"] == [""], "CUDA names the threads of its process"
    assert {told[what] for what in ("removed", "shared", "system", "watcher")} == {"EACCES"}
    assert outside.read_text() == "mine\n" and [*tmp_path.iterdir()] == [outside]


def test_each_opened_path_has_a_reason(tmp_path):
    assert all(path.startswith("/") and reason for path, reason in landlock.opened(str(tmp_path)))


# ---- memory -------------------------------------------------------------------------------------

SHARED = "#include <cstdlib>\n#include <fcntl.h>\n#include <sys/mman.h>\n#include <unistd.h>\n"


def fill(opening, mark):
    """A combine that fills two files of 700 MiB, keeps them open and waits."""
    files = f"for (int i = 0; i < 2; ++i) {{ {opening} (void)!posix_fallocate(file, 0, 700ul << 20); }}"
    return combine_that(f'{files} (void)!system("sleep {mark}");', SHARED)


TOO_MUCH = r"hold [0-9,]+ MiB of memory, but 1,024 MiB is the limit"


def opening(shared_file):
    """Open a file of /dev/shm that has no name any more."""
    return f'const int file = open("{shared_file}", O_CREAT | O_RDWR, 0600); unlink("{shared_file}");'


@pytest.mark.parametrize("where", ["memory without a name", "shared memory"])
def test_a_file_in_memory_is_memory(mark, monkeypatch, shared_file, where):
    """One of /dev/shm, too, where the system does not refuse to make it."""
    opens = 'const int file = memfd_create("mine", 0);'
    if where == "shared memory":
        monkeypatch.setattr(in_subprocess, "_supervise", hostile.without_landlock)
        opens = opening(shared_file)
    with pytest.raises(ChildProcessError, match=TOO_MUCH):
        check(fill(opens, mark), guard.Limits(120, resident_bytes=1 << 30))


def test_no_file_is_left_in_shared_memory(shared_file):
    verdict = check(combine_that(f'(void)!open("{shared_file}", O_CREAT | O_RDWR, 0600);', SHARED))
    assert not verdict.first_problem and not shared_file.exists()


def test_a_file_in_memory_that_is_mapped_and_closed_counts_where_the_system_shows_it():
    """Though nothing of the map was touched. A file that is open as well counts once."""
    size = 8 << 20
    file, before = os.memfd_create("mine"), guard._bytes_of_files_in_memory([os.getpid()])
    os.posix_fallocate(file, 0, size)
    with mmap.mmap(file, size):
        assert guard._bytes_of_files_in_memory([os.getpid()]) == before + size
        os.close(file)
        shown = 0
        for path in guard._mapped_files(os.getpid()):
            with contextlib.suppress(PermissionError):  # not root
                shown += os.stat(path).st_size == size
        assert guard._bytes_of_files_in_memory([os.getpid()]) == before + (size if shown else 0)
    assert guard._bytes_of_files_in_memory([os.getpid()]) == before


# ---- folders ------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path):
    """A folder that is removed in the end, however deep it is: pytest cannot."""
    place = tmp_path / "place"
    place.mkdir()
    yield place
    processes.run(["chmod", "-R", "u+rwx", place])
    processes.run(["rm", "-rf", place])


def nest(folder, depth):
    """Make a chain of folders, too deep for any path."""
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=inner)
        outer, inner = inner, os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)


def test_folders_nested_to_any_depth_are_removed(place):
    nest(place, 3000)
    (place / "d" / "file").touch()
    assert folders.remove(place) == "" and not place.exists()


def test_wide_folders_are_removed(place):
    for number in range(40):
        (place / f"{number}" / "a" / "b").mkdir(parents=True)
        (place / f"{number}" / "a" / f"{number}").touch()
    assert folders.remove(place) == "" and not place.exists()


def test_links_are_removed_and_not_followed(place):
    others, removed, link = place / "others", place / "removed", place / "link"
    others.mkdir(mode=0o755)
    (others / "file").touch()
    removed.mkdir()
    (removed / "to a folder").symlink_to(others)
    (removed / "to nothing").symlink_to("nothing")
    link.symlink_to(others)
    assert folders.remove(removed) == folders.remove(link) == folders.remove(place / "absent") == ""
    assert [*place.iterdir()] == [others] and [*others.iterdir()] == [others / "file"]
    assert others.stat().st_mode & 0o777 == 0o755


REMOVE = "import sys\nfrom moeblaze_ref.core import folders\nprint(folders.remove(sys.argv[1]))"


def remove_without_capabilities(path):
    """What `folders.remove` says to a user who is not root, or is root without its rights."""
    command = [sys.executable, "-c", WITHOUT_CAPABILITIES, sys.executable, "-c", REMOVE, str(path)]
    done = processes.run(command, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


def test_closed_folders_are_removed(place):
    (place / "closed" / "inner").mkdir(parents=True)
    (place / "closed" / "inner" / "file").touch()
    for folder in (place / "closed" / "inner", place / "closed", place):
        folder.chmod(0)
    assert remove_without_capabilities(place) == "" and not place.exists()


def test_what_cannot_be_removed_is_one_line(place):
    kept = place / "kept"
    (kept / "inner").mkdir(parents=True)
    place.chmod(0o500)
    assert remove_without_capabilities(kept) == f"{kept} cannot be removed: Permission denied"
    assert kept.is_dir() and not [*kept.iterdir()]


LEAVES = {
    "deep folders": 'for (int i = 0; i < 3000; ++i) (void)!(mkdir("d", 0700) + chdir("d"));',
    "a closed folder": '(void)!(mkdir("d", 0700) + mkdir("d/d", 0700) + chmod("d", 0));',
    "a link in its place": '(void)!system("rm -r \\"$TMPDIR\\" && ln -s / \\"$TMPDIR\\"");',
}


@pytest.mark.parametrize("what", LEAVES)
def test_no_temporary_folder_is_left(place, what):
    """Nor a traceback; without the rights of root, and where the system does not keep the code from its own folder."""
    includes = "#include <cstdlib>\n#include <sys/stat.h>\n#include <unistd.h>\n"
    command = check_command("hostile.without_landlock", "spawn", combine_that(LEAVES[what], includes))
    command = [sys.executable, "-c", WITHOUT_CAPABILITIES, *command]
    done = processes.run(command, env=environment(TMPDIR=str(place)))
    assert "right in all" in done.stdout and done.stderr == "", done.stdout + done.stderr
    assert hostile.until(lambda: not [*place.iterdir()], limit=30), [*place.iterdir()]
