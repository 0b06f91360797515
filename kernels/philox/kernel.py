"""Triton Philox 4×32-10 and the Gumbel values of the noise table: the twin's integers and uniforms, bit for bit.

    counter = (vocabulary index // 4, position, draw, stream), output word = vocabulary index % 4
    u = (word + 1/2) / 2^32 and g = -log(-log u) in fp64, g rounded to fp32

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmgrid.kernels.triton_support import check_one_device

_TILE = 1024


@triton.jit
def philox_words(c0, c1, c2, c3, k0, k1):
    """Ten rounds over uint32 counters and keys of shapes that broadcast."""
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(c0, tl.full((), 0xD2511F53, tl.uint32))
        low_0 = c0 * tl.full((), 0xD2511F53, tl.uint32)
        high_1 = tl.umulhi(c2, tl.full((), 0xCD9E8D57, tl.uint32))
        low_1 = c2 * tl.full((), 0xCD9E8D57, tl.uint32)
        c0 = high_1 ^ c1 ^ k0
        c2 = high_0 ^ c3 ^ k1
        c1 = low_1
        c3 = low_0
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def noise_words(keys, row, tokens, stream, position, draw):
    """The words of the entries ``tokens`` int32 of one row, as uint32; ``keys`` int64 [R, 2]."""
    k0 = tl.load(keys + 2 * row).to(tl.uint32)
    k1 = tl.load(keys + 2 * row + 1).to(tl.uint32)
    c0 = (tokens // 4).to(tl.uint32)
    zero = c0 * 0
    w0, w1, w2, w3 = philox_words(
        c0, zero + position.to(tl.uint32), zero + draw.to(tl.uint32), zero + stream.to(tl.uint32), k0, k1
    )
    lane = tokens % 4
    return tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))


@triton.jit
def gumbel_of_words(words):
    """fp32 Gumbel values of uint32 words; logarithms in fp64."""
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _rows_kernel(
    keys, positions, draws, words, noise, stream, vocab, TILE: tl.constexpr, AS_WORDS: tl.constexpr
):
    """Grid (rows, tiles of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    stream = tl.full((), 0, tl.int64) + stream
    drawn = noise_words(keys, row, tokens, stream, tl.load(positions + row), tl.load(draws + row))
    mask = tokens < vocab
    if AS_WORDS:
        tl.store(words + row * vocab + tokens, drawn.to(tl.int64), mask=mask)
    else:
        tl.store(noise + row * vocab + tokens, gumbel_of_words(drawn), mask=mask)


def gumbel_rows(keys: Tensor, stream: int, positions: Tensor, draws: Tensor, vocab_size: int) -> Tensor:
    """Whole rows of the noise table, fp32 [R, V], as the twin of this name.

    Args:
        keys: int64 [R, 2]; positions, draws: int64 [R].

    Raises:
        ValueError: other types or shapes.
    """
    return _rows(keys, stream, positions, draws, vocab_size, as_words=False)


def word_rows(keys: Tensor, stream: int, positions: Tensor, draws: Tensor, vocab_size: int) -> Tensor:
    """The 32-bit words behind :func:`gumbel_rows`, int64 [R, V]."""
    return _rows(keys, stream, positions, draws, vocab_size, as_words=True)


def _rows(
    keys: Tensor, stream: int, positions: Tensor, draws: Tensor, vocab_size: int, *, as_words: bool
) -> Tensor:
    check_noise_arguments("gumbel_rows", keys, positions, draws)
    num_rows = positions.shape[0]
    out = torch.empty(
        (num_rows, vocab_size), dtype=torch.int64 if as_words else torch.float32, device=positions.device
    )
    if num_rows and vocab_size:
        _rows_kernel[(num_rows, triton.cdiv(vocab_size, _TILE))](
            keys, positions, draws, out, out, stream, vocab_size, TILE=_TILE, AS_WORDS=as_words, num_warps=4
        )
    return out


def check_noise_arguments(operator: str, keys: Tensor, positions: Tensor, draws: Tensor) -> None:
    """Raise ValueError unless keys are int64 [R, 2], positions and draws int64 [R], contiguous, on one device."""
    num_rows = positions.shape[0]
    fits = keys.shape == (num_rows, 2) and positions.shape == draws.shape == (num_rows,)
    if not fits or {keys.dtype, positions.dtype, draws.dtype} != {torch.int64}:
        raise ValueError(
            f"{operator}: keys {tuple(keys.shape)} {keys.dtype}, positions {tuple(positions.shape)} "
            f"{positions.dtype}, draws {tuple(draws.shape)} {draws.dtype}; want int64 [R, 2], [R], [R]"
        )
    if not (keys.is_contiguous() and positions.is_contiguous() and draws.is_contiguous()):
        raise ValueError(f"{operator}: keys, positions and draws must be contiguous")
    check_one_device(operator, keys=keys, positions=positions, draws=draws)
