"""Gate, provenance and packing by hand; a folded row keeps its own residual."""

from __future__ import annotations

import pytest
import torch

from dlmgrid.kernels.specfold import distances, fold_rows, pack_rows, resolve, row_sources

PARENTS = torch.tensor([-1, 0, 1, -1])
LEVELS = (torch.tensor([1]), torch.tensor([2]))
GROUPS = (torch.tensor([0, 1, 2]), torch.tensor([3]))


def test_distance_is_relative_to_the_source() -> None:
    hidden, base = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[3.0, 0.0]]])
    assert distances(hidden, base).item() == pytest.approx(4 / 3)
    assert distances(hidden, torch.zeros(1, 1, 2)).item() == pytest.approx(5e6)
    assert distances(base, base).item() == 0


def test_provenance_follows_the_chain_to_a_computed_row() -> None:
    is_folded = torch.tensor([[False, False], [True, False], [True, True], [False, False]])
    assert resolve(is_folded, PARENTS, LEVELS).tolist() == [[0, 1], [0, 3], [0, 3], [6, 7]]


def test_the_gate_is_strict_and_against_parent_or_source() -> None:
    hidden = torch.ones(4, 2, 3)
    hidden[1] *= 1.1
    hidden[2] *= 1.2
    assert row_sources(hidden, PARENTS, LEVELS, 0.0, "parent").flatten().tolist() == list(range(8))
    same = torch.ones(4, 2, 3)
    assert row_sources(same, PARENTS, LEVELS, 0.0, "source").flatten().tolist() == list(range(8))
    assert row_sources(hidden, PARENTS, LEVELS, 0.15, "parent")[2].tolist() == [0, 1]
    assert row_sources(hidden, PARENTS, LEVELS, 0.15, "source")[2].tolist() == [4, 5]
    with pytest.raises(ValueError, match="gate 'root'"):
        row_sources(hidden, PARENTS, LEVELS, 0.1, "root")


def test_packing_fills_whole_groups_of_one_sample() -> None:
    sources = torch.tensor([[0, 1], [0, 3], [0, 3], [6, 7]])
    packed = pack_rows(sources, GROUPS)
    assert packed.rows.tolist() == [0, 1, 3, 0, 6, 7]
    assert packed.group_of.tolist() == [0, 0, 1]
    assert packed.place.tolist() == [0, 1, -1, 2, -1, -1, 4, 5]


def test_a_folded_row_keeps_its_own_residual() -> None:
    sources = torch.tensor([[0, 1], [0, 3], [0, 3], [6, 7]])
    packed = pack_rows(sources, GROUPS)
    middle = torch.arange(32.0).view(8, 4)
    computed = middle[packed.rows] + torch.tensor([10.0, 20, 30, 40, 50, 60])[:, None]
    out = fold_rows(middle, sources, packed, computed)
    added = (out - middle)[:, 0].tolist()
    assert added == [10, 20, 10, 30, 10, 30, 50, 60]
