"""The table of ``make bench`` on folded passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from dlmgrid.jobs.bench_passes import Row, fill_prefix, places
from dlmgrid.kernels.benchmark import measure
from dlmgrid.workers.engine.engine import Engine
from dlmgrid.workers.folding.fold import FoldSettings


def fold_table(
    engine: Engine, budget: int, prefix: int, taus: Sequence[float], repeats: int
) -> Iterator[Row]:
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
        return engine.forward(blocks.to(engine.device), *places(1 + budget, prefix), fold=fold, timed=timed)

    unfolded = measure(partial(one_pass, None), engine.device, repeats=repeats)
    for tau in taus:
        timing = measure(
            partial(one_pass, (FoldSettings(tau=(tau,)), parents)), engine.device, repeats=repeats
        )
        one_pass((FoldSettings(tau=(tau,)), parents), timed=True)
        report = engine.fold_report
        assert report is not None
        ratios = report.ratios
        yield {
            "budget": budget, "prefix": prefix, "tau": tau, "recompute_ratio": sum(ratios) / len(ratios),
            "recompute_ratios": ratios, "folded": asdict(timing), "unfolded": asdict(unfolded),
            "seconds": report.seconds,
        }  # fmt: skip
