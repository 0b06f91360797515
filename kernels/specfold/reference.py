"""Torch twin of SpecFold's row work (Gong et al., "SpecFold", arXiv 2605.29344).

Every branch but a root has a *fold parent*, a branch before it. At the input of a layer position i of branch b differs
from its parent by

    r(b, i) = ‖H[b, i] - H[p, i]‖ / max(‖H[p, i]‖, eps)    in fp32

It folds where r < τ, strictly: at τ = 0 nothing folds. The *source* of a row is itself where it is recomputed, else its
parent's source; it ends at the root at latest. A folded row takes what its source adds in the layer and keeps its own
residual. The gate compares with the parent (``parent``) or with the row that the parent stands for (``source``).

Shapes: N branches (segments) of L rows, R = N · L flat rows, H hidden size, P packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-6
"""Least norm that a difference is divided by."""

GATES = ("parent", "source")


class PackedRows(NamedTuple):
    """Recomputed rows, packed.

    ``rows`` int64 [P]: the flat row of each packed row, whole groups of L rows of one sample; places that no row needs
    hold the sample's first row. ``place`` int64 [R]: where each recomputed row is packed; undefined for the others.
    ``group_of`` int64 [P / L]: the sample of each group of L packed rows.
    """

    rows: Tensor
    place: Tensor
    group_of: Tensor


def distances(hidden: Tensor, sources: Tensor) -> Tensor:
    """r of rows ``hidden`` [n, L, H] against ``sources`` [n, L, H]: fp32 [n, L]."""
    base = sources.float()
    difference = (hidden.float() - base).square().sum(-1).sqrt()
    return difference / base.square().sum(-1).sqrt().clamp_min(EPSILON)


def resolve(is_folded: Tensor, parents: Tensor, levels: Sequence[Tensor]) -> Tensor:
    """The flat source row of every row, int64 [N, L].

    ``is_folded`` bool [N, L]; ``parents`` int64 [N], -1 for a root; ``levels``: the branches at depth 1, 2, … .
    """
    num, length = is_folded.shape
    sources = torch.arange(num * length, device=is_folded.device).view(num, length)
    for level in levels:
        sources[level] = torch.where(is_folded[level], sources[parents[level]], sources[level])
    return sources


def row_sources(hidden: Tensor, parents: Tensor, levels: Sequence[Tensor], tau: float, gate: str) -> Tensor:
    """Gate and provenance of one layer: the flat source row of every row, int64 [N, L].

    Args:
        hidden: [N, L, H], the layer's input.
        parents, levels: as :func:`resolve` takes them.
        tau: rows with r < ``tau`` fold.
        gate: ``parent`` or ``source``.
    """
    if gate not in GATES:
        raise ValueError(f"gate {gate!r} is not one of {', '.join(GATES)}")
    num, length, width = hidden.shape
    if gate == "parent":
        is_folded = torch.zeros(num, length, dtype=torch.bool, device=hidden.device)
        for level in levels:
            is_folded[level] = distances(hidden[level], hidden[parents[level]]) < tau
        return resolve(is_folded, parents, levels)
    flat = hidden.reshape(num * length, width)
    sources = torch.arange(num * length, device=hidden.device).view(num, length)
    for level in levels:
        of_parent = sources[parents[level]]
        is_folded = distances(hidden[level], flat[of_parent]) < tau
        sources[level] = torch.where(is_folded, of_parent, sources[level])
    return sources


def pack_rows(sources: Tensor, groups: Sequence[Tensor]) -> PackedRows:
    """Pack the rows that are their own source, sample by sample, in ascending order.

    ``groups``: for each sample the segments int64 [n] whose blocks share slot and start. A sample's rows fill whole
    groups of L places, so that a packed group reads one prefix.
    """
    num, length = sources.shape
    device = sources.device
    index = torch.arange(num * length, device=device).view(num, length)
    is_own = sources == index
    packed, group_of = [], []
    for sample, segments in enumerate(groups):
        rows = index[segments][is_own[segments]]
        padded = rows[:1].expand(-len(rows) % length)
        packed += [rows, padded]
        group_of += [sample] * (-(-len(rows) // length))
    rows = torch.cat(packed)
    place = torch.full((num * length,), -1, dtype=torch.int64, device=device)
    # a place that repeats a sample's first row comes after it and must not win
    place[rows.flip(0)] = torch.arange(len(rows), device=device).flip(0)
    return PackedRows(rows, place, torch.tensor(group_of, dtype=torch.int64, device=device))


def fold_rows(middle: Tensor, sources: Tensor, packed: PackedRows, computed: Tensor) -> Tensor:
    """A layer's output: recomputed rows as computed, folded rows their own residual plus what the source's half added.

    Args:
        middle: [R, H], every row before the layer's second half.
        sources: int64 [N, L], flat source rows.
        computed: [P, H], the packed rows after it.

    Returns:
        [R, H]: ``computed`` where a row is its own source, else middle + (computed - middle) of the source.
    """
    flat = sources.flatten()
    out = middle.clone()
    count = len(flat)
    own = flat == torch.arange(count, device=flat.device)
    after = computed[packed.place[flat]]
    added = after.float() - middle[flat].float()
    folded = (middle[:count].float() + added).to(middle.dtype)
    out[:count] = torch.where(own[:, None], after, folded)
    return out
