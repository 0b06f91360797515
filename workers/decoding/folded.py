"""What a folded round adds to a round: counts of what was recomputed, and the pass that checks it.

Drafted nodes fold onto their parents in the draft tree (SpecFold; ``dlmgrid.workers.folding``), so what is walked is
approximate. A *recheck* computes the walked nodes once more, unfolded; walking them by their own transitions gives the
serialized run. A root is never folded, so a sample that stayed at its root is exact already.

Legend: S samples of a round, A of them rechecked, L block length, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dlmgrid.workers.decoding.packing import FoldingTarget, Packed, Round
from dlmgrid.workers.decoding.state import state_hashes
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.decoding.verification import WalkedSteps

if TYPE_CHECKING:
    from dlmgrid.workers.decoding.decoder import Target


def count_folds(target: Target, round_: Round) -> None:
    """Add what the last pass of ``target`` recomputed and spent to the generations of its round."""
    assert isinstance(target, FoldingTarget)
    report = target.fold_report
    assert report is not None
    all_rows = len(report.is_foldable) * report.length
    nodes = round_.trees.current.num_nodes.tolist()
    for sample, first, count in zip(round_.samples, round_.first_segments, nodes, strict=True):
        generation, rows = sample.generation, count * report.length
        made = report.recomputed(first, first + count)
        before = generation.fold_recomputed or [0] * len(made)
        generation.fold_recomputed = [a + b for a, b in zip(before, made, strict=True)]
        generation.fold_rows += rows - report.length
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
