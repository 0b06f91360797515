"""Recording: every step of a draft-free decode, kept per generation and written as one Parquet file a unit.

A file has one row group a generation, so that reading needs the memory of one. It is written before the unit's
rows are, under a name that follows from the unit, hence a committed unit always has its trajectories and doing it
again replaces them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from dlmgrid.kernels.logits import Summary
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.decoder import Prompt
from dlmgrid.workers.decoding.verification import SeenStep
from dlmgrid.workers.partial_files import partial_path
from dlmgrid.workers.tables import trajectory_schema

_Array = np.ndarray[Any, Any]


RECORDABLE = ("window", "hidden")
"""What may be recorded beyond the steps: the fresh next block beside every state, and hidden states."""


def _nothing() -> _Array:
    return np.zeros(0, np.float32)


@dataclass(kw_only=True, slots=True)
class _Step:
    """One step of one sample; m masked positions. The names are those of the table's columns."""

    block_start: int
    commit_count: int
    state: _Array  # int32 [L]
    token_ids: _Array  # int32 [m * 32]
    probabilities: _Array  # fp32 [m * 32]
    entropy: _Array  # fp32 [m]
    tail_mass: _Array
    log_tempered_mass: _Array
    commit_positions: _Array  # int32 [commits]
    commit_tokens: _Array
    hidden: _Array  # fp32 [m * H], empty where not recorded
    # of the fresh next block; L times as many, empty where not recorded or past the canvas
    next_token_ids: _Array = field(default_factory=_nothing)
    next_probabilities: _Array = field(default_factory=_nothing)
    next_entropy: _Array = field(default_factory=_nothing)
    next_tail_mass: _Array = field(default_factory=_nothing)
    next_log_tempered_mass: _Array = field(default_factory=_nothing)
    next_hidden: _Array = field(default_factory=_nothing)


class TrajectoryRecorder:
    """Keeps the steps of the prompts it is shown; a prompt that starts again is recorded anew.

    Args:
        records: what to keep beyond the steps, names of ``RECORDABLE``. A ``window`` is kept where the decoder shows
            it (``DecodeSettings.records_window``).
        stop_token_ids: of the decode; replay of a window needs them.
    """

    def __init__(self, records: Sequence[str] = (), stop_token_ids: Sequence[int] = ()) -> None:
        self.records_window = "window" in records
        self.records_hidden = "hidden" in records
        self.stop_token_ids = tuple(stop_token_ids)
        self._steps: dict[tuple[str, int], list[_Step]] = {}
        self._prompts: dict[tuple[str, int], Prompt] = {}

    def start(self, prompt: Prompt) -> None:
        """A prompt begins."""
        self._steps[prompt.item_id, prompt.repeat] = []
        self._prompts[prompt.item_id, prompt.repeat] = prompt

    def record(self, prompts: Sequence[Prompt], block_starts: Tensor, step: SeenStep) -> None:
        """Keep one transition of each sample of a round."""
        summary = step.summary
        row_of = step.row_of.cpu().numpy()
        token_ids, probabilities = _numpy(summary.token_ids, np.int32), _numpy(summary.probabilities)
        entropy, tail = _numpy(summary.entropy), _numpy(summary.tail_mass)
        log_tempered = _numpy(summary.log_tempered_mass)
        states, following = _numpy(step.states), _numpy(step.following)
        hidden = _numpy(step.hidden.float()) if self.records_hidden else None
        starts, counts = block_starts.tolist(), step.commit_counts.tolist()
        for index, sample in enumerate(step.samples.tolist()):
            prompt, rows = prompts[sample], row_of == index
            committed = np.flatnonzero(states[index] != following[index]).astype(np.int32)
            self._steps[prompt.item_id, prompt.repeat].append(
                _Step(
                    block_start=starts[sample],
                    commit_count=counts[index],
                    state=states[index].copy(),
                    token_ids=token_ids[rows].reshape(-1),
                    probabilities=probabilities[rows].reshape(-1),
                    entropy=entropy[rows],
                    tail_mass=tail[rows],
                    log_tempered_mass=log_tempered[rows],
                    commit_positions=committed,
                    commit_tokens=following[index][committed],
                    hidden=_nothing() if hidden is None else hidden[rows].reshape(-1),
                )
            )

    def record_next(self, prompt: Prompt, summary: Summary, hidden: Tensor) -> None:
        """Keep the L rows of the fresh next block behind the state of the prompt's last recorded step."""
        step = self._steps[prompt.item_id, prompt.repeat][-1]
        step.next_token_ids = _numpy(summary.token_ids, np.int32).reshape(-1)
        step.next_probabilities = _numpy(summary.probabilities).reshape(-1)
        step.next_entropy = _numpy(summary.entropy)
        step.next_tail_mass = _numpy(summary.tail_mass)
        step.next_log_tempered_mass = _numpy(summary.log_tempered_mass)
        if self.records_hidden:
            step.next_hidden = _numpy(hidden.float()).reshape(-1)

    def write(self, path: Path, cell: Cell, keys: Sequence[tuple[str, int]]) -> None:
        """Write the generations of ``keys`` (item, repeat), whole or not at all.

        Raises KeyError for a key that was never decoded.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(path)
        schema = trajectory_schema(window=self.records_window, hidden=self.records_hidden)
        paths = [f"{c.name}.list.element" if pa.types.is_list(c.type) else c.name for c in schema]
        split = [column for column in paths if "probabilities" in column]  # a third smaller, no bit lost
        with pq.ParquetWriter(
            partial,
            schema,
            compression="zstd",
            version="2.6",
            use_byte_stream_split=split,
            use_dictionary=[column for column in paths if column not in split],
        ) as writer:
            for key in keys:
                table = self._table(schema, cell, self._prompts[key], self._steps[key])
                writer.write_table(table, row_group_size=max(1, table.num_rows))
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)

    def _table(self, schema: pa.Schema, cell: Cell, prompt: Prompt, steps: Sequence[_Step]) -> pa.Table:
        constant: Mapping[str, Any] = cell.to_dict() | {
            "cell_key": cell.cell_key,
            "seed": str(cell.seed),
            "item_id": prompt.item_id,
            "repeat": prompt.repeat,
            "prompt_tokens": len(prompt.token_ids),
            "num_steps": len(steps),
        }
        columns = []
        for column in schema:
            if column.name in constant:
                columns.append(pa.repeat(pa.scalar(constant[column.name], column.type), len(steps)))
            elif column.name == "stop_token_ids":
                stops = np.array(self.stop_token_ids, np.int32)
                columns.append(_lists([stops] * len(steps), column.type))
            elif column.name == "step":
                columns.append(pa.array(range(len(steps)), column.type))
            elif pa.types.is_list(column.type):
                columns.append(_lists([getattr(step, column.name) for step in steps], column.type))
            else:
                columns.append(pa.array([getattr(step, column.name) for step in steps], column.type))
        return pa.Table.from_arrays(columns, schema=schema)


def _numpy(values: Tensor, dtype: Any = None) -> _Array:
    array: _Array = values.cpu().numpy()
    return array if dtype is None else array.astype(dtype)


def _lists(arrays: Sequence[_Array], kind: pa.DataType) -> pa.Array:
    """A list column from one array a row, without going through Python numbers."""
    offsets = np.concatenate(([0], np.cumsum([len(array) for array in arrays]))).astype(np.int32)
    values = pa.array(np.concatenate(arrays), kind.value_type, safe=False)
    return pa.ListArray.from_arrays(offsets, values, type=kind)
