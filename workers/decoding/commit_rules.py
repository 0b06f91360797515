"""Commit rules: which masked positions a step fills. One function a rule, behind the table ``RULES``.

A rule sees, for each state, the confidence of the token chosen at every masked position, and nothing else; with
the choice of tokens it makes the transition T(state) a deterministic function of state and noise. Ties go to the
lowest position. Every rule commits at least one position of a state that has one masked.

Sources: ``low_confidence_static`` and ``low_confidence_dynamic`` of JetAstra/SDAR ``generate.py``; the threshold
comparisons of NVlabs/Fast-dLLM and inclusionAI/dInfer; the factor rule of Fast-dLLM (arXiv 2505.22618). The
confidence is always taken from an unfiltered softmax, as SDAR's OpenCompass port does (which one:
:mod:`~dlmgrid.workers.decoding.confidence`); a name of the table ``COMPARISONS`` chooses how it is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlmgrid.workers.cell import DEFAULT_COMPARISON, DEFAULT_CONFIDENCE, Cell


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRule:
    """A rule with its settings.

    ``select`` maps (masked bool [..., L], confidence fp32 [..., L]) to the committed positions, bool [..., L].
    ``max_commits`` bounds the positions of one step from above (None: the block's length). ``confidence`` names what
    the rule compares. ``sub_block_length``: sub-blocks of that width are filled one after another, 0 for none.
    """

    name: str
    select: Callable[[Tensor, Tensor], Tensor]
    max_commits: int | None
    confidence: str = DEFAULT_CONFIDENCE
    sub_block_length: int = 0

    def eligible(self, masked: Tensor) -> Tensor:
        """The positions of states masked at bool [..., L] that the next step may fill."""
        return first_sub_block(masked, self.sub_block_length) if self.sub_block_length else masked


def top_positions(masked: Tensor, confidence: Tensor, count: int) -> Tensor:
    """The ``count`` most confident masked positions (all of them where fewer are left), ties to the lowest."""
    scores = torch.where(masked, confidence, torch.full_like(confidence, -torch.inf))
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    picked = torch.zeros_like(masked).scatter(-1, order, True)
    return picked & masked


def static(commits_per_step: int) -> CommitRule:
    """The K most confident positions a step; the last step of a block takes what is left."""
    if commits_per_step < 1:
        raise ValueError(f"commits_per_step is {commits_per_step}, it must be at least 1")

    def select(masked: Tensor, confidence: Tensor) -> Tensor:
        return top_positions(masked, confidence, commits_per_step)

    return CommitRule(name="static", select=select, max_commits=commits_per_step)


def _strictly_above(masked: Tensor, confidence: Tensor, value: float) -> Tensor:
    return confidence > value


def _at_least(masked: Tensor, confidence: Tensor, value: float) -> Tensor:
    return confidence >= value


def _near_the_best(masked: Tensor, confidence: Tensor, value: float) -> Tensor:
    best = torch.where(masked, confidence, torch.full_like(confidence, -torch.inf)).amax(dim=-1, keepdim=True)
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

    return CommitRule(name="threshold", select=select, max_commits=None)


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
        scores = torch.where(masked, confidence, torch.full_like(confidence, -torch.inf)).double()
        ranked, order = scores.sort(dim=-1, descending=True, stable=True)
        counts = torch.arange(1, length + 1, device=masked.device, dtype=torch.float64)
        passes = ranked >= 1 - value / (counts + 1)
        passes[..., 0] = True
        picked = passes.to(torch.int8).cumprod(dim=-1).bool()
        return torch.zeros_like(masked).scatter(-1, order, picked) & masked

    return CommitRule(name="factor", select=select, max_commits=None)


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
    return replace(rule, select=select, max_commits=bound, sub_block_length=length)


RULES = ("static", "threshold", "factor", "sequential", "causal")
"""``causal`` is the rule of an autoregressive run: the leftmost position, in a pass that sees its block causally."""


def build_rule(cell: Cell) -> CommitRule:
    """The commit rule of a cell. Raises ValueError for an unknown decoder, or a setting missing or out of range."""
    rule = replace(_base_rule(cell), confidence=cell.confidence)
    if not cell.sub_block_length:
        return rule
    if cell.block_length % cell.sub_block_length:
        raise ValueError(
            f"sub_block_length {cell.sub_block_length} does not divide the block of {cell.block_length}"
        )
    return in_sub_blocks(rule, cell.sub_block_length)


def _base_rule(cell: Cell) -> CommitRule:
    if cell.decoder == "causal":
        return replace(sequential(1), name="causal")
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
    raise ValueError(f"decoder {cell.decoder!r} is not one of {', '.join(RULES)}")
