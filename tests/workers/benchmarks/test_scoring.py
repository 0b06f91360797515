"""``score_run``: from an output folder to score rows, again, with errors, time-outs and new versions."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlmgrid.workers.benchmarks import catalog, lm_eval_catalog, scoring_process
from dlmgrid.workers.benchmarks.benchmark import Benchmark, Scorer, package_version
from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.benchmarks.scoring import score_run
from dlmgrid.workers.benchmarks.scoring_process import ScoringProcess
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item
from dlmgrid.workers.tables import GENERATIONS, SCORES, read_table, to_table, write_table
from dlmgrid.workers.testing.stored_rows import commit_items

pytest.importorskip("lm_eval")
pytest.importorskip("evalplus")

MakeRun = Callable[..., Path]
Generation = Callable[..., dict[str, Any]]
PROBE = "dlmgrid.workers.testing.scoring_probe"


def score_rows(out: Path) -> list[dict[str, Any]]:
    paths = sorted(str(path) for path in (out / "scores").iterdir())
    rows: list[dict[str, Any]] = read_table(paths, SCORES).to_pylist()
    return rows


def values(out: Path, scorer: str, metric: str) -> dict[str, tuple[float | None, str]]:
    """item → (value, status) of one metric; every item once."""
    rows = [row for row in score_rows(out) if (row["scorer"], row["metric"]) == (scorer, metric)]
    found = {row["item_id"]: (row["value"], row["status"]) for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture
def gsm8k_items(data_folder: Path) -> list[Item]:
    return get_benchmark("gsm8k").load(data_folder, 4)


@pytest.fixture
def humaneval_items(data_folder: Path) -> list[Item]:
    return get_benchmark("humaneval_plus").load(data_folder)


def gold(item: Item) -> str:
    document = item.document
    return str(
        document["answer"] if "answer" in document else document["prompt"] + document["canonical_solution"]
    )


def test_gold_scores_one_and_perturbed_gold_zero(
    make_run: MakeRun, generation: Generation, gsm8k_items: list[Item], humaneval_items: list[Item]
) -> None:
    rows = []
    for name, items in (("gsm8k", gsm8k_items), ("humaneval_plus", humaneval_items)):
        for item in items:
            wrong = gold(item) + "1" if name == "gsm8k" else gold(item).replace("return ", "return None and ")
            rows.append(generation(name, item.item_id, gold(item), cell_key="gold"))
            rows.append(generation(name, item.item_id, wrong, cell_key="wrong"))
    out = make_run({"gsm8k": gsm8k_items, "humaneval_plus": humaneval_items}, rows[:3], rows[3:])
    summary = score_run(out, confirm_run_unsafe_code=True)
    scored = score_rows(out)
    assert {row["status"] for row in scored} == {"scored"}
    assert {
        (row["benchmark"], row["metric"], row["value"]) for row in scored if row["cell_key"] == "gold"
    } == {
        ("gsm8k", "exact_match,strict-match", 1.0),
        ("gsm8k", "exact_match,flexible-extract", 1.0),
        ("humaneval_plus", "pass@1,base", 1.0),
        ("humaneval_plus", "pass@1,plus", 1.0),
    }
    assert {row["value"] for row in scored if row["cell_key"] == "wrong"} == {0.0}
    assert summary.num_failed == 0
    assert summary.num_added == len(scored) == 2 * (4 * 2 + 2 * 2 * 2)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Benchmark:
    """GSM8K scored by the probe, which says ``right`` and ``wrong`` of texts that say so."""
    scorer = Scorer(name="probe", metrics=("m",), runs_code=False, summary="", version=lambda: "1")
    benchmark = dataclasses.replace(get_benchmark("gsm8k"), scoring=PROBE, scorers=(scorer,))
    monkeypatch.setitem(catalog.BENCHMARKS, "gsm8k", benchmark)
    return benchmark


@pytest.mark.usefixtures("probed")
def test_scoring_again_adds_nothing_and_new_generations_only_themselves(
    make_run: MakeRun, generation: Generation, gsm8k_items: list[Item]
) -> None:
    first, second = gsm8k_items[:2], gsm8k_items[2:]
    out = make_run({"gsm8k": gsm8k_items}, [generation("gsm8k", item.item_id, "right") for item in first])
    assert score_run(out).num_added == 2
    files = {path: path.read_bytes() for path in (out / "scores").iterdir()}
    again = score_run(out)
    assert (again.num_added, again.num_kept, again.num_texts_scored) == (0, 2, 0)
    assert {path: path.read_bytes() for path in (out / "scores").iterdir()} == files
    make_run({}, [generation("gsm8k", item.item_id, "wrong") for item in second])
    more = score_run(out)
    assert (more.num_added, more.num_kept, more.num_texts_scored) == (2, 2, 2)
    assert list(values(out, "probe", "m").values()) == [(1.0, "scored")] * 2 + [(0.0, "scored")] * 2


@pytest.mark.usefixtures("probed")
def test_equal_texts_are_scored_once_and_every_row_gets_its_score(
    make_run: MakeRun, generation: Generation, gsm8k_items: list[Item]
) -> None:
    rows = [
        generation("gsm8k", "gsm8k/0", text, cell_key=cell, repeat=repeat)
        for cell in ("none", "ssd", "tree")
        for repeat, text in enumerate(["right", "wrong"])
    ]
    out = make_run({"gsm8k": gsm8k_items}, rows)
    summary = score_run(out)
    assert (summary.num_texts_scored, summary.num_added) == (2, 6)
    assert {(row["repeat"], row["value"]) for row in score_rows(out)} == {(0, 1.0), (1, 0.0)}


def test_new_scorer_version_adds_rows_and_keeps_the_old(
    make_run: MakeRun,
    generation: Generation,
    gsm8k_items: list[Item],
    probed: Benchmark,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = make_run(
        {"gsm8k": gsm8k_items}, [generation("gsm8k", item.item_id, "right") for item in gsm8k_items]
    )
    score_run(out)
    newer = dataclasses.replace(probed.scorers[0], version=lambda: "2")
    monkeypatch.setitem(catalog.BENCHMARKS, "gsm8k", dataclasses.replace(probed, scorers=(newer,)))
    summary = score_run(out)
    assert (summary.num_added, summary.num_kept) == (4, 0)
    assert sorted(row["scorer_version"] for row in score_rows(out)) == ["1"] * 4 + ["2"] * 4


@pytest.mark.parametrize("opt_in", ["argument", "environment"])
def test_code_runs_only_after_the_opt_in(
    make_run: MakeRun,
    generation: Generation,
    gsm8k_items: list[Item],
    probed: Benchmark,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opt_in: str,
) -> None:
    unsafe = Scorer(name="unsafe", metrics=("m",), runs_code=True, summary="", version=lambda: "1")
    monkeypatch.setitem(catalog.BENCHMARKS, "gsm8k", dataclasses.replace(probed, scorers=(unsafe,)))
    touched = tmp_path / "touched"
    out = make_run({"gsm8k": gsm8k_items}, [generation("gsm8k", "gsm8k/0", f"touch {touched}")])
    summary = score_run(out)
    assert summary.needs_opt_in
    assert not touched.exists()
    assert values(out, "unsafe", "m") == {"gsm8k/0": (None, "not_scored")}
    assert "--confirm-run-unsafe-code" in score_rows(out)[0]["detail"]
    assert score_run(out).num_added == 0
    if opt_in == "environment":
        monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    assert not score_run(out, confirm_run_unsafe_code=opt_in == "argument").needs_opt_in
    assert touched.exists()
    assert values(out, "unsafe", "m") == {"gsm8k/0": (1.0, "scored")}
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    kept = score_run(out)
    assert (kept.num_added, kept.needs_opt_in) == (0, False)


def test_without_the_opt_in_other_scorers_still_run(
    make_run: MakeRun, generation: Generation, humaneval_items: list[Item], gsm8k_items: list[Item]
) -> None:
    out = make_run(
        {"humaneval_plus": humaneval_items, "gsm8k": gsm8k_items},
        [
            generation("humaneval_plus", "HumanEval/901", "?"),
            generation("gsm8k", "gsm8k/0", gold(gsm8k_items[0])),
        ],
    )
    score_run(out)
    assert values(out, "evalplus", "pass@1,plus") == {"HumanEval/901": (None, "not_scored")}
    assert values(out, "lm-eval", "exact_match,strict-match") == {"gsm8k/0": (1.0, "scored")}


@pytest.mark.usefixtures("probed")
def test_wrong_errored_and_timed_out_are_told_apart(
    make_run: MakeRun, generation: Generation, gsm8k_items: list[Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring_process, "MAX_REPLY_BYTES", 1 << 20)
    texts = ["wrong", "right", "slow unless alone", "always slow", "hang", "die", "raise", "swarm", "flood"]
    rows = [generation("gsm8k", "gsm8k/0", text, cell_key=text) for text in texts]
    rows.append(generation("gsm8k", "gsm8k/0", None, cell_key="no text", error="prompt does not fit"))
    out = make_run({"gsm8k": gsm8k_items}, rows)
    progress: list[tuple[int, int]] = []
    summary = score_run(out, on_progress=lambda done, total: progress.append((done, total)))
    found = {row["cell_key"]: row for row in score_rows(out)}
    assert {cell: (row["value"], row["status"]) for cell, row in found.items()} == {
        "wrong": (0.0, "scored"),
        "right": (1.0, "scored"),
        "slow unless alone": (1.0, "scored"),
        "always slow": (0.0, "timed_out"),
        "hang": (0.0, "timed_out"),
        "swarm": (0.0, "scored"),
        "flood": (0.0, "scored"),
        "die": (None, "errored"),
        "raise": (None, "errored"),
        "no text": (None, "errored"),
    }
    assert found["no text"]["detail"] == "generation: prompt does not fit"
    assert found["raise"]["detail"] == "scorer: ZeroDivisionError: on purpose"
    assert summary.num_failed == 2
    assert progress == [(done, len(texts)) for done in range(1, len(texts) + 1)]
    (metric,) = summary.metrics
    assert (metric.mean, metric.num_rows) == (2 / 7, 10)


@pytest.mark.usefixtures("probed")
def test_generation_repeated_after_an_error_is_scored(
    make_run: MakeRun, generation: Generation, gsm8k_items: list[Item]
) -> None:
    out = make_run({"gsm8k": gsm8k_items}, [generation("gsm8k", "gsm8k/0", None, error="out of memory")])
    score_run(out)
    next((out / "generations").iterdir()).unlink()
    make_run({}, [generation("gsm8k", "gsm8k/0", "right")])
    score_run(out)
    assert values(out, "probe", "m") == {"gsm8k/0": (1.0, "scored")}


@pytest.mark.usefixtures("probed")
def test_only_the_named_benchmarks(
    make_run: MakeRun, generation: Generation, gsm8k_items: list[Item], humaneval_items: list[Item]
) -> None:
    out = make_run(
        {"gsm8k": gsm8k_items, "humaneval_plus": humaneval_items},
        [generation("gsm8k", "gsm8k/0", "wrong"), generation("humaneval_plus", "HumanEval/900", "?")],
    )
    summary = score_run(out, benchmarks=["gsm8k"])
    assert (
        {row.benchmark for row in summary.metrics}
        == {row["benchmark"] for row in score_rows(out)}
        == {"gsm8k"}
    )
    with pytest.raises(InputError, match=r"no generations of humaneval$"):
        score_run(out, benchmarks=["humaneval"])


def test_bad_folders(
    make_run: MakeRun, generation: Generation, gsm8k_items: list[Item], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"holds no generations/ folder"):
        score_run(tmp_path)
    out = make_run({"gsm8k": gsm8k_items[:1]}, [generation("gsm8k", "gsm8k/3", "?")])
    with pytest.raises(InputError, match="no item 'gsm8k/3' of gsm8k"):
        score_run(out)
    changed = dataclasses.replace(gsm8k_items[0], document={"question": "other", "answer": "#### 1"})
    commit_items(out, "gsm8k-ffff.jsonl", gsm8k_items[:1])
    make_run({"gsm8k": [changed, *gsm8k_items[1:]]})
    with pytest.raises(InputError, match="gsm8k/0 has another document"):
        score_run(out)


@pytest.mark.usefixtures("probed")
def test_damage_is_named_and_nothing_is_scored(
    make_run: MakeRun, generation: Generation, gsm8k_items: list[Item]
) -> None:
    out = make_run({"gsm8k": gsm8k_items}, [generation("gsm8k", "gsm8k/0", "right")])
    score_run(out)
    inputs = out / "inputs" / "gsm8k-0123abcd.jsonl"
    written = inputs.read_bytes()
    inputs.write_bytes(written.replace(b"####", b"###1"))
    with pytest.raises(InputError, match=r"gsm8k-0123abcd.jsonl has sha256 .* restore it"):
        score_run(out)
    inputs.write_bytes(written)
    (shard,) = (out / "generations").iterdir()
    rows = read_table([str(shard)], GENERATIONS).to_pylist()
    write_table(str(shard), to_table(GENERATIONS, [row | {"text": "other"} for row in rows]))
    with pytest.raises(InputError, match=r"\.parquet has .* the manifest says .* run the same grid again"):
        score_run(out)
    (out / "manifest.jsonl").unlink()
    with pytest.raises(InputError, match=r"1 files in generations/ and no manifest.jsonl"):
        score_run(out)


def test_folder_of_an_older_version_and_scores_that_are_a_file_are_refused(
    make_run: MakeRun, generation: Generation, gsm8k_items: list[Item]
) -> None:
    out = make_run({}, [generation("gsm8k", "gsm8k/0", "right")])
    with pytest.raises(InputError, match="written by an older version"):
        score_run(out)
    make_run({"gsm8k": gsm8k_items})
    (out / "scores").write_text("")
    with pytest.raises(InputError, match=r"scores cannot be written to .* must be a folder"):
        score_run(out)


def test_missing_scoring_package_is_named(
    make_run: MakeRun, generation: Generation, gsm8k_items: list[Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = make_run({"gsm8k": gsm8k_items}, [generation("gsm8k", "gsm8k/0", "?")])
    monkeypatch.setattr(lm_eval_catalog, "package_version", _missing)
    with pytest.raises(InputError, match="pip install"):
        score_run(out)


def _missing(name: str) -> str:
    return package_version(f"{name}-that-is-not-installed")


@pytest.mark.usefixtures("probed")
def test_nothing_but_whole_parquet_files_in_scores(
    make_run: MakeRun, generation: Generation, gsm8k_items: list[Item]
) -> None:
    out = make_run({"gsm8k": gsm8k_items}, [generation("gsm8k", "gsm8k/0", "wrong")])
    score_run(out)
    assert [path.suffix for path in (out / "scores").iterdir()] == [".parquet"]
    assert list((out / "staging").iterdir()) == []


class TestScoringProcess:
    """It is started by exec, knows nothing of its caller, and dies with it."""

    def probe(self, process: ScoringProcess, text: str, wall_seconds: float = 20.0) -> Any:
        return process.score(PROBE, text, {}, {}, wall_seconds)

    def test_clean_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "secret")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        with ScoringProcess() as process:
            seen = self.probe(process, "describe").verdicts[0]
        assert "HF_TOKEN" not in seen["environment"]
        assert seen["environment"]["CUDA_VISIBLE_DEVICES"] == ""
        assert seen["environment"]["HOME"] != os.environ.get("HOME")
        assert seen["pid"] != os.getpid()
        assert not {"pytest", "ray", "torch"} & set(seen["modules"])
        assert not psutil.pid_exists(seen["pid"])

    def test_scorer_that_raises(self) -> None:
        with ScoringProcess() as process:
            reply = self.probe(process, "raise")
            assert (reply.cause, reply.detail) == ("failed", "ZeroDivisionError: on purpose")
            assert self.probe(process, "describe").cause == ""

    def test_scorer_that_dies_or_hangs_is_replaced(self) -> None:
        with ScoringProcess() as process:
            assert self.probe(process, "die").cause == "died"
            started = time.monotonic()
            assert self.probe(process, "hang", 1.0).cause == "timed_out"
            assert time.monotonic() - started < 5
            assert self.probe(process, "describe").cause == ""

    def test_time_to_get_ready_does_not_count(self) -> None:
        with ScoringProcess() as process:
            reply = process.score(PROBE, "right", {}, {"prepare_seconds": 1.0}, 0.9)
        assert reply.cause == ""
        assert reply.seconds < 0.9

    def test_noise_on_the_channel_is_ignored(self) -> None:
        with ScoringProcess() as process:
            assert self.probe(process, "noise").verdicts == [{"answer": "after the noise"}]

    def test_what_outlives_a_dead_scorer_is_killed(self) -> None:
        with ScoringProcess() as process:
            self.probe(process, "orphan and die")
        assert [p for p in psutil.process_iter() if "234.75" in _command_line(p)] == []

    def test_no_process_survives_a_killed_caller(self, tmp_path: Path) -> None:
        program = (
            "from dlmgrid.workers.benchmarks.scoring_process import ScoringProcess\n"
            f"with ScoringProcess() as p: p.score({PROBE!r}, 'spawn and hang', {{}}, {{}}, 60.0)\n"
        )
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        caller = subprocess.Popen([sys.executable, "-c", program], env=environment)
        try:
            assert _wait_for(lambda: any("345.5" in _command_line(p) for p in psutil.process_iter()))
        finally:
            caller.kill()
            caller.wait()
        assert _wait_for(lambda: not any(path.is_dir() for path in tmp_path.iterdir()))
        assert _wait_for(lambda: not any("345.5" in _command_line(p) for p in psutil.process_iter()))


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def _wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False
