"""The shared noise table: virtual, so nothing is stored or sent, and any actor can read any entry.

An entry depends on (seed, repeat, item) through a 64-bit key, and on (stream, absolute position, draw index,
vocabulary index) through the counter. Batch, order, worker count and retries therefore cannot change it.

The draw index is the number of commits already made in the block (``commit_count``, the default): it grows along
every path and is a function of the state, so the law is that of fresh noise at every step. ``per_position`` is the
literal reading of SPOT (arXiv 2610.22543): one row per position, whatever was committed. It has the law of the
usual sampler only where the choice of positions does not depend on the drawn tokens; in the decoders shipped here
the confidence is that of the drawn token, so there it is biased.
"""

from __future__ import annotations

import enum
import hashlib

import torch
from torch import Tensor

from dlmgrid.kernels.philox import gumbel_at, gumbel_rows, uniform_at

NOISE_MODES = ("commit_count", "per_position")


class Stream(enum.IntEnum):
    """Independent parts of the table. ``DRAFT`` feeds a drafter that must not see the target's noise."""

    TOKEN = 0
    POSITION = 1
    DRAFT = 2


class NoiseTable:
    """The table of one seed.

    Args:
        seed: any integer in [-2^63, 2^64).
        mode: ``commit_count`` or ``per_position``.

    Raises:
        ValueError: unknown mode, or a seed outside the range.
    """

    def __init__(self, seed: int, mode: str = "commit_count") -> None:
        if mode not in NOISE_MODES:
            raise ValueError(f"noise {mode!r} is not one of {', '.join(NOISE_MODES)}")
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed {seed} does not fit 64 bits")
        self.seed = seed
        self.mode = mode

    def key(self, item_id: str, repeat: int) -> tuple[int, int]:
        """The two 32-bit key words of an item's entries."""
        text = f"{self.seed % 2**64}\x1f{repeat}\x1f{item_id}"
        word = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(word[:4], "little"), int.from_bytes(word[4:], "little")

    def draw_indices(self, commit_counts: Tensor) -> Tensor:
        """The draw index of states with this many commits in their block, int64 of the same shape."""
        return commit_counts if self.mode == "commit_count" else torch.zeros_like(commit_counts)

    def rows(
        self, keys: Tensor, stream: Stream, positions: Tensor, commit_counts: Tensor, vocab: int
    ) -> Tensor:
        """Gumbel noise fp32 [R, vocab] for rows with keys int64 [R, 2], positions and commit counts int64 [R]."""
        return gumbel_rows(keys, int(stream), positions, self.draw_indices(commit_counts), vocab)

    def entries(
        self, keys: Tensor, stream: Stream, positions: Tensor, commit_counts: Tensor, token_ids: Tensor
    ) -> Tensor:
        """Gumbel noise fp32 [..., K] at token_ids int64 [..., K]; keys [..., 2], the others [...]."""
        return gumbel_at(keys, int(stream), positions, self.draw_indices(commit_counts), token_ids)

    def position_uniforms(self, keys: Tensor, positions: Tensor, draws: Tensor) -> Tensor:
        """Uniforms fp64 [R] strictly inside (0, 1) for choosing positions: keys int64 [R, 2], the others int64 [R].

        ``draws`` is whatever grows along a path; the mode does not touch it.
        """
        return uniform_at(keys, int(Stream.POSITION), positions, draws)

    def position_gumbels(self, keys: Tensor, positions: Tensor, draws: Tensor) -> Tensor:
        """Gumbel noise fp32 [R] of the same entries."""
        ids = torch.zeros_like(positions)[..., None]
        return gumbel_at(keys, int(Stream.POSITION), positions, draws, ids).squeeze(-1)
