"""Replay planned cells: ``python -m dlmgrid.workers.trajectories.replay_process PLAN``. No model; on the CPU, where
the plan does not put the networks of drafters on a GPU.

Every generation is read once and replayed under all cells of its serialized run; a large plan takes one process for
each processor. Only where the plan asks for live
decoding is a model loaded, after the replay.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlmgrid import __version__
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.drafting.catalog import DIAGNOSTIC_METHODS
from dlmgrid.workers.drafting.drafter import Drafter, place
from dlmgrid.workers.drafting.order_model import ScoreMemo
from dlmgrid.workers.drafting.spot import SpotDrafter
from dlmgrid.workers.errors import DlmgridError, InputError
from dlmgrid.workers.parent_watch import end_with_parent
from dlmgrid.workers.partial_files import partial_path
from dlmgrid.workers.runtime import check_device
from dlmgrid.workers.tables import REPLAYS, to_table, write_table
from dlmgrid.workers.trajectories.diagnostic_drafters import DIAGNOSTIC_DRAFTERS
from dlmgrid.workers.trajectories.files import files_by_cell, open_trajectories, read_generation
from dlmgrid.workers.trajectories.kept_rows import KeptRows
from dlmgrid.workers.trajectories.plan import ReplayPlan, ReplayWork
from dlmgrid.workers.trajectories.processes import available_cpus, part_size, run_parts
from dlmgrid.workers.trajectories.replay import DraftWithFuture, ReplayBatch, Replayed, without_future
from dlmgrid.workers.trajectories.trajectory import load_generation
from dlmgrid.workers.unit_runner import UnitRunner, build_drafter
from dlmgrid.workers.units import Key, WorkUnit

ROWS_PER_PROCESS = 256
"""A process is started for at least this many rows: it takes seconds to start."""

PROCESSES_OF_A_GPU = 4
"""Processes share a GPU by turns: more of them only wait for one another."""

UNFINISHED = "unfinished"
"""Folder beside the cells' files that keeps what a stopped replay has done."""

COMPARED = ("nfe_prefill", "nfe_denoise", "nfe_commit", "nfe_total", "rounds", "accepted", "drafted_nodes",
            "rows_computed")  # fmt: skip

Row = dict[str, Any]


def drafting_of(work: ReplayWork, memo: ScoreMemo, device: str = "cpu") -> DraftWithFuture:
    """What fills the trees of a cell: its drafter, which never looks ahead, or a diagnostic one, which does.

    Drafters with the same order model on the same runs share a ``memo``; a network is computed on ``device``.
    """
    if work.cell.method in DIAGNOSTIC_DRAFTERS:
        return DIAGNOSTIC_DRAFTERS[work.cell.method]
    drafter = _drafter_of(work, device)
    if isinstance(drafter, SpotDrafter):
        drafter.share(memo)
    return without_future(drafter)


_BUILT: dict[tuple[Any, ...], Drafter] = {}


def _drafter_of(work: ReplayWork, device: str) -> Drafter:
    """The drafter of a cell. A process builds each once, with its network and the graphs of it on a GPU."""
    cell = work.cell
    key = (cell.method, cell.drafter_fingerprint, cell.gamma, work.drafter_path, device)
    if key not in _BUILT:
        drafter = build_drafter(cell, work.drafter_path)
        if device != "cpu":
            place(drafter, torch.device(device))
        _BUILT[key] = drafter
    return _BUILT[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Generations that are replayed together for some cells: where each is recorded, as (file, row group). ``device``
    computes the networks of drafters. ``keep`` is where rows are kept until all is done; None: nowhere."""

    places: tuple[tuple[Path, int], ...]
    works: tuple[ReplayWork, ...]
    device: str = "cpu"
    keep: Path | None = None

    @property
    def records(self) -> tuple[str, ...]:
        """What is read beyond the steps."""
        return tuple(sorted({record for work in self.works for record in work.records}))


def split_parts(
    files: Sequence[Path],
    works: Sequence[ReplayWork],
    size: int,
    *,
    device: str = "cpu",
    keep: Path | None = None,
) -> list[Part]:
    """The generations that ``works`` ask for, in parts of ``size``.

    All works share the serialized run that ``files`` hold. Raises InputError when a key has no trajectory.
    """
    wanted = {key for work in works for key in work.keys}
    place_of: dict[Key, tuple[Path, int]] = {}
    for path in files:
        file = open_trajectories(path)
        for group in range(file.num_row_groups):
            row = read_generation(path, file, group, ["item_id", "repeat"]).slice(0, 1).to_pylist()[0]
            key = Key(row["item_id"], row["repeat"])
            if key in wanted and key not in place_of:
                place_of[key] = (path, group)
    for work in works:
        for key in work.keys:
            if key not in place_of:
                raise InputError(f"item {key.item_id!r} has no trajectory; record it with dlmgrid record")
    places = list(place_of.values())
    return [
        Part(places=tuple(places[start : start + size]), works=tuple(works), device=device, keep=keep)
        for start in range(0, len(places), size)
    ]


def replay_part(part: Part) -> list[dict[Key, Row]]:
    """The rows of each of a part's cells, by key. Rows that were kept are taken, others are kept as they come."""
    kept = None if part.keep is None else KeptRows(part.keep)
    found = [None if kept is None else kept.load(work.cell, part.places, part.device) for work in part.works]
    missing = [index for index, rows in enumerate(found) if rows is None]
    if missing:
        opened = {path: open_trajectories(path) for path, _ in part.places}
        batch = ReplayBatch(
            [load_generation(path, opened[path], group, records=part.records) for path, group in part.places]
        )
        memos: dict[str, ScoreMemo] = {}
        for index in missing:
            work = part.works[index]
            memo = memos.setdefault(work.drafter_path, ScoreMemo())
            rows: dict[Key, Row] = {}
            for replayed in batch.replay(work.cell, drafting_of(work, memo, part.device)):
                rows[Key(replayed.item_id, replayed.repeat)] = _row(work.cell, replayed)
            found[index] = rows
            if kept is not None:
                kept.save(work.cell, part.places, part.device, rows)
    return [rows for rows in found if rows is not None]


def replay_cells(
    files: Sequence[Path], works: Sequence[ReplayWork], *, num_processes: int = 1
) -> list[list[Row]]:
    """The rows of each cell, in the order of its keys; all cells share the serialized run that ``files`` hold.

    Raises InputError when a key has no trajectory.
    """
    num_keys = len({key for work in works for key in work.keys})
    parts = split_parts(files, works, part_size(num_keys, num_processes, smallest=1))
    return join_rows(works, parts, run_parts(replay_part, parts, num_processes, done="replayed"))


def join_rows(
    works: Sequence[ReplayWork], parts: Sequence[Part], found: Sequence[Sequence[dict[Key, Row]]]
) -> list[list[Row]]:
    """The rows of each of ``works``, in the order of its keys, from those of the parts that hold it."""
    rows: list[dict[Key, Row]] = [{} for _ in works]
    index_of = {work.cell.cell_key: index for index, work in enumerate(works)}
    for part, of_part in zip(parts, found, strict=True):
        for work, some in zip(part.works, of_part, strict=True):
            rows[index_of[work.cell.cell_key]].update(some)
    return [[own[key] for key in work.keys] for work, own in zip(works, rows, strict=True)]


def verify(work: ReplayWork, rows: Sequence[Row], num_verified: int, runner: UnitRunner) -> None:
    """Decode the first keys of a cell live and set ``agrees_with_live`` on their rows.

    Raises InputError when an item cannot be decoded, or the checkpoint is not the recorded one.
    """
    unit = WorkUnit(
        cell=work.cell, keys=work.keys[:num_verified], checkpoint=work.checkpoint, inputs=work.inputs, output="",
        drafter_path=work.drafter_path,
    )  # fmt: skip
    live = runner.decode_rows(unit, max_in_flight=work.cell.max_in_flight)
    for row, decoded in zip(rows, live, strict=False):
        if decoded["error"] is not None:
            raise InputError(f"item {row['item_id']!r} cannot be decoded live: {decoded['error']}")
        row["agrees_with_live"] = all(row[name] == decoded[name] for name in COMPARED)


def _row(cell: Cell, replayed: Replayed) -> Row:
    return cell.to_dict() | {
        "cell_key": cell.cell_key,
        "seed": str(cell.seed),
        "item_id": replayed.item_id,
        "repeat": replayed.repeat,
        "recorded_cell_key": cell.reference().cell_key,
        "prompt_tokens": replayed.prompt_tokens,
        "nfe_prefill": replayed.nfe_prefill,
        "nfe_denoise": replayed.nfe_denoise,
        "nfe_commit": replayed.nfe_commit,
        "nfe_total": replayed.nfe_total,
        "nfe_reference": replayed.nfe_reference,
        "rounds": replayed.nfe_denoise,
        "accepted": replayed.accepted,
        "accepted_per_round": sum(replayed.accepted) / len(replayed.accepted),
        "depth_per_round": sum(replayed.depths) / len(replayed.depths),
        "width_per_round": sum(replayed.widths) / len(replayed.widths),
        "drafted_nodes": replayed.drafted_nodes,
        "rows_computed": replayed.rows_computed,
        "agrees_with_live": None,
        "product_version": __version__,
    }


def run_plan(plan: ReplayPlan) -> None:
    """Replay a plan, writing each cell's file whole. What a stopped run of it has done is not done again."""
    check_device(plan.device)
    files = files_by_cell(Path(plan.trajectories))
    out = Path(plan.out)
    out.mkdir(parents=True, exist_ok=True)
    by_recorded: dict[str, list[ReplayWork]] = {}
    for work in plan.works:
        by_recorded.setdefault(work.cell.reference().cell_key, []).append(work)
    num_rows = sum(len(work.keys) for work in plan.works)
    num_processes = min(available_cpus(), -(-num_rows // ROWS_PER_PROCESS))
    if plan.device != "cpu":
        num_processes = min(num_processes, PROCESSES_OF_A_GPU)
    num_generations = sum(len({key for work in works for key in work.keys}) for works in by_recorded.values())
    size = part_size(num_generations, num_processes)
    keep = out / UNFINISHED
    groups = [
        (works, split_parts(files.get(recorded, []), works, size, device=plan.device, keep=keep))
        for recorded, works in by_recorded.items()
    ]
    say = functools.partial(print, flush=True)
    everything = [part for _, parts in groups for part in parts]
    found = run_parts(replay_part, everything, num_processes, done="replayed", say=say)
    runner: UnitRunner | None = None
    for works, parts in groups:
        own, found = found[: len(parts)], found[len(parts) :]
        for work, rows in zip(works, join_rows(works, parts, own), strict=True):
            if plan.num_verified and work.cell.method not in DIAGNOSTIC_METHODS:
                runner = runner or UnitRunner("cpu", actor="replay")
                verify(work, rows, plan.num_verified, runner)
            partial = partial_path(out / f"{work.cell.cell_key}.parquet")
            write_table(str(partial), to_table(REPLAYS, rows))
            partial.replace(out / f"{work.cell.cell_key}.parquet")
        for work in works:
            KeptRows(keep).remove(work.cell)


def main() -> None:
    """The command of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path, metavar="PLAN")
    arguments = parser.parse_args()
    end_with_parent()
    try:
        run_plan(ReplayPlan.read(arguments.plan))
    except DlmgridError as error:
        parser.exit(2, f"error: {error}\n")
    except OSError as error:  # reading is answered for where it is done
        parser.exit(2, f"error: {error.filename or 'the output'} cannot be written ({error.strerror})\n")


if __name__ == "__main__":
    main()
