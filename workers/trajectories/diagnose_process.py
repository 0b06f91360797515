"""Diagnose a recorded folder: ``python -m dlmgrid.workers.trajectories.diagnose_process TRAJ OUT``. No model."""

from __future__ import annotations

import argparse
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
from dlmgrid.workers.trajectories.replay import ReplayBatch
from dlmgrid.workers.trajectories.trajectory import load_generation


def diagnosis_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of ``tables.DIAGNOSES`` for every cell of a recorded folder.

    Raises InputError for a folder without whole trajectories.
    """
    rows: list[dict[str, Any]] = []
    by_cell: dict[str, dict[Path, list[int]]] = {}
    for place in recorded_places(path):
        by_cell.setdefault(place.cell_key, {}).setdefault(place.path, []).append(place.group)
    for cell_key, files in by_cell.items():
        found = Diagnosis()
        cell: Cell | None = None
        for file_path, groups in files.items():
            file = open_trajectories(file_path)
            batch = ReplayBatch([load_generation(file_path, file, group) for group in groups])
            found.add_batch(batch)
            cell = batch.cell
        assert cell is not None, cell_key
        settings = cell.to_dict() | {
            "cell_key": cell_key,
            "seed": str(cell.seed),
            "product_version": __version__,
        }
        for quantity, value, count in found.values():
            rows.append(
                settings
                | {
                    "quantity": quantity.name,
                    "block": quantity.block,
                    "depth": quantity.depth,
                    "draft_budget": quantity.draft_budget,
                    "value": value,
                    "count": count,
                }
            )
    return rows


def main() -> None:
    """The command of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trajectories", type=Path, metavar="TRAJ")
    parser.add_argument("out", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    end_with_parent()
    try:
        table = to_table(DIAGNOSES, diagnosis_rows(arguments.trajectories))
    except DlmgridError as error:
        parser.exit(2, f"error: {error}\n")
    partial = partial_path(arguments.out)
    write_table(str(partial), table)
    partial.replace(arguments.out)


if __name__ == "__main__":
    main()
