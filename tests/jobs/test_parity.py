"""The scores of a run are those that lm-eval's evaluator and EvalPlus' command line give the same texts."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing.answered_run import (
    GSM8K_DOCUMENTS,
    HUMANEVAL_DOCUMENTS,
    NUM_QUESTIONS,
    store_answers,
    write_data,
)

pytest.importorskip("evalplus")
pytest.importorskip("lm_eval")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the imports of lm-eval warn of is not ours
    from dlmgrid.cluster.report import load_scores
    from dlmgrid.jobs import parity

ODD_TEXTS = [
    "", "####", "#### ", "#### -3", "#### −3", "$280.00", "#### 280.", "280 280.0 #### 280,", "#### 2,80",
    "I say 280.\nQuestion: another\n#### 999", "#### 280</s> #### 7", "<|im_end|>#### 280", "\x00\n#### 280\x00",
    "9" * 100_000, "#### " + "1," * 50_000, "½ ٣ ４", "#### 280 and then #### 281", ". . . ,,, $$$", "1e3", "-",
    "(((((((((((" * 500, "\u202e280", "####280", "#### 280 dollars", "-280",
]  # fmt: skip


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLMGRID_CACHE", str(tmp_path / "cache"))
    return write_data(tmp_path / "data")


def test_gsm8k_is_scored_as_by_the_evaluator_of_lm_eval(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """30 items, right and wrong answers and odd texts, in two repeats; one generation failed. Then the same
    with an evaluator that says the opposite."""
    texts: dict[str, list[str | None]] = {}
    for index, document in enumerate(GSM8K_DOCUMENTS):
        odd = ODD_TEXTS[index % len(ODD_TEXTS)]
        right = document["answer"] if index % 2 else document["answer"].rpartition("#### ")[2] + " dollars"
        texts[f"gsm8k/{index}"] = [right, odd]
    texts["gsm8k/3"] = [None, "#### 1"]
    out = tmp_path / "out"
    store_answers(out, data, "gsm8k", texts)
    compared = parity.compare_run(out, workers=1)
    assert compared.differences == ()
    assert compared.num_compared == (2 * NUM_QUESTIONS - 1) * 2
    values = [row["value"] for row in load_scores(out).to_pylist() if row["value"] is not None]
    assert 0 < sum(values) < len(values)

    theirs = parity.lm_eval_values
    monkeypatch.setattr(
        parity, "lm_eval_values", lambda cell: {key: 1.0 - value for key, value in theirs(cell).items()}
    )
    capsys.readouterr()
    assert parity.main([str(out)]) == 1
    printed = capsys.readouterr().out
    assert "118 values compared, 118 differ" in printed
    assert "lm-eval exact_match,strict-match gsm8k/1 repeat 0 cell " in printed
    assert ": 1.0 here, 0.0 there" in printed


PROGRAMS = [
    "return math.hypot(x, y)\n```",
    "def distance(x, y):\n    return (x * x + y * y) ** 0.5\n```\nThis computes the distance.",
    "Sure!\n```python\nimport numpy as np\ndef distance(x, y):\n    return float(np.sqrt(x**2 + y**2))\n```",
    "def distance(x, y):\n    return abs(x) + abs(y)\n```",
    "def distance(x, y):\n    return math.sqrt(abs(x * x + y * y)) if x >= 0 else 0.0\n```",
    "def distance(x, y):\n    print('z' * 10**7)\n    return math.hypot(x, y)\n```",
    "import os\nos._exit(0)\n```",
    "def distance(x, y):\n    raise SystemExit\n```",
    "def distance(x, y):\n    return distance(x, y)\n```",
    "def distance(x, y)\n    return 5\n```",
    "I cannot do that.",
    "",
    "def distance(x, y):\n\treturn math.hypot(x, y)\n",
    "def distance(x, y):\n    import sys\n    sys.stdout.close()\n    return math.hypot(x, y)\n```",
    "def distance(x, y):\n    return int('9' * 5000)\n```",
    "import time\ndef distance(x, y):\n    time.sleep(1.5 * (x < 0))\n    return math.hypot(x, y)\n```",
]


def test_humaneval_plus_is_scored_as_by_the_command_line_of_evalplus(tmp_path: Path, data: Path) -> None:
    """Part of a benchmark, 17 programs: right, slow, wrong on the extra tests only, hostile."""
    task_id = HUMANEVAL_DOCUMENTS[0]["task_id"]
    other = HUMANEVAL_DOCUMENTS[1]
    out = tmp_path / "out"
    gold = other["prompt"] + other["canonical_solution"]
    store_answers(out, data, "humaneval_plus", {task_id: PROGRAMS, other["task_id"]: [gold]})
    compared = parity.compare_run(out, confirm_run_unsafe_code=True, workers=1)
    assert compared.differences == ()
    assert compared.num_compared == (len(PROGRAMS) + 1) * 2
    scores = load_scores(out).to_pylist()
    ours = {
        (row["item_id"], row["repeat"], row["metric"]): row["value"]
        for row in scores
        if row["scorer"] == "evalplus"
    }
    assert ours[other["task_id"], 0, "pass@1,plus"] == 1
    base = [ours[task_id, repeat, "pass@1,base"] for repeat in range(len(PROGRAMS))]
    plus = [ours[task_id, repeat, "pass@1,plus"] for repeat in range(len(PROGRAMS))]
    assert base[:5] == [1, 1, 1, 0, 1]
    assert plus[:5] == [1, 1, 1, 0, 0]
    assert plus[-1] == 1, "slower than the first limit, and right"


def test_code_is_not_run_without_the_opt_in(tmp_path: Path, data: Path) -> None:
    store_answers(tmp_path / "out", data, "humaneval", {"HumanEval/700": ["pass"]})
    with pytest.raises(InputError, match="pass --confirm-run-unsafe-code"):
        parity.compare_run(tmp_path / "out")


def test_a_run_that_neither_tool_scores_is_refused(tmp_path: Path, data: Path) -> None:
    store_answers(tmp_path / "out", data, "words", {"words-0000": ["#### 1"]})
    with pytest.raises(InputError, match="no answers that lm-eval or EvalPlus score"):
        parity.compare_run(tmp_path / "out")
