"""Canvas attention equals softmax attention over the whole canvas, with one value a row however it is packed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dlmgrid.kernels.attention import (
    SPLIT_KEYS,
    CanvasSegment,
    canvas_attention,
    canvas_attention_vendor,
    plan_canvas_attention,
)

HEADS, KV_HEADS, WIDTH = 4, 2, 24


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def softmax_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """fp64 attention of [r, Hq, d] to all of [S, Hkv, d]."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
    scores = torch.einsum("lhd,shd->lhs", queries.double(), keys) * queries.shape[2] ** -0.5
    return torch.einsum("lhs,shd->lhd", scores.softmax(-1), values)


def random_canvas(length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    queries, keys, values = (
        torch.randn(length, heads, WIDTH, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return queries, keys, values


def caches(keys: Tensor, values: Tensor, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Caches of 3 slots that hold the canvas but for ``start`` to ``stop``, which is NaN, as is all the rest."""
    out = []
    for whole in (keys, values):
        cache = torch.full((3, SPLIT_KEYS + 192, KV_HEADS, WIDTH), torch.nan)
        cache[slot, : len(whole)] = whole
        cache[slot, start:stop] = torch.nan
        out.append(cache)
    return out[0], out[1]


@pytest.mark.parametrize("length", [5, 64, 101, SPLIT_KEYS, SPLIT_KEYS + 70])
def test_equals_softmax_attention_whole_and_in_part(length: int) -> None:
    queries, keys, values = random_canvas(length, length)
    start, stop = length // 2, length // 2 + max(1, length // 5)
    expected = softmax_attention(queries, keys, values)
    plan = plan_canvas_attention([CanvasSegment(0, 0, 0, length, length)], HEADS)
    whole = canvas_attention(queries, keys, values, None, None, plan)
    assert (whole - expected).abs().max() <= 1e-5
    vendor = canvas_attention_vendor(queries, keys, values, None, None, plan)
    assert (vendor - expected).abs().max() <= 1e-5
    plan = plan_canvas_attention([CanvasSegment(1, 0, start, stop, length)], HEADS)
    rows = slice(start, stop)
    key_cache, value_cache = caches(keys, values, 1, start, stop)
    part = canvas_attention(queries[rows], keys[rows], values[rows], key_cache, value_cache, plan)
    assert torch.equal(part, whole[rows])
    vendor = canvas_attention_vendor(queries[rows], keys[rows], values[rows], key_cache, value_cache, plan)
    assert (vendor - expected[rows]).abs().max() <= 1e-5


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_keeps_its_bits_in_any_pack(threads: int) -> None:
    torch.set_num_threads(threads)
    lengths = (40, 101, 101, 64, 600, 3)
    canvases = [random_canvas(length, seed) for seed, length in enumerate(lengths)]
    alone = []
    for length, canvas in zip(lengths, canvases, strict=True):
        plan = plan_canvas_attention([CanvasSegment(0, 0, 0, length, length)], HEADS)
        alone.append(canvas_attention(*canvas, None, None, plan))
    segments, first = [], 7  # rows before the first segment belong to none
    for length in lengths:
        segments.append(CanvasSegment(0, first, 0, length, length))
        first += length
    packed = [
        torch.cat([torch.zeros(7, *parts[0].shape[1:]), *parts]) for parts in zip(*canvases, strict=True)
    ]
    together = canvas_attention(*packed, None, None, plan_canvas_attention(segments, HEADS))
    assert not together[:7].any()
    for segment, rows in zip(segments, alone, strict=True):
        assert torch.equal(together[segment.first_row :][: segment.length], rows)


def test_segments_outside_their_canvas_and_missing_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="segment 0: positions 3 to 9 of a canvas of 8"):
        plan_canvas_attention([CanvasSegment(0, 0, 3, 9, 8)], HEADS)
    queries, keys, values = random_canvas(4, 0)
    plan = plan_canvas_attention([CanvasSegment(0, 0, 3, 7, 8)], HEADS)
    with pytest.raises(ValueError, match="there is no cache"):
        canvas_attention(queries, keys, values, None, None, plan)
