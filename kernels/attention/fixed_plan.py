"""A launch plan whose tables lie in fixed buffers, so that a CUDA graph of a pass can be replayed with other blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from dlmgrid.kernels.attention.launch_plan import PROGRAMS_THAT_FILL_A_GPU, LaunchPlan


class FixedPlan:
    """What :class:`LaunchPlan` is to the launchers, for any N segments with at most ``num_splits`` splits each.

    Args:
        tables: int32 [:meth:`size`], the buffer on the device that the tables are read from; see :meth:`tables_of`.
    """

    ROWS: ClassVar[int] = LaunchPlan.ROWS
    FIELDS: ClassVar[int] = LaunchPlan.FIELDS

    def __init__(
        self, tables: Tensor, *, num_segments: int, block_length: int, group: int, num_kv_heads: int, num_splits: int
    ) -> None:  # fmt: skip
        self.block_length = block_length
        self.num_segments = num_segments
        self.num_splits = num_splits
        self.device = tables.device
        self._group = group
        self._most_tiles = self.most_tiles(num_segments, block_length, group)
        split = self._most_tiles * self.FIELDS
        self._tiles = tables[:split].view(self._most_tiles, self.FIELDS)
        self.segments = tables[split : split + num_segments]
        self._sequential = self._fills(num_segments * block_length, group, num_kv_heads, num_splits)

    @classmethod
    def of_tiles(
        cls, tiles: Tensor, segments: Tensor, *, block_length: int, group: int, num_kv_heads: int, num_splits: int,
        expected_rows: int | None = None,
    ) -> FixedPlan:  # fmt: skip
        """A plan whose row tiles [:meth:`most_tiles`, FIELDS] were made on the device; ``segments`` int32 [N].

        ``expected_rows``: of the N · L rows, how many are likely to be there (None: all); no bit depends on it.
        """
        num = segments.shape[0]
        if tiles.shape != (cls.most_tiles(num, block_length, group), cls.FIELDS):
            raise ValueError(
                f"row tiles {tuple(tiles.shape)} are not those of {num} blocks of {block_length}"
            )
        plan: FixedPlan = object.__new__(cls)
        plan.block_length, plan.num_segments, plan.num_splits = block_length, num, num_splits
        plan.device = tiles.device
        plan._group = group
        plan._most_tiles = len(tiles)
        plan._tiles, plan.segments = tiles, segments
        plan._sequential = cls._fills(expected_rows or num * block_length, group, num_kv_heads, num_splits)
        return plan

    @classmethod
    def _fills(cls, num_rows: int, group: int, num_kv_heads: int, num_splits: int) -> bool:
        programs = -(-num_rows * group // cls.ROWS) * num_kv_heads
        return num_splits == 1 or programs >= PROGRAMS_THAT_FILL_A_GPU

    @classmethod
    def most_tiles(cls, num_segments: int, block_length: int, group: int) -> int:
        """Row tiles of N segments that share no prefix."""
        return num_segments * -(-block_length * group // cls.ROWS)

    @classmethod
    def size(cls, num_segments: int, block_length: int, group: int) -> int:
        """Entries of the tables."""
        return cls.most_tiles(num_segments, block_length, group) * cls.FIELDS + num_segments

    @classmethod
    def tables_of(
        cls,
        slots: Sequence[int],
        block_starts: Sequence[int],
        block_length: int,
        group: int,
        *,
        first_keys: Sequence[int] | None = None,
        causal: Sequence[bool] | None = None,
    ) -> Tensor:
        """The tables int32 [size] of a pass, on the CPU; tiles that it does not need hold no rows.

        Raises ValueError as :class:`LaunchPlan` does.
        """
        plan = LaunchPlan(slots, block_starts, block_length, first_keys=first_keys, causal=causal)
        out = torch.zeros(cls.size(len(slots), block_length, group), dtype=torch.int32)
        entries = plan.tiles(group).flatten()
        out[: entries.numel()] = entries
        out[-len(slots) :] = plan.segments
        return out

    def tiles(self, group: int) -> Tensor:
        """As :meth:`LaunchPlan.tiles`, for the group that the plan was made for."""
        if group != self._group:
            raise ValueError(f"the plan is for {self._group} query heads a key head, not {group}")
        return self._tiles

    def num_tiles(self, group: int) -> int:
        """Row tiles of a launch, those without rows included."""
        return len(self.tiles(group))

    def runs_in_sequence(self, group: int, num_kv_heads: int) -> bool:
        """As :meth:`LaunchPlan.runs_in_sequence`; the same for every pass of the plan."""
        return self._sequential
