"""Commit rules: which masked positions a step fills. One function a rule, behind the table ``RULES``.

A rule sees, for each state, the confidence of the token chosen at every masked position, and nothing else; with
the choice of tokens it makes the transition T(state) a deterministic function of state and noise. Ties go to the
lowest position. Every rule commits at least one position of a state that has one masked.

Sources: ``low_confidence_static`` and ``low_confidence_dynamic`` of JetAstra/SDAR ``generate.py``; the confidence
is taken from the unfiltered (tempered) softmax, as its OpenCompass port does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmgrid.workers.cell import Cell


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRule:
    """A rule with its settings.

    ``select`` maps (masked bool [..., L], confidence fp32 [..., L]) to the committed positions, bool [..., L].
    ``max_commits`` bounds the positions of one step from above (None: the block's length).
    """

    name: str
    select: Callable[[Tensor, Tensor], Tensor]
    max_commits: int | None


def top_positions(masked: Tensor, confidence: Tensor, count: int) -> Tensor:
    """The ``count`` most confident masked positions (all of them where fewer are left), ties to the lowest."""
    scores = torch.where(masked, confidence, torch.full_like(confidence, -1.0))
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


def threshold(value: float, min_commits: int = 1) -> CommitRule:
    """Every position with confidence > ``value``; the top ``min_commits`` where fewer pass (SDAR's comparison)."""
    if not 0 < value < 1:
        raise ValueError(f"threshold is {value}, it must lie between 0 and 1")

    def select(masked: Tensor, confidence: Tensor) -> Tensor:
        passing = masked & (confidence > value)
        enough = passing.sum(dim=-1, keepdim=True) >= min_commits
        return torch.where(enough, passing, top_positions(masked, confidence, min_commits))

    return CommitRule(name="threshold", select=select, max_commits=None)


RULES: dict[str, Callable[[int, float | None], CommitRule]] = {
    "static": lambda commits_per_step, _: static(commits_per_step),
    "threshold": lambda commits_per_step, value: threshold(
        0.85 if value is None else value, min_commits=commits_per_step
    ),
}


def build_rule(name: str, commits_per_step: int, value: float | None) -> CommitRule:
    """The rule called ``name``. Raises ValueError for an unknown name or a setting out of range."""
    if name not in RULES:
        raise ValueError(f"decoder {name!r} is not one of {', '.join(RULES)}")
    return RULES[name](commits_per_step, value)


def rule_of(cell: Cell) -> CommitRule:
    """The rule of a cell's decoder."""
    return build_rule(cell.decoder, cell.commits_per_step, cell.threshold)
