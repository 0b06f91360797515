"""Diagnose a recorded folder: ``python -m dlmgrid.workers.trajectories.diagnose_process TRAJ OUT [--limit N]``."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmgrid import __version__
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.errors import DlmgridError
from dlmgrid.workers.parent_watch import end_with_parent
from dlmgrid.workers.partial_files import partial_path
from dlmgrid.workers.tables import DIAGNOSES, to_table, write_table
from dlmgrid.workers.trajectories.diagnosis import Diagnosis
from dlmgrid.workers.trajectories.files import open_trajectories, recorded_places
from dlmgrid.workers.trajectories.processes import available_cpus, part_size, run_parts
from dlmgrid.workers.trajectories.replay import ReplayBatch
from dlmgrid.workers.trajectories.trajectory import load_generation

GENERATIONS_PER_PROCESS = 24
"""A process is started for at least this many generations: it takes seconds to start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Generations of one cell that are diagnosed together: where each is recorded, as (file, row group)."""

    cell_key: str
    places: tuple[tuple[Path, int], ...]


def diagnose_part(part: Part) -> tuple[Cell, Diagnosis]:
    """The cell of a part, and its sums."""
    opened = {path: open_trajectories(path) for path, _ in part.places}
    batch = ReplayBatch([load_generation(path, opened[path], group) for path, group in part.places])
    found = Diagnosis()
    found.add_batch(batch)
    return batch.cell, found


def diagnosis_rows(
    path: Path, *, limit: int | None = None, say: Callable[[str], None] | None = None
) -> list[dict[str, Any]]:
    """The rows of ``tables.DIAGNOSES`` for every cell of a recorded folder, of its first ``limit`` runs or of all.

    A large folder takes one process for each processor; ``say`` is told how far it is. Raises InputError for a folder
    without whole trajectories.
    """
    by_cell: dict[str, list[tuple[Path, int]]] = {}
    for place in recorded_places(path):
        by_cell.setdefault(place.cell_key, []).append((place.path, place.group))
    by_cell = {cell_key: places[:limit] for cell_key, places in by_cell.items()}
    num_generations = sum(map(len, by_cell.values()))
    num_processes = min(available_cpus(), -(-num_generations // GENERATIONS_PER_PROCESS))
    size = part_size(num_generations, num_processes)
    parts = [
        Part(cell_key=cell_key, places=tuple(places[start : start + size]))
        for cell_key, places in by_cell.items()
        for start in range(0, len(places), size)
    ]
    cells: dict[str, tuple[Cell, Diagnosis]] = {}
    for part, (cell, sums) in zip(
        parts, run_parts(diagnose_part, parts, num_processes, done="diagnosed", say=say), strict=True
    ):
        cells.setdefault(part.cell_key, (cell, Diagnosis()))[1].merge(sums)
    return [row for cell_key, (cell, found) in cells.items() for row in _rows_of(cell_key, cell, found)]


def _rows_of(cell_key: str, cell: Cell, found: Diagnosis) -> Iterator[dict[str, Any]]:
    settings = cell.to_dict() | {
        "cell_key": cell_key,
        "seed": str(cell.seed),
        "product_version": __version__,
    }
    for quantity, value, count in found.values():
        yield settings | {
            "quantity": quantity.name,
            "block": quantity.block,
            "depth": quantity.depth,
            "draft_budget": quantity.draft_budget,
            "value": value,
            "count": count,
        }


def main() -> None:
    """The command of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trajectories", type=Path, metavar="TRAJ")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--limit", type=int)
    arguments = parser.parse_args()
    end_with_parent()
    say = functools.partial(print, flush=True)
    try:
        table = to_table(DIAGNOSES, diagnosis_rows(arguments.trajectories, limit=arguments.limit, say=say))
        partial = partial_path(arguments.out)
        write_table(str(partial), table)
        partial.replace(arguments.out)
    except DlmgridError as error:
        parser.exit(2, f"error: {error}\n")
    except OSError as error:  # reading is answered for where it is done
        parser.exit(2, f"error: {arguments.out} cannot be written ({error.strerror})\n")


if __name__ == "__main__":
    main()
