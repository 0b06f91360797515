"""Tables of folded passes: over a floor by model shape, and on the drafted passes of a checkpoint's own decoding.

A drafted pass is kept as the decoder asked for it and run again, folded in another way or not at all: the slot still
holds the blocks before its own, so every run of it computes the same states. Needs torch only.

Legend: D draft budget, ρ share of foldable rows that is computed, L block length, N segments of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlmgrid.jobs.bench_passes import SPARE_POSITIONS, Row, fill_prefix
from dlmgrid.jobs.bench_shapes import random_engine, shape_config
from dlmgrid.kernels.benchmark import Ceilings, Timing, measure, measure_queued, pass_floor_parts
from dlmgrid.kernels.specfold import FoldLayout, distances
from dlmgrid.kernels.specfold.folding import Folds
from dlmgrid.workers.decoding.commit_rules import static
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.drafting.drafter import Drafter
from dlmgrid.workers.engine.engine import Engine
from dlmgrid.workers.folding.fold import FoldSettings
from dlmgrid.workers.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedPass:
    """Arguments of a pass over root and drafts of one sample: ``tokens`` int32 [N, L] and their fold parents."""

    tokens: Tensor
    slots: Tensor
    starts: Tensor
    parents: list[int]

    def run(self, engine: Engine, fold: FoldSettings | None, *, timed: bool = False) -> Tensor:
        """Hidden states [N, L, H]."""
        stores = torch.zeros(len(self.tokens), dtype=torch.bool)
        asked = None if fold is None else (fold, self.parents)
        return engine.forward(self.tokens, self.slots, self.starts, stores, fold=asked, timed=timed)


class _Listener:
    """A target that keeps the drafted passes it is asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.passes: list[DraftedPass] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def fold_report(self) -> Any:
        return self._engine.fold_report

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        hidden = self._engine.forward(*arguments, **options)
        tokens, slots, starts, stores, *_ = arguments
        parents = options["fold"][1] if options.get("fold") else []
        if any(parent >= 0 for parent in parents) and not bool(stores.any()):
            self.passes.append(
                DraftedPass(tokens=tokens.clone(), slots=slots, starts=starts, parents=list(parents))
            )
        return hidden


def drafted_passes(
    engine: Engine, drafter: Drafter, budget: int, prompt: Prompt, gen_length: int
) -> list[DraftedPass]:
    """The drafted passes of one greedy decode, whose blocks then lie in slot 0; its passes fold nothing (τ = 0)."""
    settings = DecodeSettings(
        block_length=engine.block_length, gen_length=gen_length, budget=budget, temperature=0.0, rule=static(1),
        noise=NoiseTable(0), stop_token_ids=(), fold=FoldSettings(tau=(0.0,)),
    )  # fmt: skip
    listener = _Listener(engine)
    Decoder(listener, drafter, settings, logits_pass=engine.logits_pass).decode([prompt], 1)
    return listener.passes


class _Watch:
    """Shows a function every layer's input before folds work on it."""

    def __init__(self, folds: Folds, see: Callable[[Tensor, int], None]) -> None:
        self._folds, self._see = folds, see

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folds, name)

    def select(self, hidden: Tensor, layer: int) -> None:
        self._see(hidden, layer)
        self._folds.select(hidden, layer)


def parent_distances(engine: Engine, drafted: DraftedPass, fold: FoldSettings) -> Tensor:
    """r of every foldable row against its parent at every layer's input, in the folded pass: fp32 [layers, n, L]."""
    found: list[Tensor] = []
    folding = [segment for segment, parent in enumerate(drafted.parents) if parent >= 0]
    parents = [drafted.parents[segment] for segment in folding]

    def see(hidden: Tensor, layer: int) -> None:
        del layer
        found.append(distances(hidden[folding], hidden[parents]))

    operators = engine.operators

    def open_folds(layout: FoldLayout, device: torch.device, **options: Any) -> Any:
        return _Watch(operators.open_folds(layout, device, **options), see)

    engine.operators = replace(operators, open_folds=open_folds)
    try:
        drafted.run(engine, fold, timed=True)  # launched one by one: a graph shows no layer's input
    finally:
        engine.operators = operators
    return torch.stack(found)


def difference_table(engine: Engine, passes: Sequence[DraftedPass]) -> Row:
    """The mean relative difference of child and parent (SpecFold, Fig. 2), in unfolded states.

    ``by_layer`` [layers]; ``by_position`` [layers][L]; ``by_step`` [layers][L + 1] over tokens of the root that stand;
    ``share_below`` by layer, of rows, for some τ. None where nothing was seen.
    """
    layers, length = engine.config.num_hidden_layers, engine.block_length
    by_position, by_step = torch.zeros(layers, length), torch.zeros(layers, length + 1)
    seen = torch.zeros(length + 1)
    taus = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    below = torch.zeros(len(taus), layers)
    rows = 0
    for drafted in passes:
        found = parent_distances(engine, drafted, FoldSettings(tau=(0.0,))).cpu()
        step = int((drafted.tokens[0] != MASKED).sum())
        by_position += found.sum(1)
        by_step[:, step] += found.sum((1, 2))
        seen[step] += found[0].numel()
        rows += found.shape[1]
        for index, tau in enumerate(taus):
            below[index] += (found < tau).sum((1, 2))
    steps = [
        [None if not count else float(value / count) for value, count in zip(layer, seen, strict=True)]
        for layer in by_step
    ]
    return {
        "passes": len(passes), "by_layer": (by_position.sum(1) / (rows * length)).tolist(),
        "by_position": (by_position / rows).tolist(), "by_step": steps, "taus": list(taus),
        "share_below": (below / (rows * length)).tolist(),
    }  # fmt: skip


def ratio_rows(engine: Engine, passes: Sequence[DraftedPass], taus: Sequence[float]) -> list[Row]:
    """The recompute ratio by τ over drafted passes, by layer (SpecFold, appendix D)."""
    rows: list[Row] = []
    for tau in taus:
        made, foldable = [0] * engine.config.num_hidden_layers, 0
        for drafted in passes:
            drafted.run(engine, FoldSettings(tau=(tau,)))
            report = engine.fold_report
            assert report is not None
            made = [before + now for before, now in zip(made, report.recomputed(), strict=True)]
            foldable += sum(report.is_foldable) * report.length
        ratios = [count / foldable for count in made]
        rows.append(
            {"tau": tau, "recompute_ratio": sum(ratios) / len(ratios), "recompute_ratios": ratios,
             "nodes_per_pass": foldable / engine.block_length / len(passes)}
        )  # fmt: skip
    return rows


def time_row(engine: Engine, passes: Sequence[DraftedPass], tau: float, repeats: int) -> Row:
    """Milliseconds a pass, unfolded and folded, over the drafted passes (SpecFold, Fig. 3)."""

    def all_passes(fold: FoldSettings | None) -> None:
        for drafted in passes:
            drafted.run(engine, fold)

    unfolded = measure(partial(all_passes, None), engine.device, repeats=repeats)
    folded = measure(partial(all_passes, FoldSettings(tau=(tau,))), engine.device, repeats=repeats)
    return {
        "tau": tau, "unfolded_ms": unfolded.median_ms / len(passes), "folded_ms": folded.median_ms / len(passes),
        "passes": len(passes),
    }  # fmt: skip


def shape_table(
    shape: str, budgets: Sequence[int], prefix: int, ratios: Sequence[float], *, device: str, dtype: torch.dtype,
    kernels: str, numerics: str, ceilings: Ceilings, repeats: int,
) -> list[Row]:  # fmt: skip
    """Folded passes of a model with random weights, by D and ρ, beside the unfolded pass and the floor.

    Nodes are a chain of blocks of random tokens, so that distances from the parent differ from row to row. ρ is forced
    by a τ for each layer: the quantile of the distances there, taken again where earlier layers fold. ``same_bits``:
    whether the pass at τ = 0 is the unfolded one.
    """
    config = shape_config(shape)
    engine = random_engine(
        config, num_slots=1, max_length=prefix + SPARE_POSITIONS, device=device, dtype=dtype, numerics=numerics,
        kernels=kernels,
    )  # fmt: skip
    fill_prefix(engine, prefix)
    return [
        row
        for budget in budgets
        for row in _shape_rows(engine, shape, budget, prefix, ratios, ceilings, repeats)
    ]


def _shape_rows(
    engine: Engine, shape: str, budget: int, prefix: int, ratios: Sequence[float], ceilings: Ceilings, repeats: int
) -> list[Row]:  # fmt: skip
    drafted = random_chain(engine, budget, prefix)
    plain = drafted.run(engine, None)
    at_zero = [
        drafted.run(engine, FoldSettings(tau=(0.0,))) for _ in range(3)
    ]  # by launches, captured, replayed
    same_bits = all(torch.equal(one, plain) for one in at_zero)

    unfolded = _device_time(engine, drafted, None, repeats)
    rows: list[Row] = []
    for ratio in ratios:
        fold = FoldSettings(tau=forced_taus(engine, drafted, ratio))
        timing = _device_time(engine, drafted, fold, repeats)
        drafted.run(engine, fold, timed=True)
        timed = engine.fold_report
        assert timed is not None
        found = sum(timed.ratios) / len(timed.ratios)
        floor = folded_floor_ms(ceilings, engine.config, budget, found, prefix, engine.dtype.itemsize)
        rows.append(
            {"shape": shape, "kernels": engine.kernels, "numerics": engine.numerics, "budget": budget, "prefix": prefix,
             "asked_ratio": ratio, "recompute_ratio": found, "folded": asdict(timing), "unfolded": asdict(unfolded),
             "floor_ms": floor, "over_floor": timing.median_ms / floor,
             "over_unfolded": timing.median_ms / unfolded.median_ms, "same_bits": same_bits,
             "stages_by_launches_ms": {stage: 1e3 * spent for stage, spent in (timed.seconds or {}).items()}}
        )  # fmt: skip
    return rows


def _device_time(engine: Engine, drafted: DraftedPass, fold: FoldSettings | None, repeats: int) -> Timing:
    """A pass without its head; on a GPU its graph replayed, so that the host's time is hidden."""
    for _ in range(4):  # the counts of a pass choose the graph of the next one, captured on its second run
        drafted.run(engine, fold)
        if fold is not None:
            assert engine.fold_report is not None
            _ = engine.fold_report.own_rows
    if engine.device.type == "cuda" and engine.kernels == "triton":
        return measure_queued(engine.queue_pass_again, engine.device, warm_up=1, repeats=repeats)
    return measure(partial(drafted.run, engine, fold), engine.device, repeats=repeats)


def random_chain(engine: Engine, budget: int, prefix: int) -> DraftedPass:
    """A root and a chain of ``budget`` nodes of random tokens, behind ``prefix`` stored ones."""
    length, num = engine.block_length, 1 + budget
    generator = torch.Generator().manual_seed(num)
    tokens = torch.randint(0, engine.config.vocab_size, (num, length), generator=generator, dtype=torch.int32)
    return DraftedPass(
        tokens=tokens.to(engine.device),
        slots=torch.zeros(num, dtype=torch.int32),
        starts=torch.full((num,), prefix // length * length, dtype=torch.int32),
        parents=[-1, *range(budget)],
    )


def forced_taus(engine: Engine, drafted: DraftedPass, ratio: float, rounds: int = 3) -> tuple[float, ...]:
    """A τ for each layer under which about ``ratio`` of the foldable rows are computed there."""
    if ratio >= 1:
        return (0.0,)
    taus = (0.0,)
    for _ in range(rounds):
        found = parent_distances(engine, drafted, FoldSettings(tau=taus)).flatten(1)
        taus = tuple(found.quantile(1 - ratio, dim=1).tolist())
    return taus


def folded_floor_ms(
    ceilings: Ceilings, config: ModelConfig, budget: int, ratio: float, prefix: int, bytes_per_value: int
) -> float:
    """Least time of a folded pass without its head: the pass over L + ρ·D·L rows, and for each layer gate, block
    correction and output projection of all rows (each the larger of bytes / bandwidth and FLOPs / rate)."""
    length, hidden = config.block_length, config.hidden_size
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    all_rows = (1 + budget) * length
    computed = round(length + ratio * budget * length)
    folded = all_rows - computed

    def operation(num_bytes: float, flops: float) -> float:
        return 1e3 * max(num_bytes / ceilings.bytes_per_second, flops / ceilings.flops_per_second)

    def projection(rows: int) -> float:
        values = hidden * heads * width + rows * (hidden + heads * width)
        return operation(bytes_per_value * values, 2.0 * rows * hidden * heads * width)

    gate = operation(bytes_per_value * all_rows * hidden, 5.0 * budget * length * hidden)
    # states of the source (fp32), the branch's keys and values, the output
    moved = folded * (4 * heads * (width + 2) + bytes_per_value * width * (2 * heads + 2 * kv_heads))
    correction = operation(moved, 4.0 * folded * heads * width * length)
    parts = pass_floor_parts(
        ceilings, hidden=hidden, layers=config.num_hidden_layers, heads=heads, kv_heads=kv_heads, width=width,
        inner=config.intermediate_size, vocab=config.vocab_size, rows=computed, head_rows=length, prefix=prefix,
        bytes_per_value=bytes_per_value, block_length=length,
    )  # fmt: skip
    extra = gate + correction + projection(all_rows) - projection(computed)
    return parts["products"] + parts["attention"] + config.num_hidden_layers * extra
