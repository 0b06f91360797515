"""What τ costs and saves in a scored run: ``python -m dlmgrid.jobs.fold_curve OUT [--json FILE]``.

For every cell that folds, beside the cell with the same settings unfolded, over the generations that both have:
tokens/s over it (and over draft-free), the recompute ratio, the share of rows whose tokens changed, and the paired
change of each metric with a 95 % interval. The run of ``jobs/grids/fold_curve.yaml`` has what it needs, scored.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from dlmgrid.cluster.accuracy import Score, accuracies, latest_scores
from dlmgrid.cluster.decoder_text import decoder_text
from dlmgrid.cluster.report import CellReport, build_report, load_generations, load_scores
from dlmgrid.jobs.refusals import in_one_line
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.out_file import check_out_file
from dlmgrid.workers.partial_files import write_whole

Row = dict[str, Any]
_UNFOLDED: dict[str, Any] = {
    "fold_tau": None, "fold_tau_by_layer": "", "fold_gate": "parent", "fold_recheck": False, "fold_pipelined": False,
}  # fmt: skip


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
    """The command of the module docstring; 2 for a folder that has no folded cells."""
    parser = argparse.ArgumentParser(
        prog="python -m dlmgrid.jobs.fold_curve", description="Show what tau costs and saves."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="output folder of a scored run")
    parser.add_argument("--json", type=Path, help="also write every figure as JSON")
    options = parser.parse_args(arguments)
    if options.json is not None:
        check_out_file(options.json, "--json")
    rows = curve(options.out)
    for title, group in groupby(rows, key=lambda row: row["title"]):
        print(title)
        print(
            "  method            D     tau recheck    x unfolded  x draft-free  recompute  changed  change of a metric"
        )
        for row in group:
            print(
                f"  {row['method']:14} {row['budget']:4} {row['tau']:>7} {row['recheck']:10}"
                f" {_number(row['over_unfolded']):>11} {_number(row['over_draft_free']):>13}"
                f" {_number(row['recompute_ratio']):>10}"
                f" {_number(row['share_changed']):>8}  {_changes_text(row)}"
            )
    if options.json is not None:
        write_whole(options.json, json.dumps(rows, indent=1) + "\n")
    return 0


def _changes_text(row: Row) -> str:
    texts = []
    for metric, change in row["changes"].items():
        margin = "" if change["margin"] is None else f" ± {100 * change['margin']:.1f}"
        differ = f"{change['num_differing']} of {change['num_paired']} differ"
        texts.append(f"{metric} {100 * change['mean']:+.1f}{margin} % ({differ})")
    return "; ".join(texts) or "not scored"


def curve(out: Path) -> list[Row]:
    """One row a folded cell, by model, benchmark, temperature and decoder, then method, budget and τ.

    Raises InputError for a folder without any, and for a folded cell that was not run unfolded.
    """
    cells = {cell.cell_key: cell for cell in build_report(out).cells}
    folded = [cell for cell in cells.values() if cell.settings["fold_tau"] is not None]
    if not folded:
        raise InputError(f"{out}: no cell folds; run a grid with fold, such as jobs/grids/fold_curve.yaml")
    columns = ("cell_key", "item_id", "repeat", "token_ids", "generated_tokens", "seconds_wall", "profiled")
    table = load_generations(out, columns).to_pylist()
    stored = {(row["cell_key"], row["item_id"], row["repeat"]): row for row in table}
    scores = latest_scores(load_scores(out).to_pylist())
    return sorted(
        (_row(cell, cells, stored, scores) for cell in folded),
        key=lambda row: (row["title"], row["method"], row["budget"], row["recheck"], row["largest_tau"]),
    )


def _row(
    cell: CellReport,
    cells: Mapping[str, CellReport],
    stored: Mapping[tuple[str, str, int], Mapping[str, Any]],
    scores: Mapping[str, Sequence[Score]],
) -> Row:
    settings = Cell.from_dict(cell.settings)
    base_key = replace(settings, **_UNFOLDED).cell_key
    if base_key not in cells:
        raise InputError(
            f"method {settings.method!r} at budget {settings.budget} was not run unfolded; add it without fold"
        )
    keys = [key[1:] for key in stored if key[0] == cell.cell_key]
    pairs = [
        (stored[cell.cell_key, *key], stored[base_key, *key]) for key in keys if (base_key, *key) in stored
    ]
    compared = [
        pair for pair in pairs if pair[0]["token_ids"] is not None and pair[1]["token_ids"] is not None
    ]
    speeds = [_tokens_per_second([pair[side] for pair in compared]) for side in range(2)]
    found = accuracies(set(keys), scores.get(cell.cell_key, []), scores.get(base_key, []))
    decoder = decoder_text(cell.settings)
    return {
        "title": f"{settings.model} · {settings.benchmark} · T = {settings.temperature:g} · {decoder}",
        "model": settings.model, "benchmark": settings.benchmark, "temperature": settings.temperature,
        "decoder": decoder, "method": settings.method, "budget": settings.budget, "largest_tau": settings.fold_tau,
        "tau": settings.fold_tau_by_layer or f"{settings.fold_tau:g}", "gate": settings.fold_gate,
        "recheck": "pipelined" if settings.fold_pipelined else "own pass" if settings.fold_recheck else "none",
        "tokens_per_second": speeds[0],
        "over_unfolded": speeds[0] / speeds[1] if speeds[0] and speeds[1] else None,
        "over_draft_free": cell.throughput_ratio, "recompute_ratio": cell.recompute_ratio_mean,
        "nfe_ratio": cell.nfe_ratio, "compared": len(compared),
        "share_changed": _share_changed(compared),
        "changes": {
            f"{one.scorer} {one.metric}": asdict(one.change) for one in found if one.change is not None
        },
    }  # fmt: skip


def _tokens_per_second(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """None where a row was profiled: its time is no wall time."""
    if not rows or any(row["profiled"] or not row["seconds_wall"] for row in rows):
        return None
    tokens, seconds = (sum(row[name] for row in rows) for name in ("generated_tokens", "seconds_wall"))
    return float(tokens / seconds)


def _share_changed(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> float | None:
    if not pairs:
        return None
    changed = sum(bool(ours["token_ids"] != theirs["token_ids"]) for ours, theirs in pairs)
    return changed / len(pairs)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
