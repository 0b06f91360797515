"""Trajectory files on disk: which there are, what they hold, and whether they are whole. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dlmgrid.workers.cell import CELL_FIELDS, Cell
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import inputs_file_name, read_items
from dlmgrid.workers.shard import RejectedShardError, read_shard
from dlmgrid.workers.tables import (
    GENERATIONS,
    TRAJECTORIES,
    TRAJECTORY_HIDDEN,
    TRAJECTORY_NEXT_HIDDEN,
    TRAJECTORY_WINDOW,
    check_schema,
    read_table,
)
from dlmgrid.workers.trajectories.planned import read_planned
from dlmgrid.workers.units import Key


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGeneration:
    """One generation of a recorded folder, by its identity."""

    cell: Cell
    key: Key
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a recorded generation is: a file and its row group."""

    path: Path
    group: int
    cell_key: str
    key: Key


def trajectory_files(path: Path) -> list[Path]:
    """The trajectory files of a recorded folder, or ``path`` itself when it is a file.

    A file counts once the rows of its unit are whole: ``generations/`` holds a file of the same name, or ``staging/``
    holds a whole one, of units that were decoded offline and wait to be adopted.

    Raises:
        InputError: nothing is recorded there, or a committed draft-free unit has no trajectory file.
    """
    if path.is_file():
        return [path]
    folder = path / "trajectories"
    if not folder.is_dir() and (path / "generations").is_dir():
        raise InputError(
            f"{path} is a run without recorded steps; record its grid into another folder with dlmgrid record"
        )
    if not folder.is_dir():
        raise InputError(f"{path} holds no trajectories; make them with dlmgrid record GRID --out {path}")
    files = []
    finished = {file.name: file for file in (path / "staging").glob("*.parquet") if _is_whole(file)}
    finished |= {file.name: file for file in (path / "generations").glob("*.parquet")}
    for name, generations in sorted(finished.items()):
        file = folder / name
        if file.exists():
            files.append(file)
        elif has_draft_free_rows(generations):
            raise InputError(
                f"{file} is missing, so its unit has no trajectories; record again, with the same command"
            )
    if not files:
        raise InputError(f"{path} holds no finished trajectories; run dlmgrid record GRID --out {path} again")
    return files


def _is_whole(staged: Path) -> bool:
    try:
        read_shard(staged, sync=False)
    except RejectedShardError:
        return False
    return True


def has_draft_free_rows(generations: Path) -> bool:
    """Whether a file of rows holds decoded draft-free ones. Raises InputError when it cannot be read."""
    rows = read_table([str(generations)], GENERATIONS, ["method", "generated_tokens"]).to_pylist()
    return any(row["method"] == "none" and row["generated_tokens"] is not None for row in rows)


def open_trajectories(path: Path) -> pq.ParquetFile:
    """One trajectory file, its schema checked. Raises InputError for one that is truncated or of another version."""
    try:
        file = pq.ParquetFile(path)
    except PermissionError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(
            f"{path}: not a whole trajectory file ({' '.join(str(error).split())}); record again, with the same command"
        ) from error
    check_schema(str(path), file, TRAJECTORIES)
    return file


def is_recorded(path: Path, records: Sequence[str]) -> bool:
    """Whether ``path`` is a whole trajectory file that holds what ``records`` names."""
    try:
        wanted_columns(path, open_trajectories(path), records)
    except InputError:
        return False
    return True


def wanted_columns(path: Path, file: pq.ParquetFile, records: Sequence[str]) -> list[str]:
    """The columns of a file to read: its fixed ones and those of ``records``.

    Raises InputError where the file lacks what is asked for.
    """
    names = list(TRAJECTORIES.names)
    found = set(file.schema_arrow.names)
    optional = {
        "window": TRAJECTORY_WINDOW,
        "hidden": TRAJECTORY_HIDDEN + (TRAJECTORY_NEXT_HIDDEN if "window" in records else ()),
    }
    for record in records:
        columns = [column.name for column in optional[record]]
        if not found.issuperset(columns):
            what = {"window": "the next block beside each state", "hidden": "hidden states"}[record]
            wanted = ", ".join(records)
            raise InputError(
                f"{path} holds nothing of {what}; record it with record: [{wanted}] in the grid, into a new folder"
            )
        names += columns
    return names


def read_generation(
    path: Path, file: pq.ParquetFile, group: int, columns: Sequence[str] | None = None
) -> pa.Table:
    """One row group: the steps of one generation, at least one. Raises InputError when it is damaged."""
    try:
        found = file.read_row_group(group, columns=columns).combine_chunks()
        if not found.num_rows:
            raise pa.ArrowInvalid("it has no steps")
        return found
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(
            f"{path}: damaged at generation {group + 1} ({' '.join(str(error).split())}); record again into a new "
            "folder"
        ) from error


def recorded_places(path: Path) -> list[Place]:
    """Where the generations of a recorded folder, or of one file, are: each (cell, item, repeat) once.

    Several files hold one where its unit was planned again with other neighbours. Raises InputError for what
    :func:`trajectory_files` and :func:`open_trajectories` refuse.
    """
    found: dict[tuple[str, Key], Place] = {}
    for file_path in trajectory_files(path):
        file = open_trajectories(file_path)
        for group in range(file.num_row_groups):
            names = ["cell_key", "item_id", "repeat"]
            row = read_generation(file_path, file, group, names).slice(0, 1).to_pylist()[0]
            key = Key(row["item_id"], row["repeat"])
            place = Place(path=file_path, group=group, cell_key=row["cell_key"], key=key)
            found.setdefault((place.cell_key, key), place)
    return list(found.values())


def files_by_cell(path: Path) -> dict[str, list[Path]]:
    """The trajectory files of a recorded folder by the ``cell_key`` of the one cell each holds."""
    found: dict[str, list[Path]] = {}
    for file_path in trajectory_files(path):
        file = open_trajectories(file_path)
        if file.num_row_groups:
            cell_key = read_generation(file_path, file, 0, ["cell_key"])["cell_key"][0].as_py()
            found.setdefault(cell_key, []).append(file_path)
    return found


def recorded_generations(path: Path) -> Iterator[RecordedGeneration]:
    """What a recorded folder holds, each generation once, from the columns that name it; no step is read.

    Raises InputError for what :func:`trajectory_files` and :func:`open_trajectories` refuse.
    """
    columns = [*CELL_FIELDS, "item_id", "repeat", "num_steps"]
    for file_path, places in groupby(recorded_places(path), key=lambda place: place.path):
        file = open_trajectories(file_path)
        for place in places:
            table = read_generation(file_path, file, place.group, columns)
            row: dict[str, Any] = table.slice(0, 1).to_pylist()[0]
            settings = {name: row[name] for name in CELL_FIELDS} | {"seed": int(row["seed"])}
            yield RecordedGeneration(cell=Cell.from_dict(settings), key=place.key, num_steps=row["num_steps"])


def unrecorded_text(path: Path) -> str:
    """Which planned generations have no trajectory in a recorded folder, in words; "" where all have, and for a file.

    Planned is what plans and recordings have asked for (:mod:`~dlmgrid.workers.trajectories.planned`), also cells of
    which nothing was recorded; for cells without such an entry the items of ``inputs/``, in each recorded repeat.
    """
    if path.is_file():
        return ""
    cells: dict[str, Cell] = {}
    recorded: dict[str, set[Key]] = {}
    for generation in recorded_generations(path):
        cells[generation.cell.cell_key] = generation.cell
        recorded.setdefault(generation.cell.cell_key, set()).add(generation.key)
    planned: dict[str, frozenset[Key]] = {}
    for cell_key, entry in read_planned(path).items():
        cells[cell_key] = entry.cell
        planned[cell_key] = entry.keys
    for cell_key in recorded.keys() - planned.keys():
        cell = cells[cell_key]
        inputs = path / "inputs" / inputs_file_name(cell.benchmark, cell.prompt_version, cell.num_fewshot)
        items = [item.item_id for item in read_items(inputs)] if inputs.is_file() else []
        repeats = {key.repeat for key in recorded[cell_key]}
        planned[cell_key] = frozenset(Key(item_id, repeat) for item_id in items for repeat in repeats)
    parts, num_missing = [], 0
    for cell_key, keys in planned.items():
        if missing := sorted(keys - recorded.get(cell_key, set())):
            num_missing += len(missing)
            parts.append(f"{_cell_text(cells[cell_key])}: {_missing_text(missing, len(keys))}")
    if not parts:
        return ""
    num_planned = sum(map(len, planned.values()))
    return f"{path}: {num_missing} of {num_planned} planned generations are not recorded ({'; '.join(parts)})"


def _cell_text(cell: Cell) -> str:
    """What tells a recorded cell from the others of its folder, in a few words."""
    threshold = "" if cell.threshold is None else f" {cell.threshold:g}"
    return f"{cell.model} on {cell.benchmark} at T = {cell.temperature:g}, {cell.decoder}{threshold}"


def _missing_text(missing: Sequence[Key], num_planned: int) -> str:
    if len(missing) == num_planned:
        return f"none of {num_planned}"
    names = [f"{key.item_id}/{key.repeat}" if key.repeat else key.item_id for key in missing]
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(missing)} of {num_planned} missing, {shown}"
