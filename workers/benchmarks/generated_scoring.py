"""Scoring of the generated benchmarks: ``words`` by its own rule, ``functions`` by running the program."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from dlmgrid.workers.benchmarks.sandbox import PASSED, TIMED_OUT, run_program
from dlmgrid.workers.benchmarks.verdict import ALONE, verdict
from dlmgrid.workers.benchmarks.verdict import TIMED_OUT as STATUS_TIMED_OUT

PROGRAM_SECONDS = {"first": 10.0, ALONE: 30.0}


def wall_seconds(attempt: str) -> float:
    """Wall limit of one :func:`score` call."""
    return PROGRAM_SECONDS[attempt] + 20.0


def prepare(document: dict[str, Any], options: dict[str, Any]) -> None:
    """Nothing has to be ready."""


def score(text: str, document: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Verdict on ``text``. ``functions`` documents are those with tests; the others are word problems."""
    if "tests" not in document:
        from dlmgrid.workers.benchmarks import words

        sys.set_int_max_str_digits(0)  # a number of 100,000 digits is a wrong answer, not an error
        value, extracted = words.score(text, document)
        return [verdict("words", "exact_match", float(value), extracted=str(extracted))]
    from dlmgrid.workers.benchmarks import functions

    program = functions.program(text, document)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        outcome = run_program(
            program, scratch=Path(scratch), wall_seconds=PROGRAM_SECONDS[options["attempt"]]
        )
    return [
        verdict(
            "functions",
            "pass@1",
            1.0 if outcome.status == PASSED else 0.0,
            status=STATUS_TIMED_OUT if outcome.status == TIMED_OUT else "scored",
            detail=outcome.detail,
            extracted=program,
        )
    ]
