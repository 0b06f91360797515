"""What HumanEval(+) and MBPP(+) share: EvalPlus' chat prompt, its data files, and the words about its scoring.

The prompt is the one ``evalplus.codegen`` gives to instruction-tuned models: the user turn asks for a
self-contained script and shows the problem in a code fence; the assistant turn is opened with EvalPlus'
sentence and an open ``python`` fence, so the answer starts with code. It is the protocol behind the numbers
that papers report "with EvalPlus", and it does not depend on a model's habit of opening a fence. The opened
part belongs to the prompt (``assistant_prefix``), not to the answer.
"""

from __future__ import annotations

import json
from pathlib import Path

from dlmgrid.workers.benchmarks.benchmark import Benchmark, Scorer, package_version
from dlmgrid.workers.benchmarks.data import load_rows
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.items import Item

COLUMNS = ("task_id", "prompt", "entry_point", "canonical_solution", "base_input", "plus_input", "atol")
# Raised whenever the solution made from a text can change: it is part of the scorers' version.
POSTPROCESS_VERSION = 2
# The only task whose verdict the scorer ``evalplus-repaired`` changes.
REPAIRED_TASKS = ("HumanEval/32",)

INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem "
    "in a markdown code block:"
)
RESPONSE = (
    "Below is a Python script with a self-contained function that solves the problem "
    "and passes corresponding tests:"
)


def ask_for_program(problem: str) -> tuple[str, str]:
    """EvalPlus' user turn for a problem, and how the assistant's turn opens."""
    return f"{INSTRUCTION}\n```\n{problem.strip()}\n```\n", f"{RESPONSE}\n```python\n"


def load_tasks(source: DataFile, data: str | Path | None, limit: int | None, *, plus: bool) -> list[Item]:
    """Items of an EvalPlus release. Test inputs are JSON text, so that they reach EvalPlus unchanged;
    ``plus_input`` is None unless ``plus``. Raises InputError as :func:`load_rows` does.
    """
    items = []
    for row in load_rows(source, data)[:limit]:
        document = {
            **{
                name: row[name] for name in ("task_id", "prompt", "entry_point", "canonical_solution", "atol")
            },
            "base_input": json.dumps(row["base_input"]),
            "plus_input": json.dumps(row["plus_input"]) if plus else None,
        }
        asked, prefix = ask_for_program(row["prompt"])
        messages = [{"role": "user", "content": asked}]
        items.append(
            Item(item_id=row["task_id"], messages=messages, assistant_prefix=prefix, document=document)
        )
    return items


def evalplus_scorer(name: str, release: str, plus: bool, summary: str) -> Scorer:
    """A scorer whose version names EvalPlus, the release of the tests, and our extraction."""
    return Scorer(
        name=name,
        metrics=("pass@1,base", "pass@1,plus") if plus else ("pass@1,base",),
        runs_code=True,
        summary=summary,
        version=lambda: (
            f"evalplus {package_version('evalplus')}, {release}, postprocess {POSTPROCESS_VERSION}"
        ),
    )


def evalplus_benchmark(
    *,
    name: str,
    title: str,
    release: str,
    file: DataFile,
    plus: bool,
    prompt_version: str,
    scorers: tuple[Scorer, ...],
    exceptions: str,
) -> Benchmark:
    """A benchmark over ``file``, scored on the base tests and, with ``plus``, on EvalPlus' own."""

    def load(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
        return load_tasks(file, data, limit, plus=plus)

    return Benchmark(
        name=name,
        title=title,
        source=f"EvalPlus release {release}, {'base and plus' if plus else 'base'} tests",
        chat=True,
        prompt="EvalPlus' instruct prompt; the assistant turn opens with its sentence and a code fence",
        default_gen_length=512,
        max_fewshot=0,
        stop="the model's stop token or the generation length",
        extraction=(
            "the first stretch between code fences that defines the function (the prompt has opened the first "
            "one); else the answer taken as the body that continues the prompt; else the longest valid Python "
            "in the text"
        ),
        postprocessing=(
            "cut at end-of-text strings, tabs to 4 spaces, EvalPlus' sanitize (what the function needs and "
            "nothing else), with the generators, procedures, decorated functions and multiple assignments that "
            "the function uses and sanitize drops; then the imports and helper functions of the prompt that the "
            "answer leaves out are put before it"
        ),
        scorers=scorers,
        scoring="dlmgrid.workers.benchmarks.evalplus_check",
        versions=lambda num_fewshot: f"{prompt_version}/chat/0-shot",
        loader=load,
        files=(file,),
        exceptions=exceptions,
    )
