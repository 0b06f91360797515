"""A row of a linear layer has one value, alone or packed, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dlmgrid.kernels.gemm import CHUNK_WIDTH, PANEL_ROWS, column_major, linear, linear_vendor, pad_rows


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


SHAPES = [(256, 256), (576, 576), (960, 576), (576, CHUNK_WIDTH + 512), (101, 63), (64, CHUNK_WIDTH)]


@pytest.mark.parametrize(("num_outputs", "width"), SHAPES)
def test_a_row_keeps_its_bits_in_packs_of_any_size(threads: int, num_outputs: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weight = column_major(torch.randn(num_outputs, width, generator=generator))
    rows = torch.randn(33 * PANEL_ROWS, width, generator=generator)
    alone = torch.cat([linear(rows[i : i + PANEL_ROWS], weight) for i in range(0, len(rows), PANEL_ROWS)])
    for pack in (1, 2, 3, 5, 8, 33):
        packed = linear(rows[: pack * PANEL_ROWS], weight)
        assert torch.equal(packed, alone[: pack * PANEL_ROWS]), f"pack of {pack} panels"
    order = torch.randperm(len(rows), generator=generator)
    assert torch.equal(linear(rows[order], weight), alone[order]), "rows in another order"
    for count in (1, 2, 3, 5, 7, 31, 33):
        assert torch.equal(linear(rows[:count], weight), alone[:count]), f"{count} rows"


@pytest.mark.parametrize(("num_outputs", "width"), SHAPES)
def test_bits_do_not_depend_on_threads_or_layout(num_outputs: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(num_outputs, width, generator=generator)
    rows = torch.randn(4 * PANEL_ROWS, width, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = linear(rows, weight)
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        assert torch.equal(linear(rows, column_major(weight)), expected)
        assert torch.equal(linear(rows[:PANEL_ROWS], weight), expected[:PANEL_ROWS])
    torch.set_num_threads(before)


def test_values_are_those_of_fp64() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(70, 3000, generator=generator), torch.randn(70, generator=generator)
    rows = torch.randn(37, 3000, generator=generator)
    expected = rows.double() @ weight.double().t() + bias.double()
    for product in (linear, linear_vendor):
        torch.testing.assert_close(product(rows, weight, bias).double(), expected, rtol=1e-4, atol=1e-3)


def test_chunks_of_k_are_summed_in_ascending_order_from_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    width = 2 * CHUNK_WIDTH + 100
    weight, rows = torch.randn(64, width, generator=generator), torch.randn(32, width, generator=generator)
    parts = [
        linear(rows[:, i : i + CHUNK_WIDTH].contiguous(), weight[:, i : i + CHUNK_WIDTH].contiguous())
        for i in range(0, width, CHUNK_WIDTH)
    ]
    assert torch.equal(linear(rows, weight), (parts[0] + parts[1]) + parts[2])


def test_bf16_inputs_are_summed_in_fp32_and_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 500, generator=generator).bfloat16()
    rows = torch.randn(40, 500, generator=generator).bfloat16()
    wide = linear(rows, weight, out_dtype=torch.float32)
    assert torch.equal(wide, linear(rows.float(), weight.float()))
    assert torch.equal(linear(rows, weight), wide.bfloat16())


def test_padding_is_free_where_rows_fit() -> None:
    rows = torch.randn(64, 8)
    assert pad_rows(rows) is rows
    padded = pad_rows(rows[:40])
    assert padded.shape == (64, 8)
    assert torch.equal(padded[:40], rows[:40])
    assert not padded[40:].any()


def test_shapes_and_types_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit weight"):
        linear(torch.zeros(2, 3), torch.zeros(4, 5))
    with pytest.raises(ValueError, match="must be one type"):
        linear(torch.zeros(2, 3), torch.zeros(4, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="bias"):
        linear(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(3))
