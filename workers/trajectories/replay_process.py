"""Replay planned cells: ``python -m dlmgrid.workers.trajectories.replay_process PLAN``. One process, CPU, no model.

Every generation is read once and replayed under all cells of its serialized run. Only where the plan asks for live
decoding is a model loaded, after the replay.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dlmgrid import __version__
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.drafting.catalog import DIAGNOSTIC_METHODS
from dlmgrid.workers.errors import DlmgridError, InputError
from dlmgrid.workers.tables import REPLAYS, to_table, write_table
from dlmgrid.workers.trajectories.diagnostic_drafters import DIAGNOSTIC_DRAFTERS
from dlmgrid.workers.trajectories.files import files_by_cell
from dlmgrid.workers.trajectories.plan import ReplayPlan, ReplayWork
from dlmgrid.workers.trajectories.replay import DraftWithFuture, ReplayBatch, Replayed, without_future
from dlmgrid.workers.trajectories.trajectory import Trajectory, load_trajectories
from dlmgrid.workers.unit_runner import UnitRunner, build_drafter
from dlmgrid.workers.units import Key, WorkUnit

BATCH = 64
"""Generations replayed together: a few hundred MB at a block length of 32."""

COMPARED = ("nfe_prefill", "nfe_denoise", "nfe_commit", "nfe_total", "rounds", "accepted", "drafted_nodes",
            "rows_computed")  # fmt: skip

Row = dict[str, Any]


def drafting_of(cell: Cell, drafter_path: str = "") -> DraftWithFuture:
    """What fills the trees of a cell: its drafter, which never looks ahead, or a diagnostic one, which does."""
    if cell.method in DIAGNOSTIC_DRAFTERS:
        return DIAGNOSTIC_DRAFTERS[cell.method]
    return without_future(build_drafter(cell, drafter_path))


def batches(files: Sequence[Path], keys: set[Key], records: Sequence[str]) -> Iterator[ReplayBatch]:
    """The generations of ``keys`` in files of one recorded cell, up to 64 at a time, with what ``records`` names."""
    waiting: list[Trajectory] = []
    for path in files:
        for trajectory in load_trajectories(path, records=records):
            if Key(trajectory.item_id, trajectory.repeat) in keys:
                waiting.append(trajectory)
            if len(waiting) == BATCH:
                yield ReplayBatch(waiting)
                waiting = []
    if waiting:
        yield ReplayBatch(waiting)


def replay_cells(files: Sequence[Path], works: Sequence[ReplayWork]) -> list[list[Row]]:
    """The rows of each cell, in the order of its keys; all cells share the serialized run that ``files`` hold.

    Raises InputError when a key has no trajectory.
    """
    rows: list[dict[Key, Row]] = [{} for _ in works]
    drafts = [drafting_of(work.cell, work.drafter_path) for work in works]
    wanted = {key for work in works for key in work.keys}
    records = sorted({record for work in works for record in work.records})
    for batch in batches(files, wanted, records):
        for work, draft, found in zip(works, drafts, rows, strict=True):
            for index, replayed in enumerate(batch.replay(work.cell, draft)):
                num_steps = int(batch.ends[index] - batch.firsts[index])
                found[Key(replayed.item_id, replayed.repeat)] = _row(work.cell, replayed, num_steps)
    for work, found in zip(works, rows, strict=True):
        missing = [key for key in work.keys if key not in found]
        if missing:
            raise InputError(f"item {missing[0].item_id!r} has no trajectory; record it with dlmgrid record")
    return [[found[key] for key in work.keys] for work, found in zip(works, rows, strict=True)]


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


def _row(cell: Cell, replayed: Replayed, num_steps: int) -> Row:
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
        "nfe_reference": replayed.nfe_prefill + num_steps + replayed.nfe_commit,
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
    """Replay a plan, writing each cell's file whole."""
    files = files_by_cell(Path(plan.trajectories))
    out = Path(plan.out)
    out.mkdir(parents=True, exist_ok=True)
    by_recorded: dict[str, list[ReplayWork]] = {}
    for work in plan.works:
        by_recorded.setdefault(work.cell.reference().cell_key, []).append(work)
    runner: UnitRunner | None = None
    for recorded, works in by_recorded.items():
        for work, rows in zip(works, replay_cells(files.get(recorded, []), works), strict=True):
            if plan.num_verified and work.cell.method not in DIAGNOSTIC_METHODS:
                runner = runner or UnitRunner("cpu", actor="replay")
                verify(work, rows, plan.num_verified, runner)
            partial = out / f"{work.cell.cell_key}.parquet.part"
            write_table(str(partial), to_table(REPLAYS, rows))
            partial.replace(out / f"{work.cell.cell_key}.parquet")


def main() -> None:
    """The command of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path, metavar="PLAN")
    arguments = parser.parse_args()
    try:
        run_plan(ReplayPlan.read(arguments.plan))
    except DlmgridError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
