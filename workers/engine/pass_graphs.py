"""Passes of a fixed shape over fixed buffers: on a GPU one CUDA graph for each shape, replayed for every pass of it.

All that differs between passes of a shape (tokens, positions, where blocks lie and which are stored, fold parents and
τ) goes up in one copy. A shape is the number of segments, the bucket of splits of the longest prefix, whether any block
is stored, and for a folded pass what its gate compares with and how many rows are expected to be computed (a hint: no
bit depends on it). The first pass of a shape runs launch by launch, which compiles its kernels; the second is captured.
In Triton's interpreter every pass runs launch by launch.

Legend: N segments of L tokens, R = N · L rows, rounded up to whole panels, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlmgrid.kernels.attention import SPLIT_KEYS
from dlmgrid.kernels.attention.fixed_plan import FixedPlan, PlanShape
from dlmgrid.kernels.gemm import PANEL_ROWS
from dlmgrid.kernels.operators import Operators
from dlmgrid.kernels.specfold import FoldLayout, FoldTables
from dlmgrid.workers.folding.fold import FoldReport
from dlmgrid.workers.folding.layers import run_folded_layers
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.layers import PassInputs, run_layers
from dlmgrid.workers.models.weights import ModelWeights

MOST_GRAPHS = 320
"""Graphs kept at once; with one more all are dropped, and captured again as they are needed."""

_EXPECTED_ROWS = (32, 64, 128, 192, 288, 384, 512, 672, 1024, 1344, 2048, 2688)
"""A folded pass is expected to compute as large a share of its rows as the one before it did; the next of these many,
or all of them."""

MOST_LAYOUTS = 1024
"""Layouts kept at once: some KB each."""

MOST_SEGMENTS = 128
"""Segments of a pass that has a graph; a larger one, the prefill of many samples say, seldom comes twice."""

_ALIGNED = 32  # entries: every table begins at a multiple of 128 bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The N segments of a pass: slots, the positions they begin at, the same on the grid of the cache, the keys before
    the sample's first, and which of them see themselves causally (None: no family of the model's kind) and are written.
    """

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    on_grid: tuple[int, ...]
    first_keys: tuple[int, ...] | None
    causal: tuple[bool, ...] | None
    written: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Key:
    """What graphs differ by; ``gate`` "" and ``expected`` rows 0 for a pass that does not fold."""

    num: int
    splits: int
    stores: bool
    gate: str = ""
    expected: int = 0


class _Shape:
    """Buffers and graph of the passes of one shape."""

    def __init__(self, sizes: Sequence[int], hidden: Tensor) -> None:
        device = hidden.device
        firsts = [0]
        for size in sizes:
            firsts.append(firsts[-1] + -(-size // _ALIGNED) * _ALIGNED)
        self._spans = [slice(first, first + size) for first, size in zip(firsts, sizes, strict=False)]
        self.is_gpu = device.type == "cuda"
        self._up = torch.zeros(firsts[-1], dtype=torch.int32, pin_memory=self.is_gpu)
        self._down = torch.zeros(firsts[-1], dtype=torch.int32, device=device)
        self.hidden = hidden
        self.counts: Tensor | None = None  # int32 [layers, N] of a folded pass, as the graph leaves it
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs = 0
        self._sent = torch.cuda.Event() if self.is_gpu else None

    @property
    def tables(self) -> list[Tensor]:
        """The tables on the device."""
        return [self._down[span] for span in self._spans]

    def send(self, parts: Sequence[Tensor]) -> None:
        """Put the tables of a pass onto the device, in order."""
        if self._sent is not None and self.runs:
            self._sent.synchronize()  # the copy before may still be reading
        for span, part in zip(self._spans, parts, strict=True):
            self._up[span] = part
        self._down.copy_(self._up, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def expected_rows(report: FoldReport | None, all_rows: int) -> int:
    """How many of its rows a folded pass is likely to compute, by the pass before it; all where that was not read."""
    if report is None or not report.is_read:
        return all_rows
    counts = report.own_rows
    share = sum(map(sum, counts)) / (len(report.is_foldable) * report.length * len(counts))
    likely = math.ceil(share * all_rows)
    return min([rows for rows in _EXPECTED_ROWS if rows >= likely] + [all_rows])


class PassGraphs:
    """Runs passes of one model over its caches.

    Args:
        key_cache, value_cache: [layers, slots, tiles, Hkv, tile, d].
        turns: positions int32 [R] to cosines, sines and the query scale of the rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        operators: Operators,
        key_cache: Tensor,
        value_cache: Tensor,
        turns: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]],
        *,
        block_length: int,
    ) -> None:
        self._config, self._weights, self._operators = config, weights, operators
        self._key_cache, self._value_cache = key_cache, value_cache
        self._turns = turns
        self._length = block_length
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._shapes: dict[_Key, _Shape] = {}
        self._layouts: dict[Blocks, list[Tensor]] = {}
        self._offsets = torch.arange(block_length, dtype=torch.int32)
        self.fold_report: FoldReport | None = None
        self._last: _Shape | None = None
        self._hidden: Tensor | None = None
        self._pool: Any = None  # torch's handle of the graphs' shared memory

    @torch.inference_mode()  # whoever asks: buffers made in one mode are written in every pass
    def run(self, tokens: Tensor, blocks: Blocks, layout: FoldLayout | None = None) -> Tensor:
        """Hidden states after the final norm of int32 ``tokens`` [N, L] on the CPU: a new tensor [N, L, H].

        With a ``layout`` the pass folds, and ``fold_report`` says what it computed.
        """
        num = len(blocks.slots)
        key = _Key(
            num=num,
            splits=1 << max(max(blocks.on_grid) // SPLIT_KEYS, 0).bit_length(),
            stores=any(blocks.written),
            gate="" if layout is None else layout.gate,
            expected=0 if layout is None else expected_rows(self.fold_report, num * self._length),
        )
        shape = self._shape(key)
        parts = self._tables(tokens, blocks, shape.hidden.shape[0])
        shape.send(parts if layout is None else [*parts, FoldTables.buffer_of(layout)])
        if shape.graph is not None:
            shape.graph.replay()
        elif shape.is_gpu and shape.runs:
            shape.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(shape.graph, pool=self._pool):
                self._compute(shape, key)
            self._pool = self._pool or shape.graph.pool()
            shape.graph.replay()
        else:
            self._compute(shape, key)
        shape.runs += 1
        self._last = shape
        if layout is not None:
            assert shape.counts is not None
            self.fold_report = FoldReport(
                [parent >= 0 for parent in layout.parents], self._length, shape.counts
            )
        return shape.hidden[: num * self._length].view(num, self._length, -1).clone()

    def queue_again(self) -> None:
        """Replay the graph of the last pass, over what it was given. Raises RuntimeError before there is one."""
        if self._last is None or self._last.graph is None:
            raise RuntimeError("the last pass ran launch by launch; run one of its shape twice first")
        self._last.graph.replay()

    def _shape(self, key: _Key) -> _Shape:
        if key not in self._shapes:
            if len(self._shapes) >= MOST_GRAPHS:
                self._shapes.clear()
                self._last = None
                self._pool = None
            shape = self._new_shape(key)
            if key.num > MOST_SEGMENTS:
                return shape
            self._shapes[key] = shape
        return self._shapes[key]

    def _new_shape(self, key: _Key) -> _Shape:
        """The shapes with graphs share one buffer of hidden states, since every pass copies its own out."""
        rows = -(-key.num * self._length // PANEL_ROWS) * PANEL_ROWS
        most = -(-MOST_SEGMENTS * self._length // PANEL_ROWS) * PANEL_ROWS
        if self._hidden is None or rows > most:
            weight = self._weights.embedding
            size = (max(rows, most), self._config.hidden_size)
            hidden = torch.zeros(size, dtype=weight.dtype, device=weight.device)
            if rows > most:
                return _Shape(self._sizes(key, rows), hidden)
            self._hidden = hidden
        return _Shape(self._sizes(key, rows), self._hidden[:rows])

    def _sizes(self, key: _Key, rows: int) -> list[int]:
        sizes = [rows, rows, key.num, key.num, self._plan_shape(key.num).size]
        if key.gate:
            sizes.append(FoldTables.size(key.num, self._config.num_hidden_layers))
        return sizes

    def _plan_shape(self, num: int) -> PlanShape:
        cache = self._key_cache
        return PlanShape(
            num,
            self._length,
            self._group,
            self._config.num_key_value_heads,
            cache.shape[-1],
            cache.element_size(),
        )

    def _tables(self, tokens: Tensor, blocks: Blocks, rows: int) -> list[Tensor]:
        flat = tokens.reshape(-1)
        if flat.numel() < rows:
            flat = torch.cat((flat, flat.new_zeros(rows - flat.numel())))
        layout = self._layouts.get(blocks)
        if layout is None:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[blocks] = self._layout(blocks, rows)
        return [flat, *layout]

    def _layout(self, blocks: Blocks, rows: int) -> list[Tensor]:
        """Where the rows of a pass lie: all of its tables but the tokens. The passes of a block share it."""
        num = len(blocks.slots)
        positions = torch.zeros(rows, dtype=torch.int32)
        starts = torch.tensor(blocks.starts, dtype=torch.int32)
        positions[: num * self._length] = (starts[:, None] + self._offsets).clamp_min(0).view(-1)
        slots = [slot if written else -1 for slot, written in zip(blocks.slots, blocks.written, strict=True)]
        plan = FixedPlan.tables_of(
            blocks.slots,
            blocks.on_grid,
            self._plan_shape(num),
            first_keys=blocks.first_keys,
            causal=blocks.causal,
        )
        integers = (torch.tensor(values, dtype=torch.int32) for values in (slots, blocks.on_grid))
        return [positions, *integers, plan]

    def _compute(self, shape: _Shape, key: _Key) -> None:
        """Queue the pass: from the tables of ``shape`` to its hidden states, and its counts where it folds."""
        num, length = key.num, self._length
        tokens, positions, slots, starts, tables, *fold_tables = shape.tables
        cosines, sines, query_scale = self._turns(positions)
        plan = FixedPlan(tables, self._plan_shape(num), num_splits=key.splits)
        inputs = PassInputs(
            tokens=tokens,
            cosines=cosines,
            sines=sines,
            query_scale=query_scale,
            num_segments=num,
            block_length=length,
            plan=plan,
            writes=(slots, starts) if key.stores else None,
        )
        model = (self._config, self._weights, inputs, self._key_cache, self._value_cache, self._operators)
        if not key.gate:
            shape.hidden.copy_(run_layers(*model))
            return
        from dlmgrid.kernels.specfold.device_folding import DeviceFolds

        folds = DeviceFolds(
            FoldTables(fold_tables[0], num, self._config.num_hidden_layers),
            self._operators,
            self._plan_shape(num),
            gate=key.gate,
            num_splits=key.splits,
            expected_rows=key.expected,
        )
        hidden = run_folded_layers(*model, folds)
        shape.hidden[: num * length].copy_(hidden[: num * length])
        counts = folds.computed_rows()
        if shape.counts is None:
            shape.counts = torch.zeros_like(counts)
        shape.counts.copy_(counts)
