"""The Triton gate, packing and fold decide and compute as the twins do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from dlmgrid.kernels.specfold import reference
from dlmgrid.kernels.specfold.kernel import fold_rows, gather_rows, pack_rows, row_sources

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


@pytest.mark.parametrize("gate", ["parent", "source"])
@pytest.mark.parametrize("width", [63, 1100])
def test_a_layer_folds_as_the_twin_does(
    triton_device: torch.device, float_type: torch.dtype, width: int, gate: str, assert_near: Any
) -> None:
    hidden = branches(width, float_type, triton_device)
    ints = [torch.tensor(level, dtype=torch.int32, device=triton_device) for level in LEVELS]
    parents = torch.tensor(PARENTS, dtype=torch.int32, device=triton_device)
    sources = row_sources(hidden, parents, ints, 0.25, gate)
    expected = reference.row_sources(
        hidden.cpu(), torch.tensor(PARENTS), [torch.tensor(level) for level in LEVELS], 0.25, gate
    )
    assert sources.tolist() == expected.tolist()
    assert 0 < int((sources.flatten().cpu() == torch.arange(24)).sum()) < 24

    packed = reference.pack_rows(expected, [torch.tensor(group) for group in GROUPS])
    firsts = torch.tensor([0, 4], dtype=torch.int32, device=triton_device)
    counts = torch.tensor([4, 2], dtype=torch.int32, device=triton_device)
    pack = pack_rows(sources, firsts, counts)
    count = int(pack.used)
    assert pack.rows[:count].tolist() == packed.rows.tolist()
    assert pack.rows[count:].tolist() == [-1] * (24 - count)
    assert pack.place.tolist() == packed.place.tolist()
    assert pack.sample_of[: count // LENGTH].tolist() == packed.group_of.tolist()
    assert pack.sample_of[count // LENGTH :].tolist() == [-1] * (6 - count // LENGTH)

    middle = hidden.flatten(0, 1)
    gathered = gather_rows(middle, pack.rows)
    assert torch.equal(gathered[:count], middle[packed.rows.to(triton_device)])
    assert gathered[count:].isnan().all()
    computed = gathered * 1.5
    out = fold_rows(middle, sources, pack, computed)
    expected_out = reference.fold_rows(middle.cpu(), expected, packed, computed[:count].cpu())
    assert_near(out, expected_out)


def test_at_tau_0_every_row_is_its_own_source(triton_device: torch.device) -> None:
    hidden = torch.ones(6, LENGTH, 100, device=triton_device)
    ints = [torch.tensor(level, dtype=torch.int32, device=triton_device) for level in LEVELS]
    parents = torch.tensor(PARENTS, dtype=torch.int32, device=triton_device)
    for gate in ("parent", "source"):
        assert row_sources(hidden, parents, ints, 0.0, gate).flatten().tolist() == list(range(24))


def test_arguments_that_do_not_fit_are_refused(triton_device: torch.device) -> None:
    hidden = torch.ones(2, LENGTH, 8, device=triton_device)
    parents = torch.tensor([-1, 0], dtype=torch.int32, device=triton_device)
    with pytest.raises(ValueError, match="gate 'root'"):
        row_sources(hidden, parents, [], 0.1, "root")
    with pytest.raises(ValueError, match="int32"):
        row_sources(hidden, parents.long(), [], 0.1, "parent")
    with pytest.raises(ValueError, match="contiguous"):
        row_sources(hidden.transpose(0, 1), parents, [], 0.1, "parent")
    with pytest.raises(ValueError, match="int32"):
        pack_rows(torch.zeros(2, LENGTH, dtype=torch.int64, device=triton_device), parents, parents)
