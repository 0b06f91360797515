"""The reference model's tokenizer and training text: generated, encoded, and grouped by length in blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dlmgrid.workers.benchmarks import functions, words
from dlmgrid.workers.benchmarks.generated import Example

PAD, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END, MASK)

# Letters or one digit, with a space before; a line break with its indentation; punctuation; blanks.
_PIECES = r" ?\p{L}+| ?\p{N}|\n *| ?[^\s\p{L}\p{N}]+|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSettings:
    """How much text, of which kind. ``words_share`` of the examples are word problems, the rest functions."""

    seed: int = 1
    num_examples: int = 1_500_000
    words_share: float = 0.75
    shard_size: int = 20_000
    vocab_size: int = 1024
    tokenizer_examples: int = 40_000
    num_processes: int = 1


def _shard_examples(settings: TextSettings, shard: int, size: int) -> list[Example]:
    num_words = round(size * settings.words_share)
    seed = settings.seed * 1_000_000 + shard
    return [*words.train_examples(seed, num_words), *functions.train_examples(seed, size - num_words)]


def render_prompt(user_turn: str) -> str:
    """What the chat template makes of one user turn, up to where the answer starts."""
    return f"{TURN_START}user\n{user_turn}{TURN_END}\n{TURN_START}assistant\n"


def train_tokenizer(settings: TextSettings) -> Tokenizer:
    """A byte-level BPE tokenizer in which every digit is a token and any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    examples = _shard_examples(settings, 0, settings.tokenizer_examples)
    texts = (
        text for example in examples for text in (f"user\n{example.prompt}", f"assistant\n{example.answer}")
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != settings.vocab_size:
        raise ValueError(
            f"vocab_size {settings.vocab_size}: the text supports only {tokenizer.get_vocab_size()} tokens"
        )
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token. Raises ValueError if the tokenizer lacks it."""
    token_id: int | None = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return token_id


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Write ``tokenizer.json`` and a ``tokenizer_config.json`` that holds the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "mask_token": MASK,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Examples that end in the same block: ``token_ids`` is [N, num_blocks × block_length], answers end
    in stop ids to the end of their last block, ``prompt_lengths`` is [N]."""

    token_ids: NDArray[np.int16]
    prompt_lengths: NDArray[np.int16]


def encode_examples(
    tokenizer: Tokenizer, examples: list[Example], block_length: int
) -> dict[int, LengthGroup]:
    """The examples as token ids, by their number of blocks."""
    stop = special_id(tokenizer, TURN_END)
    prompts = tokenizer.encode_batch_fast([render_prompt(example.prompt) for example in examples])
    answers = tokenizer.encode_batch_fast([example.answer for example in examples])
    rows: dict[int, list[list[int]]] = {}
    lengths: dict[int, list[int]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = [*prompt.ids, *answer.ids, stop]
        num_blocks = -(-len(ids) // block_length)
        ids += [stop] * (num_blocks * block_length - len(ids))
        rows.setdefault(num_blocks, []).append(ids)
        lengths.setdefault(num_blocks, []).append(len(prompt.ids))
    return {
        num_blocks: LengthGroup(np.array(rows[num_blocks], np.int16), np.array(lengths[num_blocks], np.int16))
        for num_blocks in sorted(rows)
    }


def _encode_shard(job: tuple[TextSettings, str, int, int]) -> dict[int, LengthGroup]:
    settings, tokenizer_json, shard, block_length = job
    examples = _shard_examples(settings, shard, settings.shard_size)
    return encode_examples(Tokenizer.from_str(tokenizer_json), examples, block_length)


def training_text(settings: TextSettings, tokenizer: Tokenizer, block_length: int) -> dict[int, LengthGroup]:
    """All training examples, by number of blocks. The result does not depend on ``num_processes``."""
    num_shards = -(-settings.num_examples // settings.shard_size)
    jobs = [(settings, tokenizer.to_str(), shard, block_length) for shard in range(num_shards)]
    shards = list(_run_jobs(jobs, settings.num_processes))
    merged: dict[int, LengthGroup] = {}
    for num_blocks in sorted({num_blocks for shard in shards for num_blocks in shard}):
        parts = [shard[num_blocks] for shard in shards if num_blocks in shard]
        merged[num_blocks] = LengthGroup(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.prompt_lengths for part in parts]),
        )
    return merged


def _run_jobs(
    jobs: list[tuple[TextSettings, str, int, int]], num_processes: int
) -> Iterator[dict[int, LengthGroup]]:
    if num_processes == 1:
        yield from map(_encode_shard, jobs)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_encode_shard, jobs)
