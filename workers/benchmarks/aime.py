"""AIME 2024 and AIME 2025 (I and II of each year, 30 problems), with the prompts of lm-eval's ``aime24`` and
``aime25`` (version 0.0) as chat.

Example documents, with the column names of lm-eval's tasks::

    {"Problem": "Every morning Aya goes for a $9$-kilometer-long walk …", "Answer": "204"}
    {"problem": "Find the sum of all integer bases $b>9$ …", "answer": "70"}

The user turn is ``Question: …\\nAnswer:``. lm-eval's setting is zero-shot. Answers are integers from 0 to 999;
the source's leading zeros ("023") are dropped, as in the copy that lm-eval names, since its exact_match
compares text. The 2025 source ends each problem with a request to reason and to box the answer, which is no
part of the problem and is taken off.
"""

from __future__ import annotations

from pathlib import Path

from dlmgrid.workers.benchmarks.benchmark import Benchmark, Loader
from dlmgrid.workers.benchmarks.data import load_rows
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.lm_eval_catalog import AIME24_TASK, AIME25_TASK, LmEvalTask
from dlmgrid.workers.benchmarks.lm_eval_set import lm_eval_benchmark, stop_policy
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item

AIME_2024 = DataFile(
    path="aime/aime2024.jsonl",
    columns=("id", "problem", "answer"),
    num_rows=30,
    content_digest="6d1fb5bf0293821b3a6cc8321e63ed46e370853d8899b059839b0c688039d212",
    github=(
        "QwenLM/Qwen2.5-Math",
        "a45202bd16f1ec06f433442dc1152d0074773465",
        "evaluation/data/aime24/test.jsonl",
    ),
)
AIME_2025 = DataFile(
    path="aime/aime2025.jsonl",
    columns=("prompt", "answer"),
    num_rows=30,
    content_digest="2e3131eaf50151494e8ee3159bd8d58635e8c84994509026f4da284d8b47ddd3",
    github=("jianzhnie/LLMEval", "66572ad3f66078c376d777866f6535d3f334b0c8", "data/aime25.jsonl"),
)
_REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def _answer(row: dict[str, object], item_id: str) -> str:
    try:
        return str(int(str(row["answer"])))
    except ValueError as error:
        raise InputError(
            f"{item_id}: the answer {row['answer']!r} is no integer; fetch the set again"
        ) from error


def _item(item_id: str, problem: str, document: dict[str, str]) -> Item:
    messages = [{"role": "user", "content": f"Question: {problem}\nAnswer:"}]
    return Item(item_id=item_id, messages=messages, document=document)


def _load_2024(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    items = []
    for index, row in enumerate(load_rows(AIME_2024, data)[:limit]):
        item_id = f"aime24/{index}"
        document = {"Problem": row["problem"], "Answer": _answer(row, item_id)}
        items.append(_item(item_id, row["problem"], document))
    return items


def _load_2025(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    items = []
    for index, row in enumerate(load_rows(AIME_2025, data)[:limit]):
        item_id = f"aime25/{index}"
        problem = row["prompt"].removesuffix(_REQUEST)
        items.append(_item(item_id, problem, {"problem": problem, "answer": _answer(row, item_id)}))
    return items


def _benchmark(task: LmEvalTask, title: str, file: DataFile, loader: Loader) -> Benchmark:
    return lm_eval_benchmark(
        task,
        name=task.name,
        title=title,
        source=file.origin,
        prompt="the user turn is `Question: …\\nAnswer:`, zero-shot, as lm-eval's",
        gen_length=2048,
        stop=stop_policy("`Question:`, `</s>`, `<|im_end|>`, `<|eot_id|>`"),
        extraction=(
            "the last box; else what stands between the first and the last `$`; else the whole text. Compared "
            "as text after lm-eval's normalisation: \\boxed{023} is not 23 there"
        ),
        scores="exact_match of the last box",
        loader=loader,
        files=(file,),
    )


AIME24 = _benchmark(AIME24_TASK, "AIME 2024, I and II", AIME_2024, _load_2024)
AIME25 = _benchmark(AIME25_TASK, "AIME 2025, I and II", AIME_2025, _load_2025)
