"""Names of files that are being written: each writer has its own, so two never tear or take each other's file."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4


def partial_path(path: Path) -> Path:
    """Where to write what then replaces ``path``: beside it, under a name that nobody else uses, ending in .part."""
    return path.with_name(f"{path.name}.{os.getpid()}-{uuid4().hex[:8]}.part")
