"""Triton logits pass: noise, choice, summary statistics, top-32 and digest of a row in one read of its logits.

One program reduces up to 4096 entries of the vocabulary of one row, a second kernel merges a row's tiles in
ascending order.
With m a maximum, t(x) = exp(x - m) and Z = Σ t, over tiles joined by the usual rescaling:

    probability of the chosen token  t(x / T) / Z_T, the softmax's own quotient (never exp(x - logsumexp))
    log-sum-exp  m + log Z           entropy  log Z - Σ t (x - m) / Z
    tail mass    Σ t / Z over what is not among the 32, added up, not a difference from 1
    log tempered mass  log Z_T - log(Z) / T

Candidates are compared as integers, the order of the value above the inverted id, so that ties go to the lower id and
no order of comparison matters. Noise is that of ``kernels.philox``, made where it is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmgrid.kernels.logits.reference import NUM_CANDIDATES, Choice, LogitsPass, Summary
from dlmgrid.kernels.philox.kernel import check_noise_arguments, gumbel_of_words, noise_words
from dlmgrid.kernels.triton_support import power_of_two

_TILE = 4096
_NUM_FLOATS = 8  # maximum, Z, Σ t (x - m), tail, tempered maximum, Z_T, chosen x / T, unused
MAX_VOCABULARY = 2**31 - 1 - _TILE
_NO_KEY = -(2**63)


@triton.jit
def _sort_key(values, tokens):
    """int64 that orders by value, then by lower token id; NaN above everything."""
    values = tl.where(values == 0, 0.0, values)  # -0 and 0 are one value
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - tokens).to(tl.int64)


@triton.jit
def _token_of(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _value_of(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _multiplier(tokens):
    """Odd uint64 multipliers of the digest: entry v of the splitmix64 sequence of the twin's seed."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    z = golden + (tokens.to(tl.uint64) + 1) * golden
    z = (z ^ (z >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return (z ^ (z >> 31)) | 1


@triton.jit
def _terms(values, held):
    """Maximum, exp(x - maximum) and its sum over a tile; of a tile without a finite entry 0 and zeros."""
    maximum = tl.max(tl.where(held, values, -float("inf")), 0)
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    terms = tl.where(held, tl.exp(values - base), 0.0)
    return maximum, base, terms


@triton.jit
def _tile_kernel(
    logits, keys, positions, draws, floats, top_keys, best_keys, digests, row_stride, vocab, num_tiles,
    temperature, stream,
    TILE: tl.constexpr, TOP: tl.constexpr, NUM_FLOATS: tl.constexpr, NO_KEY: tl.constexpr,
    HAS_NOISE: tl.constexpr, IS_TEMPERED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the vocabulary, rows)."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tokens = tile * TILE + tl.arange(0, TILE)
    held = tokens < vocab
    values = tl.load(logits + row * row_stride + tokens, mask=held, other=-float("inf"))
    entry = row * num_tiles + tile

    digest = tl.where(held, values.to(tl.int32, bitcast=True).to(tl.int64), 0)
    tl.store(digests + entry, tl.sum(digest * _multiplier(tokens).to(tl.int64), 0))

    maximum, base, terms = _terms(values, held)
    total = tl.sum(terms, 0)
    weighted = tl.sum(terms * tl.where(held & (values != -float("inf")), values - base, 0.0), 0)
    at = floats + entry * NUM_FLOATS
    tl.store(at, maximum)
    tl.store(at + 1, total)
    tl.store(at + 2, weighted)
    tempered = values
    if IS_TEMPERED:
        tempered = tl.div_rn(values, tl.full((TILE,), 0.0, tl.float32) + temperature)
    tempered_maximum, _, tempered_terms = _terms(tempered, held)
    tl.store(at + 4, tempered_maximum)
    tl.store(at + 5, tl.sum(tempered_terms, 0))

    scores = tempered
    if HAS_NOISE:
        stream_word = tl.full((), 0, tl.int64) + stream
        words = noise_words(keys, row, tokens, stream_word, tl.load(positions + row), tl.load(draws + row))
        scores = tempered + gumbel_of_words(words)
    score_keys = tl.where(held, _sort_key(scores, tokens), NO_KEY)
    best = tl.max(score_keys, 0)
    runner_up = tl.max(tl.where(score_keys == best, NO_KEY, score_keys), 0)
    tl.store(best_keys + 2 * entry, best)
    tl.store(best_keys + 2 * entry + 1, runner_up)
    chosen = tokens == _token_of(best)
    tl.store(at + 6, tl.sum(tl.where(chosen, tempered, 0.0), 0))

    candidates = tl.where(held, _sort_key(values, tokens), NO_KEY)
    for place in range(TOP):
        top = tl.max(candidates, 0)
        tl.store(top_keys + entry * TOP + place, top)
        candidates = tl.where(candidates == top, NO_KEY, candidates)
    tl.store(at + 3, tl.sum(tl.where(candidates == NO_KEY, 0.0, terms), 0))


@triton.jit
def _join(maximum, next_maximum):
    """The joint maximum, and what sums relative to either are multiplied by."""
    joint = tl.maximum(maximum, next_maximum)
    base = tl.where(joint == -float("inf"), 0.0, joint)
    return joint, tl.exp(maximum - base), tl.exp(next_maximum - base)


@triton.jit
def _row_kernel(
    floats, top_keys, best_keys, digests, token_out, probability_out, margin_out, top_ids, top_probabilities,
    entropy_out, tail_out, tempered_out, log_sum_out, digest_out, num_tiles, temperature,
    CANDIDATES: tl.constexpr, TOP: tl.constexpr, NUM_FLOATS: tl.constexpr, NO_KEY: tl.constexpr,
    IS_TEMPERED: tl.constexpr,
):  # fmt: skip
    """Grid (rows): a row's tiles in ascending order."""
    row = tl.program_id(0).to(tl.int64)
    first = row * num_tiles
    maximum = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    tail = tl.full((), 0.0, tl.float32)
    tempered_maximum = tl.full((), -float("inf"), tl.float32)
    tempered_total = tl.full((), 0.0, tl.float32)
    digest = tl.full((), 0, tl.int64)
    best = tl.full((), NO_KEY, tl.int64)
    runner_up = tl.full((), NO_KEY, tl.int64)
    chosen = tl.full((), 0.0, tl.float32)
    for tile in range(num_tiles):
        at = floats + (first + tile) * NUM_FLOATS
        next_maximum = tl.load(at)
        joint, scale, next_scale = _join(maximum, next_maximum)
        next_total = tl.load(at + 1)
        # Σ t (x - m): the sums move to the joint maximum as well as their terms
        shift = tl.where(total > 0, maximum - joint, 0.0)
        next_shift = tl.where(next_total > 0, next_maximum - joint, 0.0)
        weighted = scale * (weighted + shift * total) + next_scale * (
            tl.load(at + 2) + next_shift * next_total
        )
        total = total * scale + next_total * next_scale
        tail = tail * scale + tl.load(at + 3) * next_scale
        maximum = joint
        next_maximum = tl.load(at + 4)
        joint, scale, next_scale = _join(tempered_maximum, next_maximum)
        tempered_total = tempered_total * scale + tl.load(at + 5) * next_scale
        tempered_maximum = joint
        next_best = tl.load(best_keys + 2 * (first + tile))
        next_runner_up = tl.load(best_keys + 2 * (first + tile) + 1)
        chosen = tl.where(next_best > best, tl.load(at + 6), chosen)
        runner_up = tl.maximum(tl.minimum(best, next_best), tl.maximum(runner_up, next_runner_up))
        best = tl.maximum(best, next_best)
        digest += tl.load(digests + first + tile)
    tl.store(token_out + row, _token_of(best).to(tl.int64))
    tl.store(probability_out + row, tl.exp(chosen - tempered_maximum) / tempered_total)
    tl.store(margin_out + row, _value_of(best) - _value_of(runner_up))
    tl.store(digest_out + row, digest)
    log_total = tl.log(total)
    tl.store(entropy_out + row, log_total - weighted / total)
    tl.store(log_sum_out + row, maximum + log_total)
    log_tempered = tl.full((), 0.0, tl.float32)
    if IS_TEMPERED:
        log_tempered = tl.log(tempered_total) - log_total / temperature
    tl.store(tempered_out + row, log_tempered)

    index = tl.arange(0, CANDIDATES)
    candidates = tl.load(top_keys + first * TOP + index, mask=index < num_tiles * TOP, other=NO_KEY)
    for place in range(TOP):
        top = tl.max(candidates, 0)
        tl.store(top_ids + row * TOP + place, _token_of(top).to(tl.int64))
        tl.store(top_probabilities + row * TOP + place, tl.exp(_value_of(top) - maximum) / total)
        candidates = tl.where(candidates == top, NO_KEY, candidates)
    left = tl.where(candidates == NO_KEY, 0.0, tl.exp(_value_of(candidates) - maximum))
    tl.store(tail_out + row, (tail + tl.sum(left, 0)) / total)


def logits_pass(
    logits: Tensor,
    temperature: float,
    *,
    noise: tuple[Tensor, int, Tensor, Tensor] | None = None,
) -> LogitsPass:
    """Choice, summary, digest and log-sum-exp of each row, as the twin of this name.

    Args:
        logits: fp32 [R, V], -inf where a token may not be chosen.
        temperature: T ≥ 0.
        noise: (keys int64 [R, 2], stream, positions int64 [R], draw indices int64 [R]) at T > 0, None at T = 0.

    Raises:
        ValueError: another dtype, a last dimension that is not contiguous, fewer than 32 tokens, or noise missing at
        T > 0 or given at T = 0.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits_pass: logits {tuple(logits.shape)} {logits.dtype}, strides {logits.stride()}; want contiguous "
            "rows of float32 [R, V]"
        )
    num_rows, vocab = logits.shape
    if not NUM_CANDIDATES <= vocab <= MAX_VOCABULARY:
        raise ValueError(f"logits_pass: vocabulary of {vocab}; want {NUM_CANDIDATES} to {MAX_VOCABULARY}")
    if (noise is None) != (temperature == 0):
        raise ValueError(f"temperature {temperature} {'needs' if temperature else 'takes no'} noise")
    device = logits.device
    keys, stream, positions, draws = noise or (logits, 0, logits, logits)
    if noise is not None:
        check_noise_arguments("logits_pass", keys, positions, draws)
    tile = min(_TILE, power_of_two(vocab))
    num_tiles = triton.cdiv(vocab, tile)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    partial, top = floats(num_rows, num_tiles, _NUM_FLOATS), integers(num_rows, num_tiles, NUM_CANDIDATES)
    best, tile_digests = integers(num_rows, num_tiles, 2), integers(num_rows, num_tiles)
    choice = Choice(integers(num_rows), floats(num_rows), floats(num_rows))
    summary = Summary(
        integers(num_rows, NUM_CANDIDATES), floats(num_rows, NUM_CANDIDATES), floats(num_rows), floats(num_rows),
        floats(num_rows),
    )  # fmt: skip
    result = LogitsPass(choice, summary, integers(num_rows), floats(num_rows))
    if not num_rows:
        return result
    is_tempered = temperature not in (0, 1)
    _tile_kernel[(num_tiles, num_rows)](
        logits, keys, positions, draws, partial, top, best, tile_digests, logits.stride(0), vocab, num_tiles,
        float(temperature), stream, TILE=tile, TOP=NUM_CANDIDATES, NUM_FLOATS=_NUM_FLOATS, NO_KEY=_NO_KEY,
        HAS_NOISE=noise is not None, IS_TEMPERED=is_tempered, num_warps=8,
    )  # fmt: skip
    _row_kernel[(num_rows,)](
        partial, top, best, tile_digests, *choice, *summary, result.log_sums, result.digests, num_tiles,
        float(temperature) or 1.0, CANDIDATES=power_of_two(num_tiles * NUM_CANDIDATES), TOP=NUM_CANDIDATES,
        NUM_FLOATS=_NUM_FLOATS, NO_KEY=_NO_KEY, IS_TEMPERED=is_tempered, num_warps=4,
    )  # fmt: skip
    return result
