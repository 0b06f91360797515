"""Tables of ``make bench`` beside the passes of one checkpoint: passes by shape over their floor, folded passes,
decoding.

Each function returns plain rows for the JSON file; times are milliseconds (median, fastest, slowest) on one device.
A speed of ``exact`` or of drafting stands beside what was compared: whether its output is the serialized run's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlmgrid.jobs.bench_shapes import random_engine, shape_config
from dlmgrid.kernels.benchmark import Ceilings, measure, pass_floor_ms
from dlmgrid.workers.decoding.commit_rules import static
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.drafting import confidence_tree, none, ssd
from dlmgrid.workers.engine.engine import Engine
from dlmgrid.workers.folding.fold import FoldSettings
from dlmgrid.workers.models.config import ModelConfig

Row = dict[str, Any]
FAST, EXACT = ("torch", "fast"), ("triton", "exact")
DRAFTERS = {"ssd": ssd.build, "confidence_tree": confidence_tree.build}


def pass_table(
    shape: str, budgets: Sequence[int], prefix: int, modes: Sequence[tuple[str, str]], *,
    device: str, dtype: torch.dtype, ceilings: Ceilings, repeats: int,
) -> list[Row]:  # fmt: skip
    """A packed pass of 1 + D blocks behind a shared prefix, with one block's head, by D and (kernels, numerics)."""
    config = shape_config(shape)
    rows: list[Row] = []
    for kernels, numerics in modes:
        engine = random_engine(
            config, num_slots=1, max_length=prefix + 64, device=device, dtype=dtype, numerics=numerics, kernels=kernels
        )  # fmt: skip
        fill_prefix(engine, prefix)
        for budget in budgets:
            timing = measure(partial(drafted_pass, engine, budget, prefix), engine.device, repeats=repeats)
            floor = pass_floor_ms(
                ceilings, hidden=config.hidden_size, layers=config.num_hidden_layers,
                heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, width=config.head_dim,
                inner=config.intermediate_size, vocab=config.vocab_size, rows=(1 + budget) * config.block_length,
                head_rows=config.block_length, prefix=prefix, bytes_per_value=dtype.itemsize,
            )  # fmt: skip
            rows.append(
                {"shape": shape, "kernels": kernels, "numerics": numerics, "budget": budget, "prefix": prefix,
                 "pass": asdict(timing), "floor_ms": floor, "over_floor": timing.median_ms / floor}
            )  # fmt: skip
        del engine
    return rows


def fold_table(engine: Engine, budget: int, prefix: int, taus: Sequence[float], repeats: int) -> list[Row]:
    """A folded pass by τ: its recompute ratio, its time and its parts, beside the unfolded pass of the same nodes.

    The nodes are a chain that opens one position more each, as drafters make them.
    """
    length = engine.block_length
    fill_prefix(engine, prefix)
    blocks = torch.full((1 + budget, length), -1, dtype=torch.int32)
    for node in range(1 + budget):
        opened = min(node + length // 2, length)
        blocks[node, :opened] = torch.arange(opened, dtype=torch.int32) % 97
    parents = [-1, *range(budget)]

    def one_pass(fold: tuple[FoldSettings, list[int]] | None, timed: bool = False) -> Tensor:
        return engine.forward(blocks.to(engine.device), *_places(1 + budget, prefix), fold=fold, timed=timed)

    unfolded = measure(partial(one_pass, None), engine.device, repeats=repeats)
    rows: list[Row] = []
    for tau in taus:
        timing = measure(
            partial(one_pass, (FoldSettings(tau=(tau,)), parents)), engine.device, repeats=repeats
        )
        one_pass((FoldSettings(tau=(tau,)), parents), timed=True)
        report = engine.fold_report
        assert report is not None
        ratios = report.ratios
        rows.append(
            {"budget": budget, "prefix": prefix, "tau": tau, "recompute_ratio": sum(ratios) / len(ratios),
             "recompute_ratios": ratios, "folded": asdict(timing), "unfolded": asdict(unfolded),
             "seconds": report.seconds}
        )  # fmt: skip
    return rows


def decode_table(
    engine: Engine, budgets: Sequence[int], prompts: Sequence[Prompt], gen_length: int
) -> list[Row]:
    """Tokens/s of each method at batch 1, over draft-free, with whether every output is the serialized run's."""
    serialized, base = timed_decode(engine, "none", 0, prompts, gen_length, 1)
    rows: list[Row] = [_decode_row("none", 0, 1, serialized, serialized, base, base)]
    for method in DRAFTERS:
        for budget in budgets:
            if budget:
                found, seconds = timed_decode(engine, method, budget, prompts, gen_length, 1)
                rows.append(_decode_row(method, budget, 1, found, serialized, seconds, base))
    return rows


def batch_table(
    engine: Engine, widths: Sequence[int], prompts: Sequence[Prompt], gen_length: int
) -> list[Row]:
    """Draft-free tokens/s by samples in flight, over one at a time."""
    serialized, base = timed_decode(engine, "none", 0, prompts, gen_length, 1)
    rows = []
    for width in widths:
        found, seconds = timed_decode(engine, "none", 0, prompts, gen_length, width)
        rows.append(_decode_row("none", 0, width, found, serialized, seconds, base))
    return rows


def part_table(engine: Engine, budget: int, prompts: Sequence[Prompt], gen_length: int) -> list[Row]:
    """Seconds by part of a profiled run, whose stages are timed apart."""
    rows = []
    for method in ("none", *DRAFTERS):
        found, _ = timed_decode(
            engine, method, 0 if method == "none" else budget, prompts, gen_length, 1, True
        )
        parts = {
            name: sum(getattr(one.seconds, name) for one in found)
            for name in ("draft", "verify", "sample", "other")
        }
        rows.append({"method": method, "budget": 0 if method == "none" else budget, "seconds": parts})
    return rows


def timed_decode(
    engine: Engine, method: str, budget: int, prompts: Sequence[Prompt], gen_length: int, width: int,
    profiled: bool = False,
) -> tuple[list[Generation], float]:  # fmt: skip
    """Decode after one warm-up prompt; wall seconds of the rest."""
    settings = DecodeSettings(
        block_length=engine.block_length, gen_length=gen_length, budget=budget, temperature=0.0, rule=static(1),
        noise=NoiseTable(0), stop_token_ids=(), profiled=profiled,
    )  # fmt: skip
    drafter = DRAFTERS[method]() if budget else none.build()
    decoder = Decoder(engine, drafter, settings, logits_pass=engine.logits_pass)
    decoder.decode(prompts[:1], 1)
    _synchronize(engine)
    begun = time.perf_counter()
    found = decoder.decode(prompts, width)
    _synchronize(engine)
    return found, time.perf_counter() - begun


def _decode_row(
    method: str, budget: int, width: int, found: list[Generation], serialized: list[Generation], seconds: float,
    base: float,
) -> Row:  # fmt: skip
    tokens = sum(len(one.token_ids) for one in found)
    forwards = [sum(g.nfe_prefill + g.nfe_denoise + g.nfe_commit for g in run) for run in (found, serialized)]
    pairs = list(zip(found, serialized, strict=True))
    return {
        "method": method, "budget": budget, "in_flight": width, "tokens_per_second": tokens / seconds,
        "over_draft_free": base / seconds, "forwards": forwards[0], "forward_ratio": forwards[1] / forwards[0],
        "same_tokens": sum(a.token_ids == b.token_ids for a, b in pairs),
        "same_path": sum(a.steps == b.steps for a, b in pairs),
        "same_bits": sum(a.digests == b.digests for a, b in pairs), "items": len(pairs),
    }  # fmt: skip


def random_prompts(config: ModelConfig, count: int, length: int) -> list[Prompt]:
    """Prompts of random tokens, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, config.vocab_size - 1, (count, length), generator=generator).tolist()
    return [Prompt(item_id=str(i), repeat=0, token_ids=tuple(tokens)) for i, tokens in enumerate(drawn)]


def fill_prefix(engine: Engine, prefix: int) -> None:
    """Store ``prefix`` random tokens (whole blocks) in slot 0."""
    engine.reset(0)
    length = engine.block_length
    blocks = _random_blocks(engine, prefix // length)
    if len(blocks):
        slots, _, _ = _places(len(blocks), 0)
        starts = torch.arange(len(blocks), dtype=torch.int32) * length
        engine.forward(blocks, slots, starts, torch.ones(len(blocks), dtype=torch.bool))


def drafted_pass(engine: Engine, budget: int, prefix: int) -> Tensor:
    """One pass of 1 + ``budget`` blocks and the head of one."""
    start = prefix // engine.block_length * engine.block_length
    hidden = engine.forward(_random_blocks(engine, 1 + budget), *_places(1 + budget, start))
    return engine.logits(hidden[0])


def _places(num: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.zeros(num, dtype=torch.int32),
        torch.full((num,), start, dtype=torch.int32),
        torch.zeros(num, dtype=torch.bool),
    )


def _random_blocks(engine: Engine, num: int) -> Tensor:
    generator = torch.Generator().manual_seed(num)
    shape = (num, engine.block_length)
    drawn = torch.randint(0, engine.config.vocab_size, shape, generator=generator, dtype=torch.int32)
    return drawn.to(engine.device)


def _synchronize(engine: Engine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def add_exact_over_fast(rows: list[Row]) -> list[Row]:
    """``rows`` of a pass table with, on each exact one, its time over the fastest ``fast`` one of its shape and D."""

    def key(row: Row) -> tuple[str, int]:
        return row["shape"], row["budget"]

    fastest: dict[tuple[str, int], float] = {}
    for row in rows:
        if row["numerics"] == "fast":
            fastest[key(row)] = min(row["pass"]["median_ms"], fastest.get(key(row), float("inf")))
    out = []
    for row in rows:
        base = fastest.get(key(row)) if row["numerics"] == "exact" else None
        out.append(row if base is None else {**row, "over_fast": row["pass"]["median_ms"] / base})
    return out
