"""Triton SpecFold: gate with provenance, packing with a count on the device, and the residual-preserving fold.

The twin (``reference``) is the specification: r = ‖H[b, i] - H[s, i]‖ / max(‖H[s, i]‖, eps), fold iff r < τ; a row's
source is its own where it is computed, else its parent's. Each row is reduced by itself, so a decision depends on two
rows alone. Packing is a scan in ascending order: no atomics, the same places on every run.

Shapes: N branches of L rows, R = N · L flat rows, H hidden size, P places of packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmgrid.kernels.specfold.reference import EPSILON, GATES
from dlmgrid.kernels.triton_support import check_float_type, check_one_device, power_of_two

_TILE = 1024


class DevicePack(NamedTuple):
    """Recomputed rows packed on the device, in buffers for the worst case.

    ``rows`` int32 [P]: the flat row of each place, a sample's places whole groups of L, filled up with the sample's
    first row; -1 from the count on. ``place`` int32 [R]: where each recomputed row is packed, -1 for the others.
    ``used`` int32 [1]: places in use. ``sample_of`` int32 [P / L]: the sample of each group of L places, -1 past the
    count.
    """

    rows: Tensor
    place: Tensor
    used: Tensor
    sample_of: Tensor


@triton.jit
def _gate_kernel(
    hidden, parents, sources, level, row_stride, tau, eps,
    L: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, AGAINST_SOURCE: tl.constexpr,
):  # fmt: skip
    """Grid (branches of one level or of all, positions): a row's source into ``sources`` [N, L].

    Against the source, levels are launched in turn and a parent's source is final. Against the parent, a folded row is
    marked with its parent's own row and ``_resolve_kernel`` follows the chain.
    """
    branch = tl.load(level + tl.program_id(0))
    position = tl.program_id(1)
    parent = tl.load(parents + branch)
    own = branch * L + position
    base = parent * L + position
    if AGAINST_SOURCE:
        base = tl.load(sources + base)
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
    tl.store(sources + own, tl.where(distance < tau, base, own))


@triton.jit
def _resolve_kernel(marked, sources, num_rows, depth, TILE: tl.constexpr):
    """Follow each row's marks to a row that is its own source, at most ``depth`` steps."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    held = rows < num_rows
    current = tl.load(marked + rows, mask=held, other=0)
    for _ in range(depth):
        current = tl.load(marked + current, mask=held, other=0)
    tl.store(sources + rows, current, mask=held)


@triton.jit
def _pack_kernel(
    sources, first_branch, num_branches, rows, place, sample_of, count, num_samples, num_places,
    L: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: an exclusive scan over the rows of each sample in turn, each sample filled up to whole groups."""
    used = tl.full((), 0, tl.int32)
    for sample in range(num_samples):
        first = tl.load(first_branch + sample) * L
        total = tl.load(num_branches + sample) * L
        begin = used
        for start in range(0, total, TILE):
            offsets = start + tl.arange(0, TILE)
            held = offsets < total
            row = first + offsets
            is_own = (tl.load(sources + row, mask=held, other=-1) == row) & held
            rank = tl.cumsum(is_own.to(tl.int32), 0)
            at = used + rank - 1
            tl.store(rows + at, row, mask=is_own)
            tl.store(place + row, tl.where(is_own, at, -1), mask=held)
            used += tl.sum(is_own.to(tl.int32), 0)
        missing = (L - (used - begin) % L) % L
        padding = tl.arange(0, TILE)
        tl.store(rows + used + padding, tl.zeros((TILE,), tl.int32) + first, mask=padding < missing)
        used += missing
        for start in range(0, (used - begin) // L, TILE):
            group = begin // L + start + tl.arange(0, TILE)
            tl.store(sample_of + group, tl.zeros((TILE,), tl.int32) + sample, mask=group < used // L)
    tl.store(count, used)
    for start in range(0, num_places, TILE):
        offsets = start + tl.arange(0, TILE)
        tl.store(
            rows + offsets, tl.full((TILE,), -1, tl.int32), mask=(offsets >= used) & (offsets < num_places)
        )
        tl.store(
            sample_of + offsets, tl.full((TILE,), -1, tl.int32),
            mask=(offsets >= used // L) & (offsets < num_places // L),
        )  # fmt: skip


@triton.jit
def _gather_kernel(source, rows, out, source_stride, width, TILE: tl.constexpr):
    """Grid (places, tiles of a row): ``out[p] = source[rows[p]]``; places past the count are left alone."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    if row < 0:
        return
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    values = tl.load(source + row.to(tl.int64) * source_stride + columns, mask=inside)
    tl.store(out + place * width + columns, values, mask=inside)


@triton.jit
def _fold_kernel(middle, computed, sources, place, out, middle_stride, width, TILE: tl.constexpr):
    """Grid (rows, tiles of a row): a computed row as it is, a folded one middle + (computed - middle) of its source."""
    row = tl.program_id(0)
    source = tl.load(sources + row)
    at = tl.load(place + source).to(tl.int64)
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


def row_sources(hidden: Tensor, parents: Tensor, levels: Sequence[Tensor], tau: float, gate: str) -> Tensor:
    """Gate and provenance of one layer: the flat source row of every row, int32 [N, L].

    Args:
        hidden: [N, L, H], contiguous rows.
        parents: int32 [N], -1 for a root; levels: int32, the branches at depth 1, 2, … .
        tau, gate: as the twin takes them.

    Raises:
        ValueError: other types, strides or gates.
    """
    if gate not in GATES:
        raise ValueError(f"gate {gate!r} is not one of {', '.join(GATES)}")
    num, length, width = hidden.shape
    if not hidden.is_contiguous():
        raise ValueError(f"row_sources: hidden must be contiguous, its strides are {hidden.stride()}")
    if parents.shape != (num,) or any(t.dtype != torch.int32 for t in (parents, *levels)):
        raise ValueError("row_sources: parents and levels must be int32, parents [N]")
    check_float_type("row_sources", hidden=hidden)
    check_one_device("row_sources", hidden=hidden, parents=parents)
    sources = torch.arange(num * length, dtype=torch.int32, device=hidden.device)
    options = {
        "L": length, "WIDTH": width, "TILE": min(_TILE, power_of_two(width)), "AGAINST_SOURCE": gate == "source",
    }  # fmt: skip
    waves = levels if gate == "source" else [torch.cat(list(levels))] if levels else []
    for level in waves:
        _gate_kernel[(len(level), length)](
            hidden, parents, sources, level, width, tau, EPSILON, **options, num_warps=4
        )
    if gate == "parent" and len(levels) > 1:
        marked, sources = sources, torch.empty_like(sources)
        _resolve_kernel[(triton.cdiv(num * length, _TILE),)](
            marked, sources, num * length, len(levels) - 1, TILE=_TILE, num_warps=4
        )
    return sources.view(num, length)


def pack_rows(sources: Tensor, first_branch: Tensor, num_branches: Tensor) -> DevicePack:
    """Pack the rows that are their own source, sample by sample, without asking the host how many there are.

    Args:
        sources: int32 [N, L] of :func:`row_sources`.
        first_branch, num_branches: int32 [S], each sample's branches, which lie side by side and make up all N.
    """
    num, length = sources.shape
    num_samples = first_branch.shape[0]
    if sources.dtype != torch.int32 or first_branch.dtype != torch.int32 or num_branches.dtype != torch.int32:
        raise ValueError("pack_rows: sources, first_branch and num_branches must be int32")
    check_one_device("pack_rows", sources=sources, first_branch=first_branch, num_branches=num_branches)
    device = sources.device
    num_places = num * length

    def integers(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=device)

    pack = DevicePack(integers(num_places), integers(num_places), integers(1), integers(num))
    _pack_kernel[(1,)](
        sources, first_branch, num_branches, pack.rows, pack.place, pack.sample_of, pack.used, num_samples,
        num_places, L=length, TILE=_TILE, num_warps=4,
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
        source, rows, out, source.stride(0), width, TILE=tile, num_warps=4
    )
    return out


def fold_rows(middle: Tensor, sources: Tensor, pack: DevicePack, computed: Tensor) -> Tensor:
    """A layer's output [R, H], as the twin of this name; ``computed`` [P, H] in the places of ``pack``."""
    num_rows = sources.numel()
    width = middle.shape[1]
    if middle.shape[0] < num_rows or middle.stride(1) != 1 or not computed.is_contiguous():
        raise ValueError(
            f"fold_rows: middle {tuple(middle.shape)}, {num_rows} sources; rows must be contiguous"
        )
    check_one_device("fold_rows", middle=middle, sources=sources, computed=computed)
    out = torch.empty((num_rows, width), dtype=middle.dtype, device=middle.device)
    tile = min(_TILE, power_of_two(width))
    _fold_kernel[(num_rows, triton.cdiv(width, tile))](
        middle, computed, sources, pack.place, out, middle.stride(0), width, TILE=tile, num_warps=4
    )
    return out
