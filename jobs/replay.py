"""``dlmgrid replay TRAJ GRID --out DIR``: drafters on recorded runs, without a model.

Exit code 4 says that a replayed count differs from the live one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from dlmgrid.cluster.decoder_text import decoder_text, other_settings, unnamed_settings
from dlmgrid.cluster.grid import read_grid
from dlmgrid.cluster.out_folder import ExitCode, check_out
from dlmgrid.cluster.replay import ReplaySummary, plan_replay, read_recorded, replay_grid, summarise
from dlmgrid.cluster.sources import installed_sources
from dlmgrid.jobs.console import table_console
from dlmgrid.workers.trajectories.plan import ReplayPlan


def command(
    trajectories: Annotated[Path, typer.Argument(metavar="TRAJ", help="Folder of dlmgrid record.")],
    grid: Annotated[Path, typer.Argument(metavar="GRID", help="Grid file (YAML): methods and budgets.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for replays/, one Parquet file a cell.")],
    verify: Annotated[
        int, typer.Option(min=0, help="Also decode this many items of every cell live, and compare.")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda: what computes the networks of drafters.")] = "cpu",
) -> int:
    """Replay the methods of a grid on recorded runs: forwards, acceptance, drafted nodes and rows, exactly."""
    out = check_out(out)
    if device != "cpu":  # torch is loaded only where it is asked
        from dlmgrid.workers.runtime import check_device

        device = check_device(device)
    recorded = read_recorded(trajectories)
    works = plan_replay(
        read_grid(grid).grid,
        installed_sources(),
        trajectories,
        recorded,
        num_verified=verify,
        say=lambda text: typer.echo(text, err=True),
    )
    plan = ReplayPlan(
        trajectories=str(trajectories.absolute()),
        out=str(out / "replays"),
        works=works,
        num_verified=verify,
        device=device,
    )
    num_rows = sum(len(work.keys) for work in works)
    typer.echo(f"replaying {num_rows} rows of {len(works)} cells", err=True)
    replay_grid(plan)
    summaries = summarise(plan)
    console = table_console()
    console.print(replay_table(summaries))
    console.print(LEGEND)
    num_live = sum(summary.num_live for summary in summaries)
    num_agreeing = sum(summary.num_agreeing for summary in summaries)
    if verify:
        typer.echo(f"{num_agreeing} of {num_live} rows decoded live agree in every count")
    return int(ExitCode.DONE if num_agreeing == num_live else ExitCode.NOT_EXACT)


LEGEND = (
    "NFE: target forwards per item (prefill, denoising and commit passes). × fewer: forwards of the serialized run, "
    "its commit passes apart, over these. accepted: drafted states accepted per round. depth, width: steps to the "
    "deepest drafted state of a round, states of its fullest depth. drafted, rows: drafted states and computed rows "
    "per item. live: rows equal to live decoding, of those compared (--verify)."
)


def replay_table(summaries: Sequence[ReplaySummary]) -> Table:
    """One line a cell; where only a setting without a column tells cells apart, a column more."""
    table = Table(box=box.SIMPLE_HEAD)
    settings = [summary.cell.to_dict() for summary in summaries]
    varied = unnamed_settings(settings)
    for name in ("model", "benchmark", "T", "decoder", "method", "D", "items", "NFE", "× fewer",
                 "accepted", "depth", "width", "drafted", "rows", "live", *(["and"] if varied else [])):  # fmt: skip
        left = name in ("model", "benchmark", "decoder", "method", "and")
        table.add_column(name, justify="left" if left else "right")
    for summary, own in zip(summaries, settings, strict=True):
        cell = summary.cell
        table.add_row(
            Path(cell.model).name,
            cell.benchmark,
            f"{cell.temperature:g}",
            decoder_text(own),
            cell.method,
            str(cell.budget),
            str(summary.num_rows),
            f"{summary.nfe_mean:.1f}",
            f"{summary.nfe_ratio:.2f}x",
            f"{summary.accepted_per_round:.2f}",
            f"{summary.depth_mean:.1f}",
            f"{summary.width_mean:.1f}",
            f"{summary.drafted_nodes_mean:.0f}",
            f"{summary.rows_computed_mean:.0f}",
            f"{summary.num_agreeing}/{summary.num_live}" if summary.num_live else "–",
            *([other_settings(own, varied)] if varied else []),
        )
    return table
