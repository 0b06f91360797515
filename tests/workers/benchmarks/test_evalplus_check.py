"""EvalPlus' verdicts unchanged, and the four ways to fail told apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.workers.benchmarks import evalplus_check
from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.benchmarks.scoring_process import ScoringProcess

pytest.importorskip("evalplus")

MODULE = "dlmgrid.workers.benchmarks.evalplus_check"
FIND_ZERO = {
    "task_id": "HumanEval/32",
    "prompt": "def find_zero(xs: list):\n    ''' A zero of the polynomial. '''\n",
    "entry_point": "find_zero",
    "canonical_solution": "    return -xs[0] / xs[1]\n",
    "atol": 0.0001,
    "base_input": json.dumps([[[1, 2]], [[-6, 3]]]),
    "plus_input": json.dumps([[[0, 5]]]),
}


@pytest.fixture(scope="module")
def process() -> Iterator[ScoringProcess]:
    with ScoringProcess() as started:
        yield started


# What ``evalplus.evaluate`` does with each sample, without the thread that keeps it waiting for 20 s.
EVALPLUS_EVALUATE = """
import json, sys
from evalplus.data import get_human_eval_plus, get_human_eval_plus_hash
from evalplus.evaluate import check_correctness, get_groundtruth
problems = get_human_eval_plus()
expected = get_groundtruth(problems, get_human_eval_plus_hash(), [])
found = []
for sample in json.load(sys.stdin):
    task = sample["task_id"]
    given = ("humaneval", 0, problems[task], sample["solution"], expected[task])
    result = check_correctness(*given, fast_check=True)
    found.append([result["base"][0], result["plus"][0]])
print(json.dumps(found))
"""


class Scorer:
    """Scores texts of one document in a scoring process; rows by (scorer, metric)."""

    def __init__(self, process: ScoringProcess, document: dict[str, Any], cache: Path) -> None:
        self.process, self.document, self.cache = process, document, cache

    def __call__(self, text: str, attempt: str = "first") -> dict[tuple[str, str], dict[str, Any]]:
        options = {"attempt": attempt, "cache": str(self.cache)}
        reply = self.process.score(MODULE, text, self.document, options, evalplus_check.wall_seconds(attempt))
        assert reply.cause == "", reply.detail
        return {(entry["scorer"], entry["metric"]): entry for entry in reply.verdicts}


@pytest.fixture
def score(process: ScoringProcess, data_folder: Path, tmp_path: Path) -> Scorer:
    return Scorer(process, get_benchmark("humaneval_plus").load(data_folder)[1].document, tmp_path)


BASE, PLUS = ("evalplus", "pass@1,base"), ("evalplus", "pass@1,plus")


def test_gold_passes_both_sets_of_tests(score: Scorer) -> None:
    rows = score(score.document["prompt"] + score.document["canonical_solution"])
    assert {key: row["value"] for key, row in rows.items()} == {
        (scorer, metric): 1.0
        for scorer in ("evalplus", "evalplus-repaired")
        for metric in ("pass@1,base", "pass@1,plus")
    }


def test_wrong_on_the_plus_tests_only(score: Scorer) -> None:
    rows = score("    return text * times or ('' if times else None)\n")
    assert (rows[BASE]["value"], rows[PLUS]["value"]) == (1.0, 0.0)
    assert rows[PLUS]["status"] == "scored"
    assert "plus: fail" in rows[PLUS]["detail"]


def test_wrong_on_the_base_tests_is_wrong_on_both(score: Scorer) -> None:
    rows = score("    return text\n")
    assert (rows[BASE]["value"], rows[PLUS]["value"], rows[PLUS]["status"]) == (0.0, 0.0, "scored")


def test_base_benchmark_has_no_plus_metric(
    process: ScoringProcess, data_folder: Path, tmp_path: Path
) -> None:
    document = get_benchmark("humaneval").load(data_folder)[1].document
    rows = Scorer(process, document, tmp_path)(document["canonical_solution"])
    assert {metric for _, metric in rows} == {"pass@1,base"}


def test_slow_test_is_a_timeout_and_passes_alone_with_a_larger_limit(score: Scorer) -> None:
    slow = "    import time\n    time.sleep(1.3)\n    return text * times\n"
    first = score(slow)[BASE]
    assert (first["value"], first["status"]) == (0.0, "timed_out")
    alone = score(slow, attempt="alone")[BASE]
    assert (alone["value"], alone["status"]) == (1.0, "scored")


def test_endless_loop_that_swallows_its_alarm_is_a_timeout(score: Scorer) -> None:
    body = "    while True:\n        try:\n            while True: pass\n        except BaseException: pass\n"
    rows = score(body + "    return 1\n")
    assert rows[BASE]["status"] == "timed_out"


def test_hang_at_import_is_a_timeout(score: Scorer) -> None:
    rows = score("def repeat(text, times, hang=any(iter(int, 1))):\n    return text * times\n")
    assert (rows[BASE]["value"], rows[BASE]["status"]) == (0.0, "timed_out")
    assert "base: timeout, whole check ran out of time" in rows[BASE]["detail"]


@pytest.mark.parametrize(
    "line",
    [
        "os.fork()",
        "os.kill(os.getppid(), 9)",
        "os.close(1), os.close(2), os.closerange(3, 99), print(1), 1 / 0",
        "print('x' * 10**7) or 1 / 0",
        "__import__('sys').stdout.close() or 1 / 0",
        "__import__('shutil').rmtree('/')",
        "str(10**100000)",
        "bytearray(1 << 40)",
        "(lambda f: f(f))(lambda f: f(f))",
    ],
)
def test_hostile_answer_is_wrong_and_the_next_is_scored(score: Scorer, line: str) -> None:
    rows = score(f"    import os\n    {line}\n    return text * times\n")
    assert (rows[BASE]["value"], rows[BASE]["status"]) == (0.0, "scored"), rows[BASE]["detail"]
    assert score(score.document["canonical_solution"])[PLUS]["value"] == 1.0


def test_process_that_ends_itself_is_wrong_not_slow(score: Scorer) -> None:
    started = time.monotonic()
    rows = score("    import os\n    os._exit(0)\n    return 1\n")
    assert (rows[BASE]["value"], rows[BASE]["status"]) == (0.0, "scored")
    assert "timeout, the process ended before the tests did" in rows[BASE]["detail"]
    assert time.monotonic() - started < 10


def test_expected_outputs_are_computed_once(score: Scorer) -> None:
    score(score.document["canonical_solution"])
    files = {path: path.stat().st_mtime_ns for path in score.cache.glob("*.pickle")}
    assert len(files) == 2
    score("    return 1\n")
    assert {path: path.stat().st_mtime_ns for path in score.cache.glob("*.pickle")} == files


@pytest.mark.parametrize(
    ("text", "repaired"),
    [("    return -xs[0] / xs[1]\n", 1.0), ("    return xs[0] / xs[1]\n", 0.0), ("    return None\n", 0.0)],
    ids=["right", "wrong", "error"],
)
def test_humaneval_32_fails_under_evalplus_and_is_judged_by_the_repair(
    process: ScoringProcess, tmp_path: Path, text: str, repaired: float
) -> None:
    rows = Scorer(process, FIND_ZERO, tmp_path)(text)
    assert rows[BASE]["value"] == rows[PLUS]["value"] == 0.0
    assert rows["evalplus-repaired", "pass@1,plus"]["value"] == repaired


def test_verdicts_are_those_of_evalplus_own_evaluator(
    process: ScoringProcess, data_folder: Path, tmp_path: Path
) -> None:
    """The programs that we extract, scored by EvalPlus' own evaluator: the same statuses."""
    items = {item.item_id: item.document for item in get_benchmark("humaneval_plus").load(data_folder)}
    answers = [
        ("HumanEval/900", items["HumanEval/900"]["canonical_solution"]),
        ("HumanEval/900", "    return sum(values)\n"),
        ("HumanEval/900", "    return start + sum(v for v in values if v < 100)\n"),
        ("HumanEval/900", "I do not know."),
        ("HumanEval/901", "```python\ndef repeat(text, times):\n    return times * text\n```"),
        ("HumanEval/901", "    return text * times or ('' if times else None)\n"),
        ("HumanEval/901", "    return text +\n"),
        ("HumanEval/901", "    import os\n    os._exit(0)\n    return 1\n"),
    ]
    ours, samples = [], []
    for task_id, text in answers:
        rows = Scorer(process, items[task_id], tmp_path)(text)
        ours.append((rows[BASE]["value"], rows[PLUS]["value"]))
        samples.append({"task_id": task_id, "solution": rows[BASE]["extracted"]})
    release = next((data_folder / "evalplus").iterdir())
    environment = os.environ | {"HUMANEVAL_OVERRIDE_PATH": str(release), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", EVALPLUS_EVALUATE]
    done = subprocess.run(
        command, input=json.dumps(samples), text=True, check=True, capture_output=True, env=environment
    )
    statuses = json.loads(done.stdout.splitlines()[-1])
    theirs = [(float(base == "pass"), float(base == plus == "pass")) for base, plus in statuses]
    assert ours == theirs
    assert set(ours) == {(1.0, 1.0), (1.0, 0.0), (0.0, 0.0)}


def test_prompt_is_evalplus_own_chat_prompt(data_folder: Path) -> None:
    from evalplus.codegen import run_codegen  # the sentences are constants inside this function
    from evalplus.provider.utility import make_raw_chat_prompt

    constants = [value for value in run_codegen.__code__.co_consts if isinstance(value, str)]
    instruction = next(text for text in constants if text.startswith("Please provide a self-contained"))
    response = next(text for text in constants if text.startswith("Below is a Python script"))

    class Template:
        chat_template = "user then assistant"

        def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
            return "<user>{}<assistant>{}".format(*(message["content"] for message in messages))

    mbpp = get_benchmark("mbpp").load(Path(__file__).resolve().parents[2] / "golden" / "data")
    for item in [*get_benchmark("humaneval").load(data_folder), *mbpp]:
        prompt = item.document["prompt"].strip() + "\n"
        theirs = make_raw_chat_prompt(prompt, instruction, response, Template())
        assert item.messages is not None
        assert f"<user>{item.messages[0]['content']}<assistant>{item.assistant_prefix}" == theirs


@pytest.mark.parametrize("task", [0, 32, 115])
def test_gold_of_the_published_set(
    process: ScoringProcess, shared_data: Path, tmp_path: Path, task: int
) -> None:
    document = get_benchmark("humaneval_plus").load(shared_data, task + 1)[task].document
    rows = Scorer(process, document, tmp_path)(document["canonical_solution"] + "```\nDone.")
    assert rows["evalplus-repaired", "pass@1,plus"]["value"] == 1.0
    assert rows[PLUS]["value"] == float(task != 32)
