"""Training examples of an order model that reads tokens: recorded steps kept once, examples as pairs of them.

For a stale snapshot of step t and a depth d ≥ 1, the virtual state is the one that step t + d saw; its inputs stay
those of the snapshot. What is learnt is all that step t + d recorded: the positions that it fills, the tokens there,
and the target's distribution at every position still masked. Steps that complete the block are left out, as for
:mod:`~dlmgrid.workers.drafting.order_examples`.

A step takes 6 KB at a block length of 32 (log probabilities fp16, ids int32), and 64 H bytes more with hidden states
(bf16): 8,000 generations of 192 tokens 10 GB, and 67 GB with hidden states of size 576.

Legend: N recorded steps, E examples, B of them in a batch, L block length, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from dlmgrid.kernels.logits import NUM_CANDIDATES
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.drafting.order_examples import MAX_DEPTH, check_split, is_held_out
from dlmgrid.workers.drafting.stale_roots import root_steps, steps_left
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.trajectories.files import Place, open_trajectories, recorded_places
from dlmgrid.workers.trajectories.trajectory import Trajectory, load_generation

_LOG_FLOOR = -20.0
_NUM_READERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenExamples:
    """Recorded steps, and which of them are examples.

    Attributes:
        states, following: int32 [N, L], what each step saw and what it left; token_ids: int32 and log_probabilities:
            fp16 [N, L, 32], floored at -20; entropy, tail_mass: fp32 [N, L]; hidden: bf16 [N, L, H] or None. Zero
            where not masked.
        snapshots, at: int64 [E], the stale step and the one that sees the virtual state; depths: int64 [E], always on
            the CPU.
    """

    states: Tensor
    following: Tensor
    token_ids: Tensor
    log_probabilities: Tensor
    entropy: Tensor
    tail_mass: Tensor
    hidden: Tensor | None
    snapshots: Tensor
    at: Tensor
    depths: Tensor

    @property
    def num_examples(self) -> int:
        return int(self.depths.shape[0])

    @property
    def num_bytes(self) -> int:
        """What :meth:`to` takes on a device."""
        return sum(part.nbytes for name, part in self._tensors().items() if name != "depths")

    def _tensors(self) -> dict[str, Tensor]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in found.items() if part is not None}

    def to(self, device: torch.device) -> TokenExamples:
        """The same on ``device``, ``depths`` apart."""
        return replace(
            self, **{name: part.to(device) for name, part in self._tensors().items() if name != "depths"}
        )

    def steps(self, which: Tensor, device: torch.device, *, with_hidden: bool = True) -> Snapshots:
        """What the recorded steps ``which`` (int64 [B]) summarised, as snapshots on ``device``."""
        probabilities = self.log_probabilities[which].to(device).float().exp()
        masked = self.states[which].to(device) == MASKED
        return Snapshots.of(
            masked=masked,
            token_ids=self.token_ids[which].to(device).long(),
            probabilities=torch.where(masked[..., None], probabilities, 0.0),
            entropy=self.entropy[which].to(device),
            tail_mass=self.tail_mass[which].to(device),
            log_tempered_mass=self.tail_mass[which].to(device),  # of no meaning here
            is_valid=masked.any(dim=1),
            hidden=self.hidden[which].to(device).float() if self.hidden is not None and with_hidden else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A generation and where its steps go."""

    place: Place
    first: int
    num_steps: int


def load_token_examples(
    path: Path, *, hidden: bool, complete: bool = False, say: Callable[[str], None] = print
) -> tuple[TokenExamples, TokenExamples]:
    """The examples of a recorded folder (or file): of training and of held-out items, one in ten. With ``complete``
    steps that complete a block are examples too.

    Raises:
        InputError: nothing is recorded, hidden states are asked for and were not, blocks differ in length, one of the
            two parts holds no example.
    """
    places = recorded_places(path)
    groups: list[list[Place]] = [[], []]
    for place in places:
        groups[is_held_out(place.key.item_id)].append(place)
    check_split({place.key.item_id for place in places})
    say(f"reading {len(places)} recorded generations")
    training, held_out = (_load(group, hidden=hidden, complete=complete) for group in groups)
    if training.states.shape[1] != held_out.states.shape[1]:
        raise InputError("the recorded runs have blocks of several lengths; a model is trained on one")
    return training, held_out


def _load(places: Sequence[Place], *, hidden: bool, complete: bool) -> TokenExamples:
    records = ("hidden",) if hidden else ()
    parts: list[list[_Part]] = []
    num_steps = 0
    for path, of_file in groupby(places, key=lambda place: place.path):
        metadata = open_trajectories(path).metadata
        parts.append([])
        for place in of_file:
            count = metadata.row_group(place.group).num_rows
            parts[-1].append(_Part(place=place, first=num_steps, num_steps=count))
            num_steps += count
    sample = places[0]
    first = load_generation(sample.path, open_trajectories(sample.path), sample.group, records=records)
    examples = _empty(num_steps, first.block_length, None if first.hidden is None else first.hidden.shape[-1])

    def read(of_file: Sequence[_Part]) -> list[tuple[Tensor, Tensor, Tensor]]:
        path = of_file[0].place.path
        file = open_trajectories(path)
        runs = (load_generation(path, file, part.place.group, records=records) for part in of_file)
        return [
            _keep(run, examples, part.first, complete=complete)
            for run, part in zip(runs, of_file, strict=True)
        ]

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        pairs = [pair for found in pool.map(read, parts) for pair in found]
    snapshots, at, depths = (torch.cat(column) for column in zip(*pairs, strict=True))
    if not depths.numel():
        raise InputError("the recorded runs hold no step to learn from: their blocks take one or two steps")
    return replace(examples, snapshots=snapshots, at=at, depths=depths)


def _empty(num_steps: int, length: int, hidden_size: int | None) -> TokenExamples:
    none = torch.zeros(0, dtype=torch.int64)
    shape = (num_steps, length)
    return TokenExamples(
        states=torch.full(shape, MASKED, dtype=torch.int32),
        following=torch.full(shape, MASKED, dtype=torch.int32),
        token_ids=torch.zeros((*shape, NUM_CANDIDATES), dtype=torch.int32),
        log_probabilities=torch.zeros((*shape, NUM_CANDIDATES), dtype=torch.float16),
        entropy=torch.zeros(shape),
        tail_mass=torch.zeros(shape),
        hidden=None if hidden_size is None else torch.zeros((*shape, hidden_size), dtype=torch.bfloat16),
        snapshots=none,
        at=none,
        depths=none,
    )


def _keep(
    run: Trajectory, examples: TokenExamples, first: int, *, complete: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the steps of a run behind ``first``; returns snapshots, steps and depths of its examples."""
    if run.block_length != examples.states.shape[1]:
        found = sorted({run.block_length, examples.states.shape[1]})
        raise InputError(f"the recorded runs have blocks of {found} tokens; a model is trained on one length")
    own = slice(first, first + run.num_steps)
    examples.states[own] = run.states
    commits = [(step, *commit) for step, some in enumerate(run.commits) for commit in some]
    at_step, positions, tokens = torch.tensor(commits).view(-1, 3).T
    following = run.states.clone()
    following[at_step, positions] = tokens.to(torch.int32)
    examples.following[own] = following
    examples.token_ids[own] = run.token_ids.to(torch.int32)
    examples.log_probabilities[own] = run.probabilities.log().clamp_min(_LOG_FLOOR).half()
    examples.entropy[own] = run.entropy
    examples.tail_mass[own] = run.tail_mass
    if examples.hidden is not None:
        assert run.hidden is not None
        examples.hidden[own] = run.hidden.bfloat16()
    steps = root_steps(run)
    counts = (steps_left(run)[steps] - int(not complete)).clamp(max=MAX_DEPTH)
    snapshot = (steps - 1).repeat_interleave(counts)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    depths = torch.arange(snapshot.numel()) - starts + 1
    return first + snapshot, first + snapshot + depths, depths
