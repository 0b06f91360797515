"""The output folder or file that a command is given, and the codes that it ends with. No Ray here."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from dlmgrid.cluster.records import submission_id
from dlmgrid.workers.errors import InputError


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
    if existing != out and _refuses_files(existing):
        raise InputError(f"--out {out} cannot be made, {existing} is not writable; choose another")
    return out


def check_out_file(path: Path, option: str, suffix: str = "", *, beside: Sequence[str] = ()) -> Path:
    """The file that ``option`` names, checked before the work that it is to hold.

    ``suffix`` is the ending that it must have; ``beside`` are the endings of what is written with it. Raises
    InputError for another ending, a folder, a folder that is not there, and a place where no file can be written.
    """
    if suffix and path.suffix != suffix:
        raise InputError(f"{option} {path}: give a {suffix} file")
    try:
        for file in (path, *(path.with_suffix(ending) for ending in beside)):
            if file.is_dir():
                raise InputError(f"{option} {path}: {file} is a folder; name a file")
        if not path.parent.is_dir():
            raise InputError(f"{option} {path}: the folder {path.parent} does not exist; make it first")
        reason = _refuses_files(path.parent)
    except (OSError, ValueError) as error:
        raise InputError(f"{option} {path} is no usable path ({error}); choose another") from error
    if reason or (path.exists() and not os.access(path, os.W_OK)):
        reason = reason or "the file may not be changed"
        raise InputError(
            f"{option} {path} cannot be written ({reason}); name a file in a folder you can write"
        )
    return path


def check_own_json(path: Path, option: str, what: str, is_own: Callable[[Mapping[str, Any]], bool]) -> None:
    """Check that a JSON file that would be replaced is of the kind that replaces it, or is not there.

    Raises InputError for any other file, naming ``what`` it should be.
    """
    if not path.exists():
        return
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict) or not is_own(values):
        raise InputError(
            f"{option}: {path} exists and is no {what}, so it is not overwritten; give another name or move it"
        )


def has_format(*kinds: str) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a file's values have a format of one of these kinds, in any version."""
    return lambda values: str(values.get("format", "")).startswith(kinds)


def _refuses_files(folder: Path) -> str:
    """Why no file can be made in a folder, "" where one can: permissions do not tell, of ``/proc`` or for root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__


def _look_at(path: Path) -> None:
    """Raises OSError for a path that not only is missing but cannot be: a name too long for the file system."""
    try:
        path.lstat()
    except FileNotFoundError:
        return
