"""MBPP(+) through EvalPlus: its inputs, its special comparisons, and its own evaluator's statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.workers.benchmarks import evalplus_check
from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.benchmarks.scoring_process import ScoringProcess

pytest.importorskip("evalplus")

GOLDEN_DATA = Path(__file__).resolve().parents[2] / "golden" / "data"
SHARED, MATCH, MEAN = "Mbpp/2", "Mbpp/901", "Mbpp/902"

Score = Callable[..., tuple[float, float, str]]


@pytest.fixture(scope="module")
def score(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Score]:
    """(base, plus, program) of an answer to a task of tests/golden/data."""
    documents = {item.item_id: item.document for item in get_benchmark("mbpp_plus").load(GOLDEN_DATA)}
    cache = tmp_path_factory.mktemp("expected")
    with ScoringProcess() as process:

        def scored(task_id: str, text: str) -> tuple[float, float, str]:
            reply = process.score(
                "dlmgrid.workers.benchmarks.evalplus_check",
                text,
                documents[task_id],
                {"attempt": "first", "cache": str(cache), "benchmark": "mbpp_plus"},
                evalplus_check.wall_seconds("first"),
            )
            assert reply.cause == "", reply.detail
            found = {entry["metric"]: entry for entry in reply.verdicts}
            assert {entry["scorer"] for entry in reply.verdicts} == {"evalplus"}
            assert {entry["status"] for entry in reply.verdicts} == {"scored"}
            base, plus = found["pass@1,base"], found["pass@1,plus"]
            return base["value"], plus["value"], base["extracted"]

        yield scored


SHARED_ANSWERS = {
    "right": ("def similar_elements(a, b):\n    return tuple(x for x in set(b) if x in a)\n", (1, 1)),
    "list for tuple, compared as sets": (
        "def similar_elements(a, b):\n    return [x for x in b if x in a]\n",
        (1, 1),
    ),
    "wants the tuples that the statement promises": (
        "def similar_elements(a, b):\n    assert type(a) is type(b) is tuple\n    return set(a) & set(b)\n",
        (1, 1),
    ),
    "misses one": ("def similar_elements(a, b):\n    return sorted(set(a) & set(b))[:1]\n", (0, 0)),
    "wrong on the extra tests": (
        "def similar_elements(a, b):\n    return set(a) & set(b) if a else {0}\n",
        (1, 0),
    ),
    "other name": ("def similar(a, b):\n    return set(a) & set(b)\n", (0, 0)),
}


@pytest.mark.parametrize("case", SHARED_ANSWERS)
def test_inputs_are_tuples_and_outputs_compared_as_sets(score: Score, case: str) -> None:
    text, wanted = SHARED_ANSWERS[case]
    assert score(SHARED, text)[:2] == wanted


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("return re.match('[aeiou]', word)", (1, 1)),
        ("return word[:1] in set('aeiou')", (1, 1)),  # a truth value does for a match
        ("return re.match('[a-z]', word)", (0, 0)),
        ("return None", (0, 0)),
    ],
)
def test_match_objects_are_compared_by_being_none(score: Score, body: str, wanted: tuple[int, int]) -> None:
    assert score(MATCH, f"import re\ndef check_str(word):\n    {body}\n")[:2] == wanted


@pytest.mark.parametrize(
    "text",
    [
        "def mean(numbers):\n    return sum(numbers) / len(numbers)\n```\nDone.",
        "Of course:\n```python\nimport math\n\ndef mean(numbers):\n    return math.fsum(numbers) / len(numbers)\n```",
        "def total(numbers):\n    return sum(numbers)\n\ndef mean(numbers):\n    return total(numbers) / len(numbers)",
        "```python\nfrom statistics import mean\n```\nor without it:\n```python\ndef mean(numbers):\n"
        "    return sum(number / len(numbers) for number in numbers)\n```",
    ],
    ids=["run-on text", "prose and fence", "helper", "two fences"],
)
def test_forms_of_an_answer_and_tolerance_of_floats(score: Score, text: str) -> None:
    assert score(MEAN, text)[:2] == (1, 1)


def test_statuses_are_those_of_evalplus_own_evaluator(score: Score, tmp_path: Path) -> None:
    answers = [(SHARED, text) for text, _ in SHARED_ANSWERS.values()]
    answers.append((MATCH, "import re\ndef check_str(word):\n    return re.match('[a-z]', word)\n"))
    answers.append((MEAN, "def mean(numbers):\n    return sum(numbers) / 2\n"))
    ours = [score(*answer) for answer in answers]
    samples = [
        {"task_id": task_id, "solution": program}
        for (task_id, _), (*_, program) in zip(answers, ours, strict=True)
    ]
    program = (
        "import json, sys\n"
        "from evalplus.data import get_mbpp_plus, get_mbpp_plus_hash\n"
        "from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS\n"
        "from evalplus.evaluate import check_correctness, get_groundtruth\n"
        "problems = get_mbpp_plus()\n"
        "expected = get_groundtruth(problems, get_mbpp_plus_hash(), MBPP_OUTPUT_NOT_NONE_TASKS)\n"
        "found = []\n"
        "for sample in json.load(sys.stdin):\n"
        "    task = sample['task_id']\n"
        "    given = ('mbpp', 0, problems[task], sample['solution'], expected[task])\n"
        "    result = check_correctness(*given, fast_check=True)\n"
        "    found.append([result['base'][0], result['plus'][0]])\n"
        "print(json.dumps(found))\n"
    )
    release = GOLDEN_DATA / "evalplus/MbppPlus-v0.2.0.jsonl"
    environment = os.environ | {"MBPP_OVERRIDE_PATH": str(release), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(samples), text=True, check=True, capture_output=True, env=environment,
    )  # fmt: skip
    statuses: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    theirs = [(float(base == "pass"), float(base == plus == "pass")) for base, plus in statuses]
    assert [(base, plus) for base, plus, _ in ours] == theirs
    assert set(theirs) == {(1.0, 1.0), (1.0, 0.0), (0.0, 0.0)}


def test_base_benchmark_has_the_base_metric_only() -> None:
    item = get_benchmark("mbpp").load(GOLDEN_DATA, 1)[0]
    assert item.document["plus_input"] is None
    assert get_benchmark("mbpp").scorers[0].metrics == ("pass@1,base",)
