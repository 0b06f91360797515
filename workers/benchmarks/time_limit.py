"""Limits on the time that a stretch of code takes, which do not count waiting for a processor.

A limit in wall time makes a score depend on what else the machine does. Linux says how long a process has been
ready to run without running (``/proc/PID/schedstat``, second number, nanoseconds); a limit is put off by that,
up to ``MAX_PATIENCE`` times itself, so that every limit is a bound still. Elsewhere limits are wall time.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

MAX_PATIENCE = 15.0
_SMALLEST_SECONDS = 0.02
# Kept: a program under test may replace or remove them.
_open, _read, _close = os.open, os.read, os.close


def waiting_seconds(pid: int | str = "self") -> float:
    """Seconds that the process's first thread has been ready to run and had no processor; 0.0 where unknown."""
    try:
        descriptor = _open(f"/proc/{pid}/schedstat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        return int(_read(descriptor, 200).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
    finally:
        _close(descriptor)


class Patience:
    """By how much a limit of ``seconds`` is to be put off for the process ``pid``.

    The limit counts from now, or from when the process had waited for ``before`` seconds.
    """

    def __init__(self, seconds: float, pid: int | str = "self", *, before: float | None = None) -> None:
        self._pid = pid
        self._most = MAX_PATIENCE * seconds
        self._before = waiting_seconds(pid) if before is None else before
        self._granted = 0.0

    def owed(self) -> float:
        """Seconds that were spent waiting and have not been granted by an earlier call; 0.0 when few."""
        found = min(waiting_seconds(self._pid) - self._before, self._most) - self._granted
        if found < _SMALLEST_SECONDS:
            return 0.0
        self._granted += found
        return found


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the body after ``seconds``. Main thread only; one long operation of C code ends first."""
    patience = Patience(seconds)

    def ring(number: int, frame: FrameType | None) -> None:
        if owed := patience.owed():
            signal.setitimer(signal.ITIMER_REAL, owed)
            return
        raise TimeoutError(f"not done within {seconds} s")

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
