"""Block attention equals softmax attention, and a block has one value wherever its keys come from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlmgrid.kernels.attention import (
    SPLIT_KEYS,
    TILE_KEYS,
    block_attention,
    plan_attention,
    write_cache,
)

HEAD_DIMS = [64, 80, 96, 128, 192]
BLOCKS = [4, 8, 16, 32, 64]


def fill_cache(slots: int, length: int, heads: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random keys and values of ``slots`` samples, [slots, length, heads, width] and as a cache."""
    flat = torch.randn(slots, length, heads, width, generator=torch.Generator().manual_seed(seed))
    cache = flat.view(slots, length // TILE_KEYS, TILE_KEYS, heads, width).transpose(2, 3).contiguous()
    return flat, cache


def softmax_attention(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 attention of [L, Hq, d] to all of [S, Hkv, d]: output and log-sum-exp."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
    scores = torch.einsum("lhd,shd->lhs", query.double(), keys) * query.shape[2] ** -0.5
    return torch.einsum("lhs,shd->lhd", scores.softmax(-1), values), scores.logsumexp(-1)


@pytest.mark.parametrize("width", HEAD_DIMS)
@pytest.mark.parametrize("start", [0, 32, 64, 96, SPLIT_KEYS - 32, SPLIT_KEYS, SPLIT_KEYS + TILE_KEYS])
def test_equals_softmax_attention(width: int, start: int) -> None:
    generator = torch.Generator().manual_seed(width + start)
    flat_keys, key_cache = fill_cache(2, 1024, 2, width, 1)
    flat_values, value_cache = fill_cache(2, 1024, 2, width, 2)
    query = torch.randn(3, 32, 6, width, generator=generator)
    own_keys, own_values = torch.randn(2, 3, 32, 2, width, generator=generator)
    slots = [1, 0, 1]
    plan = plan_attention(slots, [start] * 3, 32)
    output, log_sums = block_attention(query, own_keys, own_values, key_cache, value_cache, plan)
    for segment, slot in enumerate(slots):
        expected, expected_sums = softmax_attention(
            query[segment],
            torch.cat([flat_keys[slot, :start], own_keys[segment]]),
            torch.cat([flat_values[slot, :start], own_values[segment]]),
        )
        torch.testing.assert_close(output[segment].double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(log_sums[segment].double(), expected_sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", BLOCKS)
def test_a_segment_keeps_its_bits_in_any_pack_and_from_a_cache_that_holds_its_block(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    width, heads, kv_heads = 80, 6, 2
    _, key_cache = fill_cache(4, 1024, kv_heads, width, 1)
    _, value_cache = fill_cache(4, 1024, kv_heads, width, 2)
    num = 33
    query = torch.randn(num, length, heads, width, generator=generator)
    keys, values = torch.randn(2, num, length, kv_heads, width, generator=generator)
    slots = torch.randint(0, 4, (num,), generator=generator).tolist()
    starts = (length * torch.randint(0, 1024 // length, (num,), generator=generator)).tolist()

    def attend(index: list[int]) -> Tensor:
        plan = plan_attention([slots[i] for i in index], [starts[i] for i in index], length)
        return block_attention(query[index], keys[index], values[index], key_cache, value_cache, plan)[0]

    alone = torch.cat([attend([segment]) for segment in range(num)])
    for pack in (2, 3, 5, 8, 33):
        assert torch.equal(attend(list(range(pack))), alone[:pack]), f"pack of {pack}"
    backwards = list(reversed(range(num)))
    assert torch.equal(attend(backwards), alone[backwards])
    for segment in range(0, num, 7):  # the own block written to the cache before it is read
        where = torch.tensor([slots[segment]]), torch.tensor([starts[segment]])
        stored_keys, stored_values = key_cache.clone(), value_cache.clone()
        write_cache(stored_keys, keys[segment : segment + 1], *where)
        write_cache(stored_values, values[segment : segment + 1], *where)
        plan = plan_attention([slots[segment]], [starts[segment]], length)
        part = slice(segment, segment + 1)
        again, _ = block_attention(query[part], keys[part], values[part], stored_keys, stored_values, plan)
        assert torch.equal(again, alone[part])


def test_positions_beyond_the_block_are_never_read() -> None:
    _, key_cache = fill_cache(1, 128, 1, 64, 1)
    _, value_cache = fill_cache(1, 128, 1, 64, 2)
    query, keys, values = torch.randn(3, 1, 16, 1, 64, generator=torch.Generator().manual_seed(3))
    plan = plan_attention([0], [80], 16)
    clean, _ = block_attention(query, keys, values, key_cache, value_cache, plan)
    for cache in (key_cache, value_cache):
        cache[:, 1, :, 80 - 64 :] = torch.nan
    poisoned, _ = block_attention(query, keys, values, key_cache, value_cache, plan)
    assert torch.equal(clean, poisoned)


def test_huge_and_tiny_scores_stay_finite() -> None:
    _, key_cache = fill_cache(1, 128, 1, 64, 1)
    _, value_cache = fill_cache(1, 128, 1, 64, 2)
    query, keys, values = torch.randn(3, 1, 32, 1, 64, generator=torch.Generator().manual_seed(3))
    plan = plan_attention([0], [96], 32)
    for factor in (1e-30, 1e4):
        output, log_sums = block_attention(query * factor, keys, values, key_cache, value_cache, plan)
        assert output.isfinite().all()
        assert log_sums.isfinite().all()


def test_write_cache_puts_a_block_at_its_positions() -> None:
    cache = torch.zeros(2, 2, 3, TILE_KEYS, 8)
    block = torch.randn(1, 16, 3, 8)
    write_cache(cache, block, torch.tensor([1]), torch.tensor([80]))
    flat = cache.transpose(2, 3).reshape(2, 128, 3, 8)
    assert torch.equal(flat[1, 80:96], block[0])
    flat[1, 80:96] = 0
    assert not flat.any()


def test_blocks_off_the_grid_are_refused() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        plan_attention([0], [0], 24)
    with pytest.raises(ValueError, match="not on the grid"):
        plan_attention([0, 0], [0, 30], 16)


@pytest.mark.parametrize("length", [8, 32, 64])
@pytest.mark.parametrize("start", [0, 64, 192])
def test_causal_blocks_and_leading_keys_equal_softmax_attention_of_what_is_there(
    length: int, start: int
) -> None:
    """Four packings of one block: causal or not, behind 5 absent keys or none; a plain one keeps its bits."""
    flat_keys, key_cache = fill_cache(1, 256, 2, 16, 1)
    flat_values, value_cache = fill_cache(1, 256, 2, 16, 2)
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(1, length, 4, 16, generator=generator).expand(4, -1, -1, -1)
    own_keys, own_values = (
        torch.randn(1, length, 2, 16, generator=generator).expand(4, -1, -1, -1) for _ in range(2)
    )
    causal, leading = [False, True, False, True], [0, 0, 5, 5]
    plan = plan_attention([0] * 4, [start] * 4, length, first_keys=leading, causal=causal)
    output, _ = block_attention(query, own_keys, own_values, key_cache, value_cache, plan)
    for segment in range(4):
        keys = torch.cat([flat_keys[0, :start], own_keys[segment]])
        values = torch.cat([flat_values[0, :start], own_values[segment]])
        for row in range(length):
            own = start + row
            last = own + 1 if causal[segment] else start + length
            seen = [position for position in range(last) if position >= leading[segment] or position == own]
            expected, _ = softmax_attention(query[segment, row : row + 1], keys[seen], values[seen])
            torch.testing.assert_close(
                output[segment, row : row + 1].double(), expected, rtol=1e-5, atol=1e-5
            )
    plain = plan_attention([0], [start], length)
    alone, _ = block_attention(query[:1], own_keys[:1], own_values[:1], key_cache, value_cache, plain)
    assert torch.equal(alone[0], output[0])
