"""``dlmgrid score``: one line a metric, and what is missing."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import typer
from typer.testing import CliRunner

from dlmgrid.jobs import score
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item
from dlmgrid.workers.tables import GENERATIONS
from dlmgrid.workers.testing.stored_rows import commit_items, commit_rows

pytest.importorskip("lm_eval")

APP = typer.Typer()
APP.command()(score.command)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An output folder with one right GSM8K answer."""
    document = {"question": "1 + 1?", "answer": "#### 2"}
    messages = [{"role": "user", "content": document["question"]}]
    commit_items(tmp_path, "gsm8k-00.jsonl", [Item(item_id="a", messages=messages, document=document)])
    commit_rows(tmp_path, [_row("a", text="So 1 + 1 = 2.\n#### 2")])
    return tmp_path


def _row(item_id: str, **columns: object) -> dict[str, object]:
    row = {
        field.name: None if field.nullable else {pa.string(): "", pa.bool_(): False}.get(field.type, 0)
        for field in GENERATIONS
    }
    return {**row, "benchmark": "gsm8k", "item_id": item_id, **columns}


def test_run_without_rows_is_incomplete(tmp_path: Path) -> None:
    (tmp_path / "generations").mkdir()
    result = CliRunner().invoke(APP, [str(tmp_path)])
    assert result.exit_code == 5
    assert "no rows yet" in result.output


def test_answers_that_are_all_errors_are_a_failure_and_some_are_said(out: Path, tmp_path: Path) -> None:
    commit_rows(out, [_row("a", repeat=1, error="the prompt is too long")])
    result = CliRunner().invoke(APP, [str(out)])
    assert result.exit_code == 0
    assert "1 of 2 generations hold an error" in result.output
    for path in (out / "generations").iterdir():
        path.unlink()
    (out / "manifest.jsonl").unlink()
    commit_items(out, "gsm8k-00.jsonl", [Item(item_id="a", messages=[], document={})])
    commit_rows(out, [_row("a", error="the prompt is too long")])
    result = CliRunner().invoke(APP, [str(out)])
    assert result.exit_code == 1
    assert "1 of 1 generations hold an error" in result.output


def test_prints_metrics_and_what_was_added(out: Path) -> None:
    result = CliRunner().invoke(APP, [str(out)])
    assert result.exit_code == 0, result.output
    assert "exact_match,strict-match" in result.output
    assert "1.0000" in result.output
    assert "2 score rows added, 0 kept" in result.output
    assert "0 score rows added, 2 kept" in CliRunner().invoke(APP, [str(out)]).output


def test_unknown_benchmark_is_an_input_error(out: Path) -> None:
    assert "1.0000" in CliRunner().invoke(APP, [str(out), "--benchmarks", "gsm8k"]).output
    result = CliRunner().invoke(APP, [str(out), "--benchmarks", "gsm8k,gsm9k"])
    assert isinstance(result.exception, InputError)
    assert "did you mean 'gsm8k'" in str(result.exception)
