"""Where the segments of a pass lie, for the Triton attention: row tiles over groups of segments that share a prefix.

No Triton here, so that a pass can be planned and a plan be tested without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from dlmgrid.kernels.attention.reference import SPLIT_KEYS, TILE_KEYS

ROW_TILES = (64, 128)
"""Rows of a program: four warps or eight. No bit depends on the choice."""

_PROCESSORS = 132
_RESIDENT = {64: 2 * _PROCESSORS, 128: _PROCESSORS}  # programs that run at once
_WAVES_OF_WIDE_TILES = 2
_MERGE_COST = 1.2  # of a second kernel, in splits that a program reads meanwhile
_STATE_BYTES_PER_SPLIT = 7.5e6  # states written and read again while a program reads one split


def choose_row_tile(
    num_segments: int, segment_rows: int, num_kv_heads: int, width: int, element_size: int
) -> int:
    """Rows of a program, from the shape of a pass alone: N segments of ``segment_rows`` = L · G rows a key head.

    128 rows read the prefix half as often, but fill the card in coarser steps: for many programs only, where a tile
    lies in one segment, and where the operands of the products (16 bits, d ≤ 128) leave it the registers.
    """
    wide = ROW_TILES[1]
    if element_size != 2 or width > 128 or segment_rows % wide:
        return ROW_TILES[0]
    programs = num_segments * segment_rows // wide * num_kv_heads
    return wide if programs >= _WAVES_OF_WIDE_TILES * _RESIDENT[wide] else ROW_TILES[0]


def runs_in_sequence(row_tile: int, num_tiles: int, num_kv_heads: int, num_splits: int, width: int) -> bool:
    """Whether one program runs all splits of its rows, rather than a program a split and a second kernel to merge.

    Counts what either way takes in splits that a program reads one after another; shapes alone decide.
    """
    programs = num_tiles * num_kv_heads
    resident = _RESIDENT[row_tile]
    state_bytes = 8 * num_splits * programs * row_tile * width  # fp32, there and back
    in_parallel = -(-programs * num_splits // resident) + _MERGE_COST + state_bytes / _STATE_BYTES_PER_SPLIT
    return num_splits == 1 or -(-programs // resident) * num_splits <= in_parallel


class LaunchPlan:
    """The plan of one pass. Segments of one (slot, block start) are a group and share row tiles.

    ``first_keys`` and ``causal`` are those of ``reference.plan_attention``.

    Args:
        slots, block_starts: of the N segments.
        block_length: L.

    Raises:
        ValueError: a block length that does not divide the key tile, or a block off its grid.
    """

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
        self._tiles: dict[tuple[int, int], Tensor] = {}

    def row_tile(self, group: int, num_kv_heads: int, width: int, element_size: int) -> int:
        """Rows of a program of a launch, for ``group`` query heads a key head."""
        return choose_row_tile(
            self.num_segments, self.block_length * group, num_kv_heads, width, element_size
        )

    def tiles(self, group: int, row_tile: int) -> Tensor:
        """int32 [tiles, FIELDS] for ``group`` query heads a key head: index into ``segments`` of the group's first
        segment, first row of the tile in the group, rows of the group, slot, block start,
        first key, whether causal."""
        key = (group, row_tile)
        if key not in self._tiles:
            entries: list[tuple[int, ...]] = []
            first = 0
            for (slot, start, first_key, is_causal), members in self._groups.items():
                num_rows = len(members) * self.block_length * group
                entries.extend(
                    (first, row, num_rows, slot, start, first_key, is_causal)
                    for row in range(0, num_rows, row_tile)
                )
                first += len(members)
            table = torch.tensor(entries, dtype=torch.int32).view(-1, self.FIELDS)
            self._tiles[key] = table.to(self.device)
        return self._tiles[key]

    def runs_in_sequence(self, group: int, num_kv_heads: int, row_tile: int, width: int) -> bool:
        """As the function of this name."""
        num_tiles = len(self.tiles(group, row_tile))
        return runs_in_sequence(row_tile, num_tiles, num_kv_heads, self.num_splits, width)
