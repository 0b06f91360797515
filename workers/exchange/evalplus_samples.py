"""Files of EvalPlus: ``samples.jsonl`` with the programs that our scorer runs, and the problems they answer.

EvalPlus' command line wants an answer for every problem it knows. A file of problems that holds just the answered
ones goes with the samples, named to it by an environment variable, so that part of a benchmark can be scored too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dlmgrid.workers.benchmarks.code_extraction import extract_program
from dlmgrid.workers.benchmarks.evalplus_check import EXTRACTION_SECONDS
from dlmgrid.workers.benchmarks.time_limit import time_limit
from dlmgrid.workers.errors import InputError

# Our benchmarks that EvalPlus scores: its data set, and whether only the base tests count.
DATASETS = {
    "humaneval": ("humaneval", True),
    "humaneval_plus": ("humaneval", False),
    "mbpp": ("mbpp", True),
    "mbpp_plus": ("mbpp", False),
}
PROBLEM_VARIABLES = {"humaneval": "HUMANEVAL_OVERRIDE_PATH", "mbpp": "MBPP_OVERRIDE_PATH"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """A program as EvalPlus is given it; ``is_extracted`` is False where no program was found in time."""

    task_id: str
    program: str
    is_extracted: bool

    def to_line(self) -> str:
        return json.dumps({"task_id": self.task_id, "solution": self.program}) + "\n"


def make_solution(text: str, document: dict[str, Any]) -> Solution:
    """The program in ``text``, found as the scorer finds it; empty when that takes too long, which fails every
    test, as it does in the scorer. Call it from the main thread."""
    try:
        with time_limit(EXTRACTION_SECONDS):
            program = extract_program(text, document["prompt"], document["entry_point"]).program
    except TimeoutError:
        return Solution(task_id=document["task_id"], program="", is_extracted=False)
    # EvalPlus writes programs as UTF-8: a lone surrogate, which no Python file can hold, becomes a question mark
    program = program.encode("utf-8", "replace").decode("utf-8")
    return Solution(task_id=document["task_id"], program=program, is_extracted=True)


def problem_lines(documents: Sequence[dict[str, Any]]) -> Iterator[str]:
    """EvalPlus' problem file, restricted to ``documents``.

    Raises InputError for a document that is no problem of EvalPlus.
    """
    for document in documents:
        try:
            problem = {
                name: document[name]
                for name in ("task_id", "prompt", "entry_point", "canonical_solution", "atol")
            }
            problem["base_input"] = json.loads(document["base_input"])
            problem["plus_input"] = json.loads(document["plus_input"] or "[]")
        except KeyError as error:
            raise InputError(f"a document of the run has no {error}; it is no problem of EvalPlus") from error
        yield json.dumps({**problem, "contract": ""}) + "\n"


def evaluate_words(benchmark: str, samples: str) -> list[str]:
    """Arguments of ``python -m evalplus.evaluate`` that score ``samples``."""
    dataset, is_base_only = DATASETS[benchmark]
    words = ["--dataset", dataset, "--samples", samples]
    return [*words, "--base_only"] if is_base_only else words
