"""The output folder: what is committed, and how it gets there.

    OUT/grids/        a copy of every grid file run into this folder
    OUT/inputs/       benchmark items, one file per benchmark and prompt form
    OUT/drafters/     copies of learned and calibrated drafters, named by their fingerprint
    OUT/staging/      files that actors write
    OUT/generations/  committed Parquet files only, flat, named by their unit key
    OUT/trajectories/  where recorded: the steps of a unit, named like its file in generations/
    OUT/damaged/      committed files that were found changed, kept aside
    OUT/attempts/ runs/ scores/ checks/
    OUT/manifest.jsonl   one line per commit and per file of inputs/: decides what exists
    OUT/planned.json  where recorded: the cells and items that were asked for
    OUT/progress.json  run.json  run.lock  staging.lock  units.lock

A commit renames a staged file and then appends its manifest line, both synced. A crash between the two
leaves a file that the manifest does not name: the next start moves it back to staging, reads it and adopts
it, or drops it. So every key is stored exactly once, whenever the driver dies.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from dlmgrid.cluster.records import read_record
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item, encode_items, read_items, write_items
from dlmgrid.workers.partial_files import partial_path
from dlmgrid.workers.run_folder import (
    MANIFEST,
    InputsFile,
    inputs_fault,
    read_generations,
    read_inputs,
    read_manifest,
    shard_fault,
    shard_path,
    unlisted,
)
from dlmgrid.workers.shard import RejectedShardError, Shard, read_shard
from dlmgrid.workers.tables import GENERATIONS, read_table, write_table
from dlmgrid.workers.trajectories.files import has_draft_free_rows, is_recorded, open_trajectories
from dlmgrid.workers.trajectories.planned import add_planned
from dlmgrid.workers.units import Key, UnitResult, WorkUnit

FOLDERS = ("grids", "inputs", "drafters", "staging", "generations", "attempts", "runs", "scores", "checks")


class Store:
    """The one writer of an output folder (take :class:`~dlmgrid.cluster.lock.RunLock` first)."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.staging = out / "staging"
        self.generations = out / "generations"
        self.inputs = out / "inputs"
        self.drafters = out / "drafters"
        self.trajectories = out / "trajectories"
        self._manifest = out / "manifest.jsonl"
        self._inputs: dict[str, InputsFile] = {}
        self._num_torn = 0
        self._shards: dict[str, Shard] = {}
        self._staged: dict[str, Path] = {}
        self._unit_of_key: dict[str, dict[Key, str]] = {}

    def create(self) -> None:
        """Make the folders. Raises InputError when that is not possible."""
        try:
            for name in FOLDERS:
                (self.out / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{self.out} cannot be written ({error.strerror}); choose another --out"
            ) from error

    @property
    def is_recording(self) -> bool:
        """Whether the folder is one of recorded runs: draft-free rows count with their trajectories only."""
        return self.trajectories.is_dir()

    def mark_recording(
        self, cells: Mapping[Cell, Iterable[Key]], block_lengths: Mapping[str, int] | None = None
    ) -> None:
        """Make this a folder of recorded runs, and write down that these are to be in it; see ``add_planned``."""
        self.trajectories.mkdir(exist_ok=True)
        add_planned(self.out, cells, block_lengths)

    # --- reading

    def load(self, *, repair: bool, say: Callable[[str], None] = print) -> None:
        """Read the manifest and hold every file it names against its size and SHA-256.

        A file that is gone or changed is dropped, so that its keys run again, and a torn last line is left out;
        ``repair`` writes both down and moves changed files to ``damaged/``; in a folder of recorded runs it does so
        with rows whose steps are gone or unreadable. Raises InputError for a manifest that is damaged elsewhere.
        """
        manifest = read_manifest(self.out)
        self._inputs, self._num_torn = manifest.inputs, manifest.num_torn
        self._shards.clear()
        self._unit_of_key.clear()
        for shard in manifest.shards.values():
            self._remember(shard)
        if self._num_torn and repair:
            say("manifest.jsonl: cut off a torn last line")
            self._cut_torn_line()
        if left := unlisted(self.out, manifest):
            say(
                f"{len(left)} files in generations/ are not in manifest.jsonl; run adopts those that are whole"
            )
        dropped = []
        for shard in manifest.shards.values():
            fault = shard_fault(self.out, shard)
            if not fault and repair and self.is_recording:
                fault = self._steps_fault(shard)
            if fault:
                path = self.path_of(shard.unit_key)
                say(f"generations/{path.name} {fault}: its {len(shard.keys)} keys run again")
                if repair:
                    self._put_aside(path, path.name)
                    self._put_aside(self.trajectories / path.name, f"steps-{path.name}")
                dropped.append(shard.unit_key)
                self._forget(shard.unit_key)
        for file in manifest.inputs.values():
            if fault := inputs_fault(self.out, file):
                say(f"inputs/{file.name} {fault}: run writes it again if the data source has not changed")
        if dropped and repair:
            self._append(json.dumps({"dropped": unit_key}) + "\n" for unit_key in dropped)

    def _steps_fault(self, shard: Shard) -> str:
        """What is wrong with the recorded steps of a file of draft-free rows, in words; "" for nothing."""
        path = self.trajectories / f"{shard.unit_key}.parquet"
        if len(shard.failed) == len(shard.keys) or not has_draft_free_rows(self.path_of(shard.unit_key)):
            return ""
        if not path.exists():
            return "has lost its steps in trajectories/"
        try:
            open_trajectories(path)
        except InputError:
            return "has damaged steps in trajectories/"
        return ""

    def _put_aside(self, path: Path, name: str) -> None:
        if path.exists():
            (self.out / "damaged").mkdir(exist_ok=True)
            path.replace(self.out / "damaged" / name)

    def load_staged(self, records: Sequence[str] | None = None) -> None:
        """Take the whole files that a run would adopt as stored, where they are, those of ``staging/`` and those of
        ``generations/`` that the manifest does not name; for planning."""
        waiting = sorted(self.staging.glob("*.parquet")) if self.staging.is_dir() else []
        for path in (*waiting, *unlisted(self.out, read_manifest(self.out))):
            shard = self._adoptable(path, records)
            if shard is not None:
                self._remember(shard)
                self._staged[shard.unit_key] = path

    @property
    def shards(self) -> Iterable[Shard]:
        return self._shards.values()

    @property
    def cell_keys(self) -> set[str]:
        return {cell_key for cell_key, keys in self._unit_of_key.items() if keys}

    def has(self, cell_key: str, key: Key) -> bool:
        return key in self._unit_of_key.get(cell_key, {})

    def missing(self, cell_key: str, keys: Sequence[Key]) -> list[Key]:
        """Those of ``keys`` not stored yet, in their order."""
        stored = self._unit_of_key.get(cell_key, {})
        return [key for key in keys if key not in stored]

    def shards_of(self, cell_key: str, keys: Iterable[Key]) -> list[Shard]:
        """The committed files that hold any of these keys, once each, by unit key."""
        stored = self._unit_of_key.get(cell_key, {})
        return [self._shards[unit_key] for unit_key in sorted({stored[key] for key in keys if key in stored})]

    def shard(self, unit_key: str) -> Shard:
        return self._shards[unit_key]

    def path_of(self, unit_key: str) -> Path:
        return self._staged.get(unit_key) or shard_path(self.out, unit_key)

    # --- writing

    def write_inputs(self, file_name: str, items: Iterable[Item]) -> None:
        """Add items to a file of ``inputs/`` and record its SHA-256 in the manifest.

        A recorded file that is gone or damaged is written again where ``items`` give the recorded bytes. Raises
        InputError when they do not, and when a known item now reads otherwise.
        """
        items = list(items)
        path = self.inputs / file_name
        recorded = self._inputs.get(file_name)
        if recorded is None:
            known = {item.item_id: item for item in read_items(path)} if path.exists() else {}
        elif fault := inputs_fault(self.out, recorded):
            content = encode_items(items)
            if recorded.fault(content):
                raise InputError(
                    f"{path} {fault}, and the data source does not give it again; restore it, or use a new --out"
                )
            known = {}
        else:
            known = {item.item_id: item for item in read_inputs(self.out, recorded)}
        for item in items:
            if known.setdefault(item.item_id, item) != item:
                raise InputError(
                    f"item {item.item_id!r} of {file_name} is not the one this folder was made with: its "
                    "data source changed; use a new --out"
                )
        written = InputsFile.of(file_name, encode_items(known.values()))
        is_same_size = path.exists() and path.stat().st_size == written.num_bytes
        if written != recorded or not is_same_size or inputs_fault(self.out, written):
            write_items(path, known.values())
            self._append([written.to_line()])
            self._inputs[file_name] = written

    def write_drafter(self, source: Path, target: Path) -> None:
        """Copy a drafter's file to ``target`` in ``drafters/``, whole or not at all; the name says its content."""
        if not target.exists():
            partial = partial_path(target)
            shutil.copyfile(source, partial)
            partial.replace(target)

    def commit(self, finished: Sequence[tuple[WorkUnit, UnitResult]]) -> dict[str, RejectedShardError]:
        """Make the staged files of these units part of the store, with two syncs for all of them.

        Returns, by unit key, why a file was refused; its keys are still missing then.
        """
        rejected: dict[str, RejectedShardError] = {}
        shards = []
        for unit, result in finished:
            try:
                staged = Path(unit.output)
                shard = read_shard(staged, sync=False)  # the actor synced it before it reported
                _compare(shard, unit, result)
                staged.replace(self.path_of(shard.unit_key))
            except RejectedShardError as error:
                rejected[unit.unit_key] = error
            else:
                shards.append(shard)
        self._record(shards)
        return rejected

    def recover(
        self, *, records: Sequence[str] | None = None, say: Callable[[str], None] = print
    ) -> list[Shard]:
        """Clear up after a driver that died; returns what was adopted.

        Files in ``generations/`` that the manifest does not name go back to ``staging/``. A staged file
        that is whole and holds only keys that are missing is adopted, in a folder of recorded runs only with the
        trajectories of its draft-free rows and all that ``records`` names; everything else in ``staging/`` is
        removed. ``records`` is None where nothing is to be recorded.

        Raises InputError where something is, and rows wait in ``staging/`` of a folder that is not one of recorded
        runs.
        """
        if records is not None and not self.is_recording and any(self.staging.glob("*.parquet")):
            raise InputError(
                f"{self.staging} holds rows that were decoded without a recording; take them in with dlmgrid run, or "
                "record into another --out"
            )
        for path in (*self.generations.iterdir(), *self.staging.iterdir()):
            if path.is_dir():
                raise InputError(f"{path} is a folder, and only files belong there; move it away")
        for path in sorted(self.generations.iterdir()):
            if path.suffix != ".parquet" or path.stem not in self._shards:
                path.replace(self.staging / path.name)
        adopted: list[Shard] = []
        for path in sorted(self.staging.iterdir()):
            shard = self._adoptable(path, records) if path.suffix == ".parquet" else None
            if shard is None:
                path.unlink()
            else:
                self._move_in(path, shard)
                adopted.append(shard)
        if adopted:
            say(f"adopted {len(adopted)} finished units that an earlier run left uncommitted")
        return adopted

    def drop_failed(self, cell_keys: set[str]) -> int:
        """Forget the rows of these cells that hold an error, so that they run again; returns how many.

        A file that also holds good rows is replaced by one of these alone. A crash between the steps loses nothing:
        the manifest changes at one point, and files it does not name are cleared by :meth:`recover`.
        """
        num_dropped = 0
        for old in [shard for shard in self._shards.values() if shard.failed and shard.cell_key in cell_keys]:
            lines = [json.dumps({"dropped": old.unit_key}) + "\n"]
            good: Shard | None = None
            if len(old.failed) < len(old.keys):
                table = read_table([str(self.path_of(old.unit_key))], GENERATIONS)
                staged = self.staging / f"{old.unit_key}.good.parquet"
                write_table(str(staged), table.filter(pc.is_null(table["error"])))
                good = read_shard(staged)
                staged.replace(self.path_of(good.unit_key))
                _sync_folder(self.generations)
                lines.append(good.to_line())
            self._append(lines)
            self._forget(old.unit_key)
            if good is not None:
                self._remember(good)
            self.path_of(old.unit_key).unlink()
            num_dropped += len(old.failed)
        return num_dropped

    def clear_staging(self) -> None:
        """Remove what is left in ``staging/`` when no actor runs any more."""
        for path in self.staging.iterdir():
            path.unlink(missing_ok=True)

    def adopt(self, unit: WorkUnit) -> bool:
        """Commit the whole file that an actor left before it died, if there is one."""
        path = Path(unit.output)
        shard = self._adoptable(path)
        if shard is None or shard.unit_key != unit.unit_key:
            path.unlink(missing_ok=True)
            return False
        self._move_in(path, shard)
        return True

    def _adoptable(self, path: Path, records: Sequence[str] | None = None) -> Shard | None:
        try:
            shard = read_shard(path)
        except RejectedShardError:
            return None
        if (self.is_recording or records is not None) and has_draft_free_rows(path):
            recorded = self.trajectories / f"{shard.unit_key}.parquet"
            if not is_recorded(recorded, records or ()):
                return None
        return None if any(self.has(shard.cell_key, key) for key in shard.keys) else shard

    def _move_in(self, path: Path, shard: Shard) -> None:
        path.replace(self.path_of(shard.unit_key))
        self._record([shard])

    def _record(self, shards: Sequence[Shard]) -> None:
        if not shards:
            return
        _sync_folder(self.generations)
        self._append(shard.to_line() for shard in shards)
        for shard in shards:
            self._remember(shard)

    def _append(self, lines: Iterable[str]) -> None:
        is_new = not self._manifest.exists()
        self._cut_torn_line()
        with self._manifest.open("ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(self.out)

    def _cut_torn_line(self) -> None:
        if self._num_torn:
            os.truncate(self._manifest, self._manifest.stat().st_size - self._num_torn)
            self._num_torn = 0

    def _remember(self, shard: Shard) -> None:
        self._shards[shard.unit_key] = shard
        units = self._unit_of_key.setdefault(shard.cell_key, {})
        for key in shard.keys:
            units[key] = shard.unit_key

    def _forget(self, unit_key: str) -> None:
        shard = self._shards.pop(unit_key, None)
        if shard is not None:
            units = self._unit_of_key[shard.cell_key]
            for key in shard.keys:
                units.pop(key, None)


def _compare(shard: Shard, unit: WorkUnit, result: UnitResult) -> None:
    if (shard.num_bytes, shard.sha256) != (result.num_bytes, result.sha256):
        raise RejectedShardError(
            f"unit {unit.unit_key}: the file is not the one the actor wrote (size or checksum)"
        )
    if shard.unit_key != unit.unit_key:
        raise RejectedShardError(f"unit {unit.unit_key}: the file holds other keys than were asked for")


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generations:
    """The committed rows of a run folder, and whether its last grid is complete."""

    table: pa.Table
    complete: bool


def load(run_dir: str | Path) -> Generations:
    """Rows of a run folder for a notebook: ``load("out").table.to_pandas()``; any time, also while a run
    writes.

    Raises InputError when the folder is not a run folder or of another schema version, or when a file is not
    the committed one.
    """
    out = Path(run_dir)
    if not (out / MANIFEST).exists():
        raise InputError(f"{out} holds no {MANIFEST}: not the output folder of a run")
    record = read_record(out)
    return Generations(
        table=read_generations(out), complete=record is not None and record.status in ("done", "failed")
    )
