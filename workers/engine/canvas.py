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
from pathlib import Path

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
from dlmgrid.workers.cell import CANVAS_CACHES
from dlmgrid.workers.engine.memory import padded_length
from dlmgrid.workers.engine.model_head import DTYPES, ModelHead, load_model, memory_errors
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.families import get_family
from dlmgrid.workers.models.layers import PassRows, run_rows
from dlmgrid.workers.models.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the rows of a pass lie. Row r holds position ``positions[r]`` of segment ``segments[r]``."""

    segments: Tensor  # [R] int64
    slots: Tensor  # [R] int64
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
        if cache not in CANVAS_CACHES:
            raise InputError(f"cache: {cache!r} is not one of {', '.join(CANVAS_CACHES)}")
        super().__init__(
            config,
            weights,
            num_slots,
            max_length,
            device=device,
            dtype=dtype,
            numerics=numerics,
            kernels="torch",
        )
        self.cache = cache
        self.max_length = padded_length(max_length)
        self.is_shifted = get_family(config.family).shifted
        num_cached = 0 if cache == "none" else num_slots
        self.check_room(max_length, num_cached, memory_budget_bytes)
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

    def release(self) -> None:
        """As :meth:`ModelHead.release`: keys and values."""
        super().release()
        self._keys = self._values = torch.empty(0)

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Put a canvas of ``tokens``, masked ones -1, into ``slot``.

        Raises ValueError for one that is longer than the buffers, and for ids outside the vocabulary.
        """
        if not 0 < len(tokens) <= self.max_length:
            raise ValueError(
                f"slot {slot}: a canvas of {len(tokens)} tokens; the buffers hold {self.max_length}"
            )
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

    def forward(
        self, tokens: Tensor, slots: Tensor, block_starts: Tensor, store: Tensor, causal: bool = False
    ) -> Tensor:
        """Hidden states after the final norm of the rows that predict each branch's block: [N, L, H].

        ``tokens`` [N, L] int32 with -1 for masked; ``slots``, ``block_starts`` [N] int32; ``store`` [N] bool: a
        refresh, the pass covers the whole canvas and its keys and values become the cache. Row i of a shifted model
        predicts position i + 1; what a branch's first position needs then lies before a cached pass: NaN.
        Raises ValueError for a branch outside its canvas, or one whose cache was made for another block.
        """
        if causal:
            raise ValueError("forward: a bidirectional model has no causal pass")
        num, length = tokens.shape
        slot_list, start_list, refresh_list = slots.tolist(), block_starts.tolist(), store.tolist()
        if not num == len(slot_list) == len(start_list) == len(refresh_list):
            raise ValueError(
                f"forward: {num} branches, {len(slot_list)} slots, {len(start_list)} starts and "
                f"{len(refresh_list)} refresh flags; want one of each"
            )
        self._check_ids(tokens)
        self._check_branches(length, slot_list, start_list, refresh_list)
        spans = [
            self._span(slot, start, length, is_refresh)
            for slot, start, is_refresh in zip(slot_list, start_list, refresh_list, strict=True)
        ]
        lengths = [self._lengths[slot] for slot in slot_list]
        layout = self._lay_out(slot_list, spans, lengths)
        hidden = self._run(self._rows(tokens, start_list, layout), layout, refresh_list, self.weights)
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
        self, slots: Sequence[int], spans: Sequence[tuple[int, int]], lengths: Sequence[int]
    ) -> _Layout:
        """The rows of branches that compute ``spans`` of canvases of ``lengths`` tokens in ``slots``."""
        segments: list[CanvasSegment] = []
        num_rows = 0
        for slot, (first, last), canvas in zip(slots, spans, lengths, strict=True):
            segments.append(CanvasSegment(slot, num_rows, first, last, canvas))
            num_rows += last - first
        sizes = torch.tensor([last - first for first, last in spans])
        firsts = torch.tensor([first for first, _ in spans])
        first_rows = sizes.cumsum(0) - sizes
        row_segments = torch.arange(len(spans)).repeat_interleave(sizes)
        positions = torch.arange(num_rows) - (first_rows - firsts)[row_segments]
        return _Layout(
            segments=row_segments.to(self.device),
            slots=torch.tensor(slots)[row_segments].to(self.device),
            positions=positions.to(self.device),
            first_rows=first_rows.to(self.device),
            starts=firsts.to(self.device),
            plan=plan_canvas_attention(segments, self.config.num_attention_heads, self.device),
        )

    def _rows(self, tokens: Tensor, starts: Sequence[int], layout: _Layout) -> Tensor:
        """The tokens int32 [R] of the rows: a branch's own in its block, those of its canvas elsewhere."""
        length = tokens.shape[1]
        start_of = torch.tensor(starts, dtype=torch.int64, device=self.device)
        offsets = layout.positions - start_of[layout.segments]
        own = tokens.to(self.device)[layout.segments, offsets.clamp(0, length - 1)]
        in_block = (offsets >= 0) & (offsets < length)
        return torch.where(in_block, own, self._canvas[layout.slots, layout.positions])

    @torch.inference_mode()
    def _run(self, tokens: Tensor, layout: _Layout, refresh: Sequence[bool], weights: ModelWeights) -> Tensor:
        """Hidden rows [R, H] of a checked pass over ``tokens`` int32 [R]."""
        num_rows = tokens.shape[0]
        padded = -(-num_rows // PANEL_ROWS) * PANEL_ROWS
        rows = torch.zeros(padded, dtype=torch.int32, device=self.device)
        rows[:num_rows] = tokens
        positions = torch.zeros(padded, dtype=torch.int64, device=self.device)
        positions[:num_rows] = layout.positions
        attention = canvas_attention if self.numerics == "exact" else canvas_attention_vendor
        stored = torch.tensor(refresh, device=self.device)[layout.segments].nonzero().squeeze(1)
        places = layout.slots[stored], layout.positions[stored]

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if self.cache == "none":
                return attention(queries, keys, values, None, None, layout.plan)
            key_cache, value_cache = self._keys[layer], self._values[layer]
            key_cache[places], value_cache[places] = keys[stored], values[stored]
            return attention(queries, keys, values, key_cache, value_cache, layout.plan)

        inputs = PassRows(tokens=rows, cosines=self._cosines[positions], sines=self._sines[positions])
        with memory_errors():
            return run_rows(self.config, weights, inputs, attend, self.operators)[:num_rows]

    @property
    def _tested_length(self) -> int:
        return min(40, self.max_length)

    def _forward_rows(self, tokens: Tensor, weights: ModelWeights) -> Tensor:
        """Whole canvases of no slot, which store nothing, through ``weights``: [N * L, H]."""
        num, length = tokens.shape
        layout = self._lay_out([0] * num, [(0, length)] * num, [length] * num)
        return self._run(tokens.flatten(), layout, [False] * num, weights)

    def _predicting_rows(self, hidden: Tensor, layout: _Layout, starts: Sequence[int], length: int) -> Tensor:
        """The rows [N, L, H] that predict the blocks' positions."""
        start_of = torch.tensor(starts, dtype=torch.int64, device=self.device)
        wanted = start_of[:, None] + torch.arange(length, device=self.device) - int(self.is_shifted)
        offsets = wanted - layout.starts[:, None]
        rows = hidden[layout.first_rows[:, None] + offsets.clamp_min(0)]
        return rows.masked_fill((offsets < 0)[..., None], torch.nan)


def load_canvas_engine(
    folder: Path | str,
    *,
    cache: str,
    num_slots: int,
    max_length: int,
    device: str = "cpu",
    dtype: str = "float32",
    numerics: str = "exact",
    block_length: int | None = None,
    memory_budget_bytes: int | None = None,
    self_test: bool = True,
) -> CanvasEngine:
    """Check a checkpoint folder, load it on ``device`` and make an engine of the given cache for it.

    Raises InputError for a faulty checkpoint or setting, or where weights and buffers do not fit.
    """
    config, weights = load_model(
        folder,
        num_cached=0 if cache == "none" else num_slots,
        max_length=max_length,
        device=device,
        dtype=dtype,
        numerics=numerics,
        kernels="torch",
        block_length=block_length,
        memory_budget_bytes=memory_budget_bytes,
    )
    engine = CanvasEngine(
        config,
        weights,
        cache=cache,
        num_slots=num_slots,
        max_length=max_length,
        device=device,
        dtype=DTYPES[dtype],
        numerics=numerics,
        memory_budget_bytes=memory_budget_bytes,
    )
    if self_test and engine.device.type == "cpu":
        engine.self_test()
    return engine
