"""Where the segments of a pass lie, for the Triton attention: row tiles over groups of segments that share a prefix.

No Triton here, so that a pass can be planned and a plan be tested without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from dlmgrid.kernels.attention.reference import SPLIT_KEYS, TILE_KEYS

PROGRAMS_THAT_FILL_A_GPU = 132


class LaunchPlan:
    """The plan of one pass. Segments of one (slot, block start) are a group and share row tiles of ROWS rows.

    ``first_keys`` and ``causal`` are those of ``reference.plan_attention``.

    Args:
        slots, block_starts: of the N segments.
        block_length: L.

    Raises:
        ValueError: a block length that does not divide the key tile, or a block off its grid.
    """

    ROWS: ClassVar[int] = 64
    FIELDS: ClassVar[int] = 7

    def __init__(
        self,
        slots: Sequence[int],
        block_starts: Sequence[int],
        block_length: int,
        device: torch.device | str = "cpu",
        *,
        first_keys: Sequence[int] | None = None,
        causal: Sequence[bool] | None = None,
    ) -> None:
        if not 1 <= block_length <= TILE_KEYS or TILE_KEYS % block_length:
            raise ValueError(f"block length {block_length} does not divide the key tile of {TILE_KEYS}")
        groups: dict[tuple[int, int, int, bool], list[int]] = {}
        for segment, (slot, start) in enumerate(zip(slots, block_starts, strict=True)):
            if start < 0 or start % block_length:
                raise ValueError(
                    f"segment {segment}: block start {start} is not on the grid of {block_length}"
                )
            first_key = first_keys[segment] if first_keys else 0
            is_causal = bool(causal and causal[segment])
            groups.setdefault((slot, start, first_key, is_causal), []).append(segment)
        self.block_length = block_length
        self.num_segments = len(block_starts)
        self.device = torch.device(device)
        self._groups = groups
        ordered = [segment for members in groups.values() for segment in members]
        self.segments: Tensor = torch.tensor(ordered, dtype=torch.int32).to(device)
        self.num_splits = max((start // SPLIT_KEYS + 1 for start in block_starts), default=1)
        self._tiles: dict[int, Tensor] = {}

    def tiles(self, group: int) -> Tensor:
        """int32 [tiles, FIELDS] for ``group`` query heads a key head: index into ``segments`` of the group's first
        segment, first row of the tile in the group, rows of the group, slot, block start,
        first key, whether causal."""
        if group not in self._tiles:
            entries: list[tuple[int, ...]] = []
            first = 0
            for (slot, start, first_key, is_causal), members in self._groups.items():
                num_rows = len(members) * self.block_length * group
                entries.extend(
                    (first, row, num_rows, slot, start, first_key, is_causal)
                    for row in range(0, num_rows, self.ROWS)
                )
                first += len(members)
            table = torch.tensor(entries, dtype=torch.int32).view(-1, self.FIELDS)
            self._tiles[group] = table.to(self.device)
        return self._tiles[group]

    def num_tiles(self, group: int) -> int:
        return len(self.tiles(group))

    def runs_in_sequence(self, group: int, num_kv_heads: int) -> bool:
        """Whether one program runs all splits of its rows: there is one split, or programs enough without."""
        programs = self.num_tiles(group) * num_kv_heads
        return self.num_splits == 1 or programs >= PROGRAMS_THAT_FILL_A_GPU
