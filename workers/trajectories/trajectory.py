"""One recorded draft-free generation in memory, and reading many of them from disk.

A trajectory holds, for every step of the serialized run, the state that the step saw, what a drafter may know of
its pass (the same summary as ``decoding.snapshot``), and the commits it made. That is enough to replay any lossless
drafter, since it only ever sees states of the serialized run.

Legend: n steps over all blocks of a generation, L block length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dlmgrid.kernels.logits import NUM_CANDIDATES
from dlmgrid.workers.cell import CELL_FIELDS, Cell
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.trajectories.files import open_trajectories, read_generation, trajectory_files

Commits = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """The steps of one generation, in order.

    Attributes:
        key: the two 32-bit noise key words of item and repeat.
        block_starts: int64 [n], absolute position of the block that each step worked on.
        states: int32 [n, L], the state each step saw; -1 where masked.
        commit_counts: int64 [n], commits made in the block before the step (its prompt tail not counted).
        token_ids: int64 [n, L, 32]; probabilities: fp32 [n, L, 32], as ``kernels.logits.Summary`` orders them.
        entropy, tail_mass, log_tempered_mass: fp32 [n, L]. Values are zero where the state is not masked.
        commits: per step its (position in the block, token) pairs, sorted by position.
        settings: the fields of the draft-free ``Cell``, with its ``cell_key``.
    """

    item_id: str
    repeat: int
    key: tuple[int, int]
    prompt_tokens: int
    block_length: int
    temperature: float
    block_starts: Tensor
    states: Tensor
    commit_counts: Tensor
    token_ids: Tensor
    probabilities: Tensor
    entropy: Tensor
    tail_mass: Tensor
    log_tempered_mass: Tensor
    commits: tuple[Commits, ...]
    settings: dict[str, Any]

    @property
    def num_steps(self) -> int:
        return len(self.commits)

    @property
    def cell(self) -> Cell:
        """The draft-free cell that was recorded."""
        return Cell.from_dict({name: self.settings[name] for name in CELL_FIELDS})


def load_trajectories(path: Path | str) -> Iterator[Trajectory]:
    """The trajectories of a recorded folder, or of one file, one generation at a time.

    Raises:
        InputError: nothing is recorded there, or a file is truncated, incomplete or of another schema version.
    """
    for file_path in trajectory_files(Path(path)):
        file = open_trajectories(file_path)
        for group in range(file.num_row_groups):
            yield _trajectory(file_path, read_generation(file_path, file, group))


def _trajectory(path: Path, table: pa.Table) -> Trajectory:
    """The generation held by one row group."""
    first = table.select([name for name in table.column_names if name not in _PER_STEP]).slice(0, 1)
    row: dict[str, Any] = first.to_pylist()[0]
    num_steps, block_length = row["num_steps"], row["block_length"]
    if table["step"].to_pylist() != list(range(num_steps)):
        raise InputError(
            f"{path}: item {row['item_id']!r} has {table.num_rows} of its {num_steps} steps; record it again"
        )
    states = torch.from_numpy(_values(table, "state").reshape(num_steps, block_length).copy())
    masked = states == MASKED
    settings = {name: row[name] for name in ("cell_key", *CELL_FIELDS)} | {"seed": int(row["seed"])}

    def scattered(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        out = torch.zeros((num_steps, block_length, *shape), dtype=dtype)
        out[masked] = torch.from_numpy(_values(table, name).copy()).view(-1, *shape).to(dtype)
        return out

    return Trajectory(
        item_id=row["item_id"],
        repeat=row["repeat"],
        key=NoiseTable(settings["seed"], settings["noise"]).key(row["item_id"], row["repeat"]),
        prompt_tokens=row["prompt_tokens"],
        block_length=block_length,
        temperature=row["temperature"],
        block_starts=_integers(table, "block_start"),
        states=states,
        commit_counts=_integers(table, "commit_count"),
        token_ids=scattered("token_ids", torch.int64, NUM_CANDIDATES),
        probabilities=scattered("probabilities", torch.float32, NUM_CANDIDATES),
        entropy=scattered("entropy", torch.float32),
        tail_mass=scattered("tail_mass", torch.float32),
        log_tempered_mass=scattered("log_tempered_mass", torch.float32),
        commits=tuple(
            tuple(zip(positions, tokens, strict=True))
            for positions, tokens in zip(
                table["commit_positions"].to_pylist(), table["commit_tokens"].to_pylist(), strict=True
            )
        ),
        settings=settings,
    )


_PER_STEP: Sequence[str] = (
    "step", "block_start", "commit_count", "state", "token_ids", "probabilities", "entropy", "tail_mass",
    "log_tempered_mass", "commit_positions", "commit_tokens",
)  # fmt: skip


def _values(table: pa.Table, name: str) -> np.ndarray[Any, Any]:
    """The flat values of a list column."""
    values: np.ndarray[Any, Any] = table[name].combine_chunks().flatten().to_numpy()
    return values


def _integers(table: pa.Table, name: str) -> Tensor:
    return torch.tensor(table[name].to_pylist(), dtype=torch.int64)
