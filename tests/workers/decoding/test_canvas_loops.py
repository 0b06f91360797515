"""Decode loops of LLaDA and Dream against plain loops written after their published code, pass for pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.canvas_decoder import CanvasDecoder
from dlmgrid.workers.decoding.commit_rules import build_rule
from dlmgrid.workers.decoding.decoder import DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.drafting import none
from dlmgrid.workers.engine.canvas import load_canvas_engine
from dlmgrid.workers.testing.tiny_canvas import write_tiny_canvas

GEN, SEED, ITEM = 24, 11, "item"
PROMPT = tuple(int(token) for token in b"What is 2 + 3?")


@dataclass
class Loop:
    """What a plain loop needs: the stock model, the cell, and the noise that the published code would draw."""

    stock: Any
    cell: Cell
    canvas: Tensor = field(init=False)
    steps: list[tuple[tuple[int, int], ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.canvas = torch.tensor([*PROMPT, *[-1] * GEN])
        self.noise = NoiseTable(SEED)
        self.keys = torch.tensor([self.noise.key(ITEM, 0)])
        self.shift = int(self.cell.family == "dream")

    def rows(self, logits: Tensor, first: int = 0) -> Tensor:
        """Logits by the position they predict, from those of the rows from position ``first`` on."""
        return torch.cat([logits[:1], logits[:-1]]) if self.shift else logits

    def token_noise(self, count: int, positions: Tensor) -> Tensor:
        keys = self.keys.expand(len(positions), -1)
        return self.noise.rows(keys, Stream.TOKEN, positions, torch.full_like(positions, count), 320)[:, :261]

    def uniform(self, draw: int, positions: Tensor) -> Tensor:
        keys = self.keys.expand(len(positions), -1)
        return self.noise.position_uniforms(keys, positions, torch.full_like(positions, draw))

    def put(self, positions: Tensor, tokens: Tensor) -> None:
        self.canvas[positions] = tokens
        self.steps.append(tuple(sorted(zip(positions.tolist(), tokens.tolist(), strict=True))))

    def pass_over(self, start: int, is_first: bool) -> Tensor:
        """One forward with the cell's cache: logits [S, V] by predicted position, NaN where nothing is computed."""
        length, cache = self.cell.block_length, self.cell.cache
        if cache == "none":
            return self.rows(self.stock.logits(self.canvas))
        if is_first:
            return self.rows(self.stock.refresh(self.canvas))
        computed = torch.zeros(len(self.canvas), dtype=torch.bool)
        computed[start : start + length if cache == "dual" else None] = True
        out = torch.full((len(self.canvas), 261), torch.nan)
        out[computed] = self.rows(self.stock.cached(self.canvas, computed))
        return out


def draw_llada(loop: Loop, logits: Tensor, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Token and confidence of each position, as ML-GSAI/LLaDA generate.py has them."""
    cell, logits = loop.cell, logits[positions].double()
    if cell.eos_policy == "logits_eos_inf":
        logits[:, 258] = -torch.inf
    noise = 0.0
    if cell.temperature:
        noise = cell.temperature * loop.token_noise(count, positions).double()
    tokens = (logits + noise).argmax(1)
    confidence = logits.softmax(1).gather(1, tokens[:, None]).squeeze(1)
    if cell.confidence == "random":
        confidence = loop.uniform(count, positions)
    if cell.eos_policy == "confidence_eos_eot_inf":
        confidence[tokens == 258] = -torch.inf
    return tokens, confidence


def run_llada(loop: Loop) -> None:
    """generate.py of ML-GSAI/LLaDA and, with caches and thresholds, llada/generate.py of NVlabs/Fast-dLLM."""
    cell, length = loop.cell, loop.cell.block_length
    for block in range(GEN // length):
        start = len(PROMPT) + block * length
        num_steps = (cell.steps or GEN) // (GEN // length)
        split = [length // num_steps + (step < length % num_steps) for step in range(num_steps)]
        step = 0
        while bool((loop.canvas[start : start + length] < 0).any()):
            logits = loop.pass_over(start, step == 0)
            positions = start + (loop.canvas[start : start + length] < 0).nonzero().flatten()
            tokens, confidence = draw_llada(loop, logits, positions, length - len(positions))
            order = confidence.argsort(descending=True, stable=True)
            ranked = confidence[order].tolist()
            if cell.decoder == "llada":
                opened = split[step]
            elif cell.decoder == "threshold":
                assert cell.threshold is not None
                opened = max(1, sum(value >= cell.threshold for value in ranked))
            else:
                assert cell.factor is not None
                opened = 1
                while opened < len(ranked) and ranked[opened] >= 1 - cell.factor / (opened + 2):
                    opened += 1
            loop.put(positions[order[:opened]], tokens[order[:opened]])
            step += 1


def draw_dream(loop: Loop, logits: Tensor, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``sample_tokens`` of DreamLM/Dream generation_utils.py."""
    cell, logits = loop.cell, logits[positions]
    if cell.temperature:
        logits = logits / cell.temperature
    if cell.top_p is not None:
        ranked, order = logits.sort(descending=True, stable=True)
        removed = ranked.softmax(1).cumsum(1) > cell.top_p
        removed[:, 1:] = removed[:, :-1].clone()
        removed[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(removed).scatter(1, order, removed), -torch.inf)
    if cell.top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(cell.top_k).values[:, -1:], -torch.inf)
    shares = logits.softmax(1)
    scores = logits + loop.token_noise(count, positions) if cell.temperature else logits
    tokens = scores.argmax(1)
    confidence = shares.gather(1, tokens[:, None]).squeeze(1)
    if cell.confidence == "topk_margin":
        two = shares.sort(descending=True).values
        confidence = two[:, 0] - two[:, 1]
    if cell.confidence == "entropy":
        confidence = (shares * torch.log(shares + 1e-10)).sum(1)
    return tokens, confidence


def run_dream(loop: Loop) -> None:
    """``_sample`` of generation_utils.py on one canvas; with caches, generation_utils_block.py of NVlabs/Fast-dLLM."""
    cell, length = loop.cell, loop.cell.block_length
    for block in range(GEN // length):
        start = len(PROMPT) + block * length
        num_steps = (cell.steps or GEN) // (GEN // length)
        times = torch.linspace(1, 1e-3, num_steps + 1)
        step = 0
        while bool((loop.canvas[start : start + length] < 0).any()):
            logits = loop.pass_over(start, step == 0)
            positions = start + (loop.canvas[start : start + length] < 0).nonzero().flatten()
            count = length - len(positions)
            tokens, confidence = draw_dream(loop, logits, positions, count)
            if cell.cache != "none" and step == 0:
                loop.put(positions[:1], tokens[:1])  # the block's first token, whatever its confidence
                step += 1
                continue
            if cell.alg_temp:
                noise = loop.uniform(count, positions)
                confidence = confidence / cell.alg_temp - torch.log(-torch.log(noise)).float()
            order = confidence.argsort(descending=True, stable=True)
            if cell.decoder == "threshold":
                assert cell.threshold is not None
                opened = max(1, int((confidence >= cell.threshold).sum()))
                chosen = order[:opened]
            elif cell.confidence == "origin":
                share = 1 - times[step + 1] / times[step] if step < num_steps - 1 else torch.tensor(1.0)
                chosen = (loop.uniform(step, positions) < share).nonzero().flatten()
            else:
                share = torch.tensor(float(len(positions))) * (1 - times[step + 1] / times[step])
                chosen = order[: int(share) if step < num_steps - 1 else len(positions)]
            loop.put(positions[chosen], tokens[chosen])
            step += 1


LLADA_RULES: dict[str, dict[str, Any]] = {
    "one-a-step": {"decoder": "llada", "steps": 24, "confidence": "plain"},
    "split-unevenly": {"decoder": "llada", "steps": 9, "confidence": "plain"},
    "random": {"decoder": "llada", "steps": 12, "confidence": "random"},
    "logits-eos-inf": {"decoder": "llada", "steps": 12, "confidence": "plain", "eos_policy": "logits_eos_inf"},
    "confidence-eos-eot-inf": {
        "decoder": "llada", "steps": 12, "confidence": "plain", "eos_policy": "confidence_eos_eot_inf",
    },
    "threshold": {"decoder": "threshold", "threshold": 0.4, "comparison": "fast_dllm", "confidence": "plain"},
    "factor": {"decoder": "factor", "factor": 1.3, "confidence": "plain"},
}  # fmt: skip
DREAM_RULES: dict[str, dict[str, Any]] = {
    "entropy": {"decoder": "dream", "steps": 36, "confidence": "entropy", "top_p": 0.95},
    "maskgit-plus": {"decoder": "dream", "steps": 12, "confidence": "maskgit_plus", "top_k": 20},
    "topk-margin": {"decoder": "dream", "steps": 24, "confidence": "topk_margin"},
    "alg-temp": {"decoder": "dream", "steps": 12, "confidence": "entropy", "alg_temp": 0.4},
    "origin": {"decoder": "dream", "steps": 36, "confidence": "origin"},
    "threshold": {
        "decoder": "threshold", "threshold": 0.4, "comparison": "fast_dllm", "confidence": "maskgit_plus",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    folder = tmp_path_factory.mktemp("canvas")
    return {
        family: (write_tiny_canvas(folder / family, family, scale=0.25, num_hidden_layers=1), folder / family)
        for family in ("llada", "dream")
    }


def decode(folder: Path, cell: Cell, **settings: Any) -> Generation:
    engine = load_canvas_engine(
        folder, cache=cell.cache, num_slots=1, max_length=len(PROMPT) + GEN, self_test=False
    )
    values: dict[str, Any] = {
        "block_length": cell.block_length, "gen_length": cell.gen_length, "budget": 0, "rule": build_rule(cell),
        "temperature": cell.temperature, "noise": NoiseTable(cell.seed), "stop_token_ids": (), "stop": "full",
        "grid": "prompt", "end_token_ids": engine.config.end_token_ids,
    }  # fmt: skip
    decoder = CanvasDecoder(engine, none.build(), DecodeSettings(**(values | settings)))
    return decoder.decode([Prompt(item_id=ITEM, repeat=0, token_ids=PROMPT)])[0]


def make_cell(family: str, **settings: Any) -> Cell:
    values: dict[str, Any] = {
        "model": "tiny", "family": family, "benchmark": "b", "prompt_version": "1", "method": "none", "budget": 0,
        "seed": SEED, "gen_length": GEN,
    }  # fmt: skip
    return Cell(**(values | settings))


def check(
    stock_canvas: Callable[..., Any], checkpoint: tuple[Any, Path], cell: Cell, run: Callable[[Loop], None]
) -> None:
    config, folder = checkpoint
    loop = Loop(stock_canvas(config, folder), cell)
    run(loop)
    generation = decode(folder, cell)
    assert generation.steps == loop.steps
    assert generation.token_ids == loop.canvas[len(PROMPT) :].tolist()
    assert generation.nfe_denoise == loop.stock.num_passes == len(loop.steps)
    assert (generation.nfe_prefill, generation.nfe_commit) == (0, 0)


@pytest.mark.parametrize(
    ("cache", "temperature"), [("none", 0.0), ("prefix", 0.7), ("dual", 0.0), ("dual", 0.7)]
)
@pytest.mark.parametrize("rule", LLADA_RULES.values(), ids=LLADA_RULES)
def test_llada_follows_its_published_loop(
    rule: dict[str, Any], cache: str, temperature: float, checkpoints: Any, stock_canvas: Callable[..., Any]
) -> None:
    cell = make_cell("llada", cache=cache, temperature=temperature, block_length=8, **rule)
    check(stock_canvas, checkpoints["llada"], cell, run_llada)


@pytest.mark.parametrize(
    ("cache", "temperature"), [("none", 0.0), ("prefix", 0.7), ("dual", 0.0), ("dual", 0.7)]
)
@pytest.mark.parametrize("rule", DREAM_RULES.values(), ids=DREAM_RULES)
def test_dream_follows_its_published_loop(
    rule: dict[str, Any], cache: str, temperature: float, checkpoints: Any, stock_canvas: Callable[..., Any]
) -> None:
    length = GEN if cache == "none" else 8  # one whole canvas as published, blocks with caches
    cell = make_cell("dream", cache=cache, temperature=temperature, block_length=length, **rule)
    check(stock_canvas, checkpoints["dream"], cell, run_dream)


def test_a_whole_canvas_is_cut_at_the_first_stop_id_and_eos_ends_after_a_block(checkpoints: Any) -> None:
    folder = checkpoints["llada"][1]
    cell = make_cell(
        "llada", cache="none", temperature=0.0, block_length=8, decoder="llada", steps=24, confidence="plain"
    )
    free = decode(folder, cell)
    stop = free.token_ids[3]
    cut = free.token_ids.index(stop) + 1
    whole = decode(folder, cell, stop_token_ids=(stop,))
    assert (whole.token_ids, whole.stop_reason, whole.nfe_denoise) == (free.token_ids[:cut], "eos", 24)
    early = decode(folder, cell, stop_token_ids=(stop,), stop="eos")
    assert (early.token_ids, early.stop_reason, early.nfe_denoise) == (free.token_ids[:cut], "eos", 8)
    ignored = decode(folder, cell, stop_token_ids=(stop,), stop="none")
    assert (ignored.token_ids, ignored.stop_reason) == (free.token_ids, "length")
