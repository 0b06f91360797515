"""Weight fingerprints, cached by path, size and time of the checkpoint's files: reading 16 GB once is
enough."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dlmgrid.cluster.progress import write_json


class FingerprintCache:
    """A JSON file from checkpoint folder to fingerprint; an entry whose files changed does not count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, folder: Path) -> str | None:
        entry = self._entries.get(str(folder))
        if entry is None or entry["files"] != _signature(folder):
            return None
        return str(entry["fingerprint"])

    def put(self, folder: Path, fingerprint: str) -> None:
        self._entries[str(folder)] = {"files": _signature(folder), "fingerprint": fingerprint}
        write_json(self._path, self._entries)


def resolve_fingerprints(
    folders: Sequence[Path], cache: FingerprintCache, compute: Callable[[list[Path]], list[str]]
) -> dict[str, str]:
    """The fingerprint of every checkpoint folder; ``compute`` is asked only for those not cached, if any."""
    unknown = [folder for folder in dict.fromkeys(folders) if cache.get(folder) is None]
    if unknown:
        for folder, fingerprint in zip(unknown, compute(unknown), strict=True):
            cache.put(folder, fingerprint)
    return {str(folder): cache.get(folder) or "" for folder in folders}


def _signature(folder: Path) -> list[list[Any]]:
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
