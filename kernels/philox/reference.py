"""Torch twin of the noise kernel: Philox 4×32-10 by its definition, in int64 arithmetic.

An entry of the noise table is a function of a 64-bit key and of (stream, position, draw, vocabulary index):

    counter = (vocabulary index // 4, position, draw, stream), output word = vocabulary index % 4
    u = (word + 1/2) / 2^32 in fp64, so that u lies strictly inside (0, 1)
    g = -log(-log u) in fp64, rounded to fp32

The integers and uniforms are the same bits on every device; the Gumbel values agree to 1 ulp (fp64 logarithms
differ in their last place between devices) and are bit-equal on one.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; known answers from the Random123
distribution (DEShawResearch/random123, tests/kat_vectors).
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
MASK_32 = 0xFFFFFFFF
NUM_ROUNDS = 10

# Counters hashed at once: the working set (a dozen int64 buffers) then stays in a CPU core's second-level cache.
_CHUNK = 8192


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten Philox 4×32 rounds.

    Args:
        counter: four int64 tensors holding 32-bit words, of shapes that broadcast.
        key: two int64 tensors holding 32-bit words, of shapes that broadcast with the counter.

    Returns:
        Four int64 tensors holding 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(NUM_ROUNDS):
        if round_index:
            k0 = (k0 + WEYL_0) & MASK_32
            k1 = (k1 + WEYL_1) & MASK_32
        # The product of two 32-bit words fills 64 bits: int64 multiplication keeps them all, sign included.
        product_0 = c0 * MULTIPLIER_0
        product_1 = c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & MASK_32) ^ c1 ^ k0,
            product_1 & MASK_32,
            ((product_0 >> 32) & MASK_32) ^ c3 ^ k1,
            product_0 & MASK_32,
        )
    return c0, c1, c2, c3


def uniform(words: Tensor) -> Tensor:
    """32-bit words (int64) as fp64 uniforms strictly inside (0, 1)."""
    return (words.double() + 0.5) * 2.0**-32


def _gumbel(words: Tensor) -> Tensor:
    flat = uniform(words).flatten()
    # Whole vectors only: a CPU computes the tail of a buffer with a scalar logarithm of other rounding.
    padding = -flat.numel() % 64
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding), value=0.5)
    noise = flat.log_().neg_().log_().neg_().float()
    return noise[: words.numel()].view(words.shape)


def gumbel_rows(keys: Tensor, stream: int, positions: Tensor, draws: Tensor, vocab_size: int) -> Tensor:
    """Whole rows of the noise table.

    Args:
        keys: int64 [R, 2], the two 32-bit key words of each row.
        stream: which stream (token, position, draft).
        positions: int64 [R], absolute output positions.
        draws: int64 [R], draw indices.
        vocab_size: V.

    Returns:
        fp32 [R, V].
    """
    num_rows = positions.shape[0]
    num_quads = -(-vocab_size // 4)
    quads = torch.arange(num_quads, dtype=torch.int64, device=positions.device)
    out = torch.empty(num_rows, num_quads * 4, dtype=torch.float32, device=positions.device)
    rows_at_once = max(1, _CHUNK // num_quads) if positions.device.type == "cpu" else num_rows
    for start in range(0, num_rows, rows_at_once):
        rows = slice(start, start + rows_at_once)
        counter = (
            quads[None, :],
            positions[rows, None],
            draws[rows, None],
            torch.full((1, 1), stream, dtype=torch.int64, device=positions.device),
        )
        words = philox(counter, (keys[rows, :1], keys[rows, 1:]))
        block = torch.stack(torch.broadcast_tensors(*words), dim=-1)
        out[rows] = _gumbel(block).flatten(1)
    return out[:, :vocab_size]


def gumbel_at(keys: Tensor, stream: int, positions: Tensor, draws: Tensor, token_ids: Tensor) -> Tensor:
    """Single entries of the noise table; the same values that :func:`gumbel_rows` has there.

    Args:
        keys: int64 [..., 2]; positions, draws: int64 [...]; token_ids: int64 [..., K].

    Returns:
        fp32 [..., K].
    """
    counter = (
        token_ids // 4,
        positions[..., None].expand_as(token_ids),
        draws[..., None].expand_as(token_ids),
        torch.full_like(token_ids, stream),
    )
    words = torch.stack(philox(counter, (keys[..., 0:1], keys[..., 1:2])), dim=-1)
    lane = (token_ids % 4)[..., None]
    return _gumbel(words.gather(-1, lane).squeeze(-1))


def uniform_at(keys: Tensor, stream: int, positions: Tensor, draws: Tensor) -> Tensor:
    """The uniform behind the entry at token id 0, fp64 [...]; keys int64 [..., 2], positions and draws int64 [...]."""
    zeros = torch.zeros_like(positions)
    words = philox((zeros, positions, draws, torch.full_like(zeros, stream)), (keys[..., 0], keys[..., 1]))
    return uniform(words[0])
