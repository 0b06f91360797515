"""The Triton experts give the twin's values, and a row has one value whatever else is routed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from dlmgrid.kernels.experts import run_routed as twin
from dlmgrid.kernels.experts.kernel import grouped_linear, plan_experts, run_routed

pytestmark = pytest.mark.usefixtures("poisoned")

NUM_EXPERTS = 5


def operands(num_rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Rows of which most go to expert 1 and none to expert 3."""
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, 40, generator=generator)
    chosen = torch.tensor([1, 4]).repeat(num_rows, 1)
    chosen[::3] = torch.tensor([0, 1])
    chosen[1::7] = torch.tensor([2, 0])
    share = torch.rand(num_rows, 2, generator=generator)
    gate_up = torch.randn(NUM_EXPERTS, 2 * 24, 40, generator=generator) * 0.2
    down = torch.randn(NUM_EXPERTS, 40, 24, generator=generator) * 0.2
    return (
        rows.to(device, dtype), chosen.to(device), share.to(device), gate_up.to(device, dtype), down.to(device, dtype)
    )  # fmt: skip


def test_gives_the_values_of_the_twin(
    triton_device: torch.device, float_type: torch.dtype, assert_near: Any
) -> None:
    given = operands(130, float_type, triton_device)
    rows, chosen, share, gate_up, down = (tensor.cpu() for tensor in given)
    expected = twin(rows.float(), chosen, share, gate_up.float(), down.float())
    assert_near(run_routed(*given), expected)


def test_a_row_has_the_same_bits_alone(triton_device: torch.device, float_type: torch.dtype) -> None:
    rows, chosen, share, gate_up, down = operands(80, float_type, triton_device)
    whole = run_routed(rows, chosen, share, gate_up, down)
    for part in (slice(0, 1), slice(7, 40)):
        assert torch.equal(run_routed(rows[part], chosen[part], share[part], gate_up, down), whole[part])


def test_tiles_cover_every_pair_once() -> None:
    chosen = torch.tensor([[1, 4]] * 70 + [[0, 1]] * 3)
    plan = plan_experts(chosen, NUM_EXPERTS, tile_rows=64)
    covered = [
        (int(expert), int(pair))
        for expert, first, stop in zip(plan.tile_expert, plan.tile_first, plan.tile_stop, strict=True)
        if expert < NUM_EXPERTS
        for pair in plan.pairs[first:stop]
    ]
    assert sorted(pair for _, pair in covered) == list(range(146))
    assert all(chosen.flatten()[pair] == expert for expert, pair in covered)


def test_arguments_that_do_not_fit_are_refused(triton_device: torch.device) -> None:
    rows, chosen, share, gate_up, down = operands(4, torch.float32, triton_device)
    plan = plan_experts(chosen, NUM_EXPERTS)
    with pytest.raises(ValueError, match="do not fit 8 pairs"):
        grouped_linear(rows, gate_up, plan, num_chosen=1, gated=True, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="float16"):
        grouped_linear(rows, gate_up.half(), plan, num_chosen=2, gated=True, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="shares"):
        run_routed(rows, chosen, share[:2], gate_up, down)
