"""The Triton block attention: the twin's values, and one value of a segment in every launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from dlmgrid.kernels.attention import TILE_KEYS, reference, write_cache
from dlmgrid.kernels.attention.fixed_plan import FixedPlan, PlanShape
from dlmgrid.kernels.attention.launch import attend_block, attend_prefix, block_attention
from dlmgrid.kernels.attention.launch_plan import ROW_TILES, LaunchPlan, choose_row_tile, runs_in_sequence
from dlmgrid.kernels.attention.shapes import MODEL_SHAPES, ODD_SHAPES, AttentionShape

pytestmark = pytest.mark.usefixtures("poisoned")


class Operands:
    """Random segments of ``num_slots`` samples; what lies past the last block of a slot is NaN."""

    def __init__(
        self,
        shape: AttentionShape,
        slots: list[int],
        starts: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        generator = torch.Generator().manual_seed(shape.width + shape.length)
        tiles = max(starts) // TILE_KEYS + 1
        heads = shape.num_kv_heads

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(device, dtype)

        self.slots, self.starts, self.length = slots, starts, shape.length
        self.queries = random(len(slots), shape.length, shape.num_heads, shape.width)
        self.keys, self.values = random(2, len(slots), shape.length, heads, shape.width)
        self.key_cache = random(max(slots) + 1, tiles, heads, TILE_KEYS, shape.width)
        self.value_cache = random(max(slots) + 1, tiles, heads, TILE_KEYS, shape.width)
        for slot in set(slots):
            last = max(start for s, start in zip(slots, starts, strict=True) if s == slot)
            for cache in (self.key_cache, self.value_cache):
                cache[slot, last // TILE_KEYS, :, last % TILE_KEYS :] = torch.nan
                cache[slot, last // TILE_KEYS + 1 :] = torch.nan

    def plan(self, index: list[int]) -> LaunchPlan:
        return LaunchPlan(
            [self.slots[i] for i in index], [self.starts[i] for i in index], self.length, self.queries.device
        )

    def attend(self, index: list[int], **options: Any) -> tuple[Tensor, Tensor]:
        return block_attention(
            self.queries[index], self.keys[index], self.values[index], self.key_cache, self.value_cache,
            self.plan(index), **options,
        )  # fmt: skip

    def expected(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """The twin in fp32, on the CPU unless told otherwise."""
        tensors = [
            t.to(device, torch.float32)
            for t in (self.queries, self.keys, self.values, self.key_cache, self.value_cache)
        ]
        plan = reference.plan_attention(self.slots, self.starts, self.length, device)
        return reference.block_attention(*tensors, plan)


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_has_the_values_of_the_twin(
    triton_device: torch.device, float_type: torch.dtype, shape: AttentionShape, assert_near: Any
) -> None:
    num = shape.branches
    given = Operands(shape, [0] * num, [shape.start] * num, float_type, triton_device)
    out, log_sums = given.attend(list(range(num)))
    expected, expected_sums = given.expected()
    assert_near(out, expected)
    assert_near(log_sums, expected_sums, float_type)


MIXED = AttentionShape(3, 1, 64, 16, 0, 0)
SLOTS = [0, 0, 1, 1, 2, 0]
STARTS = [576, 576, 48, 48, 0, 64]


@pytest.fixture
def mixed(triton_device: torch.device, float_type: torch.dtype) -> Operands:
    """Samples of different lengths and numbers of branches in one launch."""
    return Operands(MIXED, SLOTS, STARTS, float_type, triton_device)


def test_samples_of_different_lengths_in_one_launch(mixed: Operands, assert_near: Any) -> None:
    out, _ = mixed.attend(list(range(len(SLOTS))))
    assert_near(out, mixed.expected()[0])


def test_a_segment_has_the_same_bits_in_every_launch(mixed: Operands) -> None:
    everything = list(range(len(SLOTS)))
    whole = mixed.attend(everything, sequential=True)
    apart = mixed.attend(everything, sequential=False)
    alone = [mixed.attend([i]) for i in everything]
    for part in range(2):
        assert torch.equal(whole[part], torch.cat([result[part] for result in alone]))
        assert torch.equal(apart[part], whole[part])
    for index in ([0, 2], everything[::-1]):
        assert torch.equal(mixed.attend(index)[0], whole[0][index])


def test_tiles_of_no_rows_and_splits_that_no_row_needs_change_nothing(mixed: Operands) -> None:
    """A plan may be padded, to keep the shape of its launch from pass to pass."""
    everything = list(range(len(SLOTS)))
    caches = mixed.key_cache, mixed.value_cache
    whole = mixed.attend(everything)
    for sequential in (True, False):
        plan = mixed.plan(everything)
        tiles = plan.tiles(3, 64)
        plan._tiles[3, 64] = torch.cat([tiles, tiles.new_zeros(2, plan.FIELDS)])
        plan.num_splits += 3
        out, sums = block_attention(
            mixed.queries, mixed.keys, mixed.values, *caches, plan, sequential=sequential
        )
        assert torch.equal(out, whole[0])
        assert torch.equal(sums, whole[1])


def test_a_block_read_from_the_cache_has_the_same_bits(mixed: Operands) -> None:
    alone, _ = mixed.attend([1])
    where = torch.tensor([0]), torch.tensor([576])
    keys, values = mixed.key_cache.clone(), mixed.value_cache.clone()
    write_cache(keys, mixed.keys[1:2], *(w.to(keys.device) for w in where))
    write_cache(values, mixed.values[1:2], *(w.to(keys.device) for w in where))
    mixed.key_cache, mixed.value_cache = keys, values
    assert torch.equal(mixed.attend([1])[0], alone)


def test_absent_leading_keys_and_causal_blocks(
    triton_device: torch.device, float_type: torch.dtype, assert_near: Any
) -> None:
    shape = AttentionShape(2, 1, 64, 16, 0, 0)
    slots, starts = [0, 1, 2, 3], [0, 16, 64, 128]
    given = Operands(shape, slots, starts, float_type, triton_device)
    narrowing: Any = {"first_keys": [3, 15, 7, 0], "causal": [False, True, False, True]}
    for cache in (given.key_cache, given.value_cache):
        cache[0, 0, :, :3], cache[1, 0, :, :15], cache[2, 0, :, :7] = 9.0, 9.0, 9.0
    plan = LaunchPlan(slots, starts, 16, triton_device, **narrowing)
    caches = given.key_cache, given.value_cache
    out, sums = block_attention(given.queries, given.keys, given.values, *caches, plan)
    tensors = [t.float().cpu() for t in (given.queries, given.keys, given.values, *caches)]
    expected, expected_sums = reference.block_attention(
        *tensors, reference.plan_attention(slots, starts, 16, **narrowing)
    )
    assert_near(out, expected)
    assert_near(sums, expected_sums, float_type)


@pytest.mark.parametrize("sequential", [True, False], ids=["in_sequence", "in_parallel"])
def test_the_states_at_the_block_boundary_finish_to_the_same_bits(mixed: Operands, sequential: bool) -> None:
    everything = list(range(len(SLOTS)))
    plan = mixed.plan(everything)
    whole = mixed.attend(everything)
    boundary = attend_prefix(mixed.queries, mixed.key_cache, mixed.value_cache, plan, sequential=sequential)
    packed = [t.flatten(0, 1) for t in (mixed.queries, mixed.keys, mixed.values)]
    identity = torch.arange(len(packed[0]), dtype=torch.int32, device=plan.segments.device)
    finished = attend_block(
        *packed, mixed.key_cache, mixed.value_cache, identity.view(-1, 16), boundary, plan
    )
    assert torch.equal(finished[0], whole[0])
    assert torch.equal(finished[1], whole[1])


def test_folded_rows_keep_the_query_and_see_the_keys_of_their_branch(mixed: Operands) -> None:
    """Branches take positions of their root: as attention with those queries, keys and values in place."""
    generator = torch.Generator().manual_seed(0)
    num = len(SLOTS)
    row_map = torch.arange(num * 16, dtype=torch.int32).view(num, 16)
    for branch, root in ((1, 0), (3, 2)):
        folded = torch.rand(16, generator=generator) < 0.6
        row_map[branch, folded] = row_map[root, folded]
    row_map = row_map.to(mixed.queries.device)
    packed = [t.flatten(0, 1) for t in (mixed.queries, mixed.keys, mixed.values)]
    plan = mixed.plan(list(range(num)))
    boundary = attend_prefix(mixed.queries, mixed.key_cache, mixed.value_cache, plan)
    out, sums = attend_block(*packed, mixed.key_cache, mixed.value_cache, row_map, boundary, plan)
    mixed.queries, mixed.keys, mixed.values = (t[row_map.long()] for t in packed)
    expected, expected_sums = mixed.attend(list(range(num)))
    assert torch.equal(out, expected)
    assert torch.equal(sums, expected_sums)


@pytest.mark.parametrize("sequential", [True, False], ids=["in_sequence", "in_parallel"])
def test_no_bit_depends_on_the_row_tile(mixed: Operands, sequential: bool) -> None:
    """Row tiles of 128 hold several segments here, and end before they are full."""
    everything = list(range(len(SLOTS)))
    whole = mixed.attend(everything, sequential=True, row_tile=64)
    wide = mixed.attend(everything, sequential=sequential, row_tile=128)
    assert torch.equal(wide[0], whole[0])
    assert torch.equal(wide[1], whole[1])


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODEL_SHAPES)
@pytest.mark.parametrize("start", [512, 2048, 32736])
def test_model_shapes_on_the_device(
    cuda_device: torch.device, model: str, start: int, assert_near: Any
) -> None:
    heads, kv_heads, width = MODEL_SHAPES[model]
    shape = AttentionShape(heads, kv_heads, width, 32, start, 9)
    given = Operands(shape, [0] * 9, [start] * 9, torch.bfloat16, cuda_device)
    out, _ = given.attend(list(range(9)), sequential=True)
    for row_tile in ROW_TILES:
        for sequential in (True, False):
            options = {"sequential": sequential, "row_tile": row_tile}
            assert torch.equal(given.attend(list(range(9)), **options)[0], out)
            assert torch.equal(given.attend([4], **options)[0], out[4:5])
    assert_near(out, given.expected(cuda_device)[0])


def test_arguments_that_do_not_fit_are_refused(triton_device: torch.device) -> None:
    shape = AttentionShape(4, 2, 64, 16, 16, 2)
    given = Operands(shape, [0, 0], [16, 16], torch.float32, triton_device)
    plan = given.plan([0, 1])
    caches = given.key_cache, given.value_cache
    with pytest.raises(ValueError, match="head width 72"):
        block_attention(torch.zeros(2, 16, 4, 72), given.keys, given.values, *caches, plan)
    with pytest.raises(ValueError, match="one type"):
        block_attention(given.queries.half(), given.keys, given.values, *caches, plan)
    with pytest.raises(ValueError, match="the plan is for"):
        block_attention(given.queries[:1], given.keys[:1], given.values[:1], *caches, plan)
    with pytest.raises(ValueError, match="do not fit"):
        block_attention(given.queries[:, :, :3], given.keys, given.values, *caches, plan)
    with pytest.raises(ValueError, match="contiguous"):
        loose = given.key_cache.transpose(3, 4).contiguous().transpose(3, 4)
        block_attention(given.queries, given.keys, given.values, loose, given.value_cache, plan)
    with pytest.raises(ValueError, match="does not divide"):
        LaunchPlan([0], [0], 24)
    with pytest.raises(ValueError, match="not on the grid"):
        LaunchPlan([0], [8], 16)
    with pytest.raises(ValueError, match="scale"):
        block_attention(given.queries, given.keys, given.values, *caches, plan, scale=-1.0)


def test_the_plan_follows_from_the_shape_of_the_pass() -> None:
    """Wide row tiles for many programs of one segment each; splits apart where they fill the card and merge cheaply."""
    assert [choose_row_tile(num, 128, 8, 128, 2) for num in (1, 9, 21, 64)] == [64, 64, 64, 128]
    assert choose_row_tile(64, 96, 3, 64, 2) == 64
    assert choose_row_tile(64, 128, 8, 128, 4) == 64
    assert runs_in_sequence(64, 2, 8, 1, 128)
    assert not runs_in_sequence(64, 2, 8, 9, 128)
    assert runs_in_sequence(64, 18, 8, 9, 128)


def test_a_fixed_plan_has_the_tiles_of_the_plan_of_each_pass() -> None:
    shape = PlanShape(48, 32, 4, 8, 128, 2)
    assert shape.row_tile == 128
    for slots in ([0] * 48, list(range(48))):
        tables = FixedPlan.tables_of(slots, [64] * 48, shape)
        fixed = FixedPlan(tables, shape, num_splits=2)
        plan = LaunchPlan(slots, [64] * 48, 32)
        assert plan.row_tile(4, 8, 128, 2) == fixed.row_tile(4, 8, 128, 2)
        assert torch.equal(fixed.tiles(4, 128), plan.tiles(4, 128))
        assert torch.equal(fixed.segments, plan.segments)
    with pytest.raises(ValueError, match="the plan is for"):
        fixed.tiles(4, 64)
