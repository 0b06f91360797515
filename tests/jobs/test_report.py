"""``dlmgrid report``: prints in a log and writes its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlmgrid.jobs.report import command
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing.stored_rows import make_row, small_cell, write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    reference = make_row(small_cell(), "a", [4, 5, 6])
    row = make_row(small_cell(method="ssd", budget=4), "a", [4, 5, 6], accepted=[1, 0], reference=reference)
    return write_run(tmp_path / "run", [reference, row])


def test_prints_every_cell_on_one_line_of_a_log(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(run_dir)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = [words for words in lines if words[:2] == ["ssd", "4"]]
    assert row[-4:] == ["exact", "1/1", "1/1", "1/1"]
    assert "1.20" in row


def test_writes_the_files_it_is_asked_for(run_dir: Path, tmp_path: Path) -> None:
    page, figures, lines = tmp_path / "r.html", tmp_path / "r.json", tmp_path / "r.csv"
    command(run_dir, html=page, json=figures, csv=lines)
    assert page.read_text().startswith("<!doctype html>")
    assert len(json.loads(figures.read_text())["cells"]) == 2
    assert len(lines.read_text().splitlines()) == 3


def test_file_that_cannot_be_written_is_an_input_error(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        command(run_dir, html=tmp_path / "absent" / "r.html")
