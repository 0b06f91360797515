"""What a set of kernels does for one folded pass, layer by layer; and the torch twins' way of doing it.

Shapes: N segments of L tokens, R = N · L rows, P packed rows, Hq / Hkv query and key heads, d head width, H hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dlmgrid.kernels.attention.boundary import Boundary, attend_block, attend_prefix
from dlmgrid.kernels.gemm import pad_rows
from dlmgrid.kernels.specfold import reference
from dlmgrid.kernels.specfold.layout import FoldLayout

if TYPE_CHECKING:
    from dlmgrid.kernels.operators import Operators


class Folds(Protocol):
    """One folded pass. For every layer in turn: ``select``, ``pack``, then the rest in any order.

    ``row_map`` integer [N, L]: the place of the packed row that stands for each position; ``operators``: the set that
    works on packed rows, whose tables of turns are still those of all rows.
    """

    @property
    def row_map(self) -> Tensor: ...

    @property
    def operators(self) -> Operators: ...

    def select(self, hidden: Tensor, layer: int) -> None:
        """Gate and provenance at the input ``hidden`` [N, L, H] of a layer."""
        ...

    def pack(self) -> None:
        """Find a place for every row that is computed."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """``rows`` [R or more, ...] of the pass in their places, [P, ...]; places that no row has are undefined."""
        ...

    def attend_prefix(self, queries: Tensor, key_cache: Tensor, value_cache: Tensor) -> Boundary:
        """States of packed ``queries`` [P, Hq, d] over the tiles before the one that holds their block."""
        ...

    def attend_block(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        key_cache: Tensor,
        value_cache: Tensor,
        before: Boundary,
        plan: Any,
    ) -> Tensor:
        """Attention [R, Hq, d] of every row over its own tile, on top of its source's states."""
        ...

    def fold(self, middle: Tensor, computed: Tensor) -> Tensor:
        """A layer's output [R or more, H] from ``middle``, before the second half, and that of the packed rows."""
        ...

    def computed_rows(self) -> Tensor:
        """int32 [layers, N]: how many rows of each segment were computed."""
        ...


class TwinFolds:
    """Folds by the torch twins, which ask the host how many rows there are.

    Args:
        plan_attention: as the operators have it.
    """

    def __init__(
        self,
        layout: FoldLayout,
        device: torch.device,
        plan_attention: Callable[..., Any],
        operators: Operators,
    ) -> None:
        self._layout, self._device = layout, device
        self._plan_attention, self._all = plan_attention, operators
        self._parents = torch.tensor(layout.parents, dtype=torch.int64, device=device)
        depths, samples = layout.depths, layout.samples
        self._levels = [
            torch.tensor([s for s, d in enumerate(depths) if d == depth], dtype=torch.int64, device=device)
            for depth in range(1, max(depths, default=0) + 1)
        ]
        self._groups = [torch.tensor(members, dtype=torch.int64, device=device) for members in samples]
        self._places = [layout.place_of(members[0]) for members in samples]
        shape = (layout.num_segments, layout.block_length)
        self._itself = torch.arange(shape[0] * shape[1], device=device).view(shape)
        self._sources = self._itself
        self._packed: reference.PackedRows | None = None
        self._plan: Any = None
        self._computed: list[Tensor] = []

    @property
    def _rows(self) -> reference.PackedRows:
        assert self._packed is not None, "pack comes first"
        return self._packed

    @property
    def row_map(self) -> Tensor:
        return self._rows.place[self._sources]

    @property
    def operators(self) -> Operators:
        def norm_rotary(
            x: Tensor, weight: Tensor | None, cosines: Tensor, sines: Tensor, eps: float
        ) -> Tensor:
            return self._all.norm_rotary(x, weight, self.gather(cosines), self.gather(sines), eps)

        return replace(self._all, norm_rotary=norm_rotary)

    def select(self, hidden: Tensor, layer: int) -> None:
        self._sources = reference.row_sources(
            hidden, self._parents, self._levels, self._layout.taus[layer], self._layout.gate
        )
        self._computed.append((self._sources == self._itself).sum(1))

    def pack(self) -> None:
        self._packed = reference.pack_rows(self._sources, self._groups)
        slots, starts, firsts, causal = zip(
            *(self._places[group] for group in self._packed.group_of.tolist()), strict=True
        )
        self._plan = self._plan_attention(
            slots,
            starts,
            self._layout.block_length,
            self._device,
            first_keys=firsts if self._layout.first_keys else None,
            causal=causal if self._layout.causal else None,
        )

    def gather(self, rows: Tensor) -> Tensor:
        return pad_rows(rows[self._rows.rows])

    def attend_prefix(self, queries: Tensor, key_cache: Tensor, value_cache: Tensor) -> Boundary:
        held = queries[: len(self._rows.rows)].unflatten(0, (-1, self._layout.block_length))
        return attend_prefix(held, key_cache, value_cache, self._plan)

    def attend_block(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        key_cache: Tensor,
        value_cache: Tensor,
        before: Boundary,
        plan: Any,
    ) -> Tensor:
        queries, keys, values = (part[: len(self._rows.rows)] for part in heads)
        output, _ = attend_block(queries, keys, values, key_cache, value_cache, self.row_map, before, plan)
        return output.flatten(0, 1)

    def fold(self, middle: Tensor, computed: Tensor) -> Tensor:
        return reference.fold_rows(middle, self._sources, self._rows, computed)

    def computed_rows(self) -> Tensor:
        return torch.stack(self._computed).int()
