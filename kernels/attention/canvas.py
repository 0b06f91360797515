"""Torch twin of canvas attention: each segment (some rows of one bidirectional canvas) attends, without a mask, to
every position of its canvas, its own rows from the pass and the others from the cache.

Shapes: R rows of the pass, N segments, Hq query heads, Hkv key heads (Hq a multiple: grouped queries), d head
width. The cache of one layer is [slots, positions, Hkv, d].

Reduction tree, fixed by absolute positions alone, as in block attention:

    tile    TILE_KEYS keys from a multiple of TILE_KEYS; positions beyond the canvas score -inf
    split   SPLIT_KEYS keys: its tiles in ascending order by online softmax
    row     its splits merged in ascending order

all in fp32. A segment's keys are put together from cache and own rows before they are read, so a row gives the same
bits whether the rest of its canvas comes from the cache or was computed in the pass. Queries go through in panels of
PANEL_QUERIES rows, one head each, so every product has one fixed shape whatever is packed beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dlmgrid.kernels.attention.reference import (
    LEAST_EXPONENT,
    SPLIT_KEYS,
    TILE_KEYS,
    exponentials,
    merge_splits,
)

PANEL_QUERIES = 32

_SCORES_AT_ONCE = 1 << 22
"""Scores of one tile held at once, over all segments of a group. It bounds memory; no bit depends on it."""


class CanvasSegment(NamedTuple):
    """Rows of the pass from ``first_row`` on hold positions ``start`` to ``stop`` of a canvas of ``length`` tokens.

    The positions outside are read from ``slot`` of the cache.
    """

    slot: int
    first_row: int
    start: int
    stop: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CanvasGroup:
    """Segments of one pass with equal numbers of key tiles and query panels; n of them, with r rows in all."""

    num_tiles: int
    num_panels: int
    reads_cache: bool
    slots: Tensor  # [n] int64
    queries: Tensor  # [n, panels * PANEL_QUERIES] int64: rows of the pass; padding repeats the first
    absent: Tensor  # [n, tiles * TILE_KEYS] bool: positions beyond the canvas
    segment_of_row: Tensor  # [r] int64, into the group
    position_of_row: Tensor  # [r] int64
    rows: Tensor  # [r] int64, into the pass
    query_of_row: Tensor  # [r] int64, into the second dimension of ``queries``


def plan_canvas_attention(
    segments: Sequence[CanvasSegment], num_heads: int, device: torch.device | str = "cpu"
) -> tuple[CanvasGroup, ...]:
    """Group the segments of a pass. Raises ValueError for a segment that is empty or outside its canvas."""
    for number, segment in enumerate(segments):
        if not 0 <= segment.start < segment.stop <= segment.length:
            raise ValueError(
                f"segment {number}: positions {segment.start} to {segment.stop} of a canvas of {segment.length}"
            )
    groups: list[CanvasGroup] = []
    for shape, members in groupby(sorted(segments, key=_shape), key=_shape):
        alike = list(members)
        at_once = max(1, _SCORES_AT_ONCE // (num_heads * shape[1] * PANEL_QUERIES * TILE_KEYS))
        groups += [
            _group(shape, alike[first : first + at_once], device) for first in range(0, len(alike), at_once)
        ]
    return tuple(groups)


def _shape(segment: CanvasSegment) -> tuple[int, int, bool]:
    rows = segment.stop - segment.start
    return -(-segment.length // TILE_KEYS), -(-rows // PANEL_QUERIES), rows < segment.length


def _group(
    shape: tuple[int, int, bool], segments: list[CanvasSegment], device: torch.device | str
) -> CanvasGroup:
    num_tiles, num_panels, reads_cache = shape
    sizes = torch.tensor([segment.stop - segment.start for segment in segments])
    firsts = torch.tensor([segment.first_row for segment in segments])
    lengths = torch.tensor([segment.length for segment in segments])
    starts = torch.tensor([segment.start for segment in segments])
    offsets = torch.arange(num_panels * PANEL_QUERIES)
    inside = offsets[None, :] < sizes[:, None]
    segment_of_row, query_of_row = inside.nonzero(as_tuple=True)
    return CanvasGroup(
        num_tiles=num_tiles,
        num_panels=num_panels,
        reads_cache=reads_cache,
        slots=torch.tensor([segment.slot for segment in segments]).to(device),
        queries=(firsts[:, None] + torch.where(inside, offsets, 0)).to(device),
        absent=(torch.arange(num_tiles * TILE_KEYS)[None, :] >= lengths[:, None]).to(device),
        segment_of_row=segment_of_row.to(device),
        position_of_row=(starts[segment_of_row] + query_of_row).to(device),
        rows=(firsts[segment_of_row] + query_of_row).to(device),
        query_of_row=query_of_row.to(device),
    )


def canvas_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    plan: Sequence[CanvasGroup],
    *,
    scale: float | None = None,
) -> Tensor:
    """Attend from ``queries`` [R, Hq, d] to whole canvases; ``keys`` and ``values`` [R, Hkv, d] are the pass's own.

    Returns [R, Hq, d] in the queries' dtype; rows of no segment are zero. ``scale``, by default d^-0.5, goes onto
    the queries. With bf16 values the probabilities are rounded to bf16 before their product. Raises ValueError
    where a segment needs a cache and none is given.
    """
    output = torch.zeros_like(queries)
    for group in plan:
        own_keys = _gather(keys, key_cache, group)
        own_values = _gather(values, value_cache, group)
        attended = _attend_group(queries, own_keys, own_values, group, scale)
        output[group.rows] = attended[group.segment_of_row, group.query_of_row].to(queries.dtype)
    return output


def canvas_attention_vendor(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    plan: Sequence[CanvasGroup],
    *,
    scale: float | None = None,
) -> Tensor:
    """The same by torch's scaled dot product: the ``fast`` numerics. Its bits depend on what is packed."""
    output = torch.zeros_like(queries)
    for group in plan:
        own_keys, own_values = _gather(keys, key_cache, group), _gather(values, value_cache, group)
        attended = functional.scaled_dot_product_attention(
            queries[group.queries].transpose(1, 2),
            own_keys.transpose(1, 2),
            own_values.transpose(1, 2),
            attn_mask=~group.absent[:, None, None, :],
            scale=scale,
            enable_gqa=True,
        ).transpose(1, 2)
        output[group.rows] = attended[group.segment_of_row, group.query_of_row]
    return output


def _gather(own: Tensor, cache: Tensor | None, group: CanvasGroup) -> Tensor:
    """Keys or values of whole canvases [n, tiles * TILE_KEYS, Hkv, d]: the cache's, with the pass's own over them."""
    num, width = group.absent.shape
    if not group.reads_cache:
        whole = own.new_zeros((num, width, *own.shape[1:]))
    elif cache is None:
        raise ValueError("canvas_attention: a segment covers a part of its canvas, and there is no cache")
    else:
        whole = cache[group.slots, :width].masked_fill(group.absent[:, :, None, None], 0)
    whole[group.segment_of_row, group.position_of_row] = own[group.rows]
    return whole


def _attend_group(
    queries: Tensor, keys: Tensor, values: Tensor, group: CanvasGroup, scale: float | None
) -> Tensor:
    """Output [n, panels * PANEL_QUERIES, Hq, d] fp32 of a group; ``keys``, ``values`` as :func:`_gather` gives them."""
    num, _, num_kv_heads, width = keys.shape
    num_heads = queries.shape[1]
    shared = num_heads // num_kv_heads
    scale = width**-0.5 if scale is None else scale
    rows = queries[group.queries].float() * scale
    rows = rows.view(num, group.num_panels, PANEL_QUERIES, num_kv_heads, shared, width)
    rows = rows.permute(0, 3, 4, 1, 2, 5).reshape(-1, PANEL_QUERIES, width)  # one entry a panel of a head
    repeats = shared * group.num_panels
    tiles = (group.num_tiles, TILE_KEYS)
    keys_by_tile = keys.unflatten(1, tiles).permute(1, 0, 3, 4, 2).float()  # [tiles, n, Hkv, d, TILE]
    values_by_tile = values.unflatten(1, tiles).permute(1, 0, 3, 2, 4).float()  # [tiles, n, Hkv, TILE, d]
    absent_by_tile = group.absent.unflatten(1, tiles).transpose(0, 1)  # [tiles, n, TILE]

    merged: tuple[Tensor, Tensor, Tensor] | None = None
    for first in range(0, group.num_tiles, SPLIT_KEYS // TILE_KEYS):
        split: tuple[Tensor, Tensor, Tensor] | None = None
        for tile in range(first, min(first + SPLIT_KEYS // TILE_KEYS, group.num_tiles)):
            tile_keys = _repeat(keys_by_tile[tile], repeats)
            absent = absent_by_tile[tile][:, None, None, :].expand(-1, num_kv_heads * repeats, 1, -1)
            absent = absent.reshape(-1, 1, TILE_KEYS)
            scores = torch.bmm(rows, tile_keys).masked_fill_(absent, -math.inf)
            maximum = scores.amax(-1)
            if split is not None:
                maximum = torch.maximum(maximum, split[0])
            weights = exponentials(scores, maximum).masked_fill_(absent, 0.0)
            total = weights.sum(-1)
            rounded = weights.to(values.dtype).float()
            output = torch.bmm(rounded, _repeat(values_by_tile[tile], repeats))
            if split is not None:
                decay = (split[0] - maximum).clamp_(min=LEAST_EXPONENT).exp_()
                total = split[1].mul_(decay).add_(total)
                output = split[2].mul_(decay[..., None]).add_(output)
            split = (maximum, total, output)
        assert split is not None
        merged = split if merged is None else merge_splits(merged, split)
    assert merged is not None
    output = merged[2] / merged[1][..., None]
    output = output.view(num, num_kv_heads, shared, group.num_panels, PANEL_QUERIES, width)
    return output.permute(0, 3, 4, 1, 2, 5).reshape(num, -1, num_heads, width)


def _repeat(tiles: Tensor, repeats: int) -> Tensor:
    """``tiles`` [n, Hkv, a, b], each ``repeats`` times in a row: [n * Hkv * repeats, a, b]."""
    return tiles[:, :, None].expand(-1, -1, repeats, -1, -1).reshape(-1, *tiles.shape[2:])
