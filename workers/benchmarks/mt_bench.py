"""MT-Bench, first turn only: 80 open questions in 8 categories.

The second turn would need the answer to the first, so it is left out: one prompt an item, whatever the method
answers. Example document::

    {"question_id": 81, "category": "writing"}
"""

from __future__ import annotations

from pathlib import Path

from dlmgrid.workers.benchmarks.data import load_rows
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.generation_set import generation_set
from dlmgrid.workers.items import Item

MT_BENCH_QUESTIONS = DataFile(
    path="mt_bench/question.jsonl",
    columns=("question_id", "category", "turns"),
    num_rows=80,
    content_digest="ee7d14bbd27a0d8f77ae0e7a7a779b224cf588aee35de223c5a1e29c34189b8d",
    github=(
        "lm-sys/FastChat",
        "0e6d3e4beaab66f4d3f93db72541a4abab8af28d",
        "fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
)


def _load(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    return [
        Item(
            item_id=f"mt_bench/{row['question_id']}",
            messages=[{"role": "user", "content": row["turns"][0]}],
            document={name: row[name] for name in ("question_id", "category")},
        )
        for row in load_rows(MT_BENCH_QUESTIONS, data)[:limit]
    ]


MT_BENCH = generation_set(
    name="mt_bench",
    title="MT-Bench, first turn only",
    prompt="the first turn as the user turn; the second turn is not asked",
    prompt_version="mt-bench-first-turn-1",
    gen_length=512,
    why_not_scored="MT-Bench's score is a judge model's opinion of two turns",
    loader=_load,
    files=(MT_BENCH_QUESTIONS,),
)
