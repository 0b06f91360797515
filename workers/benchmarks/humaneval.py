"""HumanEval and HumanEval+, with EvalPlus' own chat prompt, scored by EvalPlus.

The prompt is the one ``evalplus.codegen`` gives to instruction-tuned models: the user turn asks for a
self-contained script and shows the signature and docstring in a code fence; the assistant turn is opened with
EvalPlus' sentence and an open ``python`` fence, so the answer starts with code. It is the protocol behind the
numbers that papers report "with EvalPlus", and it does not depend on a model's habit of opening a fence. The
opened part belongs to the prompt (``assistant_prefix``), not to the answer.

Both benchmarks ask the same 164 questions of HumanEval+ v0.1.10, whose prompts equal HumanEval's but for the
place of one import (HumanEval/115). ``humaneval`` is scored on the base tests, ``humaneval_plus`` on both
sets of tests. Example document (test inputs are JSON text, so that they reach EvalPlus unchanged)::

    {"task_id": "HumanEval/0", "entry_point": "has_close_elements", "prompt": "from typing import List…",
     "canonical_solution": "…", "atol": 0, "base_input": "[[[1.0, 2.0, …", "plus_input": "[[…"}
"""

from __future__ import annotations

import json
from pathlib import Path

from dlmgrid.workers.benchmarks.benchmark import Benchmark, Scorer, package_version
from dlmgrid.workers.benchmarks.data import HUMANEVAL_PLUS, load_rows
from dlmgrid.workers.items import Item

RELEASE = "HumanEvalPlus v0.1.10"
# Raised whenever the solution made from a text can change: it is part of the scorers' version.
POSTPROCESS_VERSION = 1

INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem "
    "in a markdown code block:"
)
RESPONSE = (
    "Below is a Python script with a self-contained function that solves the problem "
    "and passes corresponding tests:"
)
# The only task whose verdict the second scorer changes.
REPAIRED_TASKS = ("HumanEval/32",)


def _load(data: str | Path | None, limit: int | None, *, plus: bool) -> list[Item]:
    items = []
    for row in load_rows(HUMANEVAL_PLUS, data)[:limit]:
        document = {
            **{
                name: row[name] for name in ("task_id", "prompt", "entry_point", "canonical_solution", "atol")
            },
            "base_input": json.dumps(row["base_input"]),
            "plus_input": json.dumps(row["plus_input"]) if plus else None,
        }
        messages = [{"role": "user", "content": f"{INSTRUCTION}\n```\n{row['prompt'].strip()}\n```\n"}]
        prefix = f"{RESPONSE}\n```python\n"
        items.append(
            Item(item_id=row["task_id"], messages=messages, assistant_prefix=prefix, document=document)
        )
    return items


def _load_base(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    return _load(data, limit, plus=False)


def _load_plus(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    return _load(data, limit, plus=True)


def _scorer_version() -> str:
    return f"evalplus {package_version('evalplus')}, {RELEASE}, postprocess {POSTPROCESS_VERSION}"


def _scorers(metrics: tuple[str, ...]) -> tuple[Scorer, ...]:
    return (
        Scorer(
            name="evalplus",
            metrics=metrics,
            runs_code=True,
            summary="EvalPlus' verdict unchanged. It fails every solution of HumanEval/32 (EvalPlus 0.3.1)",
            version=_scorer_version,
        ),
        Scorer(
            name="evalplus-repaired",
            metrics=metrics,
            runs_code=True,
            summary="EvalPlus' verdict, with the oracle of HumanEval/32 counted as it was meant",
            version=_scorer_version,
        ),
    )


_EXTRACTION = (
    "the first stretch between code fences that defines the function (the prompt has opened the first one); "
    "else the answer taken as the body that continues the prompt; else the longest valid Python in the text"
)
_POSTPROCESSING = (
    "cut at end-of-text strings, tabs to 4 spaces, EvalPlus' sanitize (what the function needs and nothing "
    "else), then the imports and helper functions of the prompt that the answer leaves out are put before it"
)
_STOP = "the model's stop token or the generation length"


HUMANEVAL = Benchmark(
    name="humaneval",
    title="HumanEval (base tests)",
    source=f"EvalPlus release {RELEASE}, base tests",
    chat=True,
    prompt="EvalPlus' instruct prompt; the assistant turn opens with its sentence and a code fence",
    default_gen_length=512,
    max_fewshot=0,
    stop=_STOP,
    extraction=_EXTRACTION,
    postprocessing=_POSTPROCESSING,
    scorers=_scorers(("pass@1,base",)),
    scoring="dlmgrid.workers.benchmarks.evalplus_check",
    versions=lambda num_fewshot: "evalplus-humaneval-instruct-0.3.1/chat/0-shot",
    loader=_load_base,
)

HUMANEVAL_PLUS_BENCHMARK = Benchmark(
    name="humaneval_plus",
    title="HumanEval+ (base and extra tests)",
    source=f"EvalPlus release {RELEASE}, base and plus tests",
    chat=True,
    prompt=HUMANEVAL.prompt,
    default_gen_length=512,
    max_fewshot=0,
    stop=_STOP,
    extraction=_EXTRACTION,
    postprocessing=_POSTPROCESSING,
    scorers=_scorers(("pass@1,base", "pass@1,plus")),
    scoring="dlmgrid.workers.benchmarks.evalplus_check",
    versions=HUMANEVAL.versions,
    loader=_load_plus,
)
