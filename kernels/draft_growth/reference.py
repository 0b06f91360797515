"""Torch twin of growth on a device: level-wise best-first growth in fixed shapes, one commit a step.

The mass of the root is 1; a child that commits position s with token v has m(z) = m(y) q(s | y) p(v). A level expands
every listed state of the deepest depth, joins equal children (their masses add, in the order of their parents, capped
by the best parent's) and cuts list and children to the D of largest mass, the listed ones first among equals.

Two states of one depth have an equal child exactly where they differ in two positions, each filled in one of them
alone: each commits what the other holds. So equal children are found by pairs of parents. Parents come by falling
mass, and a child of the first of them stands for all.

Nothing here depends on the data in its shape, and nothing waits for the device.

Legend: S samples, N = 1 + D rows (the root first), L block length, T predictions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlmgrid.kernels.draft_growth.layout import (
    ENTROPY,
    FIRST_MARGIN,
    MASKED,
    Answer,
    Given,
    GrowthPlan,
    GrowthState,
)
from dlmgrid.kernels.philox import gumbel_at


def begin(state: GrowthState) -> None:
    """Predict every position from ``state.words``, and start the lists from the roots alone (table 0)."""
    plan = state.plan
    given = Given(state.words, plan.length)
    _predict(state, given)
    state.tokens[0].fill_(MASKED)
    state.tokens[0][:, 0] = given.roots
    state.log_mass[0].fill_(-torch.inf)
    state.log_mass[0][:, 0] = torch.where(given.is_valid > 0, 0.0, -torch.inf)
    state.depths[0].zero_()
    state.parents[0].fill_(-1)
    state.depth.zero_()
    state.is_open.copy_(given.is_valid)


def _predict(state: GrowthState, given: Given) -> None:
    plan = state.plan
    probabilities, token_ids = given.probabilities, given.token_ids
    others = probabilities[..., 1:].double().sum(dim=-1) + given.tail_mass.double()
    shape = (*state.choices.shape[:3], probabilities.shape[-1])
    if plan.temperature == 0:
        two = torch.zeros_like(state.choices, dtype=torch.int64)
        two[..., 1] = 1
    else:
        scores = (probabilities.log() / plan.temperature)[:, None].expand(shape)
        if plan.stream is not None:
            scores = scores + _noise(plan, given, shape)
        two = scores.topk(2, dim=-1).indices
    raw = probabilities[:, None].expand(shape).gather(-1, two)
    state.choices.copy_(token_ids[:, None].expand(shape).gather(-1, two))
    is_tried = torch.ones_like(two, dtype=torch.bool)
    is_tried[..., 1] = raw[..., 0].double() < plan.hedge_below
    state.log_probability.copy_(torch.where(is_tried, raw.double().log(), -torch.inf))
    if plan.confidence == FIRST_MARGIN:
        confidence = (probabilities[..., 0] - probabilities[..., 1]).double()[:, None]
    elif plan.confidence == ENTROPY:
        confidence = (-given.entropy.double()).exp()[:, None]
    elif plan.temperature == 0:
        confidence = (1 - others)[:, None]
    elif plan.temperature == 1 or plan.plain:
        confidence = torch.where(two[..., 0] == 0, (1 - others)[:, None], raw[..., 0].double())
    else:
        tempered = raw[..., 0].double().log() / plan.temperature
        confidence = (tempered - given.log_tempered_mass[:, None].double()).exp()
    state.confidence.copy_(confidence.expand(state.confidence.shape))


def _noise(plan: GrowthPlan, given: Given, shape: tuple[int, ...]) -> Tensor:
    """Gumbel values fp32 [S, T, L, K] of the candidates, as the noise table has them."""
    device = given.keys.device
    counts = torch.arange(shape[1], device=device) if plan.counts_draws else torch.zeros(1, device=device)
    commits = (
        given.commit_counts.long() if plan.counts_draws else torch.zeros_like(given.commit_counts).long()
    )
    positions = given.block_starts.long()[:, None] + torch.arange(plan.length, device=device)
    assert plan.stream is not None
    return gumbel_at(
        (given.keys.long() & 0xFFFFFFFF)[:, None, None].expand(*shape[:3], 2),
        plan.stream,
        positions[:, None].expand(shape[:3]),
        (commits[:, None] + counts.long())[..., None].expand(shape[:3]),
        given.token_ids.long()[:, None].expand(shape),
    )


def _of_level(state: GrowthState, values: Tensor) -> Tensor:
    """What [S, T, ...] predictions say at the level of each sample, [S, ...]."""
    at = state.depth.long().clamp_max(values.shape[1] - 1)
    index = at.view(-1, *(1,) * (values.dim() - 1)).expand(-1, 1, *values.shape[2:])
    return values.gather(1, index).squeeze(1)


def is_expanded(state: GrowthState, table: int) -> Tensor:
    """bool [S, N]: which rows of a table the coming level expands."""
    is_deepest = state.depths[table] == state.depth[:, None]
    return is_deepest & (state.log_mass[table] > -torch.inf) & (state.is_open > 0)[:, None]


def eligible(state: GrowthState, table: int) -> Tensor:
    """bool [S, N, L]: which positions a child of each row may fill."""
    plan = state.plan
    given = Given(state.words, plan.length)
    masked = (state.tokens[table] == MASKED) & is_expanded(state, table)[..., None]
    least = torch.where(given.allows_complete > 0, 0, 1)[:, None]
    open_rows = masked.sum(dim=-1) > least
    if plan.sub_block_length:
        width = plan.sub_block_length
        parts = masked.unflatten(-1, (-1, width)).any(dim=-1)
        first = parts & (parts.cumsum(dim=-1) == 1)
        masked = masked & first.repeat_interleave(width, dim=-1, output_size=plan.length)
    return masked & open_rows[..., None]


def expand(state: GrowthState, table: int, *, by_scores: bool) -> None:
    """Log masses of the children of the rows of ``table``, before any are joined.

    ``by_scores``: q is the softmax of the order model's scores over the eligible positions, else the share of a
    position in their confidences.
    """
    among = eligible(state, table)
    if by_scores:
        least = torch.finfo(torch.float64).min
        log_q = state.scores.masked_fill(~among, least).log_softmax(dim=-1)
    else:
        confidence = torch.where(among, _of_level(state, state.confidence)[:, None], 0.0)
        total = confidence.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        log_q = (confidence / total).log()
    base = torch.where(among, state.log_mass[table][..., None] + log_q, -torch.inf)
    log_probability = _of_level(state, state.log_probability)
    state.children.copy_(base[..., None] + log_probability[:, None])


def merge(state: GrowthState, table: int) -> None:
    """Join equal children: the first parent's keeps the sum, capped by that parent's mass; the others have -inf."""
    tokens, expanded = state.tokens[table], is_expanded(state, table)
    choices = _of_level(state, state.choices)[:, None]
    own = state.children
    total = torch.zeros_like(own)
    is_repeat = torch.zeros_like(own, dtype=torch.bool)
    for other in range(tokens.shape[1]):
        theirs = tokens[:, other : other + 1]
        gained = (tokens == MASKED) & (theirs != MASKED)
        differs = tokens != theirs
        is_pair = (differs.sum(dim=-1) == 2) & (gained.sum(dim=-1) == 1)
        is_pair &= expanded & expanded[:, other : other + 1]
        is_theirs = (differs & ~gained)[..., None] & (choices == tokens[..., None])
        value = torch.where(is_theirs, own[:, other : other + 1], -torch.inf).flatten(-2).amax(dim=-1)
        is_pair &= value > -torch.inf
        equal = (is_pair[..., None] & gained)[..., None] & (choices == theirs[..., None])
        added = torch.where(equal, value.exp()[..., None, None], 0.0)
        added[:, other] = own[:, other].exp()
        total += added
        is_repeat[:, other + 1 :] |= equal[:, other + 1 :]
    capped = torch.minimum(total.log(), state.log_mass[table][..., None, None])
    state.merged.copy_(torch.where(is_repeat | (own == -torch.inf), -torch.inf, capped))


def cut(state: GrowthState, table: int) -> None:
    """Write the D best of list and children to the other table, and go one level deeper."""
    plan, length = state.plan, state.plan.length
    tokens, log_mass = state.tokens[table], state.log_mass[table]
    budget = plan.budget
    of_all = torch.cat((log_mass[:, 1:], state.merged.flatten(1)), dim=1)
    order = of_all.sort(dim=1, descending=True, stable=True).indices[:, :budget]
    kept = of_all.gather(1, order)
    is_new = (order >= budget) & (kept > -torch.inf)
    old = order.clamp_max(budget - 1) + 1
    child = (order - budget).clamp_min(0)
    parent, choice = child // (2 * length), child % (2 * length)
    filled = _of_level(state, state.choices).flatten(1).gather(1, choice)
    row = torch.where(is_new, parent, old)
    new_tokens = tokens.gather(1, row[..., None].expand(-1, -1, length))
    at = (choice // 2)[..., None]
    new_tokens.scatter_(2, at, torch.where(is_new[..., None], filled[..., None], new_tokens.gather(2, at)))
    # Rows move with the cut; the parents of kept rows are themselves kept.
    before = torch.where(is_new, parent, state.parents[table].long().gather(1, row))
    matches = (old[:, None, :] == before[..., None]) & ~is_new[:, None, :]
    parents = torch.where(before > 0, matches.to(torch.int8).argmax(dim=-1) + 1, 0)

    other = 1 - table
    state.tokens[other][:, 0] = tokens[:, 0]
    state.tokens[other][:, 1:] = new_tokens
    state.log_mass[other][:, 0] = log_mass[:, 0]
    state.log_mass[other][:, 1:] = kept
    state.depths[other][:, 0] = 0
    deeper = state.depth[:, None] + 1
    state.depths[other][:, 1:] = torch.where(is_new, deeper, state.depths[table].gather(1, row))
    state.parents[other][:, 0] = -1
    state.parents[other][:, 1:] = parents.to(torch.int32)
    state.depth += 1
    state.is_open.copy_((is_new & (kept >= plan.min_log_mass)).any(dim=1))


def answer(state: GrowthState, table: int) -> None:
    """Write what ``table`` lists, in topological order, to ``state.answer``."""
    plan = state.plan
    out = Answer(state.answer, plan.budget, plan.length)
    log_mass = state.log_mass[table][:, 1:]
    present = (log_mass > -torch.inf) & (log_mass >= plan.min_log_mass)
    depths = torch.where(present, state.depths[table][:, 1:], torch.iinfo(torch.int32).max)
    order = depths.sort(dim=1, stable=True).indices
    parents = state.parents[table][:, 1:].long().gather(1, order)
    place = (order[:, None, :] + 1 == parents[..., None]).to(torch.int8).argmax(dim=-1) + 1
    out.num_states.copy_(present.sum(dim=1))
    out.is_open.copy_(state.is_open)
    out.log_mass.copy_(log_mass.gather(1, order))
    out.depths.copy_(state.depths[table][:, 1:].gather(1, order))
    out.parents.copy_(torch.where(parents > 0, place, 0))
    rows = order[..., None].expand(-1, -1, plan.length)
    out.tokens.copy_(state.tokens[table][:, 1:].gather(1, rows))
