"""What τ costs and saves in a scored run: ``python -m dlmgrid.jobs.fold_curve OUT [--json FILE]``.

For every cell that folds, beside the cell with the same settings unfolded: tokens/s over it (and over draft-free), the
recompute ratio, the share of rows whose tokens changed, and the change in accuracy with a 95 % interval of the paired
differences (mean ± 1.96 standard errors). The run of ``jobs/grids/fold_curve.yaml`` has what it needs, scored.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlmgrid.cluster.report import CellReport, build_report, load_generations, load_scores
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.errors import InputError

Row = dict[str, Any]
_UNFOLDED: dict[str, Any] = {
    "fold_tau": None, "fold_tau_by_layer": "", "fold_gate": "parent", "fold_recheck": False, "fold_pipelined": False,
}  # fmt: skip
_Z = 1.96


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of the module docstring; 2 for a folder that has no folded cells."""
    parser = argparse.ArgumentParser(
        prog="python -m dlmgrid.jobs.fold_curve", description="Show what tau costs and saves."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="output folder of a scored run")
    parser.add_argument("--json", type=Path, help="also write every figure as JSON")
    options = parser.parse_args(arguments)
    try:
        rows = curve(options.out)
    except InputError as error:
        print(error)
        return 2
    print(
        "method            D     tau recheck    x unfolded  x draft-free  recompute  changed  accuracy change"
    )
    for row in rows:
        change, margin = row["accuracy_change"], row["accuracy_margin"]
        accuracy = "not scored" if change is None else f"{100 * change:+.1f} ± {100 * margin:.1f} %"
        print(
            f"{row['method']:14} {row['budget']:4} {row['tau']:>7} {row['recheck']:10}"
            f" {_number(row['over_unfolded']):>11} {_number(row['over_draft_free']):>13}"
            f" {_number(row['recompute_ratio']):>10}"
            f" {_number(row['share_changed']):>8}  {accuracy} ({row['items']} items)"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def curve(out: Path) -> list[Row]:
    """One row a folded cell, by method, budget and τ. Raises InputError for a folder without any."""
    cells = {cell.cell_key: cell for cell in build_report(out).cells}
    folded = [cell for cell in cells.values() if cell.settings["fold_tau"] is not None]
    if not folded:
        raise InputError(f"{out}: no cell folds; run a grid with fold, such as jobs/grids/fold_curve.yaml")
    table = load_generations(out, ("cell_key", "item_id", "repeat", "token_ids")).to_pylist()
    tokens = {(row["cell_key"], row["item_id"], row["repeat"]): row["token_ids"] for row in table}
    values = _latest_values(load_scores(out).to_pylist())
    return sorted(
        (_row(cell, cells, tokens, values) for cell in folded),
        key=lambda row: (row["method"], row["budget"], row["recheck"], row["largest_tau"]),
    )


def _row(
    cell: CellReport,
    cells: Mapping[str, CellReport],
    tokens: Mapping[tuple[str, str, int], list[int] | None],
    values: Mapping[tuple[str, str, int], float],
) -> Row:
    settings = Cell.from_dict(cell.settings)
    base_key = replace(settings, **_UNFOLDED).cell_key
    base = cells.get(base_key)
    if base is None:
        raise InputError(
            f"method {settings.method!r} at budget {settings.budget} was not run unfolded; add it without fold"
        )
    keys = [key[1:] for key in tokens if key[0] == cell.cell_key]
    pairs = [(tokens[cell.cell_key, *key], tokens.get((base_key, *key))) for key in keys]
    compared = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    differences = [
        values[cell.cell_key, *key] - values[base_key, *key]
        for key in keys
        if (cell.cell_key, *key) in values and (base_key, *key) in values
    ]
    change, margin = paired_interval(differences)
    speed, base_speed = cell.tokens_per_second, base.tokens_per_second
    return {
        "method": settings.method, "budget": settings.budget, "largest_tau": settings.fold_tau,
        "tau": settings.fold_tau_by_layer or f"{settings.fold_tau:g}", "gate": settings.fold_gate,
        "recheck": "pipelined" if settings.fold_pipelined else "own pass" if settings.fold_recheck else "none",
        "tokens_per_second": speed,
        "over_unfolded": speed / base_speed if speed and base_speed else None,
        "over_draft_free": cell.throughput_ratio, "recompute_ratio": cell.recompute_ratio_mean,
        "nfe_ratio": cell.nfe_ratio, "items": len(compared),
        "share_changed": sum(a != b for a, b in compared) / len(compared) if compared else None,
        "scored_pairs": len(differences), "accuracy_change": change, "accuracy_margin": margin,
    }  # fmt: skip


def paired_interval(differences: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean of paired differences and 1.96 standard errors of it; None where there are fewer than two."""
    count = len(differences)
    if count < 2:
        return None, None
    mean = sum(differences) / count
    variance = sum((value - mean) ** 2 for value in differences) / (count - 1)
    return mean, _Z * math.sqrt(variance / count)


def _latest_values(scores: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, int], float]:
    """The value of each generation under the first scorer by name, in its latest version."""
    first = min((score["scorer"] for score in scores), default="")
    ordered = sorted(
        (score for score in scores if score["scorer"] == first), key=lambda s: s["scorer_version"]
    )
    return {
        (score["cell_key"], score["item_id"], score["repeat"]): float(score["value"])
        for score in ordered
        if score["value"] is not None
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
