"""Triton logits pass: noise, choice, summary statistics, top-32 and digest of a row in one read of its logits.

The first kernel reduces tiles of the vocabulary to groups of 64 neighbouring entries, the second a row's groups to its
results. A row's 32 candidates lie in the 32 groups with the greatest maxima, since each of these holds an entry before
any of another group; so only they are ranked by entry. The same bound serves the choice under noise: a group's best
perturbed score is first estimated in fp32 (error below ``_slack``), and groups are evaluated as the twin does, the
quotient by T and the logarithms of the noise in full, from the best estimate on until none left can reach the
runner-up.

With m a maximum, t(x) = exp(x - m) and Z = Σ t, over groups and tiles joined by the usual rescaling:

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
from dlmgrid.kernels.philox.kernel import (
    check_noise_arguments,
    gumbel_of_words,
    noise_words,
    philox_words,
)
from dlmgrid.kernels.triton_support import power_of_two

_TILE = 2048
_GROUP = 64  # entries whose maximum and sum are kept
_ROWS = 4  # rows of a program: the digest's multipliers are made once for all of them
_NUM_FLOATS = 4  # of a tile: maximum, Σ t (x - maximum of the group), Z_T, unused
MAX_VOCABULARY = 2**31 - 1 - 4096
_NO_KEY = -(2**63)
_TILE_WARPS, _ROW_WARPS = 4, 8


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
def _quad_words(keys, row, quads, stream, position, draw):
    """The words of entries 4 q … 4 q + 3, uint32 [groups, 4 quads] of ``quads`` int32 [groups, quads]."""
    k0 = tl.load(keys + 2 * row).to(tl.uint32)
    k1 = tl.load(keys + 2 * row + 1).to(tl.uint32)
    c0 = quads.to(tl.uint32)
    zero = c0 * 0
    w0, w1, w2, w3 = philox_words(
        c0, zero + position.to(tl.uint32), zero + draw.to(tl.uint32), zero + stream.to(tl.uint32), k0, k1
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def _exponential_of_words(words):
    """-log u in fp32 of the uniforms u of uint32 words, to a relative error below 1e-5."""
    uniform = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u
    series = rest * (1.0 + rest * (0.5 + rest * (0.3333333333 + rest * (0.25 + rest * 0.2))))
    return tl.where(rest < 0.03125, series, -tl.log(uniform))


@triton.jit
def _slack(score):
    """How far an estimated score may lie from the one that the twin computes."""
    return 1e-3 + 1e-6 * (tl.abs(score) + 32.0)


@triton.jit
def _tile_kernel(
    logits, keys, positions, draws, group_max, group_sum, group_score, floats, digests, row_stride, num_rows, vocab,
    num_groups, num_tiles, inverse_temperature, stream,
    TILE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, NUM_FLOATS: tl.constexpr,
    HAS_NOISE: tl.constexpr, IS_TEMPERED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the vocabulary, tiles of ROWS rows): the groups of a tile in each of the rows."""
    GROUPS: tl.constexpr = TILE // GROUP
    tile = tl.program_id(0)
    group = tile * GROUPS + tl.arange(0, GROUPS)
    tokens = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    held = tokens < vocab
    multipliers = tl.where(held, _multiplier(tokens).to(tl.int64), 0)
    first = tl.program_id(1).to(tl.int64) * ROWS
    stop = tl.minimum(first + ROWS, num_rows)
    following = tl.load(logits + first * row_stride + tokens, mask=held, other=-float("inf"))
    for row in range(first, stop):
        values = following
        at = tl.minimum(row + 1, stop - 1)
        following = tl.load(logits + at * row_stride + tokens, mask=held, other=-float("inf"))
        entry = row * num_tiles + tile
        bits = values.to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(digests + entry, tl.sum(tl.sum(bits * multipliers, 0), 0))

        maximum = tl.max(values, 1)
        base = tl.where(maximum == -float("inf"), 0.0, maximum)
        distance = values - base[:, None]
        terms = tl.exp(distance)
        sums = tl.sum(terms, 1)
        in_row = row * num_groups + group
        tl.store(group_max + in_row, maximum, mask=group < num_groups)
        tl.store(group_sum + in_row, sums, mask=group < num_groups)

        highest = tl.max(maximum, 0)
        highest_base = tl.where(highest == -float("inf"), 0.0, highest)
        below = maximum - highest_base
        weighted = terms * tl.where(values == -float("inf"), 0.0, distance) * tl.exp(below)[:, None]
        tl.store(floats + entry * NUM_FLOATS, highest)
        tl.store(floats + entry * NUM_FLOATS + 1, tl.sum(tl.sum(weighted, 0), 0))
        tempered_terms = terms
        if IS_TEMPERED:
            tempered_terms = tl.exp(distance * inverse_temperature)
            scaled = tempered_terms * tl.exp(below * inverse_temperature)[:, None]
            tl.store(floats + entry * NUM_FLOATS + 2, tl.sum(tl.sum(scaled, 0), 0))
        if HAS_NOISE:
            # max (x / T + g) over a group, as the winner of a race of exponentials
            quads = group[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
            stream_word = tl.full((), 0, tl.int64) + stream
            words = _quad_words(keys, row, quads, stream_word, tl.load(positions + row), tl.load(draws + row))
            lead = tl.max(tempered_terms / _exponential_of_words(words), 1)
            score = maximum * inverse_temperature + tl.log(tl.where(lead > 0, lead, 1.0))
            tl.store(group_score + in_row, score, mask=group < num_groups)


@triton.jit
def _greatest(keys, TOP: tl.constexpr, NO_KEY: tl.constexpr):
    """The TOP greatest of distinct int64 ``keys`` [n], descending. A bitonic network takes 15 s to compile."""
    places = tl.arange(0, TOP)
    greatest = tl.full((TOP,), NO_KEY, tl.int64)
    for place in range(TOP):
        top = tl.max(keys, 0)
        greatest = tl.where(places == place, top, greatest)
        keys = tl.where(keys == top, NO_KEY, keys)
    return greatest


@triton.jit
def _choose(
    logits_row, keys, row, stream, position, draw, scores, group, num_groups, vocab, temperature,
    GROUP: tl.constexpr, NO_KEY: tl.constexpr, IS_TEMPERED: tl.constexpr,
):  # fmt: skip
    """Keys of the best and the second perturbed score of a row, from estimates ``scores`` of its groups."""
    estimates = tl.where(group < num_groups, _sort_key(scores, group), NO_KEY)
    best = tl.full((), NO_KEY, tl.int64)
    runner_up = tl.full((), NO_KEY, tl.int64)
    top = tl.max(estimates, 0)
    open_ = top != NO_KEY
    while open_:
        tokens = _token_of(top) * GROUP + tl.arange(0, GROUP)
        held = tokens < vocab
        values = tl.load(logits_row + tokens, mask=held, other=-float("inf"))
        if IS_TEMPERED:
            values = tl.div_rn(values, tl.full((GROUP,), 0.0, tl.float32) + temperature)
        values += gumbel_of_words(noise_words(keys, row, tokens, stream, position, draw))
        score_keys = tl.where(held, _sort_key(values, tokens), NO_KEY)
        next_best = tl.max(score_keys, 0)
        next_runner_up = tl.max(tl.where(score_keys == next_best, NO_KEY, score_keys), 0)
        runner_up = tl.maximum(tl.minimum(best, next_best), tl.maximum(runner_up, next_runner_up))
        best = tl.maximum(best, next_best)
        estimates = tl.where(estimates == top, NO_KEY, estimates)
        top = tl.max(estimates, 0)
        estimate = _value_of(top)
        is_possible = estimate > -float("inf")
        slack = _slack(tl.where(is_possible, estimate, 0.0))
        reaches = is_possible & (estimate + slack >= _value_of(runner_up))
        open_ = (top != NO_KEY) & (reaches | (runner_up == NO_KEY))
    return best, runner_up


@triton.jit
def _row_kernel(
    logits, keys, positions, draws, group_max, group_sum, group_score, floats, digests, token_out, probability_out,
    margin_out, top_ids, top_probabilities, entropy_out, tail_out, tempered_out, log_sum_out, digest_out, row_stride,
    vocab, num_groups, num_tiles, temperature, inverse_temperature, stream,
    GROUPS: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, NUM_FLOATS: tl.constexpr,
    NO_KEY: tl.constexpr, HAS_NOISE: tl.constexpr, IS_TEMPERED: tl.constexpr,
):  # fmt: skip
    """Grid (rows): a row's groups."""
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits + row * row_stride
    group = tl.arange(0, GROUPS)
    inside = group < num_groups
    maxima = tl.load(group_max + row * num_groups + group, mask=inside, other=-float("inf"))
    sums = tl.load(group_sum + row * num_groups + group, mask=inside, other=0.0)
    maximum = tl.max(maxima, 0)
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    mass = sums * tl.exp(maxima - base)
    total = tl.sum(mass, 0)

    tile = row * num_tiles + tl.arange(0, TILES)
    is_tile = tl.arange(0, TILES) < num_tiles
    below = tl.load(floats + tile * NUM_FLOATS, mask=is_tile, other=-float("inf")) - base
    weighted = tl.load(floats + tile * NUM_FLOATS + 1, mask=is_tile, other=0.0) * tl.exp(below)
    weighted_total = tl.sum(weighted, 0)
    weighted_total += tl.sum(mass * tl.where(maxima == -float("inf"), 0.0, maxima - base), 0)
    tl.store(digest_out + row, tl.sum(tl.load(digests + tile, mask=is_tile, other=0), 0))
    log_total = tl.log(total)
    tl.store(entropy_out + row, log_total - weighted_total / total)
    tl.store(log_sum_out + row, maximum + log_total)
    tempered_total = total
    log_tempered = tl.full((), 0.0, tl.float32)
    if IS_TEMPERED:
        parts = tl.load(floats + tile * NUM_FLOATS + 2, mask=is_tile, other=0.0)
        tempered_total = tl.sum(parts * tl.exp(below * inverse_temperature), 0)
        log_tempered = tl.log(tempered_total) - log_total / temperature
    tl.store(tempered_out + row, log_tempered)

    group_keys = tl.where(inside, _sort_key(maxima, group), NO_KEY)
    chosen = _greatest(group_keys, TOP, NO_KEY)
    tail = tl.sum(tl.where(group_keys < tl.min(chosen, 0), mass, 0.0), 0)
    tokens = _token_of(chosen)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_entry = (chosen != NO_KEY)[:, None] & (tokens < vocab)
    values = tl.load(logits_row + tokens, mask=is_entry, other=-float("inf"))
    candidates = tl.where(is_entry, _sort_key(values, tokens), NO_KEY)
    top = _greatest(tl.reshape(candidates, (TOP * GROUP,)), TOP, NO_KEY)
    places = row * TOP + tl.arange(0, TOP)
    tl.store(top_ids + places, _token_of(top).to(tl.int64))
    tl.store(top_probabilities + places, tl.exp(_value_of(top) - base) / total)
    left = tl.where(is_entry & (candidates < tl.min(top, 0)), tl.exp(values - base), 0.0)
    tail += tl.sum(tl.sum(left, 0), 0)
    tl.store(tail_out + row, tail / total)

    if HAS_NOISE:
        scores = tl.load(group_score + row * num_groups + group, mask=inside, other=-float("inf"))
        stream_word = tl.full((), 0, tl.int64) + stream
        best, runner_up = _choose(
            logits_row, keys, row, stream_word, tl.load(positions + row), tl.load(draws + row), scores, group,
            num_groups, vocab, temperature, GROUP, NO_KEY, IS_TEMPERED,
        )  # fmt: skip
    else:
        best = tl.max(top, 0)
        runner_up = tl.max(tl.where(top == best, NO_KEY, top), 0)
    token = _token_of(best)
    tl.store(token_out + row, token.to(tl.int64))
    tl.store(margin_out + row, _value_of(best) - _value_of(runner_up))
    numerator = tl.load(logits_row + token)
    if IS_TEMPERED:
        numerator = tl.div_rn(numerator, temperature)
        base = tl.div_rn(base, temperature)
    tl.store(probability_out + row, tl.exp(numerator - base) / tempered_total)


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
    tile = min(_TILE, max(_GROUP, power_of_two(vocab)))
    num_tiles, num_groups = triton.cdiv(vocab, tile), triton.cdiv(vocab, _GROUP)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    group_max, group_sum = floats(num_rows, num_groups), floats(num_rows, num_groups)
    group_score = group_max if noise is None else floats(num_rows, num_groups)
    partial, tile_digests = floats(num_rows, num_tiles, _NUM_FLOATS), integers(num_rows, num_tiles)
    choice = Choice(integers(num_rows), floats(num_rows), floats(num_rows))
    summary = Summary(
        integers(num_rows, NUM_CANDIDATES), floats(num_rows, NUM_CANDIDATES), floats(num_rows), floats(num_rows),
        floats(num_rows),
    )  # fmt: skip
    result = LogitsPass(choice, summary, integers(num_rows), floats(num_rows))
    if not num_rows:
        return result
    is_tempered = temperature not in (0, 1)
    inverse = 1.0 / temperature if is_tempered else 1.0
    given = (logits, keys, positions, draws, group_max, group_sum, group_score, partial, tile_digests)
    common = {
        "GROUP": _GROUP,
        "NUM_FLOATS": _NUM_FLOATS,
        "HAS_NOISE": noise is not None,
        "IS_TEMPERED": is_tempered,
    }
    _tile_kernel[(num_tiles, triton.cdiv(num_rows, _ROWS))](
        *given, logits.stride(0), num_rows, vocab, num_groups, num_tiles, inverse, stream,
        TILE=tile, ROWS=_ROWS, **common, num_warps=_TILE_WARPS,
    )  # fmt: skip
    _row_kernel[(num_rows,)](
        *given, *choice, *summary, result.log_sums, result.digests, logits.stride(0), vocab, num_groups, num_tiles,
        float(temperature) or 1.0, inverse, stream, GROUPS=max(NUM_CANDIDATES, power_of_two(num_groups)),
        TILES=power_of_two(num_tiles), TOP=NUM_CANDIDATES, NO_KEY=_NO_KEY, **common, num_warps=_ROW_WARPS,
    )  # fmt: skip
    return result
