"""Let the process that watches decide whether untrusted code may start a process.

A filter (`seccomp.ask_before_starts`) makes each call that starts a process wait for an answer. The watching process
reads these questions from a file, the *listener*, and answers them. So it counts the processes before they exist, and
the code cannot outrun it, however busy the machine is. While no one answers, no process starts. Once the listener is
closed, as when its process ends, the calls fail.

References: seccomp_unotify(2), linux/seccomp.h.
"""

import contextlib
import fcntl
import os
import select
import socket
import struct
from collections.abc import Iterator

from moeblaze_ref.verify import seccomp

_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and -SEND
_QUESTION_BYTES = 80  # of struct seccomp_notif, which begins with the question's id
_CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE: make the call


def hand_over(channel: socket.socket) -> bool:
    """Install the filter and send its listener to the process that watches; False if the system refuses.

    This process keeps no listener: it would answer its own questions.
    """
    listener = seccomp.ask_before_starts()
    if listener < 0:
        return False
    socket.send_fds(channel, [b"listener"], [listener])
    os.close(listener)
    return True


@contextlib.contextmanager
def received(channel: socket.socket) -> Iterator[int | None]:
    """Wait for the listener, and close it in the end; None if the other process has closed the channel instead."""
    _, files, *_ = socket.recv_fds(channel, 64, 1)
    if not files:
        yield None
        return
    (listener,) = files
    try:
        os.set_inheritable(listener, False)
        yield listener
    finally:
        os.close(listener)


def asked(listener: int | None) -> bool:
    """Return True if a call that starts a process waits for an answer."""
    if listener is None:
        return False
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(0))


def allow(listener: int | None, most: int) -> int:
    """Let calls that wait go on, and return how many fewer than ``most`` they are."""
    while listener is not None and most and asked(listener):
        _answer(listener)
        most -= 1
    return most


def _answer(listener: int):
    question = bytearray(_QUESTION_BYTES)
    with contextlib.suppress(FileNotFoundError):  # who asked has ended
        fcntl.ioctl(listener, _RECEIVE, question)
        (number,) = struct.unpack_from("=Q", question)
        fcntl.ioctl(listener, _SEND, struct.pack("=QqiI", number, 0, 0, _CONTINUE))
