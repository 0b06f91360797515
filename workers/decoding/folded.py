"""What a folded round adds to a round: counts of what was recomputed, and the pass that checks it.

Drafted nodes fold onto their parents in the draft tree (SpecFold; ``dlmgrid.workers.folding``), so what is walked is
approximate. A *recheck* computes the walked nodes once more, unfolded; walking them by their own transitions gives the
serialized run. A root is never folded, so a sample that stayed at its root is exact already.

*Pipelined*, the walked nodes are *pending*: the next round's pass computes them unfolded beside the root they led to
and the drafts from it. Pending nodes, root and drafts are one tree, and one walk goes through it: its transitions at
pending nodes and at the root are the serialized run's and count, those at drafts are pending in turn. Where a pending
node's own transition is not the next of them the walk leaves the tree, and the round's drafts with it; the state it
ends at is then exact. So every round makes at least one exact step. Only at a block's end is a pass of its own needed.

Legend: S samples of a round, A of them rechecked, L block length, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dlmgrid.workers.decoding.generation import Sample
from dlmgrid.workers.decoding.packing import FoldingTarget, Packed, Round
from dlmgrid.workers.decoding.state import num_masked, state_hashes
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.decoding.verification import WalkedSteps
from dlmgrid.workers.drafting.drafter import DraftInputs

if TYPE_CHECKING:
    from dlmgrid.workers.decoding.target import Target


def count_folds(target: Target, round_: Round) -> None:
    """Add what the last pass of ``target`` recomputed and spent to the generations of its round."""
    assert isinstance(target, FoldingTarget)
    report = target.fold_report
    assert report is not None
    all_rows = len(report.is_foldable) * report.length
    nodes = round_.trees.current.num_nodes.tolist()
    for sample, first, count, unfolded in zip(
        round_.samples, round_.first_segments, nodes, round_.num_pending, strict=True
    ):
        generation, rows = sample.generation, (count + unfolded) * report.length
        made = report.recomputed(first, first + unfolded + count)
        before = generation.fold_recomputed or [0] * len(made)
        generation.fold_recomputed = [a + b for a, b in zip(before, made, strict=True)]
        generation.fold_rows += (count - 1) * report.length
        for stage, spent in (report.seconds or {}).items():
            before_it = getattr(generation.seconds, stage)
            setattr(generation.seconds, stage, before_it + spent * rows / all_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recheck:
    """The walked paths of A samples of a round, computed unfolded.

    ``samples``: their places in the round; ``tree``: a chain for each of the S samples, that of the others its root
    alone; ``computed`` [n, L, H]: the nodes of the A chains past their roots, in order.
    """

    samples: list[int]
    tree: DraftTree
    computed: Tensor

    @property
    def num_computed(self) -> list[int]:
        """Nodes computed for each of the A samples."""
        nodes = self.tree.num_nodes.tolist()
        return [nodes[index] - 1 for index in self.samples]

    def behind_roots(
        self, roots: Tensor, computed: Tensor, first_segments: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Rows of every chain in one piece, and int64 [S] where each begins (0 for samples without one).

        ``roots`` [N, L, H] are the rows of the folded pass, of which ``first_segments`` are the S roots.
        """
        parts: list[Tensor] = []
        firsts = [0] * len(first_segments)
        used = 0
        for place, (index, count) in enumerate(zip(self.samples, self.num_computed, strict=True)):
            firsts[index] = used + place
            parts += [roots[first_segments[index]][None], computed[used : used + count]]
            used += count
        return torch.cat(parts), torch.tensor(firsts, dtype=torch.int64, device=self.tree.tokens.device)


def recheck_round(
    target: Target, round_: Round, walked: Sequence[WalkedSteps], *, causal: bool
) -> Recheck | None:
    """Compute the nodes that were walked in a folded round again, unfolded; None where all stayed at their roots."""
    again = [index for index, steps in enumerate(walked) if len(steps.commits) > 1]
    if not again:
        return None
    roots = round_.inputs.roots
    deepest = max(len(walked[index].commits) for index in again)
    tree = DraftTree(len(round_.samples), deepest - 1, roots.shape[1], roots.device)
    tree.tokens[:, 0] = roots
    packed = Packed(roots.device)
    for index in again:
        sample, state = round_.samples[index], list(round_.samples[index].block)
        path = [list(state)]
        for commits in walked[index].commits[:-1]:
            for at, token in commits:
                state[at] = token
            path.append(list(state))
        tree.tokens[index, : len(path)] = torch.tensor(path, dtype=torch.int32, device=roots.device)
        tree.num_nodes[index] = len(path)
        packed.add(tree.tokens[index, 1 : len(path)], sample.slot, sample.block_start)
    tree.hashes[:] = state_hashes(tree.tokens.flatten(0, 1)).view(tree.hashes.shape)
    return Recheck(samples=again, tree=tree, computed=packed.run(target, causal=causal))


def with_pending(round_: Round) -> DraftTree:
    """The trees of a round with each sample's pending states, a chain, before its root."""
    current = round_.trees.current
    length, device = current.tokens.shape[2], current.tokens.device
    out = DraftTree(len(round_.samples), current.budget + max(round_.num_pending), length, device)
    nodes = current.num_nodes.tolist()
    for index, (pending, count) in enumerate(zip(round_.pending, nodes, strict=True)):
        before = torch.tensor(pending, dtype=torch.int32, device=device).view(-1, length)
        out.tokens[index, : len(before) + count] = torch.cat((before, current.tokens[index, :count]))
        out.num_nodes[index] = len(before) + count
    out.hashes[:] = state_hashes(out.tokens.flatten(0, 1)).view(out.hashes.shape)
    return out


def inputs_at(inputs: DraftInputs, trees: DraftTree, samples: Sequence[Sample]) -> DraftInputs:
    """``inputs`` with the commits that were made in the block at the roots of ``trees``."""
    roots = trees.tokens[:, 0]
    given = torch.tensor([sample.prompt_in_block for sample in samples], device=roots.device)
    return replace(inputs, commit_counts=roots.shape[1] - num_masked(roots) - given)


def split_walk(
    root: Sequence[int], unfolded: Sequence[Sequence[int]], steps: WalkedSteps
) -> tuple[int, list[list[int]]]:
    """How many of the steps from ``root`` on were made at one of the ``unfolded`` states, and the states of the others.

    Drafts have more tokens than any of the unfolded states, so these come first.
    """
    exact = {tuple(state) for state in unfolded}
    state = list(root)
    visited: list[list[int]] = []
    for commits in steps.commits:
        visited.append(list(state))
        for at, token in commits:
            state[at] = token
    pending = [state for state in visited if tuple(state) not in exact]
    return len(visited) - len(pending), pending


def compute_pending(
    target: Target, samples: Sequence[Sample], which: Sequence[int], device: torch.device, *, causal: bool
) -> tuple[DraftTree, Tensor, Tensor]:
    """One unfolded pass over what is pending of the samples ``which``.

    Returns a chain of it for each of the samples (for those not asked for their block alone), where each begins, int64
    [S], and the rows [n, L, H].
    """
    length = samples[0].block_length
    chains = DraftTree(len(samples), max(len(samples[index].pending) for index in which) - 1, length, device)
    chains.plant(torch.tensor([sample.block for sample in samples], dtype=torch.int32, device=device))
    firsts = [0] * len(samples)
    packed = Packed(device)
    for index in which:
        sample = samples[index]
        states = torch.tensor(sample.pending, dtype=torch.int32, device=device)
        chains.tokens[index, : len(states)] = states
        chains.num_nodes[index] = len(states)
        firsts[index] = packed.add(states, sample.slot, sample.block_start)
    chains.hashes[:] = state_hashes(chains.tokens.flatten(0, 1)).view(chains.hashes.shape)
    return chains, torch.tensor(firsts, dtype=torch.int64, device=device), packed.run(target, causal=causal)
