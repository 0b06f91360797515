"""``dlmgrid check``: what it prints, what it writes, how it exits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.cluster import recompute, worker_process
from dlmgrid.cluster.cells import Questions
from dlmgrid.cluster.check import GENERATION_COLUMNS
from dlmgrid.cluster.grid import BenchmarkEntry
from dlmgrid.jobs.check import command
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item, inputs_file_name
from dlmgrid.workers.tables import CHECKS, GENERATIONS, read_table, to_table, write_table
from dlmgrid.workers.testing.stored_rows import commit_items, commit_rows, make_row, small_cell, write_run

REFERENCE = small_cell(weight_fingerprint="weights")
CHAIN = small_cell(weight_fingerprint="weights", method="ssd", budget=4)
TOKENS = [7, 8, 9, 3, 2, 1]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two items with its inputs, whose model is found and unchanged."""
    monkeypatch.setattr(recompute, "resolve_checkpoint", lambda name, revision: tmp_path / "model")
    monkeypatch.setattr(recompute, "weight_fingerprint", lambda folder: "weights")
    rows = []
    for item in "ab":
        reference = make_row(REFERENCE, item, TOKENS)
        rows += [reference, make_row(CHAIN, item, TOKENS, accepted=[2, 1, 0], reference=reference)]
    name = inputs_file_name("words", "1", 0)
    commit_items(tmp_path, name, [Item(item_id=item, prompt=item) for item in "ab"])
    return write_run(tmp_path, rows)


def _decode_as_stored(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[list[str]]:
    """Let the decoding process give back the rows it is sent, with ``changes``; returns its command lines."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        source, target = command[3:5]
        rows = read_table([source], GENERATIONS).to_pylist()
        write_table(target, to_table(GENERATIONS, [row | changes for row in reversed(rows)]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(worker_process.subprocess, "run", run)
    return commands


def _checks(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    paths = sorted(str(path) for path in (run_dir / "checks").glob(f"{kind}*.parquet"))
    rows: list[dict[str, Any]] = read_table(paths, CHECKS).to_pylist()
    return rows


def test_exact_run_exits_with_0_and_writes_every_check(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = _decode_as_stored(monkeypatch)
    assert command(run_dir, sample=3) == 0
    (words,) = commands
    assert words[:3] == [sys.executable, "-m", "dlmgrid.workers.recompute"]
    assert words[5:] == [
        "--checkpoint", str(run_dir / "model"),
        "--inputs", str(run_dir / "inputs" / inputs_file_name("words", "1", 0)),
        "--device", "cpu",
        "--drafters", str(run_dir / "drafters"),
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "stored rows: 4, compared 2: 2/2 tokens 2/2 path 2/2 bits equal" in printed
    assert "rows decoded again: 3, compared 3: 3/3 tokens 3/3 path 3/3 bits equal" in printed
    assert len(_checks(run_dir, "stored")) == 4
    assert [row["detail"] for row in _checks(run_dir, "recomputed")] == [None] * 3


def test_checking_twice_replaces_the_checks(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _decode_as_stored(monkeypatch)
    for _ in range(2):
        assert command(run_dir, sample=3) == 0
    assert len(_checks(run_dir, "stored")) == 4
    assert len(_checks(run_dir, "recomputed")) == 3


def test_row_that_decodes_otherwise_exits_with_4(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _decode_as_stored(monkeypatch, token_ids=[1, 2, 3])
    assert command(run_dir, sample=1) == 4
    assert "decoded again, it differs in exact_tokens" in capsys.readouterr().out


def test_tampered_row_exits_with_4_and_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = make_row(REFERENCE, "c", TOKENS)
    row = make_row(CHAIN, "c", TOKENS, reference=reference, path_digest="0" * 16)
    write_run(run_dir, [reference, row])
    assert command(run_dir, sample=0) == 4
    assert f"{CHAIN.cell_key} c repeat 0: path_digest is {'0' * 16}" in capsys.readouterr().out


def test_missing_rows_exit_with_5(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(run_dir, [make_row(REFERENCE, "c", TOKENS)])
    assert command(run_dir, sample=0) == 5
    assert "1 rows of 1 cells are missing" in capsys.readouterr().out


def test_file_that_is_not_the_committed_one_exits_with_4(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sorted((run_dir / "generations").iterdir())[0]
    rows = read_table([str(path)], GENERATIONS).to_pylist()
    size = path.stat().st_size
    write_table(str(path), to_table(GENERATIONS, [rows[0] | {"actor": "testinG"}, rows[1]]))
    assert command(run_dir, sample=0) == 4
    assert "sha256" in capsys.readouterr().out or path.stat().st_size != size


def test_file_without_a_line_in_the_manifest_exits_with_4(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = make_row(REFERENCE, "c", TOKENS)
    write_table(str(run_dir / "generations" / "foreign.parquet"), to_table(GENERATIONS, [row]))
    assert command(run_dir, sample=0) == 4
    assert "generations/foreign.parquet is not in the manifest" in capsys.readouterr().out


def test_inputs_are_named_as_the_driver_names_them() -> None:
    asked = Questions(
        entry=BenchmarkEntry(name="a/b", num_fewshot=3), prompt_version="2", gen_length=8, items=()
    )
    assert inputs_file_name("a/b", "2", 3) == asked.file_name


def test_run_without_rows_is_incomplete(tmp_path: Path) -> None:
    (tmp_path / "generations").mkdir()
    assert command(tmp_path) == 5


def test_changed_weights_are_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "weight_fingerprint", lambda folder: "others")
    with pytest.raises(InputError, match="the weights of reference have changed since the run"):
        command(run_dir)


def test_inputs_that_are_gone_or_changed_exit_with_4_and_nothing_is_decoded_from_them(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / "inputs" / inputs_file_name("words", "1", 0)
    path.write_bytes(path.read_bytes().replace(b'"prompt": "a"', b'"prompt": "b"'))
    assert command(run_dir) == 4
    assert f"inputs/{path.name} has sha256" in capsys.readouterr().out
    path.unlink()
    assert command(run_dir) == 4
    printed = capsys.readouterr().out
    assert f"inputs/{path.name} is missing" in printed
    assert "no rows are decoded again" in printed


@pytest.mark.parametrize("damage", ["truncate", "zero", "flip", "folder", "remove"])
def test_damaged_file_exits_with_4_and_the_others_are_checked(
    run_dir: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sorted((run_dir / "generations").iterdir())[0]
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(content[:-9])
    elif damage == "zero":
        path.write_bytes(bytes(len(content)))
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    assert command(run_dir, sample=0) == 4
    printed = capsys.readouterr().out
    assert f"generations/{path.name} " in printed
    assert "stored rows: 2" in printed


def test_file_whose_manifest_line_says_otherwise_exits_with_4(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = run_dir / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace('"num_tokens":12', '"num_tokens":13'))
    assert command(run_dir, sample=0) == 4
    assert "is not what the manifest says of it" in capsys.readouterr().out


def test_settings_that_cannot_be_are_a_fault_of_the_row(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit_rows(run_dir, [make_row(REFERENCE, "c", TOKENS, seed="abc")])
    commit_rows(run_dir, [make_row(CHAIN, "d", TOKENS, threshold=float("nan"))])
    assert command(run_dir, sample=0) == 4
    printed = capsys.readouterr().out
    assert f"{REFERENCE.cell_key} c repeat 0: a row of cell {REFERENCE.cell_key} holds settings" in printed
    assert f"{CHAIN.cell_key} d repeat 0: a row of cell {CHAIN.cell_key} holds settings" in printed


def test_run_whose_rows_all_failed_is_not_said_to_be_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit_items(tmp_path, "words-0.jsonl", [Item(item_id="a", prompt="a")])
    blank = dict.fromkeys(set(GENERATIONS.names) & set(GENERATION_COLUMNS))
    write_run(
        tmp_path, [make_row(cell, "a", TOKENS, error="bad template") | blank for cell in (REFERENCE, CHAIN)]
    )
    assert command(tmp_path, sample=0) == 1
    assert "nothing was compared: 2 of 2 rows failed" in capsys.readouterr().out


def test_folder_without_its_manifest_is_refused(run_dir: Path) -> None:
    (run_dir / "manifest.jsonl").unlink()
    with pytest.raises(InputError, match=r"2 files in generations/ and no manifest.jsonl"):
        command(run_dir)


@pytest.mark.parametrize(
    ("status", "stderr", "error", "text"),
    [
        (2, "warning\nerror: no such device\n", InputError, "^no such device$"),
        (1, "Traceback\nValueError: broken\n", RuntimeError, "ended with status 1: ValueError: broken"),
        (-9, "", RuntimeError, "ended with status -9: no output"),
    ],
)
def test_decoding_process_that_fails_is_never_taken_for_agreement(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    stderr: str,
    error: type[Exception],
    text: str,
) -> None:
    result = subprocess.CompletedProcess[str]([], status, "", stderr)
    monkeypatch.setattr(worker_process.subprocess, "run", lambda *_, **__: result)
    with pytest.raises(error, match=text):
        command(run_dir)
