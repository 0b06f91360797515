"""A tiny target whose logits are an explicit function of the state: small enough to enumerate its law.

The logit of token v at position i of a block is a random bias plus a random pair term for every other filled
position: bidirectional inside the block, blind to earlier blocks. It has the interface of the engine, so the whole
decoder runs on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED


class TinyTarget:
    """A target over ``vocab_size`` tokens (padded to ``width``, by default whole 64s, with -inf).

    Args:
        sharpness: scale of the logits; larger is more certain.
        bias: given logits [L, V] in place of random ones.
        pair: given pair terms [L, L, V, V]: what token w (third index) at position j (second) adds to the logits
            of position i (first); zeros make the positions independent.
        width: columns of the logits; drafting needs more than 32.
    """

    def __init__(
        self,
        *,
        block_length: int,
        vocab_size: int,
        num_slots: int = 8,
        max_length: int = 4096,
        sharpness: float = 2.0,
        seed: int = 0,
        bias: Tensor | None = None,
        pair: Tensor | None = None,
        width: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (block_length, block_length, vocab_size, vocab_size)
        self.num_slots = num_slots
        self.max_length = max_length
        self.device = torch.device("cpu")
        self.control_device = self.device
        self.vocab_size = vocab_size
        self.width = -(-vocab_size // 64) * 64 if width is None else width
        random_bias = torch.randn(block_length, vocab_size, generator=generator) * sharpness
        random_pair = torch.randn(shape, generator=generator) * sharpness / block_length**0.5
        self.bias = random_bias if bias is None else bias
        self.pair = random_pair if pair is None else pair
        self.num_forwards = 0

    @property
    def hidden_size(self) -> int:
        """Width of the rows that :meth:`forward` returns."""
        return self.vocab_size

    def forward(
        self, tokens: Tensor, slots: Tensor, block_starts: Tensor, store: Tensor, causal: bool = False
    ) -> Tensor:
        """Logits [N, L, V] of states int32 [N, L]; they stand in for hidden rows. It has no causal mode."""
        self.num_forwards += 1
        filled = tokens != MASKED
        ids = tokens.clamp_min(0).long() % self.vocab_size
        length = tokens.shape[1]
        out = self.bias.expand(tokens.shape[0], -1, -1).clone()
        for other in range(length):
            term = self.pair[:, other, ids[:, other]].transpose(0, 1)
            counts = filled[:, other, None, None] & (torch.arange(length)[None, :, None] != other)
            out += torch.where(counts, term, 0.0)
        return out

    def logits(self, rows: Tensor) -> Tensor:
        """fp32 [R, width], -inf past the vocabulary."""
        return torch.nn.functional.pad(rows, (0, self.width - self.vocab_size), value=-torch.inf)
