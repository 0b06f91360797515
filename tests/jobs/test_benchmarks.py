"""``dlmgrid benchmarks``: the list, and everything that decides one benchmark's number."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dlmgrid.jobs import benchmarks
from dlmgrid.workers.benchmarks import fetching
from dlmgrid.workers.benchmarks.catalog import benchmark_names, get_benchmark
from dlmgrid.workers.errors import InputError

APP = typer.Typer()
APP.command()(benchmarks.command)


def test_lists_every_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output = CliRunner().invoke(APP, []).output
    assert all(name in output for name in benchmark_names())


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_question", "humaneval", "humaneval_plus"])
def test_description_names_every_stage(name: str) -> None:
    labels = dict(benchmarks.describe(get_benchmark(name)))
    wanted = {"source", "prompt version", "prompt", "shots", "stop policy", "extraction", "post-processing"}
    assert wanted <= labels.keys()
    assert all(labels.values())
    assert [label for label in labels if label.startswith("scorer ")] == [
        f"scorer {scorer.name}" for scorer in get_benchmark(name).scorers
    ]


def test_shows_an_example_item(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/test.jsonl").write_text('{"question": "One [bold] and one?", "answer": "#### 2"}\n')
    (tmp_path / "manifest.json").write_text('{"gsm8k/test.jsonl": {"rows": 1}}')
    output = CliRunner().invoke(APP, ["gsm8k", "--data", str(tmp_path)]).output
    assert "Question: One [bold] and one?" in output


def test_describes_without_data(tmp_path: Path) -> None:
    result = CliRunner().invoke(APP, ["humaneval", "--data", str(tmp_path)])
    assert result.exit_code == 0
    assert "example item: not available here" in result.output
    assert "evalplus-repaired" in result.output


@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "ifeval"])
def test_asks_no_network_for_the_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(source: object) -> bytes:
        raise AssertionError(f"{source} was asked for")

    monkeypatch.setattr(fetching, "fetch", fetch)
    monkeypatch.setenv("DLMGRID_CACHE", str(tmp_path))
    monkeypatch.delenv("DLMGRID_DATA", raising=False)
    result = CliRunner().invoke(APP, [name])
    assert result.exit_code == 0, result.output
    assert f"example item: run `dlmgrid prefetch {name}`" in result.output


def test_unknown_name_is_an_input_error() -> None:
    result = CliRunner().invoke(APP, ["gsm9k"])
    assert isinstance(result.exception, InputError)
