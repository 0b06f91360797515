"""Triton block attention, with the reduction tree of the torch twin.

    s = scale * q · k
    tile    TILE_KEYS absolute keys; split: its tiles in ascending order by online softmax (Milakov and Gimelshein,
            arXiv 1805.02867); row: its splits merged in ascending order; all in fp32

Rows of one launch are grouped by (slot, block start). A program holds a tile of the rows that share a key head, of
one group or of a part of it, so a prefix tile serves every branch in it; the own block's tile is visited once for
each branch that the row tile touches. The splits of a row run in one program after another or in programs of their
own that a second kernel merges: the same additions in the same order, so the same bits.

Legend: N segments of L tokens, Hq query heads, Hkv key heads, G = Hq / Hkv, d head width, R = N · L rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dlmgrid.kernels.dependent_launch import wait_for_previous


@triton.jit
def _score(queries, keys):
    """Unscaled scores of one key tile, ``keys`` [d, TILE]."""
    return tl.dot(queries, keys, input_precision="ieee")


@triton.jit
def _step(scores, values, present, is_masked, scale, maximum, total, output):
    """One key tile: scores [ROWS, TILE], values [TILE, d], ``present`` [1 or ROWS, TILE] true where a key is seen (read
    if ``is_masked``).

    States and ``scale`` are in base 2. The product with the values is added to the rescaled output inside the tensor
    cores; a state whose maximum is -inf counts as empty whatever finite output it holds.
    """
    if is_masked:
        scores = tl.where(present, scores, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
    decay = tl.exp2(maximum - new_maximum)
    shift = tl.broadcast_to(-new_maximum[:, None], scores.shape)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * scale, shift))
    total = tl.fma(total, decay, tl.sum(weights, 1))
    output = tl.dot(weights.to(values.dtype), values, output * decay[:, None], input_precision="ieee")
    return new_maximum, total, output


@triton.jit
def _merge(maximum, total, output, next_maximum, next_total, next_output):
    """Two splits, the earlier one first; one of them may be empty, not both.

    An empty one changes no bit. Which product is fused into the sum is spelled out: it must not differ between kernels.
    """
    joint = tl.maximum(maximum, next_maximum)
    first = tl.exp2(maximum - joint)
    second = tl.exp2(next_maximum - joint)
    total = tl.fma(total, first, next_total * second)
    output = tl.fma(output, tl.broadcast_to(first[:, None], output.shape), next_output * second[:, None])
    return joint, total, output


@triton.jit
def _load(pointers, mask, IS_WHOLE: tl.constexpr):
    """A tile of keys or values; ``mask`` is needed where the head width is padded only."""
    return tl.load(pointers) if IS_WHOLE else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _cached_tiles(
    queries, cached_keys, cached_values, tile_stride, first, stop, first_key, scale, before_maximum, before_total,
    before_output,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, TILE: tl.constexpr, TILES_PER_SPLIT: tl.constexpr,
    ROWS: tl.constexpr, SEQUENTIAL: tl.constexpr,
):  # fmt: skip
    """Tiles first…stop that lie whole in the cache of one (slot, key head): the states before the last split, and its.

    SEQUENTIAL: whole splits go to the states before. One loop, so that tiles are on their way across ends of splits.
    """
    offsets = tl.arange(0, TILE)
    columns = tl.arange(0, PADDED_WIDTH)
    inside = (columns < WIDTH)[None, :]
    within = offsets[:, None] * WIDTH + columns[None, :]
    maximum, total, output = _empty(ROWS, PADDED_WIDTH)
    cached_keys += first * tile_stride
    cached_values += first * tile_stride
    for tile in range(first, stop):
        keys = tl.trans(_load(cached_keys + within, inside, WIDTH == PADDED_WIDTH))
        values = _load(cached_values + within, inside, WIDTH == PADDED_WIDTH)
        cached_keys += tile_stride
        cached_values += tile_stride
        scores = _score(queries, keys)
        if SEQUENTIAL:
            # here, past the scores' product, the output is at rest: reading it elsewhere would serialise the products
            if (tile % TILES_PER_SPLIT == 0) & (tile > first):
                before_maximum, before_total, before_output = _merge(
                    before_maximum, before_total, before_output, maximum, total, output
                )
                maximum = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
        absent = first_key - tile * TILE  # leading keys of this tile that hold nothing
        maximum, total, output = _step(
            scores, values, (offsets >= absent)[None, :], absent > 0, scale, maximum, total, output
        )
    if SEQUENTIAL:
        if (stop % TILES_PER_SPLIT == 0) & (stop > first):
            before_maximum, before_total, before_output = _merge(
                before_maximum, before_total, before_output, maximum, total, output
            )
            maximum, total, output = _empty(ROWS, PADDED_WIDTH)
    return before_maximum, before_total, before_output, maximum, total, output


@triton.jit
def _own_tile(
    queries, in_group, in_block, num_group_rows, first_row, cached_keys, cached_values, keys, values, row_map, segments,
    first_segment, own_segment, kv_head, start, first_key, causal, scale, maximum, total, output, own_stride,
    own_head_stride,
    value_stride, value_head_stride,
    L: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """The tile with the own block, for every segment that the row tile touches.

    ``own_segment`` is the first of them. Positions before the block come from the cache (pointers to this tile), the
    block's own from ``keys`` and ``values``, where ``row_map`` (MAPPED) says which of their rows holds the key of a
    segment's position.
    """
    offsets = tl.arange(0, TILE)
    columns = tl.arange(0, PADDED_WIDTH)
    inside = columns < WIDTH
    block_at = start % TILE
    is_held = offsets < block_at + L
    is_own = (offsets >= block_at) & is_held
    itself = block_at + in_block
    present = is_held[None, :] & ((causal == 0) | (offsets[None, :] <= itself[:, None]))
    present &= (start - block_at + offsets >= first_key)[None, :] | (offsets[None, :] == itself[:, None])
    position = tl.where(is_own, offsets - block_at, 0)
    last_row = tl.minimum(first_row + ROWS, num_group_rows) - 1
    for member in tl.range(first_row // (L * GROUP), last_row // (L * GROUP) + 1, num_stages=1):
        segment = own_segment
        if L * GROUP % ROWS != 0:
            segment = tl.load(segments + first_segment + member)
        segment = segment.to(tl.int64)
        own_row = segment * L + position
        if MAPPED:
            own_row = tl.load(row_map + own_row, mask=is_own, other=0).to(tl.int64)
        keys_at = tl.where(
            is_own, keys + (own_row * own_stride + kv_head * own_head_stride), cached_keys + offsets * WIDTH
        )
        values_at = tl.where(
            is_own,
            values + (own_row * value_stride + kv_head * value_head_stride),
            cached_values + offsets * WIDTH,
        )
        key_tile = tl.load(
            keys_at[None, :] + columns[:, None], mask=is_held[None, :] & inside[:, None], other=0.0
        )
        value_tile = tl.load(
            values_at[:, None] + columns[None, :], mask=is_held[:, None] & inside[None, :], other=0.0
        )
        scores = _score(queries, key_tile)
        if L * GROUP % ROWS == 0:  # a row tile lies in one segment
            maximum, total, output = _step(scores, value_tile, present, True, scale, maximum, total, output)
        else:
            new_maximum, new_total, new_output = _step(
                scores, value_tile, present, True, scale, maximum, total, output
            )
            chosen = in_group == member
            maximum = tl.where(chosen, new_maximum, maximum)
            total = tl.where(chosen, new_total, total)
            output = tl.where(chosen[:, None], new_output, output)
    return maximum, total, output


@triton.jit
def _natural_sum(maximum, total):
    """The natural log-sum-exp of a state in base 2."""
    return (maximum + tl.log2(total)) * 0.6931471805599453


@triton.jit
def _empty(ROWS: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    maximum = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    return maximum, tl.zeros((ROWS,), dtype=tl.float32), tl.zeros((ROWS, PADDED_WIDTH), dtype=tl.float32)


@triton.jit
def _rows_of_tile(
    tiles, segments, tile_id, skipped, kv_head,
    L: tl.constexpr, GROUP: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What the plan says of ROWS rows of a row tile from row ``skipped`` on, and of each of them: the packed row, the
    query head, its segment."""
    entry = tiles + tile_id * FIELDS
    first_segment = tl.load(entry)
    first_row = tl.load(entry + 1) + skipped
    num_group_rows = tl.load(entry + 2)
    slot = tl.load(entry + 3)
    start = tl.load(entry + 4)
    first_key = tl.load(entry + 5)
    causal = tl.load(entry + 6)
    row = first_row + tl.arange(0, ROWS)
    held = row < num_group_rows
    in_group = tl.minimum(row, num_group_rows - 1) // (L * GROUP)  # rows past the end follow the last segment
    within = row % (L * GROUP)
    segment = tl.load(segments + first_segment + in_group, mask=held, other=0)
    in_block = within // GROUP
    packed = segment.to(tl.int64) * L + in_block
    head = kv_head * GROUP + within % GROUP
    where = (first_segment, first_row, num_group_rows, slot, start, first_key, causal)
    return where, (held, in_group, in_block, packed, head)


@triton.jit
def attention_kernel(
    q, k, v, key_cache, value_cache, out, log_sums, state_max, state_total, state_out, tiles, segments,
    q_stride, q_head_stride, own_stride, own_head_stride,
    value_stride, value_head_stride, slot_stride, tile_stride, head_stride, num_heads, scale,
    num_states,
    L: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, TILE: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, SEQUENTIAL: tl.constexpr,
    BOUNDARY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, key heads, splits or 1).

    SEQUENTIAL: all splits of a row tile in one program. Otherwise split s of the grid's third axis goes into entry s
    of the states [splits, rows, ...]. BOUNDARY: the own tile is left out and the states before it are kept, the
    merged splits before the last in entry 0, the last split's in entry 1. A tile of no rows pads the plan.
    """
    wait_for_previous(OVERLAP)
    kv_head = tl.program_id(1)
    where, rows = _rows_of_tile(tiles, segments, tl.program_id(0), 0, kv_head, L, GROUP, FIELDS, ROWS)
    first_segment, first_row, num_group_rows, slot, start, first_key, causal = where
    if num_group_rows == 0:
        return
    held, in_group, in_block, packed, head = rows
    own_segment = tl.load(
        segments + first_segment + first_row // (L * GROUP)
    )  # early: the own tile hangs on it
    columns = tl.arange(0, PADDED_WIDTH)
    mask = held[:, None] & (columns < WIDTH)[None, :]
    queries = tl.load(
        q + packed[:, None] * q_stride + head[:, None].to(tl.int64) * q_head_stride + columns[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    at_head = slot.to(tl.int64) * slot_stride + kv_head * head_stride
    cached_keys = key_cache + at_head
    cached_values = value_cache + at_head
    own_tile = start // TILE
    last_split = own_tile // TILES_PER_SPLIT
    maximum, total, output = _empty(ROWS, PADDED_WIDTH)
    state_row = packed * num_heads + head
    first_tile = 0
    split = last_split
    if not SEQUENTIAL:
        split = tl.program_id(2)
        first_tile = split * TILES_PER_SPLIT
        if split > last_split:
            return
    maximum, total, output, within_maximum, within_total, within_output = _cached_tiles(
        queries, cached_keys, cached_values, tile_stride, first_tile,
        tl.minimum((split + 1) * TILES_PER_SPLIT, own_tile), first_key, scale, maximum, total, output,
        WIDTH, PADDED_WIDTH, TILE, TILES_PER_SPLIT, ROWS, SEQUENTIAL,
    )  # fmt: skip
    if not BOUNDARY:
        if split == last_split:
            base = own_tile.to(tl.int64) * tile_stride
            within_maximum, within_total, within_output = _own_tile(
                queries, in_group, in_block, num_group_rows, first_row, cached_keys + base,
                cached_values + base, k, v, k, segments, first_segment, own_segment, kv_head, start, first_key, causal,
                scale, within_maximum, within_total, within_output, own_stride, own_head_stride,
                value_stride, value_head_stride, L, GROUP, WIDTH, PADDED_WIDTH, TILE, ROWS, False,
            )  # fmt: skip
    if SEQUENTIAL and not BOUNDARY:
        maximum, total, output = _merge(maximum, total, output, within_maximum, within_total, within_output)
        tl.store(
            out + state_row[:, None] * WIDTH + columns[None, :],
            (output / total[:, None]).to(out.dtype.element_ty), mask=mask,
        )  # fmt: skip
        tl.store(log_sums + state_row, _natural_sum(maximum, total), mask=held)
    else:
        if SEQUENTIAL:
            tl.store(state_max + state_row, maximum, mask=held)
            tl.store(state_total + state_row, total, mask=held)
            tl.store(state_out + state_row[:, None] * WIDTH + columns[None, :], output, mask=mask)
            at = num_states + state_row
        else:
            at = split.to(tl.int64) * num_states + state_row
        tl.store(state_max + at, within_maximum, mask=held)
        tl.store(state_total + at, within_total, mask=held)
        tl.store(state_out + at[:, None] * WIDTH + columns[None, :], within_output, mask=mask)


@triton.jit
def merge_kernel(
    split_max, split_total, split_out, out, log_sums, state_max, state_total, state_out, tiles, segments,
    num_heads, num_states,
    L: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, TILE: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, BOUNDARY: tl.constexpr,
    AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, key heads, parts of a row tile of ROWS rows): the splits of each row in ascending order."""
    wait_for_previous(OVERLAP)
    where, rows = _rows_of_tile(
        tiles, segments, tl.program_id(0), tl.program_id(2) * ROWS, tl.program_id(1), L, GROUP, FIELDS, ROWS
    )
    start = where[4]
    if where[1] >= where[2]:
        return
    held, _, _, packed, head = rows
    columns = tl.arange(0, PADDED_WIDTH)
    mask = held[:, None] & (columns < WIDTH)[None, :]
    state_row = packed * num_heads + head
    last_split = start // TILE // TILES_PER_SPLIT
    maximum, total, output = _empty(ROWS, PADDED_WIDTH)
    outputs_at = split_out + state_row[:, None] * WIDTH + columns[None, :]
    plane = num_states.to(tl.int64)
    if last_split > 0:
        # the first split always; then AT_ONCE are on their way together, what lies past the last whole one is empty
        maximum = tl.load(split_max + state_row, mask=held, other=0.0)
        total = tl.load(split_total + state_row, mask=held, other=1.0)
        output = tl.load(outputs_at, mask=mask, other=0.0)
        for first in range(1, last_split, AT_ONCE):
            for ahead in tl.static_range(AT_ONCE):
                split = first + ahead
                is_whole = split < last_split
                at = split * plane
                maximum, total, output = _merge(
                    maximum, total, output,
                    tl.load(split_max + at + state_row, mask=held & is_whole, other=-float("inf")),
                    tl.load(split_total + at + state_row, mask=held & is_whole, other=0.0),
                    tl.load(outputs_at + at * WIDTH, mask=mask & is_whole, other=0.0),
                )  # fmt: skip
    at = last_split * plane
    last_maximum = tl.load(split_max + at + state_row, mask=held, other=0.0)
    last_total = tl.load(split_total + at + state_row, mask=held, other=1.0)
    last_output = tl.load(outputs_at + at * WIDTH, mask=mask, other=0.0)
    if BOUNDARY:
        tl.store(state_max + state_row, maximum, mask=held)
        tl.store(state_total + state_row, total, mask=held)
        tl.store(state_out + state_row[:, None] * WIDTH + columns[None, :], output, mask=mask)
        at = num_states + state_row
        tl.store(state_max + at, last_maximum, mask=held)
        tl.store(state_total + at, last_total, mask=held)
        tl.store(state_out + at[:, None] * WIDTH + columns[None, :], last_output, mask=mask)
    else:
        maximum, total, output = _merge(maximum, total, output, last_maximum, last_total, last_output)
        tl.store(
            out + state_row[:, None] * WIDTH + columns[None, :],
            (output / total[:, None]).to(out.dtype.element_ty), mask=mask,
        )  # fmt: skip
        tl.store(log_sums + state_row, _natural_sum(maximum, total), mask=held)


@triton.jit
def own_block_kernel(
    q, k, v, key_cache, value_cache, row_map, state_max, state_total, state_out, out, log_sums, tiles, segments,
    q_stride, q_head_stride, own_stride, own_head_stride,
    value_stride, value_head_stride, slot_stride, tile_stride, head_stride, num_heads, scale,
    num_states,
    L: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, TILE: tl.constexpr,
    FIELDS: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, key heads): the own tile on top of the states that ``row_map`` points each row to."""
    wait_for_previous(OVERLAP)
    kv_head = tl.program_id(1)
    where, rows = _rows_of_tile(tiles, segments, tl.program_id(0), 0, kv_head, L, GROUP, FIELDS, ROWS)
    first_segment, first_row, num_group_rows, slot, start, first_key, causal = where
    if num_group_rows == 0:
        return
    held, in_group, in_block, packed, head = rows
    own_segment = tl.load(segments + first_segment + first_row // (L * GROUP))
    columns = tl.arange(0, PADDED_WIDTH)
    mask = held[:, None] & (columns < WIDTH)[None, :]
    source = tl.load(row_map + packed, mask=held, other=0).to(tl.int64)
    queries = tl.load(
        q + source[:, None] * q_stride + head[:, None].to(tl.int64) * q_head_stride + columns[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    state_row = source * num_heads + head
    before_maximum = tl.load(state_max + state_row, mask=held, other=0.0)
    before_total = tl.load(state_total + state_row, mask=held, other=0.0)
    before_output = tl.load(state_out + state_row[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
    at = num_states + state_row
    maximum = tl.load(state_max + at, mask=held, other=0.0)
    total = tl.load(state_total + at, mask=held, other=0.0)
    output = tl.load(state_out + at[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
    base = (
        slot.to(tl.int64) * slot_stride + kv_head * head_stride + (start // TILE).to(tl.int64) * tile_stride
    )
    maximum, total, output = _own_tile(
        queries, in_group, in_block, num_group_rows, first_row, key_cache + base, value_cache + base, k, v, row_map,
        segments, first_segment, own_segment, kv_head, start, first_key, causal, scale, maximum, total, output,
        own_stride, own_head_stride,
    value_stride, value_head_stride, L, GROUP, WIDTH, PADDED_WIDTH, TILE, ROWS, True,
    )  # fmt: skip
    maximum, total, output = _merge(before_maximum, before_total, before_output, maximum, total, output)
    result_row = packed * num_heads + head
    tl.store(
        out + result_row[:, None] * WIDTH + columns[None, :],
        (output / total[:, None]).to(out.dtype.element_ty), mask=mask,
    )  # fmt: skip
    tl.store(log_sums + result_row, _natural_sum(maximum, total), mask=held)
