"""From a recorded folder and a grid to a replay: cells matched with what was recorded, checked, and run.

A grid asks for drafters on serialized runs; each must be among the recorded ones with every setting equal, or the
replay is refused before anything is read but the files' headers. No checkpoint is needed unless live decoding is
asked for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlmgrid.cluster.cells import CellWork, Model, Questions, check_methods, find_benchmark, make_cells
from dlmgrid.cluster.decoder_text import decoder_text
from dlmgrid.cluster.grid import BenchmarkEntry, Grid, ModelEntry
from dlmgrid.cluster.sources import Sources
from dlmgrid.cluster.worker_process import run_worker_module
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.drafting.catalog import ALL_METHODS, DIAGNOSTIC_METHODS
from dlmgrid.workers.drafting.drafter_file import read_drafter_file
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import inputs_file_name, read_items
from dlmgrid.workers.models.families import FAMILIES
from dlmgrid.workers.models.family import Family
from dlmgrid.workers.tables import REPLAYS, read_table
from dlmgrid.workers.trajectories.files import (
    files_by_cell,
    open_trajectories,
    recorded_generations,
    wanted_columns,
)
from dlmgrid.workers.trajectories.plan import ReplayPlan, ReplayWork
from dlmgrid.workers.trajectories.planned import PlannedCell, read_planned
from dlmgrid.workers.units import Key

Recorded = Mapping[str, tuple[Cell, tuple[Key, ...]]]
"""By ``cell_key``: a recorded draft-free cell and its keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySummary:
    """A cell's replay over its generations: means of forwards and drafted nodes, ``nfe_ratio`` of the serialized
    runs' forwards over these, acceptance, depth and width of trees
    pooled over rounds, and how many of the rows decoded live agreed."""

    cell: Cell
    num_rows: int
    nfe_mean: float
    nfe_ratio: float
    accepted_per_round: float
    drafted_nodes_mean: float
    rows_computed_mean: float
    depth_mean: float
    width_mean: float
    num_live: int
    num_agreeing: int


def read_recorded(trajectories: Path) -> Recorded:
    """What a recorded folder holds. Raises InputError for none, or for a truncated file."""
    found: dict[str, tuple[Cell, list[Key]]] = {}
    for generation in recorded_generations(trajectories):
        cell = generation.cell
        found.setdefault(cell.cell_key, (cell, []))[1].append(generation.key)
    return {cell_key: (cell, tuple(keys)) for cell_key, (cell, keys) in found.items()}


def plan_replay(
    grid: Grid,
    sources: Sources,
    trajectories: Path,
    recorded: Recorded,
    *,
    num_verified: int,
    say: Callable[[str], None] = print,
) -> tuple[ReplayWork, ...]:
    """Every canonical cell of the grid, on the serialized run recorded for it; ``say`` is told how much of what the
    grid asks for is not recorded.

    Raises InputError when a run is not among the recorded ones (naming the settings that differ), a repeat is
    missing, a method does not exist, or the verification leaves the serialized path.
    """
    check_methods(grid, replace(sources, methods={**sources.methods, **DIAGNOSTIC_METHODS}))
    if grid.verification == "greedy_match" and any(temperature > 0 for temperature in grid.temperatures):
        raise InputError(
            "verification greedy_match leaves the serialized path at T > 0, so it cannot be replayed; run it live"
        )
    if any(method.fold is not None for method in grid.methods):
        raise InputError(
            "fold changes what a pass computes, so it is measured live only; remove it or use dlmgrid run"
        )
    for method in grid.methods:
        if not ALL_METHODS[method.name].lossless:
            raise InputError(
                f"method {method.name!r} leaves the serialized path, so it cannot be replayed; run it live"
            )
        if ALL_METHODS[method.name].drafts_by_pass:
            raise InputError(
                f"method {method.name!r} drafts with passes of the model, so it cannot be replayed; run it live"
            )
    models, fingerprints = _recorded_models(grid, recorded, trajectories)
    questions = [_recorded_questions(grid, sources, trajectories, entry) for entry in grid.benchmarks]
    limits = {(entry.name, entry.num_fewshot): entry.limit or grid.limit or 0 for entry in grid.benchmarks}
    notes: dict[str, str] = {}
    of_drafters: dict[tuple[str, str], tuple[str, ...]] = {}  # a file is read whole, so once
    works = []
    files = files_by_cell(trajectories)
    for work in make_cells(grid, models, questions, fingerprints, trajectories / "inputs"):
        keys = _recorded_keys(recorded, work, trajectories)
        cell = work.cell
        num_asked = max(len(work.keys), limits[cell.benchmark, cell.num_fewshot] * grid.repeats)
        if len(keys) < num_asked:
            notes[cell.reference().cell_key] = (
                f"{num_asked - len(keys)} of {num_asked} generations asked for are not recorded: {cell.benchmark} at "
                f"T = {cell.temperature:g}, {decoder_text(cell.reference().to_dict())}"
            )
        drafter = (cell.method, work.drafter_source)
        if drafter not in of_drafters:
            of_drafters[drafter] = _records_of_drafter(*drafter)
        records = tuple(dict.fromkeys((*of_drafters[drafter], *(("window",) if cell.window else ()))))
        for path in files.get(work.cell.reference().cell_key, []):
            wanted_columns(path, open_trajectories(path), records)
        if num_verified:
            checkpoint = str(sources.resolve_checkpoint(work.cell.model, work.cell.revision))
            works.append(
                ReplayWork(
                    cell=work.cell,
                    keys=keys,
                    checkpoint=checkpoint,
                    inputs=work.inputs,
                    drafter_path=work.drafter_source,
                    records=records,
                )
            )
        else:
            works.append(
                ReplayWork(cell=work.cell, keys=keys, drafter_path=work.drafter_source, records=records)
            )
    for note in notes.values():
        say(f"note: {note}")
    return tuple(works)


def _records_of_drafter(method: str, path: str) -> tuple[str, ...]:
    """What a replay of a drafter needs of a recording beyond its steps; ``path`` of its file, "" where it has none."""
    return read_drafter_file(ALL_METHODS[method], Path(path)).records if path else ()


def replay_grid(plan: ReplayPlan) -> None:
    """Replay in a process of its own; rows land in ``plan.out``. Raises InputError for what that process refuses."""
    with tempfile.TemporaryDirectory(prefix="dlmgrid-replay-") as folder:
        path = Path(folder) / "plan.json"
        plan.write(path)
        run_worker_module("dlmgrid.workers.trajectories.replay_process", [str(path)], "replaying")


def summarise(plan: ReplayPlan) -> list[ReplaySummary]:
    """A summary of each cell of a plan that was replayed, in its order."""
    summaries = []
    for work in plan.works:
        path = Path(plan.out) / f"{work.cell.cell_key}.parquet"
        rows: list[dict[str, Any]] = read_table([str(path)], REPLAYS).to_pylist()

        def total(name: str, rows: Sequence[Mapping[str, Any]] = rows) -> int:
            return sum(row[name] for row in rows)

        live = [row["agrees_with_live"] for row in rows if row["agrees_with_live"] is not None]
        summaries.append(
            ReplaySummary(
                cell=work.cell,
                num_rows=len(rows),
                nfe_mean=total("nfe_total") / len(rows),
                nfe_ratio=total("nfe_reference") / total("nfe_total"),
                accepted_per_round=sum(sum(row["accepted"]) for row in rows) / total("rounds"),
                drafted_nodes_mean=total("drafted_nodes") / len(rows),
                rows_computed_mean=total("rows_computed") / len(rows),
                depth_mean=sum(row["depth_per_round"] * row["rounds"] for row in rows) / total("rounds"),
                width_mean=sum(row["width_per_round"] * row["rounds"] for row in rows) / total("rounds"),
                num_live=len(live),
                num_agreeing=sum(live),
            )
        )
    return summaries


@dataclass(frozen=True, kw_only=True, slots=True)
class _RecordedShape:
    """What a recorded run says of its checkpoint; its lengths were checked when it was made."""

    block_length: int
    family: str
    caches: tuple[str, ...]
    max_position_embeddings: int = 2**31 - 1
    num_hidden_layers: int = 0  # a replay takes no fold

    @property
    def seeds_next_block(self) -> bool:
        return self.family in FAMILIES and FAMILIES[self.family].seeds_next_block

    @property
    def stop(self) -> str:
        return self._known_family.stop

    @property
    def confidence(self) -> str:
        return self._known_family.confidence

    def published_decoder(self, variant: str | None = None) -> dict[str, Any]:
        return self._known_family.published_decoder(variant).settings

    @property
    def _known_family(self) -> Family:
        if self.family not in FAMILIES:
            raise InputError(f"the recorded runs are of an unknown family {self.family!r}")
        return FAMILIES[self.family]


def _recorded_models(
    grid: Grid, recorded: Recorded, trajectories: Path
) -> tuple[list[Model], dict[str, str]]:
    """The grid's models as they were recorded, and their weight fingerprints by folder."""
    models, fingerprints = [], {}
    for entry in grid.models:
        cells = [
            cell
            for cell, _ in recorded.values()
            if (cell.model, cell.revision) == (entry.path, entry.revision)
        ]
        if not cells:
            known = sorted({f"{cell.model}@{cell.revision}".rstrip("@") for cell, _ in recorded.values()})
            raise InputError(
                f"{trajectories} holds no run of model {entry.path!r} revision {entry.revision!r} (recorded: "
                f"{', '.join(known)}); record this grid with dlmgrid record GRID --out DIR"
            )
        weights = sorted({cell.weight_fingerprint for cell in cells})
        if len(weights) > 1:
            raise InputError(
                f"{trajectories} holds runs of model {entry.path!r} with different weights ({', '.join(weights)}); "
                "record one of them into its own folder"
            )
        folder = Path(entry.path)
        shape = _RecordedShape(
            block_length=_default_block_length(entry, cells, read_planned(trajectories)),
            family=cells[0].family,
            caches=tuple(sorted({cell.cache for cell in cells})),
        )
        if shape.seeds_next_block:
            raise InputError(
                f"model {entry.path!r}: a pass of its family also gives the next block's first token and may be the "
                "last inside a block, which a replay does not count; run it live"
            )
        models.append(Model(entry=entry, folder=folder, shape=shape))
        fingerprints[str(folder)] = weights[0]
    return models, fingerprints


def _default_block_length(
    entry: ModelEntry, cells: Sequence[Cell], planned: Mapping[str, PlannedCell]
) -> int:
    """The block length that a run takes where the grid names none: the model's, as its recording wrote it down.

    Raises InputError where it did not and several were recorded.
    """
    defaults = {planned[cell.cell_key].default_block_length for cell in cells if cell.cell_key in planned}
    known = [default for default in defaults if default is not None]
    if len(known) == 1:
        return known[0]
    recorded = sorted({cell.block_length for cell in cells})
    if entry.block_length is None and len(recorded) > 1:
        raise InputError(
            f"model {entry.path!r} was recorded with blocks of {' and '.join(map(str, recorded))} tokens; name "
            "block_length in the grid's model"
        )
    return recorded[0]


def _recorded_questions(grid: Grid, sources: Sources, trajectories: Path, entry: BenchmarkEntry) -> Questions:
    """A benchmark's items as the recorded folder keeps them; none where it was not recorded in this prompt form."""
    benchmark = find_benchmark(entry, sources)
    prompt_version = benchmark.prompt_version(entry.num_fewshot)
    path = trajectories / "inputs" / inputs_file_name(entry.name, prompt_version, entry.num_fewshot)
    items = list(read_items(path)) if path.is_file() else []
    return Questions(
        entry=entry,
        prompt_version=prompt_version,
        gen_length=entry.gen_length or grid.gen_length or benchmark.default_gen_length,
        items=tuple(items[: entry.limit or grid.limit]),
    )


def _recorded_keys(recorded: Recorded, work: CellWork, trajectories: Path) -> tuple[Key, ...]:
    """The keys of ``work`` that have a trajectory. Raises InputError where its serialized run was not recorded."""
    reference = work.cell.reference()
    if reference.cell_key not in recorded:
        wanted = reference.to_dict()
        differing = min(
            (
                {name: value for name, value in cell.to_dict().items() if wanted[name] != value}
                for cell, _ in recorded.values()
            ),
            key=len,
        )
        differences = ", ".join(
            f"{name} {wanted[name]!r} (recorded: {value!r})" for name, value in differing.items()
        )
        raise InputError(
            f"{trajectories} holds no run with {differences}; record this grid with dlmgrid record GRID --out DIR"
        )
    available = set(recorded[reference.cell_key][1])
    for repeat in sorted({key.repeat for key in work.keys} - {key.repeat for key in available}):
        raise InputError(
            f"{trajectories} lacks repeat {repeat}; record it with repeats: {repeat + 1} in the grid"
        )
    keys = tuple(key for key in work.keys if key in available)
    if not keys:
        raise InputError(f"{trajectories} holds none of the items asked for; record this grid")
    return keys
