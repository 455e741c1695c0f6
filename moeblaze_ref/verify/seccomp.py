"""A filter of system calls, which the kernel of Linux (seccomp) runs before each call of untrusted code.

The filter refuses calls that act on other processes, on the whole machine, or on memory that outlives all processes,
and the network: every socket but those between processes of this machine.
Many of these calls take a process id. The filter allows them for 0, which is the caller, and for the id of the process
that installed it. It cannot tell the threads and children of that process from foreign processes, so it refuses calls
that name those. It sees numbers only, never what a pointer leads to.

References: seccomp(2), linux/filter.h, linux/seccomp.h, linux/audit.h, and the tables of system calls of Linux.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

_SET_MODE_FILTER = 1
_WITH_LISTENER = 1 << 3 | 1 << 5  # SECCOMP_FILTER_FLAG_NEW_LISTENER and, of Linux 5.19, -WAIT_KILLABLE_RECV
_ALLOW, _ASK, _ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000  # what a filter returns
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # operations, on 32-bit words
_CALL, _MACHINE, _ARGUMENTS = 0, 4, 16  # offsets into struct seccomp_data
_X32 = 0x40000000  # the bit of calls with 32-bit pointers on x86-64
_NAMESPACES = 0x7E020000  # CLONE_NEWNS, -NEWCGROUP, -NEWUTS, -NEWIPC, -NEWUSER, -NEWPID and -NEWNET
_CLONE_THREAD = 0x00010000
_PR_SET_DUMPABLE, _PRIO_USER, _IOPRIO_WHO_USER, _AF_UNIX = 4, 2, 3, 1

# AUDIT_ARCH_..., the place in `Call.numbers`, and the number of the system call seccomp.
_MACHINES = {"x86_64": (0xC000003E, 0, 317), "aarch64": (0xC00000B7, 1, 277)}
_NO_CALL = 0xFFFFFFFF

Block = list[bytes]  # instructions, of which the last one returns


def _instruction(operation: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One ``struct sock_filter``: a jump skips ``then`` or ``otherwise`` instructions."""
    return struct.pack("=HBBI", operation, then, otherwise, value)


def _argument(index: int) -> bytes:
    """Load the low word of an argument. The kernel reads only this word of an int."""
    return _instruction(_LOAD, _ARGUMENTS + 8 * index)


_ALLOWED = [_instruction(_RETURN, _ALLOW)]
_REFUSED = [_instruction(_RETURN, _ERRNO | errno.EPERM)]
_ABSENT = [_instruction(_RETURN, _ERRNO | errno.ENOSYS)]
_ASKED = [_instruction(_RETURN, _ASK)]


_always = lambda process: _REFUSED
_absent = lambda process: _ABSENT  # the C library then uses the older call, whose arguments the filter sees


def _on_other_processes(process: int, index: int = 0) -> Block:
    return [
        _argument(index),
        _instruction(_EQUAL, 0, then=2),
        _instruction(_EQUAL, process, then=1),
        *_REFUSED,
        *_ALLOWED,
    ]


def _with_value(value: int, otherwise: Callable[[int], Block] = lambda process: _ALLOWED) -> Callable[[int], Block]:
    """Refuse a call whose first argument is this value."""
    return lambda process: [_argument(0), _instruction(_EQUAL, value, otherwise=1), *_REFUSED, *otherwise(process)]


def _without_value(value: int) -> Callable[[int], Block]:
    """Refuse a call whose first argument is another than this value."""
    return lambda process: [_argument(0), _instruction(_EQUAL, value, then=1), *_REFUSED, *_ALLOWED]


def _with_bits(bits: int) -> Callable[[int], Block]:
    """Refuse a call whose first argument has any of these bits."""
    return lambda process: [_argument(0), _instruction(_ANY_BIT, bits, otherwise=1), *_REFUSED, *_ALLOWED]


def _second_on_other_processes(process: int) -> Block:
    return _on_other_processes(process, index=1)


def _unless_thread(process: int) -> Block:
    return [_argument(0), _instruction(_ANY_BIT, _CLONE_THREAD, then=1), *_ASKED, *_ALLOWED]


class Call(NamedTuple):
    """A system call about which a filter decides."""

    numbers: tuple[int, int]  #: on x86-64 and on aarch64
    block: Callable[[int], Block] = _always  #: takes the id of the process and returns the instructions that decide


CALLS = {
    # Limits, priorities, cores and memory of another process.
    "prlimit64": Call((302, 261), _on_other_processes),
    "setpriority": Call((141, 140), _with_value(_PRIO_USER, _second_on_other_processes)),
    "ioprio_set": Call((251, 30), _with_value(_IOPRIO_WHO_USER, _second_on_other_processes)),
    "sched_setaffinity": Call((203, 122), _on_other_processes),
    "sched_setscheduler": Call((144, 119), _on_other_processes),
    "sched_setparam": Call((142, 118), _on_other_processes),
    "sched_setattr": Call((314, 274), _on_other_processes),
    "migrate_pages": Call((256, 238), _on_other_processes),
    "move_pages": Call((279, 239), _on_other_processes),
    "process_vm_readv": Call((310, 270), _on_other_processes),
    "process_vm_writev": Call((311, 271), _on_other_processes),
    "process_madvise": Call((440, 440)),
    "process_mrelease": Call((448, 448)),
    "ptrace": Call((101, 117)),
    "kcmp": Call((312, 272)),
    "pidfd_open": Call((434, 434)),
    "pidfd_getfd": Call((438, 438)),
    "pidfd_send_signal": Call((424, 424)),
    "perf_event_open": Call((298, 241)),
    "bpf": Call((321, 280)),
    # The process that watches must be able to see the open files.
    "prctl": Call((157, 167), _with_value(_PR_SET_DUMPABLE)),
    # Keys of the user.
    "add_key": Call((248, 217)),
    "request_key": Call((249, 218)),
    "keyctl": Call((250, 219)),
    # Mounts and namespaces, where a process may get capabilities.
    "mount": Call((165, 40)),
    "umount2": Call((166, 39)),
    "pivot_root": Call((155, 41)),
    "chroot": Call((161, 51)),
    "open_tree": Call((428, 428)),
    "move_mount": Call((429, 429)),
    "fsopen": Call((430, 430)),
    "fsconfig": Call((431, 431)),
    "fsmount": Call((432, 432)),
    "fspick": Call((433, 433)),
    "mount_setattr": Call((442, 442)),
    "unshare": Call((272, 97)),
    "setns": Call((308, 268)),
    "clone": Call((56, 220), _with_bits(_NAMESPACES)),
    "clone3": Call((435, 435), _absent),
    # Memory that outlives all processes, is another's, or that the process that watches does not see.
    "shmget": Call((29, 194)),
    "shmat": Call((30, 196)),
    "shmctl": Call((31, 195)),
    "semget": Call((64, 190)),
    "semop": Call((65, 193)),
    "semctl": Call((66, 191)),
    "semtimedop": Call((220, 192)),
    "msgget": Call((68, 186)),
    "msgsnd": Call((69, 189)),
    "msgrcv": Call((70, 188)),
    "msgctl": Call((71, 187)),
    "mq_open": Call((240, 180)),
    "mq_unlink": Call((241, 181)),
    "memfd_secret": Call((447, 447)),
    # The network, and the calls that would open a socket unseen.
    "socket": Call((41, 198), _without_value(_AF_UNIX)),
    "io_uring_setup": Call((425, 425)),
}

# Calls that start a process. `CALLS` makes clone3 absent.
STARTS = {
    "fork": Call((57, _NO_CALL), lambda process: _ASKED),
    "vfork": Call((58, _NO_CALL), lambda process: _ASKED),
    "clone": Call((56, 220), _unless_thread),
}


def refuse_calls(calls: Iterable[str] = tuple(CALLS)) -> bool:
    """Install the filter of some of `CALLS` for this process and those that it starts; False if the system refuses.

    The process must have set ``PR_SET_NO_NEW_PRIVS``, and has one thread.
    """
    return _install([CALLS[name] for name in calls]) == 0


def ask_before_starts() -> int:
    """Install a filter that makes each of `STARTS` wait until the listener, a file, has an answer.

    The filter also applies to the processes that this process starts. When the listener is closed, these calls fail.
    Returns the listener, or -1 if the system refuses. The conditions of `refuse_calls` hold here too.
    """
    return _install(STARTS.values(), _WITH_LISTENER)


def _install(calls: Iterable[Call], flags: int = 0) -> int:
    """Install a filter. Returns what the system call returns: -1 if the system refuses."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return -1
    program = b"".join(_program(calls, platform.machine(), os.getpid()))
    code = ctypes.create_string_buffer(program, len(program))
    header = _Program(len(program) // len(_ALLOWED[0]), ctypes.addressof(code))
    *_, number = _MACHINES[platform.machine()]
    return ctypes.CDLL(None).syscall(number, _SET_MODE_FILTER, flags, ctypes.byref(header))


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def _program(calls: Iterable[Call], machine: str, process: int) -> Block:
    """The filter's instructions. A call of another architecture, such as a 32-bit one, is refused."""
    architecture, place, _ = _MACHINES[machine]
    program = [_instruction(_LOAD, _MACHINE), _instruction(_EQUAL, architecture, then=1), *_REFUSED]
    program += [_instruction(_LOAD, _CALL), _instruction(_AT_LEAST, _X32, otherwise=1), *_REFUSED]
    for call in calls:
        block = call.block(process)
        program += [_instruction(_EQUAL, call.numbers[place], otherwise=len(block)), *block]
    return program + _ALLOWED
