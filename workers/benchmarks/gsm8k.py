"""GSM8K, with the prompts of lm-eval's task ``gsm8k`` (version 3) as chat, or the bare question as chat.

Example document::

    {"question": "A robe takes 2 bolts of blue fiber and half that much white fiber. …",
     "answer": "It takes 2/2=<<2/2=1>>1 bolt of white fiber\\n…\\n#### 3"}

``gsm8k`` renders what ``lm_eval --tasks gsm8k --apply_chat_template`` renders: the user turn is
``Question: …\\nAnswer:``; few-shot examples are earlier turns of the chat (lm-eval's default under a chat
template), drawn from the train split by lm-eval's sampler with its default seed. The papers' setting is
zero-shot. ``gsm8k_question`` asks the question alone: the form on which chat models are usually tuned. Both
are rendered here without importing lm-eval; a test holds them against lm-eval's own rendering.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from dlmgrid.workers.benchmarks.benchmark import Benchmark
from dlmgrid.workers.benchmarks.data import load_rows
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.lm_eval_catalog import GSM8K_TASK
from dlmgrid.workers.benchmarks.lm_eval_set import lm_eval_benchmark, stop_policy
from dlmgrid.workers.items import Item

GSM8K_REVISION = "e53f048856ff4f594e959d75785d2c2d37b678ee"
GSM8K_TEST = DataFile(
    path="gsm8k/test.jsonl",
    columns=("question", "answer"),
    num_rows=1319,
    content_digest="bcf98c509c975fc0fa0c7c615c6a1a6611b85b92385534672a1d6bc3a0b3faf4",
    hub=("openai/gsm8k", "main", "test", GSM8K_REVISION),
)
GSM8K_TRAIN = DataFile(
    path="gsm8k/train.jsonl",
    columns=("question", "answer"),
    num_rows=7473,
    content_digest="7872d7430bd1f3904adfb70339181a42888060d417bec111f8475c7e5ff838a1",
    hub=("openai/gsm8k", "main", "train", GSM8K_REVISION),
)
# lm-eval's --seed is 0,1234,1234,1234: the last one draws few-shot examples, and it is not our decoding seed.
FEWSHOT_SEED = 1234


def question_turn(question: str) -> str:
    """The user turn that asks one question."""
    return f"Question: {question}\nAnswer:"


def _load(data: str | Path | None, limit: int | None, num_fewshot: int, *, bare: bool) -> list[Item]:
    documents = load_rows(GSM8K_TEST, data)[:limit]
    examples = load_rows(GSM8K_TRAIN, data) if num_fewshot else []
    # lm-eval draws examples document after document from one generator, so item i depends on all before it.
    generator = Random(FEWSHOT_SEED)
    items = []
    for index, document in enumerate(documents):
        messages = []
        for example in generator.sample(examples, num_fewshot) if num_fewshot else []:
            messages.append({"role": "user", "content": question_turn(example["question"])})
            messages.append({"role": "assistant", "content": example["answer"]})
        question = document["question"]
        messages.append({"role": "user", "content": question if bare else question_turn(question)})
        items.append(Item(item_id=f"gsm8k/{index}", messages=messages, document=document))
    return items


_EXTRACTION = (
    "Two extractors, reported side by side under lm-eval's names. strict-match: the first `#### N`. "
    "flexible-extract: the last number in the text. exact_match then ignores case, commas, $, text before "
    "`#### `, and a final dot; 29.0 and 29 differ, as they do in lm-eval."
)


def _benchmark(
    name: str, title: str, *, bare: bool, prompt: str, max_fewshot: int, prompt_version: str = ""
) -> Benchmark:
    def load(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
        return _load(data, limit, num_fewshot, bare=bare)

    return lm_eval_benchmark(
        GSM8K_TASK,
        name=name,
        title=title,
        source=f"openai/gsm8k, main, test, revision {GSM8K_REVISION}",
        prompt=prompt,
        prompt_version=prompt_version,
        gen_length=256,
        max_fewshot=max_fewshot,
        stop=stop_policy("`Question:`, `</s>`, `<|im_end|>`"),
        extraction=_EXTRACTION,
        scores="its two filters, then its exact_match",
        loader=load,
        files=(GSM8K_TEST,) if bare else (GSM8K_TEST, GSM8K_TRAIN),
    )


GSM8K = _benchmark(
    "gsm8k",
    "GSM8K (test)",
    bare=False,
    prompt=(
        "lm-eval's gsm8k: the user turn is `Question: …\\nAnswer:`; few-shot examples from the train split, "
        f"drawn with lm-eval's sampler and seed {FEWSHOT_SEED}, are earlier turns"
    ),
    max_fewshot=32,
)
GSM8K_QUESTION = _benchmark(
    "gsm8k_question",
    "GSM8K (test), question alone",
    bare=True,
    prompt="the question alone as the user turn, zero-shot",
    prompt_version="gsm8k-question-1",
    max_fewshot=0,
)
