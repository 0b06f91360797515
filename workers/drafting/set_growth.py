"""Level-wise best-first growth where an edge commits a set of positions: the D states of largest mass.

A step from y commits a set A with tokens v: m(z) = m(y) · Π_A q(s) · Π_rest (1 - q(s)) · Π_A p(v), with q(s) the
probability that position s is in the step's set. Of the 2^n sets of a state seven are tried: every position with
q ≥ 1/2 (the most probable one where none has), that set with each of its four least certain positions flipped, with
the two least certain ones flipped, and with the second token at its least probable position where the first has a
probability below 0.6. Mass never grows along an edge, so cutting the list to D level by level keeps ancestors.

Sources: SPOT-Sets of arXiv 2610.22543 names set nodes and inclusion; the choice of alternatives is this package's.

Legend: S samples, W states of each, L block length, D budget, C = 7 sets tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED, num_masked, state_hashes
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.drafting.growth import HEDGE_BELOW, Listed, merge_equal, remap, write_list

NUM_FLIPPED = 4
_LEAST = 1e-6


class SetPrediction(NamedTuple):
    """What is predicted of each position, all [S, W, L]: ``inclusion`` fp64, the probability of being committed next;
    ``first`` and ``second`` int32, the likeliest tokens (perturbed at T > 0), with their probabilities fp64."""

    inclusion: Tensor
    first: Tensor
    second: Tensor
    first_probability: Tensor
    second_probability: Tensor


Propose = Callable[[Tensor, Tensor], SetPrediction]
"""Maps states int32 [S, W, L] and their commit counts int64 [S, W] to predictions."""


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
        tokens, gain = _children(states, propose(states, counts), complete=inputs.allows_complete)
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
    """The states int32 [S, W, C, L] that the sets tried lead to, and the log of what each multiplies the mass with,
    fp64 [S, W, C]; -inf for an empty set, or one that completes the block where that is not asked for."""
    masked = states == MASKED
    inclusion = prediction.inclusion.clamp(_LEAST, 1 - _LEAST)
    base = masked & (inclusion >= 0.5)
    best = torch.where(masked, inclusion, -1.0).argmax(dim=-1, keepdim=True)
    alone = torch.zeros_like(base).scatter(-1, best, True) & masked
    base = torch.where(base.any(dim=-1, keepdim=True), base, alone)

    doubt = torch.where(masked, (inclusion - 0.5).abs(), torch.inf)
    order = doubt.sort(dim=-1, stable=True).indices
    flips = [
        torch.zeros_like(base).scatter(-1, order[..., k : k + 1], True) & masked for k in range(NUM_FLIPPED)
    ]
    flips.append(flips[0] | flips[1])
    sets = torch.stack([base, *(base ^ flip for flip in flips), base], dim=-2)

    weakest = torch.where(base, prediction.first_probability, torch.inf).argmin(dim=-1, keepdim=True)
    hedged = torch.zeros_like(base).scatter(-1, weakest, True) & base
    tokens = prediction.first[..., None, :].expand(sets.shape).clone()
    tokens[..., -1, :] = torch.where(hedged, prediction.second, prediction.first)
    log_p = prediction.first_probability.log()[..., None, :].expand(sets.shape).clone()
    log_p[..., -1, :] = torch.where(
        hedged, prediction.second_probability.log(), prediction.first_probability.log()
    )
    chosen = torch.where(sets, inclusion.log()[..., None, :] + log_p, 0.0).sum(dim=-1)
    left = masked[..., None, :] & ~sets
    log_gain = chosen + torch.where(left, (1 - inclusion).log()[..., None, :], 0.0).sum(dim=-1)
    possible = sets.any(dim=-1) & (complete | left.any(dim=-1))
    flipped = torch.tensor(
        [0, *range(1, NUM_FLIPPED + 1), 2, 0], device=states.device
    )  # masks that each needs
    possible &= masked.sum(dim=-1)[..., None] >= flipped
    first_at_weakest = torch.where(hedged, prediction.first_probability, 0.0).sum(dim=-1)
    possible[..., -1] &= first_at_weakest < HEDGE_BELOW
    reached = torch.where(sets, tokens, states[..., None, :])
    return reached, torch.where(possible, log_gain, -torch.inf)


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
