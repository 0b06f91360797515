"""MBPP and MBPP+, with EvalPlus' own chat prompt, scored by EvalPlus.

Both benchmarks ask the 378 questions of MBPP+ v0.2.0, whose statements EvalPlus cleaned: numbers are not to
be compared with those of the original MBPP of 974 or 500. ``mbpp`` is scored on the base tests,
``mbpp_plus`` on both sets of tests. Example document::

    {"task_id": "Mbpp/2", "entry_point": "similar_elements", "canonical_solution": "…", "atol": 0,
     "prompt": "\\"\\"\\"\\nWrite a function to find the shared elements …", "base_input": "[[…", "plus_input": "[[…"}

Inputs that JSON cannot hold (tuples, sets, complex numbers) are made from the listed ones by EvalPlus, when a
program is checked. Three functions return match objects; of those EvalPlus checks only that they are not None.
"""

from __future__ import annotations

from dlmgrid.workers.benchmarks.benchmark import Benchmark
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.evalplus_set import COLUMNS, evalplus_benchmark, evalplus_scorer

RELEASE = "MbppPlus v0.2.0"
MBPP_PLUS = DataFile(
    path="evalplus/MbppPlus-v0.2.0.jsonl",
    columns=COLUMNS,
    num_rows=378,
    content_digest="68f20811f889551793be4be3bb2b61ea7ae6d133933cc3adf83eef097cac9acb",
)


def _benchmark(name: str, title: str, *, plus: bool) -> Benchmark:
    return evalplus_benchmark(
        name=name,
        title=title,
        release=RELEASE,
        file=MBPP_PLUS,
        plus=plus,
        prompt_version="evalplus-mbpp-instruct-0.3.1",
        scorers=(evalplus_scorer("evalplus", RELEASE, plus, "EvalPlus' verdict unchanged"),),
        exceptions="none known",
    )


MBPP = _benchmark("mbpp", "MBPP (EvalPlus' 378 cleaned tasks, base tests)", plus=False)
MBPP_PLUS_BENCHMARK = _benchmark("mbpp_plus", "MBPP+ (base and extra tests)", plus=True)
