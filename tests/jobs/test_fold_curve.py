"""What τ costs and saves, of a stored run: paired with the same cell unfolded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dlmgrid.jobs.fold_curve import curve, main
from dlmgrid.workers.tables import SCORES, to_table, write_table
from dlmgrid.workers.testing.stored_rows import make_row, small_cell, write_run

ITEMS = ("a", "b", "c")


def write_scored_run(folder: Path, *, with_unfolded: bool = True) -> Path:
    """Draft-free, unfolded and folded rows of three items; folding changes the answer of the last one."""
    cells = [small_cell(), small_cell(method="ssd", budget=4)]
    cells.append(small_cell(method="ssd", budget=4, fold_tau=0.2))
    if not with_unfolded:
        del cells[1]
    rows, scores = [], []
    for cell in cells:
        for item in ITEMS:
            changed = cell.fold_tau is not None and item == "c"
            accepted = None if cell.budget == 0 else [2] if cell.fold_tau is not None else [1, 0]
            rows.append(
                make_row(cell, item, [4, 5, 7 if changed else 6], accepted=accepted, recompute_ratio=0.5)
            )
            scores.append(
                {"cell_key": cell.cell_key, "item_id": item, "repeat": 0, "benchmark": "words", "text_digest": "",
                 "scorer": "words", "scorer_version": "1",
                 "metric": "exact_match", "value": 0.0 if changed else 1.0, "status": "scored"}
            )  # fmt: skip
    run_dir = write_run(folder, rows)
    (run_dir / "scores").mkdir()
    complete = [dict.fromkeys(SCORES.names) | score for score in scores]
    write_table(str(run_dir / "scores" / "words.parquet"), to_table(SCORES, complete))
    return run_dir


def test_a_folded_cell_stands_beside_the_same_unfolded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, cell = write_scored_run(tmp_path / "run"), small_cell()
    assert main([str(run_dir), "--json", str(tmp_path / "curve.json")]) == 0
    rows: list[dict[str, Any]] = json.loads((tmp_path / "curve.json").read_text())
    (row,) = rows
    assert (row["method"], row["budget"], row["tau"], row["recheck"]) == ("ssd", 4, "0.2", "none")
    assert row["over_unfolded"] == pytest.approx(5 / 4)
    assert row["recompute_ratio"] == 0.5
    assert (row["model"], row["benchmark"], row["temperature"]) == (cell.model, "words", cell.temperature)
    assert row["compared"] == 3
    assert row["share_changed"] == pytest.approx(1 / 3)
    change = row["changes"]["words exact_match"]
    assert (change["num_paired"], change["num_differing"]) == (3, 1)
    assert change["mean"] == pytest.approx(-1 / 3)
    assert change["margin"] == pytest.approx(4.3027 / 3, rel=1e-4)
    assert "words exact_match -33.3 ± 143.4 % (1 of 3 differ)" in capsys.readouterr().out


def test_a_run_without_what_it_compares_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_scored_run(tmp_path / "run", with_unfolded=False))]) == 2
    assert "method 'ssd' at budget 4 was not run unfolded" in capsys.readouterr().err
    assert main([str(write_run(tmp_path / "free", [make_row(small_cell(), "a", [4, 5])]))]) == 2
    assert "no cell folds" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named_before_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_scored_run(tmp_path / "run")
    assert main([str(run_dir), "--json", str(tmp_path / "none" / "curve.json")]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: --json") and not told.out


def test_each_benchmark_is_scored_by_its_own_scorer(tmp_path: Path) -> None:
    run_dir = write_scored_run(tmp_path / "run")
    scores = pq.read_table(run_dir / "scores" / "words.parquet", schema=SCORES).to_pylist()
    others = [score | {"scorer": "before", "benchmark": "a", "cell_key": "other"} for score in scores]
    write_table(str(run_dir / "scores" / "others.parquet"), to_table(SCORES, others))
    (row,) = curve(run_dir)
    assert list(row["changes"]) == ["words exact_match"]
