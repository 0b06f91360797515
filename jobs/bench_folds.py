"""A table of ``make bench``: what τ costs and saves end to end, tokens/s of folded drafts at batch 1.

A speed stands beside how many items keep their tokens. Accuracy by τ is :mod:`~dlmgrid.jobs.fold_curve`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dlmgrid.jobs.bench_decode import build_drafter, not_run, num_tokens, same_output, timed_decode
from dlmgrid.jobs.bench_passes import Row
from dlmgrid.workers.decoding.decoder import Generation, Prompt
from dlmgrid.workers.engine.engine import Engine
from dlmgrid.workers.folding.fold import FoldSettings

FOLDED = ("spiffy", "spot")


def fold_rows(
    engine: Engine, budgets: Sequence[int], taus: Sequence[float], prompts: Sequence[Prompt], gen_length: int,
    given: Mapping[str, Mapping[str, Any]], drafts: str = "host",
) -> Iterator[Row]:  # fmt: skip
    """Tokens/s by drafter, D and τ, over the same drafts unfolded and over draft-free, with the recompute ratio and how
    many items have the unfolded run's tokens, path and bits; ``drafts`` is where trees grow. A drafter without its file
    is a row that says so."""
    serialized, base = timed_decode(engine, "none", 0, prompts, gen_length, 1)
    draft_free = num_tokens(serialized) / base
    for method in FOLDED:
        if build_drafter(method, given) is None:
            yield not_run(method)
            continue
        for budget in budgets:
            plain, seconds = timed_decode(
                engine, method, budget, prompts, gen_length, 1, given=given, drafts=drafts
            )
            unfolded = num_tokens(plain) / seconds
            for tau in taus:
                fold = FoldSettings(tau=(tau,))
                found, seconds = timed_decode(
                    engine, method, budget, prompts, gen_length, 1, given=given, fold=fold, drafts=drafts
                )
                rate = num_tokens(found) / seconds
                yield {
                    "method": method, "budget": budget, "tau": tau, "recompute_ratio": recompute_ratio(found),
                    "tokens_per_second": rate, "over_unfolded": rate / unfolded, "over_draft_free": rate / draft_free,
                    **same_output(list(zip(found, plain, strict=True))),
                }  # fmt: skip


def recompute_ratio(found: Sequence[Generation]) -> float:
    """Of the rows of drafted nodes, all layers together, the share that was computed; 1 where nothing was drafted."""
    foldable = sum(one.fold_rows * len(one.fold_recomputed) for one in found)
    return sum(sum(one.fold_recomputed) for one in found) / foldable if foldable else 1.0
