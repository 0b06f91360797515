"""Attention cut at the block boundary gives the bits of the whole; folded rows see the keys of their branch."""

from __future__ import annotations

import pytest
import torch

from dlmgrid.kernels.attention import TILE_KEYS, block_attention, plan_attention
from dlmgrid.kernels.attention.boundary import attend_block, attend_prefix


@pytest.mark.parametrize("length", [4, 16, 64])
def test_two_halves_are_the_whole(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    key_cache, value_cache = torch.randn(2, 3, 20, 2, TILE_KEYS, 64, generator=generator)
    starts = [1088, 512, 448, 0, 1024 + 64 - length, 64, 1088]
    slots = [0, 1, 2, 0, 1, 2, 0]
    queries = torch.randn(7, length, 6, 64, generator=generator)
    keys, values = torch.randn(2, 7, length, 2, 64, generator=generator)
    plan = plan_attention(slots, starts, length)
    whole, whole_sums = block_attention(queries, keys, values, key_cache, value_cache, plan)
    boundary = attend_prefix(queries, key_cache, value_cache, plan)
    row_map = torch.arange(7 * length).view(7, length)
    packed = [t.flatten(0, 1) for t in (queries, keys, values)]
    half, half_sums = attend_block(*packed, key_cache, value_cache, row_map, boundary, plan)
    assert torch.equal(half, whole)
    assert torch.equal(half_sums, whole_sums)
    row_map[6, ::2] = row_map[0, ::2]  # branch 6 takes half its rows from branch 0
    folded, _ = attend_block(*packed, key_cache, value_cache, row_map, boundary, plan)
    moved = [t.flatten(0, 1)[row_map] for t in (queries, keys, values)]
    assert torch.equal(folded, block_attention(*moved, key_cache, value_cache, plan)[0])
    assert not torch.equal(folded[6], whole[6])


def test_a_plan_for_other_segments_is_refused() -> None:
    cache = torch.zeros(1, 1, 1, TILE_KEYS, 64)
    plan = plan_attention([0], [0], 16)
    with pytest.raises(ValueError, match="the plan is for 1 blocks of 16"):
        attend_prefix(torch.zeros(2, 16, 1, 64), cache, cache, plan)
