"""Who may write to ``OUT/staging``: decoders of planned units side by side, each row by one, or a run alone.

The locks are the operating system's, so they end with their process. Where a file system has none, nothing is held.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dlmgrid.workers.cell import digest
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.units import WorkUnit

try:
    import fcntl
except ImportError:  # Windows has none: two decoders of one unit then write the same rows twice, each whole
    fcntl = None  # type: ignore[assignment]

MOST_ROWS_HELD = 4096
"""Rows of a call that are held one by one; with more, only its units are, since every lock is looked for among all."""


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
def decoding_units(out: Path, units: Sequence[WorkUnit]) -> Iterator[None]:
    """Hold these units of ``OUT``, and their rows, which may be other units' too, for a decoder.

    Raises InputError while a run writes there, or another decoder holds one of the units or rows.
    """
    with _opened(out / "staging.lock") as shared, _opened(out / "units.lock") as descriptor:
        if not _take(shared, is_shared=True):
            raise InputError(f"{out} is being written by a run; wait for it, or stop it")
        has_rows = sum(len(unit.keys) for unit in units) <= MOST_ROWS_HELD
        taken = [unit for unit in units if not _take_unit(descriptor, unit, has_rows=has_rows)]
        if taken:
            raise InputError(
                f"{out}: {len(taken)} of these {len(units)} units, or rows of them, are being decoded by another "
                "process; give each process a --part of its own and of one plan, or wait"
            )
        yield


def _take_unit(descriptor: int, unit: WorkUnit, *, has_rows: bool) -> bool:
    names = [unit.unit_key]
    if has_rows:
        cell_key = unit.cell.cell_key
        names += [digest([cell_key, key.item_id, key.repeat]) for key in unit.keys]
    return all(_take(descriptor, at=int(name[:15], 16)) for name in names)


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
