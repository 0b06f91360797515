"""One verification: the walk from each root along drafted states that equal the target's own transitions.

The packed pass has computed the hidden rows of every node. The walk starts at the root, computes T(state) from the
state's own logits, moves on while the next state is a node, and stops otherwise: the last transition is a commit
that was not drafted and is free (methods compared in SPOT, arXiv 2610.22543, share this verifier). Given the
noise, T is a deterministic function of the state, so the walk visits exactly the states of the serialized run,
at any temperature; no ratio test is ever combined with shared noise.

``greedy_match`` is the one mode that leaves that path: a drafted state that equals the *argmax* next state is
accepted, and T is drawn only where nothing matched. Accepted commits are forced argmax choices, so the law is
biased, the more the better the drafter; it is there to measure that bias (SPOT).

The language-model head runs on the states that the walk visits, and there on the rows that predict masked
positions only. Legend: S samples, A samples still walking, L block length, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dlmgrid.kernels.logits import Choice, LogitsPass, Summary, choose, row_digests, summarize
from dlmgrid.workers.decoding.commit_rules import CommitRule
from dlmgrid.workers.decoding.confidence import confidence_of
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED, commit_hashes, num_masked
from dlmgrid.workers.decoding.tree import DraftTree


class Head(Protocol):
    """The language-model head: hidden rows [R, H] to fp32 logits [R, V], with -inf where no token may be chosen."""

    def logits(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionRule:
    """Everything T(state) depends on besides the logits.

    ``accepts_argmax``: a drafted state that equals the argmax next state is taken in place of T(state).
    ``logits_pass``: one pass for choice, summary and digest of each row; None: the twins, each where it is needed.
    """

    rule: CommitRule
    temperature: float
    noise: NoiseTable
    accepts_argmax: bool = False
    logits_pass: Callable[..., LogitsPass] | None = None


@dataclass(slots=True)
class WalkedSteps:
    """The transitions of one sample in one round, in order; one entry a step.

    ``commits``: (position in the block, token) pairs sorted by position; ``margins`` in the same order;
    ``digests``: the order-free 64-bit digest of the logits rows that predicted masked positions, as 16 hex digits.
    """

    commits: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    margins: list[tuple[float, ...]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


class SeenStep(NamedTuple):
    """One transition of A samples, with the summary of the R rows that predicted their masked positions.

    ``samples`` int64 [A], indices into the round; ``states`` int32 [A, L] before and ``following`` after the step;
    ``commit_counts`` int64 [A] before it; ``row_of`` int64 [R] into the A samples and ``positions`` int64 [R] into
    the block, ascending; ``summary`` of the R rows.
    """

    samples: Tensor
    states: Tensor
    following: Tensor
    commit_counts: Tensor
    row_of: Tensor
    positions: Tensor
    summary: Summary


class StalledError(RuntimeError):
    """A step that opened no position: the commit rule is broken, and the walk would never end."""


def walk(
    *,
    head: Head,
    transition: TransitionRule,
    hidden: Tensor,
    first_segment: Tensor,
    tree: DraftTree,
    commit_counts: Tensor,
    block_starts: Tensor,
    keys: Tensor,
    snapshots: Snapshots | None,
    snapshot_rows: Tensor,
    on_step: Callable[[SeenStep], None] | None = None,
    has_stopped: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, list[WalkedSteps]]:
    """Walk every sample's tree.

    Args:
        hidden: [N, L, H], rows of all nodes of the pass.
        first_segment: int64 [S], index in ``hidden`` of each root; a sample's nodes follow it in tree order.
        commit_counts: int64 [S], commits made in the block at the root.
        block_starts: int64 [S]; keys: int64 [S, 2].
        snapshots: receives the stale distributions of the last accepted node of each sample whose block is not
            complete; None where no drafter reads them.
        snapshot_rows: int64 [S], the row of ``snapshots`` that belongs to each sample.
        on_step: is shown every transition; for recording a run.
        has_stopped: maps samples int64 [A] and their states int32 [A, L] to whether the state ends the sample, bool
            [A]; the walk stops there as the serialized run does.

    Raises:
        FloatingPointError: a confidence is NaN or infinite, so no commit has a meaning.
        StalledError: the commit rule opened no position.

    Returns:
        The new roots int32 [S, L], and the steps of each sample.
    """
    num_samples = first_segment.shape[0]
    device = hidden.device
    roots = tree.tokens[:, 0].clone()
    root_masked = num_masked(roots)
    steps = [WalkedSteps() for _ in range(num_samples)]
    active = torch.arange(num_samples, device=device)
    node = torch.zeros(num_samples, dtype=torch.int64, device=device)
    while active.numel():
        states = tree.tokens[active, node]
        masked = states == MASKED
        row_of, position = masked.nonzero(as_tuple=True)
        logits = head.logits(hidden[first_segment[active] + node][masked])
        counts = commit_counts[active] + root_masked[active] - num_masked(states)
        noise_of = (keys[active][row_of], block_starts[active][row_of] + position, counts[row_of])
        gumbel, passed = None, None
        if transition.logits_pass is not None:
            row_keys, positions, row_counts = noise_of
            draws = transition.noise.draw_indices(row_counts)
            noise = (row_keys, int(Stream.TOKEN), positions, draws) if transition.temperature > 0 else None
            passed = transition.logits_pass(logits, transition.temperature, noise=noise)
        elif transition.temperature > 0:
            row_keys, positions, row_counts = noise_of
            gumbel = transition.noise.rows(row_keys, Stream.TOKEN, positions, row_counts, logits.shape[1])
        drawn = passed.choice if passed is not None else choose(logits, transition.temperature, gumbel)
        if not bool(torch.isfinite(drawn.probabilities).all()):
            raise FloatingPointError("the model's logits are not finite at a state of this item")
        confidence = confidence_of(transition.rule.confidence, logits, transition.temperature, drawn)
        step = _step(transition.rule, states, drawn, confidence, row_of, position)
        if transition.accepts_argmax and transition.temperature > 0:
            unperturbed = choose(logits, transition.temperature, torch.zeros_like(logits))
            confidence = confidence_of(
                transition.rule.confidence, logits, transition.temperature, unperturbed
            )
            argmax = _step(transition.rule, states, unperturbed, confidence, row_of, position)
            found = tree.find(active, argmax.following)
            step = _where(found >= 0, argmax, step)
        else:
            found = tree.find(active, step.following)
        digests = torch.zeros(active.shape[0], dtype=torch.int64, device=device).index_add_(
            0, row_of, commit_hashes(position, row_digests(logits) if passed is None else passed.digests)
        )
        _record(steps, active, step, digests)

        following = step.following
        if on_step is not None:
            summary = summarize(logits, transition.temperature) if passed is None else passed.summary
            on_step(SeenStep(active, states, following, counts, row_of, position, summary))
        roots[active] = following
        if snapshots is not None:
            ends = (found < 0) & (num_masked(following) > 0)
            rows = ends[row_of]
            if bool(ends.any()):
                snapshots.store(
                    snapshot_rows[active][ends],
                    masked[ends],
                    snapshot_rows[active][row_of[rows]],
                    position[rows],
                    summarize(logits[rows], transition.temperature)
                    if passed is None
                    else Summary(*(part[rows] for part in passed.summary)),
                )
        walks_on = found >= 0
        if has_stopped is not None:
            walks_on &= ~has_stopped(active, following)
        active, node = active[walks_on], found[walks_on]
    return roots, steps


class _Step(NamedTuple):
    """One step of A states: ``selected`` bool [A, L], the committed positions; ``following`` int32 [A, L], the next
    states; ``margins`` fp32 [A, L], the lead of each chosen token."""

    selected: Tensor
    following: Tensor
    margins: Tensor


def _where(is_first: Tensor, first: _Step, second: _Step) -> _Step:
    """``first`` for the states where bool [A] ``is_first`` holds, ``second`` elsewhere."""
    chosen = is_first[:, None]
    return _Step(
        torch.where(chosen, first.selected, second.selected),
        torch.where(chosen, first.following, second.following),
        torch.where(chosen, first.margins, second.margins),
    )


def _step(
    rule: CommitRule, states: Tensor, choice: Choice, of_rows: Tensor, row_of: Tensor, position: Tensor
) -> _Step:
    """Apply the commit rule to the tokens chosen at the masked positions of ``states`` int32 [A, L].

    ``of_rows`` fp32 [R] are the confidences of the R rows.
    """
    confidence = torch.full(states.shape, -torch.inf, device=states.device)
    confidence[row_of, position] = of_rows
    tokens = states.clone()
    tokens[row_of, position] = choice.tokens.to(torch.int32)
    masked = states == MASKED
    selected = rule.select(masked, confidence) & masked
    if not bool(selected.any(dim=1).all()):
        raise StalledError(f"decoder {rule.name!r} opened no position of a state with masks left")
    margins = torch.zeros(states.shape, device=states.device)
    margins[row_of, position] = choice.margins
    return _Step(selected, torch.where(selected, tokens, states), margins)


def _record(steps: list[WalkedSteps], active: Tensor, step: _Step, digests: Tensor) -> None:
    selected, following, margins = step
    commits: list[list[tuple[int, int, float]]] = [[] for _ in range(active.shape[0])]
    which, position = selected.nonzero(as_tuple=True)
    for row, at, token, margin in zip(
        which.tolist(),
        position.tolist(),
        following[which, position].tolist(),
        margins[which, position].tolist(),
        strict=True,
    ):
        commits[row].append((at, token, margin))
    for sample, made, digest in zip(active.tolist(), commits, digests.tolist(), strict=True):
        steps[sample].commits.append(tuple((at, token) for at, token, _ in made))
        steps[sample].margins.append(tuple(margin for _, _, margin in made))
        steps[sample].digests.append(f"{digest % 2**64:016x}")
