"""Public training splits that drafters may learn from, decoded and never scored.

    gsm8k_train   GSM8K's train split, asked as ``gsm8k`` asks
    math_train    problems of MATH's train split with numeric answers, asked as ``math500`` asks
    mbpp_train    MBPP's tasks 810 to 974, asked as ``mbpp`` asks: MBPP+ ends at 809, so none of them is scored
    chat_train    Alpaca-style requests, as chat

Example documents::

    {"split": "train"}
"""

from __future__ import annotations

from pathlib import Path

from dlmgrid.workers.benchmarks.benchmark import Benchmark, Loader
from dlmgrid.workers.benchmarks.data import load_rows
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.evalplus_set import ask_for_program
from dlmgrid.workers.benchmarks.generation_set import generation_set
from dlmgrid.workers.benchmarks.gsm8k import GSM8K_TRAIN, question_turn
from dlmgrid.workers.benchmarks.math500 import problem_turn
from dlmgrid.workers.items import Item

FIRST_MBPP_TASK = 810
"""MBPP+ holds tasks up to 809; the test range of MBPP is 11 to 510."""

MATH_NUMERIC = DataFile(
    path="math/math_numeric_3k.jsonl",
    columns=("question", "unique_id"),
    num_rows=3000,
    content_digest="86d710436c804d1d3d48957259c753eeb55752e9b7bf284b37075df879d75a23",
    github=(
        "yukangZhuu/basic_evaluator",
        "a85b6686ee9c716a69ca865ef77f408a29e3d5c2",
        "data/math_numeric_3k.jsonl",
    ),
)
MBPP_TASKS = DataFile(
    path="mbpp/mbpp.jsonl",
    columns=("task_id", "text", "test_list"),
    num_rows=974,
    content_digest="94c0f7c1fe3765da562c1e6bf0d357210714b29ff007b60fc9ce590200e15e8e",
    github=(
        "deepseek-ai/DeepSeek-Coder",
        "2f9fd85927c669dae3c0fbb2d607274023af243e",
        "Evaluation/MBPP/data/mbpp.jsonl",
    ),
)
ALPACA_SAMPLE = DataFile(
    path="alpaca/alpaca_en_demo_999.json",
    columns=("instruction", "input"),
    num_rows=999,
    content_digest="a753dac9130cf73b518a9e65f11940c53d313805bcc4e9bc5f78b9fabf49a265",
    github=(
        "hiyouga/LLaMA-Factory",
        "ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30",
        "data/alpaca_en_demo.json",
    ),
)


def _gsm8k(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    rows = load_rows(GSM8K_TRAIN, data)[:limit]
    return [_item(f"gsm8k-train/{index}", question_turn(row["question"])) for index, row in enumerate(rows)]


def _math(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    rows = [row for row in load_rows(MATH_NUMERIC, data) if row["unique_id"].startswith("train/")]
    return [_item(f"math/{row['unique_id']}", problem_turn(row["question"])) for row in rows[:limit]]


def _mbpp(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    rows = [row for row in load_rows(MBPP_TASKS, data) if row["task_id"] >= FIRST_MBPP_TASK]
    items = []
    for row in rows[:limit]:
        asked, prefix = ask_for_program(f'"""\n{row["text"]}\n{row["test_list"][0]}\n"""')
        items.append(_item(f"mbpp-train/{row['task_id']}", asked, prefix))
    return items


def _chat(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    asked: dict[str, int] = {}
    for index, row in enumerate(load_rows(ALPACA_SAMPLE, data)):
        asked.setdefault("\n\n".join(filter(None, (row["instruction"], row["input"]))), index)
    return [_item(f"chat-train/{index}", text) for text, index in list(asked.items())[:limit]]


def _item(item_id: str, asked: str, prefix: str = "") -> Item:
    messages = [{"role": "user", "content": asked}]
    return Item(item_id=item_id, messages=messages, assistant_prefix=prefix, document={"split": "train"})


def _training_set(
    name: str, title: str, prompt: str, version: str, loader: Loader, file: DataFile
) -> Benchmark:
    return generation_set(
        name=name,
        title=title,
        prompt=prompt,
        prompt_version=version,
        gen_length=256,
        why_not_scored="a training split that drafters learn from",
        loader=loader,
        files=(file,),
        calibration=True,
    )


GSM8K_TRAIN_SET = _training_set(
    "gsm8k_train",
    "GSM8K (train), for calibration",
    "as gsm8k, zero-shot",
    "gsm8k-train-1",
    _gsm8k,
    GSM8K_TRAIN,
)
MATH_TRAIN_SET = _training_set(
    "math_train",
    "MATH (train, numeric answers), for calibration",
    "as math500, zero-shot",
    "math-train-1",
    _math,
    MATH_NUMERIC,
)
MBPP_TRAIN_SET = _training_set(
    "mbpp_train",
    "MBPP tasks 810 to 974, for calibration",
    "EvalPlus' instruct prompt of the text and the first test, as mbpp",
    "mbpp-train-1",
    _mbpp,
    MBPP_TASKS,
)
CHAT_TRAIN_SET = _training_set(
    "chat_train",
    "Alpaca-style requests, for calibration",
    "instruction and input as the user turn",
    "chat-train-1",
    _chat,
    ALPACA_SAMPLE,
)
