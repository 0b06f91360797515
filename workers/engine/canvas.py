"""The engine of bidirectional models: one canvas a slot, and packed passes over branches of its active block.

A canvas is prompt and generation, what is not filled yet masked. Every position attends to every other. A *branch* is
the canvas with one block replaced; what is computed of it, and what the rest of the canvas is read as, is the cache:

    none     all rows of the canvas, nothing is read
    prefix   the block and what follows; positions before it are read from the cache
    dual     the block alone; all other positions are read from the cache

The cache is filled by a *refresh*, a pass over the whole canvas with its block as it stands at the start of the block,
and stays frozen until the next block. So the next state is a function of the block's state under every cache;
``none`` is the model itself, the others approximate it (NVlabs/Fast-dLLM, llada/generate.py). A refresh is the
block's first pass: its rows equal, bit for bit, those that the cached pass over the same state would give.

Shapes: N segments (one branch each) with blocks of L tokens, R rows of a pass, H hidden size, V vocabulary padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmgrid.kernels.attention import (
    CanvasGroup,
    CanvasSegment,
    canvas_attention,
    canvas_attention_vendor,
    plan_canvas_attention,
)
from dlmgrid.kernels.embedding import MASKED
from dlmgrid.kernels.gemm import PANEL_ROWS
from dlmgrid.kernels.rotary import rotary_tables
from dlmgrid.workers.engine.memory import check_memory, padded_length, plan_memory
from dlmgrid.workers.engine.model_head import ModelHead, free_memory, memory_errors, type_name
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.families import get_family
from dlmgrid.workers.models.layers import LayerRows, run_layers
from dlmgrid.workers.models.weights import ModelWeights

CACHES = ("none", "prefix", "dual")


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the rows of a pass lie. Row r holds position ``positions[r]`` of segment ``segments[r]``."""

    segments: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    first_rows: Tensor  # [N] int64
    starts: Tensor  # [N] int64: the first position that is computed
    plan: tuple[CanvasGroup, ...]


class CanvasEngine(ModelHead):
    """Packed passes of one bidirectional model over canvases.

    With ``numerics="exact"`` on the CPU, a row's bits depend on its canvas (and what its cache was refreshed from),
    never on what else is in the pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        cache: str,
        num_slots: int,
        max_length: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        numerics: str = "exact",
        memory_budget_bytes: int | None = None,
    ) -> None:
        """Allocate the buffers. ``max_length`` counts prompt and canvas.

        Raises InputError for an impossible setting, or where the buffers do not fit ``memory_budget_bytes`` (by
        default what the device has free beside the weights).
        """
        if cache not in CACHES:
            raise InputError(f"cache: {cache!r} is not one of {', '.join(CACHES)}")
        super().__init__(config, weights, num_slots, max_length, device=device, dtype=dtype, numerics=numerics)
        self.cache = cache
        self.max_length = padded_length(max_length)
        self.is_shifted = get_family(config.family).shifted
        num_cached = 0 if cache == "none" else num_slots
        plan = plan_memory(config, num_slots=num_cached, max_length=max_length, dtype=type_name(dtype))
        budget = memory_budget_bytes
        if budget is None:
            free = free_memory(self.device)
            budget = None if free is None else free + plan.weight_bytes  # the weights are already there
        if budget is not None:
            check_memory(plan, budget, num_slots=num_slots, max_length=max_length)
        shape = (
            config.num_hidden_layers,
            num_cached,
            self.max_length,
            config.num_key_value_heads,
            config.head_dim,
        )
        with memory_errors():
            self._keys = torch.zeros(shape, dtype=dtype, device=self.device)
            self._values = torch.zeros(shape, dtype=dtype, device=self.device)
            self._canvas = torch.full(
                (num_slots, self.max_length), MASKED, dtype=torch.int32, device=self.device
            )
            self._cosines, self._sines = rotary_tables(
                self.max_length, config.head_dim, config.rope_theta, self.device
            )
        self._lengths = [0] * num_slots
        self._refreshed: list[int | None] = [None] * num_slots  # the block that a slot's cache was made for

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Put a canvas of ``tokens``, masked ones -1, into ``slot``.

        Raises ValueError for one that is longer than the buffers, and for ids outside the vocabulary.
        """
        if not 0 < len(tokens) <= self.max_length:
            raise ValueError(f"slot {slot}: a canvas of {len(tokens)} tokens; the buffers hold {self.max_length}")
        self._check_ids(torch.tensor(tokens, dtype=torch.int32))
        self._lengths[slot] = len(tokens)
        self._refreshed[slot] = None
        self.fill(slot, 0, tokens)

    def fill(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Put ``tokens`` into the canvas of ``slot`` from ``start`` on, as when a block is finished."""
        stop = start + len(tokens)
        assert stop <= self._lengths[slot]
        self._canvas[slot, start:stop] = torch.tensor(tokens, dtype=torch.int32, device=self.device)

    def num_rows(self, slot: int, block_start: int, block_length: int, *, is_refresh: bool) -> int:
        """Rows that a pass computes for one branch."""
        first, last = self._span(slot, block_start, block_length, is_refresh)
        return last - first

    def forward(self, tokens: Tensor, slots: Tensor, block_starts: Tensor, refresh: Tensor) -> Tensor:
        """Hidden states after the final norm of the rows that predict each branch's block: [N, L, H].

        ``tokens`` [N, L] int32 with -1 for masked; ``slots``, ``block_starts`` [N] int32; ``refresh`` [N] bool: the
        pass covers the whole canvas and its keys and values become the slot's cache. Row i of a shifted model
        predicts position i + 1; what a branch's first position needs then lies before a cached pass: NaN.
        Raises ValueError for a branch outside its canvas, or one whose cache was made for another block.
        """
        num, length = tokens.shape
        slot_list, start_list, refresh_list = slots.tolist(), block_starts.tolist(), refresh.tolist()
        if not num == len(slot_list) == len(start_list) == len(refresh_list):
            raise ValueError(
                f"forward: {num} branches, {len(slot_list)} slots, {len(start_list)} starts and "
                f"{len(refresh_list)} refresh flags; want one of each"
            )
        self._check_ids(tokens)
        self._check_branches(length, slot_list, start_list, refresh_list)
        layout = self._lay_out(length, slot_list, start_list, refresh_list)
        hidden = self._run(tokens, slot_list, start_list, refresh_list, layout)
        for slot, start, is_refresh in zip(slot_list, start_list, refresh_list, strict=True):
            if is_refresh:
                self._refreshed[slot] = start
        return self._predicting_rows(hidden, layout, start_list, length)

    def _check_ids(self, tokens: Tensor) -> None:
        lowest, highest = (int(value) for value in torch.aminmax(tokens))
        if lowest < MASKED or highest >= self.config.vocab_size:
            raise ValueError(
                f"canvas: token ids {lowest} to {highest}; want -1 to {self.config.vocab_size - 1}"
            )

    def _check_branches(
        self, length: int, slots: Sequence[int], starts: Sequence[int], refresh: Sequence[bool]
    ) -> None:
        refreshed = [slot for slot, flag in zip(slots, refresh, strict=True) if flag]
        if any(slots.count(slot) > 1 for slot in refreshed):
            raise ValueError("forward: a slot is refreshed beside another branch of it")
        for branch, (slot, start, is_refresh) in enumerate(zip(slots, starts, refresh, strict=True)):
            if not 0 <= slot < self.num_slots:
                raise ValueError(f"branch {branch}: slot {slot}; the engine has {self.num_slots}")
            if start < 0 or start + length > self._lengths[slot]:
                raise ValueError(
                    f"branch {branch}: block {start} to {start + length} of a canvas of {self._lengths[slot]}"
                )
            if self.cache != "none" and not is_refresh and self._refreshed[slot] != start:
                raise ValueError(
                    f"branch {branch}: the cache of slot {slot} was made for block {self._refreshed[slot]}, "
                    f"not {start}; refresh it"
                )

    def _span(self, slot: int, start: int, length: int, is_refresh: bool) -> tuple[int, int]:
        """The positions that a branch computes, first and last (exclusive)."""
        if is_refresh or self.cache == "none":
            return 0, self._lengths[slot]
        return start, self._lengths[slot] if self.cache == "prefix" else start + length

    def _lay_out(
        self, length: int, slots: Sequence[int], starts: Sequence[int], refresh: Sequence[bool]
    ) -> _Layout:
        spans, segments = [], []
        num_rows = 0
        for slot, start, is_refresh in zip(slots, starts, refresh, strict=True):
            first, last = self._span(slot, start, length, is_refresh)
            spans.append((first, last))
            segments.append(CanvasSegment(slot, num_rows, first, last, self._lengths[slot]))
            num_rows += last - first
        sizes = torch.tensor([last - first for first, last in spans])
        firsts = torch.tensor([first for first, _ in spans])
        first_rows = sizes.cumsum(0) - sizes
        row_segments = torch.arange(len(spans)).repeat_interleave(sizes)
        positions = torch.arange(num_rows) - (first_rows - firsts)[row_segments]
        return _Layout(
            segments=row_segments.to(self.device),
            positions=positions.to(self.device),
            first_rows=first_rows.to(self.device),
            starts=firsts.to(self.device),
            plan=plan_canvas_attention(segments, self.config.num_attention_heads, self.device),
        )

    @torch.inference_mode()
    def _run(
        self,
        tokens: Tensor,
        slots: Sequence[int],
        starts: Sequence[int],
        refresh: Sequence[bool],
        layout: _Layout,
    ) -> Tensor:
        """Hidden rows [R, H] of a checked pass."""
        num, length = tokens.shape
        device = self.device
        slot_of = torch.tensor(slots, dtype=torch.int64, device=device)
        start_of = torch.tensor(starts, dtype=torch.int64, device=device)
        num_rows = layout.positions.shape[0]
        padded = -(-num_rows // PANEL_ROWS) * PANEL_ROWS
        offsets = layout.positions - start_of[layout.segments]
        in_block = (offsets >= 0) & (offsets < length)
        own = tokens.to(device)[layout.segments, offsets.clamp(0, length - 1)]
        rows = torch.zeros(padded, dtype=torch.int32, device=device)
        rows[:num_rows] = torch.where(
            in_block, own, self._canvas[slot_of[layout.segments], layout.positions]
        )
        positions = torch.zeros(padded, dtype=torch.int64, device=device)
        positions[:num_rows] = layout.positions
        stores = torch.tensor(refresh, device=device)[layout.segments] if self.cache != "none" else None
        stored = stores.nonzero().squeeze(1) if stores is not None else None
        attention = canvas_attention if self.numerics == "exact" else canvas_attention_vendor

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            key_cache = value_cache = None
            if stored is not None:
                key_cache, value_cache = self._keys[layer], self._values[layer]
                where = slot_of[layout.segments[stored]], layout.positions[stored]
                key_cache[where], value_cache[where] = keys[stored], values[stored]
            return attention(queries, keys, values, key_cache, value_cache, layout.plan)

        inputs = LayerRows(tokens=rows, cosines=self._cosines[positions], sines=self._sines[positions])
        with memory_errors():
            return run_layers(self.config, self.weights, inputs, attend, self._linear)[:num_rows]

    def _predicting_rows(
        self, hidden: Tensor, layout: _Layout, starts: Sequence[int], length: int
    ) -> Tensor:
        """The rows [N, L, H] that predict the blocks' positions."""
        start_of = torch.tensor(starts, dtype=torch.int64, device=self.device)
        wanted = start_of[:, None] + torch.arange(length, device=self.device) - int(self.is_shifted)
        offsets = wanted - layout.starts[:, None]
        rows = hidden[layout.first_rows[:, None] + offsets.clamp_min(0)]
        return rows.masked_fill((offsets < 0)[..., None], torch.nan)
