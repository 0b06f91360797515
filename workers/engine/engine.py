"""The engine: one model on one device, static key/value buffers per sample slot, and packed passes over them.

Shapes: N segments (one block of one slot each) of L tokens, H hidden size, V vocabulary padded to whole 64s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlmgrid.kernels.embedding import MASKED
from dlmgrid.kernels.gemm import PANEL_ROWS
from dlmgrid.kernels.rotary import rotary_tables, yarn_frequencies
from dlmgrid.kernels.specfold import FoldLayout
from dlmgrid.workers.engine.memory import padded_length
from dlmgrid.workers.engine.model_head import DTYPES, ModelHead, free_memory, load_model, memory_errors
from dlmgrid.workers.engine.pass_graphs import Blocks, PassGraphs
from dlmgrid.workers.folding.fold import FoldReport, FoldSettings, StageTimer
from dlmgrid.workers.folding.layers import run_folded_layers
from dlmgrid.workers.models.config import KEY_TILE, ModelConfig
from dlmgrid.workers.models.families import get_family
from dlmgrid.workers.models.layers import BlockPart, PassInputs, run_layers
from dlmgrid.workers.models.weights import ModelWeights

__all__ = ["DTYPES", "Engine", "free_memory", "load_engine"]


class Engine(ModelHead):
    """Packed forward passes of one model.

    A *slot* holds the keys and values of one sample. A segment reads the cached positions of its slot before
    its block and its own block; with ``store`` it also writes its block there. With ``numerics="exact"`` on
    the CPU, a row's bits depend on its slot's cached tokens and its own block, never on what else is in the
    pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        num_slots: int,
        max_length: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        numerics: str = "exact",
        kernels: str = "torch",
        memory_budget_bytes: int | None = None,
    ) -> None:
        """Allocate the buffers. ``max_length`` counts prompt and canvas, rounded up to whole key tiles.

        Raises InputError for an impossible setting, or where the buffers do not fit ``memory_budget_bytes``
        (by default what the device has free beside the weights).
        """
        super().__init__(
            config,
            weights,
            num_slots,
            max_length,
            device=device,
            dtype=dtype,
            numerics=numerics,
            kernels=kernels,
        )
        self.max_length = padded_length(max_length)
        self.block_length = config.block_length
        family = get_family(config.family)
        self._from_prompt = family.grid == "prompt"
        self._token_causal = family.attention == "token_causal"
        self.check_room(max_length, num_slots, memory_budget_bytes)
        shape = (
            config.num_hidden_layers,
            num_slots,
            self.max_length // KEY_TILE,
            config.num_key_value_heads,
            KEY_TILE,
            config.head_dim,
        )
        with memory_errors():
            self._keys = torch.zeros(shape, dtype=dtype, device=self.device)
            self._values = torch.zeros(shape, dtype=dtype, device=self.device)
            self._cosines, self._sines = _rotary_tables(config, self.max_length, self.device)
        self._cached = [0] * num_slots
        self._graphs: PassGraphs | None = None
        if (
            self.operators.write_blocks is not None and config.experts is None
        ):  # routing reads counts on the host
            self._graphs = PassGraphs(
                config,
                weights,
                self.operators,
                self._keys,
                self._values,
                self._turns,
                block_length=config.block_length,
            )
        self.fold_report: FoldReport | None = None

    def release(self) -> None:
        """As :meth:`ModelHead.release`: keys, values and graphs."""
        super().release()
        self._graphs = None
        self._keys = self._values = torch.empty(0)

    def cached_length(self, slot: int) -> int:
        """Positions of ``slot`` that hold stored keys and values, from 0."""
        return self._cached[slot]

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, *, first_start: int, block_start: int) -> None:
        """Lay the positions of slot ``source`` before ``block_start`` out in slot ``target``, so that a block may start
        there. ``first_start``: where a block of ``source`` starts.

        Raises ValueError where blocks lie on an absolute grid, or ``source`` does not hold so many positions.
        """
        if not self._from_prompt:
            raise ValueError(f"copy_prefix: blocks of the family {self.config.family} start on one grid")
        before, after = self._leading(first_start), self._leading(block_start)
        if block_start + before > self._cached[source] or block_start + after > self.max_length:
            raise ValueError(
                f"copy_prefix: {block_start} positions of slot {source}, which holds {self._cached[source] - before}"
            )
        positions = torch.arange(block_start, device=self.device)
        reads, writes = positions + before, positions + after
        for cache in (self._keys, self._values):
            held = cache[:, source][:, reads // KEY_TILE, :, reads % KEY_TILE]
            cache[:, target][:, writes // KEY_TILE, :, writes % KEY_TILE] = held
        self._cached[target] = block_start + after

    def reset(self, slot: int) -> None:
        """Forget what ``slot`` holds; the next sample starts at position 0."""
        self._cached[slot] = 0

    def forward(
        self,
        tokens: Tensor,
        slots: Tensor,
        block_starts: Tensor,
        store: Tensor,
        causal: bool = False,
        fold: tuple[FoldSettings, Sequence[int]] | None = None,
        *,
        timed: bool = False,
        keep: bool = False,
    ) -> Tensor:
        """Hidden states after the final norm, [N, L, H] in the engine's dtype.

        ``fold``: SpecFold's settings and the fold parent of each segment (-1: never folded); ``fold_report`` then says
        what the pass recomputed and, if it is ``timed``, the time of its stages, which are then launched one by one.
        With ``keep`` the keys and values of every segment are written, also of those that do
        not store: they count as absent, but :meth:`forward_part` reads them.

        A family whose prefix is token-causal sees its own block causally where it stores, and with ``causal`` in every
        segment; other families never do. Where blocks lie from the prompt's end on, a slot's block starts are equal
        modulo L, and the first may be negative: positions below 0 hold nothing.

        ``tokens`` [N, L] int32 with -1 for masked; ``slots``, ``block_starts`` [N] int32; ``store`` [N] bool.
        Segments of one slot in ascending order of block may build on each other within the pass (a prefill; a
        commit with the next block's first pass). Storing block b drops what the slot held from b on. Raises
        ValueError for a segment that reads positions nobody stored, is off the grid or out of range.
        """
        num, length = tokens.shape
        slot_list, start_list, store_list = slots.tolist(), block_starts.tolist(), store.tolist()
        if length != self.block_length or not num == len(slot_list) == len(start_list) == len(store_list):
            raise ValueError(
                f"forward: tokens {tuple(tokens.shape)}, {len(slot_list)} slots, {len(start_list)} starts "
                f"and {len(store_list)} store flags; want [N, {self.block_length}] and N of each"
            )
        if causal and not self._token_causal:
            raise ValueError(f"forward: the family {self.config.family} has no causal mode")
        cached = self._plan_cache(slot_list, start_list, store_list)
        written = [True] * num if keep else store_list
        if self._graphs is not None and not timed and num:
            leading = [self._leading(start) for start in start_list]
            blocks = Blocks(
                slots=tuple(slot_list),
                starts=tuple(start_list),
                on_grid=tuple(start + lead for start, lead in zip(start_list, leading, strict=True)),
                first_keys=tuple(leading) if self._from_prompt else None,
                causal=tuple(causal or flag for flag in store_list) if self._token_causal else None,
                written=tuple(written),
            )
            tokens = tokens.cpu()
            self._check_tokens(tokens)
            layout = None if fold is None else self._layout(*fold, blocks)
            with memory_errors():
                hidden = self._graphs.run(tokens, blocks, layout)
            if fold is not None:
                self.fold_report = self._graphs.fold_report
            self._cached = cached
            return hidden
        hidden = self._run(
            tokens, slot_list, start_list, store_list, self.weights, causal, written, fold=fold, timed=timed
        )
        self._cached = cached
        return hidden.clone()  # a plain tensor, which callers may work on in place

    def queue_pass_again(self) -> None:
        """Queue the graph of the last pass once more over the same inputs, to time it; RuntimeError where none is."""
        if self._graphs is None:
            raise RuntimeError("passes of these kernels are no graphs")
        self._graphs.queue_again()

    def queue_again(self) -> None:
        """The same of the last pass and of the last rows that were read."""
        self.queue_pass_again()
        self.queue_rows_again()

    def forward_part(
        self, tokens: Tensor, slots: Tensor, block_starts: Tensor, offsets: Sequence[int]
    ) -> Tensor:
        """Hidden states [N, W, H] of W positions of each block, int32 ``tokens`` [N, W] from ``offsets`` on.

        They see the prefix and the block's keys and values as a pass with ``keep`` left them, their own in place; those
        are written. W divides the offsets and the block length.
        """
        num = len(tokens)
        starts, slot_list = block_starts.tolist(), slots.tolist()
        firsts = [start + offset for start, offset in zip(starts, offsets, strict=True)]
        self._plan_cache(slot_list, starts, [False] * num)
        part = BlockPart(
            length=self.block_length,
            slots=self._ints(slot_list),
            tiles=self._ints([start // KEY_TILE for start in starts]),
            blocks=self._ints([start % KEY_TILE // self.block_length for start in starts]),
            offsets=self._ints(list(offsets)),
        )
        hidden = self._run(
            tokens, slot_list, firsts, [True] * num, self.weights, part=part, plan_starts=starts
        )
        return hidden.clone()

    @property
    def _tested_length(self) -> int:
        return self.block_length

    def _forward_rows(self, tokens: Tensor, weights: ModelWeights) -> Tensor:
        """Blocks at position 0 that store nothing, through ``weights``: [N * L, H]."""
        num = len(tokens)
        return self._run(tokens, [0] * num, [0] * num, [False] * num, weights).flatten(0, 1)

    @torch.inference_mode()
    def _run(
        self,
        tokens: Tensor,
        slots: Sequence[int],
        starts: Sequence[int],
        store: Sequence[bool],
        weights: ModelWeights,
        causal: bool = False,
        written: Sequence[bool] | None = None,
        part: BlockPart | None = None,
        plan_starts: Sequence[int] | None = None,
        fold: tuple[FoldSettings, Sequence[int]] | None = None,
        timed: bool = False,
    ) -> Tensor:
        """Lay out the rows of a checked pass and run the layers: [N, L, H]."""
        num, length = tokens.shape
        rows = -(-num * length // PANEL_ROWS) * PANEL_ROWS
        flat = torch.zeros(rows, dtype=torch.int32, device=self.device)
        flat[: num * length] = tokens.reshape(-1)
        self._check_tokens(flat)
        positions = torch.zeros(rows, dtype=torch.int64, device=self.device)
        offsets = torch.arange(length, device=self.device)
        positions[: num * length] = (self._ints(starts)[:, None] + offsets[None, :]).reshape(-1)
        positions.clamp_(min=0)
        leading = [self._leading(start) for start in starts]
        on_grid = [start + lead for start, lead in zip(starts, leading, strict=True)]
        is_causal = [causal or flag for flag in store]
        stored = [segment for segment, flag in enumerate(written or store) if flag]
        cosines, sines, query_scale = self._turns(positions)
        inputs = PassInputs(
            tokens=flat,
            num_segments=num,
            block_length=length,
            cosines=cosines,
            sines=sines,
            query_scale=query_scale,
            plan=self._plan(slots, plan_starts or on_grid, leading, is_causal),
            part=part,
            stored=self._ints(stored),
            stored_slots=self._ints([slots[segment] for segment in stored]),
            stored_starts=self._ints([on_grid[segment] for segment in stored]),
        )
        with memory_errors():
            if fold is None:
                hidden = run_layers(self.config, weights, inputs, self._keys, self._values, self.operators)
            else:
                blocks = Blocks(
                    slots=tuple(slots),
                    starts=tuple(starts),
                    on_grid=tuple(on_grid),
                    first_keys=tuple(leading) if self._from_prompt else None,
                    causal=tuple(is_causal) if self._token_causal else None,
                    written=tuple(written or store),
                )
                layout = self._layout(*fold, blocks)
                config = self.config
                heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
                folds = self.operators.open_folds(layout, self.device, heads=heads, dtype=self.dtype)
                timer = StageTimer(self.device) if timed else None
                hidden = run_folded_layers(
                    self.config, weights, inputs, self._keys, self._values, self.operators, folds,
                    None if timer is None else timer.mark,
                )  # fmt: skip
                self.fold_report = FoldReport(
                    [parent >= 0 for parent in layout.parents], length, folds.computed_rows(), timer
                )
        return hidden[: num * length].view(num, length, -1)

    def _layout(self, settings: FoldSettings, parents: Sequence[int], blocks: Blocks) -> FoldLayout:
        return FoldLayout(
            parents=parents,
            slots=blocks.slots,
            starts=blocks.on_grid,
            first_keys=blocks.first_keys,
            causal=blocks.causal,
            block_length=self.block_length,
            taus=settings.by_layer(self.config.num_hidden_layers),
            gate=settings.gate,
        )

    def _check_tokens(self, tokens: Tensor) -> None:
        lowest, highest = (int(value) for value in torch.aminmax(tokens))
        if lowest < MASKED or highest >= self.config.vocab_size:
            raise ValueError(
                f"forward: token ids {lowest} to {highest}; want -1 to {self.config.vocab_size - 1}"
            )

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Cosines, sines and the query scale of rows at ``positions`` int32 or int64 [R]."""
        cosines, sines = (table.index_select(0, positions) for table in (self._cosines, self._sines))
        return cosines, sines, self._query_scale(positions)

    def _plan(
        self, slots: Sequence[int], starts: Sequence[int], leading: Sequence[int], is_causal: Sequence[bool]
    ) -> Any:
        """The operators' plan of attention for blocks on the grid."""
        return self.operators.plan_attention(
            slots,
            starts,
            self.block_length,
            self.device,
            first_keys=leading if self._from_prompt else None,
            causal=is_causal if self._token_causal else None,
        )

    def _leading(self, start: int) -> int:
        """Positions that move a block onto the grid: what a slot's buffer holds nothing at before position 0."""
        return -start % self.block_length if self._from_prompt else 0

    def _query_scale(self, positions: Tensor) -> Tensor | None:
        scaling = self.config.query_scaling
        if scaling is None:
            return None
        steps = torch.div(positions, scaling.original_length, rounding_mode="floor")
        return 1 + scaling.beta * torch.log1p(steps.float())

    def _plan_cache(self, slots: Sequence[int], starts: Sequence[int], store: Sequence[bool]) -> list[int]:
        """The cached lengths after the pass; ValueError for a segment that cannot be run."""
        length = self.block_length
        cached = list(self._cached)
        starts = [start + self._leading(start) for start in starts]
        for segment, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            if not 0 <= slot < self.num_slots:
                raise ValueError(f"segment {segment}: slot {slot}; the engine has {self.num_slots}")
            if start < 0 or start % length or start + length > self.max_length:
                raise ValueError(
                    f"segment {segment}: block start {start} is off the grid of {length} "
                    f"or beyond {self.max_length}"
                )
        written = sorted({(starts[i], slots[i]) for i, flag in enumerate(store) if flag})
        if len(written) != sum(store):
            raise ValueError("forward: two segments store the same block of a slot")
        for start, slot in written:
            if start > cached[slot]:
                raise ValueError(
                    f"slot {slot}: block {start} is stored, but only {cached[slot]} positions before it"
                )
            cached[slot] = start + length
        for segment, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            if start > cached[slot]:
                raise ValueError(
                    f"segment {segment}: reads {start} positions of slot {slot}, {cached[slot]} are stored"
                )
        return cached

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _rotary_tables(config: ModelConfig, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = config.rotary_dim or config.head_dim
    yarn = config.yarn
    if yarn is None:
        return rotary_tables(num_positions, width, config.rope_theta, device)
    frequencies = yarn_frequencies(
        width,
        config.rope_theta,
        factor=yarn.factor,
        original_length=yarn.original_length,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
    )
    return rotary_tables(
        num_positions,
        width,
        config.rope_theta,
        device,
        frequencies=frequencies,
        scale=yarn.attention_factor,
    )


def load_engine(
    folder: Path | str,
    *,
    num_slots: int,
    max_length: int,
    device: str = "cpu",
    dtype: str = "float32",
    numerics: str = "exact",
    kernels: str = "torch",
    block_length: int | None = None,
    memory_budget_bytes: int | None = None,
    self_test: bool = True,
) -> Engine:
    """Check a checkpoint folder, load it on ``device`` and make an engine for it.

    Memory is planned before the weights are read. Raises InputError for a faulty checkpoint or setting, or
    where weights and buffers do not fit. ``kernels``: ``torch`` or ``triton`` (kernels/operators).
    """
    config, weights = load_model(
        folder,
        num_cached=num_slots,
        max_length=max_length,
        device=device,
        dtype=dtype,
        numerics=numerics,
        kernels=kernels,
        block_length=block_length,
        memory_budget_bytes=memory_budget_bytes,
    )
    engine = Engine(
        config,
        weights,
        num_slots=num_slots,
        max_length=max_length,
        device=device,
        dtype=DTYPES[dtype],
        numerics=numerics,
        kernels=kernels,
        memory_budget_bytes=memory_budget_bytes,
    )
    if self_test and (engine.device.type == "cpu" or kernels == "triton"):
        engine.self_test()
    return engine
