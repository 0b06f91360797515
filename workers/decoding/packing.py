"""One packed pass: which blocks it computes, for whom, and which of them are stored.

Legend: N segments of L tokens, S samples of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from dlmgrid.workers.decoding.generation import Sample
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.window import WindowTrees
from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.folding.fold import FoldReport, FoldSettings

if TYPE_CHECKING:
    from dlmgrid.workers.decoding.target import Target


@runtime_checkable
class FoldingTarget(Protocol):
    """A target that computes folded passes; ``fold_report`` says what the last one recomputed."""

    fold_report: FoldReport | None

    def forward(
        self,
        tokens: Tensor,
        slots: Tensor,
        block_starts: Tensor,
        store: Tensor,
        causal: bool = False,
        fold: tuple[FoldSettings, Sequence[int]] | None = None,
        *,
        timed: bool = False,
    ) -> Tensor: ...


class Packed:
    """The segments of a pass, in the order they were added."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens: list[Tensor] = []
        self._slots: list[int] = []
        self._starts: list[int] = []
        self._stores: list[bool] = []
        self._parents: list[int] = []

    def add(
        self,
        states: Tensor,
        slot: int,
        start: int,
        *,
        stores: bool = False,
        parents: Sequence[int] | None = None,
    ) -> int:
        """Add states int32 [n, L] of the block at ``start``; the index of the first one.

        ``parents``: the place among them of the state that each may fold onto, which comes before it; the first and
        those of other calls never fold.
        """
        first, count = len(self._slots), states.shape[0]
        self._tokens.append(states)
        self._slots += [slot] * count
        self._starts += [start] * count
        self._stores += [stores] * count
        self._parents += [first + parents[node] if parents and node else -1 for node in range(count)]
        return first

    def store(self, segment: int) -> None:
        """Have a segment store its keys and values: the next block of the pass reads them."""
        self._stores[segment] = True

    def run(
        self,
        target: Target,
        *,
        causal: bool = False,
        fold: FoldSettings | None = None,
        timed: bool = False,
    ) -> Tensor:
        """Hidden rows [N, L, H]; ``causal``: every block sees itself causally; ``fold``: states with parents fold, in
        stages that are ``timed`` apart.

        Raises ValueError for folds on a target that has none.
        """
        arguments = (
            torch.cat(self._tokens),
            torch.tensor(self._slots, dtype=torch.int32, device=self._device),
            torch.tensor(self._starts, dtype=torch.int32, device=self._device),
            torch.tensor(self._stores, device=self._device),
            causal,
        )
        if fold is None:
            return target.forward(*arguments)
        if not isinstance(target, FoldingTarget):
            raise ValueError("fold: this target computes no folded pass")
        return target.forward(*arguments, fold=(fold, self._parents), timed=timed)


@dataclass(kw_only=True, slots=True)
class Round:
    """The denoising samples of a pass with their drafts.

    ``pending``: by sample the states on the way to its root that were folded when they were walked, oldest first.

    ``slots`` int64 [S]. ``looks_ahead`` bool [S]: whose next block is computed beside the root. After
    :meth:`pack`, ``first_segments`` are the indices of the roots, or of what is pending before them, and
    ``next_segments`` those of the fresh next blocks, -1 where none is packed.
    """

    samples: list[Sample]
    inputs: DraftInputs
    slots: Tensor
    trees: WindowTrees
    looks_ahead: Tensor
    pending: list[list[list[int]]]
    first_segments: list[int] = field(default_factory=list)
    next_segments: list[int] = field(default_factory=list)

    @property
    def num_pending(self) -> list[int]:
        """States of each sample that a folded walk passed, computed unfolded in this pass, before its root."""
        return [len(pending) for pending in self.pending]

    def pack(self, packed: Packed) -> None:
        """Add pending states and the trees: the current block's, and behind a complete node, or else behind the root of
        a sample that looks ahead, the next block's. What the next block is to read is stored; a later pass overwrites
        it."""
        trees = self.trees
        nodes, parents = trees.current.num_nodes.tolist(), trees.current.parents.tolist()
        complete, enters, looks = trees.complete.tolist(), trees.enters.tolist(), self.looks_ahead.tolist()
        following = None if trees.following is None else trees.following.num_nodes.tolist()
        for index, sample in enumerate(self.samples):
            start, beyond = sample.block_start, sample.block_start + sample.block_length
            states = trees.current.tokens[index, : nodes[index]]
            before = torch.tensor(self.pending[index], dtype=torch.int32).view(-1, states.shape[1])
            packed.add(before.to(states.device), sample.slot, start)
            first = packed.add(states, sample.slot, start, parents=parents[index])
            self.first_segments.append(first - len(before))
            ahead = -1
            if complete[index] >= 0:
                packed.store(first + complete[index])
            elif looks[index]:
                packed.store(first)
                fresh = torch.full_like(trees.current.tokens[index, :1], MASKED)
                ahead = packed.add(fresh, sample.slot, beyond)
            if enters[index] and following is not None and trees.following is not None:
                states = trees.following.tokens[index, : following[index]]
                ahead = packed.add(states, sample.slot, beyond)
            self.next_segments.append(ahead)

    def counted_segments(self) -> list[int]:
        """Blocks computed for each sample; a look ahead counts where it is for drafting."""
        segments = self.trees.num_segments()
        if self.trees.current.budget > 0:
            segments = segments + self.looks_ahead
        return [count + pending for count, pending in zip(segments.tolist(), self.num_pending, strict=True)]
