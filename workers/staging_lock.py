"""Who may write to ``OUT/staging``: decoders of planned units side by side, each unit by one, or a run alone.

The locks are the operating system's, so they end with their process. Where a file system has none, nothing is held.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dlmgrid.workers.errors import InputError

try:
    import fcntl
except ImportError:  # Windows has none: two decoders of one unit then write the same rows twice, each whole
    fcntl = None  # type: ignore[assignment]


@contextmanager
def alone_in_staging(out: Path) -> Iterator[None]:
    """Hold ``OUT/staging`` for a run. Raises InputError while a decoder of planned units writes there."""
    with _opened(out / "staging.lock") as descriptor:
        if not _take(descriptor):
            raise InputError(
                f"{out}: planned units are being decoded into its staging/; wait for dlmgrid decode to end, or stop it"
            )
        yield


@contextmanager
def decoding_units(out: Path, unit_keys: Sequence[str]) -> Iterator[None]:
    """Hold these units of ``OUT`` for a decoder.

    Raises InputError while a run writes there, or another decoder holds one of the units.
    """
    with _opened(out / "staging.lock") as shared, _opened(out / "units.lock") as units:
        if not _take(shared, is_shared=True):
            raise InputError(f"{out} is being written by a run; wait for it, or stop it")
        taken = [key for key in unit_keys if not _take(units, at=int(key[:15], 16))]
        if taken:
            raise InputError(
                f"{out}: {len(taken)} of these {len(unit_keys)} units are being decoded by another process; give each "
                "process a --part of its own, or wait"
            )
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InputError(
            f"{path.parent} cannot be written ({error.strerror}); choose another --out"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _take(descriptor: int, *, is_shared: bool = False, at: int | None = None) -> bool:
    """Take the lock of a whole file, or of its byte ``at``. False where another process has it."""
    if fcntl is None:
        return True
    kind = (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    try:
        if at is None:
            fcntl.flock(descriptor, kind)
        else:
            fcntl.lockf(descriptor, kind, 1, at)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
    return True
