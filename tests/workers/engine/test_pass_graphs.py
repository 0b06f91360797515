"""How many rows a folded pass is expected to compute: what tiles are chosen for."""

from __future__ import annotations

import pytest
import torch

from dlmgrid.workers.engine.pass_graphs import expected_rows
from dlmgrid.workers.folding.fold import FoldReport


@pytest.mark.parametrize(
    ("computed", "all_rows", "expected"),
    [
        (32, 672, 32),
        (33, 672, 64),
        (160, 672, 192),
        (192, 672, 192),
        (600, 672, 672),
        (84, 96, 96),
        (96, 96, 96),
    ],
)
def test_the_share_of_the_pass_before_decides(computed: int, all_rows: int, expected: int) -> None:
    own = torch.zeros(2, all_rows // 32, dtype=torch.int32)
    own[:, 0] = computed
    report = FoldReport([True] * own.shape[1], 32, own)
    assert expected_rows(report, all_rows) == all_rows  # nobody has read it
    assert report.own_rows[0][0] == computed
    assert expected_rows(report, all_rows) == expected
    assert expected_rows(None, all_rows) == all_rows
