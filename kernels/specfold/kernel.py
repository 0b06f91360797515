"""Triton SpecFold: gate with provenance, packing with a count on the device, and the residual-preserving fold.

The twin (``reference``) is the specification: r = ‖H[b, i] - H[s, i]‖ / max(‖H[s, i]‖, eps), fold iff r < τ; a row's
source is its own where it is computed, else its parent's. Each row is reduced by itself, so a decision depends on two
rows alone. Packing is a scan in ascending order: no atomics, the same places on every run.

The gate *marks* each row with itself or with the row it folds onto; following the marks leads to the source. A row is
computed where its mark is itself, so rows are packed from the marks, and one kernel then gives every row its source and
the place of it.

Shapes: N branches of L rows, R = N · L flat rows, H hidden size, P = R places of packed rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmgrid.kernels.attention.fixed_plan import FixedPlan, PlanShape
from dlmgrid.kernels.dependent_launch import launch_options, wait_for_previous
from dlmgrid.kernels.specfold.layout import PLACE_FIELDS, FoldTables
from dlmgrid.kernels.specfold.reference import EPSILON, GATES
from dlmgrid.kernels.triton_support import check_float_type, check_one_device, power_of_two

_TILE = 1024


class DevicePack(NamedTuple):
    """Computed rows packed on the device, in buffers for the worst case.

    ``rows`` int32 [P]: the flat row of each place, a sample's places whole groups of L, filled up with the sample's
    first row; -1 from the count on. ``used`` int32 [1]: places in use. ``tiles`` int32 [tiles, fields]: the row tiles
    of a plan of attention over the places, those of no rows last. ``sources`` int32 [R]: each row's source;
    ``row_map`` int32 [R]: the place of that source.
    """

    rows: Tensor
    used: Tensor
    tiles: Tensor
    sources: Tensor
    row_map: Tensor


@triton.jit
def _is_close(hidden, own, base, row_stride, tau, eps, WIDTH: tl.constexpr, TILE: tl.constexpr):
    difference = tl.zeros((TILE,), dtype=tl.float32)
    norm = tl.zeros((TILE,), dtype=tl.float32)
    for start in range(0, WIDTH, TILE):
        columns = start + tl.arange(0, TILE)
        inside = columns < WIDTH
        here = tl.load(hidden + own.to(tl.int64) * row_stride + columns, mask=inside, other=0.0).to(
            tl.float32
        )
        there = tl.load(hidden + base.to(tl.int64) * row_stride + columns, mask=inside, other=0.0).to(
            tl.float32
        )
        difference += (here - there) * (here - there)
        norm += there * there
    distance = tl.sqrt_rn(tl.sum(difference, 0)) / tl.maximum(tl.sqrt_rn(tl.sum(norm, 0)), eps)
    return distance < tau


@triton.jit
def _parent_gate_kernel(
    hidden, parents, marks, taus, row_stride, eps,
    L: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (branches, positions): mark each row with itself, or with its parent's row where it is close to that."""
    wait_for_previous(OVERLAP)
    branch = tl.program_id(0)
    parent = tl.load(parents + branch)
    own = branch * L + tl.program_id(1)
    if parent < 0:
        tl.store(marks + own, own)
        return
    base = parent * L + tl.program_id(1)
    close = _is_close(hidden, own, base, row_stride, tl.load(taus), eps, WIDTH, TILE)
    tl.store(marks + own, tl.where(close, base, own))


@triton.jit
def _source_gate_kernel(
    hidden, parents, first_branch, num_branches, counts, marks, taus, row_stride, eps,
    L: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (samples at most, positions): a sample's branches in turn, each compared with its parent's mark."""
    wait_for_previous(OVERLAP)
    sample = tl.program_id(0)
    position = tl.program_id(1)
    if sample >= tl.load(counts):
        return
    first = tl.load(first_branch + sample)
    tau = tl.load(taus)
    for branch in range(first, first + tl.load(num_branches + sample)):
        parent = tl.load(parents + branch)
        own = branch * L + position
        mark = own
        if parent >= 0:
            base = tl.load(marks + parent * L + position)
            close = _is_close(hidden, own, base, row_stride, tau, eps, WIDTH, TILE)
            mark = tl.where(close, base, own)
        tl.store(marks + own, mark)
        tl.debug_barrier()  # a later branch reads the mark


@triton.jit
def _pack_kernel(
    marks, first_branch, num_branches, places, counts, rows, place, count, tiles, num_places, num_tiles,
    L: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr, PLACE: tl.constexpr,
    TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: an exclusive scan over the rows of each sample in turn, each sample filled up to whole groups."""
    wait_for_previous(OVERLAP)
    used = tl.full((), 0, tl.int32)
    used_tiles = tl.full((), 0, tl.int32)
    for sample in range(tl.load(counts)):
        first = tl.load(first_branch + sample) * L
        total = tl.load(num_branches + sample) * L
        begin = used
        for start in range(0, total, TILE):
            offsets = start + tl.arange(0, TILE)
            held = offsets < total
            row = first + offsets
            is_own = (tl.load(marks + row, mask=held, other=-1) == row) & held
            rank = tl.cumsum(is_own.to(tl.int32), 0)
            at = used + rank - 1
            tl.store(rows + at, row, mask=is_own)
            tl.store(place + row, tl.where(is_own, at, -1), mask=held)
            used += tl.sum(is_own.to(tl.int32), 0)
        missing = (L - (used - begin) % L) % L
        offsets = tl.arange(0, TILE)
        tl.store(rows + used + offsets, tl.zeros((TILE,), tl.int32) + first, mask=offsets < missing)
        used += missing
        group_rows = (used - begin) * GROUP
        sample_tiles = tl.cdiv(group_rows, ROWS)
        for start in range(0, sample_tiles, TILE):
            offsets = start + tl.arange(0, TILE)
            held = offsets < sample_tiles
            entry = tiles + (used_tiles + offsets) * FIELDS
            tl.store(entry, tl.zeros((TILE,), tl.int32) + begin // L, mask=held)
            tl.store(entry + 1, offsets * ROWS, mask=held)
            tl.store(entry + 2, tl.zeros((TILE,), tl.int32) + group_rows, mask=held)
            for field in tl.static_range(PLACE):
                value = tl.load(places + sample * PLACE + field)
                tl.store(entry + 3 + field, tl.zeros((TILE,), tl.int32) + value, mask=held)
        used_tiles += sample_tiles
    tl.store(count, used)
    for start in range(0, num_places, TILE):
        offsets = start + tl.arange(0, TILE)
        inside = (offsets >= used) & (offsets < num_places)
        tl.store(rows + offsets, tl.full((TILE,), -1, tl.int32), mask=inside)
    for start in range(0, num_tiles * FIELDS, TILE):
        offsets = start + tl.arange(0, TILE)
        inside = (offsets >= used_tiles * FIELDS) & (offsets < num_tiles * FIELDS)
        tl.store(tiles + offsets, tl.zeros((TILE,), tl.int32), mask=inside)


@triton.jit
def _resolve_kernel(
    marks, place, counts, sources, row_map, num_rows, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """Follow each row's marks to a row that is its own, at most as many steps as the deepest branch has."""
    wait_for_previous(OVERLAP)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    held = rows < num_rows
    current = tl.load(marks + rows, mask=held, other=0)
    for _ in range(tl.load(counts + 1) - 1):
        current = tl.load(marks + current, mask=held, other=0)
    tl.store(sources + rows, current, mask=held)
    tl.store(row_map + rows, tl.load(place + current, mask=held, other=0), mask=held)


@triton.jit
def _gather_kernel(source, rows, out, source_stride, width, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (places, tiles of a row): ``out[p] = source[rows[p]]``; places past the count are left alone."""
    wait_for_previous(OVERLAP)
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    if row < 0:
        return
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    values = tl.load(source + row.to(tl.int64) * source_stride + columns, mask=inside)
    tl.store(out + place * width + columns, values, mask=inside)


@triton.jit
def _fold_kernel(
    middle, computed, sources, row_map, out, middle_stride, width, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """Grid (rows, tiles of a row): a computed row as it is, a folded one middle + (computed - middle) of its source."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    source = tl.load(sources + row)
    at = tl.load(row_map + row).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    after = tl.load(computed + at * width + columns, mask=inside, other=0.0)
    own = tl.load(middle + row.to(tl.int64) * middle_stride + columns, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(middle + source.to(tl.int64) * middle_stride + columns, mask=inside, other=0.0).to(
        tl.float32
    )
    folded = own + (after.to(tl.float32) - before)
    is_own = (columns * 0 + source) == row
    result = tl.where(is_own, after, folded.to(out.dtype.element_ty))
    tl.store(out + row.to(tl.int64) * width + columns, result, mask=inside)


def mark_rows(
    hidden: Tensor, tables: FoldTables, layer: int, gate: str, *, out: Tensor | None = None
) -> Tensor:
    """The gate of one layer: for every row itself, or the row that it folds onto, int32 [R].

    Args:
        hidden: [N, L, H], contiguous rows.
        layer: whose τ counts.
        gate: as the twin takes it.
        out: int32 [R], written and returned if given.

    Raises:
        ValueError: other types, strides, sizes or gates.
    """
    if gate not in GATES:
        raise ValueError(f"gate {gate!r} is not one of {', '.join(GATES)}")
    num, length, width = hidden.shape
    if not hidden.is_contiguous():
        raise ValueError(f"mark_rows: hidden must be contiguous, its strides are {hidden.stride()}")
    if tables.parents.shape != (num,) or not 0 <= layer < tables.taus.shape[0]:
        raise ValueError(f"mark_rows: {num} branches and layer {layer} do not fit the tables")
    check_float_type("mark_rows", hidden=hidden)
    check_one_device("mark_rows", hidden=hidden, parents=tables.parents)
    marks = torch.empty(num * length, dtype=torch.int32, device=hidden.device) if out is None else out
    taus = tables.taus[layer:]
    options = {"L": length, "WIDTH": width, "TILE": min(_TILE, power_of_two(width)), "num_warps": 4}
    options |= launch_options(hidden.device)
    if gate == "parent":
        _parent_gate_kernel[(num, length)](
            hidden, tables.parents, marks, taus, width, EPSILON, **options
        )  # fmt: skip
    else:
        _source_gate_kernel[(num, length)](
            hidden, tables.parents, tables.first_branch, tables.num_branches, tables.counts, marks, taus, width,
            EPSILON, **options,
        )  # fmt: skip
    return marks


def pack_rows(marks: Tensor, tables: FoldTables, shape: PlanShape) -> DevicePack:
    """Pack the rows that are marked with themselves, sample by sample, without asking the host how many there are.

    Args:
        marks: int32 [R] of :func:`mark_rows`.
        shape: of the plan of attention whose row tiles are written.

    Raises:
        ValueError: types or sizes that do not fit.
    """
    num_rows, length = marks.numel(), shape.block_length
    fits = tables.parents.shape == (shape.num_segments,) and num_rows == shape.num_segments * length
    if marks.dtype != torch.int32 or not fits:
        raise ValueError(
            f"pack_rows: marks {tuple(marks.shape)} {marks.dtype}; want int32 and those of {shape}"
        )
    check_one_device("pack_rows", marks=marks, parents=tables.parents)

    def integers(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.int32, device=marks.device)

    fields = 3 + PLACE_FIELDS
    assert fields == FixedPlan.FIELDS
    place = integers(num_rows)
    pack = DevicePack(
        integers(num_rows),
        integers(1),
        integers(shape.most_tiles, fields),
        integers(num_rows),
        integers(num_rows),
    )
    _pack_kernel[(1,)](
        marks, tables.first_branch, tables.num_branches, tables.places, tables.counts, pack.rows, place, pack.used,
        pack.tiles, num_rows, shape.most_tiles, L=length, GROUP=shape.group, ROWS=shape.row_tile, FIELDS=fields,
        PLACE=PLACE_FIELDS, TILE=_TILE, num_warps=4, **launch_options(marks.device),
    )  # fmt: skip
    _resolve_kernel[(triton.cdiv(num_rows, _TILE),)](
        marks, place, tables.counts, pack.sources, pack.row_map, num_rows, TILE=_TILE, num_warps=4,
        **launch_options(marks.device),
    )  # fmt: skip
    return pack


def gather_rows(source: Tensor, rows: Tensor) -> Tensor:
    """``source`` [R, H] at ``rows`` int32 [P]: [P, H]; where a row is -1 nothing is written."""
    if source.dim() != 2 or source.stride(1) != 1 or rows.dtype != torch.int32:
        raise ValueError(
            f"gather_rows: source {tuple(source.shape)}, rows {rows.dtype}; want [R, H] and int32"
        )
    width = source.shape[1]
    out = torch.empty((rows.shape[0], width), dtype=source.dtype, device=source.device)
    tile = min(_TILE, power_of_two(width))
    _gather_kernel[(rows.shape[0], triton.cdiv(width, tile))](
        source, rows, out, source.stride(0), width, TILE=tile, num_warps=4, **launch_options(source.device)
    )
    return out


def fold_rows(middle: Tensor, pack: DevicePack, computed: Tensor) -> Tensor:
    """A layer's output [R, H], as the twin of this name; ``computed`` [P, H] in the places of ``pack``."""
    num_rows = pack.sources.numel()
    width = middle.shape[1]
    if middle.shape[0] < num_rows or middle.stride(1) != 1 or not computed.is_contiguous():
        raise ValueError(
            f"fold_rows: middle {tuple(middle.shape)}, {num_rows} sources; rows must be contiguous"
        )
    check_one_device("fold_rows", middle=middle, sources=pack.sources, computed=computed)
    out = torch.empty((num_rows, width), dtype=middle.dtype, device=middle.device)
    tile = min(_TILE, power_of_two(width))
    _fold_kernel[(num_rows, triton.cdiv(width, tile))](
        middle,
        computed,
        pack.sources,
        pack.row_map,
        out,
        middle.stride(0),
        width,
        TILE=tile,
        num_warps=4,
        **launch_options(middle.device),
    )
    return out
