"""A limit on the time that a stretch of code takes, by an alarm."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the body after ``seconds``. Main thread only; one long operation of C code ends first."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    previous = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
