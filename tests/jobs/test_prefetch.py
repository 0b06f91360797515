"""``dlmgrid prefetch``: what is fetched, what is written beside it, and that nothing is fetched twice."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dlmgrid.jobs import prefetch
from dlmgrid.workers.benchmarks import catalog, fetching
from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.benchmarks.data_file import content_digest
from dlmgrid.workers.errors import InputError

APP = typer.Typer()
APP.command()(prefetch.command)
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "data"


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLMGRID_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DLMGRID_DATA", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """MT-Bench with a published set of one row, which the network gives; the addresses that were asked."""
    import dataclasses

    content = (GOLDEN / "mt_bench/question.jsonl").read_bytes()
    benchmark = get_benchmark("mt_bench")
    columns = benchmark.files[0].columns
    rows = [{name: json.loads(line)[name] for name in columns} for line in content.splitlines()]
    file = dataclasses.replace(benchmark.files[0], num_rows=1, content_digest=content_digest(rows))
    monkeypatch.setitem(catalog.BENCHMARKS, "mt_bench", dataclasses.replace(benchmark, files=(file,)))
    addresses: list[str] = []

    def urlopen(url: str, timeout: float) -> Any:
        addresses.append(url)
        return io.BytesIO(content)

    monkeypatch.setattr(fetching, "urlopen", urlopen)
    return addresses


def test_fetches_once_from_the_pinned_commit_and_writes_counts_and_sha256(
    asked: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    result = CliRunner().invoke(APP, ["mt_bench", "--data", str(folder)])
    assert result.exit_code == 0, result.output
    assert asked == [
        "https://raw.githubusercontent.com/lm-sys/FastChat/0e6d3e4beaab66f4d3f93db72541a4abab8af28d/"
        "fastchat/llm_judge/data/mt_bench/question.jsonl"
    ]
    written = (folder / "mt_bench/question.jsonl").read_bytes()
    sha256 = hashlib.sha256(written).hexdigest()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest == {"mt_bench/question.jsonl": {"rows": 1, "sha256": sha256}}
    assert sha256 in result.output
    assert CliRunner().invoke(APP, ["mt_bench", "--data", str(folder)]).exit_code == 0
    assert len(asked) == 1
    assert len(get_benchmark("mt_bench").load(folder)) == 1


@pytest.mark.usefixtures("asked")
def test_without_a_folder_the_cache_is_filled_and_used_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert CliRunner().invoke(APP, ["mt_bench"]).exit_code == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import dataclasses

    file = get_benchmark("mt_bench").files[0]
    assert (tmp_path / "cache/data" / file.path).is_file()
    monkeypatch.setattr(fetching, "urlopen", None)
    from dlmgrid.workers.benchmarks.data import load_rows

    assert [row["question_id"] for row in load_rows(file)] == [81]
    with pytest.raises(InputError, match="was not fetched before and HF_HUB_OFFLINE is set"):
        load_rows(dataclasses.replace(file, path="mt_bench/other.jsonl"))


def test_a_source_with_other_content_is_refused_and_nothing_is_written(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fetching, "urlopen", lambda url, timeout: io.BytesIO(
        b'{"question_id": 1, "category": "x", "turns": ["other"]}\n'
    ))  # fmt: skip
    result = CliRunner().invoke(APP, ["mt_bench", "--data", str(tmp_path / "data")])
    assert isinstance(result.exception, InputError)
    assert "content differs from the published set" in str(result.exception)
    assert not (tmp_path / "data").exists()
    assert asked == []


def test_an_altered_file_that_is_there_is_refused(asked: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert CliRunner().invoke(APP, ["mt_bench", "--data", str(folder)]).exit_code == 0
    path = folder / "mt_bench/question.jsonl"
    path.write_text(path.read_text().replace("lighthouse", "windmill"))
    result = CliRunner().invoke(APP, ["mt_bench", "--data", str(folder)])
    assert "sha256 is not the one that manifest.json declares" in str(result.exception)
    assert len(asked) == 1


def test_one_source_that_fails_does_not_keep_back_the_others(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetch = fetching.urlopen

    def urlopen(url: str, timeout: float) -> Any:
        if "FastChat" not in url:
            raise TimeoutError("timed out")
        return fetch(url, timeout=timeout)

    monkeypatch.setattr(fetching, "urlopen", urlopen)
    result = CliRunner().invoke(APP, ["alpaca", "mt_bench", "--data", str(tmp_path)])
    assert isinstance(result.exception, InputError)
    assert "cannot be fetched (timed out); run `dlmgrid prefetch` once where there is a network" in str(
        result.exception
    )
    assert "1 of 2 files" in result.output
    assert (tmp_path / "mt_bench/question.jsonl").is_file()
    assert len(asked) == 1


def test_generated_benchmarks_need_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(APP, ["words", "--data", str(tmp_path)])
    assert (result.exit_code, list(tmp_path.iterdir())) == (0, [])
