"""What a replay that was stopped leaves behind, and the same command takes up: a file for each part of a cell."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmgrid import __version__
from dlmgrid.workers.cell import Cell, digest
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import partial_path
from dlmgrid.workers.tables import REPLAYS, read_table, to_table, write_table
from dlmgrid.workers.units import Key

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows of cells on some recorded generations, each in its own file of ``folder``, which is made when needed.

    A name tells everything that the rows follow from: the cell, the generations as (file, row group) with size and
    time of each file, the device of networks, and the version of this package.
    """

    folder: Path

    def load(self, cell: Cell, places: Sequence[tuple[Path, int]], device: str) -> dict[Key, Row] | None:
        """The rows by key; None where none were kept, or their file is damaged."""
        path = self._path(cell, places, device)
        if not path.exists():
            return None
        try:
            rows = read_table([str(path)], REPLAYS).to_pylist()
        except InputError:  # torn by a full disk, or taken away by a replay of the same that has finished
            return None
        return {Key(row["item_id"], row["repeat"]): row for row in rows}

    def save(self, cell: Cell, places: Sequence[tuple[Path, int]], device: str, rows: dict[Key, Row]) -> None:
        """Keep the rows of a cell, in a file that is whole or not there."""
        path = self._path(cell, places, device)
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = partial_path(path)
        write_table(str(partial), to_table(REPLAYS, list(rows.values())))
        partial.replace(path)

    def remove(self, cell: Cell) -> None:
        """Drop all that is kept of a cell that is finished, and the folder with its last file."""
        for path in self.folder.glob(f"{cell.cell_key}-*.parquet"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others keep rows in it, or nothing was kept
            self.folder.rmdir()

    def _path(self, cell: Cell, places: Sequence[tuple[Path, int]], device: str) -> Path:
        seen = {path: path.stat() for path in dict.fromkeys(path for path, _ in places)}
        of = [(path.name, seen[path].st_size, seen[path].st_mtime_ns, group) for path, group in places]
        return self.folder / f"{cell.cell_key}-{digest([__version__, device, of])}.parquet"
