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

The language-model head runs on the states that the walk visits, and there on the rows that predict masked
positions only. Legend: S samples, A samples still walking, L block length, R rows, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dlmgrid.kernels.logits import Choice, LogitsPass, Summary, row_digests, summarize
from dlmgrid.workers.decoding.commit_rules import CommitRule
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.sampling import READS_STEP, Drawn, PositionNoise, draw, forbid_tokens
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
    ``product_tau``: the floor of product max-commit, None without it.
    ``end_token_ids``: the tokens that end a text, and then a turn, for the rule's policy on them.
    ``logits_pass``: one pass for choice, summary and digest of each row; None: the twins, each where it is needed.
    """

    rule: CommitRule
    temperature: float
    noise: NoiseTable
    accepts_argmax: bool = False
    product_tau: float | None = None
    end_token_ids: tuple[int, ...] = ()
    logits_pass: Callable[..., LogitsPass] | None = None


@dataclass(slots=True)
class WalkedSteps:
    """The transitions of one sample in one round, in order; one entry a step.

    ``commits``: (position in the block, token) pairs sorted by position; ``margins`` in the same order;
    ``digests``: the order-free 64-bit digest of the logits rows that predicted masked positions, as 16 hex digits.
    ``argmax_commits``: how many commits of all steps are the most probable token of their row.
    """

    commits: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    margins: list[tuple[float, ...]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    argmax_commits: int = 0


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
    device = hidden.device
    rule = transition.rule
    first_steps = torch.zeros_like(commit_counts) if block_steps is None else block_steps
    num_walked = 0
    roots = tree.tokens[:, 0].clone()
    root_masked = num_masked(roots)
    steps = [WalkedSteps() for _ in range(num_samples)]
    active = torch.arange(num_samples, device=device)
    node = torch.zeros(num_samples, dtype=torch.int64, device=device)
    while active.numel():
        states = tree.tokens[active, node]
        masked = states == MASKED
        row_of, position = masked.nonzero(as_tuple=True)
        read = hidden[first_segment[active] + node][masked]
        logits = forbid_tokens(head.logits(read), rule.sampling, transition.end_token_ids)
        block_step = first_steps[active] + num_walked
        num_walked += 1
        counts = commit_counts[active] + root_masked[active] - num_masked(states)
        row_keys, row_positions = keys[active][row_of], block_starts[active][row_of] + position
        gumbel, passed, choose_from = None, None, None
        if transition.logits_pass is not None:
            draw_indices = transition.noise.draw_indices(counts[row_of])
            noise = (row_keys, int(Stream.TOKEN), row_positions, draw_indices)
            one_pass = functools.partial(
                transition.logits_pass,
                temperature=transition.temperature,
                noise=noise if transition.temperature > 0 else None,
            )
            passed = one_pass(logits)
            choose_from = functools.partial(_chosen_in, one_pass, logits, passed)
        elif transition.temperature > 0:
            gumbel = transition.noise.rows(
                row_keys, Stream.TOKEN, row_positions, counts[row_of], logits.shape[1]
            )
        draws = (block_step if rule.sampling.confidence in READS_STEP else counts)[row_of]
        position_noise = PositionNoise(
            functools.partial(transition.noise.position_uniforms, row_keys, row_positions, draws),
            functools.partial(transition.noise.position_gumbels, row_keys, row_positions, draws),
        )
        choose_with = functools.partial(
            _choose,
            transition,
            logits,
            position_noise=position_noise,
            states=states,
            row_of=row_of,
            position=position,
        )
        drawn = choose_with(gumbel, choose_from)
        step = _step(rule, states, drawn, block_step)
        if transition.product_tau is not None:
            step = _largest_admissible(tree.select(active), states, drawn, step, transition.product_tau)
        if transition.accepts_argmax and transition.temperature > 0:
            argmax = _step(rule, states, choose_with(torch.zeros_like(logits)), block_step)
            found = tree.find(active, argmax.following)
            step = _where(found >= 0, argmax, step)
        else:
            found = tree.find(active, step.following)
        if rule.may_open_nothing:  # the state stays, the block's step counts on: the round ends
            found = torch.where(step.selected.any(dim=1), found, -1)
        digests = torch.zeros(active.shape[0], dtype=torch.int64, device=device).index_add_(
            0, row_of, commit_hashes(position, row_digests(logits) if passed is None else passed.digests)
        )
        _record(steps, active, step, digests)

        following = step.following
        if on_step is not None:
            summary = summarize(logits, transition.temperature) if passed is None else passed.summary
            on_step(SeenStep(active, states, following, counts, row_of, position, summary, read))
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
                    read[rows],
                )
        walks_on = (found >= 0) & (num_masked(following) > 0)
        if has_stopped is not None:
            walks_on &= ~has_stopped(active, following)
        active, node = active[walks_on], found[walks_on]
    return roots, steps


def _chosen_in(
    one_pass: Callable[[Tensor], LogitsPass], logits: Tensor, passed: LogitsPass, filtered: Tensor
) -> Choice:
    """The choice from ``filtered``: that of ``passed``, the pass over ``logits``, where nothing was filtered."""
    return passed.choice if filtered is logits else one_pass(filtered).choice


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


def _choose(
    transition: TransitionRule,
    logits: Tensor,
    gumbel: Tensor | None,
    choose_from: Callable[[Tensor], Choice] | None = None,
    *,
    position_noise: PositionNoise,
    states: Tensor,
    row_of: Tensor,
    position: Tensor,
) -> _Chosen:
    """Draw a token at every masked position. Raises FloatingPointError where a probability is not finite."""
    drawn: Drawn = draw(
        logits,
        transition.rule.sampling,
        transition.temperature,
        gumbel,
        position_noise,
        transition.end_token_ids,
        choose_from=choose_from,
    )
    choice = drawn.choice
    if not bool(torch.isfinite(choice.probabilities).all()):
        raise FloatingPointError("the model's logits are not finite at a state of this item")
    confidence = torch.full(states.shape, -torch.inf, device=states.device)
    confidence[row_of, position] = drawn.confidence
    probability = torch.ones(states.shape, device=states.device)
    probability[row_of, position] = choice.probabilities
    tokens = states.clone()
    tokens[row_of, position] = choice.tokens.to(torch.int32)
    margins = torch.zeros(states.shape, device=states.device)
    margins[row_of, position] = choice.margins
    is_argmax = states != MASKED
    is_argmax[row_of, position] = logits.gather(1, choice.tokens[:, None]).squeeze(1) == logits.amax(dim=1)
    return _Chosen(tokens, confidence, probability, margins, is_argmax)


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


def _record(steps: list[WalkedSteps], active: Tensor, step: _Step, digests: Tensor) -> None:
    selected, following, chosen = step
    commits: list[list[tuple[int, int, float]]] = [[] for _ in range(active.shape[0])]
    which, position = selected.nonzero(as_tuple=True)
    for row, at, token, margin in zip(
        which.tolist(),
        position.tolist(),
        following[which, position].tolist(),
        chosen.margins[which, position].tolist(),
        strict=True,
    ):
        commits[row].append((at, token, margin))
    num_argmax = (selected & chosen.is_argmax).sum(dim=1).tolist()
    for sample, made, digest, likeliest in zip(
        active.tolist(), commits, digests.tolist(), num_argmax, strict=True
    ):
        steps[sample].commits.append(tuple((at, token) for at, token, _ in made))
        steps[sample].margins.append(tuple(margin for _, _, margin in made))
        steps[sample].digests.append(f"{digest % 2**64:016x}")
        steps[sample].argmax_commits += likeliest
