"""Files of work units, as ``dlmgrid plan --units`` writes them. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.units import DRAFT_PLACES, Key, WorkUnit

_TEXTS = ("checkpoint", "inputs", "output", "device", "run_id", "drafter_path", "trajectories", "drafts")
_COUNTS = {"attempt": 1, "max_in_flight": 1}


def read_units(path: Path) -> list[WorkUnit]:
    """The units of a file. Raises InputError naming the file when it is not one that ``plan`` wrote."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, list):
            raise TypeError(f"it holds a {type(values).__name__}, not a list")
        return [_unit(value) for value in values]
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: no such file; write one with dlmgrid plan GRID --out DIR --units {path}"
        ) from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); give a file of dlmgrid plan --units"
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(
            f"{path}: not a file of work units ({error}); write it with dlmgrid plan --units"
        ) from error


def _unit(values: Any) -> WorkUnit:
    """A unit from JSON. Raises KeyError, TypeError or ValueError for what is none."""
    if not isinstance(values, dict):
        raise TypeError(f"a unit is a {type(values).__name__}, not a mapping")
    unit = WorkUnit(
        **{
            **values,
            "cell": Cell.from_dict(_of_kind(values, "cell", dict)),
            "keys": tuple(_key(key) for key in _of_kind(values, "keys", list)),
            "reference_shards": _texts(values, "reference_shards"),
            "records": _texts(values, "records"),
        }
    )
    for name in _TEXTS:
        _of_kind(values, name, str)
    for name, least in _COUNTS.items():
        if _of_kind(values, name, int) < least:
            raise ValueError(f"{name} is {values[name]}, less than {least}")
    _of_kind(values, "profiled", bool)
    _of_kind(values, "num_compared", int, NoneType)
    if not unit.keys or len(set(unit.keys)) < len(unit.keys):
        raise ValueError("the keys of a unit are distinct, one at least")
    if unit.drafts not in DRAFT_PLACES:
        raise ValueError(f"drafts is {unit.drafts!r}, not one of {', '.join(DRAFT_PLACES)}")
    _check_cell(unit.cell)
    return unit


def _check_cell(cell: Cell) -> None:
    """Raises TypeError for a field of another type than the cell's own."""
    for name, kinds in Cell.__annotations__.items():
        value = getattr(cell, name)
        fits = {
            "str": isinstance(value, str),
            "int": type(value) is int,
            "float": isinstance(value, float),
            "bool": isinstance(value, bool),
            "None": value is None,
        }
        if not any(fits[kind] for kind in str(kinds).split(" | ")):
            raise TypeError(f"{name} of a cell is {value!r}, not of type {kinds}")


def _of_kind(values: Mapping[str, Any], name: str, *kinds: type) -> Any:
    value = values[name]
    if type(value) not in kinds:
        raise TypeError(f"{name} is {value!r}, not of type {kinds[0].__name__}")
    return value


def _key(values: Any) -> Key:
    if (
        not isinstance(values, dict)
        or type(values["item_id"]) is not str
        or type(values["repeat"]) is not int
    ):
        raise TypeError(f"a key is {values!r}, not an item_id and a repeat")
    return Key(**values)


def _texts(values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    found = _of_kind(values, name, list)
    if not all(isinstance(value, str) for value in found):
        raise TypeError(f"{name} holds something else than texts")
    return tuple(found)
