"""The Triton products: values of fp64, and one value of a row in every tile and every packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

triton = pytest.importorskip("triton")

from dlmgrid.kernels.gemm import reference
from dlmgrid.kernels.gemm.kernel import linear
from dlmgrid.kernels.gemm.shapes import ODD_ROWS, ODD_SHAPES, PASS_ROWS, PRODUCTS
from dlmgrid.kernels.gemm.tiles import (
    GATED_TILES,
    MIN_PIECE,
    MOST_ROWS_ALONE,
    PLAIN_TILES,
    POINTER_TILES,
    DescriptorTile,
    choose_descriptor_tile,
    choose_pointer_tile,
    is_vendor_faster,
)

pytestmark = pytest.mark.usefixtures("poisoned")


def operands(
    rows: int, outputs: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + outputs + width)
    x = torch.randn(rows, width, generator=generator)
    weight = torch.randn(outputs, width, generator=generator) * width**-0.5
    return x.to(device, dtype), weight.to(device, dtype)


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
@pytest.mark.parametrize("tile", POINTER_TILES.values(), ids=POINTER_TILES.keys())
def test_odd_sizes_have_the_values_of_fp64(
    triton_device: torch.device, float_type: torch.dtype, shape: tuple[int, int], tile: Any, assert_near: Any
) -> None:
    rows = ODD_ROWS[ODD_SHAPES.index(shape)]
    x, weight = operands(rows, *shape, float_type, triton_device)
    assert_near(linear(x, weight, tile=tile), x.double() @ weight.double().t())


@pytest.mark.parametrize("tile", POINTER_TILES.values(), ids=POINTER_TILES.keys())
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


def test_a_row_has_the_same_bits_in_every_pointer_tile_and_pack(triton_device: torch.device) -> None:
    x, weight = operands(5 * 32, 140, 700, torch.float32, triton_device)
    alone = torch.cat([linear(group, weight) for group in x.split(32)])
    for name, tile in POINTER_TILES.items():
        for pack in (1, 2, 3, 5):
            packed = linear(x[: pack * 32], weight, tile=tile)
            assert torch.equal(packed, alone[: pack * 32]), f"{name}, {pack} packed"
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(triton_device)
    assert torch.equal(linear(x[order], weight), alone[order])
    assert torch.equal(linear(x[:33], weight), alone[:33])
    gated = linear(x, weight, gated=True)
    assert all(
        torch.equal(linear(x, weight, gated=True, tile=tile), gated) for tile in POINTER_TILES.values()
    )


def test_chunk_sums_are_added_in_ascending_order_from_zero(triton_device: torch.device) -> None:
    """Operands whose sums within a chunk are exact, so that only the order of the chunks rounds."""
    x, weight, half = integers(70, 90, 4 * 128 + 64, triton_device)
    scales = torch.tensor([1.0, 2.0**10, 2.0**-9, 1.0, 2.0**-10], device=triton_device)
    weight = (weight.float() * scales.repeat_interleave(128)[: weight.shape[1]]).to(half)
    expected = reference.linear(x, weight, out_dtype=torch.float32, chunk_width=128)
    reverse = torch.stack(
        [x[:, i : i + 128].float() @ weight[:, i : i + 128].float().t() for i in range(0, 576, 128)]
    )
    assert not torch.equal(expected, reverse.flip(0).cumsum(0)[-1])
    for tile in (*POINTER_TILES.values(), *PIECES):
        given = linear(x, weight, tile=tile, chunk_width=128, out_dtype=torch.float32)
        assert torch.equal(given, expected), tile
    wide = linear(x.float(), weight.float(), chunk_width=128)
    assert torch.equal(wide, expected)


def integers(rows: int, outputs: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, torch.dtype]:
    """Whole numbers whose products add up exactly in any order, in the 16-bit type to be trusted on ``device``."""
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-4, 5, (rows, width), generator=generator)
    weight = torch.randint(-4, 5, (outputs, width), generator=generator)
    return x.to(device, half), weight.to(device, half), half


PIECES = (
    DescriptorTile((64, 32, 16), 64, 64, 4, 3),
    DescriptorTile((32, 16), 64, 128, 4, 2),
    DescriptorTile((32,), 128, 64, 4, 2),
    DescriptorTile((64,), 32, 128, 4, 2, swapped=False),
    DescriptorTile((64, 64), 32, 64, 4, 2, swapped=False),
)
"""One, two and three pieces, either operand on the left: few, since the interpreter is slow."""


@pytest.mark.parametrize("tile", PIECES, ids=lambda tile: f"{tile.pieces}x{tile.outputs}")
def test_descriptor_tiles_have_the_values_of_fp64(
    triton_device: torch.device, tile: DescriptorTile, assert_near: Any
) -> None:
    half = torch.bfloat16 if triton_device.type == "cuda" else torch.float16
    for rows, outputs, width in ((1, 2, 8), (113, 130, 200), (64, 64, 256)):
        x, weight = operands(rows, outputs, width, half, triton_device)
        product = x.double() @ weight.double().t()
        assert_near(linear(x, weight, tile=tile), product)
        gate, up = product.chunk(2, 1)
        assert_near(linear(x, weight, gated=True, tile=tile), functional.silu(gate) * up)


@pytest.mark.parametrize("chunk_width", [128, 16384])
@pytest.mark.parametrize("tile", PIECES, ids=lambda tile: f"{tile.pieces}x{tile.outputs}")
def test_descriptor_tiles_have_every_epilogue(
    triton_device: torch.device, tile: DescriptorTile, chunk_width: int
) -> None:
    x, weight, _ = integers(115, 90, 264, triton_device)
    bias, residual, _ = integers(115, 1, 90, triton_device)
    bias = bias[0]
    residual = residual.expand(1, 90).repeat(115, 1)
    count = torch.tensor([97], dtype=torch.int32, device=triton_device)
    options: dict[str, Any] = {"out_dtype": torch.float32, "chunk_width": chunk_width}
    for given in (
        {},
        {"bias": bias},
        {"residual": residual},
        {"bias": bias, "residual": residual},
        {"gated": True},
        {"gated": True, "residual": residual[:, :45]},
    ):
        expected = linear(x, weight, tile=POINTER_TILES["narrow"], **given, **options)
        whole = linear(x, weight, tile=tile, **given, **options)
        assert torch.equal(whole, expected), given
        part = linear(x, weight, tile=tile, row_count=count, **given, **options)
        assert torch.equal(part[:97], expected[:97])
        assert part[97:].isnan().all()
    assert torch.equal(linear(x, weight, tile=tile, chunk_width=chunk_width), linear(x, weight))


def test_views_with_aligned_rows_go_by_descriptor_and_others_by_pointer(triton_device: torch.device) -> None:
    x, weight, _ = integers(40, 70, 80, triton_device)
    tile = PIECES[0]
    expected = linear(x[:, :72].contiguous(), weight[:, :72].contiguous())
    assert torch.equal(linear(x[:, :72], weight[:, :72], tile=tile), expected)
    for left, right in ((x[:, 1:73], weight[:, 1:73]), (x[:, :72], weight[:, :72].t().contiguous().t())):
        assert torch.equal(linear(left, right), reference.linear(left, right))
        with pytest.raises(ValueError, match="descriptor tile"):
            linear(left, right, tile=tile)
    with pytest.raises(ValueError, match="descriptor tile"):
        linear(x.float(), weight.float(), tile=tile)


def device_operands(rows: int, outputs: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """As ``operands``, in bf16 and drawn on the device."""
    generator = torch.Generator(device).manual_seed(rows + outputs + width)
    x = torch.randn(rows, width, generator=generator, device=device)
    weight = torch.randn(outputs, width, generator=generator, device=device) * width**-0.5
    return x.bfloat16(), weight.bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize("model", PRODUCTS)
def test_model_shapes_keep_bits_at_every_row_count_on_the_device(
    cuda_device: torch.device, model: str
) -> None:
    for name, shape in PRODUCTS[model].items():
        x, weight = device_operands(max(PASS_ROWS), *shape, cuda_device)
        gated = name == "gate_up"
        alone = torch.cat([linear(group, weight, gated=gated) for group in x.split(32)])
        for rows in PASS_ROWS:
            assert torch.equal(linear(x[:rows], weight, gated=gated), alone[:rows]), (shape, rows)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("gated", "tile"),
    [(False, tile) for tile in (*PLAIN_TILES, *POINTER_TILES.values())]
    + [(True, tile) for tile in (*GATED_TILES, *POINTER_TILES.values())],
)
def test_every_tile_gives_the_same_bits_on_the_device(
    cuda_device: torch.device, gated: bool, tile: Any
) -> None:
    """Each tile against one and the same tile, hence every pair of them."""
    first = GATED_TILES[0] if gated else PLAIN_TILES[0]
    for products in PRODUCTS.values():
        for name, shape in products.items():
            if gated != (name == "gate_up"):
                continue
            x, weight = device_operands(672, *shape, cuda_device)
            expected = linear(x, weight, gated=gated, tile=first)
            for rows in (32, 288, 672):
                given = linear(x[:rows], weight, gated=gated, tile=tile)
                assert torch.equal(given, expected[:rows]), (shape, rows)


@pytest.mark.gpu
def test_a_captured_product_holds_its_descriptors(cuda_device: torch.device) -> None:
    x, weight = operands(288, 4096, 2048, torch.bfloat16, cuda_device)
    linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear(x, weight)
    x.copy_(x.flip(0))
    graph.replay()
    assert torch.equal(captured, linear(x, weight))


def test_rows_past_the_count_on_the_device_are_not_computed(triton_device: torch.device) -> None:
    x, weight = operands(200, 70, 300, torch.float32, triton_device)
    count = torch.tensor([70], dtype=torch.int32, device=triton_device)
    whole = linear(x, weight)
    for tile in POINTER_TILES.values():
        part = linear(x, weight, row_count=count, tile=tile)
        assert torch.equal(part[:70], whole[:70])
        assert part[70:].isnan().all()


def test_weights_may_be_stored_by_column(triton_device: torch.device) -> None:
    x, weight = operands(40, 70, 300, torch.float32, triton_device)
    assert torch.equal(linear(x, weight.t().contiguous().t()), linear(x, weight))


def test_every_row_count_has_a_pinned_tile() -> None:
    for products in PRODUCTS.values():
        for name, (outputs, width) in products.items():
            gated = name == "gate_up"
            for rows in range(1, 2049, 31):
                tile = choose_descriptor_tile(rows, outputs, width, gated)
                assert tile in (GATED_TILES if gated else PLAIN_TILES)
                assert choose_pointer_tile(rows, outputs) in POINTER_TILES.values()


@pytest.mark.parametrize(
    ("rows", "shape", "expected"),
    [
        (MOST_ROWS_ALONE, PRODUCTS["SDAR-8B"]["gate_up"], False),
        (MOST_ROWS_ALONE + 1, PRODUCTS["SDAR-8B"]["gate_up"], True),
        (672, PRODUCTS["SDAR-1.7B"]["output"], True),
        (672, PRODUCTS["smollm2-135m"]["gate_up"], False),
    ],
)
def test_fast_takes_the_vendors_products_of_many_rows_and_large_weights(
    rows: int, shape: tuple[int, int], expected: bool
) -> None:
    assert is_vendor_faster(rows, *shape) is expected


def test_tiles_fit_the_matrix_instruction_and_shared_memory() -> None:
    for gated, tiles in ((False, PLAIN_TILES), (True, GATED_TILES)):
        assert len(set(tiles)) == len(tiles)
        for tile in tiles:
            assert 1 <= len(tile.pieces) <= 3
            assert all(piece >= MIN_PIECE and piece & (piece - 1) == 0 for piece in tile.pieces), tile
            assert (tile.outputs if tile.swapped else min(tile.pieces)) >= 64, tile
            # 1 KiB of barriers and alignment; 255 registers a thread hold 192 sums at most
            assert tile.stages * tile.stage_bytes(gated) + 1024 <= 227 * 1024, tile
            assert tile.rows * tile.outputs * (1 + gated) <= 192 * 32 * tile.warps, tile


def test_arguments_that_do_not_fit_are_refused(triton_device: torch.device) -> None:
    x, weight = operands(4, 6, 8, torch.float32, triton_device)
    with pytest.raises(ValueError, match="does not fit weight"):
        linear(x, weight[:, :5])
    with pytest.raises(ValueError, match="must be one type"):
        linear(x, weight.half())
    with pytest.raises(ValueError, match="chunk_width 100"):
        linear(x, weight, chunk_width=100)
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
