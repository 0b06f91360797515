"""One verification: the walk from each root along drafted states that equal the target's own transitions.

The packed pass has computed the hidden rows of every node. The walk starts at the root, computes T(state) from the
state's own logits, moves on while the next state is a node, and stops otherwise: the last transition is a commit
that was not drafted and is free (methods compared in SPOT, arXiv 2610.22543, share this verifier). Given the
noise, T is a deterministic function of the state, so the walk visits exactly the states of the serialized run,
at any temperature; no ratio test is ever combined with shared noise.

``greedy_match`` is the one mode that leaves that path: a drafted state that equals the *argmax* next state is
accepted, and T is drawn only where nothing matched. Accepted commits are forced argmax choices, so the law is
biased, the more the better the drafter; it is there to measure that bias (SPOT).

``product_tau`` is the other: product max-commit, named and not defined by SPOT's set variant. From y, a drafted state
that extends y is admissible where every new token is the target's own choice at y and the product of their
probabilities is at least τ; the largest admissible state is taken if it commits more than T(y). It trades exactness
for speed, so its rows claim no more than an approximation.

Which rows the language-model head runs on, and when, is the matter of ``reading.py``.

Legend: S samples, A samples still walking, L block length, R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dlmgrid.kernels.logits import Summary
from dlmgrid.workers.decoding.commit_rules import CommitRule
from dlmgrid.workers.decoding.reading import Head, Level, RowReader, TransitionRule
from dlmgrid.workers.decoding.sampling import Drawn
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED, commit_hashes, num_masked
from dlmgrid.workers.decoding.tree import DraftTree


@dataclass(slots=True)
class WalkedSteps:
    """The transitions of one sample in one round, in order; one entry a step.

    ``commits``: (position in the block, token) pairs sorted by position; ``margins`` in the same order;
    ``digests``: the order-free 64-bit digest of the logits rows that predicted masked positions, as 16 hex digits.
    ``argmax_by_step``: how many commits of each are the most probable token of their row.
    """

    commits: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    margins: list[tuple[float, ...]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    argmax_by_step: list[int] = field(default_factory=list)

    def part(self, first: int, stop: int) -> WalkedSteps:
        """Steps ``first`` to ``stop``."""
        own = slice(first, stop)
        return WalkedSteps(self.commits[own], self.margins[own], self.digests[own], self.argmax_by_step[own])


class SeenStep(NamedTuple):
    """One transition of A samples, with the summary of the R rows that predicted their masked positions.

    ``samples`` int64 [A], indices into the round; ``states`` int32 [A, L] before and ``following`` after the step;
    ``commit_counts`` int64 [A] before it; ``row_of`` int64 [R] into the A samples and ``positions`` int64 [R] into
    the block, ascending; ``summary`` of the R rows, ``hidden`` [R, H] what the head read there.
    """

    samples: Tensor
    states: Tensor
    following: Tensor
    commit_counts: Tensor
    row_of: Tensor
    positions: Tensor
    summary: Summary
    hidden: Tensor


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
    block_steps: Tensor | None = None,
    has_stopped: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, list[WalkedSteps]]:
    """Walk every sample's tree, to a state that is not drafted, or to one that completes the block.

    Args:
        hidden: [N, L, H], rows of all nodes of the pass.
        first_segment: int64 [S], index in ``hidden`` of each root; a sample's nodes follow it in tree order.
        commit_counts: int64 [S], commits made in the block at the root.
        block_starts: int64 [S]; keys: int64 [S, 2].
        snapshots: receives the stale distributions of the last accepted node of each sample whose block is not
            complete; None where no drafter reads them.
        snapshot_rows: int64 [S], the row of ``snapshots`` that belongs to each sample.
        on_step: is shown every transition; for recording a run.
        block_steps: int64 [S], steps of the block made before the root, for rules that depend on the step; None: 0.
        has_stopped: maps samples int64 [A] and their states int32 [A, L] to whether the state ends the sample, bool
            [A]; the walk stops there as the serialized run does.

    Raises:
        FloatingPointError: a confidence is NaN or infinite, so no commit has a meaning.
        StalledError: the commit rule opened no position.

    Returns:
        The new roots int32 [S, L], and the steps of each sample.
    """
    num_samples = first_segment.shape[0]
    device = first_segment.device
    rule = transition.rule
    first_steps = torch.zeros_like(commit_counts) if block_steps is None else block_steps
    num_walked = 0
    roots = tree.tokens[:, 0].clone()
    reader = RowReader(
        head=head,
        transition=transition,
        hidden=hidden,
        first_segment=first_segment,
        tree=tree,
        commit_counts=commit_counts,
        block_starts=block_starts,
        keys=keys,
    )
    steps = [WalkedSteps() for _ in range(num_samples)]
    if reader.is_ahead and on_step is None and transition.product_tau is None and rule.select_step is None:
        last = _walk_all(reader, transition, tree, roots, steps, has_stopped)
        if snapshots is not None:
            last.store(snapshots, snapshot_rows)
        return roots, steps
    active = torch.arange(num_samples, device=device)
    node = torch.zeros(num_samples, dtype=torch.int64, device=device)
    while active.numel():
        block_step = first_steps[active] + num_walked
        num_walked += 1
        level = reader.read(active, node, block_step)
        states = level.states
        step = _step(rule, states, _choose(level, level.drawn, level.is_argmax), block_step)
        if transition.product_tau is not None:
            step = _largest_admissible(tree.select(active), states, step.chosen, step, transition.product_tau)
        if transition.accepts_argmax and transition.temperature > 0:
            argmax = _step(rule, states, _choose(level, *level.likeliest()), block_step)
            found = tree.find(active, argmax.following)
            step = _where(found >= 0, argmax, step)
        else:
            found = tree.find(active, step.following)
        if rule.may_open_nothing:  # the state stays, the block's step counts on: the round ends
            found = torch.where(step.selected.any(dim=1), found, -1)
        digests = _state_digests(rule, level)
        _record(steps, active.tolist(), step, digests)

        following = step.following
        if on_step is not None:
            seen = (level.row_of, level.positions, level.summary(None), level.hidden(None))
            on_step(SeenStep(active, states, following, level.commit_counts, *seen))
        roots[active] = following
        if snapshots is not None:
            ends = (found < 0) & (num_masked(following) > 0)
            rows = ends[level.row_of]
            if bool(ends.any()):
                snapshots.store(
                    snapshot_rows[active][ends],
                    level.masked[ends],
                    snapshot_rows[active][level.row_of[rows]],
                    level.positions[rows],
                    level.summary(rows),
                    None if snapshots.hidden is None else level.hidden(rows).to(device),
                )
        walks_on = (found >= 0) & (num_masked(following) > 0)
        if has_stopped is not None:
            walks_on &= ~has_stopped(active, following)
        active, node = active[walks_on], found[walks_on]
    return roots, steps


def _state_digests(rule: CommitRule, level: Level) -> Tensor:
    """int64 [A]: of each state the bits of the rows that its step depends on."""
    hashes = commit_hashes(level.positions, level.digests)
    if rule.reads_first:
        is_later = torch.zeros_like(level.row_of, dtype=torch.bool)
        is_later[1:] = level.row_of[1:] == level.row_of[:-1]
        hashes = hashes.masked_fill(is_later, 0)
    return torch.zeros_like(level.commit_counts).index_add_(0, level.row_of, hashes)


class _Chosen(NamedTuple):
    """The tokens chosen at the masked positions of A states, everything [A, L]: ``tokens`` int32 (the state's own
    where nothing is masked), ``confidence`` fp32, what the rule compares (-inf there), ``probability`` fp32 of the
    token, ``margins`` fp32, ``is_argmax`` bool: whether the token is the row's most probable one."""

    tokens: Tensor
    confidence: Tensor
    probability: Tensor
    margins: Tensor
    is_argmax: Tensor


class _Step(NamedTuple):
    """One step of A states: ``selected`` bool [A, L], the committed positions; ``following`` int32 [A, L], the next
    states; ``chosen``, what was chosen at every masked position."""

    selected: Tensor
    following: Tensor
    chosen: _Chosen

    def at(self, states: Tensor) -> _Step:
        """The steps of some states, int64 [B]."""
        chosen = _Chosen(*(part.index_select(0, states) for part in self.chosen))
        return _Step(self.selected.index_select(0, states), self.following.index_select(0, states), chosen)


@dataclass(frozen=True, slots=True)
class _LastStates:
    """The last state of each walk whose block is not complete: ``samples`` int64 [E] and their places int64 [E] in
    ``level``."""

    level: Level
    samples: Tensor
    places: Tensor

    def store(self, snapshots: Snapshots, snapshot_rows: Tensor) -> None:
        """Keep what the pass said of these states as the samples' snapshots."""
        if not self.samples.numel():
            return
        level = self.level
        sample_of = torch.full((level.states.shape[0],), -1, dtype=torch.int64, device=self.samples.device)
        sample_of[self.places] = self.samples
        owners = sample_of.index_select(0, level.row_of)
        rows = (owners >= 0).nonzero().flatten()
        snapshots.store(
            snapshot_rows.index_select(0, self.samples),
            level.masked.index_select(0, self.places),
            snapshot_rows.index_select(0, owners.index_select(0, rows)),
            level.positions.index_select(0, rows),
            level.summary(rows),
            None if snapshots.hidden is None else level.hidden(rows).to(snapshots.hidden.device),
        )


def _walk_all(
    reader: RowReader,
    transition: TransitionRule,
    tree: DraftTree,
    roots: Tensor,
    steps: list[WalkedSteps],
    has_stopped: Callable[[Tensor, Tensor], Tensor] | None,
) -> _LastStates:
    """The walk where every node's rows are read: all transitions at once, then each sample's way through them.

    Fills ``roots`` [S, L] and ``steps``.
    """
    samples, nodes, level = reader.read_all()
    no_step = torch.zeros_like(nodes)
    step = _step(
        transition.rule, level.states, _choose(level, level.drawn, level.is_argmax, checks=False), no_step
    )
    following = step.following
    digests = _state_digests(transition.rule, level)
    left = num_masked(following)
    goes_on = left > 0
    if has_stopped is not None:
        goes_on &= ~has_stopped(samples, following)
    places: list[dict[int, int]] = [{} for _ in roots]
    for at, (sample, node) in enumerate(zip(samples.tolist(), nodes.tolist(), strict=True)):
        places[sample][node] = at
    reached, walks_on = following.cpu().numpy(), goes_on.tolist()
    visited: list[int] = []
    owners: list[int] = []
    ends: list[int] = []
    kept: list[int] = []
    for sample, (own, node_of) in enumerate(zip(places, tree.nodes_by_state(), strict=True)):
        at = own[0]
        visited.append(at)
        found = node_of.get(reached[at].tobytes())
        while found is not None and walks_on[at]:
            at = own[found]
            visited.append(at)
            found = node_of.get(reached[at].tobytes())
        owners += [sample] * (len(visited) - len(owners))
        ends.append(at)
        if found is None:
            kept.append(sample)
    walked = step
    if visited != list(range(len(walks_on))):  # a round without drafts visits all there is
        path = torch.tensor(visited, dtype=torch.int64, device=nodes.device)
        walked, digests = step.at(path), digests.index_select(0, path)
    if not _are_finite(walked.chosen.probability):
        raise FloatingPointError(NOT_FINITE)
    _record(steps, owners, walked, digests)
    last = torch.tensor(ends, dtype=torch.int64, device=nodes.device)
    roots.copy_(following.index_select(0, last))
    kept_samples = torch.tensor(kept, dtype=torch.int64, device=nodes.device)
    kept_places = last.index_select(0, kept_samples)
    unfinished = left.index_select(0, kept_places) > 0
    return _LastStates(level, kept_samples[unfinished], kept_places[unfinished])


NOT_FINITE = "the model's logits are not finite at a state of this item"


def _are_finite(probabilities: Tensor) -> bool:
    """Whether all are; their sum in fp64 is finite exactly then, and is one operation."""
    return math.isfinite(float(probabilities.sum(dtype=torch.float64)))


def _choose(level: Level, drawn: Drawn, is_argmax: Tensor, *, checks: bool = True) -> _Chosen:
    """What was drawn, by position. Raises FloatingPointError where a probability is not finite, if it ``checks``."""
    choice, states = drawn.choice, level.states
    if checks and not _are_finite(choice.probabilities):
        raise FloatingPointError(NOT_FINITE)
    masked = level.masked  # rows are in its order
    confidence = torch.full(states.shape, -torch.inf, device=states.device).masked_scatter_(
        masked, drawn.confidence
    )
    probability = torch.ones(states.shape, device=states.device).masked_scatter_(masked, choice.probabilities)
    tokens = states.masked_scatter(masked, choice.tokens.to(torch.int32))
    margins = torch.zeros(states.shape, device=states.device).masked_scatter_(masked, choice.margins)
    all_argmax = (~masked).masked_scatter_(masked, is_argmax)
    return _Chosen(tokens, confidence, probability, margins, all_argmax)


def _where(is_first: Tensor, first: _Step, second: _Step) -> _Step:
    """``first`` for the states where bool [A] ``is_first`` holds, ``second`` elsewhere."""
    chosen = is_first[:, None]
    return _Step(
        torch.where(chosen, first.selected, second.selected),
        torch.where(chosen, first.following, second.following),
        _Chosen(
            *(
                torch.where(chosen, ours, theirs)
                for ours, theirs in zip(first.chosen, second.chosen, strict=True)
            )
        ),
    )


def _step(rule: CommitRule, states: Tensor, chosen: _Chosen, block_step: Tensor) -> _Step:
    """Apply the commit rule to the tokens chosen at the masked positions of ``states`` int32 [A, L]."""
    masked = states == MASKED
    selected = rule.at_step(masked, chosen.confidence, block_step) & masked
    if not rule.may_open_nothing and not bool(selected.any(dim=1).all()):
        raise StalledError(f"decoder {rule.name!r} opened no position of a state with masks left")
    return _Step(selected, torch.where(selected, chosen.tokens, states), chosen)


def _largest_admissible(tree: DraftTree, states: Tensor, chosen: _Chosen, step: _Step, floor: float) -> _Step:
    """``step``, or the largest admissible drafted state of each sample where that commits more; of equals the first."""
    was_filled = (states != MASKED)[:, None]
    is_new = (tree.tokens != MASKED) & ~was_filled
    own = torch.where(is_new, chosen.tokens[:, None], torch.where(was_filled, states[:, None], MASKED))
    extends = tree.is_node() & (tree.tokens == own).all(dim=-1)
    log_probability = chosen.probability.double().log()[:, None]
    product = torch.where(is_new, log_probability, 0.0).sum(dim=-1)
    admissible = extends & (product >= math.log(floor))
    size = torch.where(admissible, is_new.sum(dim=-1), 0)
    largest = size.amax(dim=1, keepdim=True)
    best = (size == largest).to(torch.int8).argmax(dim=1)
    is_larger = largest.squeeze(1) > step.selected.sum(dim=1)
    rows = torch.arange(states.shape[0], device=states.device)
    drafted = _Step(is_new[rows, best], tree.tokens[rows, best], chosen)
    return _where(is_larger, drafted, step)


def _record(steps: list[WalkedSteps], samples: list[int], step: _Step, digests: Tensor) -> None:
    """Append the steps of A states, those of one sample in order, to the ``samples`` they belong to."""
    selected, following, chosen = step
    commits: list[list[tuple[int, int, float]]] = [[] for _ in samples]
    which, position = selected.nonzero(as_tuple=True)
    tokens, margins = following.tolist(), chosen.margins.tolist()
    for row, at in zip(which.tolist(), position.tolist(), strict=True):
        commits[row].append((at, tokens[row][at], margins[row][at]))
    num_argmax = (selected & chosen.is_argmax).sum(dim=1).tolist()
    for sample, made, digest, likeliest in zip(samples, commits, digests.tolist(), num_argmax, strict=True):
        steps[sample].commits.append(tuple((at, token) for at, token, _ in made))
        steps[sample].margins.append(tuple(margin for _, _, margin in made))
        steps[sample].digests.append(f"{digest % 2**64:016x}")
        steps[sample].argmax_by_step.append(likeliest)
