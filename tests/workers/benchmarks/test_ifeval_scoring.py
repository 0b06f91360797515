"""IFEval through lm-eval, without a network: strict and loose, prompts and instructions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.workers.benchmarks import lm_eval_task
from dlmgrid.workers.benchmarks.scoring_process import ScoringProcess

pytest.importorskip("lm_eval")
pytest.importorskip("punkt")

NO_COMMA_AND_LONG = {
    "key": 1,
    "prompt": "Write at least 3 words without a comma.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{}, {"relation": "at least", "num_words": 3}],
}


def scores(text: str, document: dict[str, Any]) -> dict[str, float]:
    found = lm_eval_task.score(text, document, {"attempt": "first", "benchmark": "ifeval"})
    assert {entry["status"] for entry in found} == {"scored"}
    return {entry["metric"].removesuffix(",none"): entry["value"] for entry in found}


@pytest.mark.parametrize(
    ("text", "prompt_strict", "share_strict", "prompt_loose"),
    [
        ("one two three", 1, 1, 1),
        ("one, two, three", 0, 0.5, 0),
        ("one", 0, 0.5, 0),
        ("", 0, 0, 0),
        ("Sure, here:\none two three", 0, 0.5, 1),  # loose: without the first line
    ],
)
def test_strict_and_loose(text: str, prompt_strict: int, share_strict: float, prompt_loose: int) -> None:
    found = scores(text, NO_COMMA_AND_LONG)
    assert set(found) == {
        "prompt_level_strict_acc", "inst_level_strict_share", "prompt_level_loose_acc", "inst_level_loose_share",
    }  # fmt: skip
    assert found["prompt_level_strict_acc"] == prompt_strict
    assert found["inst_level_strict_share"] == share_strict
    assert found["prompt_level_loose_acc"] == prompt_loose


def test_detail_counts_instructions() -> None:
    found = lm_eval_task.score(
        "one, two, three", NO_COMMA_AND_LONG, {"attempt": "first", "benchmark": "ifeval"}
    )
    assert [entry["detail"] for entry in found if "inst_level" in entry["metric"]] == [
        "1 of 2 instructions"
    ] * 2


@pytest.mark.parametrize("text", ["#a #b #c #d #e", "no hash at all", "a" * 30])
def test_what_the_checker_draws_at_random_is_drawn_alike_every_time(text: str) -> None:
    """Items 1122 and 1129 count # and !: lm-eval's checker takes letters only, and draws one instead."""
    document = {
        "key": 1122,
        "prompt": "Write 4 hashtags.",
        "instruction_id_list": ["keywords:letter_frequency"] * 3,
        "kwargs": [{"let_relation": "at least", "letter": "#", "let_frequency": 4}] * 3,
    }
    first = scores(text, document)
    assert all(scores(text, document) == first for _ in range(5))


def test_sentences_are_nltks_in_a_scoring_process_without_a_network(tmp_path: Path) -> None:
    """ "Dr." ends no sentence: that is what the Punkt model knows."""
    document = {
        "key": 2,
        "prompt": "Write fewer than 3 sentences.",
        "instruction_id_list": ["length_constraints:number_sentences"],
        "kwargs": [{"relation": "less than", "num_sentences": 3}],
    }
    with ScoringProcess() as process:

        def value(text: str) -> float:
            reply = process.score(
                "dlmgrid.workers.benchmarks.lm_eval_task",
                text,
                document,
                {"attempt": "first", "benchmark": "ifeval"},
                lm_eval_task.wall_seconds("first"),
            )
            assert reply.cause == "", reply.detail
            return float(reply.verdicts[0]["value"])

        assert value("Dr. Grey met Mr. Brown at 3 p.m. today. They talked.") == 1.0
        assert value("Grey came. Brown came. They talked.") == 0.0


def test_language_detection_gives_the_same_answer_in_every_process() -> None:
    """langdetect samples; on this text an unfixed seed gives several."""
    program = (
        "from pathlib import Path\n"
        "from dlmgrid.workers.benchmarks.sentence_model import make_language_detection_repeatable\n"
        "make_language_detection_repeatable()\n"
        "import langdetect\n"
        "print([langdetect.detect_langs('taxi hotel')[0].lang for _ in range(20)])\n"
    )
    command = [sys.executable, "-c", program]
    outputs = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(outputs) == 1
    assert len(set(outputs.pop().strip("[]\n").split(", "))) == 1
