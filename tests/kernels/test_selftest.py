from __future__ import annotations

import pytest
import torch

from dlmgrid.kernels.selftest import RowInvarianceError, check_row_invariance


def test_passes_what_treats_rows_alike() -> None:
    check_row_invariance("double", lambda x: 2 * x, torch.randn(3, 4, 5))


def test_names_the_operation_and_pack_of_what_does_not() -> None:
    def batch_dependent(x: torch.Tensor) -> torch.Tensor:
        return x + (1e-6 if len(x) > 12 else 0.0)

    with pytest.raises(RowInvarianceError, match=r"batch norm: .* 5 groups of 4\) differ"):
        check_row_invariance("batch norm", batch_dependent, torch.zeros(3, 4, 5))


def test_sees_a_difference_by_place_in_the_pack() -> None:
    def place_dependent(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[6:] += 1e-6
        return y

    with pytest.raises(RowInvarianceError):
        check_row_invariance("tail", place_dependent, torch.zeros(3, 4, 5))
