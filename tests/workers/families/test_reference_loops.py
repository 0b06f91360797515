"""Whole decodes against plain loops over the oracles: token for token, step for step, pass for pass.

The loops keep no cache: every pass recomputes everything up to the end of the active block. Noise at T > 0 is the
project's own table, read at (position, commits made in the block).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.decoder import Decoder, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.drafting import none
from dlmgrid.workers.engine.engine import Engine, load_engine
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.families import get_family
from dlmgrid.workers.models.family import PublishedDecoder
from dlmgrid.workers.unit_runner import decode_settings

SEED = 5
LENGTH = 8
GEN = 16
SCALE = 0.3
"""Of the random weights: confidences then lie on both sides of the rules' thresholds."""
BOUND = 6.0
"""Of the entropies of a step under these weights, in nats: steps open one position or several."""


@dataclass
class Loop:
    """One plain decode: the canvas (-1: masked) and what happened to it."""

    config: ModelConfig
    oracle: Callable[[Tensor, Tensor], Tensor]
    prompt: list[int]
    temperature: float
    canvas: list[int] = field(default_factory=list)
    steps: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    seeds: list[tuple[int, int]] = field(default_factory=list)
    num_denoise: int = 0
    num_commit: int = 0

    def pass_over(self, start: int, end: int, *, is_causal: bool = False) -> Tensor:
        """Logits of positions ``start`` to ``end`` in a pass that ends there."""
        positions = torch.arange(end)
        if self.config.family != "nemotron":
            allowed = positions[:, None] // LENGTH >= positions[None, :] // LENGTH
        else:
            allowed = positions[:, None] >= positions[None, :]
            if not is_causal:
                allowed = allowed | (positions[:, None] >= start)
        return self.oracle(torch.tensor(self.canvas[:end]), allowed)[start:end]

    def noise(self, position: int, count: int) -> Tensor:
        table = NoiseTable(SEED)
        key = torch.tensor([table.key("item", 0)])
        at, drawn = torch.tensor([position]), torch.tensor([count])
        return table.rows(key, Stream.TOKEN, at, drawn, self.config.vocab_size)[0]

    def choose(self, logits: Tensor, position: int, count: int, temperature: float | None = None) -> int:
        temperature = self.temperature if temperature is None else temperature
        if temperature == 0:
            return int(logits.argmax())
        return int((logits / temperature + self.noise(position, count)).argmax())

    def commit(self, chosen: dict[int, int]) -> None:
        for position, token in chosen.items():
            self.canvas[position] = token
        self.steps.append(tuple(sorted(chosen.items())))

    def stopped(self, start: int) -> bool:
        """Whether a stop id at or after ``start`` has no mask before it."""
        for token in self.canvas[start:]:
            if token < 0:
                return False
            if token in self.config.stop_token_ids:
                return True
        return False

    def output(self) -> list[int]:
        out = self.canvas[len(self.prompt) :][:GEN]
        for index, token in enumerate(out):
            if token in self.config.stop_token_ids:
                return out[: index + 1]
        return out


def confidence(loop: Loop, rule: PublishedDecoder, logits: Tensor, token: int) -> float:
    if rule.confidence == "certainty":  # minus the entropy
        log_p = (logits.double() / (loop.temperature or 1.0)).log_softmax(-1).clamp_min(-700)
        return float((log_p.exp() * log_p).sum())
    temperature = loop.temperature if rule.confidence == "tempered" and loop.temperature > 0 else 1.0
    return float((logits / temperature).softmax(-1)[token])


def open_positions(rule: PublishedDecoder, sure: dict[int, float]) -> list[int]:
    """The positions that a rule fills, from the confidence of the masked ones it may fill."""
    ranked = sorted(sure, key=lambda position: (-sure[position], position))
    if rule.decoder == "static":
        return ranked[: rule.commits_per_step]
    if rule.decoder == "sequential":
        return sorted(sure)[: rule.commits_per_step]
    if rule.decoder == "entropy_bounded":
        assert rule.threshold is not None
        opened, spent = [], 0.0
        for position in ranked:
            spent += -sure[position]
            if opened and spent >= rule.threshold:
                break
            opened.append(position)
        return opened
    assert rule.decoder == "threshold" and rule.threshold is not None
    limit = rule.threshold
    if rule.comparison == "dinfer":
        limit = min(limit, sure[ranked[0]] - 1e-5)
    passing = [p for p in ranked if (sure[p] > limit if rule.comparison == "sdar" else sure[p] >= limit)]
    return passing or ranked[:1]


def block_loop(loop: Loop, rule: PublishedDecoder) -> None:
    """SDAR's and LLaDA2's generate: blocks on the grid, unshifted, a commit pass each, stop after a block."""
    num_prompt = len(loop.prompt)
    total = -(-(num_prompt + GEN) // LENGTH) * LENGTH
    loop.canvas = loop.prompt + [-1] * (total - num_prompt)
    for start in range(num_prompt // LENGTH * LENGTH, total, LENGTH):
        while any(token < 0 for token in loop.canvas[start : start + LENGTH]):
            logits = loop.pass_over(start, start + LENGTH)
            loop.num_denoise += 1
            masked = [p for p in range(start, start + LENGTH) if loop.canvas[p] < 0]
            count = LENGTH - len(masked) - max(0, num_prompt - start)
            tokens = {p: loop.choose(logits[p - start], p, count) for p in masked}
            sure = {p: confidence(loop, rule, logits[p - start], tokens[p]) for p in masked}
            loop.commit({p: tokens[p] for p in open_positions(rule, sure)})
        loop.num_commit += 1
        generated = loop.canvas[max(start, num_prompt) : start + LENGTH]
        if any(token in loop.config.stop_token_ids for token in generated):
            return


def shifted_loop(loop: Loop, rule: PublishedDecoder) -> None:
    """Fast-dLLM-v2's generate: shifted rows, sub-blocks in order, greedy seeds, stop inside a block."""
    num_prompt, width = len(loop.prompt), rule.sub_block_length
    total = -(-(num_prompt + GEN) // LENGTH) * LENGTH
    loop.canvas = loop.prompt + [-1] * (total - num_prompt)
    first = num_prompt // LENGTH * LENGTH
    if num_prompt % LENGTH == 0:
        seed(loop, first, is_causal=False, temperature=0.0)
    for start in range(first, total, LENGTH):
        for sub in range(start, start + LENGTH, width):
            while any(token < 0 for token in loop.canvas[sub : sub + width]):
                if loop.stopped(num_prompt):
                    return
                logits = loop.pass_over(start, start + LENGTH)
                loop.num_denoise += 1
                masked = [p for p in range(sub, sub + width) if loop.canvas[p] < 0]
                num_masked = sum(token < 0 for token in loop.canvas[start : start + LENGTH])
                count = LENGTH - num_masked - max(0, num_prompt - start)
                tokens = {p: loop.choose(logits[p - start - 1], p, count) for p in masked}
                sure = {p: confidence(loop, rule, logits[p - start - 1], tokens[p]) for p in masked}
                loop.commit({p: tokens[p] for p in open_positions(rule, sure)})
        if loop.stopped(num_prompt):
            return
        loop.num_commit += 1
        if start + LENGTH < total:
            seed(loop, start + LENGTH, is_causal=False, temperature=0.0)


def seed(loop: Loop, position: int, *, is_causal: bool, temperature: float | None = None) -> None:
    """The first token of a block from the last row of the pass before it."""
    start = position - LENGTH if not is_causal else 0
    token = loop.choose(loop.pass_over(start, position, is_causal=is_causal)[-1], position, 0, temperature)
    loop.canvas[position] = token
    loop.seeds.append((position, token))


def prompt_relative_loop(loop: Loop, rule: PublishedDecoder) -> None:
    """Nemotron's generate: drawn seeds from causal passes, stop inside a block, which is then committed."""
    num_prompt = len(loop.prompt)
    loop.canvas = loop.prompt + [-1] * GEN
    for start in range(num_prompt, num_prompt + GEN, LENGTH):
        seed(loop, start, is_causal=True)
        while any(token < 0 for token in loop.canvas[start : start + LENGTH]):
            logits = loop.pass_over(start, start + LENGTH)
            loop.num_denoise += 1
            masked = [p for p in range(start, start + LENGTH) if loop.canvas[p] < 0]
            tokens = {p: loop.choose(logits[p - start], p, LENGTH - len(masked)) for p in masked}
            sure = {p: confidence(loop, rule, logits[p - start], tokens[p]) for p in masked}
            loop.commit({p: tokens[p] for p in open_positions(rule, sure)})
            if loop.stopped(start):
                break
        loop.num_commit += 1
        if any(token in loop.config.stop_token_ids for token in loop.canvas[start : start + LENGTH]):
            return


def autoregressive_loop(loop: Loop, rule: PublishedDecoder) -> None:
    """Nemotron's ar_generate: one token a causal pass; a block's first tokens are its seeds."""
    num_prompt = len(loop.prompt)
    loop.canvas = loop.prompt + [-1] * GEN
    for position in range(num_prompt, num_prompt + GEN):
        offset = (position - num_prompt) % LENGTH
        if offset == 0:
            loop.num_commit += position > num_prompt
            seed(loop, position, is_causal=True)
        else:
            logits = loop.pass_over(0, position, is_causal=True)[-1]
            loop.num_denoise += 1
            loop.commit({position: loop.choose(logits, position, offset)})
        if loop.stopped(num_prompt):
            return
    loop.num_commit += 1


LOOPS = {
    "sdar": block_loop,
    "llada2": block_loop,
    "fast_dllm_v2": shifted_loop,
    "nemotron": prompt_relative_loop,
}
RULES = [
    (family, name, temperature)
    for family in LOOPS
    for name in ("default", *get_family(family).variants)
    for temperature in (0.0, 1.0, 0.7)
    if temperature < 1 or name in ("default", "entropy_bounded")
]


def published(family: str, name: str) -> PublishedDecoder:
    """A published rule, its threshold lowered to where random weights' confidences lie."""
    declared = get_family(family)
    rule = declared.decoder if name == "default" else declared.variants[name]
    rule = replace(rule, sub_block_length=4) if rule.sub_block_length else rule
    if rule.decoder == "entropy_bounded":
        return replace(rule, threshold=BOUND)
    return replace(rule, threshold=0.4) if rule.threshold else rule


def decode(engine: Engine, rule: PublishedDecoder, prompt: list[int], temperature: float) -> Generation:
    cell = Cell(
        model="tiny", benchmark="words", prompt_version="1", method="none", budget=0, temperature=temperature,
        block_length=LENGTH, gen_length=GEN, seed=SEED, decoder=rule.decoder,
        commits_per_step=rule.commits_per_step, threshold=rule.threshold, comparison=rule.comparison,
        confidence=rule.confidence, sub_block_length=rule.sub_block_length,
    )  # fmt: skip
    decoder = Decoder(engine, none.build(), decode_settings(cell, engine, profiled=False))
    return decoder.decode([Prompt(item_id="item", repeat=0, token_ids=tuple(prompt))])[0]


@pytest.mark.parametrize(("family", "name", "temperature"), RULES, ids=lambda value: str(value))
def test_a_decode_is_the_plain_loop_token_for_token_and_pass_for_pass(
    family: str,
    name: str,
    temperature: float,
    make_model: Callable[..., tuple[ModelConfig, Path]],
    make_oracle: Callable[..., Any],
) -> None:
    config, folder = make_model(family, SCALE, block_length=LENGTH)
    rule = published(family, name)
    engine = load_engine(folder, num_slots=1, max_length=64, self_test=False)
    oracle = make_oracle(config, folder)
    run = autoregressive_loop if rule.decoder == "causal" else LOOPS[family]
    stops: tuple[int, ...] = ()
    for num_prompt in (3, LENGTH, 21) if (name, temperature) == ("default", 0.0) else (21,):
        prompt = [(7 * index) % 251 for index in range(num_prompt)]
        steps: list[tuple[tuple[int, int], ...]] = []
        for attempt in range(2):
            loop_config = replace(config, stop_token_ids=stops) if attempt else config
            engine.config = loop_config
            loop = Loop(loop_config, oracle, prompt, temperature)
            run(loop, rule)
            ours = decode(engine, rule, prompt, temperature)
            assert ours.steps == loop.steps
            steps += loop.steps
            assert ours.seeds == loop.seeds
            assert ours.token_ids == loop.output()
            assert (ours.nfe_denoise, ours.nfe_commit) == (loop.num_denoise, loop.num_commit)
            assert ours.nfe_prefill == int(num_prompt >= LENGTH or family == "nemotron")
            if not attempt:  # decode again with a stop id that is met on the way
                stops = (ours.token_ids[2 * len(ours.token_ids) // 3],)
        assert ours.stop_reason == "eos"
        if rule.decoder == "entropy_bounded":
            assert max(map(len, steps)) > 1
