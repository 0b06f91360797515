"""The start-up self-test of row invariance: on the real device, with the real shapes and type, a row must
give the same bits alone and packed. Exactness rests on it, and a vendor library may break it elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PACKS = (2, 3, 5, 8, 33)
"""Numbers of groups packed together; users of speculative decoders met flips at the odd ones first."""


class RowInvarianceError(RuntimeError):
    """Rows gave other bits when packed with others. The text names the operation and the packing."""


def check_row_invariance(
    name: str, compute: Callable[[Tensor], Tensor], groups: Tensor, packs: Sequence[int] = PACKS
) -> None:
    """Raise :class:`RowInvarianceError` where ``compute`` treats a group of rows by its company.

    ``groups`` is [G, r, ...]: G groups of r rows, which ``compute`` takes as [g * r, ...] for any g and
    answers row for row. Each group is computed alone, then in packs of each size, in order and in reverse.
    """
    num_groups, size = groups.shape[:2]
    alone = torch.stack([compute(group) for group in groups])
    for pack in packs:
        index = torch.arange(pack, device=groups.device) % num_groups
        for order, chosen in (("in order", index), ("in reverse", index.flip(0))):
            packed = compute(groups[chosen].flatten(0, 1)).unflatten(0, (pack, size))
            if not torch.equal(packed, alone[chosen]):
                changed = int((packed != alone[chosen]).any(-1).sum())
                raise RowInvarianceError(
                    f"{name}: {changed} of {pack * size} rows ({order}, {pack} groups of {size}) differ "
                    f"in bits from the same rows alone ({groups.device}, {groups.dtype}, "
                    f"{torch.get_num_threads()} threads)"
                )
