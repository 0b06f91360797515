"""One recorded draft-free generation in memory, and reading many of them from disk.

A trajectory holds, for every step of the serialized run, the state that the step saw, what a drafter may know of
its pass (the same summary as ``decoding.snapshot``), and the commits it made. That is enough to replay any lossless
drafter, since it only ever sees states of the serialized run.

Legend: n steps over all blocks of a generation, L block length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dlmgrid.kernels.logits import NUM_CANDIDATES
from dlmgrid.workers.cell import CELL_FIELDS, Cell
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.trajectories.files import (
    open_trajectories,
    read_generation,
    recorded_places,
    wanted_columns,
)

Commits = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NextBlocks:
    """The fresh block after each step's own: ``snapshots`` of n rows, not valid at the end of the canvas, and the stop
    ids of the decode."""

    snapshots: Snapshots
    stop_token_ids: tuple[int, ...]


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
        hidden: fp32 [n, L, H], zero where the state is not masked; None unless asked for.
        window: what a window of two blocks says of the fresh next block beside each state; None unless asked for.
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
    hidden: Tensor | None = None
    window: NextBlocks | None = None

    @property
    def num_steps(self) -> int:
        return len(self.commits)

    @property
    def cell(self) -> Cell:
        """The draft-free cell that was recorded."""
        return Cell.from_dict({name: self.settings[name] for name in CELL_FIELDS})


def load_trajectories(path: Path | str, *, records: Sequence[str] = ()) -> Iterator[Trajectory]:
    """The trajectories of a recorded folder, or of one file, one generation at a time, each (cell, item, repeat) once.

    Args:
        records: what is needed beyond the steps: ``hidden``, ``window``.

    Raises:
        InputError: nothing is recorded there, a file is truncated, incomplete or of another schema version, or it
            lacks what ``records`` names.
    """
    for file_path, places in groupby(recorded_places(Path(path)), key=lambda place: place.path):
        file = open_trajectories(file_path)
        columns = wanted_columns(file_path, file, records)
        for place in places:
            yield _trajectory(file_path, read_generation(file_path, file, place.group, columns), records)


def load_generation(
    path: Path, file: pq.ParquetFile, group: int, *, records: Sequence[str] = ()
) -> Trajectory:
    """The trajectory in one row group of an open file. Raises InputError as :func:`load_trajectories`."""
    columns = wanted_columns(path, file, records)
    return _trajectory(path, read_generation(path, file, group, columns), records)


def _trajectory(path: Path, table: pa.Table, records: Sequence[str]) -> Trajectory:
    """The generation held by one row group. Raises InputError for values that no run can have."""
    try:
        found = _read(path, table, records)
        fault = _fault_of(found)
    except (ValueError, TypeError, IndexError, KeyError, RuntimeError, pa.ArrowInvalid) as error:
        raise _damaged(path, str(error)) from error
    if fault:
        raise _damaged(path, f"item {found.item_id!r}: {fault}")
    return found


def _damaged(path: Path, fault: str) -> InputError:
    return InputError(f"{path} is damaged ({' '.join(fault.split())}); record again into a new folder")


def _fault_of(found: Trajectory) -> str:
    """What is wrong with the values of a trajectory, "" where nothing is."""
    fault = _fault_of_distributions(found, found.states == MASKED)
    if not fault and found.window is not None:
        snapshots = found.window.snapshots
        fault = _fault_of_distributions(snapshots, snapshots.masked)
    if fault:
        return fault
    commits = [(step, *commit) for step, made in enumerate(found.commits) for commit in made]
    steps, positions, tokens = torch.tensor(commits, dtype=torch.int64).view(-1, 3).unbind(1)
    is_inside = (positions >= 0) & (positions < found.block_length)
    is_masked = found.states[steps, positions.clamp(0, found.block_length - 1)] == MASKED
    if not bool((is_inside & is_masked).all()):
        wrong = int((~(is_inside & is_masked)).nonzero()[0])
        return f"step {steps[wrong]} commits position {positions[wrong]}, which is not masked"
    following = found.states.clone()
    following[steps, positions] = tokens.to(following.dtype)
    goes_on = found.block_starts[1:] == found.block_starts[:-1]
    if bool((following[:-1][goes_on] != found.states[1:][goes_on]).any()):
        return "a state is not the one before it with its commits"
    return ""


def _fault_of_distributions(found: Trajectory | Snapshots, masked: Tensor) -> str:
    probabilities = found.probabilities[masked]
    if not bool(((probabilities >= 0) & (probabilities <= 1 + _ROUNDING)).all()):  # NaN is neither
        return "probabilities that are none"
    if not bool((probabilities[:, :-1] >= probabilities[:, 1:]).all()):
        return "candidates that are not in the order of their probabilities"
    if not bool((probabilities.sum(dim=1) <= 1 + _ROUNDING).all()):
        return "probabilities of more than 1 in all"
    if not bool((found.token_ids[masked] >= 0).all()):
        return "candidates that are no tokens"
    for name in ("entropy", "tail_mass", "log_tempered_mass"):
        if not bool(getattr(found, name)[masked].isfinite().all()):
            return f"{name} that is not finite"
    return ""


_ROUNDING = 1e-3


def _read(path: Path, table: pa.Table, records: Sequence[str]) -> Trajectory:
    constant = ("item_id", "repeat", "prompt_tokens", "num_steps", "cell_key", *CELL_FIELDS)
    row: dict[str, Any] = table.select(list(constant)).slice(0, 1).to_pylist()[0]
    num_steps, block_length = row["num_steps"], row["block_length"]
    if table["step"].to_pylist() != list(range(num_steps)):
        raise InputError(
            f"{path}: item {row['item_id']!r} has {table.num_rows} of its {num_steps} steps; record again "
            "into a new folder"
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
        hidden=_hidden(table, "hidden", masked) if "hidden" in records else None,
        window=_next_blocks(table, block_length, records) if "window" in records else None,
    )


def _hidden(table: pa.Table, name: str, masked: Tensor) -> Tensor:
    """fp32 [n, L, H] from the H numbers of each of the masked positions, in their order."""
    values = torch.from_numpy(_values(table, name).copy()).view(int(masked.sum()), -1)
    out = torch.zeros((*masked.shape, values.shape[1]))
    out[masked] = values
    return out


def _next_blocks(table: pa.Table, block_length: int, records: Sequence[str]) -> NextBlocks:
    lengths = table["next_entropy"].combine_chunks().value_lengths().to_pylist()
    exists = torch.tensor(lengths) > 0
    masked = exists[:, None].expand(-1, block_length).clone()

    def scattered(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        out = torch.zeros((*masked.shape, *shape), dtype=dtype)
        out[masked] = torch.from_numpy(_values(table, name).copy()).view(-1, *shape).to(dtype)
        return out

    snapshots = Snapshots.of(
        masked=masked,
        token_ids=scattered("next_token_ids", torch.int64, NUM_CANDIDATES),
        probabilities=scattered("next_probabilities", torch.float32, NUM_CANDIDATES),
        entropy=scattered("next_entropy", torch.float32),
        tail_mass=scattered("next_tail_mass", torch.float32),
        log_tempered_mass=scattered("next_log_tempered_mass", torch.float32),
        is_valid=exists,
        hidden=_hidden(table, "next_hidden", masked) if "hidden" in records else None,
    )
    return NextBlocks(snapshots=snapshots, stop_token_ids=tuple(table["stop_token_ids"][0].as_py()))


def _values(table: pa.Table, name: str) -> np.ndarray[Any, Any]:
    """The flat values of a list column."""
    values: np.ndarray[Any, Any] = table[name].combine_chunks().flatten().to_numpy()
    return values


def _integers(table: pa.Table, name: str) -> Tensor:
    return torch.tensor(table[name].to_pylist(), dtype=torch.int64)
