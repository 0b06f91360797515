"""Progress: a bounded number of plain lines with percent, rate, ETA and failures; a JSON file beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlmgrid.cluster.progress import Counts, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_job_log_of_200_items_has_few_lines_that_say_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, counts = Clock(), Counts(num_wanted=250, num_stored=50)
    with Progress(tmp_path / "progress.json", counts, style="lines", clock=clock) as progress:
        for number in range(200):
            clock.now += 0.5
            counts.num_done += 1
            counts.num_failed += number == 3
            counts.num_retried += number == 5
            counts.cells = ["m words ssd D=6 T=1"] * 2
            progress.update()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 100 / 5 + 1
    assert lines[9] == (
        "60% | 150/250 rows | 2.0 rows/s | ETA 0:50 | failed 1 | retried 1 | 0 actors | m words ssd D=6 T=1"
    )
    written = json.loads((tmp_path / "progress.json").read_text())
    assert (written["percent"], written["num_failed"], written["eta_seconds"]) == (100.0, 1, 0.0)


def test_rows_that_are_not_exact_are_shouted_about(tmp_path: Path) -> None:
    counts = Counts(num_wanted=2, num_stored=0, num_done=2, num_inexact=1)
    assert "NOT EXACT 1" in Progress(tmp_path / "p.json", counts, style="lines").line()


def test_before_the_first_row_there_is_no_estimate(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "p.json", Counts(num_wanted=2, num_stored=1), style="lines")
    assert progress.eta_seconds is None
    assert "50% | 1/2 rows | 0.0 rows/min | ETA ?" in progress.line()


def test_quiet_prints_nothing_but_keeps_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(tmp_path / "p.json", Counts(num_wanted=0, num_stored=0), style="quiet") as progress:
        progress.say("hello")
    assert capsys.readouterr() == ("", "")
    assert json.loads((tmp_path / "p.json").read_text())["percent"] == 100.0


def test_many_cells_are_cut_short(tmp_path: Path) -> None:
    counts = Counts(num_wanted=1, num_stored=0, cells=["a", "b", "c", "d", "e"])
    assert Progress(tmp_path / "p.json", counts, style="lines").line().endswith("a, b, c and 2 more")
