"""LiveCodeBench, prompts only: contest problems of two windows, asked as LiveCodeBench asks chat models.

The first window is 2024-08-03 to 2025-01-04 (279 problems), the second 2025-02-01 to 2025-04-06 (131); no
problem is in both. The source wraps each prompt in ChatML and opens a thought; the wrapping is taken off, so
that every model gets its own template. The problems' tests are not part of the source. Example document::

    {"question_id": "abc365_b", "contest_date": "2024-08-03T00:00:00"}
"""

from __future__ import annotations

from pathlib import Path

from dlmgrid.workers.benchmarks.data import load_rows
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.generation_set import generation_set
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item

_COLUMNS = ("question_id", "contest_date", "prompt")
_REPOSITORY, _COMMIT = "Spencerx/PromptCoT", "884b95044ef3fd08c30e8a225b4c9df7ab32d029"
LCB_V5 = DataFile(
    path="livecodebench/lcb_v5_prompts.jsonl",
    columns=_COLUMNS,
    num_rows=279,
    content_digest="757308ba1efdf7f958cf2600f3c46281c8e60085d404fbc7be9765af1192f50d",
    github=(_REPOSITORY, _COMMIT, "data/promptcot2_lcb_v5_test.jsonl"),
)
LCB_V6 = DataFile(
    path="livecodebench/lcb_v6_prompts.jsonl",
    columns=_COLUMNS,
    num_rows=131,
    content_digest="146d7c2cbea87a1b1f4e79409669a5869c63a67b48c70ec4a52f661d2752f0ac",
    github=(_REPOSITORY, _COMMIT, "data/promptcot2_lcb_v6_test.jsonl"),
)
_BEFORE, _AFTER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n"


def _load(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    items = []
    for row in [*load_rows(LCB_V5, data), *load_rows(LCB_V6, data)][:limit]:
        item_id = f"livecodebench/{row['question_id']}"
        wrapped = row["prompt"]
        if not (wrapped.startswith(_BEFORE) and wrapped.endswith(_AFTER)):
            raise InputError(
                f"{item_id}: the prompt is not wrapped in ChatML as in the source; fetch it again"
            )
        question = wrapped.removeprefix(_BEFORE).removesuffix(_AFTER).rstrip("\n")
        document = {name: row[name] for name in ("question_id", "contest_date")}
        messages = [{"role": "user", "content": question}]
        items.append(Item(item_id=item_id, messages=messages, document=document))
    return items


LIVECODEBENCH = generation_set(
    name="livecodebench",
    title="LiveCodeBench prompts, 2024-08 to 2025-01 and 2025-02 to 2025-04",
    prompt="LiveCodeBench's request and the problem as the user turn, zero-shot",
    prompt_version="livecodebench-prompts-1",
    gen_length=1024,
    why_not_scored="the source has the problems, not their tests",
    loader=_load,
    files=(LCB_V5, LCB_V6),
)
