"""A thread beside each rank's work that ends the run with an error when another rank is lost.

A collective that waits for a lost rank says at most that a connection is gone; on a GPU it says nothing and waits. Here
every rank gives signs of life through the store of ``torch.distributed``: how often it has done so, how many
collectives it has begun, and whether it is done. A rank whose signs stop has died; one that gives signs, but stays
where others wait for it, in a collective or at the end, hangs.
"""

import itertools
import json
import math
import os
import sys
import threading
import time
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store  # there is no public way to it

from moeblaze_ref.core import checks
from moeblaze_ref.parallel.ranks import LostRank, check_initialised, progress

TIMEOUT = 300.0  # seconds
SIGNS = 32  # of life, in a time-out
LOST_AFTER = 0.7  # of the time-out, after which a rank is lost: the rest is for signs to be seen, and for all to end
QUIET = 0.25  # of the time-out, after which a rank without a sign may have died
HEARD = 2  # pauses between signs, until all have heard a verdict
LEFT = 1  # and then, until the work has ended by its own error
SOON = 0.05  # seconds between signs once the work has ended: only the others are waited for
PATIENCE = 3  # time-outs that a failed collective waits for a verdict
WORKING, DONE = "working", "done"
LOST = "lost"  # the verdict's key in the store; a rank's sign has its number
_watches = itertools.count()


@dataclass
class Seen:
    """State of a rank: its last sign, and when it last changed."""

    beat_at: float
    progress_at: float
    beat: int = 0
    progress: int = 0
    state: str = WORKING  #: WORKING, DONE, or what error it ended with

    @property
    def reached(self) -> float:
        """Collectives begun; who is done is beyond all of them."""
        return math.inf if self.state == DONE else self.progress

    def update(self, now: float, beat: int, progress: int, state: str):
        """Note a sign."""
        before = self.reached
        if beat != self.beat:
            self.beat, self.beat_at = beat, now
        self.progress, self.state = progress, state
        if self.reached != before:
            self.progress_at = now


def verdict(seen: list[Seen], now: float, timeout: float) -> str | None:
    """Return which rank is lost, and how, or None: one is lost after ``LOST_AFTER`` of the time-out, in seconds."""
    limit = LOST_AFTER * timeout
    for number, rank in enumerate(seen):
        if rank.state not in (WORKING, DONE):
            return f"rank {number} has failed: {rank.state}"
    for number, rank in enumerate(seen):
        if rank.state == WORKING and now - rank.beat_at > limit:
            return f"rank {number} has died: no sign of it for {limit:g} s"
    if any(rank.state == WORKING and now - rank.beat_at > QUIET * timeout for rank in seen):
        return None  # it may have died, and then it is why others are behind, or wait
    number, last = min(enumerate(seen), key=lambda each: (each[1].reached, each[1].progress_at))
    ahead = [rank for rank in seen if rank.reached > last.reached]
    if not ahead or now - max(last.progress_at, min(rank.progress_at for rank in ahead)) <= limit:
        return None
    place = "the end" if all(rank.state == DONE for rank in ahead) else f"collective {last.progress + 1}"
    return f"rank {number} hangs: for {limit:g} s it has not come to {place}, where others wait for it"


class Watch(AbstractContextManager):
    """Context in which the loss of a rank ends every rank within the time-out, and the error names it.

    Every rank enters and leaves it; leaving waits for the others. Where a collective fails, as gloo's do when another
    rank has died, `LostRank` is raised on leaving. A collective that waits for ever cannot be left: then the process
    writes the same message to stderr and ends with status 1. ``timeout`` is in seconds, from a rank's last sign, or
    from when others wait for it, until all have ended.

    Raises
    ------
    ValueError, TypeError
        If the time-out is not above 0.
    LostRank
        On leaving: "rank 2 has died: ...".
    """

    def __init__(self, timeout: float = TIMEOUT):
        self.timeout = checks.check_positive("timeout", timeout)
        check_initialised()
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore(f"moeblaze watch {next(_watches)}", _get_default_store().clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=LOST_AFTER * self.timeout))
        self._pause = self.timeout / SIGNS
        self._state = WORKING
        self._lost: str | None = None
        self._main_has_left = threading.Event()
        self._over = threading.Event()  # no rank is waited for any more
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
        start = time.monotonic()
        seen = [Seen(start, start) for _ in range(self._size)]
        beat = 0
        while not self._over.is_set():
            beat, state = beat + 1, self._state
            try:
                with self._answering():
                    self._store.set(str(self._rank), json.dumps([beat, progress(), state]))
                    self._look(seen)
                    self._lost = self._told() or verdict(seen, time.monotonic(), self.timeout)
                    if self._lost:
                        self._store.set(LOST, self._lost)
                if self._lost or state not in (WORKING, DONE) or all(rank.state == DONE for rank in seen):
                    self._over.set()
            except RuntimeError as error:  # a rank that is done may find the others, and their store, gone
                self._lost = None if state == DONE else _without_store(error)
                self._over.set()
            self._rest()
        if state != DONE or self._lost:
            time.sleep(HEARD * self._pause)  # before this rank, and maybe the store, is gone
        if self._lost:
            self._leave_or_end()

    def _rest(self):
        """Wait until the next sign, which is due as soon as the work has ended."""
        if self._main_has_left.is_set():
            self._over.wait(min(SOON, self._pause))
        elif not self._over.is_set():
            self._main_has_left.wait(self._pause)

    def _told(self):
        """Return the verdict that another rank has published first, so that all report the same."""
        return self._store.get(LOST).decode() if self._store.check([LOST]) else None

    def _look(self, seen):
        for number, rank in enumerate(seen):
            if self._store.check([str(number)]):
                rank.update(time.monotonic(), *json.loads(self._store.get(str(number))))

    def _leave_or_end(self):
        """Let the work end by its own error, if it has one; end the process if it waits for ever."""
        if not self._main_has_left.wait(LEFT * self._pause):
            self._end(self._lost)

    def _end(self, lost):
        sys.stderr.write(f"rank {self._rank} ends: {lost}\n")
        sys.stderr.flush()
        os._exit(1)

    @contextmanager
    def _answering(self):
        """End the process if the store, whose host may be stopped, lets the thread wait for ever."""
        limit = LOST_AFTER * self.timeout
        waiting = threading.Timer(limit, self._end, [_without_store(f"for {limit:g} s")])
        waiting.daemon = True
        waiting.start()
        try:
            yield
        finally:
            waiting.cancel()


def _without_store(error):
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"torchrun has died: its store does not answer ({error})"
    return f"rank 0 has died: its store does not answer ({error})"
