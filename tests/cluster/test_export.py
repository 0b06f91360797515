"""Exported files have the shape that lm-eval and EvalPlus write and read, and come back as the same answers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.cluster.export import export_run, read_cells
from dlmgrid.cluster.imports import ImportRequest, import_answers
from dlmgrid.cluster.report import load_generations
from dlmgrid.workers.benchmarks.scoring import score_run
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing.answered_run import (
    GSM8K_DOCUMENTS,
    HUMANEVAL_DOCUMENTS,
    store_answers,
    write_data,
)

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("evalplus")

TEXTS: dict[str, list[str | None]] = {
    "gsm8k/0": ["So it is 280.\n#### 280"],
    "gsm8k/2": ["I think 12.Question: next\n#### 3"],
    "gsm8k/4": [None],
    "gsm8k/5": [GSM8K_DOCUMENTS[5]["answer"]],
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("DLMGRID_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the imports of both tools warn of is not ours
        yield


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_samples_are_those_that_lm_eval_logs_for_the_same_texts(tmp_path: Path, data: Path) -> None:
    from lm_eval.evaluator import evaluate
    from lm_eval.loggers import EvaluationTracker

    from dlmgrid.jobs.parity import ReplayLM
    from dlmgrid.workers.exchange.lm_eval_samples import load_task

    out = tmp_path / "out"
    cell = store_answers(out, data, "gsm8k", TEXTS)
    score_run(out, workers=1)
    (file,) = export_run(out, "lm-eval", tmp_path / "files")
    assert file.path.name == f"samples_gsm8k_someone_model_ssd-D8_T0_{cell.cell_key[:8]}.jsonl"
    assert (file.num_answers, file.num_left_out) == (3, 1)

    answered = [item_id for item_id, (text,) in TEXTS.items() if text is not None]
    texts = [TEXTS[item_id][0] or "" for item_id in answered]
    task = load_task("gsm8k", [GSM8K_DOCUMENTS[int(item_id.partition("/")[2])] for item_id in answered])
    results = evaluate(ReplayLM(texts), {"tasks": {"gsm8k": task}, "groups": {}}, bootstrap_iters=0)
    tracker = EvaluationTracker(output_path=str(tmp_path / "theirs"))
    tracker.general_config_tracker.model_name_sanitized = "m"
    tracker.save_results_aggregated(results={}, samples=results["samples"])
    tracker.save_results_samples("gsm8k", results["samples"]["gsm8k"])
    (logged,) = (tmp_path / "theirs/m").glob("samples_gsm8k_*.jsonl")

    theirs, ours = lines(logged), lines(file.path)
    assert len(ours) == len(theirs) == 6
    for mine, other in zip(ours, theirs, strict=True):
        assert list(mine) == list(other)
        for name in set(mine) - {"doc_id", "arguments", "prompt_hash"}:
            assert mine[name] == other[name], name
    assert [row["doc_id"] for row in ours] == [0, 2, 5] * 2
    question = GSM8K_DOCUMENTS[2]["question"]
    arguments = ours[1]["arguments"]["gen_args_0"]
    assert json.loads(arguments["arg_0"]) == [{"role": "user", "content": f"Question: {question}\nAnswer:"}]
    assert arguments["arg_1"]["max_gen_toks"] == 64
    assert arguments["arg_1"]["do_sample"] is False


def test_a_run_without_scores_is_exported_without_metrics(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    store_answers(out, data, "gsm8k", TEXTS, method="none", budget=0, temperature=1.0)
    (file,) = export_run(out, "lm-eval", tmp_path / "files")
    assert "none-D0_T1" in file.path.name
    assert [row["metrics"] for row in lines(file.path)] == [[]] * 6
    assert lines(file.path)[0]["filtered_resps"] == ["280"]


def test_samples_of_lm_eval_come_back_as_the_same_answers(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    store_answers(out, data, "gsm8k", {"gsm8k/1": ["#### 5", "six"], "gsm8k/7": ["", "x"]})
    (file,) = export_run(out, "lm-eval", tmp_path / "files")
    back = ImportRequest(file=file.path, benchmark="gsm8k", out=tmp_path / "back", data=str(data), repeats=2)
    assert import_answers(back, say=lambda message: None).num_added == 4
    texts = [
        {(row["item_id"], row["repeat"]): row["text"] for row in load_generations(folder).to_pylist()}
        for folder in (out, tmp_path / "back")
    ]
    assert texts[0] == texts[1]


def test_every_cell_has_a_file_and_evalplus_its_problems_once(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    first, second = HUMANEVAL_DOCUMENTS
    body = {first["task_id"]: ["    return math.hypot(x, y)\n```"], second["task_id"]: ["nothing"]}
    cells = [store_answers(out, data, "humaneval_plus", body, budget=budget) for budget in (4, 6)]
    store_answers(out, data, "humaneval", {first["task_id"]: ["pass", "```\n"]})
    store_answers(out, data, "gsm8k", TEXTS)
    files = export_run(out, "evalplus", tmp_path / "files")
    assert [file.benchmark for file in files].count("humaneval_plus") == 2
    assert len(files) == 3
    assert len({file.problems for file in files}) == 2
    assert all(any(cell.cell_key[:8] in file.path.name for file in files) for cell in cells)
    (base,) = (file for file in files if file.benchmark == "humaneval")
    assert [row["task_id"] for row in lines(base.path)] == [first["task_id"]] * 2
    plus = next(file for file in files if file.benchmark == "humaneval_plus")
    assert plus.problems is not None
    problems = lines(plus.problems)
    assert [
        {name: row[name] for name in document}
        for row, document in zip(problems, HUMANEVAL_DOCUMENTS, strict=True)
    ] == HUMANEVAL_DOCUMENTS
    program = lines(plus.path)[0]["solution"]
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102 - the program above
    assert names["distance"](3, 4) == 5


def test_stale_results_of_evalplus_are_not_left_beside_other_samples(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    task_id = HUMANEVAL_DOCUMENTS[0]["task_id"]
    store_answers(out, data, "humaneval", {task_id: ["pass"]})
    (file,) = export_run(out, "evalplus", tmp_path / "files")
    results = file.path.with_name(file.path.stem + "_eval_results.json")
    results.write_text("{}")
    assert export_run(out, "evalplus", tmp_path / "files")[0].path == file.path
    store_answers(out, data, "humaneval", {task_id: ["    return 1"]})
    with pytest.raises(InputError, match="results of other samples"):
        export_run(out, "evalplus", tmp_path / "files")


@pytest.mark.parametrize(
    ("file_format", "benchmarks", "message"),
    [
        ("csv", None, "--format csv is not one of lm-eval, evalplus"),
        ("evalplus", None, "has no answers to humaneval, humaneval_plus"),
        ("evalplus", ["gsm8k"], "evalplus has no form for 'gsm8k'"),
        ("lm-eval", ["gsm9k"], "did you mean 'gsm8k'"),
        ("lm-eval", ["gsm8k_question"], "has no answers to gsm8k_question"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    tmp_path: Path, data: Path, file_format: str, benchmarks: list[str] | None, message: str
) -> None:
    store_answers(tmp_path / "out", data, "gsm8k", TEXTS)
    with pytest.raises(InputError, match=message):
        export_run(tmp_path / "out", file_format, tmp_path / "files", benchmarks)
    assert not (tmp_path / "files").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no generations/ folder"):
        export_run(tmp_path, "lm-eval", tmp_path / "files")


def test_missing_inputs_are_named(tmp_path: Path, data: Path) -> None:
    store_answers(tmp_path / "out", data, "gsm8k", TEXTS)
    (path,) = (tmp_path / "out/inputs").iterdir()
    path.unlink()
    with pytest.raises(InputError, match=f"{path.name} is missing"):
        read_cells(tmp_path / "out", ["gsm8k"])
