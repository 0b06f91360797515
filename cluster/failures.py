"""What came back instead of rows: its kind, which decides about the retry, and one line to show."""

from __future__ import annotations

from enum import StrEnum

import ray.exceptions
from ray.exceptions import RayActorError, RayTaskError

from dlmgrid.workers.errors import DlmgridError, InputError, OutOfMemoryError

_MAX_CHARACTERS = 300


class Failure(StrEnum):
    """Why a call came back without rows; the values are outcomes in the ``attempts`` table."""

    INPUT = "input"
    OUT_OF_MEMORY = "out_of_memory"
    TRANSIENT = "transient"
    DIED = "died"
    PREEMPTED = "preempted"


def classify(error: BaseException) -> Failure:
    """The kind of an error that came back from a call."""
    if isinstance(error, InputError):
        return Failure.INPUT
    if isinstance(error, OutOfMemoryError | ray.exceptions.OutOfMemoryError):
        return Failure.OUT_OF_MEMORY
    if isinstance(error, RayActorError):
        return Failure.PREEMPTED if getattr(error, "preempted", False) else Failure.DIED
    if isinstance(error, TimeoutError):
        return Failure.DIED
    return Failure.TRANSIENT


def raised_in_worker(error: RayTaskError) -> BaseException:
    """The exception that the worker raised; the error itself where Ray could not carry it over."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def first_line(error: BaseException) -> str:
    """One line for logs and rows: never a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if isinstance(error, RayActorError):
        text = next(
            (line for line in reversed(lines) if "died" in line.lower() or "killed" in line.lower()), text
        )
    elif not isinstance(error, DlmgridError):
        text = f"{type(error).__name__}: {text}"
    return text[:_MAX_CHARACTERS]
