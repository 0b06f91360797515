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
    """What one pass, or the passes of a run, recomputed and spent.

    ``recomputed`` counts, by layer, the rows of drafted nodes that were computed; ``foldable`` all of them. Seconds:
    ``select`` gate and provenance, ``move`` packing and gathering, ``compute`` the rows that are computed, ``correct``
    attention to the own block and output projection of folded rows (one product does those of all rows; its time is
    shared by rows).
    """

    recomputed: list[int] = field(default_factory=list)
    foldable: int = 0
    select: float = 0.0
    move: float = 0.0
    compute: float = 0.0
    correct: float = 0.0

    @property
    def ratios(self) -> list[float]:
        """Recomputed over foldable rows, by layer; empty where nothing could fold."""
        return [count / self.foldable for count in self.recomputed] if self.foldable else []

    def add(self, other: FoldReport) -> None:
        """Count another pass in."""
        if not self.recomputed:
            self.recomputed = [0] * len(other.recomputed)
        self.recomputed = [a + b for a, b in zip(self.recomputed, other.recomputed, strict=True)]
        self.foldable += other.foldable
        self.select += other.select
        self.move += other.move
        self.compute += other.compute
        self.correct += other.correct


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
        self.num_foldable = sum(1 for depth in depths if depth)
