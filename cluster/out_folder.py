"""The output folder that a command is given, and the codes that it ends with. No Ray here."""

from __future__ import annotations

import os
from enum import IntEnum
from pathlib import Path

from dlmgrid.cluster.records import submission_id
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.out_file import refuses_files


class ExitCode(IntEnum):
    """What the process returns; people wire nightly alarms to it."""

    DONE = 0
    ROWS_FAILED = 1
    BAD_INPUT = 2
    GATE_BREACHED = 3
    NOT_EXACT = 4
    INCOMPLETE = 5


def check_out(out: Path) -> Path:
    """The output folder as an absolute path: one that is there, or one that can be made.

    Raises InputError for a file, for a place below a file or where nothing may be written, and under a Ray job
    for a relative path, or one inside the job's own copy of the working folder: what is written there vanishes
    with the job.
    """
    if submission_id() is not None:
        if not out.is_absolute():
            raise InputError(
                f"--out {out} is relative, and under a Ray job that is a temporary copy which vanishes; "
                "give an absolute "
                "path on storage that every node sees"
            )
        if out.resolve().is_relative_to(Path.cwd().resolve()):
            raise InputError(
                f"--out {out} lies in the job's temporary copy of the code, which vanishes; choose another"
            )
    try:
        out = out.expanduser().absolute()
        existing = next(path for path in (out, *out.parents) if os.path.lexists(path))
        is_folder = existing.is_dir()
        if existing != out and is_folder:
            _look_at(out)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--out {out} is no usable path ({reason}); choose another") from error
    if not is_folder:
        raise InputError(
            f"--out {out} is a file; choose a folder"
            if existing == out
            else f"--out {out} lies below {existing}, which is no folder; choose another"
        )
    if existing != out and refuses_files(existing):
        raise InputError(f"--out {out} cannot be made, {existing} is not writable; choose another")
    return out


def _look_at(path: Path) -> None:
    """Raises OSError for a path that not only is missing but cannot be: a name too long for the file system."""
    try:
        path.lstat()
    except FileNotFoundError:
        return
