"""The Triton norms, rotary embedding and embedding give the twins' values, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from dlmgrid.kernels.embedding import embed as embed_twin
from dlmgrid.kernels.embedding.kernel import embed
from dlmgrid.kernels.operators import torch_operators, triton_operators
from dlmgrid.kernels.rmsnorm import head_rms_norm
from dlmgrid.kernels.rmsnorm import rms_norm as rms_norm_twin
from dlmgrid.kernels.rmsnorm.kernel import rms_norm
from dlmgrid.kernels.rotary import apply_rotary, rotary_tables
from dlmgrid.kernels.rotary.kernel import norm_rotary
from dlmgrid.kernels.silu_gate import silu_gate as silu_gate_twin
from dlmgrid.kernels.silu_gate.kernel import silu_gate

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("width", [1, 63, 100, 576, 4096])
def test_rms_norm(triton_device: torch.device, float_type: torch.dtype, width: int, assert_near: Any) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(7, width, generator=generator).to(triton_device, float_type)
    weight = torch.rand(width, generator=generator).to(triton_device, float_type)
    result = rms_norm(x, weight, 1e-6)
    assert_near(result, rms_norm_twin(x.float(), weight.float(), 1e-6))
    assert torch.equal(rms_norm(x[3:4], weight, 1e-6), result[3:4])
    count = torch.tensor([5], dtype=torch.int32, device=triton_device)
    part = rms_norm(x, weight, 1e-6, row_count=count)
    assert torch.equal(part[:5], result[:5])
    assert part[5:].isnan().all()


@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize(("width", "turned"), [(64, 64), (80, 80), (96, 48), (128, 128), (192, 64)])
def test_norm_and_rotary(
    triton_device: torch.device, float_type: torch.dtype, width: int, turned: int, has_norm: bool, assert_near: Any
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(width)
    packed = torch.randn(5, 4, width, generator=generator).to(triton_device, float_type)
    x = packed[:, :3]  # rows of a fused product: heads that are not turned lie between them
    weight = torch.rand(3, width, generator=generator).to(triton_device, float_type) if has_norm else None
    cosines, sines = rotary_tables(40, turned, 1e4, triton_device)
    positions = torch.tensor([0, 39, 7, 7, 12], device=triton_device)
    result = norm_rotary(x, weight, cosines, sines, positions, 1e-6)
    expected = x.float()
    if weight is not None:
        expected = head_rms_norm(expected, weight.float(), 1e-6)
    assert_near(result, apply_rotary(expected, cosines[positions], sines[positions]))
    some = norm_rotary(x, weight, cosines, sines, positions.where(positions != 7, -1).int(), 1e-6)
    assert torch.equal(some[[0, 1, 4]], result[[0, 1, 4]]), "a row of position -1 is skipped"
    alone = norm_rotary(x[2:3], weight, cosines, sines, positions[2:3], 1e-6)
    assert torch.equal(alone, result[2:3])


def test_more_heads_than_one_program_turns(
    triton_device: torch.device, float_type: torch.dtype, assert_near: Any
) -> None:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(3, 11, 64, generator=generator).to(triton_device, float_type)
    weight = torch.rand(11, 64, generator=generator).to(triton_device, float_type)
    cosines, sines = rotary_tables(3, 64, 1e4, triton_device)
    expected = apply_rotary(head_rms_norm(x.float(), weight.float(), 1e-6), cosines, sines)
    assert_near(norm_rotary(x, weight, cosines, sines, None, 1e-6), expected)


@pytest.mark.parametrize("width", [1, 100, 1536])
def test_gated_activation(
    triton_device: torch.device, float_type: torch.dtype, width: int, assert_near: Any
) -> None:
    generator = torch.Generator().manual_seed(width)
    gate_up = 3 * torch.randn(5, 2 * width + 7, generator=generator)[:, : 2 * width]
    gate_up[0, 0] = 60.0
    gate_up = gate_up.to(triton_device, float_type)
    result = silu_gate(gate_up)
    assert_near(result, silu_gate_twin(gate_up.float()))
    assert torch.equal(silu_gate(gate_up[3:4]), result[3:4])


@pytest.mark.parametrize(("rows", "outputs", "width"), [(5, 64, 48), (129, 2048, 2048)])
def test_fast_products_have_the_values_of_the_twins(
    triton_device: torch.device,
    float_type: torch.dtype,
    assert_near: Any,
    rows: int,
    outputs: int,
    width: int,
) -> None:
    """Small ones are Triton's in 16 bits, large ones the vendor's."""
    generator = torch.Generator().manual_seed(1)
    x, weight, residual = (
        torch.randn(size, generator=generator) for size in ((rows, width), (outputs, width), (rows, outputs))
    )
    weight *= width**-0.5
    x, weight, residual = (part.to(triton_device, float_type) for part in (x, weight, residual))
    fast, twins = triton_operators("fast"), torch_operators("exact")
    expected = twins.linear_residual(x.float(), weight.float(), residual.float())
    assert_near(fast.linear_residual(x, weight, residual), expected)
    assert_near(fast.linear_silu_gate(x, weight), twins.linear_silu_gate(x.float(), weight.float()))


@pytest.mark.parametrize("width", [1, 63, 1500])
def test_embedding_copies_rows(triton_device: torch.device, float_type: torch.dtype, width: int) -> None:
    weight = torch.randn(20, width, generator=torch.Generator().manual_seed(0)).to(triton_device, float_type)
    tokens = torch.tensor([0, -1, 19, 5, 18, -1], dtype=torch.int32, device=triton_device)
    assert torch.equal(embed(tokens, weight, 18), embed_twin(tokens, weight, 18))


def test_arguments_that_do_not_fit_are_refused(triton_device: torch.device) -> None:
    x = torch.zeros(2, 3, 64, device=triton_device)
    cosines, sines = rotary_tables(8, 64, 1e4, triton_device)
    positions = torch.zeros(2, dtype=torch.int64, device=triton_device)
    with pytest.raises(ValueError, match="does not fit tables"):
        norm_rotary(x[:, :, :32], None, cosines, sines, positions, 1e-6)
    with pytest.raises(ValueError, match="positions"):
        norm_rotary(x, None, cosines, sines, positions.float(), 1e-6)
    with pytest.raises(ValueError, match="does not fit weight"):
        rms_norm(x[0], x[0, 0, :5], 1e-6)
    with pytest.raises(ValueError, match="float64"):
        rms_norm(x[0].double(), x[0, 0], 1e-6)
    with pytest.raises(ValueError, match="want \\[R, 2"):
        silu_gate(x[0, :, :63])
    with pytest.raises(ValueError, match="int32"):
        embed(positions, x[0], 0)
    with pytest.raises(ValueError, match="mask token 9"):
        embed(positions.int(), x[0], 9)
