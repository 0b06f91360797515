"""Data sources: the documented layout, and one clear line for each way in which data can be wrong."""

from __future__ import annotations

import gzip
import hashlib
import json
import ssl
import subprocess
import sys
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

from dlmgrid.workers.benchmarks import fetching
from dlmgrid.workers.benchmarks.catalog import benchmark_names, get_benchmark
from dlmgrid.workers.benchmarks.data import load_rows
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.gsm8k import GSM8K_TEST, GSM8K_TRAIN
from dlmgrid.workers.benchmarks.humaneval import HUMANEVAL_PLUS
from dlmgrid.workers.errors import InputError

PUBLISHED = sorted(
    {file.path: file for name in benchmark_names() for file in get_benchmark(name).files}.values(),
    key=lambda file: file.path,
)


def write_as(path: Path, source: DataFile, rows: list[dict[str, Any]]) -> None:
    """Write a compressed file in the layout of ``source``: a list, or lines."""
    is_list = source.path.endswith(".json")
    text = json.dumps(rows) if is_list else "\n".join(map(json.dumps, rows))
    path.write_bytes(gzip.compress(text.encode(), 1))


def test_reads_plain_and_compressed_files(data_folder: Path) -> None:
    assert load_rows(GSM8K_TEST, data_folder) == load_rows(GSM8K_TRAIN, data_folder)
    assert set(load_rows(HUMANEVAL_PLUS, data_folder)[0]) == set(HUMANEVAL_PLUS.columns)


def test_folder_comes_from_the_environment(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLMGRID_DATA", str(data_folder))
    assert len(load_rows(GSM8K_TEST)) == 25


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--data: .*nowhere is not a folder"):
        load_rows(GSM8K_TEST, tmp_path / "nowhere")


def test_missing_file_names_layout_and_remedy(tmp_path: Path) -> None:
    message = r"fetch it with dlmgrid prefetch --data .*--data DIR .expected DIR/gsm8k/test.jsonl or .*question, answer"
    with pytest.raises(InputError, match=message):
        load_rows(GSM8K_TEST, tmp_path)


def test_undeclared_subset_is_taken_for_truncated(data_folder: Path) -> None:
    (data_folder / "manifest.json").unlink()
    with pytest.raises(InputError, match="25 rows where the published set has 1319"):
        load_rows(GSM8K_TEST, data_folder)


def test_fewer_rows_than_declared(data_folder: Path) -> None:
    path = data_folder / "gsm8k/test.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match=r"24 rows where manifest.json declares 25"):
        load_rows(GSM8K_TEST, data_folder)


def test_line_cut_in_the_middle(data_folder: Path) -> None:
    path = data_folder / "gsm8k/test.jsonl"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(InputError, match=r"test.jsonl:25: not a JSON object"):
        load_rows(GSM8K_TEST, data_folder)


@pytest.mark.parametrize("damage", ["cut", "not gzip"])
def test_damaged_archive(data_folder: Path, damage: str) -> None:
    path = data_folder / "evalplus/HumanEvalPlus-v0.1.10.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-30] if damage == "cut" else b"<html>not found</html>")
    with pytest.raises(InputError, match="truncated or damaged archive"):
        load_rows(HUMANEVAL_PLUS, data_folder)


def test_missing_column(data_folder: Path) -> None:
    (data_folder / "gsm8k/test.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(InputError, match="no column answer"):
        load_rows(GSM8K_TEST, data_folder)


def test_declared_sha256(data_folder: Path) -> None:
    manifest = data_folder / "manifest.json"
    path = data_folder / "gsm8k/test.jsonl"
    entry = {"rows": 25, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    manifest.write_text(json.dumps({"gsm8k/test.jsonl": entry}))
    assert len(load_rows(GSM8K_TEST, data_folder)) == 25
    path.write_text(path.read_text().replace("Tom", "Tim", 1))
    with pytest.raises(InputError, match="sha256"):
        load_rows(GSM8K_TEST, data_folder)


@pytest.mark.parametrize("content", ["{", '{"gsm8k/test.jsonl": 25}', '{"gsm8k/test.jsonl": {"sha256": ""}}'])
def test_bad_manifest(data_folder: Path, content: str) -> None:
    (data_folder / "manifest.json").write_text(content)
    with pytest.raises(InputError, match=r"manifest.json: "):
        load_rows(GSM8K_TEST, data_folder)


@pytest.mark.parametrize("source", PUBLISHED, ids=lambda source: source.path)
def test_published_sets_are_recognised_whatever_their_format(
    source: DataFile, shared_data: Path, tmp_path: Path
) -> None:
    rows = load_rows(source, shared_data)
    assert len(rows) == source.num_rows
    path = tmp_path / "other" / f"{source.path}.gz"
    path.parent.mkdir(parents=True)
    write_as(path, source, [dict(reversed(row.items())) for row in rows])
    assert load_rows(source, tmp_path / "other") == rows
    name = source.columns[1]
    write_as(path, source, [{**rows[0], name: "another"}, *rows[1:]])
    with pytest.raises(InputError, match="content differs from the published set"):
        load_rows(source, tmp_path / "other")


def test_hub_is_asked_for_configuration_and_revision_and_its_rows_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []
    num_rows = GSM8K_TEST.num_rows

    def load_dataset(*given: str, **named: str) -> Any:
        asked.append((given, named))
        return datasets.Dataset.from_list([{"question": "?", "answer": "#### 1", "more": 0}] * num_rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(fetching, "_answers", lambda endpoint: True)
    assert load_rows(GSM8K_TEST)[-1] == {"question": "?", "answer": "#### 1"}
    revision = "e53f048856ff4f594e959d75785d2c2d37b678ee"
    assert asked == [(("openai/gsm8k", "main"), {"split": "test", "revision": revision})]
    num_rows = 1318
    with pytest.raises(InputError, match="1318 rows where 1319 were expected"):
        load_rows(GSM8K_TEST)


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    asked: list[str] = []

    def no_network(request: Any, timeout: float) -> None:
        asked.append(request.full_url)
        raise URLError("Name or service not known")

    def load_dataset(*given: str, **named: str) -> None:
        assert datasets.config.HF_HUB_OFFLINE and constants.HF_HUB_OFFLINE
        raise ConnectionError("not in the cache")

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    monkeypatch.setattr(fetching, "urlopen", no_network)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        InputError, match=r"not in the cache.*; run `dlmgrid prefetch` once where there is a network"
    ):
        fetching.fetch(GSM8K_TEST)
    assert asked == ([] if any(before) else [constants.ENDPOINT])
    assert before == (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)


@pytest.mark.parametrize(
    ("error", "is_there"),
    [
        (HTTPError("https://hub", 403, "Forbidden", Message(), None), True),
        (URLError(ssl.SSLCertVerificationError("unknown issuer")), True),
        (URLError("Name or service not known"), False),
        (TimeoutError("timed out"), False),
    ],
)
def test_a_refusal_is_an_answer_and_silence_is_none(
    error: Exception, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def urlopen(request: Any, timeout: float) -> None:
        raise error

    monkeypatch.setattr(fetching, "urlopen", urlopen)
    assert fetching._answers("https://hub") is is_there


def test_hub_without_network_says_what_to_do(tmp_path: Path) -> None:
    """In a fresh process: the offline flags are read when ``datasets`` is imported."""
    pytest.importorskip("datasets")
    program = (
        "from dlmgrid.workers.benchmarks.data import load_rows\n"
        "from dlmgrid.workers.benchmarks.gsm8k import GSM8K_TEST\n"
        "from dlmgrid.workers.benchmarks.humaneval import HUMANEVAL_PLUS\n"
        "for source in (GSM8K_TEST, HUMANEVAL_PLUS):\n"
        "    try: load_rows(source)\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
        "PATH": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    hub, release = done.stdout.splitlines()
    assert hub.startswith("InputError openai/gsm8k main test e53f048856ff")
    assert release.startswith("InputError https://github.com/evalplus/")
    assert all("--data DIR" in line for line in (hub, release))


ALPACA = get_benchmark("alpaca").files[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"dataset": "koala", "instruction": "?"}', "not a JSON list .*damaged or cut"),
        ('{"dataset": "koala"}', "not a JSON list; expected DIR/alpaca/"),
        ('[{"dataset": "koala"}]', "entry 1: no column instruction"),
        ('[{"dataset": "koala", "instruction": "?"}]', "1 rows where the published set has 805"),
    ],
)
def test_file_that_holds_one_list(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "alpaca").mkdir()
    (tmp_path / ALPACA.path).write_text(content)
    with pytest.raises(InputError, match=message):
        load_rows(ALPACA, tmp_path)
