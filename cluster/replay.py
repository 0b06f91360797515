"""From a recorded folder and a grid to a replay: cells matched with what was recorded, checked, and run.

A grid asks for drafters on serialized runs; each must be among the recorded ones with every setting equal, or the
replay is refused before anything is read but the files' headers. No checkpoint is needed unless live decoding is
asked for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlmgrid.cluster.cells import check_methods, find_drafters, with_drafter
from dlmgrid.cluster.grid import BenchmarkEntry, DecoderEntry, Grid, ModelEntry
from dlmgrid.cluster.recompute import inputs_file_name
from dlmgrid.cluster.sources import Sources
from dlmgrid.cluster.worker_process import run_worker_module
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.drafting.catalog import DIAGNOSTIC_METHODS
from dlmgrid.workers.drafting.drafter_file import DrafterFile
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import read_items
from dlmgrid.workers.tables import REPLAYS, read_table
from dlmgrid.workers.trajectories.files import recorded_generations
from dlmgrid.workers.trajectories.plan import ReplayPlan, ReplayWork
from dlmgrid.workers.units import Key

Recorded = Mapping[str, tuple[Cell, tuple[Key, ...]]]
"""By ``cell_key``: a recorded draft-free cell and its keys, in the order of its items."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySummary:
    """A cell's replay over its generations: means of forwards and drafted nodes, ``nfe_ratio`` of the serialized
    runs' forwards over these, acceptance pooled over rounds, and how many of the rows decoded live agreed."""

    cell: Cell
    num_rows: int
    nfe_mean: float
    nfe_ratio: float
    accepted_per_round: float
    drafted_nodes_mean: float
    rows_computed_mean: float
    num_live: int
    num_agreeing: int


def read_recorded(trajectories: Path) -> Recorded:
    """What a recorded folder holds. Raises InputError for none, or for a truncated file."""
    found: dict[str, tuple[Cell, list[Key]]] = {}
    for generation in recorded_generations(trajectories):
        cell = generation.cell
        found.setdefault(cell.cell_key, (cell, []))[1].append(generation.key)
    orders: dict[Path, dict[str, int]] = {}
    recorded: dict[str, tuple[Cell, tuple[Key, ...]]] = {}
    for cell_key, (cell, keys) in found.items():
        inputs = inputs_of(trajectories, cell)
        if inputs not in orders:
            if not inputs.is_file():
                raise InputError(f"{inputs} is missing from the recorded folder; put it back or record again")
            orders[inputs] = {item.item_id: number for number, item in enumerate(read_items(inputs))}
        order = orders[inputs]
        recorded[cell_key] = (
            cell,
            tuple(sorted(keys, key=lambda key: (order[key.item_id], key.repeat))),
        )
    return recorded


def inputs_of(trajectories: Path, cell: Cell) -> Path:
    """The items that a recorded cell was made from."""
    name = inputs_file_name(cell.benchmark, cell.prompt_version, cell.num_fewshot)
    return trajectories / "inputs" / name


def plan_replay(
    grid: Grid, sources: Sources, trajectories: Path, recorded: Recorded, *, num_verified: int
) -> tuple[ReplayWork, ...]:
    """Every canonical cell of the grid, on the serialized run recorded for it.

    Raises InputError when a run is not among the recorded ones (naming the settings that differ), a repeat is
    missing, a method does not exist, or the verification leaves the serialized path.
    """
    check_methods(grid, replace(sources, methods={**sources.methods, **DIAGNOSTIC_METHODS}))
    if grid.verification == "greedy_match" and any(temperature > 0 for temperature in grid.temperatures):
        raise InputError(
            "verification greedy_match leaves the serialized path at T > 0, so it cannot be replayed; run it live"
        )
    works: dict[str, ReplayWork] = {}
    drafters = [find_drafters(method) for method in grid.methods]
    for model in grid.models:
        checkpoint = str(sources.resolve_checkpoint(model.path, model.revision)) if num_verified else ""
        for benchmark in grid.benchmarks:
            for decoder in grid.decoder:
                for temperature in grid.temperatures:
                    wanted = _settings(grid, sources, model, benchmark, decoder, float(temperature))
                    cell, keys = _find(recorded, wanted, trajectories)
                    keys = _chosen(grid, benchmark, keys, trajectories)
                    inputs = str(inputs_of(trajectories, cell)) if num_verified else ""
                    for asked, drafter_path in _drafted(grid, cell, drafters):
                        known = works.get(asked.cell_key)
                        if known is None or len(known.keys) < len(keys):
                            works[asked.cell_key] = ReplayWork(
                                cell=asked,
                                keys=keys,
                                checkpoint=checkpoint,
                                inputs=inputs,
                                drafter_path=drafter_path,
                            )
    return tuple(works.values())


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
                num_live=len(live),
                num_agreeing=sum(live),
            )
        )
    return summaries


def _settings(
    grid: Grid,
    sources: Sources,
    model: ModelEntry,
    benchmark: BenchmarkEntry,
    decoder: DecoderEntry,
    temperature: float,
) -> dict[str, Any]:
    """The settings that a serialized run of this combination has; those left to a checkpoint are left out."""
    known = sources.get_benchmark(benchmark.name)
    settings: dict[str, Any] = {
        "model": model.path,
        "revision": model.revision,
        "chat_template": model.chat_template,
        "dtype": model.dtype,
        "benchmark": benchmark.name,
        "prompt_version": known.prompt_version(benchmark.num_fewshot),
        "num_fewshot": benchmark.num_fewshot,
        "temperature": temperature,
        "noise": grid.noise if temperature > 0 else "commit_count",
        "seed": grid.seed,
        "decoder": decoder.name,
        "commits_per_step": decoder.commits_per_step,
        "threshold": decoder.threshold,
        "gen_length": benchmark.gen_length or grid.gen_length or known.default_gen_length,
        "stop": grid.stop,
        "numerics": grid.numerics,
        "kernels": grid.kernels,
    }
    if model.block_length is not None:
        settings["block_length"] = model.block_length
    return settings


def _find(recorded: Recorded, wanted: Mapping[str, Any], trajectories: Path) -> tuple[Cell, tuple[Key, ...]]:
    """The recorded cell with all the wanted settings. Raises InputError for none, or more than one."""
    differing = [
        ([name for name, value in wanted.items() if getattr(cell, name) != value], cell, keys)
        for cell, keys in recorded.values()
    ]
    differing.sort(key=lambda entry: len(entry[0]))
    names, cell, keys = differing[0]
    if names:
        differences = ", ".join(
            f"{name} {wanted[name]!r} (recorded: {getattr(cell, name)!r})" for name in names
        )
        raise InputError(
            f"{trajectories} holds no run with {differences}; record this grid with dlmgrid record GRID --out DIR"
        )
    if len(differing) > 1 and not differing[1][0]:
        other = differing[1][1]
        raise InputError(
            f"{trajectories} holds two runs of model {cell.model!r} that the grid does not tell apart (weights "
            f"{cell.weight_fingerprint} and {other.weight_fingerprint}); record one of them into its own folder"
        )
    return cell, keys


def _chosen(
    grid: Grid, benchmark: BenchmarkEntry, keys: Sequence[Key], trajectories: Path
) -> tuple[Key, ...]:
    """The recorded keys that the grid asks for: its first items, its repeats."""
    items = list(dict.fromkeys(key.item_id for key in keys))[: benchmark.limit or grid.limit]
    available = set(keys)
    wanted = [Key(item_id, repeat) for item_id in items for repeat in range(grid.repeats)]
    for key in wanted:
        if key not in available:
            raise InputError(
                f"{trajectories} lacks repeat {key.repeat} of item {key.item_id!r}; record with repeats: {grid.repeats}"
            )
    return tuple(wanted)


def _drafted(grid: Grid, cell: Cell, drafters: list[list[DrafterFile]]) -> list[tuple[Cell, str]]:
    """The recorded cell itself and the grid's methods on it, canonical, each with the path of its drafter's file."""
    asked = [(cell, "")]
    for method, files in zip(grid.methods, drafters, strict=True):
        for budget in [0] if method.name == "none" else method.budgets or grid.budgets or [0]:
            drafted, file = with_drafter(
                replace(
                    cell,
                    method=method.name,
                    gamma=method.gamma,
                    budget=budget,
                    verification=grid.verification,
                ),
                files,
            )
            asked.append((drafted.canonical(), str(file.path) if file is not None else ""))
    return asked
