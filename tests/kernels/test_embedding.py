from __future__ import annotations

import torch

from dlmgrid.kernels.embedding import MASKED, embed


def test_masked_positions_take_the_mask_row_and_literal_mask_ids_are_tokens() -> None:
    weight = torch.randn(6, 4)
    rows = embed(torch.tensor([MASKED, 5, 0, 3], dtype=torch.int32), weight, 3)
    assert torch.equal(rows, weight[[3, 5, 0, 3]])
