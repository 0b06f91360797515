"""Folds by the Triton kernels: nothing is asked of the host, so that a pass can be one CUDA graph.

Packed rows have places for the worst case; products, norms and attention stop at a count on the device. The tile of a
product is chosen for the rows that are expected; no bit depends on it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlmgrid.kernels.attention.boundary import Boundary
from dlmgrid.kernels.attention.fixed_plan import FixedPlan, PlanShape
from dlmgrid.kernels.attention.launch import attend_block, attend_prefix
from dlmgrid.kernels.gemm.kernel import linear
from dlmgrid.kernels.rmsnorm.kernel import rms_norm
from dlmgrid.kernels.rotary.kernel import norm_rotary
from dlmgrid.kernels.specfold.kernel import DevicePack, fold_rows, gather_rows, mark_rows, pack_rows
from dlmgrid.kernels.specfold.layout import FoldTables

if TYPE_CHECKING:
    from dlmgrid.kernels.operators import Operators


class DeviceFolds:
    """Folds of one pass; ``folding.Folds`` has what its methods do.

    Args:
        shape: of the pass's plan of attention.
        num_splits: of the longest prefix.
        expected_rows: how many packed rows tiles are chosen for; None: all.
    """

    def __init__(
        self, tables: FoldTables, operators: Operators, shape: PlanShape, *, gate: str, num_splits: int,
        expected_rows: int | None = None,
    ) -> None:  # fmt: skip
        self._tables, self._all, self._shape, self._gate = tables, operators, shape, gate
        self._num, self._length, self._num_splits = shape.num_segments, shape.block_length, num_splits
        self._layer = 0
        self._expected = expected_rows
        rows = (tables.taus.shape[0], self._num * self._length)
        self._marks = torch.empty(rows, dtype=torch.int32, device=tables.parents.device)
        self._segments = torch.arange(self._num, dtype=torch.int32, device=tables.parents.device)
        self._packed: DevicePack | None = None

    @property
    def _pack(self) -> DevicePack:
        assert self._packed is not None, "pack comes first"
        return self._packed

    @property
    def row_map(self) -> Tensor:
        return self._pack.row_map.view(self._num, self._length)

    @property
    def operators(self) -> Operators:
        pack = self._pack
        product = partial(linear, row_count=pack.used, expected_rows=self._expected)

        def turned(x: Tensor, weight: Tensor | None, cosines: Tensor, sines: Tensor, eps: float) -> Tensor:
            return norm_rotary(x, weight, cosines, sines, pack.rows, eps)

        return replace(
            self._all,
            linear=product,
            linear_residual=lambda x, weight, residual: product(x, weight, residual=residual),
            linear_silu_gate=partial(product, gated=True),
            rms_norm=partial(rms_norm, row_count=pack.used),
            norm_rotary=turned,
        )

    def select(self, hidden: Tensor, layer: int) -> None:
        self._layer = layer
        mark_rows(hidden, self._tables, layer, self._gate, out=self._marks[layer])

    def pack(self) -> None:
        self._packed = pack_rows(self._marks[self._layer], self._tables, self._shape)

    def gather(self, rows: Tensor) -> Tensor:
        if rows.dim() == 1:
            return gather_rows(rows[:, None], self._pack.rows).squeeze(1)
        return gather_rows(rows, self._pack.rows)

    def attend_prefix(self, queries: Tensor, key_cache: Tensor, value_cache: Tensor) -> Boundary:
        plan: Any = FixedPlan.of_tiles(
            self._pack.tiles, self._segments, self._shape, num_splits=self._num_splits, expected_rows=self._expected
        )  # fmt: skip
        return attend_prefix(queries.unflatten(0, (-1, self._length)), key_cache, value_cache, plan)

    def attend_block(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        key_cache: Tensor,
        value_cache: Tensor,
        before: Boundary,
        plan: Any,
    ) -> Tensor:
        output, _ = attend_block(*heads, key_cache, value_cache, self.row_map, before, plan)
        return output.flatten(0, 1)

    def fold(self, middle: Tensor, computed: Tensor) -> Tensor:
        return fold_rows(middle, self._pack, computed)

    def computed_rows(self) -> Tensor:
        itself = torch.arange(self._marks.shape[1], dtype=torch.int32, device=self._marks.device)
        own = (self._marks == itself).view(-1, self._num, self._length)
        return own.sum(-1, dtype=torch.int32)
