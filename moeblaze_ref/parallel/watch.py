"""Who is missing: a thread beside each rank's work that ends the run with an error when another rank is lost.

A collective that waits for a lost rank says at most that a connection is gone; on a GPU it says nothing and waits. Here
every rank gives signs of life through the store of ``torch.distributed``: how often it has done so, and how many
collectives it has begun. A rank whose signs stop has died; one that gives signs, but stays behind the others, hangs.
"""

import itertools
import json
import os
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store  # there is no public way to it

from moeblaze_ref import doors
from moeblaze_ref.parallel.ranks import LostRank, check_initialised, progress

TIMEOUT = 300.0  # seconds
SIGNS = 8  # of life, in a time-out
SOON = 0.05  # seconds between signs once the work has ended: only the others are waited for
PATIENCE = 3  # time-outs that a failed collective waits for a verdict
WORKING, DONE = "working", "done"
LOST = "lost"  # the verdict's key in the store; a rank's sign has its number
_watches = itertools.count()


@dataclass
class Seen:
    """What is known of a rank: its last sign, and when it last changed."""

    beat: int = 0
    progress: int = 0
    state: str = WORKING  # WORKING, DONE, or what error it ended with
    beat_at: float = field(default_factory=time.monotonic)
    progress_at: float = field(default_factory=time.monotonic)

    def update(self, beat: int, progress: int, state: str):
        """Note a sign."""
        now = time.monotonic()
        if beat != self.beat:
            self.beat, self.beat_at = beat, now
        if progress != self.progress:
            self.progress, self.progress_at = progress, now
        self.state = state


def verdict(seen: list[Seen], now: float, timeout: float) -> str | None:
    """Which rank is lost, and how; None if none is.

    Parameters
    ----------
    seen : list of Seen
        Of every rank.
    now, timeout : float
        Seconds.
    """
    for number, rank in enumerate(seen):
        if rank.state not in (WORKING, DONE):
            return f"rank {number} has failed: {rank.state}"
    for number, rank in enumerate(seen):
        if rank.state == WORKING and now - rank.beat_at > timeout:
            return f"rank {number} has died: no sign of it for {timeout:g} s"
    if any(rank.state == WORKING and now - rank.beat_at > 2 * timeout / SIGNS for rank in seen):
        return None  # it may have died, and then it is why others are behind, or wait
    furthest = max(rank.progress for rank in seen)
    for number, rank in enumerate(seen):
        if rank.progress < furthest and now - rank.progress_at > timeout:
            return (
                f"rank {number} hangs: for {timeout:g} s it has not come to collective {rank.progress + 1}, where "
                f"others wait for it"
            )
    return None


class Watch(AbstractContextManager):
    """Within it, the loss of a rank ends every rank within about twice the time-out, and the error names it.

    Every rank enters and leaves it; leaving waits for the others. Where a collective fails, as gloo's do when a peer
    has died, `LostRank` is raised on leaving. A collective that waits for ever cannot be left: then the process writes
    the same message to stderr and ends with status 1.

    Parameters
    ----------
    timeout : float
        Seconds without a sign, or behind the others, after which a rank is lost.

    Raises
    ------
    ValueError, TypeError
        If the time-out is not above 0.
    LostRank
        On leaving: "rank 2 has died: ...".
    """

    def __init__(self, timeout: float = TIMEOUT):
        self.timeout = doors.check_positive("timeout", timeout)
        check_initialised()
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore(f"moeblaze watch {next(_watches)}", _get_default_store().clone())
        self._store.set_timeout(timedelta(seconds=self.timeout))
        self._pause = self.timeout / SIGNS
        self._state, self._lost = WORKING, None
        self._main_has_left = threading.Event()
        self._over = threading.Event()  # nobody is waited for any more
        self._thread = threading.Thread(target=self._watch, name="watch of the ranks", daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, kind, error, traceback):
        if error is None:
            self._state = DONE
        elif not isinstance(error, LostRank):
            self._state = f"{kind.__name__}: {error}"
        self._main_has_left.set()
        if self._state == WORKING and not self._over.wait(PATIENCE * self.timeout):
            self._state = f"{kind.__name__}: {error}"
        self._thread.join()
        if self._lost is not None:
            raise LostRank(self._lost) from error

    def _watch(self):
        """The thread: a sign, a look at the others', a pause."""
        seen = [Seen() for _ in range(self._size)]
        beat = 0
        while not self._over.is_set():
            beat, state = beat + 1, self._state
            try:
                self._store.set(str(self._rank), json.dumps([beat, progress(), state]))
                self._look(seen)
                self._lost = self._told() or verdict(seen, time.monotonic(), self.timeout)
                if self._lost:
                    self._store.set(LOST, self._lost)
                if self._lost or state not in (WORKING, DONE) or all(rank.state == DONE for rank in seen):
                    self._over.set()
            except RuntimeError as error:  # whoever is done may find the others, and their store, gone
                self._lost = None if state == DONE else _without_store(error)
                self._over.set()
            self._rest()
        if state != DONE or self._lost:
            time.sleep(2 * self._pause)  # the others are to hear of it before this rank, and maybe the store, is gone
        if self._lost:
            self._leave_or_end()

    def _rest(self):
        """Until the next sign, which is due as soon as the work has ended."""
        if self._main_has_left.is_set():
            self._over.wait(min(SOON, self._pause))
        elif not self._over.is_set():
            self._main_has_left.wait(self._pause)

    def _told(self):
        """What another rank has found first, so that all say the same."""
        return self._store.get(LOST).decode() if self._store.check([LOST]) else None

    def _look(self, seen):
        for number, rank in enumerate(seen):
            if self._store.check([str(number)]):
                rank.update(*json.loads(self._store.get(str(number))))

    def _leave_or_end(self):
        """Let the work end by its own error, if it has one; end the process if it waits for ever."""
        if not self._main_has_left.wait(self._pause):
            sys.stderr.write(f"rank {self._rank} ends: {self._lost}\n")
            sys.stderr.flush()
            os._exit(1)


def _without_store(error):
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"torchrun has died: its store does not answer ({error})"
    return f"rank 0 has died: its store does not answer ({error})"
