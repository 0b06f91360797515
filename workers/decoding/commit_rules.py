"""Commit rules: which masked positions a step fills. One function a rule, behind the table ``RULES``.

A rule sees, for each state, the confidence of the token chosen at every masked position, and nothing else; with
the choice of tokens it makes the transition T(state) a deterministic function of state and noise. Ties go to the
lowest position. Every rule but Dream's schedule commits at least one position of a state that has one masked.

Sources: ``low_confidence_static`` and ``low_confidence_dynamic`` of JetAstra/SDAR ``generate.py``; the threshold
comparisons of NVlabs/Fast-dLLM and inclusionAI/dInfer; the factor rule of Fast-dLLM (arXiv 2505.22618). The
confidence is what ``sampling`` says; by default the unfiltered (tempered) softmax, as in SDAR's OpenCompass port: a
name of the table ``COMPARISONS`` chooses how it is compared, not what it is. Schedules: ``schedules``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlmgrid.workers.cell import CERTAINTY, DEFAULT_COMPARISON, SCHEDULES, Cell
from dlmgrid.workers.decoding.sampling import DEFAULT_SAMPLING, Sampling, sampling_of
from dlmgrid.workers.decoding.schedules import even_split, linear_counts, linear_fractions, opened_by_masked


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRule:
    """A rule with its settings.

    ``select`` maps (masked bool [..., L], confidence fp32 [..., L]) to the committed positions, bool [..., L].
    ``max_commits`` bounds the positions of one step from above (None: the block's length). ``sampling`` is how tokens
    are drawn and positions rated. ``select_step`` is given, in place of ``select`` for the target's own steps, where
    a rule depends on the step of the block, int64 [...] from 0; ``may_open_nothing`` where such a step can leave
    the state as it is. ``sub_block_length``: sub-blocks of that width are filled one after another, 0 for none.
    ``reads_first``: a step depends on the row of the first masked position alone, so that only its bits count.
    ``is_static``: every step commits the ``max_commits`` most confident positions, and nothing else matters.
    ``level`` is about the confidence from which a position is committed beside others; None where there is no such.
    """

    name: str
    select: Callable[[Tensor, Tensor], Tensor]
    max_commits: int | None
    sampling: Sampling = DEFAULT_SAMPLING
    select_step: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    may_open_nothing: bool = False
    sub_block_length: int = 0
    reads_first: bool = False
    is_static: bool = False
    level: float | None = None

    @property
    def confidence(self) -> str:
        """The name of what the rule compares."""
        return self.sampling.confidence

    def at_step(self, masked: Tensor, confidence: Tensor, steps: Tensor) -> Tensor:
        """The positions that step ``steps`` int64 [...] of each state's block commits, bool [..., L]."""
        if self.select_step is None:
            return self.select(masked, confidence)
        return self.select_step(masked, confidence, steps)

    def eligible(self, masked: Tensor) -> Tensor:
        """The positions of states masked at bool [..., L] that the next step may fill."""
        return first_sub_block(masked, self.sub_block_length) if self.sub_block_length else masked


def top_positions(masked: Tensor, confidence: Tensor, count: int | Tensor) -> Tensor:
    """The ``count`` most confident masked positions (all of them where fewer are left), ties to the lowest.

    ``count`` is one number for all states, or int64 [...], one a state.
    """
    scores = _scores(masked, confidence)
    if isinstance(count, int) and count == 1:  # argmax takes the first of equals
        best = scores.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(masked).scatter_(-1, best, True) & masked
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.arange(masked.shape[-1], device=masked.device)
    picked = ranks < (count if isinstance(count, int) else count[..., None])
    return torch.zeros_like(masked).scatter(-1, order, picked.expand_as(masked)) & masked


def _scores(masked: Tensor, confidence: Tensor) -> Tensor:
    return torch.where(masked, confidence, -torch.inf)


def static(commits_per_step: int) -> CommitRule:
    """The K most confident positions a step; the last step of a block takes what is left."""
    if commits_per_step < 1:
        raise ValueError(f"commits_per_step is {commits_per_step}, it must be at least 1")

    def select(masked: Tensor, confidence: Tensor) -> Tensor:
        return top_positions(masked, confidence, commits_per_step)

    return CommitRule(name="static", select=select, max_commits=commits_per_step, is_static=True)


def _strictly_above(masked: Tensor, confidence: Tensor, value: float) -> Tensor:
    return confidence > value


def _at_least(masked: Tensor, confidence: Tensor, value: float) -> Tensor:
    return confidence >= value


def _near_the_best(masked: Tensor, confidence: Tensor, value: float) -> Tensor:
    best = _scores(masked, confidence).amax(dim=-1, keepdim=True)
    return confidence >= (best - 1e-5).clamp_max(value)


COMPARISONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "sdar": _strictly_above,  # c > τ: SDAR generate.py, LLaDA2, Fast-dLLM-v2
    "fast_dllm": _at_least,  # c ≥ τ: Fast-dLLM on LLaDA and Dream, Nemotron, LMDeploy
    "dinfer": _near_the_best,  # c ≥ min(τ, max c - 1e-5): dInfer
}
"""How published threshold decoders compare a confidence with τ: maps (masked, confidence, τ) to what passes."""


def threshold(value: float, min_commits: int = 1, comparison: str = DEFAULT_COMPARISON) -> CommitRule:
    """Every position that passes ``comparison`` with ``value``; the top ``min_commits`` where fewer pass.

    Raises ValueError for a value outside (0, 1) or a comparison that is not in ``COMPARISONS``. JetEngine's rule
    is left out on purpose: where too few pass it opens the leftmost positions, which no confidence-ordered
    drafter can follow and no other implementation does.
    """
    if not 0 < value < 1:
        raise ValueError(f"threshold is {value}, it must lie between 0 and 1")
    if comparison not in COMPARISONS:
        raise ValueError(f"comparison {comparison!r} is not one of {', '.join(COMPARISONS)}")
    passes = COMPARISONS[comparison]

    def select(masked: Tensor, confidence: Tensor) -> Tensor:
        passing = masked & passes(masked, confidence, value)
        enough = passing.sum(dim=-1, keepdim=True) >= min_commits
        return torch.where(enough, passing, top_positions(masked, confidence, min_commits))

    return CommitRule(name="threshold", select=select, max_commits=None, level=value)


def factor(value: float) -> CommitRule:
    """The n most confident positions, n the largest with (n + 1) · (1 - c(n)) ≤ ``value``; at least one.

    c(n) is the n-th largest confidence of the m masked positions. The product never falls as n grows, so the first
    failure ends the count. The published loop bumps its index once more when it stops at the m-th position,
    and so commits all m where only the last one failed; here the failing position stays masked, as the bound
    of Fast-dLLM's Theorem 1 asks.

    Raises ValueError for a value that is not positive.
    """
    if not value > 0:
        raise ValueError(f"factor is {value}, it must be positive")

    def select(masked: Tensor, confidence: Tensor) -> Tensor:
        length = masked.shape[-1]
        ranked, order = _scores(masked, confidence).double().sort(dim=-1, descending=True, stable=True)
        counts = torch.arange(1, length + 1, device=masked.device, dtype=torch.float64)
        passes = ranked >= 1 - value / (counts + 1)
        passes[..., 0] = True
        picked = passes.to(torch.int8).cumprod(dim=-1).bool()
        return torch.zeros_like(masked).scatter(-1, order, picked) & masked

    of_two = min(max(1 - value / 3, 0.01), 0.99)
    return CommitRule(name="factor", select=select, max_commits=None, level=of_two)


def entropy_bounded(bound: float) -> CommitRule:
    """The positions of least entropy, as many as keep the sum of their entropies below ``bound`` nats; at least one.

    A confidence c stands for the entropy -log c (``certainty`` of ``sampling``). Published rule: Labman42/JetEngine,
    scheduler.py, of SDAR's strategies. The branch of that name in JetAstra/SDAR ``generate.py`` takes p log p of the
    drawn token for the entropy, and marks positions with an index that is not defined there; the intended rule, which
    sums the entropies of the distributions, is what stands here.

    Raises ValueError for a bound that is not positive and finite.
    """
    if not 0 < bound < math.inf:
        raise ValueError(f"threshold is {bound}, the bound of the entropies must be positive and finite")

    def select(masked: Tensor, confidence: Tensor) -> Tensor:
        ranked, order = _scores(masked, confidence).double().sort(dim=-1, descending=True, stable=True)
        entropies = -ranked.clamp_min(torch.finfo(torch.float64).tiny).log()
        # summed as integers: no sum then depends on what else is in the pass
        spent = (entropies * _NAT).round().to(torch.int64).cumsum(dim=-1)
        picked = spent < bound * _NAT
        picked[..., 0] = True
        return torch.zeros_like(masked).scatter(-1, order, picked) & masked

    return CommitRule(name="entropy_bounded", select=select, max_commits=None)


_NAT = 2.0**40
"""Units of a nat in which entropies are summed."""


def scheduled(name: str, block_length: int, counts: tuple[int, ...]) -> CommitRule:
    """The most confident positions, ``counts[k]`` of them at step k of a block; all that is left after the last."""
    opened = torch.ones(block_length + 1, dtype=torch.int64)
    opened[: sum(counts) + 1] = opened_by_masked(sum(counts), counts)
    steps_open = torch.tensor([*counts, block_length])

    def select(masked: Tensor, confidence: Tensor) -> Tensor:
        return top_positions(masked, confidence, opened.to(masked.device)[masked.sum(dim=-1)])

    def select_step(masked: Tensor, confidence: Tensor, steps: Tensor) -> Tensor:
        count = steps_open.to(masked.device)[steps.clamp_max(len(counts))]
        return top_positions(masked, confidence, count)

    return CommitRule(
        name=name,
        select=select,
        max_commits=max(counts),
        select_step=select_step,
        may_open_nothing=0 in counts,
    )


def at_random(block_length: int, num_steps: int, first_step: int) -> CommitRule:
    """Dream's ``origin``: step k opens every masked position with the probability that the schedule gives.

    The confidence of a position is minus its uniform noise, so it opens where the noise lies below the probability.
    Drafters are told to expect the mean number, rounded down.
    """
    fractions = torch.tensor([*linear_fractions(num_steps)[first_step:], 1.0])
    counts = linear_counts(block_length - first_step, num_steps, first_step)
    expected = scheduled("dream", block_length, counts)

    def select_step(masked: Tensor, confidence: Tensor, steps: Tensor) -> Tensor:
        step = steps.clamp_max(len(fractions) - 1)
        probability = fractions.to(masked.device)[step][..., None]
        return masked & ((confidence > -probability) | (probability == 1))

    return replace(expected, max_commits=None, select_step=select_step, may_open_nothing=True)


def first_position_first(rule: CommitRule) -> CommitRule:
    """``rule``, but the first step of a block commits its first position alone, and ``rule`` counts from the next.

    A shifted model predicts a block's first position from the row before the block, which passes over the block
    alone do not compute: the pass that refreshes the cache commits it (NVlabs/Fast-dLLM,
    dream/model/generation_utils_block.py).
    """

    def first_only(masked: Tensor, picked: Tensor) -> Tensor:
        alone = torch.zeros_like(masked)
        alone[..., 0] = True
        return torch.where(masked[..., :1], alone & masked, picked)

    def select(masked: Tensor, confidence: Tensor) -> Tensor:
        return first_only(masked, rule.select(masked, confidence))

    def select_step(masked: Tensor, confidence: Tensor, steps: Tensor) -> Tensor:
        return first_only(masked, rule.at_step(masked, confidence, (steps - 1).clamp_min(0)))

    return replace(rule, select=select, select_step=select_step, is_static=False)


def sequential(commits_per_step: int) -> CommitRule:
    """The K leftmost masked positions a step, whatever their confidence."""
    if commits_per_step < 1:
        raise ValueError(f"commits_per_step is {commits_per_step}, it must be at least 1")

    def select(masked: Tensor, confidence: Tensor) -> Tensor:
        return masked & (masked.cumsum(dim=-1) <= commits_per_step)

    return CommitRule(name="sequential", select=select, max_commits=commits_per_step)


def first_sub_block(masked: Tensor, length: int) -> Tensor:
    """The masked positions, bool [..., L], of the leftmost run of ``length`` positions that has one."""
    parts = masked.unflatten(-1, (-1, length))
    open_parts = parts.any(dim=-1)
    first = open_parts & (open_parts.cumsum(dim=-1) == 1)
    chosen: Tensor = parts & first[..., None]
    return chosen.flatten(-2)


def in_sub_blocks(rule: CommitRule, length: int) -> CommitRule:
    """``rule`` on the leftmost sub-block that has masks, until it is full: Fast-dLLM-v2's ``generate``."""

    def select(masked: Tensor, confidence: Tensor) -> Tensor:
        return rule.select(first_sub_block(masked, length), confidence)

    bound = length if rule.max_commits is None else min(length, rule.max_commits)
    return replace(rule, select=select, max_commits=bound, sub_block_length=length, is_static=False)


RULES = ("static", "threshold", "factor", "entropy_bounded", "sequential", "causal", "llada", "dream")
"""``causal`` is the rule of an autoregressive run: the leftmost position, in a pass that sees its block causally."""


def build_rule(cell: Cell) -> CommitRule:
    """The commit rule of a cell. Raises ValueError for an unknown decoder, or a setting missing or out of range."""
    rule = replace(_base_rule(cell), sampling=sampling_of(cell))
    if cell.opens_first_position:
        rule = first_position_first(rule)
    if not cell.sub_block_length:
        return rule
    if cell.block_length % cell.sub_block_length:
        raise ValueError(
            f"sub_block_length {cell.sub_block_length} does not divide the block of {cell.block_length}"
        )
    return in_sub_blocks(rule, cell.sub_block_length)


def _base_rule(cell: Cell) -> CommitRule:
    if cell.decoder in SCHEDULES:
        return _scheduled_rule(cell)
    if cell.decoder == "causal":
        return replace(sequential(1), name="causal", reads_first=True)
    if cell.decoder == "sequential":
        return sequential(cell.commits_per_step)
    if cell.decoder == "static":
        return static(cell.commits_per_step)
    if cell.decoder == "threshold":
        if cell.threshold is None:
            raise ValueError("the threshold decoder needs a threshold")
        return threshold(cell.threshold, cell.commits_per_step, cell.comparison or DEFAULT_COMPARISON)
    if cell.decoder == "factor":
        if cell.factor is None:
            raise ValueError("the factor decoder needs a factor")
        return factor(cell.factor)
    if cell.decoder == "entropy_bounded":
        if cell.threshold is None:
            raise ValueError("the entropy_bounded decoder needs a threshold, the bound in nats")
        if cell.confidence != CERTAINTY:
            raise ValueError(f"the entropy_bounded decoder compares {CERTAINTY}, not {cell.confidence}")
        return entropy_bounded(cell.threshold)
    raise ValueError(f"decoder {cell.decoder!r} is not one of {', '.join(RULES)}")


def _scheduled_rule(cell: Cell) -> CommitRule:
    length = cell.block_length
    num_blocks = max(1, cell.gen_length // length)
    num_steps = (cell.steps or cell.gen_length) // num_blocks
    if cell.decoder == "llada":
        return scheduled("llada", length, even_split(length, num_steps))
    # where the refreshing pass has opened the first position, the schedule goes on from its second step
    first_step = int(cell.opens_first_position)
    if cell.confidence == "origin":
        return at_random(length, num_steps, first_step)
    return scheduled("dream", length, linear_counts(length - first_step, num_steps, first_step))
