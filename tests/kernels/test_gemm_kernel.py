"""The Triton products: values of fp64, and one value of a row in every tile and every packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

triton = pytest.importorskip("triton")

from dlmgrid.kernels.gemm.kernel import linear
from dlmgrid.kernels.gemm.shapes import ODD_ROWS, ODD_SHAPES, PASS_ROWS, PRODUCTS
from dlmgrid.kernels.gemm.tiles import TILES, choose_tile

pytestmark = pytest.mark.usefixtures("poisoned")


def operands(
    rows: int, outputs: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + outputs + width)
    x = torch.randn(rows, width, generator=generator)
    weight = torch.randn(outputs, width, generator=generator) * width**-0.5
    return x.to(device, dtype), weight.to(device, dtype)


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
def test_odd_sizes_have_the_values_of_fp64(
    triton_device: torch.device, float_type: torch.dtype, shape: tuple[int, int], tile: Any, assert_near: Any
) -> None:
    rows = ODD_ROWS[ODD_SHAPES.index(shape)]
    x, weight = operands(rows, *shape, float_type, triton_device)
    assert_near(linear(x, weight, tile=tile), x.double() @ weight.double().t())


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
def test_epilogues(triton_device: torch.device, float_type: torch.dtype, tile: Any, assert_near: Any) -> None:
    x, weight = operands(33, 90, 1050, float_type, triton_device)
    bias, residual = operands(33, 1, 90, float_type, triton_device)
    product = x.double() @ weight.double().t()
    wide = linear(x, weight, bias[0], residual=bias, tile=tile, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert_near(wide, product + bias[0].double() + bias.double(), float_type)
    gate, up = product.chunk(2, 1)
    residual = bias[:, :45]
    gated = linear(x, weight, residual=residual, gated=True, tile=tile)
    assert_near(gated, functional.silu(gate) * up + residual.double())
    assert linear(x * 1e3, weight, gated=True, tile=tile, out_dtype=torch.float32).isfinite().all()


def test_a_row_has_the_same_bits_in_every_tile_and_pack(
    triton_device: torch.device, float_type: torch.dtype
) -> None:
    x, weight = operands(5 * 32, 140, 2200, float_type, triton_device)
    alone = torch.cat([linear(group, weight) for group in x.split(32)])
    for name, tile in TILES.items():
        for pack in (1, 2, 3, 5):
            packed = linear(x[: pack * 32], weight, tile=tile)
            assert torch.equal(packed, alone[: pack * 32]), f"{name}, {pack} packed"
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(triton_device)
    assert torch.equal(linear(x[order], weight), alone[order])
    assert torch.equal(linear(x[:33], weight), alone[:33])
    gated = linear(x, weight, gated=True, tile=TILES["split"])
    assert all(torch.equal(linear(x, weight, gated=True, tile=tile), gated) for tile in TILES.values())


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["SDAR-8B", "smollm2-135m"])
def test_model_shapes_keep_bits_on_the_device(cuda_device: torch.device, model: str) -> None:
    for shape in PRODUCTS[model].values():
        x, weight = operands(max(PASS_ROWS[:4]), *shape, torch.bfloat16, cuda_device)
        alone = linear(x[:32], weight)
        for rows in PASS_ROWS[:4]:
            for tile in TILES.values():
                assert torch.equal(linear(x[:rows], weight, tile=tile)[:32], alone), (shape, rows, tile)


def test_chunk_sums_are_added_in_ascending_order(triton_device: torch.device) -> None:
    x, weight = operands(64, 64, 2048 + 100, torch.float32, triton_device)
    first, second, third = (
        linear(x[:, a:b].contiguous(), weight[:, a:b].contiguous())
        for a, b in ((0, 1024), (1024, 2048), (2048, 2148))
    )
    assert torch.equal(linear(x, weight), (first + second) + third)
    assert not torch.equal(first + (second + third), (first + second) + third)


def test_rows_past_the_count_on_the_device_are_not_computed(
    triton_device: torch.device, float_type: torch.dtype
) -> None:
    x, weight = operands(200, 70, 1100, float_type, triton_device)
    count = torch.tensor([70], dtype=torch.int32, device=triton_device)
    whole = linear(x, weight)
    for tile in TILES.values():
        part = linear(x, weight, row_count=count, tile=tile)
        assert torch.equal(part[:70], whole[:70])
        assert part[70:].isnan().all()


def test_weights_may_be_stored_by_column(triton_device: torch.device) -> None:
    x, weight = operands(40, 70, 300, torch.float32, triton_device)
    assert torch.equal(linear(x, weight.t().contiguous().t()), linear(x, weight))


def test_every_row_count_has_a_pinned_tile() -> None:
    for products in PRODUCTS.values():
        for outputs, width in products.values():
            chosen = [choose_tile(rows, outputs, -(-width // 1024)) for rows in range(1, 2049, 31)]
            assert set(chosen) <= set(TILES.values())


def test_arguments_that_do_not_fit_are_refused(triton_device: torch.device) -> None:
    x, weight = operands(4, 6, 8, torch.float32, triton_device)
    with pytest.raises(ValueError, match="does not fit weight"):
        linear(x, weight[:, :5])
    with pytest.raises(ValueError, match="must be one type"):
        linear(x, weight.half())
    with pytest.raises(ValueError, match="bias"):
        linear(x, weight, x[0, :3])
    with pytest.raises(ValueError, match="residual"):
        linear(x, weight, residual=x)
    with pytest.raises(ValueError, match="gated"):
        linear(x, weight, x[0, :6], gated=True)
    with pytest.raises(ValueError, match="strides"):
        linear(x.t().contiguous().t(), weight)
    with pytest.raises(ValueError, match="float64"):
        linear(x.double(), weight.double())
    assert linear(x[:0], weight).shape == (0, 6)
