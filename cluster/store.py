"""The output folder: what is committed, and how it gets there.

    OUT/grids/        a copy of every grid file run into this folder
    OUT/inputs/       benchmark items, one file per benchmark and prompt form
    OUT/drafters/     copies of learned and calibrated drafters, named by their fingerprint
    OUT/staging/      files that actors write
    OUT/generations/  committed Parquet files only, flat, named by their unit key
    OUT/trajectories/  where recorded: the steps of a unit, named like its file in generations/
    OUT/attempts/ runs/ scores/ checks/
    OUT/manifest.jsonl   one line per commit: decides what exists
    OUT/progress.json  run.json  run.lock

A commit renames a staged file and then appends its manifest line, both synced. A crash between the two
leaves a file that the manifest does not name: the next start moves it back to staging, reads it and adopts
it, or drops it. So every key is stored exactly once, whenever the driver dies.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from dlmgrid.cluster.shard import RejectedShardError, Shard, read_shard
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item, read_items, write_items
from dlmgrid.workers.tables import GENERATIONS, SCHEMA_VERSION, read_table, write_table
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
        self._shards: dict[str, Shard] = {}
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

    # --- reading

    def load(self, *, repair: bool, say: Callable[[str], None] = print) -> None:
        """Read the manifest. A torn last line is dropped (``repair``: cut off the file too), and so is a line
        whose file is gone or has another size. Raises InputError for a manifest damaged elsewhere."""
        self._shards.clear()
        self._unit_of_key.clear()
        if not self._manifest.exists():
            return
        content = self._manifest.read_bytes()
        whole, _, torn = content.rpartition(b"\n")
        if torn and repair:
            say("manifest.jsonl: cut off a torn last line")
            with self._manifest.open("r+b") as file:
                file.truncate(len(content) - len(torn))
                os.fsync(file.fileno())
        dropped: dict[str, str] = {}
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                values = json.loads(line)
                if "dropped" in values:
                    self._forget(values["dropped"])
                    continue
                version = values["schema_version"]
                shard = Shard.from_line(values)
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{self._manifest}:{number}: damaged ({error}); restore it from a backup, or move the "
                    "files of "
                    "generations/ into staging/ and delete it, and they are adopted"
                ) from error
            if version != SCHEMA_VERSION:
                raise InputError(
                    f"{self.out} was written with schema version {version}, this is {SCHEMA_VERSION}; use "
                    "a new --out"
                )
            self._remember(shard)
        for shard in self._shards.values():
            size = _size(self.path_of(shard.unit_key))
            if size != shard.num_bytes:
                dropped[shard.unit_key] = (
                    "is missing" if size is None else f"has {size} bytes, not {shard.num_bytes}"
                )
        for unit_key, why in dropped.items():
            say(
                f"generations/{unit_key}.parquet {why}: its {len(self._shards[unit_key].keys)} keys run again"
            )
            self._forget(unit_key)
        if dropped and repair:
            self._append(json.dumps({"dropped": unit_key}) + "\n" for unit_key in dropped)

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
        return self.generations / f"{unit_key}.parquet"

    # --- writing

    def write_inputs(self, file_name: str, items: Iterable[Item]) -> None:
        """Add items to a file of ``inputs/``. Raises InputError when a known item now reads otherwise."""
        path = self.inputs / file_name
        known = {item.item_id: item for item in read_items(path)} if path.exists() else {}
        added = False
        for item in items:
            if item.item_id not in known:
                known[item.item_id] = item
                added = True
            elif known[item.item_id] != item:
                raise InputError(
                    f"item {item.item_id!r} of {file_name} is not the one this folder was made with: its "
                    "data source "
                    "changed; use a new --out"
                )
        if added:
            write_items(path, known.values())

    def write_drafter(self, source: Path, target: Path) -> None:
        """Copy a drafter's file to ``target`` in ``drafters/``, whole or not at all; the name says its content."""
        if not target.exists():
            partial = target.with_name(target.name + ".part")
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

    def recover(self, *, say: Callable[[str], None] = print) -> list[Shard]:
        """Clear up after a driver that died; returns what was adopted.

        Files in ``generations/`` that the manifest does not name go back to ``staging/``. A staged file
        that is whole and holds only keys that are missing is adopted; everything else in ``staging/`` is
        removed.
        """
        for path in sorted(self.generations.iterdir()):
            if path.suffix != ".parquet" or path.stem not in self._shards:
                path.replace(self.staging / path.name)
        adopted: list[Shard] = []
        for path in sorted(self.staging.iterdir()):
            shard = self._adoptable(path) if path.suffix == ".parquet" else None
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

    def _adoptable(self, path: Path) -> Shard | None:
        try:
            shard = read_shard(path)
        except RejectedShardError:
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
        with self._manifest.open("ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(self.out)

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


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


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

    Raises InputError when the folder is not a run folder, or of another schema version.
    """
    out = Path(run_dir)
    store = Store(out)
    if not (out / "manifest.jsonl").exists():
        raise InputError(f"{out} holds no manifest.jsonl: not the output folder of a run")
    store.load(repair=False)
    paths = [str(store.path_of(shard.unit_key)) for shard in store.shards]
    record = json.loads((out / "run.json").read_text()) if (out / "run.json").exists() else {}
    return Generations(
        table=read_table(paths, GENERATIONS), complete=record.get("status") in ("done", "failed")
    )
