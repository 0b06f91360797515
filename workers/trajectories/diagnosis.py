"""What recorded runs say about drafting: how long stale tokens and a stale order hold, and what oracles would give.

Every quantity is a mean over events, by block (0 is the first generated one). A step has a stale snapshot unless it is
the first of its block; those steps enter ``argmax_share`` only. Quantities as in the diagnosis of SPOT, arXiv
2610.22543:

- ``stale_token_hit``: commits whose token is the one predicted from the pass one step older (at T > 0 under the
  commit's own noise).
- ``top8_coverage``: runs of the next 8 commits of a block whose tokens are all among the 8 stale candidates of their
  positions; whole runs only.
- ``order_hit``, by depth 1 to 8: steps that commit the position of highest stale confidence, the snapshot being
  ``depth`` passes old.
- ``aged_token_hit``, by depth 1 to 8: commits whose token is the one predicted from a pass ``depth`` passes old.
- ``argmax_share``, T > 0 only: commits whose token is the most probable one at T = 1 of the pass that made them.
- ``oracle_position_cut``, ``oracle_token_cut``, by budget: forwards of the serialized runs over those with the oracle.
- ``ssd_accepted``, ``confidence_tree_accepted``, by budget: drafted states accepted a round; ``…_cut``: as above;
  ``…_tree_depth`` and ``…_tree_width``: steps from the root to the deepest drafted state of a round, and states of the
  fullest depth. The same for ``spot`` with the shipped order model.

Legend: N steps, A selected steps, L block length.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.drafting import confidence_tree, spot, ssd
from dlmgrid.workers.drafting.drafter import Drafter, predict
from dlmgrid.workers.drafting.order_checkpoint import REFERENCE, find_order_checkpoint
from dlmgrid.workers.drafting.order_model import ScoreMemo
from dlmgrid.workers.drafting.ssd import chain_order
from dlmgrid.workers.trajectories.diagnostic_drafters import oracle_position, oracle_token
from dlmgrid.workers.trajectories.replay import ReplayBatch, without_future

RUN_LENGTH = 8
MAX_DEPTH = 8
DRAFT_BUDGETS = (8, 20)
_STEPS_AT_ONCE = 2048


class Quantity(NamedTuple):
    """What a value is of; None where a part does not apply, and for ``block`` also: over all blocks."""

    name: str
    block: int | None
    depth: int | None = None
    draft_budget: int | None = None


@dataclass(slots=True)
class _Ratio:
    numerator: int = 0
    denominator: int = 0
    count: int = 0


@dataclass(slots=True)
class Diagnosis:
    """Sums over the batches of one recorded cell."""

    _ratios: dict[Quantity, _Ratio] = field(default_factory=dict)

    def add_batch(self, batch: ReplayBatch) -> None:
        """Add every quantity of some generations."""
        blocks = _blocks(batch)
        _add_stale_tokens(self, batch, blocks)
        _add_coverage(self, batch, blocks)
        for depth in range(1, MAX_DEPTH + 1):
            _add_order(self, batch, blocks, depth)
        if batch.cell.temperature > 0:
            _add_argmax(self, batch, blocks)
        _add_oracles(self, batch)
        _add_drafters(self, batch)

    def add(self, quantity: Quantity, numerator: int, denominator: int, count: int) -> None:
        """Add to a quantity, and to its sum over all blocks."""
        for key in {quantity, quantity._replace(block=None)}:
            ratio = self._ratios.setdefault(key, _Ratio())
            ratio.numerator += numerator
            ratio.denominator += denominator
            ratio.count += count

    def merge(self, other: Diagnosis) -> None:
        """Add the sums of other batches of the cell."""
        for quantity, ratio in other._ratios.items():
            own = self._ratios.setdefault(quantity, _Ratio())
            own.numerator += ratio.numerator
            own.denominator += ratio.denominator
            own.count += ratio.count

    def add_hits(self, name: str, hits: Tensor, blocks: Tensor, depth: int | None = None) -> None:
        """Add events: bool [E] and the block int64 [E] of each."""
        for block in blocks.unique().tolist():
            here = hits[blocks == block]
            self.add(Quantity(name, block, depth), int(here.sum()), here.numel(), here.numel())

    def values(self) -> Iterator[tuple[Quantity, float, int]]:
        """(quantity, value, what it is a mean over), ordered by name, block, depth and budget."""

        def order(quantity: Quantity) -> tuple[str, int, int, int]:
            block, depth, budget = (-1 if part is None else part for part in quantity[1:])
            return quantity.name, block, depth, budget

        for quantity in sorted(self._ratios, key=order):
            ratio = self._ratios[quantity]
            yield quantity, ratio.numerator / ratio.denominator, ratio.count


def _blocks(batch: ReplayBatch) -> Tensor:
    """int64 [N]: which generated block each step works on."""
    first = batch.block_starts[batch.firsts][batch.sample_of_step]
    return torch.div(batch.block_starts - first, batch.block_length, rounding_mode="floor")


def _aged(batch: ReplayBatch, age: int) -> Sequence[Tensor]:
    """The steps int64 [A] that have a snapshot ``age`` passes old in their own block, some thousand at a time."""
    starts_block = batch.commit_counts == 0
    number = torch.arange(len(batch.commits))
    first_of_block = torch.where(starts_block, number, 0).cummax(0).values
    steps = (number - age >= first_of_block).nonzero().flatten()
    return steps.split(_STEPS_AT_ONCE) if steps.numel() else []


def _commits(batch: ReplayBatch, steps: Tensor) -> Tensor:
    """bool [A, L]: the positions that each step commits."""
    return batch.committed_at[steps] == steps[:, None]


def _add_stale_tokens(found: Diagnosis, batch: ReplayBatch, blocks: Tensor) -> None:
    for steps in _aged(batch, 1):
        inputs = batch.inputs(batch.cell, batch.sample_of_step[steps], steps)
        prediction = predict(inputs, inputs.commit_counts[:, None])
        which, position = _commits(batch, steps).nonzero(as_tuple=True)
        hits = prediction.first[:, 0][which, position] == batch.final_tokens[steps[which], position]
        found.add_hits("stale_token_hit", hits, blocks[steps[which]])


def _add_coverage(found: Diagnosis, batch: ReplayBatch, blocks: Tensor) -> None:
    positions = torch.arange(batch.block_length)
    for steps in _aged(batch, 1):
        order = batch.future(steps).steps_ahead
        is_open = batch.states[steps] == MASKED
        whole = is_open.sum(dim=1) >= RUN_LENGTH
        steps, order, is_open = steps[whole], order[whole], is_open[whole]
        rank = torch.where(is_open, order * batch.block_length + positions, torch.iinfo(torch.int64).max)
        run = rank.sort(dim=1).indices[:, :RUN_LENGTH]
        candidates = batch.snapshots.token_ids[steps - 1][..., :8]
        is_covered = (candidates == batch.final_tokens[steps][..., None]).any(dim=-1)
        found.add_hits("top8_coverage", is_covered.gather(1, run).all(dim=1), blocks[steps])


def _add_order(found: Diagnosis, batch: ReplayBatch, blocks: Tensor, depth: int) -> None:
    for steps in _aged(batch, depth):
        inputs = batch.inputs(batch.cell, batch.sample_of_step[steps], steps, age=depth)
        prediction = predict(inputs, inputs.commit_counts[:, None])
        confidence = chain_order(prediction.confidence[:, 0])
        likeliest = torch.where(inputs.roots == MASKED, confidence, -1.0).argmax(dim=1, keepdim=True)
        commits = _commits(batch, steps)
        found.add_hits("order_hit", commits.gather(1, likeliest).squeeze(1), blocks[steps], depth)
        which, position = commits.nonzero(as_tuple=True)
        tokens = prediction.first[:, 0][which, position] == batch.final_tokens[steps[which], position]
        found.add_hits("aged_token_hit", tokens, blocks[steps[which]], depth)


def _add_argmax(found: Diagnosis, batch: ReplayBatch, blocks: Tensor) -> None:
    steps, position = _commits(batch, torch.arange(len(batch.commits))).nonzero(as_tuple=True)
    hits = batch.snapshots.token_ids[steps, position, 0] == batch.final_tokens[steps, position]
    found.add_hits("argmax_share", hits, blocks[steps])


def _add_oracles(found: Diagnosis, batch: ReplayBatch) -> None:
    for method, draft in (("oracle_position", oracle_position), ("oracle_token", oracle_token)):
        for budget in DRAFT_BUDGETS:
            replayed = batch.replay(replace(batch.cell, method=method, budget=budget), draft)
            saved = len(batch.commits) - sum(result.nfe_denoise for result in replayed)
            forwards = sum(result.nfe_total for result in replayed)
            quantity = Quantity(f"{method}_cut", None, None, budget)
            found.add(quantity, forwards + saved, forwards, len(replayed))


def _add_drafters(found: Diagnosis, batch: ReplayBatch) -> None:
    for method, drafter in _drafters().items():
        if isinstance(drafter, spot.SpotDrafter):
            drafter.share(ScoreMemo())  # budgets meet the same roots
        for budget in DRAFT_BUDGETS:
            cell = replace(batch.cell, method=method, budget=budget)
            replayed = batch.replay(cell, without_future(drafter))
            rounds = [count for result in replayed for count in result.accepted]
            depths = [depth for result in replayed for depth in result.depths]
            widths = [width for result in replayed for width in result.widths]
            forwards = sum(result.nfe_total for result in replayed)
            saved = len(batch.commits) - len(rounds)
            for name, total in (("accepted", rounds), ("tree_depth", depths), ("tree_width", widths)):
                quantity = Quantity(f"{method}_{name}", None, None, budget)
                found.add(quantity, sum(total), len(total), len(total))
            found.add(
                Quantity(f"{method}_cut", None, None, budget), forwards + saved, forwards, len(replayed)
            )


@functools.cache
def _drafters() -> dict[str, Drafter]:
    found = {"ssd": ssd.build(), "confidence_tree": confidence_tree.build()}
    shipped = find_order_checkpoint(REFERENCE)
    if shipped.exists():
        found["spot"] = spot.build(shipped)
    return found
