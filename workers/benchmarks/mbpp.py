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

from pathlib import Path

from dlmgrid.workers.benchmarks import evalplus_set
from dlmgrid.workers.benchmarks.benchmark import Benchmark
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.evalplus_set import evalplus_scorer, load_tasks
from dlmgrid.workers.items import Item

RELEASE = "MbppPlus v0.2.0"
MBPP_PLUS = DataFile(
    path="evalplus/MbppPlus-v0.2.0.jsonl",
    columns=evalplus_set.COLUMNS,
    num_rows=378,
    content_digest="68f20811f889551793be4be3bb2b61ea7ae6d133933cc3adf83eef097cac9acb",
)
_SUMMARY = "EvalPlus' verdict unchanged"


def _load_base(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    return load_tasks(MBPP_PLUS, data, limit, plus=False)


def _load_plus(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    return load_tasks(MBPP_PLUS, data, limit, plus=True)


MBPP = Benchmark(
    name="mbpp",
    title="MBPP (EvalPlus' 378 cleaned tasks, base tests)",
    source=f"EvalPlus release {RELEASE}, base tests",
    chat=True,
    prompt=evalplus_set.PROMPT,
    default_gen_length=512,
    max_fewshot=0,
    stop=evalplus_set.STOP,
    extraction=evalplus_set.EXTRACTION,
    postprocessing=evalplus_set.POSTPROCESSING,
    scorers=(evalplus_scorer("evalplus", RELEASE, ("pass@1,base",), _SUMMARY),),
    scoring=evalplus_set.SCORING,
    versions=lambda num_fewshot: "evalplus-mbpp-instruct-0.3.1/chat/0-shot",
    loader=_load_base,
    files=(MBPP_PLUS,),
)

MBPP_PLUS_BENCHMARK = Benchmark(
    name="mbpp_plus",
    title="MBPP+ (base and extra tests)",
    source=f"EvalPlus release {RELEASE}, base and plus tests",
    chat=True,
    prompt=MBPP.prompt,
    default_gen_length=512,
    max_fewshot=0,
    stop=evalplus_set.STOP,
    extraction=evalplus_set.EXTRACTION,
    postprocessing=evalplus_set.POSTPROCESSING,
    scorers=(evalplus_scorer("evalplus", RELEASE, ("pass@1,base", "pass@1,plus"), _SUMMARY),),
    scoring=evalplus_set.SCORING,
    versions=MBPP.versions,
    loader=_load_plus,
    files=(MBPP_PLUS,),
)
