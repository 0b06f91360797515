"""Triton scores of the order model, fp64 on the tensor cores: the twin's encoder in ten launches a level.

    stale    (S)               what the snapshot gives the embedding of a position, once a round
    attend   (states, heads)   normalise, project to one head, mix; the first head keeps the normalised rows
    open     (states, slices)  merge the heads, normalise, and a slice of the wide layer
    close    (states, slices)  a slice of what the wide layer gives back, with what it is added to
    head     (states)          normalise, head, score

A program of a state that the coming level does not expand ends at once. Rows of a state are the block's positions;
those outside the snapshot are computed and seen by none. Sums differ from the twin's by rounding.

A state takes 41 MFLOP and reads 5 MB of weights, so one program a state would take 80 us at the least; twenty states
in a hundred and sixty programs take about 5 us a launch (predicted, kernels/NOTES.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dlmgrid.kernels.dependent_launch import launch_options, wait_for_previous
from dlmgrid.kernels.draft_growth.kernel import row_is_expanded
from dlmgrid.kernels.draft_growth.layout import HEAD_WORDS, GrowthState
from dlmgrid.kernels.logits import NUM_CANDIDATES
from dlmgrid.kernels.order_scores.reference import NUM_STALE, OrderWeights
from dlmgrid.kernels.triton_support import power_of_two

_OPEN_SLICE, _CLOSE_SLICE, _HEAD_SLICE = 64, 16, 32  # columns of a program, or of a step of the head
_STEP = 32  # of the inner dimension of products whose left side lies in memory

_HEAD = tl.constexpr(HEAD_WORDS)
_CANDIDATES = tl.constexpr(NUM_CANDIDATES)


@triton.jit
def _normalised(x, weight, bias, WIDTH: tl.constexpr):
    """Layer norm of rows [R, WIDTH]; ``weight`` and ``bias`` [WIDTH]."""
    mean = tl.sum(x, axis=1) / WIDTH
    centred = x - mean[:, None]
    variance = tl.sum(centred * centred, axis=1) / WIDTH
    scale = 1.0 / tl.sqrt(variance + tl.full((), 1e-5, tl.float64))
    return centred * scale[:, None] * weight[None, :] + bias[None, :]


@triton.jit
def _stale_kernel(
    words, embed, embed_bias, stale, num_words, L: tl.constexpr, PADDED_L: tl.constexpr, WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (S). Features 0 to 71 of each position times their part of the embedding, and its bias."""
    wait_for_previous(OVERLAP)
    sample = tl.program_id(0).to(tl.int64)
    given = words + sample * num_words + _HEAD
    position = tl.arange(0, PADDED_L)
    inside = position < L
    rank = tl.arange(0, _CANDIDATES)
    column = tl.arange(0, WIDTH)
    cells = position[:, None] * _CANDIDATES + rank[None, :]
    bits = tl.load(given + (5 + _CANDIDATES) * L + cells, mask=inside[:, None], other=0)
    probability = bits.to(tl.float32, bitcast=True)
    wide = probability.to(tl.float64)
    logarithm = tl.where(probability > 0, tl.log(tl.where(probability > 0, wide, 1.0)), -20.0).to(tl.float32)
    ten = tl.zeros_like(logarithm) + 10.0
    logarithm = tl.div_rn(tl.maximum(logarithm, -20.0), ten).to(tl.float64)
    rows = rank[:, None] * WIDTH + column[None, :]
    out = tl.dot(wide, tl.load(embed + rows), out_dtype=tl.float64)
    out = tl.dot(logarithm, tl.load(embed + _CANDIDATES * WIDTH + rows), out, out_dtype=tl.float64)

    is_masked = (tl.load(given + L + position, mask=inside, other=0) > 0) & inside
    before = position[None, :] <= position[:, None]
    known = (is_masked == 0) & inside
    left = tl.max(tl.where(known[None, :] & before, position[None, :], -1), axis=1)
    after = position[None, :] >= position[:, None]
    right = tl.min(tl.where(known[None, :] & after, position[None, :], L), axis=1)
    top = tl.sum(tl.where(rank[None, :] == 0, probability, 0.0), axis=1)
    second = tl.sum(tl.where(rank[None, :] == 1, probability, 0.0), axis=1)
    entropy = tl.load(given + 2 * L + position, mask=inside, other=0).to(tl.float32, bitcast=True)
    tail = tl.load(given + 3 * L + position, mask=inside, other=0).to(tl.float32, bitcast=True)
    one = tl.zeros_like(top) + 1.0
    share = tl.sum(known.to(tl.int32), axis=0).to(tl.float32) * one
    span: tl.constexpr = L if L > 1 else 2
    first = embed + 2 * _CANDIDATES * WIDTH + column
    out += _times(top, tl.load(first))
    out += _times(top - second, tl.load(first + WIDTH))
    out += _times(tl.div_rn(entropy, one * 3.4657359027997265), tl.load(first + 2 * WIDTH))
    out += _times(tail, tl.load(first + 3 * WIDTH))
    out += _times(tl.div_rn(position.to(tl.float32), one * (span - 1)), tl.load(first + 4 * WIDTH))
    out += _times(tl.div_rn((position - left).to(tl.float32), one * L), tl.load(first + 5 * WIDTH))
    out += _times(tl.div_rn((right - position).to(tl.float32), one * L), tl.load(first + 6 * WIDTH))
    out += _times(tl.div_rn(share, one * L), tl.load(first + 7 * WIDTH))
    out += tl.load(embed_bias + column)[None, :]
    to = (sample * L + position)[:, None] * WIDTH + column[None, :]
    tl.store(stale + to, out, mask=inside[:, None])


@triton.jit
def _times(feature, weight):
    """A feature of every row [R] times its row of a matrix [WIDTH]."""
    return feature.to(tl.float64)[:, None] * weight[None, :]


@triton.jit
def _attend_kernel(
    words, tokens, log_mass, depths, depth, is_open, stale, path, before, project, project_bias, norm, rows_out,
    mixed, num_words, IS_FIRST: tl.constexpr, L: tl.constexpr, PADDED_L: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, SCALE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (S * ROWS, heads). ``path`` [2, WIDTH]: of the embedding, for features 72 and 73."""
    wait_for_previous(OVERLAP)
    state = tl.program_id(0).to(tl.int64)
    sample, head = state // ROWS, tl.program_id(1)
    if row_is_expanded(log_mass, depths, depth, is_open, sample, state % ROWS, ROWS) == 0:
        return
    position = tl.arange(0, PADDED_L)
    inside = position < L
    column = tl.arange(0, WIDTH)
    cells = position[:, None] * WIDTH + column[None, :]
    given = words + sample * num_words + _HEAD
    is_masked = (tl.load(given + L + position, mask=inside, other=0) > 0) & inside
    if IS_FIRST:
        root = tl.load(given + position, mask=inside, other=-1)
        token = tl.load(tokens + state * L + position, mask=inside, other=-1)
        by_root = is_masked & (root >= 0)
        filled = is_masked & (token >= 0)
        num_filled = tl.sum(filled.to(tl.int32), axis=0)
        count = tl.where(by_root, tl.sum(by_root.to(tl.int32), axis=0), num_filled).to(tl.float32)
        x = tl.load(stale + sample * L * WIDTH + cells, mask=inside[:, None], other=0.0)
        x += _times(filled, tl.load(path + column))
        x += _times(tl.div_rn(count, tl.zeros_like(count) + L), tl.load(path + WIDTH + column))
    else:
        x = tl.load(before + state * L * WIDTH + cells, mask=inside[:, None], other=0.0)
        x = _normalised(x, tl.load(norm + column), tl.load(norm + WIDTH + column), WIDTH)
    if head == 0:
        tl.store(rows_out + state * L * WIDTH + cells, x, mask=inside[:, None])
    one_head = head * SIZE + tl.arange(0, SIZE)
    weights = project + column[:, None] * (3 * WIDTH) + one_head[None, :]
    query = tl.dot(x, tl.load(weights), out_dtype=tl.float64) + tl.load(project_bias + one_head)[None, :]
    key = tl.dot(x, tl.load(weights + WIDTH), out_dtype=tl.float64)
    key += tl.load(project_bias + WIDTH + one_head)[None, :]
    value = tl.dot(x, tl.load(weights + 2 * WIDTH), out_dtype=tl.float64)
    value += tl.load(project_bias + 2 * WIDTH + one_head)[None, :]
    scores = tl.dot(query, tl.trans(key), out_dtype=tl.float64) * tl.full((), SCALE, tl.float64)
    scores = tl.where(is_masked[None, :], scores, -1e300)
    share = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    share = share / tl.sum(share, axis=1)[:, None]
    out = tl.dot(share, value, out_dtype=tl.float64)
    to = position[:, None] * WIDTH + one_head[None, :]
    tl.store(mixed + state * L * WIDTH + to, out, mask=inside[:, None])


@triton.jit
def _open_kernel(
    log_mass, depths, depth, is_open, rows, mixed, merge, merge_bias, norm, up, up_bias, after, inner,
    L: tl.constexpr, PADDED_L: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    SLICE: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (S * ROWS, slices of INNER). The first slice keeps what follows the attention."""
    wait_for_previous(OVERLAP)
    state = tl.program_id(0).to(tl.int64)
    if row_is_expanded(log_mass, depths, depth, is_open, state // ROWS, state % ROWS, ROWS) == 0:
        return
    position = tl.arange(0, PADDED_L)
    inside = position < L
    column = tl.arange(0, WIDTH)
    step = tl.arange(0, STEP)
    cells = position[:, None] * WIDTH + column[None, :]
    x = tl.load(rows + state * L * WIDTH + cells, mask=inside[:, None], other=0.0)
    x += tl.load(merge_bias + column)[None, :]
    for start in range(0, WIDTH, STEP):
        left = tl.load(
            mixed + state * L * WIDTH + position[:, None] * WIDTH + (start + step)[None, :],
            mask=inside[:, None], other=0.0,
        )  # fmt: skip
        right = tl.load(merge + (start + step)[:, None] * WIDTH + column[None, :])
        x = tl.dot(left, right, x, out_dtype=tl.float64)
    x = _normalised(x, tl.load(norm + column), tl.load(norm + WIDTH + column), WIDTH)
    if tl.program_id(1) == 0:
        tl.store(after + state * L * WIDTH + cells, x, mask=inside[:, None])
    one_slice = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    weights = tl.load(up + column[:, None] * INNER + one_slice[None, :])
    wide = tl.dot(x, weights, out_dtype=tl.float64) + tl.load(up_bias + one_slice)[None, :]
    to = position[:, None] * INNER + one_slice[None, :]
    tl.store(inner + state * L * INNER + to, tl.maximum(wide, 0.0), mask=inside[:, None])


@triton.jit
def _close_kernel(
    log_mass, depths, depth, is_open, after, inner, down, down_bias, out, L: tl.constexpr, PADDED_L: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, SLICE: tl.constexpr, STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (S * ROWS, slices of WIDTH)."""
    wait_for_previous(OVERLAP)
    state = tl.program_id(0).to(tl.int64)
    if row_is_expanded(log_mass, depths, depth, is_open, state // ROWS, state % ROWS, ROWS) == 0:
        return
    position = tl.arange(0, PADDED_L)
    inside = position < L
    one_slice = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    step = tl.arange(0, STEP)
    cells = state * L * WIDTH + position[:, None] * WIDTH + one_slice[None, :]
    x = tl.load(after + cells, mask=inside[:, None], other=0.0) + tl.load(down_bias + one_slice)[None, :]
    for start in range(0, INNER, STEP):
        left = tl.load(
            inner + state * L * INNER + position[:, None] * INNER + (start + step)[None, :],
            mask=inside[:, None], other=0.0,
        )  # fmt: skip
        right = tl.load(down + (start + step)[:, None] * WIDTH + one_slice[None, :])
        x = tl.dot(left, right, x, out_dtype=tl.float64)
    tl.store(out + cells, x, mask=inside[:, None])


@triton.jit
def _head_kernel(
    log_mass, depths, depth, is_open, before, norm, head, head_bias, score, score_bias, scores, L: tl.constexpr,
    PADDED_L: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (S * ROWS)."""
    wait_for_previous(OVERLAP)
    state = tl.program_id(0).to(tl.int64)
    if row_is_expanded(log_mass, depths, depth, is_open, state // ROWS, state % ROWS, ROWS) == 0:
        return
    position = tl.arange(0, PADDED_L)
    inside = position < L
    column = tl.arange(0, WIDTH)
    cells = state * L * WIDTH + position[:, None] * WIDTH + column[None, :]
    x = tl.load(before + cells, mask=inside[:, None], other=0.0)
    x = _normalised(x, tl.load(norm + column), tl.load(norm + WIDTH + column), WIDTH)
    total = tl.zeros((PADDED_L,), tl.float64) + tl.load(score_bias)
    for start in tl.static_range(0, WIDTH, SLICE):
        one_slice = start + tl.arange(0, SLICE)
        weights = tl.load(head + column[:, None] * WIDTH + one_slice[None, :])
        hidden = tl.dot(x, weights, out_dtype=tl.float64) + tl.load(head_bias + one_slice)[None, :]
        total += tl.sum(tl.maximum(hidden, 0.0) * tl.load(score + one_slice)[None, :], axis=1)
    tl.store(scores + state * L + position, total, mask=inside)


class OrderScores:
    """The order model for the states of a growth; buffers are those of one graph.

    Raises ValueError for weights that the kernels do not take: fp64 on the device of ``state``, a width that is a
    power of two and divides into heads of at least 16.
    """

    def __init__(self, weights: OrderWeights, state: GrowthState) -> None:
        layers, triple, width = weights.project.shape
        if (
            weights.embed.shape != (width, NUM_STALE + 2) or triple != 3 * width or width != power_of_two(width)
            or width < _OPEN_SLICE or width % weights.num_heads or width // weights.num_heads < 16
            or weights.up.shape[1] % _OPEN_SLICE
        ):  # fmt: skip
            raise ValueError(
                f"order scores: embedding {tuple(weights.embed.shape)}, projection {tuple(weights.project.shape)}, "
                f"{weights.num_heads} heads; want [W, 74] and [K, 3W, W], W a power of two, heads of 16 at least"
            )
        if weights.embed.dtype != torch.float64 or weights.embed.device != state.words.device:
            raise ValueError(
                f"order scores: weights are {weights.embed.dtype} on {weights.embed.device}; want float64 on "
                f"{state.words.device}"
            )
        self._weights, self._state, self._layers = weights, state, layers
        self._width, self._inner = width, weights.up.shape[1]
        self._embed, self._head = weights.embed.t().contiguous(), weights.head.t().contiguous()
        self._project, self._merge, self._up, self._down = (
            matrix.transpose(1, 2).contiguous()
            for matrix in (weights.project, weights.merge, weights.up, weights.down)
        )
        num_samples, length = state.words.shape[0], state.plan.length
        states = num_samples * (1 + state.plan.budget)
        device = state.words.device

        def rows(count: int, columns: int) -> torch.Tensor:
            return torch.zeros((count, length, columns), dtype=torch.float64, device=device)

        self._stale = rows(num_samples, width)
        self._rows, self._mixed, self._after, self._out = (rows(states, width) for _ in range(4))
        self._wide = rows(states, self._inner)

    def prepare(self) -> None:
        """Work out what the states of a round share, from ``state.words``."""
        words = self._state.words
        _stale_kernel[(words.shape[0],)](
            words, self._embed, self._weights.embed_bias, self._stale, words.shape[1], **self._shape(rows=False),
            WIDTH=self._width, num_warps=8, **launch_options(words.device),
        )  # fmt: skip

    def compute(self, table: int) -> None:
        """Fill ``state.scores`` for the rows of ``table`` that the coming level expands."""
        state, weights, width = self._state, self._weights, self._width
        words, shape, options = state.words, self._shape(), launch_options(state.words.device)
        states = words.shape[0] * (1 + state.plan.budget)
        size = width // weights.num_heads
        which = (state.log_mass[table], state.depths[table], state.depth, state.is_open)
        for layer in range(self._layers):
            norms = weights.norms[layer]
            _attend_kernel[(states, weights.num_heads)](
                words, state.tokens[table], *which, self._stale, self._embed[NUM_STALE:], self._out,
                self._project[layer], weights.project_bias[layer], weights.norms[layer - 1][1], self._rows, self._mixed,
                words.shape[1], IS_FIRST=layer == 0, **shape, WIDTH=width, SIZE=size, SCALE=size**-0.5,
                num_warps=4 if shape["PADDED_L"] <= 32 else 8, **options,
            )  # fmt: skip
            _open_kernel[(states, self._inner // _OPEN_SLICE)](
                *which, self._rows, self._mixed, self._merge[layer], weights.merge_bias[layer], norms[0],
                self._up[layer], weights.up_bias[layer], self._after, self._wide, **shape, WIDTH=width,
                INNER=self._inner, SLICE=_OPEN_SLICE, STEP=_STEP, num_warps=8, **options,
            )  # fmt: skip
            _close_kernel[(states, width // _CLOSE_SLICE)](
                *which, self._after, self._wide, self._down[layer], weights.down_bias[layer], self._out, **shape,
                WIDTH=width, INNER=self._inner, SLICE=_CLOSE_SLICE, STEP=2 * _STEP, num_warps=8, **options,
            )  # fmt: skip
        _head_kernel[(states,)](
            *which, self._out, weights.norms[-1][1], self._head, weights.head_bias, weights.score,
            weights.score_bias, state.scores, **shape, WIDTH=width, SLICE=_HEAD_SLICE, num_warps=8, **options,
        )  # fmt: skip

    def _shape(self, *, rows: bool = True) -> dict[str, int]:
        plan = self._state.plan
        shape = {"L": plan.length, "PADDED_L": max(16, power_of_two(plan.length))}
        return shape | ({"ROWS": 1 + plan.budget} if rows else {})
