"""Names of files that are being written: each writer has its own, so two never tear or take each other's file."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4


def partial_path(path: Path) -> Path:
    """Where to write what then replaces ``path``: beside it, under a name that nobody else uses, ending in .part."""
    return path.with_name(f"{path.name}.{os.getpid()}-{uuid4().hex[:8]}.part")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file, text as UTF-8, so that a reader finds the old one or the new one and never half of it.

    Raises OSError where it cannot be written; the old file is then as it was.
    """
    partial = partial_path(path)
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def publish(partial: Path, path: Path) -> None:
    """Put a written file in its place, readable by whom the user's umask lets read: some writers make private files."""
    mask = os.umask(0o077)
    os.umask(mask)
    partial.chmod(0o666 & ~mask)
    partial.replace(path)
