"""Planned work units as a JSON file, for decoding on a machine that has neither Ray nor the grid's parser."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.units import Key, WorkUnit


def write_units(path: Path, units: Iterable[WorkUnit]) -> None:
    """Write units as a JSON list in the order given."""
    path.write_text(json.dumps([asdict(unit) for unit in units], indent=1) + "\n", encoding="utf-8")


def read_units(path: Path) -> list[WorkUnit]:
    """Read what :func:`write_units` wrote. Raises InputError for a file that is missing or of another shape."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [
            WorkUnit(
                **{
                    **values,
                    "cell": Cell.from_dict(values["cell"]),
                    "keys": tuple(Key(**key) for key in values["keys"]),
                    "reference_shards": tuple(values["reference_shards"]),
                }
            )
            for values in listed
        ]
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: no such file; write it with `dlmgrid plan GRID --out DIR --units {path}`"
        ) from error
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(f"{path}: not a list of work units ({error}); plan them again") from error
