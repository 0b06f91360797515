"""MATH-500, with the prompts of lm-eval's task ``minerva_math500`` (version 3.1) as chat.

Example document::

    {"problem": "Convert the point $(0,3)$ …", "solution": "We have that … $\\\\boxed{(3, \\\\pi/2)}.$",
     "unique_id": "test/precalculus/807.json"}

The user turn is ``Problem:\\n…\\n\\nSolution:``. lm-eval's few-shot setting is four worked problems, always the
same (those of the Minerva paper, Lewkowycz et al. 2022, appendix D), as earlier turns of the chat; their text
is in ``minerva_fewshot.jsonl`` beside this file and a test holds it against lm-eval's. The papers' setting is
zero-shot.

The headline is ``math_verify``: it takes the last boxed or stated answer and compares as mathematics.
``exact_match`` wants Minerva's sentence ("Final Answer: The final answer is $…$. I hope it is correct."), so
it is 0 for an answer that is only boxed, the gold solutions included.
"""

from __future__ import annotations

import json
from pathlib import Path

from dlmgrid.workers.benchmarks.data import load_rows
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.lm_eval_catalog import MATH500_TASK
from dlmgrid.workers.benchmarks.lm_eval_set import lm_eval_benchmark, stop_policy
from dlmgrid.workers.items import Item

MATH500_TEST = DataFile(
    path="math/math500_test.jsonl",
    columns=("problem", "solution", "answer", "subject", "level", "unique_id"),
    num_rows=500,
    content_digest="f0e14f6a55023938003783525bbf1247f233aa72434e6ff701f0b5776aacafca",
    github=(
        "hkust-nlp/simpleRL-reason",
        "cf1c7858bfc145a27aa733e75d930d34f0d318a6",
        "examples/simplelr_math_eval/data/math500/test.jsonl",
    ),
)
FEWSHOT_FILE = Path(__file__).with_name("minerva_fewshot.jsonl")


def fewshot_examples() -> list[dict[str, str]]:
    """The four worked problems, ``problem`` and ``solution``."""
    return [json.loads(line) for line in FEWSHOT_FILE.read_text(encoding="utf-8").splitlines()]


def problem_turn(problem: str) -> str:
    """The user turn that asks one problem."""
    return f"Problem:\n{problem}\n\nSolution:"


def _problem_turn(problem: str) -> dict[str, str]:
    return {"role": "user", "content": problem_turn(problem)}


def _load(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    turns = []
    for example in fewshot_examples()[:num_fewshot]:
        turns.append(_problem_turn(example["problem"]))
        turns.append({"role": "assistant", "content": example["solution"]})
    return [
        Item(
            item_id=f"math500/{index}",
            messages=[*turns, _problem_turn(row["problem"])],
            document={name: row[name] for name in ("problem", "solution", "unique_id")},
        )
        for index, row in enumerate(load_rows(MATH500_TEST, data)[:limit])
    ]


MATH500 = lm_eval_benchmark(
    MATH500_TASK,
    name="math500",
    title="MATH-500",
    source=f"OpenAI's 500 test problems of MATH: {MATH500_TEST.origin}",
    prompt=(
        "lm-eval's minerva_math500: the user turn is `Problem:\\n…\\n\\nSolution:`; few-shot examples are the "
        "four of the Minerva paper, as earlier turns"
    ),
    gen_length=512,
    max_fewshot=4,
    stop=stop_policy("`Problem:`"),
    extraction=(
        "math_verify (headline): the last boxed or stated LaTeX or plain expression. exact_match: what stands "
        "in Minerva's sentence `Final Answer: The final answer is $…$. I hope it is correct.`"
    ),
    postprocessing="each metric's own normalisation (units, percent, fractions, intervals)",
    scores="math_verify compares as mathematics, exact_match as Minerva does",
    also=("math-verify", "sympy"),
    loader=_load,
    files=(MATH500_TEST,),
    exceptions=(
        "none known. A fault of the scorer that answers can meet: math_verify 0.9 finds no number in \\boxed{20\\%}, "
        "and takes another one of the text where there is one"
    ),
)
