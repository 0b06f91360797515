"""The kernel that stores a pass: what stores is where the twin puts it, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from dlmgrid.kernels.attention import TILE_KEYS, write_cache
from dlmgrid.kernels.cache_write.kernel import write_blocks


@pytest.mark.parametrize(("length", "width"), [(4, 64), (32, 80), (64, 64)])
def test_writes_what_stores_and_nothing_else(triton_device: torch.device, length: int, width: int) -> None:
    generator = torch.Generator().manual_seed(length)
    keys, values = (
        torch.randn(3, length, 5, width, generator=generator)[:, :, :2].to(triton_device) for _ in range(2)
    )
    caches = [torch.randn(2, 3, 2, TILE_KEYS, width, generator=generator).to(triton_device) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    slots = torch.tensor([1, -1, 0], dtype=torch.int32, device=triton_device)
    starts = torch.tensor([128 // length * length, 0, length], dtype=torch.int32, device=triton_device)
    stored = torch.tensor([0, 2], device=triton_device)
    for cache, part in zip(expected, (keys, values), strict=True):
        write_cache(cache, part[stored], slots[stored].long(), starts[stored].long())
    mapped = [cache.clone() for cache in caches]
    write_blocks(keys, values, *caches, slots, starts)
    for ours, theirs in zip(caches, expected, strict=True):
        assert torch.equal(ours, theirs)
    order = torch.randperm(3 * length, generator=generator).to(triton_device)
    row_map = order.argsort().int().view(3, length)
    packed = (part.flatten(0, 1)[order].unflatten(0, (3, length)) for part in (keys, values))
    write_blocks(*packed, *mapped, slots, starts, row_map)
    for ours, theirs in zip(mapped, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_refuses_caches_that_do_not_fit(triton_device: torch.device) -> None:
    keys = torch.zeros(1, 4, 2, 64, device=triton_device)
    cache = torch.zeros(1, 1, 3, TILE_KEYS, 64, device=triton_device)
    integers = torch.zeros(1, dtype=torch.int32, device=triton_device)
    with pytest.raises(ValueError, match="do not fit"):
        write_blocks(keys, keys, cache, cache, integers, integers)
    with pytest.raises(ValueError, match=r"want \[1\]"):
        cache = torch.zeros(1, 1, 2, TILE_KEYS, 64, device=triton_device)
        write_blocks(keys, keys, cache, cache, integers[:0], integers)
