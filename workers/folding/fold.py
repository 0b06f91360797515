"""Settings of folding, what it costs and saves in a pass, and the branches it works on. No torch kernels here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dlmgrid.kernels.specfold.reference import GATES


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldSettings:
    """``tau``: one threshold, or one a layer; ``gate``: against ``parent`` or ``source``; ``recheck``: the walked nodes
    are computed again unfolded, so that the output is the serialized run's."""

    tau: tuple[float, ...]
    gate: str = "parent"
    recheck: bool = False

    def __post_init__(self) -> None:
        if not self.tau or any(not value >= 0 for value in self.tau):
            raise ValueError(f"fold: tau {list(self.tau)}; want numbers of 0 or more")
        if self.gate not in GATES:
            raise ValueError(f"fold: gate {self.gate!r} is not one of {', '.join(GATES)}")

    def of_layer(self, layer: int, num_layers: int) -> float:
        """τ of a layer. Raises ValueError where the list has another length than the model has layers."""
        if len(self.tau) == 1:
            return self.tau[0]
        if len(self.tau) != num_layers:
            raise ValueError(f"fold: tau has {len(self.tau)} values, the model {num_layers} layers")
        return self.tau[layer]


@dataclass(slots=True)
class FoldReport:
    """What one pass recomputed and spent.

    ``own_rows``: by layer, how many rows of each segment were computed; ``is_foldable``: which segments have a fold
    parent; ``length``: rows of a segment. Seconds: ``select`` gate and provenance, ``move`` packing and gathering,
    ``compute`` the rows that are computed, ``correct`` attention to the own block and output projection of folded rows
    (one product does those of all rows; its time is shared by rows).
    """

    is_foldable: list[bool]
    length: int
    own_rows: list[list[int]] = field(default_factory=list)
    select: float = 0.0
    move: float = 0.0
    compute: float = 0.0
    correct: float = 0.0

    def recomputed(self, first: int = 0, stop: int | None = None) -> list[int]:
        """Rows of foldable segments from ``first`` to ``stop`` that were computed, by layer."""
        part = slice(first, stop)
        return [
            sum(rows for rows, foldable in zip(layer[part], self.is_foldable[part], strict=True) if foldable)
            for layer in self.own_rows
        ]

    @property
    def ratios(self) -> list[float]:
        """Recomputed over foldable rows, by layer; empty where nothing could fold."""
        foldable = sum(self.is_foldable) * self.length
        return [count / foldable for count in self.recomputed()] if foldable else []


class FoldBranches:
    """The branches of one pass: fold parents, and the segments of each sample.

    Args:
        parents: the fold parent's segment of each of the N segments, -1 for one that is never folded (a root, a block
            that is stored); a parent comes before its branches and shares their slot and block start.
        slots, block_starts: of the segments.

    Raises:
        ValueError: a parent that does not come first or lies elsewhere.
    """

    def __init__(
        self, parents: Sequence[int], slots: Sequence[int], block_starts: Sequence[int], device: torch.device
    ) -> None:
        depths: list[int] = []
        groups: dict[tuple[int, int], list[int]] = {}
        where = list(zip(slots, block_starts, strict=True))
        for segment, parent in enumerate(parents):
            if parent >= segment or (parent >= 0 and where[parent] != where[segment]):
                raise ValueError(
                    f"segment {segment}: fold parent {parent} is not an earlier branch of its sample"
                )
            depths.append(0 if parent < 0 else depths[parent] + 1)
            groups.setdefault(where[segment], []).append(segment)
        self.parents: Tensor = torch.tensor(parents, dtype=torch.int64, device=device)
        self.levels = tuple(
            torch.tensor([s for s, d in enumerate(depths) if d == depth], dtype=torch.int64, device=device)
            for depth in range(1, max(depths, default=0) + 1)
        )
        self.groups = tuple(torch.tensor(g, dtype=torch.int64, device=device) for g in groups.values())
        self.first_of_group = [members[0] for members in groups.values()]
        self.is_foldable = [depth > 0 for depth in depths]
