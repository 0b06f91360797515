"""The output file that a command is given: tried before the work that it is to hold."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import partial_path


def check_out_file(
    path: Path, option: str, suffix: str = "", *, beside: Sequence[str] = (), makes_folder: bool = False
) -> Path:
    """The file that ``option`` names, checked before the work that it is to hold.

    ``suffix`` is the ending that it must have; ``beside`` are the endings of what is written with it; with
    ``makes_folder`` its folder is made where it is missing. Raises InputError for another ending, a folder, a folder
    that is not there, and a place where no file can be written.
    """
    if suffix and path.suffix != suffix:
        raise InputError(f"{option} {path}: give a {suffix} file")
    try:
        for file in (path, *(path.with_suffix(ending) for ending in beside)):
            if file.is_dir():
                raise InputError(f"{option} {path}: {file} is a folder; name a file")
        if makes_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.is_dir():
            raise InputError(f"{option} {path}: the folder {path.parent} does not exist; make it first")
        with suppress(FileNotFoundError):
            partial_path(path).lstat()  # a name may be too long for the file that replaces it
        reason = refuses_files(path.parent)
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


def has_format(*formats: str) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a file's values have one of these formats, ``KIND-VERSION`` each, in any version."""
    kinds = {name.rpartition("-")[0] for name in formats}
    return lambda values: str(values.get("format", "")).rpartition("-")[0] in kinds


def refuses_files(folder: Path) -> str:
    """Why no file can be made in a folder, "" where one can: permissions do not tell, of ``/proc`` or for root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__
