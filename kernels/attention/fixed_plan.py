"""A launch plan whose tables lie in fixed buffers, so that a CUDA graph of a pass can be replayed with other blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dlmgrid.kernels.attention.launch_plan import LaunchPlan, choose_row_tile, runs_in_sequence


class PlanShape(NamedTuple):
    """What all passes of a fixed plan share: N segments of L tokens, G query heads a key head, head width d."""

    num_segments: int
    block_length: int
    group: int
    num_kv_heads: int
    width: int
    element_size: int

    @property
    def row_tile(self) -> int:
        """Rows of a program."""
        rows = self.block_length * self.group
        return choose_row_tile(self.num_segments, rows, self.num_kv_heads, self.width, self.element_size)

    @property
    def most_tiles(self) -> int:
        """Row tiles of N segments that share no prefix."""
        return self.num_segments * -(-self.block_length * self.group // self.row_tile)

    @property
    def size(self) -> int:
        """Entries of the tables."""
        return self.most_tiles * LaunchPlan.FIELDS + self.num_segments


class FixedPlan:
    """What :class:`LaunchPlan` is to the launchers, for any N segments with at most ``num_splits`` splits each.

    Args:
        tables: int32 [``shape.size``], the buffer on the device that the tables are read from; see :meth:`tables_of`.
    """

    FIELDS: ClassVar[int] = LaunchPlan.FIELDS

    def __init__(self, tables: Tensor, shape: PlanShape, *, num_splits: int) -> None:
        self.block_length = shape.block_length
        self.num_segments = shape.num_segments
        self.num_splits = num_splits
        self.device = tables.device
        self._shape = shape
        split = shape.most_tiles * self.FIELDS
        self._tiles = tables[:split].view(shape.most_tiles, self.FIELDS)
        self.segments = tables[split : split + shape.num_segments]
        tiles = -(-shape.num_segments * shape.block_length * shape.group // shape.row_tile)
        self._sequential = runs_in_sequence(
            shape.row_tile, tiles, shape.num_kv_heads, num_splits, shape.width
        )

    @classmethod
    def of_tiles(
        cls, tiles: Tensor, segments: Tensor, shape: PlanShape, *, num_splits: int, expected_rows: int | None = None
    ) -> FixedPlan:  # fmt: skip
        """A plan whose row tiles [most_tiles, FIELDS] were made on the device; ``segments`` int32 [N].

        ``expected_rows``: of the N · L rows, how many are likely to be there (None: all); no bit depends on it.
        """
        if tiles.shape != (shape.most_tiles, cls.FIELDS):
            raise ValueError(f"row tiles {tuple(tiles.shape)} are not those of {shape}")
        plan: FixedPlan = object.__new__(cls)
        plan.block_length, plan.num_segments = shape.block_length, shape.num_segments
        plan.num_splits, plan.device = num_splits, tiles.device
        plan._shape, plan._tiles, plan.segments = shape, tiles, segments
        rows = expected_rows or shape.num_segments * shape.block_length
        expected_tiles = -(-rows * shape.group // shape.row_tile)
        plan._sequential = runs_in_sequence(
            shape.row_tile, expected_tiles, shape.num_kv_heads, num_splits, shape.width
        )
        return plan

    @classmethod
    def tables_of(
        cls,
        slots: Sequence[int],
        block_starts: Sequence[int],
        shape: PlanShape,
        *,
        first_keys: Sequence[int] | None = None,
        causal: Sequence[bool] | None = None,
    ) -> Tensor:
        """The tables int32 [size] of a pass, on the CPU; tiles that it does not need hold no rows.

        Raises ValueError as :class:`LaunchPlan` does.
        """
        plan = LaunchPlan(slots, block_starts, shape.block_length, first_keys=first_keys, causal=causal)
        out = torch.zeros(shape.size, dtype=torch.int32)
        entries = plan.tiles(shape.group, shape.row_tile).flatten()
        out[: entries.numel()] = entries
        out[-len(slots) :] = plan.segments
        return out

    def row_tile(self, group: int, num_kv_heads: int, width: int, element_size: int) -> int:
        """As :meth:`LaunchPlan.row_tile`, for the shape that the plan was made for."""
        asked = PlanShape(self.num_segments, self.block_length, group, num_kv_heads, width, element_size)
        if asked != self._shape:
            raise ValueError(f"the plan is for {self._shape}, not {asked}")
        return self._shape.row_tile

    def tiles(self, group: int, row_tile: int) -> Tensor:
        """As :meth:`LaunchPlan.tiles`, those without rows included."""
        if (group, row_tile) != (self._shape.group, self._shape.row_tile):
            raise ValueError(
                f"the plan is for {self._shape.group} query heads a key head in row tiles of "
                f"{self._shape.row_tile}, not {group} in {row_tile}"
            )
        return self._tiles

    def runs_in_sequence(self, group: int, num_kv_heads: int, row_tile: int, width: int) -> bool:
        """As :meth:`LaunchPlan.runs_in_sequence`; the same for every pass of the plan."""
        return self._sequential
