"""A plain evaluation of the reference model: one commit per step, no cache, no drafts, its own decode
loop."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from dlmgrid.jobs.reference_model import ModelSettings, ReferenceModel, block_causal_mask
from dlmgrid.jobs.reference_text import MASK, TURN_END, render_prompt, special_id
from dlmgrid.workers.benchmarks import functions, words
from dlmgrid.workers.items import Item

PROGRAM_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Decoded:
    """Answers cut before the stop token, and how often a commit's token was the previous pass's argmax
    there."""

    token_ids: list[list[int]]
    num_commits: int
    num_stale_hits: int
    num_ended: int

    @property
    def stale_hit_rate(self) -> float:
        return self.num_stale_hits / max(self.num_commits, 1)


@torch.inference_mode()
def decode_static(
    model: ReferenceModel,
    prompts: list[list[int]],
    *,
    gen_length: int,
    temperature: float,
    mask_token_id: int,
    stop_token_id: int,
    seed: int = 0,
) -> Decoded:
    """Static decoding of all prompts together, one commit per step and sequence.

    At temperature 0 the token is the argmax and its confidence the softmax probability; above, the token
    is sampled with fresh noise at every step and the confidence is its tempered probability. The mask
    token is never committed; a tie goes to the leftmost position. Commits of a block's first pass, for
    which there is no previous one, do not count towards the stale-token hit rate.
    """
    device = next(model.parameters()).device
    L = model.settings.block_size
    N = len(prompts)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width = math.ceil((int(lengths.max()) + gen_length) / L) * L
    ids = torch.full((N, width), mask_token_id, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    is_open = torch.arange(width, device=device)[None, :] >= lengths[:, None]
    last_block = (lengths + gen_length - 1) // L
    block = lengths // L
    first_pass = torch.ones(N, dtype=torch.bool, device=device)
    stale = torch.zeros((N, L), dtype=torch.long, device=device)
    alive = torch.arange(N, device=device)
    attention = block_causal_mask(width, L, device)
    positions = torch.arange(width, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    num_commits = num_hits = num_ended = 0
    while len(alive):
        window = block[alive, None] * L + torch.arange(L, device=device)[None, :]
        seen = int(window.max()) + 1  # no block sees a later one
        hidden = model.hidden(ids[alive, :seen], positions[:seen], attention[:seen, :seen])
        rows = hidden.gather(1, window[:, :, None].expand(-1, -1, hidden.shape[-1]))
        logits = model.logits(rows).float()
        logits[..., mask_token_id] = -torch.inf
        argmax = logits.argmax(-1)
        if temperature > 0:
            noise = torch.rand(logits.shape, device=device, generator=generator).clamp_(min=1e-20)
            logits = logits / temperature
            tokens = (logits - noise.log_().neg_().log_()).argmax(-1)
        else:
            tokens = argmax
        confidence = logits.softmax(-1).gather(-1, tokens[..., None])[..., 0]
        confidence = confidence.masked_fill(~is_open[alive].gather(1, window), -1.0)
        place = confidence.argmax(-1, keepdim=True)
        token = tokens.gather(1, place)[:, 0]
        position = window.gather(1, place)[:, 0]
        counted = ~first_pass[alive]
        num_commits += int(counted.sum())
        num_hits += int((counted & (stale[alive].gather(1, place)[:, 0] == token)).sum())
        ids[alive, position] = token
        is_open[alive, position] = False
        stale[alive] = argmax
        is_full = ~is_open[alive].gather(1, window).any(-1)
        answered = window >= lengths[alive, None]
        stopped = ((ids[alive].gather(1, window) == stop_token_id) & answered).any(-1)
        num_ended += int((is_full & stopped).sum())
        first_pass[alive] = is_full
        done = is_full & (stopped | (block[alive] == last_block[alive]))
        block[alive] += is_full.long()
        alive = alive[~done]
    answers = []
    for row, prompt in enumerate(prompts):
        answer = ids[row, len(prompt) : len(prompt) + gen_length].tolist()
        answers.append(answer[: answer.index(stop_token_id)] if stop_token_id in answer else answer)
    return Decoded(answers, num_commits, num_hits, num_ended)


_LIMITS = f"""import resource
resource.setrlimit(resource.RLIMIT_CPU, ({PROGRAM_SECONDS}, {PROGRAM_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
"""


def passes(program: str) -> bool:
    """Whether the program exits with 0, in a fresh interpreter with limits on time and memory."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-"],
            input=(_LIMITS + program).encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PROGRAM_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _score_words(texts: list[str], items: list[Item]) -> list[int]:
    return [words.score(text, item.document)[0] for text, item in zip(texts, items, strict=True)]


def _score_functions(texts: list[str], items: list[Item]) -> list[int]:
    programs = [functions.program(text, item.document) for text, item in zip(texts, items, strict=True)]
    with ThreadPoolExecutor(8) as pool:
        return [int(passed) for passed in pool.map(passes, programs)]


def evaluate(
    model: ReferenceModel, tokenizer: Tokenizer, *, num_words: int, num_functions: int, gen_length: int
) -> dict[str, Any]:
    """Held-out accuracy at T = 0 and T = 1, stale-token hit rate, share of outputs that T = 1 changes,
    lengths."""
    model.eval()
    benchmarks: tuple[tuple[str, list[Item], Callable[[list[str], list[Item]], list[int]]], ...] = (
        ("words", words.held_out_items(num_words), _score_words),
        ("functions", functions.held_out_items(num_functions), _score_functions),
    )
    result: dict[str, Any] = {"gen_length": gen_length}
    for name, items, score in benchmarks:
        turns = [item.messages[0]["content"] for item in items if item.messages]
        prompts = [tokenizer.encode(render_prompt(turn)).ids for turn in turns]
        runs = [
            decode_static(
                model,
                prompts,
                gen_length=gen_length,
                temperature=temperature,
                mask_token_id=special_id(tokenizer, MASK),
                stop_token_id=special_id(tokenizer, TURN_END),
            )
            for temperature in (0.0, 1.0)
        ]
        texts = [tokenizer.decode_batch(run.token_ids, skip_special_tokens=False) for run in runs]
        scores = [score(run_texts, items) for run_texts in texts]
        answer_lengths = [len(ids) for ids in runs[0].token_ids]
        prompt_lengths = [len(ids) for ids in prompts]
        result[name] = {
            "items": len(items),
            "accuracy_t0": sum(scores[0]) / len(items),
            "accuracy_t1": sum(scores[1]) / len(items),
            "stale_hit_rate_t0": runs[0].stale_hit_rate,
            "stale_hit_rate_t1": runs[1].stale_hit_rate,
            "changed_at_t1": sum(a != b for a, b in zip(*texts, strict=True)) / len(items),
            "ended_t0": runs[0].num_ended / len(items),
            "answer_tokens_mean": sum(answer_lengths) / len(items),
            "answer_tokens_max": max(answer_lengths),
            "prompt_tokens_mean": sum(prompt_lengths) / len(items),
            "prompt_tokens_max": max(prompt_lengths),
            "samples": [
                {"prompt": turn, "answer": text, "right": right}
                for turn, text, right in list(zip(turns, texts[0], scores[0], strict=True))[:6]
            ],
        }
    return result


def load_trained(folder: Path, device: str) -> tuple[ReferenceModel, Tokenizer]:
    """The model and tokenizer of a checkpoint that ``train_reference`` wrote, weights as fp32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = ModelSettings(**{field.name: config[field.name] for field in fields(ModelSettings)})
    model = ReferenceModel(settings)
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.to(device), Tokenizer.from_file(str(folder / "tokenizer.json"))
