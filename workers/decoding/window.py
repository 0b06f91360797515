"""The two-block window: drafts that finish a block and enter the next one, and a next block that starts drafted.

Two switches, each of which changes forwards and never a token:

- *cross-block*: a drafted state may be complete. The pass stores its keys and values as the commit pass would and
  computes the fresh next block behind it (one node of two blocks: 2L rows), and with it drafts inside that next
  block. Where the walk reaches the complete state, the block is committed already and the walk goes on in the next
  one, whose logits are exact. A slot holds one version of a block, so of all complete drafts the one of largest
  mass is packed. Drafts of both blocks share one budget, by mass: a draft of the next block weighs its own mass
  times that of the complete state before it.
- *refresh*: what the window says of the fresh next block behind the partly filled root is its stale snapshot. It is
  what next-block drafts are made from, and the first round of the next block is drafted too.

A window draft behind a block that holds a stop id is dropped and not counted. Public precedent of a window of two
blocks: the eager acceptance of FreeDave (arXiv 2510.00294), whose window likewise keeps the output; cross-block
drafting and draft refresh are named, not defined, by SPOT (arXiv 2610.22543). Live decoding and replay share this
file, so their counts agree.

Legend: S samples, L block length, D budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlmgrid.workers.decoding.commit_rules import CommitRule
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED, num_masked
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import DraftInputs

WINDOWS = ("", "cross_block", "refresh", "full")
"""Settings of ``Cell.window``: neither switch, one of them, both."""

Draft = Callable[[DraftInputs, DraftTree], None]


def crosses(window: str) -> bool:
    """Whether drafts may leave the block under this setting of ``Cell.window``."""
    return window in ("cross_block", "full")


def refreshes(window: str) -> bool:
    """Whether the first round of a block is drafted under this setting of ``Cell.window``."""
    return window in ("refresh", "full")


@dataclass(kw_only=True, slots=True)
class WindowTrees:
    """The drafts of one round.

    ``current`` are the trees of the block. ``complete`` int64 [S] is the node of ``current`` that completes it, -1
    for none. ``following`` are the trees of the next block, rooted in its fresh state, and ``enters`` bool [S] says
    whose are packed; None where no draft leaves its block.
    """

    current: DraftTree
    complete: Tensor
    enters: Tensor
    following: DraftTree | None = None

    def num_drafted(self) -> Tensor:
        """int64 [S]: drafted nodes; the fresh state is the second half of the complete one and is not counted."""
        drafted = self.current.num_nodes - 1
        if self.following is not None:
            drafted = drafted + torch.where(self.enters, self.following.num_nodes - 1, 0)
        return drafted

    def num_segments(self) -> Tensor:
        """int64 [S]: packed blocks of L rows, root included."""
        segments = self.current.num_nodes.clone()
        if self.following is not None:
            segments += torch.where(self.enters, self.following.num_nodes, 0)
        return segments


def holds_stop(states: Tensor, first: Tensor, stop_token_ids: Sequence[int]) -> Tensor:
    """bool [S]: whether states int32 [S, L] hold a stop id at or after position ``first`` int64 [S]."""
    if not stop_token_ids:
        return torch.zeros(states.shape[0], dtype=torch.bool, device=states.device)
    positions = torch.arange(states.shape[1], device=states.device)
    stops = torch.tensor(list(stop_token_ids), dtype=states.dtype, device=states.device)
    return (torch.isin(states, stops) & (positions >= first[:, None])).any(dim=1)


def prompt_in_block(roots: Tensor, commit_counts: Tensor) -> Tensor:
    """int64 [S]: tokens of the prompt at the head of the blocks."""
    return roots.shape[1] - num_masked(roots) - commit_counts


def wants_following(
    inputs: DraftInputs, budget: int, has_next: Tensor, stop_token_ids: Sequence[int]
) -> Tensor:
    """bool [S]: whose next block is worth a look from the root: the block may end in this round or the next one."""
    rule: CommitRule = inputs.rule
    reach = inputs.roots.shape[1] if rule.max_commits is None else 2 * rule.max_commits * (budget + 1)
    first = prompt_in_block(inputs.roots, inputs.commit_counts)
    near = num_masked(inputs.roots) <= reach
    return has_next & near & ~holds_stop(inputs.roots, first, stop_token_ids)


def draft_round(
    draft: Draft,
    inputs: DraftInputs,
    *,
    budget: int,
    window: str,
    next_snapshots: Snapshots | None,
    has_next: Tensor,
    stop_token_ids: Sequence[int],
) -> WindowTrees:
    """The drafts of one round, at most ``budget`` nodes a sample.

    Args:
        inputs: of the current block.
        next_snapshots: S rows, what is known of the fresh next block; needed where drafts cross.
        has_next: bool [S], whether the canvas goes on after the block.
    """
    roots = inputs.roots
    num_samples, length = roots.shape
    device = roots.device
    tree = DraftTree(num_samples, budget, length, device)
    tree.plant(roots)
    nowhere = torch.full((num_samples,), -1, dtype=torch.int64, device=device)
    trees = WindowTrees(current=tree, complete=nowhere, enters=nowhere >= 0)
    if budget == 0:
        return trees
    if not crosses(window):
        draft(inputs, tree)
        return trees
    draft(replace(inputs, allows_complete=True), tree)
    trees.complete = _keep_one_complete(tree)
    is_complete = trees.complete >= 0
    if not bool(is_complete.any()):
        return trees
    finished = tree.tokens[torch.arange(num_samples, device=device), trees.complete.clamp_min(0)]
    first = prompt_in_block(roots, inputs.commit_counts)
    trees.enters = is_complete & has_next & ~holds_stop(finished, first, stop_token_ids)
    if not bool(trees.enters.any()):
        return trees
    following = DraftTree(num_samples, budget, length, device)
    fresh = torch.full_like(roots, MASKED)
    following.plant(fresh)
    trees.following = following
    assert next_snapshots is not None, "drafts that cross need what is known of the next block"
    draft(_fresh_inputs(inputs, fresh, next_snapshots, trees.enters), following)
    _share_budget(trees, budget)
    return trees


def _fresh_inputs(inputs: DraftInputs, fresh: Tensor, snapshots: Snapshots, enters: Tensor) -> DraftInputs:
    """What a drafter reads of the next block."""
    everyone = torch.arange(fresh.shape[0], device=fresh.device)
    known = snapshots.select(everyone)
    known.is_valid = snapshots.is_valid & enters
    return replace(
        inputs,
        roots=fresh,
        commit_counts=torch.zeros_like(inputs.commit_counts),
        block_starts=inputs.block_starts + fresh.shape[1],
        snapshots=known,
    )


def _keep_one_complete(tree: DraftTree) -> Tensor:
    """Drop all complete nodes but the one of largest mass; its index int64 [S], -1 where there is none."""
    is_complete = tree.is_node() & (num_masked(tree.tokens) == 0)
    is_complete[:, 0] = False
    mass = torch.where(is_complete, tree.log_mass, -torch.inf)
    best = mass.argmax(dim=1)  # the first of equals is found below, torch leaves it open
    best = (mass == mass.gather(1, best[:, None])).to(torch.int8).argmax(dim=1)
    has_one = is_complete.any(dim=1)
    kept = ~is_complete
    kept[has_one, best[has_one]] = True
    place = kept.cumsum(dim=1).gather(1, best[:, None]).squeeze(1) - 1
    tree.keep(kept)
    return torch.where(has_one, place, -1)


def _share_budget(trees: WindowTrees, budget: int) -> None:
    """Keep the ``budget`` nodes of largest mass of both trees together; ties go to the current block."""
    current, following = trees.current, trees.following
    assert following is not None
    own, beyond = _path_mass(current), _path_mass(following)
    before = own.gather(1, trees.complete.clamp_min(0)[:, None])
    beyond = torch.where(trees.enters[:, None], beyond + before, -torch.inf)
    both = torch.cat((own[:, 1:], beyond[:, 1:]), dim=1)
    order = both.sort(dim=1, descending=True, stable=True).indices[:, :budget]
    kept = torch.zeros_like(both, dtype=torch.bool).scatter(1, order, True) & (both > -torch.inf)
    root = torch.ones(kept.shape[0], 1, dtype=torch.bool, device=kept.device)
    mine, theirs = kept[:, :budget], kept[:, budget:]
    kept_current = torch.cat((root, mine), dim=1)
    place = kept_current.cumsum(dim=1).gather(1, trees.complete.clamp_min(0)[:, None]).squeeze(1) - 1
    trees.complete = torch.where(trees.complete >= 0, place, -1)
    current.keep(kept_current)
    following.keep(torch.cat((root, theirs), dim=1))


def _path_mass(tree: DraftTree) -> Tensor:
    """fp64 [S, 1 + D]: log mass capped by that of the first parent, so that cutting by it keeps ancestors; -inf for
    what is no node."""
    mass = torch.where(tree.is_node(), tree.log_mass, -torch.inf)
    mass[:, 0] = 0.0
    for node in range(1, mass.shape[1]):
        parent = tree.parents[:, node].clamp_min(0).long()
        above = mass.gather(1, parent[:, None]).squeeze(1)
        mass[:, node] = torch.minimum(mass[:, node], above)
    return mass
