"""The exact law of the usual sampler on a tiny target, by enumeration.

The usual sampler draws every masked position afresh at every step; the commit rule then sees the probability of
each drawn token. For a block of a few positions and a few tokens all outcomes of a step can be listed: the law of a
path (order and tokens) follows by recursion over the states. It is written without the decoder's own code: fp64
probabilities and plain Python rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cache
from math import prod

import torch

from dlmgrid.workers.decoding.paths import Step
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.testing.tiny_target import TinyTarget

State = tuple[int, ...]
Path = tuple[Step, ...]
Rule = Callable[[Mapping[int, float]], frozenset[int]]
"""Maps the confidence of each masked position to the positions that a step commits."""


def static_rule(commits_per_step: int) -> Rule:
    """The K most confident positions."""
    return lambda confidence: frozenset(_by_confidence(confidence)[:commits_per_step])


def threshold_rule(value: float) -> Rule:
    """All positions above ``value``, or the best one."""

    def select(confidence: Mapping[int, float]) -> frozenset[int]:
        passing = frozenset(position for position, found in confidence.items() if found > value)
        return passing or frozenset(_by_confidence(confidence)[:1])

    return select


def factor_rule(value: float) -> Rule:
    """The largest n with (n + 1)(1 - c(n)) ≤ ``value``, or the best position."""

    def select(confidence: Mapping[int, float]) -> frozenset[int]:
        ranked = _by_confidence(confidence)
        allowed = [n for n in range(1, len(ranked) + 1) if (n + 1) * (1 - confidence[ranked[n - 1]]) <= value]
        return frozenset(ranked[: max(allowed, default=1)])

    return select


def _by_confidence(confidence: Mapping[int, float]) -> list[int]:
    return sorted(confidence, key=lambda position: (-confidence[position], position))


def path_law(target: TinyTarget, root: State, rule: Rule, temperature: float) -> dict[Path, float]:
    """The probability of every path from ``root`` (a block at position 0) under fresh noise at every step.

    The number of terms is vocabulary^masked positions for each state: meant for at most 4 and 4.
    """

    @cache
    def law(state: State) -> dict[Path, float]:
        masked = [position for position, token in enumerate(state) if token == MASKED]
        if not masked:
            return {(): 1.0}
        probabilities = _probabilities(target, state, temperature)
        paths: dict[Path, float] = {}
        for step, share in _steps(probabilities, masked, rule).items():
            following = list(state)
            for position, token in step:
                following[position] = token
            for rest, probability in law(tuple(following)).items():
                paths[step, *rest] = paths.get((step, *rest), 0.0) + share * probability
        return paths

    return law(root)


def _steps(probabilities: list[list[float]], masked: list[int], rule: Rule) -> dict[Step, float]:
    """The law of one step: every way to draw the masked positions, and what the rule commits of it."""
    steps: dict[Step, float] = {}
    for tokens in itertools.product(range(len(probabilities[0])), repeat=len(masked)):
        drawn = dict(zip(masked, tokens, strict=True))
        confidence = {position: probabilities[position][token] for position, token in drawn.items()}
        step = tuple((position, drawn[position]) for position in sorted(rule(confidence)))
        steps[step] = steps.get(step, 0.0) + prod(confidence.values())
    return steps


def _probabilities(target: TinyTarget, state: State, temperature: float) -> list[list[float]]:
    """Tempered probabilities fp64 [L][V] of a state."""
    none = torch.zeros(1, dtype=torch.int32)
    rows = target.forward(torch.tensor([state], dtype=torch.int32), none, none, none.bool())[0]
    found: list[list[float]] = (rows.double() / temperature).softmax(dim=-1).tolist()
    return found


def marginal(law: Mapping[Path, float], position: int) -> dict[int, float]:
    """The law of the final token at a position."""
    tokens: dict[int, float] = {}
    for path, probability in law.items():
        for step in path:
            for found, token in step:
                if found == position:
                    tokens[token] = tokens.get(token, 0.0) + probability
    return tokens
