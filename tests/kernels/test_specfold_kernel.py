"""The Triton gate, packing and fold decide and compute as the twins do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from dlmgrid.kernels.attention.fixed_plan import PlanShape
from dlmgrid.kernels.attention.launch_plan import LaunchPlan
from dlmgrid.kernels.specfold import FoldLayout, FoldTables, reference
from dlmgrid.kernels.specfold.kernel import DevicePack, fold_rows, gather_rows, mark_rows, pack_rows

pytestmark = pytest.mark.usefixtures("poisoned")

PARENTS = [-1, 0, 1, 1, -1, 4]
LEVELS = [[1, 5], [2, 3]]
GROUPS = [[0, 1, 2, 3], [4, 5]]
LENGTH = 4


def branches(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows that drift from their parents, some by little."""
    generator = torch.Generator().manual_seed(width)
    hidden = torch.randn(6, LENGTH, width, generator=generator)
    for branch, parent in enumerate(PARENTS):
        if parent >= 0:
            drift = torch.tensor([0.0, 0.05, 0.2, 1.0])[:, None]
            hidden[branch] = hidden[parent] + drift * hidden[branch]
    return hidden.to(device, dtype)


PLAN = PlanShape(6, LENGTH, 24, 2, 64, 4)


def tables(tau: float, device: torch.device) -> FoldTables:
    """A layer at τ = 9 and one at ``tau``, for the branches of two samples."""
    slots = [0, 0, 0, 0, 1, 1]
    layout = FoldLayout(
        parents=PARENTS, slots=slots, starts=[8 * (slot + 1) for slot in slots], block_length=LENGTH, taus=(9.0, tau),
        gate="parent", first_keys=[3] * 6,
    )  # fmt: skip
    return FoldTables(FoldTables.buffer_of(layout).to(device), 6, 2)


def pack(marks: torch.Tensor, of: FoldTables) -> DevicePack:
    return pack_rows(marks, of, PLAN)


@pytest.mark.parametrize("gate", ["parent", "source"])
@pytest.mark.parametrize("width", [63, 1100])
def test_a_layer_folds_as_the_twin_does(
    triton_device: torch.device, float_type: torch.dtype, width: int, gate: str, assert_near: Any
) -> None:
    hidden = branches(width, float_type, triton_device)
    expected = reference.row_sources(
        hidden.cpu(), torch.tensor(PARENTS), [torch.tensor(level) for level in LEVELS], 0.25, gate
    )
    packed = reference.pack_rows(expected, [torch.tensor(group) for group in GROUPS])
    of = tables(0.25, triton_device)
    found = pack(mark_rows(hidden, of, 1, gate), of)
    assert found.sources.tolist() == expected.flatten().tolist()
    assert 0 < int((found.sources.cpu() == torch.arange(24)).sum()) < 24
    count = int(found.used)
    assert found.rows[:count].tolist() == packed.rows.tolist()
    assert found.rows[count:].tolist() == [-1] * (24 - count)
    assert found.row_map.tolist() == packed.place[expected].flatten().tolist()

    groups = packed.group_of.tolist()
    plan = LaunchPlan(groups, [8 * (group + 1) for group in groups], LENGTH, first_keys=[3] * len(groups))
    tiles = plan.tiles(24, PLAN.row_tile).tolist()
    assert found.tiles[: len(tiles)].tolist() == tiles
    assert not found.tiles[len(tiles) :].any()

    middle = hidden.flatten(0, 1)
    gathered = gather_rows(middle, found.rows)
    assert torch.equal(gathered[:count], middle[packed.rows.to(triton_device)])
    assert gathered[count:].isnan().all()
    computed = gathered * 1.5
    out = fold_rows(middle, found, computed)
    expected_out = reference.fold_rows(middle.cpu(), expected, packed, computed[:count].cpu())
    assert_near(out, expected_out)


def test_at_tau_0_every_row_is_its_own_source(triton_device: torch.device) -> None:
    hidden = torch.ones(6, LENGTH, 100, device=triton_device)
    of = tables(0.0, triton_device)
    for gate in ("parent", "source"):
        found = pack(mark_rows(hidden, of, 1, gate), of)
        assert found.sources.tolist() == list(range(24))
        assert found.used.tolist() == [24]


def test_arguments_that_do_not_fit_are_refused(triton_device: torch.device) -> None:
    hidden = torch.ones(6, LENGTH, 8, device=triton_device)
    of = tables(0.1, triton_device)
    with pytest.raises(ValueError, match="gate 'root'"):
        mark_rows(hidden, of, 0, "root")
    with pytest.raises(ValueError, match="contiguous"):
        mark_rows(hidden.transpose(1, 2), of, 0, "parent")
    with pytest.raises(ValueError, match="5 branches and layer 0"):
        mark_rows(hidden[:5], of, 0, "parent")
    with pytest.raises(ValueError, match="int32"):
        pack(torch.zeros(24, dtype=torch.int64, device=triton_device), of)
    with pytest.raises(ValueError, match="side by side"):
        FoldTables.buffer_of(
            FoldLayout(
                parents=[-1, -1, 0],
                slots=[0, 1, 0],
                starts=[0, 0, 0],
                block_length=4,
                taus=(1.0,),
                gate="parent",
            )
        )
