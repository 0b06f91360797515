"""HumanEval and HumanEval+, with EvalPlus' own chat prompt, scored by EvalPlus.

Both benchmarks ask the same 164 questions of HumanEval+ v0.1.10, whose prompts equal HumanEval's but for the
place of one import (HumanEval/115). ``humaneval`` is scored on the base tests, ``humaneval_plus`` on both
sets of tests. Example document::

    {"task_id": "HumanEval/0", "entry_point": "has_close_elements", "prompt": "from typing import List…",
     "canonical_solution": "…", "atol": 0, "base_input": "[[[1.0, 2.0, …", "plus_input": "[[…"}
"""

from __future__ import annotations

from pathlib import Path

from dlmgrid.workers.benchmarks import evalplus_set
from dlmgrid.workers.benchmarks.benchmark import Benchmark, Scorer
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.evalplus_set import evalplus_scorer, load_tasks
from dlmgrid.workers.items import Item

RELEASE = "HumanEvalPlus v0.1.10"
HUMANEVAL_PLUS = DataFile(
    path="evalplus/HumanEvalPlus-v0.1.10.jsonl",
    columns=evalplus_set.COLUMNS,
    num_rows=164,
    content_digest="156ebb4ef9ef10bc4b5ba5ee90127c5beac220a61581fd75e26cbe28fe68694a",
)


def _load_base(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    return load_tasks(HUMANEVAL_PLUS, data, limit, plus=False)


def _load_plus(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    return load_tasks(HUMANEVAL_PLUS, data, limit, plus=True)


def _scorers(metrics: tuple[str, ...]) -> tuple[Scorer, ...]:
    unchanged = "EvalPlus' verdict unchanged. It fails every solution of HumanEval/32 (EvalPlus 0.3.1)"
    repaired = "EvalPlus' verdict, with the oracle of HumanEval/32 counted as it was meant"
    return (
        evalplus_scorer("evalplus", RELEASE, metrics, unchanged),
        evalplus_scorer("evalplus-repaired", RELEASE, metrics, repaired),
    )


_EXCEPTIONS = "HumanEval/32 under `evalplus`: a fault of EvalPlus 0.3.1, mended by `evalplus-repaired`"

HUMANEVAL = Benchmark(
    name="humaneval",
    title="HumanEval (base tests)",
    source=f"EvalPlus release {RELEASE}, base tests",
    chat=True,
    prompt=evalplus_set.PROMPT,
    default_gen_length=512,
    max_fewshot=0,
    stop=evalplus_set.STOP,
    extraction=evalplus_set.EXTRACTION,
    postprocessing=evalplus_set.POSTPROCESSING,
    scorers=_scorers(("pass@1,base",)),
    scoring=evalplus_set.SCORING,
    versions=lambda num_fewshot: "evalplus-humaneval-instruct-0.3.1/chat/0-shot",
    loader=_load_base,
    files=(HUMANEVAL_PLUS,),
    exceptions=_EXCEPTIONS,
)

HUMANEVAL_PLUS_BENCHMARK = Benchmark(
    name="humaneval_plus",
    title="HumanEval+ (base and extra tests)",
    source=f"EvalPlus release {RELEASE}, base and plus tests",
    chat=True,
    prompt=HUMANEVAL.prompt,
    default_gen_length=512,
    max_fewshot=0,
    stop=evalplus_set.STOP,
    extraction=evalplus_set.EXTRACTION,
    postprocessing=evalplus_set.POSTPROCESSING,
    scorers=_scorers(("pass@1,base", "pass@1,plus")),
    scoring=evalplus_set.SCORING,
    versions=HUMANEVAL.versions,
    loader=_load_plus,
    files=(HUMANEVAL_PLUS,),
    exceptions=_EXCEPTIONS,
)
