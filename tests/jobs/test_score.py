"""``dlmgrid score``: one line a metric, and what is missing."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import typer
from typer.testing import CliRunner

from dlmgrid.jobs import score
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item, write_items
from dlmgrid.workers.tables import GENERATIONS, to_table, write_table

pytest.importorskip("lm_eval")

APP = typer.Typer()
APP.command()(score.command)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An output folder with one right GSM8K answer."""
    for name in ("generations", "inputs"):
        (tmp_path / name).mkdir()
    document = {"question": "1 + 1?", "answer": "#### 2"}
    messages = [{"role": "user", "content": document["question"]}]
    write_items(tmp_path / "inputs/gsm8k-00.jsonl", [Item(item_id="a", messages=messages, document=document)])
    row = {
        field.name: None if field.nullable else {pa.string(): ""}.get(field.type, 0) for field in GENERATIONS
    }
    row |= {"benchmark": "gsm8k", "item_id": "a", "text": "So 1 + 1 = 2.\n#### 2"}
    write_table(str(tmp_path / "generations/u.parquet"), to_table(GENERATIONS, [row]))
    return tmp_path


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
