"""Level-wise best-first growth where an edge commits a set of positions: the D states of largest mass.

A step from y commits a set A with tokens v: m(z) = m(y) · P(A) · Π_A p(v), with P as ``set_distribution`` says. Of the
2^n sets of a state nine are tried: every position that passes with at least 1/2, that set with each of its four least
certain positions flipped and with the two least certain ones flipped, and the three positions likeliest alone. Each is
tried with the likeliest tokens, and with the second one at its least probable position. Mass never grows along an
edge, so cutting the list to D level by level keeps ancestors.

Sources: SPOT-Sets of arXiv 2610.22543 names set nodes and inclusion; the choice of alternatives is this package's.

Legend: S samples, W states of each, L block length, D budget, C = 9 sets tried, each twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED, num_masked, state_hashes
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.drafting.growth import Listed, merge_equal, remap, write_list
from dlmgrid.workers.drafting.set_distribution import SetDistribution

NUM_FLIPPED = 4
NUM_ALONE = 3


class SetPrediction(NamedTuple):
    """What is predicted of states [S, W]: the distribution of the next set; ``first`` and ``second`` int32 [S, W, L],
    the likeliest tokens (perturbed at T > 0), with their probabilities fp64."""

    sets: SetDistribution
    first: Tensor
    second: Tensor
    first_probability: Tensor
    second_probability: Tensor


Propose = Callable[[Tensor, Tensor, Tensor], SetPrediction]
"""Maps (states int32 [S, W, L], their commit counts int64 [S, W], is_asked bool [S, W]) to predictions; states that are
not asked about have no children, and what is said of them holds no meaning but that no position is among theirs."""


def grow_sets(
    inputs: DraftInputs, tree: DraftTree, propose: Propose, *, min_log_mass: float = -torch.inf
) -> None:
    """Fill ``tree`` with the top-D states of every sample whose snapshot is valid; those below ``min_log_mass`` are
    left out."""
    num_samples, length = inputs.roots.shape
    budget, device = tree.budget, inputs.roots.device
    if budget == 0:
        return
    listed = Listed.empty(num_samples, budget, length, device)
    states = inputs.roots[:, None]
    log_mass = torch.where(inputs.snapshots.is_valid, 0.0, -torch.inf)[:, None].double()
    own_index = torch.full((num_samples, 1), -1, dtype=torch.int64, device=device)
    root_masked = num_masked(inputs.roots)
    for depth in range(1, length + 1):
        counts = (inputs.commit_counts + root_masked)[:, None] - num_masked(states)
        is_asked = (log_mass > -torch.inf) & (num_masked(states) > (0 if inputs.allows_complete else 1))
        prediction = propose(states, counts, is_asked)
        tokens, gain = _children(states, prediction, complete=inputs.allows_complete)
        width, tried = gain.shape[1:]
        parent_mass = log_mass[..., None].expand(-1, -1, tried).reshape(num_samples, -1)
        child_mass = (log_mass[..., None] + gain).reshape(num_samples, -1)
        hashes = state_hashes(tokens).reshape(num_samples, -1)
        is_listed = (hashes[:, :, None] == listed.hashes[:, None]) & (listed.log_mass > -torch.inf)[:, None]
        child_mass = torch.where(is_listed.any(dim=-1), -torch.inf, child_mass)
        children = Listed(
            tokens=tokens.reshape(num_samples, width * tried, length),
            log_mass=merge_equal(hashes, child_mass, parent_mass),
            depths=torch.full_like(hashes, depth),
            parents=own_index[..., None].expand(-1, -1, tried).reshape(num_samples, -1),
            hashes=hashes,
        )
        listed, is_new = _cut(listed, children)
        if not bool((is_new & (listed.log_mass >= min_log_mass)).any()):
            break
        most = int(is_new.sum(dim=1).max())
        own_index = is_new.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :most]
        states = listed.tokens.gather(1, own_index[..., None].expand(-1, -1, length))
        log_mass = torch.where(is_new.gather(1, own_index), listed.log_mass.gather(1, own_index), -torch.inf)
    listed.log_mass[listed.log_mass < min_log_mass] = -torch.inf
    write_list(tree, listed)


def _children(states: Tensor, prediction: SetPrediction, *, complete: bool) -> tuple[Tensor, Tensor]:
    """The states int32 [S, W, 2 C, L] that the sets tried lead to, and the log of what each multiplies the mass with,
    fp64 [S, W, 2 C]; -inf for a set that is tried twice, or one that completes the block where that is not asked
    for."""
    sets, log_share = _tried(prediction.sets)
    left = (states == MASKED)[..., None, :] & ~sets
    if not complete:
        log_share = torch.where(left.any(dim=-1), log_share, -torch.inf)
    first, second = prediction.first_probability, prediction.second_probability
    weakest = torch.where(sets, first[..., None, :], torch.inf).argmin(dim=-1, keepdim=True)
    hedged = torch.zeros_like(sets).scatter(-1, weakest, True)
    log_first = torch.where(sets, first.log()[..., None, :], 0.0).sum(dim=-1)
    log_second = torch.where(sets & ~hedged, first.log()[..., None, :], 0.0).sum(dim=-1)
    log_second = log_second + second.log()[..., None, :].expand_as(sets).gather(-1, weakest).squeeze(-1)
    tokens = torch.where(sets, prediction.first[..., None, :], states[..., None, :])
    other = torch.where(hedged & sets, prediction.second[..., None, :], tokens)
    # -inf and not a NaN where a state was not asked about, whose tokens have no probability
    gains = [
        torch.where(log_share > -torch.inf, log_share + log_p, -torch.inf)
        for log_p in (log_first, log_second)
    ]
    return torch.cat((tokens, other), dim=-2), torch.cat(gains, dim=-1)


def _tried(sets: SetDistribution) -> tuple[Tensor, Tensor]:
    """The sets that are tried, bool [S, W, C, L], and the log of their probabilities fp64 [S, W, C]; -inf for one that
    equals an earlier one, or has no position."""
    passing = sets.among & (sets.passing >= 0)
    doubt = torch.where(sets.among, sets.passing.abs(), torch.inf)
    least_certain = [_at(index, sets.among) for index in _first(doubt, NUM_FLIPPED)]
    alone = [_at(index, sets.among) for index in _first(-sets.log_alone, NUM_ALONE)]
    flipped = [passing ^ flip for flip in (*least_certain, least_certain[0] | least_certain[1])]
    found = torch.stack((passing, *flipped, *alone), dim=-2)
    is_same = (found[..., :, None, :] == found[..., None, :, :]).all(dim=-1)
    is_again = is_same.tril(diagonal=-1).any(dim=-1)
    return found, torch.where(is_again, -torch.inf, sets.log_probability(found))


def _first(values: Tensor, count: int) -> list[Tensor]:
    """Where the ``count`` smallest of values [..., L] are, int64 [...] each, equal ones from the left."""
    return list(values.sort(dim=-1, stable=True).indices[..., :count].unbind(-1))


def _at(index: Tensor, among: Tensor) -> Tensor:
    """bool [..., L]: the position int64 [...] alone, where it is ``among``."""
    return torch.zeros_like(among).scatter(-1, index[..., None], True) & among


def _cut(listed: Listed, children: Listed) -> tuple[Listed, Tensor]:
    """The D best of list and children, and which of its entries are new, bool [S, D]."""
    budget, length = listed.tokens.shape[1:]
    log_mass = torch.cat((listed.log_mass, children.log_mass), dim=1)
    order = log_mass.sort(dim=1, descending=True, stable=True).indices[:, :budget]
    kept_mass = log_mass.gather(1, order)
    is_new = (order >= budget) & (kept_mass > -torch.inf)

    def taken(old: Tensor, new: Tensor) -> Tensor:
        return torch.cat((old, new), dim=1).gather(1, order)

    parents = taken(listed.parents, children.parents)
    return (
        Listed(
            tokens=torch.cat((listed.tokens, children.tokens), dim=1).gather(
                1, order[..., None].expand(-1, -1, length)
            ),
            log_mass=kept_mass,
            depths=taken(listed.depths, children.depths),
            parents=torch.where(parents >= 0, remap(order, parents), parents),
            hashes=taken(listed.hashes, children.hashes),
        ),
        is_new,
    )
