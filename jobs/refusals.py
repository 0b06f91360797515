"""How a program of this folder ends on what the user can mend or the machine refuses: one line, and its exit code."""

from __future__ import annotations

import errno
import functools
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

import dlmgrid
from dlmgrid.workers.errors import DlmgridError, InputError

_P = ParamSpec("_P")

REFUSED = (DlmgridError, OSError, MemoryError, RuntimeError)
"""What ends in one line; any other error is a fault of ours and keeps its traceback."""

_PATH_FAULTS = {
    errno.ENOENT, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EROFS,
    errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
_NO_MEMORY = re.compile(r"out of memory|can't allocate|Unable to allocate|alloc_cpu", re.IGNORECASE)


def in_one_line(main: Callable[_P, int]) -> Callable[_P, int]:
    """``main``, whose InputErrors are one line on stderr and exit code 2, and so is what the machine refuses, with its
    code."""

    @functools.wraps(main)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except KeyboardInterrupt:
            return 130
        except REFUSED as error:
            return tell_refusal(error)

    return run


def tell_refusal(error: Exception) -> int:
    """Say on stderr what was refused; the exit code."""
    message, code = refusal(error)
    print(f"error: {message}", file=sys.stderr)
    return code


def refusal(error: Exception) -> tuple[str, int]:
    """What was refused in one line, and the exit code: 2 for an InputError, 2 for a path of the user's that the machine
    refuses, 5, not finished, for all else that it does.

    torch's errors are plain RuntimeErrors that rarely name their cause, so the line also says where it was met.
    """
    if isinstance(error, InputError):
        return str(error), 2
    text = " ".join(str(error).split())[:400]
    if isinstance(error, OSError):
        names = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        message = f"{names}: {error.strerror or text}" if names else text or type(error).__name__
        if error.errno in _PATH_FAULTS and names:
            return f"{message}; name another path", 2
        return f"{message}; mend it and give the same command again", 5
    if isinstance(error, DlmgridError):
        return text, 5
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or _NO_MEMORY.search(text)
    ):
        return (
            f"there is not enough memory ({text or 'MemoryError'}); ask for less at once, such as smaller batches",
            5,
        )
    return f"{text or type(error).__name__} (a {type(error).__name__} at {_place(error)})", 5


def _place(error: Exception) -> str:
    """The innermost line of this package that an error passed: ``workers/units.py:12``."""
    root = Path(dlmgrid.__file__).resolve().parent.parent
    frames = traceback.extract_tb(error.__traceback__)
    files = [(Path(frame.filename).resolve(), frame.lineno) for frame in frames]
    ours = [(file, line) for file, line in files if file.is_relative_to(root)]
    file, line = (ours or files)[-1]
    return f"{file.relative_to(root) if ours else file}:{line}"
