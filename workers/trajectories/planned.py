"""What a folder of recorded runs was planned to hold, in ``OUT/planned.json``, so that what is not there is noticed.

A file of one JSON object by ``cell_key``: the cell, and its items by number of repeats. Plans only add to it. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import write_whole
from dlmgrid.workers.units import Key

FILE_NAME = "planned.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCell:
    """A draft-free cell and the generations of it that are to be recorded; ``default_block_length`` is what its model
    takes where a grid names none (0: the generation length), None where that was not written down."""

    cell: Cell
    keys: frozenset[Key]
    default_block_length: int | None = None


def read_planned(folder: Path) -> dict[str, PlannedCell]:
    """The planned cells of a folder by ``cell_key``; none where it has no such file.

    Raises InputError for a file that cannot be read as one.
    """
    path = folder / FILE_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        planned = {}
        for cell_key, entry in values.items():
            repeats = {str(item_id): int(count) for item_id, count in entry["repeats"].items()}
            keys = frozenset(Key(item_id, n) for item_id, count in repeats.items() for n in range(count))
            planned[cell_key] = PlannedCell(
                cell=Cell.from_dict(entry["cell"]),
                keys=keys,
                default_block_length=_whole_or_none(entry.get("default_block_length")),
            )
        return planned
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path} is damaged ({error}); delete it and give dlmgrid plan --record or dlmgrid record again"
        ) from error


def add_planned(
    folder: Path, cells: Mapping[Cell, Iterable[Key]], block_lengths: Mapping[str, int] | None = None
) -> None:
    """Add cells and keys to what a folder is planned to hold; ``block_lengths`` are the defaults of the cells' models,
    by ``cell_key``. Raises InputError as :func:`read_planned`."""
    planned = read_planned(folder)
    for cell, keys in cells.items():
        known = planned.get(cell.cell_key)
        planned[cell.cell_key] = PlannedCell(
            cell=cell,
            keys=frozenset(keys) | (known.keys if known else frozenset()),
            default_block_length=(block_lengths or {}).get(
                cell.cell_key, known.default_block_length if known else None
            ),
        )
    entries = {}
    for cell_key, one in sorted(planned.items()):
        repeats: dict[str, int] = {}
        for key in one.keys:
            repeats[key.item_id] = max(repeats.get(key.item_id, 0), key.repeat + 1)
        entries[cell_key] = {
            "cell": one.cell.to_dict(),
            "repeats": dict(sorted(repeats.items())),
            "default_block_length": one.default_block_length,
        }
    write_whole(folder / FILE_NAME, json.dumps(entries) + "\n")


def _whole_or_none(value: Any) -> int | None:
    return None if value is None else int(value)
