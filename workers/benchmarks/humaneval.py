"""HumanEval and HumanEval+, with EvalPlus' own chat prompt, scored by EvalPlus.

Both benchmarks ask the same 164 questions of HumanEval+ v0.1.10, whose prompts equal HumanEval's but for the
place of one import (HumanEval/115). ``humaneval`` is scored on the base tests, ``humaneval_plus`` on both
sets of tests. Example document::

    {"task_id": "HumanEval/0", "entry_point": "has_close_elements", "prompt": "from typing import List…",
     "canonical_solution": "…", "atol": 0, "base_input": "[[[1.0, 2.0, …", "plus_input": "[[…"}
"""

from __future__ import annotations

from dlmgrid.workers.benchmarks.benchmark import Benchmark
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.evalplus_set import COLUMNS, evalplus_benchmark, evalplus_scorer

RELEASE = "HumanEvalPlus v0.1.10"
HUMANEVAL_PLUS = DataFile(
    path="evalplus/HumanEvalPlus-v0.1.10.jsonl",
    columns=COLUMNS,
    num_rows=164,
    content_digest="156ebb4ef9ef10bc4b5ba5ee90127c5beac220a61581fd75e26cbe28fe68694a",
)


def _benchmark(name: str, title: str, *, plus: bool) -> Benchmark:
    unchanged = "EvalPlus' verdict unchanged. It fails every solution of HumanEval/32 (EvalPlus 0.3.1)"
    repaired = "EvalPlus' verdict, with the oracle of HumanEval/32 counted as it was meant"
    return evalplus_benchmark(
        name=name,
        title=title,
        release=RELEASE,
        file=HUMANEVAL_PLUS,
        plus=plus,
        prompt_version="evalplus-humaneval-instruct-0.3.1",
        scorers=(
            evalplus_scorer("evalplus", RELEASE, plus, unchanged),
            evalplus_scorer("evalplus-repaired", RELEASE, plus, repaired),
        ),
        exceptions=(
            "HumanEval/32 under `evalplus`: a fault of EvalPlus 0.3.1, mended by `evalplus-repaired`"
        ),
    )


HUMANEVAL = _benchmark("humaneval", "HumanEval (base tests)", plus=False)
HUMANEVAL_PLUS_BENCHMARK = _benchmark("humaneval_plus", "HumanEval+ (base and extra tests)", plus=True)
