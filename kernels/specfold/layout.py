"""Where the branches of a folded pass lie: for the host, and as tables of a fixed size on the device.

Legend: N segments of L tokens, S samples: groups of segments that share slot and block start.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmgrid.kernels.specfold.reference import GATES

PLACE_FIELDS = 4
"""Of a sample's place: slot, block start on the grid, first key, whether causal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldLayout:
    """The segments of a folded pass and its thresholds.

    Attributes:
        parents: the fold parent's segment of each of the N segments, -1 for one that is never folded (a root, a block
            that is stored); a parent comes before its branches and shares their slot and block start.
        slots, starts: of the segments, on the grid of the cache; ``first_keys`` and ``causal`` as plans of attention
            take them.
        taus: τ of each layer; rows with r < τ fold.
        gate: what a row is compared with, one of GATES.

    Raises:
        ValueError: a parent that does not come first or lies elsewhere, or an unknown gate.
    """

    parents: Sequence[int]
    slots: Sequence[int]
    starts: Sequence[int]
    first_keys: Sequence[int] | None = None
    causal: Sequence[bool] | None = None
    block_length: int
    taus: Sequence[float]
    gate: str

    def __post_init__(self) -> None:
        where = list(zip(self.slots, self.starts, strict=True))
        for segment, parent in enumerate(self.parents):
            if parent >= segment or (parent >= 0 and where[parent] != where[segment]):
                raise ValueError(
                    f"segment {segment}: fold parent {parent} is not an earlier branch of its sample"
                )
        if self.gate not in GATES:
            raise ValueError(f"gate {self.gate!r} is not one of {', '.join(GATES)}")

    @property
    def num_segments(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> list[int]:
        """Steps from each segment to one that is never folded."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def samples(self) -> list[list[int]]:
        """The segments of each sample."""
        groups: dict[tuple[int, int], list[int]] = {}
        for segment, where in enumerate(zip(self.slots, self.starts, strict=True)):
            groups.setdefault(where, []).append(segment)
        return list(groups.values())

    def place_of(self, segment: int) -> tuple[int, int, int, bool]:
        """Slot, block start, first key and causality."""
        return (
            self.slots[segment],
            self.starts[segment],
            self.first_keys[segment] if self.first_keys else 0,
            bool(self.causal and self.causal[segment]),
        )


class FoldTables:
    """A layout on the device, in one int32 buffer whose size depends on N and the number of layers alone.

    Attributes:
        parents: int32 [N]. first_branch, num_branches: int32 [N], of the S samples, whose segments lie side by side.
        places: int32 [N, PLACE_FIELDS], of the samples. counts: int32 [2]: S, and the deepest segment's depth.
        taus: fp32 [layers].
    """

    def __init__(self, buffer: Tensor, num_segments: int, num_layers: int) -> None:
        if buffer.shape != (self.size(num_segments, num_layers),):
            raise ValueError(f"fold tables: {tuple(buffer.shape)} for {num_segments} segments")
        sizes = self._sizes(num_segments, num_layers)
        parts = [part[:size] for part, size in zip(buffer.split(_aligned(sizes)), sizes, strict=True)]
        self.parents, self.first_branch, self.num_branches = parts[:3]
        self.places = parts[3].view(num_segments, PLACE_FIELDS)
        self.counts = parts[4]
        self.taus = parts[5].view(torch.float32)

    @staticmethod
    def _sizes(num_segments: int, num_layers: int) -> list[int]:
        return [num_segments] * 3 + [PLACE_FIELDS * num_segments, 2, num_layers]

    @classmethod
    def size(cls, num_segments: int, num_layers: int) -> int:
        """Entries of the buffer."""
        return sum(_aligned(cls._sizes(num_segments, num_layers)))

    @classmethod
    def buffer_of(cls, layout: FoldLayout) -> Tensor:
        """The buffer int32 [size] of a layout, on the CPU.

        Raises ValueError where the segments of a sample do not lie side by side.
        """
        samples = layout.samples
        if list(itertools.chain(*samples)) != list(range(layout.num_segments)):
            raise ValueError("fold: the segments of a sample must lie side by side")
        places = [int(value) for members in samples for value in layout.place_of(members[0])]
        parts = [
            list(layout.parents),
            [members[0] for members in samples],
            [len(members) for members in samples],
            places,
            [len(samples), max(layout.depths, default=0)],
        ]
        taus = torch.tensor(layout.taus, dtype=torch.float32).view(torch.int32)
        integers = [*(torch.tensor(part, dtype=torch.int32) for part in parts), taus]
        sizes = _aligned(cls._sizes(layout.num_segments, len(layout.taus)))
        buffer = torch.zeros(sum(sizes), dtype=torch.int32)
        for into, values in zip(buffer.split(sizes), integers, strict=True):
            into[: len(values)] = values
        return buffer


def _aligned(sizes: list[int]) -> list[int]:
    """Sizes rounded up to 16 bytes: kernels are compiled anew for pointers that are not aligned to them."""
    return [-(-size // 4) * 4 for size in sizes]
