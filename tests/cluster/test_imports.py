"""Imported answers are stored once, are scored and reported like others, and claim nothing."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.cluster.check import check_files, check_stored
from dlmgrid.cluster.imports import ImportRequest, ImportSummary, import_answers
from dlmgrid.cluster.report import build_report, load_generations
from dlmgrid.cluster.store import load
from dlmgrid.workers.benchmarks.scoring import score_run
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing.answered_run import GSM8K_DOCUMENTS, write_data
from dlmgrid.workers.testing.stored_rows import commit_rows


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLMGRID_CACHE", str(tmp_path / "cache"))
    return write_data(tmp_path / "data")


def write_answers(path: Path, number: int = 2, wrong: int = 0) -> Path:
    """``number`` answers to the first questions; the first ``wrong`` of them are wrong."""
    rows = [
        {"item_id": f"gsm8k/{index}", "text": "#### 1" if index < wrong else document["answer"]}
        for index, document in enumerate(GSM8K_DOCUMENTS[:number])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def take_in(file: Path, data: Path, **changes: Any) -> ImportSummary:
    values = {"benchmark": "gsm8k", "out": file.parent / "out", "data": str(data)} | changes
    return import_answers(ImportRequest(file=file, **values), say=lambda message: None)


def test_rows_say_that_they_are_imported_and_have_no_verdict(tmp_path: Path, data: Path) -> None:
    summary = take_in(write_answers(tmp_path / "rival.jsonl"), data, temperature=0.7)
    assert (summary.num_added, summary.num_kept, len(summary.missing)) == (2, 0, 28)
    out = tmp_path / "out"
    rows = load_generations(out).to_pylist()
    assert [row["item_id"] for row in rows] == ["gsm8k/0", "gsm8k/1"]
    for row, document in zip(rows, GSM8K_DOCUMENTS[:2], strict=True):
        assert row["text"] == document["answer"]
        assert (row["method"], row["claim"], row["budget"]) == ("imported", "imported", 0)
        assert (row["model"], row["temperature"], row["error"]) == ("rival", 0.7, None)
        assert row["revision"].startswith("sha256:")
        unknown = ("token_ids", "nfe_total", "exact_tokens", "exact_path", "exact_bits", "generated_tokens")
        assert [row[name] for name in unknown] == [None] * len(unknown)
    assert load(out).complete


def test_the_same_file_adds_nothing_and_a_changed_one_is_another_cell(tmp_path: Path, data: Path) -> None:
    file = tmp_path / "rival.jsonl"
    first = take_in(write_answers(file), data)
    again = take_in(file, data)
    assert (again.num_added, again.num_kept, again.cell_key) == (0, 2, first.cell_key)
    other = take_in(write_answers(file, wrong=1), data)
    assert (other.num_added, other.num_kept) == (2, 0)
    assert other.cell_key != first.cell_key
    assert load(tmp_path / "out").table.num_rows == 4


def test_score_report_and_check_take_the_folder(tmp_path: Path, data: Path) -> None:
    pytest.importorskip("lm_eval")
    out = tmp_path / "out"
    take_in(write_answers(tmp_path / "good.jsonl", number=4, wrong=1), data)
    take_in(write_answers(tmp_path / "bad.jsonl", number=2, wrong=2), data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        score_run(out, workers=1)
    report = build_report(out)
    assert report.incomplete == ""
    means = {cell.settings["model"]: cell.accuracies[0].mean for cell in report.cells}
    assert means == {"good": 0.75, "bad": 0.0}
    for cell in report.cells:
        assert (cell.claim, cell.is_reference, cell.is_exact) == ("imported", False, False)
        assert (cell.num_failed, cell.num_errors, cell.num_missing, cell.nfe_mean) == (0, 0, 0, None)
    stored = check_stored(out)
    assert stored.faulty == []
    assert stored.missing == []
    assert [check.notes for check in stored.checks] == [("unchecked: the text was made elsewhere",)] * 6
    files = check_files(out)
    assert (files.faults, files.inputs_faults) == ([], [])


def test_a_verdict_on_an_imported_text_is_a_fault(tmp_path: Path, data: Path) -> None:
    take_in(write_answers(tmp_path / "rival.jsonl", number=1), data)
    (row,) = load_generations(tmp_path / "out").to_pylist()
    commit_rows(tmp_path / "forged", [row | {"exact_tokens": True}])
    (check,) = check_stored(tmp_path / "forged").faulty
    assert check.faults == ("a verdict is stored for an imported text",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"benchmark": "gsm9k"}, "did you mean 'gsm8k'"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"data": "nowhere"}, "nowhere"),
    ],
)
def test_bad_requests_leave_no_folder(
    tmp_path: Path, data: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        take_in(write_answers(tmp_path / "rival.jsonl"), **({"data": data} | changes))
    assert not (tmp_path / "out").exists()


def test_the_folder_of_a_grid_run_is_refused(tmp_path: Path, data: Path) -> None:
    (tmp_path / "out/grids").mkdir(parents=True)
    (tmp_path / "out/grids/a.yaml").write_text("name: a")
    with pytest.raises(InputError, match="is the folder of a grid run"):
        take_in(write_answers(tmp_path / "rival.jsonl"), data)
