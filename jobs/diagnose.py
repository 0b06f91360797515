"""``dlmgrid diagnose TRAJ``: what recorded runs say about drafting, printed and stored in the folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from dlmgrid.cluster.replay import read_recorded
from dlmgrid.cluster.worker_process import run_worker_module
from dlmgrid.jobs.console import table_console
from dlmgrid.workers.tables import DIAGNOSES, read_table
from dlmgrid.workers.trajectories.files import unrecorded_text

TITLES = {
    "stale_token_hit": "stale token is committed",
    "top8_coverage": "runs of 8 within 8 stale candidates",
    "order_hit": "most confident stale position is next",
    "argmax_share": "committed token is the argmax",
    "aged_token_hit": "token of an older pass is committed",
    "oracle_position_cut": "forwards cut, oracle positions",
    "oracle_token_cut": "forwards cut, oracle tokens",
}
DRAFTED_TITLES = {
    "accepted": "accepted a round",
    "cut": "forwards cut",
    "tree_depth": "depth of the trees",
    "tree_width": "width of the trees",
}
SHOWN_DEPTHS = (None, 1, 2, 4, 8)
SHOWN_BLOCKS = 10


def command(
    trajectories: Annotated[Path, typer.Argument(metavar="TRAJ", help="Folder of dlmgrid record.")],
    *,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first runs of every cell, as they are recorded.")
    ] = None,
) -> None:
    """Show how long stale tokens and a stale order hold, and what oracles would give; no model is needed.

    Takes some seconds a run and processor, most of them for the trees of spot; a large folder takes all processors.
    """
    read_recorded(trajectories)
    if missing := unrecorded_text(trajectories):
        typer.echo(f"note: {missing}", err=True)
    out = trajectories / "diagnoses.parquet"
    run_worker_module(
        "dlmgrid.workers.trajectories.diagnose_process",
        [str(trajectories), str(out), *([] if limit is None else ["--limit", str(limit)])],
        "diagnosing",
    )
    rows = read_table([str(out)], DIAGNOSES).to_pylist()
    console = table_console()
    for cell_key in dict.fromkeys(row["cell_key"] for row in rows):
        console.print(diagnosis_table([row for row in rows if row["cell_key"] == cell_key]))
    typer.echo(f"every depth and block: {out}")


def diagnosis_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One cell: a line a quantity and depth, a column a block; the file holds what does not fit."""
    cell = rows[0]
    title = f"{Path(cell['model']).name} {cell['benchmark']} T={cell['temperature']:g} {cell['decoder']}"
    blocks = sorted({row["block"] for row in rows if row["block"] is not None})[:SHOWN_BLOCKS]
    table = Table("quantity", "depth / D", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("over", "all", *(f"block {block}" for block in blocks)):
        table.add_column(name, justify="right")
    values = {(row["quantity"], row["depth"], row["draft_budget"], row["block"]): row for row in rows}
    for name, depth, budget in dict.fromkeys(key[:3] for key in values):
        if depth not in SHOWN_DEPTHS:
            continue
        of_line = [values.get((name, depth, budget, block)) for block in (None, *blocks)]
        whole = of_line[0]
        assert whole is not None, name
        label = f"depth {depth}" if depth else f"D {budget}" if budget else ""
        cells = ["–" if row is None else _text(name, row["value"]) for row in of_line]
        table.add_row(_title(name), label, str(whole["count"]), *cells)
    return table


def _title(name: str) -> str:
    if name in TITLES:
        return TITLES[name]
    ending = next(ending for ending in DRAFTED_TITLES if name.endswith(f"_{ending}"))
    return f"{DRAFTED_TITLES[ending]}, {name.removesuffix(f'_{ending}')}"


def _text(name: str, value: float) -> str:
    if name.endswith("_cut"):
        return f"{value:.2f}x"
    return f"{value:.1%}" if name in TITLES else f"{value:.2f}"
