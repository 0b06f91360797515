"""``dlmgrid export`` and ``dlmgrid import``: what they print, and what they warn of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dlmgrid.jobs import export, import_answers
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing.answered_run import HUMANEVAL_DOCUMENTS, store_answers, write_data

pytest.importorskip("evalplus")

TASK_ID = HUMANEVAL_DOCUMENTS[0]["task_id"]


def app(command: object) -> typer.Typer:
    made = typer.Typer()
    made.command()(command)  # type: ignore[type-var]
    return made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


def test_export_names_the_file_and_the_command_that_scores_it(tmp_path: Path, data: Path) -> None:
    out, to = tmp_path / "out", tmp_path / "files"
    store_answers(out, data, "humaneval", {TASK_ID: ["pass", None]})
    result = CliRunner().invoke(app(export.command), [str(out), "--format", "evalplus", "--to", str(to)])
    assert result.exit_code == 0, result.output
    (samples,) = to.glob("humaneval_*.jsonl")
    (problems,) = to.glob("problems_*.jsonl")
    assert f"{samples}: 1 answers to humaneval\n" in result.stdout
    assert (
        f"HUMANEVAL_OVERRIDE_PATH={problems} evalplus.evaluate --dataset humaneval --samples {samples} --base_only"
        in result.stdout
    )
    assert f"warning: {samples.name}: 1 rows hold an error and are left out" in result.stderr


def test_export_takes_the_benchmarks_that_are_named(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    store_answers(out, data, "humaneval", {TASK_ID: ["pass"]})
    words = [
        str(out),
        "--format",
        "evalplus",
        "--to",
        str(tmp_path / "files"),
        "--benchmarks",
        "humaneval_plus",
    ]
    result = CliRunner().invoke(app(export.command), words)
    assert isinstance(result.exception, InputError)
    assert "no answers to humaneval_plus" in str(result.exception)


def test_import_says_what_came_in_and_names_what_is_missing(tmp_path: Path, data: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps({"task_id": TASK_ID, "solution": "x = 1"}) + "\n")
    words = [str(file), "--benchmark", "humaneval", "--out", str(tmp_path / "out"), "--data", str(data)]
    result = CliRunner().invoke(app(import_answers.command), words)
    assert result.exit_code == 0, result.output
    assert "1 answers added from a file of the evalplus shape, 0 were there already" in result.stdout
    other = HUMANEVAL_DOCUMENTS[1]["task_id"]
    assert f"warning: 1 items of the benchmark have no answer: {other}" in result.stderr
    again = CliRunner().invoke(app(import_answers.command), words)
    assert "0 answers added from a file of the evalplus shape, 1 were there already" in again.stdout
