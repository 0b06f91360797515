"""Tables of ``make bench`` on one verification pass: its time over the floor by shape and D, ``exact`` over ``fast``,
and its parts by group of kernels.

A pass is what the decoder runs: the layers on 1 + D blocks behind a cached prefix, then head and logits pass on some
of its rows. ``block``: the rows of one block, one walked state. ``ahead``: those that the decoder reads ahead of the
walk, the masked positions of every node (half of them here). *Device* time is that of the replayed graphs alone, ten
passes between two events; *wall* time has the host's work, the copies and the wait for the answer too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dlmgrid.kernels.benchmark import Ceilings, measure, measure_queued, pass_floor_parts
from dlmgrid.kernels.logits import choose, summarize
from dlmgrid.workers.decoding.reading import MOST_ROWS_AHEAD
from dlmgrid.workers.engine.engine import Engine
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.weights import ModelWeights

Row = dict[str, Any]
HEADS = ("block", "ahead")
FLOOR_GOALS = {"SDAR-8B": (1.3, 1.45), "SDAR-1.7B": (1.6, 1.5)}
"""Most times the floor that a ``fast`` pass should take, draft-free and with drafts."""

VENDOR_GOAL = {"SDAR-8B": 1.05}
"""Most times (the vendor's products of all layers in one graph + the floor of the rest)."""

EXACT_GOAL = 1.15
"""Most times a ``fast`` pass that an ``exact`` one should take."""

SPARE_POSITIONS = 64
"""Positions of an engine's buffers behind its prefix, or behind prompt and generation: room for the block itself."""

_CPU = torch.device("cpu")
_GROUPS = {
    "attention": ("attention_kernel", "merge_kernel", "own_block_kernel", "flash", "fmha"),
    "norms and rotary": ("rms_norm_kernel", "norm_rotary_kernel"),
    "logits pass": ("_tile_kernel", "_row_kernel"),
    "products": (
        "_descriptor_kernel", "_linear_kernel", "_silu_gate_kernel", "gemm", "cutlass", "nvjet", "splitK", "cublas",
    ),
}  # fmt: skip


def pass_rows(
    shape: str, config: ModelConfig, weights: ModelWeights, modes: Sequence[tuple[str, str]],
    prefixes: Sequence[int], budgets: Sequence[int], *, device: str, ceilings: Ceilings, repeats: int,
) -> Iterator[Row]:  # fmt: skip
    """A row for each prefix, D and (kernels, numerics)."""
    dtype = weights.embedding.dtype
    vendor = {
        budget: vendor_products(weights, (1 + budget) * config.block_length, repeats) for budget in budgets
    }
    for kernels, numerics in modes:
        for prefix in prefixes:
            engine = Engine(
                config, weights, num_slots=1, max_length=prefix + SPARE_POSITIONS, device=device, dtype=dtype,
                numerics=numerics, kernels=kernels,
            )  # fmt: skip
            fill_prefix(engine, prefix)
            for budget in budgets:
                found = {head: time_pass(engine, budget, prefix, head, repeats) for head in HEADS}
                floors = {
                    head: floor_parts(config, ceilings, budget, prefix, num_rows(config, budget, head), dtype)
                    for head in HEADS
                }
                row: Row = {"shape": shape, "kernels": kernels, "numerics": numerics, "prefix": prefix}
                row |= {
                    "budget": budget,
                    "vendor_products_ms": vendor[budget],
                    "head": found,
                    "floor_ms": floors,
                }
                yield row | ratios(row)


def ratios(row: Row) -> Row:
    """What follows from the times and floors of a row of passes: ratios and goals, each as measured / goal."""
    out: Row = {"over_floor": {}, "over_vendor": {}}
    for head in HEADS:
        taken, floor = row["head"][head]["device_ms"], row["floor_ms"][head]
        rest = sum(value for name, value in floor.items() if name != "products")
        out["over_floor"][head] = taken / sum(floor.values())
        out["over_vendor"][head] = taken / (row["vendor_products_ms"] + rest)
    goals = FLOOR_GOALS.get(row["shape"])
    if goals is not None and row["numerics"] == "fast":
        out["floor_goal"] = goals[row["budget"] > 0]
        out["of_floor_goal"] = {head: out["over_floor"][head] / out["floor_goal"] for head in HEADS}
    goal = VENDOR_GOAL.get(row["shape"])
    if goal is not None and row["numerics"] == "fast":
        out["vendor_goal"] = goal
        out["of_vendor_goal"] = {head: out["over_vendor"][head] / goal for head in HEADS}
    return out


def add_exact_over_fast(rows: Sequence[Row]) -> list[Row]:
    """``rows`` with, on each ``exact`` one, its device time over the ``fast`` one's of its shape, prefix and D."""

    def key(row: Row) -> tuple[str, int, int]:
        return row["shape"], row["prefix"], row["budget"]

    fast = {key(row): row["head"] for row in rows if row["numerics"] == "fast"}
    out = []
    for row in rows:
        base = fast.get(key(row)) if row["numerics"] == "exact" else None
        if base is not None:
            over = {head: row["head"][head]["device_ms"] / base[head]["device_ms"] for head in HEADS}
            goals = {head: over[head] / EXACT_GOAL for head in HEADS}
            row = {**row, "over_fast": over, "of_exact_goal": goals}
        out.append(row)
    return out


def num_rows(config: ModelConfig, budget: int, head: str) -> int:
    """Rows of the pass that head and logits pass work on."""
    length = config.block_length
    return length if head == "block" else min((1 + budget) * (length // 2), MOST_ROWS_AHEAD)


def floor_parts(
    config: ModelConfig, ceilings: Ceilings, budget: int, prefix: int, head_rows: int, dtype: torch.dtype
) -> dict[str, float]:
    """Milliseconds of the floor by part."""
    return pass_floor_parts(
        ceilings, hidden=config.hidden_size, layers=config.num_hidden_layers, heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads, width=config.head_dim, inner=config.intermediate_size,
        vocab=config.vocab_size, rows=(1 + budget) * config.block_length, head_rows=head_rows, prefix=prefix,
        bytes_per_value=dtype.itemsize,
    )  # fmt: skip


def time_pass(engine: Engine, budget: int, prefix: int, head: str, repeats: int) -> Row:
    """Device and wall milliseconds of a pass; on a CPU they are one."""
    one_pass = partial(run_pass, engine, budget, prefix, head)
    wall = measure(one_pass, _CPU, repeats=repeats)
    if engine.device.type == "cpu" or not engine.predicts_rows:
        device = measure(one_pass, engine.device, repeats=repeats)
    else:
        device = measure_queued(engine.queue_again, engine.device, warm_up=1, repeats=repeats)
    return {
        "rows": num_rows(engine.config, budget, head), "device_ms": device.median_ms, "wall_ms": wall.median_ms,
        "device": asdict(device), "wall": asdict(wall),
    }  # fmt: skip


def run_pass(engine: Engine, budget: int, prefix: int, head: str) -> None:
    """One pass of 1 + ``budget`` blocks whose every second position is masked, and what is read of it."""
    start = prefix // engine.block_length * engine.block_length
    blocks = random_blocks(engine.config, 1 + budget)
    blocks[:, 1::2] = -1
    hidden = engine.forward(blocks.to(engine.control_device), *places(1 + budget, start))
    count = num_rows(engine.config, budget, head)
    rows = torch.arange(count) if head == "block" else (blocks.flatten() == -1).nonzero().flatten()[:count]
    if engine.predicts_rows:
        engine.predict(hidden, rows, 0.0, None)
        return
    logits = engine.logits(hidden.flatten(0, 1)[rows.to(engine.device)])
    summarize(logits, 0.0)
    choose(logits, 0.0, None)
    synchronize(engine.device)


def vendor_products(weights: ModelWeights, rows: int, repeats: int) -> float:
    """Milliseconds of all products of the layers by torch, in one graph on a GPU, on the model's own matrices."""
    device, dtype = weights.embedding.device, weights.embedding.dtype
    matrices = [getattr(one, name) for one in weights.layers for name in ("qkv", "output", "gate_up", "down")]
    inputs = {
        width: torch.randn(rows, width, device=device).to(dtype) for width in {w.shape[1] for w in matrices}
    }

    @torch.inference_mode()
    def products() -> None:
        for matrix in matrices:
            functional.linear(inputs[matrix.shape[1]], matrix)

    if device.type == "cpu":
        return measure(products, device, repeats=repeats).median_ms
    for _ in range(2):
        products()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return measure_queued(graph.replay, device, warm_up=1, repeats=repeats).median_ms


def part_rows(shape: str, engine: Engine, prefix: int, budgets: Sequence[int]) -> Iterator[Row]:
    """Milliseconds of a pass by group of kernels, from the device's own record of three replays."""
    fill_prefix(engine, prefix)
    for budget in budgets:
        for _ in range(3):
            run_pass(engine, budget, prefix, "ahead")
        layers = _profile(engine.queue_pass_again)
        read = _profile(engine.queue_rows_again)
        parts = group_kernels(layers)
        for name, value in group_kernels(read).items():
            name = "head" if name == "products" else name
            parts[name] = parts.get(name, 0.0) + value
        yield {
            "shape": shape, "numerics": engine.numerics, "budget": budget, "prefix": prefix,
            "parts_ms": parts, "kernels_ms": {**layers, **{f"head: {name}": ms for name, ms in read.items()}},
        }  # fmt: skip


def group_kernels(times: dict[str, float]) -> dict[str, float]:
    """Sums by group of what kernels took, by the kernel's name; a name of no group is ``rest``."""
    out: dict[str, float] = {}
    for name, value in times.items():
        group = next((g for g, marks in _GROUPS.items() if any(mark in name for mark in marks)), "rest")
        out[group] = out.get(group, 0.0) + value
    return out


def own_times(spans: Sequence[tuple[float, float, str]]) -> dict[str, float]:
    """Time by kernel name from (begin, end, name) of kernels of one stream: each from the end of the one before it.

    A kernel that is placed while the one before it drains waits there, so the sum of spans is more than the pass takes.
    """
    out: dict[str, float] = {}
    ended = float("-inf")
    for begin, end, name in sorted(spans):
        out[name] = out.get(name, 0.0) + max(0.0, end - max(begin, ended))
        ended = max(ended, end)
    return out


def _profile(queue: Any, count: int = 3) -> dict[str, float]:
    """Milliseconds a call by kernel name, each without its wait for the kernel before it."""
    from torch.profiler import ProfilerActivity, profile

    queue()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            queue()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end, event.name[:80])
        for event in found.events() or ()
        if event.device_type.name == "CUDA"  # launches on the host carry their kernels' time too
    ]
    return {name: spent / count / 1e3 for name, spent in own_times(spans).items()}


def fill_prefix(engine: Engine, prefix: int) -> None:
    """Store ``prefix`` random tokens (whole blocks) in slot 0."""
    engine.reset(0)
    length = engine.block_length
    blocks = random_blocks(engine.config, prefix // length)
    if len(blocks):
        slots, _, _ = places(len(blocks), 0)
        starts = torch.arange(len(blocks), dtype=torch.int32) * length
        engine.forward(
            blocks.to(engine.control_device), slots, starts, torch.ones(len(blocks), dtype=torch.bool)
        )


def places(num: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, starts and store flags of ``num`` blocks of slot 0 that store nothing."""
    return (
        torch.zeros(num, dtype=torch.int32),
        torch.full((num,), start, dtype=torch.int32),
        torch.zeros(num, dtype=torch.bool),
    )


def random_blocks(config: ModelConfig, num: int) -> Tensor:
    """int32 [num, L] from the vocabulary, the same on every call of one size."""
    generator = torch.Generator().manual_seed(num)
    shape = (num, config.block_length)
    return torch.randint(0, config.vocab_size, shape, generator=generator, dtype=torch.int32)


def synchronize(device: torch.device) -> None:
    """Wait for what is queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
