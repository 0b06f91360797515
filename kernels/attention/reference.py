"""Torch twin of block attention: each segment (one block of one sample) attends to the cached positions
before its block and, without a mask, to its own block.

Shapes: N segments, L block length, Hq query heads, Hkv key heads (Hq a multiple: grouped queries), d head
width, M = Hq / Hkv * L query rows that share a key head. The cache of one layer is [slots, tiles, Hkv,
TILE_KEYS, d]: position p of a slot is key p % TILE_KEYS of tile p // TILE_KEYS.

Reduction tree, fixed by absolute positions alone:

    tile    TILE_KEYS keys from a multiple of TILE_KEYS; absent keys score -inf
    split   SPLIT_KEYS keys: its tiles in ascending order by online softmax (Milakov and Gimelshein 2018), from zero
    row     its splits merged in ascending order

Two things may narrow what a segment sees: its first ``first_key`` keys are absent (blocks that start at a prompt's end
are moved onto the grid by as many), and in a ``causal`` segment a query sees its own block up to itself.

all in fp32. L divides TILE_KEYS and blocks lie on the grid of L, so the own block is inside the last tile;
that tile is put together from cache and own keys and reduced as one, so a block gives the same bits whether
earlier keys come from the cache or were written to it by the same pass. Every matrix product has one fixed
shape ([M, d] by [d, TILE_KEYS], [M, TILE_KEYS] by [TILE_KEYS, d]), whatever is packed beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

TILE_KEYS = 64
SPLIT_KEYS = 256
TILES_PER_SPLIT = SPLIT_KEYS // TILE_KEYS

_KEYS_AT_ONCE = 1 << 12
"""Keys of all segments of a group whose scores are held at once. It bounds memory; no bit depends on it."""

LEAST_EXPONENT = -80.0

State = tuple[Tensor, Tensor, Tensor]
"""An online softmax under way: maximum [n, Hkv, M], sum and unnormalised output [n, Hkv, M, d]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileGroup:
    """Segments of one pass whose blocks end in the same tile: ``first`` to ``stop`` in the plan's order."""

    num_tiles: int
    first: int
    stop: int
    slots: tuple[int, ...]
    slot_index: Tensor  # [n] int64
    block_in_tile: Tensor  # [n] int64: which of the TILE_KEYS / L blocks of the last tile is the own one
    absent: Tensor  # [n, TILE_KEYS] bool: keys of the last tile beyond the own block
    absent_rows: Tensor | None  # [n, L, TILE_KEYS] bool: the same by query, where queries differ or keys lead
    absent_first: (
        Tensor | None
    )  # [n, TILE_KEYS] bool: absent keys of tile 0, where keys lead and it is not the last


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """What every layer of one pass shares: where each segment's keys are.

    ``order`` sorts the segments by the number of tiles they read, ``inverse`` sorts them back; both None
    where they are in that order already.
    """

    block_length: int
    num_segments: int
    order: Tensor | None  # [N] int64
    inverse: Tensor | None  # [N] int64
    groups: tuple[TileGroup, ...]


def plan_attention(
    slots: Sequence[int],
    block_starts: Sequence[int],
    block_length: int,
    device: torch.device | str = "cpu",
    *,
    first_keys: Sequence[int] | None = None,
    causal: Sequence[bool] | None = None,
) -> AttentionPlan:
    """Group the segments of a pass by the number of tiles they read.

    ``first_keys``: for each segment the number of leading positions of its slot that hold nothing, below the block
    length (None: all 0); a query among them sees itself only. ``causal``: for each segment whether a query sees its
    own block up to itself only (None: no).

    Raises ValueError where a block length does not divide the tile or a block is off its grid.
    """
    if not 1 <= block_length <= TILE_KEYS or TILE_KEYS % block_length:
        raise ValueError(f"block length {block_length} does not divide the key tile of {TILE_KEYS}")
    for segment, start in enumerate(block_starts):
        if start < 0 or start % block_length:
            raise ValueError(f"segment {segment}: block start {start} is not on the grid of {block_length}")
    order = sorted(range(len(block_starts)), key=lambda segment: block_starts[segment] // TILE_KEYS)
    keys = torch.arange(TILE_KEYS)
    groups: list[TileGroup] = []
    for last_tile, members in groupby(order, key=lambda segment: block_starts[segment] // TILE_KEYS):
        segments = list(members)
        # at most so many together that their scores stay in bounds; no bit depends on it
        step = max(1, _KEYS_AT_ONCE // ((last_tile + 1) * TILE_KEYS))
        for start in range(0, len(segments), step):
            chosen = segments[start : start + step]
            offsets = torch.tensor([block_starts[segment] % TILE_KEYS for segment in chosen])
            leading = torch.tensor([first_keys[segment] if first_keys else 0 for segment in chosen])
            is_causal = torch.tensor([bool(causal and causal[segment]) for segment in chosen])
            absent = keys[None, :] >= offsets[:, None] + block_length
            rows = None
            if bool(is_causal.any()) or (last_tile == 0 and bool(leading.any())):
                rows = _absent_by_query(absent, offsets, block_length, is_causal, leading * (last_tile == 0))
            absent_first = keys[None, :] < leading[:, None] if last_tile and bool(leading.any()) else None
            first = groups[-1].stop if groups else 0
            groups.append(
                TileGroup(
                    num_tiles=last_tile + 1,
                    first=first,
                    stop=first + len(chosen),
                    slots=tuple(slots[segment] for segment in chosen),
                    slot_index=torch.tensor([slots[segment] for segment in chosen]).to(device),
                    block_in_tile=(offsets // block_length).to(device),
                    absent=absent.to(device),
                    absent_rows=None if rows is None else rows.to(device),
                    absent_first=None if absent_first is None else absent_first.to(device),
                )
            )
    is_sorted = order == list(range(len(order)))
    permutation = torch.tensor(order, dtype=torch.int64)
    return AttentionPlan(
        block_length=block_length,
        num_segments=len(block_starts),
        order=None if is_sorted else permutation.to(device),
        inverse=None if is_sorted else permutation.argsort().to(device),
        groups=tuple(groups),
    )


def _absent_by_query(absent: Tensor, offsets: Tensor, length: int, causal: Tensor, leading: Tensor) -> Tensor:
    """bool [n, L, TILE_KEYS]: what each query of the own block may not see of the last tile."""
    keys = torch.arange(TILE_KEYS)
    own = offsets[:, None, None] + torch.arange(length)[None, :, None]  # the query's own key
    later = causal[:, None, None] & (keys > own)
    before = (keys < leading[:, None, None]) & (keys != own)
    return absent[:, None, :] | later | before


def write_cache(cache: Tensor, values: Tensor, slots: Tensor, block_starts: Tensor) -> None:
    """Put ``values`` [n, L, Hkv, d] of n blocks into ``cache`` [slots, tiles, Hkv, TILE_KEYS, d] in place.

    ``slots`` and ``block_starts`` are [n] integers; every (slot, block) at most once.
    """
    length = values.shape[1]
    by_block = cache.unflatten(3, (TILE_KEYS // length, length))
    tiles = torch.div(block_starts, TILE_KEYS, rounding_mode="floor")
    blocks = torch.div(block_starts % TILE_KEYS, length, rounding_mode="floor")
    by_block[slots, tiles, :, blocks] = values.transpose(1, 2)


def block_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from ``queries`` [N, L, Hq, d] to prefix and own block (``keys``, ``values`` [N, L, Hkv, d]).

    Returns the output [N, L, Hq, d] in the queries' dtype and the natural-log-sum-exp of the scaled scores
    [N, L, Hq] in fp32. ``scale``, by default d^-0.5, goes onto the queries. Blocks that a pass stores must be
    in the cache before this is called. With bf16 values the probabilities are rounded to bf16 before their
    product, as tensor cores take them.
    """
    num, length, num_heads, width = queries.shape
    num_kv_heads = keys.shape[2]
    if (
        num_heads % num_kv_heads
        or keys.shape != (num, length, num_kv_heads, width)
        or values.shape != keys.shape
    ):
        raise ValueError(
            f"block_attention: {tuple(queries.shape)} queries do not fit {tuple(keys.shape)} keys"
        )
    if (num, length) != (plan.num_segments, plan.block_length):
        raise ValueError(
            f"block_attention: the plan is for {plan.num_segments} blocks of {plan.block_length}"
        )
    scale = width**-0.5 if scale is None else scale
    group = num_heads // num_kv_heads
    if plan.order is not None:
        queries, keys, values = queries[plan.order], keys[plan.order], values[plan.order]
    # [N, L, Hkv, G, d] -> [N, Hkv, G * L, d]: the rows that share a key head
    rows = queries.float().view(num, length, num_kv_heads, group, width).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(num, num_kv_heads, group * length, width) * scale
    output = torch.empty_like(rows)
    log_sums = rows.new_empty(rows.shape[:3])
    for tiles in plan.groups:
        part = slice(tiles.first, tiles.stop)
        output[part], log_sums[part] = _attend_group(
            rows[part], keys[part], values[part], key_cache, value_cache, tiles
        )
    by_position = output.view(num, num_kv_heads, group, length, width).permute(0, 3, 1, 2, 4)
    attended = by_position.reshape(num, length, num_heads, width).to(queries.dtype)
    sums = log_sums.view(num, num_kv_heads, group, length).permute(0, 3, 1, 2).reshape(num, length, num_heads)
    if plan.inverse is not None:
        attended, sums = attended[plan.inverse], sums[plan.inverse]
    return attended, sums


def _attend_group(
    rows: Tensor, keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, tiles: TileGroup
) -> tuple[Tensor, Tensor]:
    """Segments that read the same number of tiles: output [n, Hkv, M, d] and log-sum-exp [n, Hkv, M].

    ``rows`` [n, Hkv, M, d] are scaled queries.
    """
    before, within = prefix_states(rows, key_cache, value_cache, tiles)
    return finish_own_tile(rows, keys, values, key_cache, value_cache, tiles, before, within)


def prefix_states(
    rows: Tensor, key_cache: Tensor, value_cache: Tensor, tiles: TileGroup
) -> tuple[State | None, State | None]:
    """Online-softmax states of scaled queries ``rows`` [n, Hkv, M, d] over the tiles before the one with the block.

    First the whole splits, merged; then the tiles of the last split before the own one. None where there are none.
    """
    num, num_kv_heads, num_rows, width = rows.shape
    full = tiles.num_tiles - 1
    if not full:
        return None, None
    # tiles that lie whole in the cache: shared by the branches of a sample, read in place
    num_entries = full * num_kv_heads
    prefix_keys = key_cache.flatten(1, 2).transpose(2, 3)
    prefix_values = value_cache.flatten(1, 2)
    scores = rows.new_empty((num, full, num_kv_heads, num_rows, TILE_KEYS))
    repeated = rows[:, None].expand(-1, full, -1, -1, -1).reshape(num, num_entries, num_rows, width)
    _multiply_each(repeated, prefix_keys, tiles.slots, scores.flatten(1, 2))
    if tiles.absent_first is not None:
        scores[:, 0].masked_fill_(tiles.absent_first[:, None, None, :], -math.inf)

    # maximum[t]: the running maximum of a split after its tile t
    maximum = scores.amax(-1)
    for tile in range(1, full):
        if tile % TILES_PER_SPLIT:
            torch.maximum(maximum[:, tile], maximum[:, tile - 1], out=maximum[:, tile])
    decay = maximum[:, :-1].sub(maximum[:, 1:]).clamp_(LEAST_EXPONENT, 0.0).exp_()  # read only inside a split
    scores = exponentials(scores, maximum)
    if tiles.absent_first is not None:
        scores[:, 0].masked_fill_(tiles.absent_first[:, None, None, :], 0.0)
    sums = scores.sum(-1)
    outputs = rows.new_empty((num, full, num_kv_heads, num_rows, width))
    rounded = scores.to(value_cache.dtype).float().flatten(1, 2)
    _multiply_each(rounded, prefix_values, tiles.slots, outputs.flatten(1, 2))

    before: State | None = None
    for first in range(0, full, TILES_PER_SPLIT):
        stop = min(first + TILES_PER_SPLIT, full)
        total, output = sums[:, first], outputs[:, first]
        for tile in range(first + 1, stop):
            total = total.mul_(decay[:, tile - 1]).add_(sums[:, tile])
            output = output.mul_(decay[:, tile - 1, ..., None]).add_(outputs[:, tile])
        split = (maximum[:, stop - 1], total, output)
        if stop - first < TILES_PER_SPLIT:
            return before, split
        before = split if before is None else merge_splits(before, split)
    return before, None


def finish_own_tile(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tiles: TileGroup,
    before: State | None,
    within: State | None,
) -> tuple[Tensor, Tensor]:
    """The tile with the own block on top of :func:`prefix_states`: output [n, Hkv, M, d], log-sum-exp [n, Hkv, M].

    ``keys``, ``values`` [n, L, Hkv, d] are the own block's. A state that is empty (maximum -inf, total 0, output 0)
    gives the bits of None.
    """
    num, num_kv_heads, num_rows, _ = rows.shape
    last_keys = _last_tile(key_cache, keys, tiles).float()
    last_values = _last_tile(value_cache, values, tiles).float()
    last_values.masked_fill_(tiles.absent[:, None, :, None], 0.0)
    last = torch.bmm(rows.flatten(0, 1), last_keys.flatten(0, 1).transpose(1, 2))
    last = last.view(num, num_kv_heads, num_rows, TILE_KEYS)
    absent = tiles.absent[:, None, None, :]
    if tiles.absent_rows is not None:
        group = num_rows // tiles.absent_rows.shape[1]
        absent = tiles.absent_rows.repeat(1, group, 1)[:, None]
    last.masked_fill_(absent, -math.inf)
    maximum = last.amax(-1)
    if within is not None:
        maximum = torch.maximum(maximum, within[0])
    weights = exponentials(last, maximum).masked_fill_(absent, 0.0)
    total, output = weights.sum(-1), _weigh(weights, last_values, value_cache.dtype)
    if within is not None:
        decay = within[0].sub(maximum).clamp_(LEAST_EXPONENT, 0.0).exp_()
        total = within[1].mul(decay).add_(total)
        output = within[2].mul(decay[..., None]).add_(output)
    if before is not None:
        maximum, total, output = merge_splits(before, (maximum, total, output))
    return output.div_(total[..., None]), maximum.add(total.log())


def _multiply_each(left: Tensor, cache: Tensor, slots: Sequence[int], out: Tensor) -> None:
    """``out[i] = left[i] @ cache[slots[i]]`` [n, e, ., .], over the first e entries of each slot, in fp32.

    Each slot's part of the cache is read where it lies (and widened once where it is not fp32).
    """
    num_entries = left.shape[1]
    parts = {slot: cache[slot, :num_entries].float() for slot in set(slots)}
    for one, slot, result in zip(left.unbind(0), slots, out.unbind(0), strict=True):
        torch.bmm(one, parts[slot], out=result)


def exponentials(scores: Tensor, maximum: Tensor) -> Tensor:
    """exp(scores - maximum) in place, ``maximum`` without the last dimension.

    Exponents below -80 count as -80: such a weight is lost in any sum that holds the maximum's weight of 1,
    and the vendor's exponential takes a hundred times as long where results underflow.
    """
    return scores.sub_(maximum[..., None]).clamp_(min=LEAST_EXPONENT).exp_()


def merge_splits(left: State, right: State) -> State:
    """Join two splits, each (maximum, sum, unnormalised output), the earlier one first."""
    maximum = torch.maximum(left[0], right[0])
    left_factor, right_factor = (
        value.sub(maximum).clamp_(min=LEAST_EXPONENT).exp_() for value in (left[0], right[0])
    )
    total = left[1] * left_factor + right[1] * right_factor
    output = left[2] * left_factor[..., None] + right[2] * right_factor[..., None]
    return maximum, total, output


def _weigh(weights: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """``weights`` [n, Hkv, M, TILE], rounded to ``dtype``, times ``values`` [n, Hkv, TILE, d], in fp32."""
    rounded = weights.to(dtype).float()
    product = torch.bmm(rounded.flatten(0, 1), values.flatten(0, 1))
    return product.view(*weights.shape[:3], values.shape[3])


def _last_tile(cache: Tensor, own: Tensor, tiles: TileGroup) -> Tensor:
    """The tile with the own block, from the cache and ``own`` [n, L, Hkv, d]: [n, Hkv, TILE, d]."""
    num, length, num_kv_heads, width = own.shape
    if length == TILE_KEYS:
        return own.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    tile = cache[tiles.slot_index, tiles.num_tiles - 1]
    by_block = tile.view(num, num_kv_heads, TILE_KEYS // length, length, width)
    by_block[torch.arange(num, device=tile.device), :, tiles.block_in_tile] = own.transpose(1, 2)
    return tile
