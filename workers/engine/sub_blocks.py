"""Fast-dLLM-v2's sub-block cache: most passes forward one sub-block and attend to stale keys of the others.

A pass over the whole block, whose keys and values are kept, is made where the block is new or the first position of
the active sub-block is masked; every other pass forwards the active sub-block alone, and its keys and values take the
place of those kept for it. What a state gives therefore depends on the path to it: drafting is out of the question,
and rows are approximate against the model without this cache. The decoder counts rows of whole blocks, more than
such a pass computes. Source: ``use_block_cache`` of ``generate`` in the
published modeling.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlmgrid.kernels.embedding import MASKED
from dlmgrid.workers.engine.engine import Engine


@dataclass(slots=True)
class _Kept:
    """The block whose keys and values a slot keeps: where it starts, and its tokens in the last pass."""

    start: int
    tokens: Tensor  # [L] int32


class SubBlockTarget:
    """An engine seen through the sub-block cache: the decoder's target, for one state a sample and pass.

    Args:
        engine: the model, of a block-causal family.
        sub_block_length: W, which divides the block length.
    """

    def __init__(self, engine: Engine, sub_block_length: int) -> None:
        self.engine = engine
        self.sub_block_length = sub_block_length
        self.num_slots = engine.num_slots
        self.max_length = engine.max_length
        self.device = engine.device
        self.control_device = engine.device
        self.hidden_size = engine.hidden_size
        self._kept: dict[int, _Kept] = {}

    def logits(self, rows: Tensor) -> Tensor:
        """As :meth:`~dlmgrid.workers.engine.engine.Engine.logits`."""
        return self.engine.logits(rows)

    def forward(
        self, tokens: Tensor, slots: Tensor, block_starts: Tensor, store: Tensor, causal: bool = False
    ) -> Tensor:
        """Hidden states [N, L, H]; rows outside a sub-block that was forwarded alone are zero.

        Raises ValueError for two states of one slot in a pass, as a drafter would make them.
        """
        stored = store.tolist()
        alone: list[int] = []
        seen: set[int] = set()
        for segment, (slot, start) in enumerate(zip(slots.tolist(), block_starts.tolist(), strict=True)):
            if stored[segment]:
                self._kept.pop(slot, None)
                continue
            kept, state = self._kept.get(slot), tokens[segment]
            if slot in seen:
                raise ValueError(f"slot {slot}: two states of one sample in a pass under the sub-block cache")
            seen.add(slot)
            first = self._active(state)
            if kept is not None and self._continues(kept, start, state) and int(state[first]) != MASKED:
                alone.append(segment)
            self._kept[slot] = _Kept(start, state.clone())
        whole = [segment for segment in range(len(stored)) if segment not in set(alone)]
        out = torch.zeros(
            (*tokens.shape, self.engine.config.hidden_size), dtype=self.engine.dtype, device=self.device
        )
        if whole:
            index = torch.tensor(whole, device=tokens.device)
            at = index.to(slots.device)
            out[index] = self.engine.forward(
                tokens[index], slots[at], block_starts[at], store[at], causal, keep=True
            )
        if alone:
            index = torch.tensor(alone, device=tokens.device)
            at = index.to(slots.device)
            firsts = [self._active(tokens[segment]) for segment in alone]
            rows = self.engine.forward_part(
                torch.stack(
                    [
                        tokens[s, first : first + self.sub_block_length]
                        for s, first in zip(alone, firsts, strict=True)
                    ]
                ),
                slots[at],
                block_starts[at],
                firsts,
            )
            for segment, first, part in zip(alone, firsts, rows, strict=True):
                out[segment, first : first + self.sub_block_length] = part
        return out

    def _active(self, state: Tensor) -> int:
        """The first position of the leftmost sub-block of ``state`` [L] that has a mask."""
        position = int((state == MASKED).int().argmax())
        return position // self.sub_block_length * self.sub_block_length

    @staticmethod
    def _continues(kept: _Kept, start: int, state: Tensor) -> bool:
        """Whether ``state`` is a later state of the block that is kept."""
        filled = kept.tokens != MASKED
        return kept.start == start and bool((state[filled] == kept.tokens[filled]).all())
