"""The distribution of the next step's set under a threshold decoder, from two numbers a position.

A step commits every position whose confidence passes a level and, where none passes, the most confident one. So a set A
comes about in two ways: its positions pass and the others do not; or none passes and A is the one position that is
then chosen. With a(s) the probability that s passes and o(s) the distribution of the one:

    P(A) = Π_A a(s) · Π_rest (1 - a(s)),    for A = {s} plus Π_all (1 - a) · o(s)

Taken as independent inclusions alone, steps of one position, the most frequent on small models, would get far too
little mass. The reading is this package's; SPOT-Sets (arXiv 2610.22543) names an inclusion probability only.

Legend: L positions, C sets of a state; leading axes are free.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlmgrid.workers.drafting.order_model import masked_log_softmax

_MOST = 14.0  # log odds: no position passes, or fails, for certain


class SetDistribution(NamedTuple):
    """``passing`` [..., L], log odds of passing; ``log_alone`` [..., L], log o(s), -inf outside ``among``, the bool
    [..., L] positions that the step may commit."""

    passing: Tensor
    log_alone: Tensor
    among: Tensor

    @classmethod
    def of(cls, passing: Tensor, scores: Tensor, among: Tensor) -> SetDistribution:
        """From log odds and scores [..., L], whose softmax over ``among`` is o."""
        return cls(passing.clamp(-_MOST, _MOST), masked_log_softmax(scores, among), among)

    def likeliest(self) -> Tensor:
        """bool [..., L]: the positions that pass with at least 1/2; where none does, the one likeliest alone."""
        passing = self.among & (self.passing >= 0)
        best = self.log_alone.argmax(dim=-1, keepdim=True)
        alone = torch.zeros_like(passing).scatter(-1, best, True) & self.among
        return torch.where(passing.any(dim=-1, keepdim=True), passing, alone)

    def log_probability(self, sets: Tensor) -> Tensor:
        """log P [..., C] of sets bool [..., C, L] of positions in ``among``; -inf for the empty one."""
        among = self.among[..., None, :]
        fails = torch.where(self.among, -torch.nn.functional.softplus(self.passing), 0.0)
        # log a(s) - log(1 - a(s)) is the log odds: positions that pass exchange one for the other.
        none = fails.sum(dim=-1, keepdim=True)
        passes = none + torch.where(sets & among, self.passing[..., None, :], 0.0).sum(dim=-1)
        count = sets.sum(dim=-1)
        log_one = torch.where(sets & among, self.log_alone[..., None, :], 0.0).sum(dim=-1)
        one = torch.logaddexp(passes, none + log_one)
        return torch.where(count > 1, passes, torch.where(count == 1, one, -torch.inf))
