"""MATH-500 and AIME through lm-eval: the forms that answers take, and answers made to hang a verifier."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from dlmgrid.workers.benchmarks import lm_eval_task
from dlmgrid.workers.benchmarks.scoring_process import ScoringProcess
from dlmgrid.workers.benchmarks.time_limit import waiting_seconds

pytest.importorskip("lm_eval")
pytest.importorskip("math_verify")

VERIFY, EXACT = "math_verify,none", "exact_match,none"


def verdicts(text: str, solution: str) -> dict[str, dict[str, Any]]:
    document = {"problem": "?", "solution": solution, "unique_id": "test/0"}
    found = lm_eval_task.score(text, document, {"attempt": "first", "benchmark": "math500"})
    return {entry["metric"]: entry for entry in found}


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        (r"\frac12", r"The answer is $\frac{1}{2}$.", 1),
        (r"\frac12", r"\boxed{0.5}", 1),
        (r"\frac12", "1/2", 1),
        (r"\frac97", r"\boxed{\dfrac{9}{7}}", 1),
        (r"50\%", r"\boxed{50\%}", 1),
        (r"50\%", r"\boxed{50}", 0),  # math-verify 0.9: a percentage is a hundredth
        ("5", r"\boxed{5\text{ cm}}", 1),
        ("29", r"\boxed{\$29.00}", 1),
        ("29000", r"\boxed{29,000}", 1),
        ("(1,2)", r"\boxed{(1,2)}", 1),
        ("(1,2)", r"\boxed{(2,1)}", 0),
        ("[0,2)", r"\boxed{(0,2)}", 0),
        (r"\text{A}", r"\boxed{\text{A}}", 1),
        ("-3", r"\boxed{3}", 0),
        ("-3", r"\boxed{- 3}", 1),
        ("-3", "\\boxed{\N{MINUS SIGN}3}", 1),
        ("(x+1)^2", r"\boxed{x^2+2x+1}", 1),
        ("12", r"\boxed{12", 0),  # a box that is never closed
        ("12", r"So \boxed{12}. Problem: and 6? Solution: \boxed{13}", 1),  # run-on text is cut
        ("12", r"\boxed{12}, no: \boxed{13}", 0),
        ("12", "The final answer is 12", 1),
        ("12", "no number", 0),
        ("12", "", 0),
        ("12", r"\boxed{" + "9" * 100_000 + "}", 0),
        ("12", "{" * 20_000, 0),
    ],
)
def test_math_verify_on_the_forms_of_an_answer(gold: str, text: str, value: int) -> None:
    found = verdicts(text, rf"It is $\boxed{{{gold}}}$.")
    assert (found[VERIFY]["value"], found[VERIFY]["status"]) == (value, "scored")


def test_exact_match_wants_minervas_sentence_and_math_verify_does_not() -> None:
    sentence = verdicts("Final Answer: The final answer is $12$. I hope it is correct.", r"$\boxed{12}$")
    assert (sentence[EXACT]["value"], sentence[VERIFY]["value"]) == (1, 1)
    boxed = verdicts(r"\boxed{12}", r"$\boxed{12}$")
    assert (boxed[EXACT]["value"], boxed[VERIFY]["value"]) == (0, 1)


def test_gold_that_the_verifier_cannot_read_is_an_error_not_a_wrong_answer() -> None:
    found = verdicts(r"\boxed{12}", r"As shown, \boxed{}.")
    assert (found[VERIFY]["value"], found[VERIFY]["status"]) == (None, "errored")
    assert "no answer in the gold solution" in found[VERIFY]["detail"]


def test_tower_of_powers_ends_and_is_a_timeout_and_the_next_answer_is_scored() -> None:
    """In a scoring process, whose main thread scores; the alarm is math_verify's own, of 5 s."""
    with ScoringProcess() as process:

        def score(text: str) -> tuple[float, str]:
            reply = process.score(
                "dlmgrid.workers.benchmarks.lm_eval_task",
                text,
                {"problem": "?", "solution": r"\boxed{1}", "unique_id": "test/0"},
                {"attempt": "first", "benchmark": "math500"},
                lm_eval_task.wall_seconds("first"),
            )
            found = {entry["metric"]: entry for entry in reply.verdicts}
            return found[VERIFY]["value"], found[VERIFY]["status"]

        assert score(r"\boxed{1}") == (1.0, "scored")
        assert process.pid is not None
        started = time.monotonic() - waiting_seconds(process.pid)
        assert score(r"\boxed{9^{9^{9^{9}}}}") == (0.0, "timed_out")
        assert time.monotonic() - waiting_seconds(process.pid) - started < 30
        assert score(r"\boxed{2}") == (0.0, "scored")


def test_alarm_during_a_right_answer_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zero with an alarm is tried again; a point is a point."""
    task = lm_eval_task.build_task(lm_eval_task.TASKS["aime24"])
    for value, status in ((1, "scored"), (0, "timed_out")):

        def slow(document: Any, results: Any, value: int = value) -> dict[str, int]:
            signal.signal(signal.SIGALRM, lambda number, frame: None)
            signal.raise_signal(signal.SIGALRM)
            return {"exact_match": value}

        monkeypatch.setattr(task, "process_results", slow)
        options = {"attempt": "first", "benchmark": "aime24"}
        (entry,) = lm_eval_task.score("?", {"Problem": "?", "Answer": "1"}, options)
        assert (entry["value"], entry["status"]) == (value, status)
    assert signal.signal.__module__ == "signal"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"So \boxed{23}.", 1),
        (r"So $\boxed{23}$ it is.", 1),
        ("$23$", 1),
        ("23", 1),
        (r"\boxed{023}", 0),  # lm-eval compares text
        (r"\boxed{23} or \boxed{24}", 0),
        ("It is 23.", 0),  # neither a box nor dollar signs: the whole text is compared
        (r"\boxed{23", 0),
        (r"\boxed{23} Question: and now? \boxed{5}", 1),
        ("", 0),
    ],
)
@pytest.mark.parametrize("name", ["aime24", "aime25"])
def test_aime_verdicts_are_lm_evals(name: str, text: str, value: int) -> None:
    document = {"Problem": "?", "Answer": "23"} if name == "aime24" else {"problem": "?", "answer": "23"}
    (entry,) = lm_eval_task.score(text, document, {"attempt": "first", "benchmark": name})
    assert (entry["metric"], entry["value"]) == (EXACT, value)
