"""Triton growth of draft trees: the twin's steps with its names, one program a sample or a state.

    begin    (S, T)      noise, first and second token and what they are worth; starts the lists
    expand   (S, 1 + D)  log masses of a state's children
    merge    (S, 1 + D)  a state's children joined with equal ones of other states, in the order of these
    cut      (S)         candidates that beat the last of a full list, ranked among themselves and the list
    answer   (S)         the list in topological order

A program whose state is not expanded in this level ends at once, so levels that no tree reaches cost their launches.
All masses are fp64. Sums over a row differ from the twin's by rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dlmgrid.kernels.dependent_launch import launch_options, wait_for_previous
from dlmgrid.kernels.draft_growth.layout import ENTROPY, FIRST_MARGIN, HEAD_WORDS, GrowthState
from dlmgrid.kernels.logits import NUM_CANDIDATES
from dlmgrid.kernels.philox.kernel import gumbel_of_words, philox_words
from dlmgrid.kernels.triton_support import power_of_two

_CHUNK = 64  # candidates that a cut ranks at once

_HEAD = tl.constexpr(HEAD_WORDS)
_CANDIDATES = tl.constexpr(NUM_CANDIDATES)


@triton.jit
def _minus_infinity():
    return tl.full((), float("-inf"), tl.float64)


@triton.jit
def _log(values):
    """Logarithms of what is not negative."""
    return tl.where(values > 0, tl.log(tl.where(values > 0, values, 1.0)), float("-inf"))


@triton.jit
def row_is_expanded(log_mass, depths, depth, is_open, sample, row, ROWS: tl.constexpr):
    """Whether the coming level expands ``row`` of a sample's table; ``row`` may be a block."""
    mass = tl.load(log_mass + sample * ROWS + row)
    is_deepest = tl.load(depths + sample * ROWS + row) == tl.load(depth + sample)
    return is_deepest & (mass > _minus_infinity()) & (tl.load(is_open + sample) > 0)


@triton.jit
def _begin_kernel(
    words, choices, log_probability, confidence, tokens, log_mass, depths, parents, depth, is_open,
    num_words, stream, TEMPERATURE: tl.constexpr, HEDGE: tl.constexpr, L: tl.constexpr, PADDED_L: tl.constexpr,
    ROWS: tl.constexpr, PADDED_ROWS: tl.constexpr, IS_DRAWN: tl.constexpr, HAS_NOISE: tl.constexpr,
    COUNTS: tl.constexpr, KIND: tl.constexpr, IS_RAW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (S, T)."""
    wait_for_previous(OVERLAP)
    sample = tl.program_id(0).to(tl.int64)
    level = tl.program_id(1)
    given = words + sample * num_words
    position = tl.arange(0, PADDED_L)
    inside = position < L
    rank = tl.arange(0, _CANDIDATES)
    cells = position[:, None] * _CANDIDATES + rank[None, :]
    ids = tl.load(given + _HEAD + 5 * L + cells, mask=inside[:, None], other=0)
    bits = tl.load(given + _HEAD + (5 + _CANDIDATES) * L + cells, mask=inside[:, None], other=0)
    probability = bits.to(tl.float32, bitcast=True)
    wide = probability.to(tl.float64)
    tail = tl.load(given + _HEAD + 3 * L + position, mask=inside, other=0).to(tl.float32, bitcast=True)
    others = tl.sum(tl.where(rank[None, :] > 0, wide, 0.0), axis=1) + tail.to(tl.float64)
    first_rank = position * 0
    second_rank = first_rank + 1
    if IS_DRAWN:
        scores = tl.div_rn(
            _log(wide).to(tl.float32), tl.full((), TEMPERATURE, tl.float32) + tl.zeros_like(probability)
        )
        if HAS_NOISE:
            key_0 = tl.load(given + 3).to(tl.uint32, bitcast=True)
            key_1 = tl.load(given + 4).to(tl.uint32, bitcast=True)
            start = tl.load(given + 2)
            draw = level * 0
            if COUNTS:
                draw = tl.load(given + 1) + level
            zero = (ids // 4).to(tl.uint32) * 0
            word_0, word_1, word_2, word_3 = philox_words(
                (ids // 4).to(tl.uint32), zero + (start + position)[:, None].to(tl.uint32), zero + draw.to(tl.uint32),
                zero + (tl.full((), 0, tl.int64) + stream).to(tl.uint32), key_0, key_1,
            )  # fmt: skip
            lane = ids % 4
            drawn = tl.where(
                lane == 0, word_0, tl.where(lane == 1, word_1, tl.where(lane == 2, word_2, word_3))
            )
            scores += gumbel_of_words(drawn)
        best = tl.max(scores, axis=1)
        first_rank = tl.min(tl.where(scores == best[:, None], rank[None, :], _CANDIDATES), axis=1)
        is_first = rank[None, :] == first_rank[:, None]
        next_best = tl.max(tl.where(is_first, float("-inf"), scores), axis=1)
        is_next = (scores == next_best[:, None]) & (is_first == 0)
        second_rank = tl.min(tl.where(is_next, rank[None, :], _CANDIDATES), axis=1)
    is_first = rank[None, :] == first_rank[:, None]
    is_second = rank[None, :] == second_rank[:, None]
    raw_first = tl.sum(tl.where(is_first, wide, 0.0), axis=1)
    raw_second = tl.sum(tl.where(is_second, wide, 0.0), axis=1)
    tried = raw_first < tl.full((), HEDGE, tl.float64)
    out = (sample * tl.num_programs(1) + level) * L + position
    tl.store(choices + 2 * out, tl.sum(tl.where(is_first, ids, 0), axis=1), mask=inside)
    tl.store(choices + 2 * out + 1, tl.sum(tl.where(is_second, ids, 0), axis=1), mask=inside)
    tl.store(log_probability + 2 * out, _log(raw_first), mask=inside)
    second = tl.where(tried, _log(raw_second), float("-inf"))
    tl.store(log_probability + 2 * out + 1, second, mask=inside)

    if KIND == 1:
        top = tl.sum(tl.where(rank[None, :] == 0, probability, 0.0), axis=1)
        rated = (top - tl.sum(tl.where(rank[None, :] == 1, probability, 0.0), axis=1)).to(tl.float64)
    elif KIND == 2:
        entropy = tl.load(given + _HEAD + 2 * L + position, mask=inside, other=0).to(tl.float32, bitcast=True)
        rated = tl.exp(-entropy.to(tl.float64))
    elif IS_RAW:
        rated = tl.where(first_rank == 0, 1.0 - others, raw_first)
    else:
        mass = tl.load(given + _HEAD + 4 * L + position, mask=inside, other=0).to(tl.float32, bitcast=True)
        tempered = _log(raw_first) / tl.full((), TEMPERATURE, tl.float64)
        rated = tl.exp(tempered - mass.to(tl.float64))
    tl.store(confidence + out, rated, mask=inside)

    if level == 0:
        root = tl.load(given + _HEAD + position, mask=inside, other=0)
        tl.store(tokens + sample * ROWS * L + position, root, mask=inside)
        is_valid = tl.load(given)
        row = tl.arange(0, PADDED_ROWS)
        at = sample * ROWS + row
        starts = (row == 0) & (is_valid > 0)
        tl.store(log_mass + at, tl.where(starts, 0.0, _minus_infinity()), mask=row < ROWS)
        tl.store(depths + at, row * 0, mask=row < ROWS)
        tl.store(parents + at, row * 0 - 1, mask=row < ROWS)
        tl.store(depth + sample, 0)
        tl.store(is_open + sample, is_valid)


def begin(state: GrowthState) -> None:
    """As the twin."""
    plan = state.plan
    rows = 1 + plan.budget
    _begin_kernel[(state.words.shape[0], plan.num_predictions)](
        state.words, state.choices, state.log_probability, state.confidence, state.tokens[0], state.log_mass[0],
        state.depths[0], state.parents[0], state.depth, state.is_open, state.words.shape[1], plan.stream or 0,
        TEMPERATURE=plan.temperature, HEDGE=plan.hedge_below, L=plan.length, PADDED_L=power_of_two(plan.length),
        ROWS=rows, PADDED_ROWS=power_of_two(rows), IS_DRAWN=plan.temperature > 0, HAS_NOISE=plan.stream is not None,
        COUNTS=plan.counts_draws, KIND=plan.confidence,
        IS_RAW=plan.temperature in (0, 1) or plan.plain, num_warps=4, **launch_options(state.words.device),
    )  # fmt: skip


@triton.jit
def _expand_kernel(
    words, log_probability, confidence, tokens, log_mass, depths, depth, is_open, scores, children, num_words,
    num_predictions, L: tl.constexpr, PADDED_L: tl.constexpr, ROWS: tl.constexpr, SUB_BLOCK: tl.constexpr,
    BY_SCORES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (S, ROWS)."""
    wait_for_previous(OVERLAP)
    sample = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    if row_is_expanded(log_mass, depths, depth, is_open, sample, row, ROWS) == 0:
        return
    position = tl.arange(0, PADDED_L)
    inside = position < L
    at = (sample * ROWS + row) * L + position
    masked = (tl.load(tokens + at, mask=inside, other=0) < 0) & inside
    least = tl.where(tl.load(words + sample * num_words + 5) > 0, 0, 1)
    is_row_open = tl.sum(masked.to(tl.int32), axis=0) > least
    among = masked & is_row_open
    if SUB_BLOCK > 0:
        first = tl.min(tl.where(masked, position, PADDED_L), axis=0)
        among = among & (position // SUB_BLOCK == first // SUB_BLOCK)
    level = tl.minimum(tl.load(depth + sample), num_predictions - 1)
    predicted = (sample * num_predictions + level) * L + position
    if BY_SCORES:
        score = tl.load(scores + at, mask=among, other=0.0)
        shifted = score - tl.max(tl.where(among, score, float("-inf")), axis=0)
        log_q = shifted - _log(tl.sum(tl.where(among, tl.exp(shifted), 0.0), axis=0))
    else:
        share = tl.load(confidence + predicted, mask=among, other=0.0)
        total = tl.maximum(tl.sum(share, axis=0), tl.full((), 2.2250738585072014e-308, tl.float64))
        log_q = _log(share / total)
    mass = tl.load(log_mass + sample * ROWS + row)
    base = tl.where(among, mass + log_q, float("-inf"))
    for choice in tl.static_range(2):
        own = base + tl.load(log_probability + 2 * predicted + choice, mask=among, other=float("-inf"))
        tl.store(children + 2 * at + choice, own, mask=inside)


def expand(state: GrowthState, table: int, *, by_scores: bool) -> None:
    """As the twin; rows that are not expanded keep what they held."""
    plan = state.plan
    rows = 1 + plan.budget
    _expand_kernel[(state.words.shape[0], rows)](
        state.words, state.log_probability, state.confidence, state.tokens[table], state.log_mass[table],
        state.depths[table], state.depth, state.is_open, state.scores, state.children, state.words.shape[1],
        plan.num_predictions, L=plan.length, PADDED_L=power_of_two(plan.length), ROWS=rows,
        SUB_BLOCK=plan.sub_block_length, BY_SCORES=by_scores, num_warps=1, **launch_options(state.words.device),
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    choices, tokens, log_mass, depths, depth, is_open, children, merged, num_predictions, L: tl.constexpr,
    PADDED_L: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (S, ROWS). An entry is its value if no row before has an equal child, else -inf."""
    wait_for_previous(OVERLAP)
    sample = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    if row_is_expanded(log_mass, depths, depth, is_open, sample, row, ROWS) == 0:
        return
    position = tl.arange(0, PADDED_L)
    inside = position < L
    at = (sample * ROWS + row) * L + position
    own = tl.load(tokens + at, mask=inside, other=0)
    own_first = tl.load(children + 2 * at, mask=inside, other=float("-inf"))
    own_second = tl.load(children + 2 * at + 1, mask=inside, other=float("-inf"))
    level = tl.minimum(tl.load(depth + sample), num_predictions - 1)
    predicted = choices + 2 * ((sample * num_predictions + level) * L + position)
    first = tl.load(predicted, mask=inside, other=0)
    second = tl.load(predicted + 1, mask=inside, other=0)
    total_first = tl.zeros_like(own_first)
    total_second = tl.zeros_like(own_second)
    repeats_first = position < 0
    repeats_second = position < 0
    for other in range(ROWS):
        if other == row:
            total_first += tl.exp(own_first)
            total_second += tl.exp(own_second)
        elif row_is_expanded(log_mass, depths, depth, is_open, sample, other, ROWS):
            there = (sample * ROWS + other) * L + position
            theirs = tl.load(tokens + there, mask=inside, other=0)
            differs = own != theirs
            gained = (own < 0) & (theirs >= 0)
            both = tl.sum(differs.to(tl.int32) + (gained.to(tl.int32) << 16), axis=0)
            if both == (1 << 16) + 2:
                lost = differs & (gained == 0)
                is_first, is_second = lost & (first == own), lost & (second == own)
                by_first = tl.load(children + 2 * there, mask=is_first, other=float("-inf"))
                by_second = tl.load(children + 2 * there + 1, mask=is_second, other=float("-inf"))
                value = tl.max(tl.maximum(by_first, by_second), axis=0)
                if value > _minus_infinity():
                    equal_first, equal_second = gained & (first == theirs), gained & (second == theirs)
                    added = tl.exp(value)
                    total_first += tl.where(equal_first, added, 0.0)
                    total_second += tl.where(equal_second, added, 0.0)
                    repeats_first = repeats_first | (equal_first & (other < row))
                    repeats_second = repeats_second | (equal_second & (other < row))
    most = tl.load(log_mass + sample * ROWS + row)
    is_absent = repeats_first | (own_first == float("-inf"))
    tl.store(
        merged + 2 * at,
        tl.where(is_absent, float("-inf"), tl.minimum(_log(total_first), most)),
        mask=inside,
    )
    is_absent = repeats_second | (own_second == float("-inf"))
    tl.store(
        merged + 2 * at + 1,
        tl.where(is_absent, float("-inf"), tl.minimum(_log(total_second), most)),
        mask=inside,
    )


def merge(state: GrowthState, table: int) -> None:
    """As the twin; rows that are not expanded keep what they held."""
    plan = state.plan
    rows = 1 + plan.budget
    _merge_kernel[(state.words.shape[0], rows)](
        state.choices, state.tokens[table], state.log_mass[table], state.depths[table], state.depth, state.is_open,
        state.children, state.merged, plan.num_predictions, L=plan.length, PADDED_L=power_of_two(plan.length),
        ROWS=rows, num_warps=1, **launch_options(state.words.device),
    )  # fmt: skip


@triton.jit
def _cut_kernel(
    choices, tokens, log_mass, depths, parents, new_tokens, new_log_mass, new_depths, new_parents, depth, is_open,
    merged, places, live, num_predictions, LEAST: tl.constexpr, L: tl.constexpr, PADDED_L: tl.constexpr,
    ROWS: tl.constexpr, PADDED_ROWS: tl.constexpr, PADDED_ALL: tl.constexpr, CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (S). ``is_open`` of a sample that has ended goes from 0 to -1 when both tables hold its list."""
    wait_for_previous(OVERLAP)
    sample = tl.program_id(0).to(tl.int64)
    was_open = tl.load(is_open + sample)
    if was_open < 0:
        return
    least = tl.full((), LEAST, tl.float64)
    row = tl.arange(0, PADDED_ROWS)
    in_table = row < ROWS
    is_listed = in_table & (row > 0)
    table = sample * ROWS
    old = tl.load(log_mass + table + row, mask=in_table, other=float("-inf"))
    worst = tl.min(tl.where(is_listed, old, float("inf")), axis=0)
    level = tl.load(depth + sample)

    # Candidates that beat the last of the list, in order; none of a sample that is not open.
    PER_ROW: tl.constexpr = 2 * L
    candidate = tl.arange(0, PADDED_ALL)
    exists = candidate < ROWS * PER_ROW
    parent_row = tl.where(exists, candidate // PER_ROW, 0)
    exists = exists & row_is_expanded(log_mass, depths, depth, is_open, sample, parent_row, ROWS)
    value = tl.load(merged + sample * ROWS * PER_ROW + candidate, mask=exists, other=float("-inf"))
    is_live = exists & (value > worst)
    slot = tl.cumsum(is_live.to(tl.int32), axis=0) - 1
    num_live = tl.sum(is_live.to(tl.int32), axis=0)
    found = live + sample * (1 + ROWS * PER_ROW)
    tl.store(found + slot, candidate, mask=is_live)
    tl.debug_barrier()

    # Where the listed go.
    beaten_by = tl.zeros((PADDED_ROWS,), tl.int32)
    for start in range(0, num_live, CHUNK):
        index = start + tl.arange(0, CHUNK)
        which = tl.load(found + index, mask=index < num_live, other=0)
        mass = tl.load(merged + sample * ROWS * PER_ROW + which, mask=index < num_live, other=float("-inf"))
        beaten_by += tl.sum((mass[None, :] > old[:, None]).to(tl.int32), axis=1)
    place = tl.where(row == 0, 0, row + beaten_by)
    stays = in_table & (place < ROWS) & ((old > float("-inf")) | (row == 0))
    tl.store(places + table + row, place, mask=in_table)
    tl.debug_barrier()
    num_old = tl.sum((is_listed & (old > float("-inf"))).to(tl.int32), axis=0)
    parent = tl.load(parents + table + row, mask=stays, other=-1)
    moved = tl.load(places + table + parent, mask=stays & (parent >= 0), other=-1)
    tl.store(new_log_mass + table + place, old, mask=stays)
    tl.store(new_depths + table + place, tl.load(depths + table + row, mask=stays, other=0), mask=stays)
    tl.store(new_parents + table + place, moved, mask=stays)
    position = tl.arange(0, PADDED_L)
    inside = position < L
    cells = (table + row)[:, None] * L + position[None, :]
    state = tl.load(tokens + cells, mask=stays[:, None] & inside[None, :], other=0)
    cells = (table + place)[:, None] * L + position[None, :]
    tl.store(new_tokens + cells, state, mask=stays[:, None] & inside[None, :])
    is_free = in_table & (row > num_old + num_live)
    tl.store(new_log_mass + table + row, tl.full((PADDED_ROWS,), float("-inf"), tl.float64), mask=is_free)

    # Where the new go.
    at_level = (sample * num_predictions + tl.minimum(level, num_predictions - 1)) * PER_ROW
    goes_on = 0
    for start in range(0, num_live, CHUNK):
        at = start + tl.arange(0, CHUNK)
        is_one = at < num_live
        picked = tl.load(found + at, mask=is_one, other=0)
        worth = tl.load(merged + sample * ROWS * PER_ROW + picked, mask=is_one, other=float("-inf"))
        ahead = is_listed[None, :] & (old[None, :] >= worth[:, None])
        rank = tl.sum(ahead.to(tl.int32), axis=1)
        for other_start in range(0, num_live, CHUNK):
            other = other_start + tl.arange(0, CHUNK)
            is_other = other < num_live
            their = tl.load(found + other, mask=is_other, other=0)
            rival = tl.load(merged + sample * ROWS * PER_ROW + their, mask=is_other, other=float("-inf"))
            is_tie = (rival[None, :] == worth[:, None]) & (other[None, :] < at[:, None]) & is_other[None, :]
            rank += tl.sum(((rival[None, :] > worth[:, None]) | is_tie).to(tl.int32), axis=1)
        new_row = rank + 1
        kept = is_one & (new_row < ROWS)
        goes_on = tl.maximum(goes_on, tl.max((kept & (worth >= least)).to(tl.int32), axis=0))
        from_row = picked // PER_ROW
        choice = picked % PER_ROW
        token = tl.load(choices + at_level + choice, mask=kept, other=0)
        tl.store(new_log_mass + table + new_row, worth, mask=kept)
        tl.store(new_depths + table + new_row, tl.zeros_like(new_row) + level + 1, mask=kept)
        tl.store(
            new_parents + table + new_row, tl.load(places + table + from_row, mask=kept, other=0), mask=kept
        )
        moved_cells = (table + from_row)[:, None] * L + position[None, :]
        is_cell = kept[:, None] & inside[None, :]
        filled = tl.load(tokens + moved_cells, mask=is_cell, other=0)
        filled = tl.where(position[None, :] == (choice // 2)[:, None], token[:, None], filled)
        tl.store(new_tokens + (table + new_row)[:, None] * L + position[None, :], filled, mask=is_cell)
    # Every thread has read the old values: all took part in the scan above.
    tl.store(depth + sample, level + 1)
    tl.store(is_open + sample, tl.where(was_open > 0, goes_on, -1))


def cut(state: GrowthState, table: int) -> None:
    """As the twin, but for samples that have ended: their list is copied once, and their depth stands."""
    plan = state.plan
    rows, other = 1 + plan.budget, 1 - table
    _cut_kernel[(state.words.shape[0],)](
        state.choices, state.tokens[table], state.log_mass[table], state.depths[table], state.parents[table],
        state.tokens[other], state.log_mass[other], state.depths[other], state.parents[other], state.depth,
        state.is_open, state.merged, state.places, state.live, plan.num_predictions, LEAST=plan.min_log_mass,
        L=plan.length, PADDED_L=power_of_two(plan.length), ROWS=rows, PADDED_ROWS=power_of_two(rows),
        PADDED_ALL=power_of_two(2 * plan.length * rows), CHUNK=_CHUNK, num_warps=4,
        **launch_options(state.words.device),
    )  # fmt: skip


@triton.jit
def _answer_kernel(
    answer, answer_doubles, tokens, log_mass, depths, parents, is_open, places, num_words, LEAST: tl.constexpr,
    L: tl.constexpr, PADDED_L: tl.constexpr, ROWS: tl.constexpr, PADDED_ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (S)."""
    wait_for_previous(OVERLAP)
    sample = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, PADDED_ROWS)
    is_listed = (row > 0) & (row < ROWS)
    table = sample * ROWS
    mass = tl.load(log_mass + table + row, mask=is_listed, other=float("-inf"))
    kept = is_listed & (mass > float("-inf")) & (mass >= tl.full((), LEAST, tl.float64))
    deep = tl.load(depths + table + row, mask=kept, other=0)
    # A row's place: those of a lesser depth, and those of its depth before it.
    key = tl.where(kept, deep * PADDED_ROWS + row, 2147483647)
    place = tl.sum((key[None, :] < key[:, None]).to(tl.int32), axis=1)
    tl.store(places + table + row, place + 1, mask=kept)
    tl.debug_barrier()
    parent = tl.load(parents + table + row, mask=kept, other=0)
    above = tl.load(places + table + parent, mask=kept & (parent > 0), other=0)
    BUDGET: tl.constexpr = ROWS - 1
    out = answer + sample * num_words
    tl.store(out, tl.sum(kept.to(tl.int32), axis=0))
    tl.store(out + 1, tl.maximum(tl.load(is_open + sample), 0))
    tl.store(answer_doubles + sample * (num_words // 2) + 1 + place, mass, mask=kept)
    tl.store(out + 2 + 2 * BUDGET + place, deep, mask=kept)
    tl.store(out + 2 + 3 * BUDGET + place, above, mask=kept)
    position = tl.arange(0, PADDED_L)
    is_cell = kept[:, None] & (position < L)[None, :]
    state = tl.load(tokens + (table + row)[:, None] * L + position[None, :], mask=is_cell, other=0)
    tl.store(out + 2 + 4 * BUDGET + place[:, None] * L + position[None, :], state, mask=is_cell)


def answer(state: GrowthState, table: int) -> None:
    """As the twin; what is no state keeps what it held."""
    plan = state.plan
    rows = 1 + plan.budget
    _answer_kernel[(state.words.shape[0],)](
        state.answer, state.answer.view(torch.float64), state.tokens[table], state.log_mass[table],
        state.depths[table], state.parents[table], state.is_open, state.places, state.answer.shape[1],
        LEAST=plan.min_log_mass, L=plan.length, PADDED_L=power_of_two(plan.length), ROWS=rows,
        PADDED_ROWS=power_of_two(rows), num_warps=4, **launch_options(state.words.device),
    )  # fmt: skip


assert (FIRST_MARGIN, ENTROPY) == (1, 2), "the kernel's names of the kinds"
