"""Level-wise best-first growth: the D states of largest mass under a model of order and tokens.

The mass of the root is 1; a child that commits position s with token v has m(z) = m(y) · q(s | y) · p(v), with q
given by the method and p the raw stale probability, or p(v | y) where the method predicts tokens too. Level by level,
every listed state of the newest level is expanded, equal states are merged (their masses add, capped by the best
parent's), and the list is cut to D. Mass never grows along an edge, so the ancestors of a listed state are listed: the
result is the true top D, with one call of the order model a level (SPOT, arXiv 2610.22543, "level-wise best-first";
merging and cap as worked out in the documentation of this package).

A step that commits n > 1 positions takes the decoder's own first n - 1 choices under the stale confidences, and
branches over the last one.

Legend: S samples, D budget, L block length, C = D · L · 2 candidate children of a level.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED, commit_hashes
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import DraftInputs, Prediction, level_predictor

HEDGE_BELOW = 0.6
"""The second token of a position is tried where the first has a probability below this (SPOT's token hedge)."""

OrderModel = Callable[[Tensor, Tensor, Prediction], Tensor]
"""Maps (states int32 [S, W, L], eligible bool [S, W, L], prediction) to log q fp64 [S, W, L], -inf elsewhere."""


@dataclass(slots=True)
class Listed:
    """The global list of the best states so far, D entries a sample; absent ones have a log mass of -inf."""

    tokens: Tensor  # int32 [S, D, L]
    log_mass: Tensor  # fp64 [S, D]
    depths: Tensor  # int64 [S, D]
    parents: Tensor  # int64 [S, D], index in the list; -1: the root
    hashes: Tensor  # int64 [S, D]

    @classmethod
    def empty(cls, num_samples: int, budget: int, length: int, device: torch.device) -> Listed:
        """Room for ``budget`` states of ``length`` positions a sample, all absent."""
        size = (num_samples, budget)
        return cls(
            tokens=torch.full((*size, length), MASKED, dtype=torch.int32, device=device),
            log_mass=torch.full(size, -torch.inf, dtype=torch.float64, device=device),
            depths=torch.zeros(size, dtype=torch.int64, device=device),
            parents=torch.full(size, -1, dtype=torch.int64, device=device),
            hashes=torch.zeros(size, dtype=torch.int64, device=device),
        )


Predictor = Callable[[Tensor, Tensor, Tensor], Prediction]
"""Maps (states int32 [S, W, L], their commit counts int64 [S, W], is_asked bool [S, W]) to what each position is
predicted to hold; states that are not asked about have no children, and what is said of them holds no meaning."""


def grow(
    inputs: DraftInputs,
    tree: DraftTree,
    order_model: OrderModel,
    *,
    predictor: Predictor | None = None,
    min_log_mass: float = -torch.inf,
    hedge_below: float = HEDGE_BELOW,
) -> None:
    """Fill ``tree`` with the top-D states of every sample whose snapshot is valid.

    Of these, states with a log mass below ``min_log_mass`` are left out; mass never grows along an edge, so what is
    left still holds the ancestors of all its states.

    Args:
        order_model: is called once a level, with what ``predictor`` said of it.
        predictor: None: the stale predictions, the same for every state.
        hedge_below: a second token is tried where the first has a probability below this.
    """
    num_samples, block_length = inputs.roots.shape
    budget, device = tree.budget, inputs.roots.device
    if budget == 0:
        return
    listed = Listed.empty(num_samples, budget, block_length, device)
    root_masked = (inputs.roots == MASKED).sum(dim=-1)
    frontier = Listed(
        tokens=inputs.roots[:, None],
        log_mass=torch.where(inputs.snapshots.is_valid, 0.0, -torch.inf)[:, None].double(),
        depths=torch.zeros(num_samples, 1, dtype=torch.int64, device=device),
        parents=torch.full((num_samples, 1), -1, dtype=torch.int64, device=device),
        hashes=tree.hashes[:, :1],
    )
    own_index = frontier.parents  # where each frontier state stands in the list
    predictor = predictor or _stale_predictor(inputs)
    choices = _Choices(hedge_below)
    for depth in range(1, block_length + 1):
        children = _expand(inputs, frontier, root_masked, order_model, predictor, choices)
        if depth == 1:  # children of one state differ
            children.log_mass = torch.minimum(children.log_mass.exp().log(), frontier.log_mass)
        elif _none_enters(listed, children):
            break
        else:
            children.log_mass = merge_equal(
                children.hashes, children.log_mass, _by_child(frontier.log_mass, children.per_state)
            )
        listed, is_new = _cut(listed, children, own_index, depth)
        if not bool((is_new & (listed.log_mass >= min_log_mass)).any()):
            break
        width = int(is_new.sum(dim=1).max())
        order = is_new.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :width]
        present = is_new.gather(1, order)
        frontier = Listed(
            tokens=listed.tokens.gather(1, order[..., None].expand(-1, -1, block_length)),
            log_mass=torch.where(present, listed.log_mass.gather(1, order), -torch.inf),
            depths=listed.depths.gather(1, order),
            parents=listed.parents.gather(1, order),
            hashes=listed.hashes.gather(1, order),
        )
        own_index = order
    listed.log_mass[listed.log_mass < min_log_mass] = -torch.inf
    write_list(tree, listed)


def _stale_predictor(inputs: DraftInputs) -> Predictor:
    """Predictions that read the state's commit count alone; at T = 0 (with no random order) not even that."""
    of_level = level_predictor(inputs)

    def of_counts(_: Tensor, commit_counts: Tensor, is_asked: Tensor) -> Prediction:
        # Present entries come first: absent ones take their count, so that a level of one count is predicted once.
        return of_level(inputs, torch.where(is_asked, commit_counts, commit_counts[:, :1]))

    return of_counts


@dataclass(slots=True)
class _Children:
    """Candidate c of a level is a child of the frontier's state c // (2 L), by its position and token c % (2 L)."""

    log_mass: Tensor  # fp64 [S, C]
    hashes: Tensor  # int64 [S, C]
    core: Tensor  # int32 [S, W, L]: parent's state with the step's first n - 1 commits
    tokens: Tensor  # int32 [S, C], or [S, 2 L] where all states have the same
    per_state: int  # 2 L


def _by_child(of_state: Tensor, per_state: int) -> Tensor:
    """Values [S, W] of states at each of their children, [S, C]."""
    return of_state[..., None].expand(-1, -1, per_state).flatten(1)


def _none_enters(listed: Listed, children: _Children) -> bool:
    """Whether every list is full of states that weigh more than any child can, even after all W parents' masses were
    added to one child (the margin is for rounding)."""
    width = children.core.shape[1]
    most = children.log_mass.amax(dim=1) + (math.log(width) + 1e-9)
    return bool((most < listed.log_mass.amin(dim=1)).all())


class _Choices:
    """What the first and second tokens of a prediction are worth, worked out once for levels that share one."""

    def __init__(self, hedge_below: float) -> None:
        self._of: Prediction | None = None
        self._hedge_below = hedge_below

    def read(self, prediction: Prediction) -> _Choices:
        """With ``tokens`` int32, their ``hashes`` int64 and ``log_probability`` fp64 [S, W, L, 2] each, and ``hedge``
        bool [S, W, L], of ``prediction``."""
        if self._of is prediction:
            return self
        positions = torch.arange(prediction.first.shape[-1], device=prediction.first.device)
        probability = torch.stack((prediction.first_probability, prediction.second_probability), dim=-1)
        self._of = prediction
        self.tokens = torch.stack((prediction.first, prediction.second), dim=-1)
        self.hashes = commit_hashes(positions[:, None], self.tokens)
        self.log_probability = probability.double().log()
        self.hedge = prediction.first_probability.double() < self._hedge_below
        return self


def _expand(
    inputs: DraftInputs,
    frontier: Listed,
    root_masked: Tensor,
    order_model: OrderModel,
    predictor: Predictor,
    choices: _Choices,
) -> _Children:
    num_samples, width, length = frontier.tokens.shape
    present = frontier.log_mass > -torch.inf
    masked = (frontier.tokens == MASKED) & present[..., None]
    num_masked = masked.sum(dim=-1)
    counts = (inputs.commit_counts + root_masked)[:, None] - num_masked
    is_asked = num_masked > (0 if inputs.allows_complete or inputs.rule.may_open_nothing else 1)
    prediction = predictor(frontier.tokens, counts, is_asked)
    shape = (num_samples, width, length)
    choices = choices.read(prediction)
    first_log_probability, second_log_probability = choices.log_probability.unbind(-1)
    rule, parent_mass, parent_hashes, core_tokens = (
        inputs.rule, frontier.log_mass, frontier.hashes, frontier.tokens,
    )  # fmt: skip
    if rule.max_commits == 1 and not rule.may_open_nothing:  # a step is the branch itself
        step_size: int | Tensor = 1
        eligible = rule.eligible(masked)
    else:
        confidence = prediction.unrounded_confidence.expand(shape)
        step = rule.select(masked, confidence)
        step_size = step.sum(dim=-1)
        core = _without_weakest(step, confidence)
        parent_mass = parent_mass + torch.where(core, first_log_probability.expand(shape), 0.0).sum(dim=-1)
        core_tokens = torch.where(core, prediction.first.expand(shape), frontier.tokens)
        parent_hashes = parent_hashes + torch.where(core, choices.hashes[..., 0].expand(shape), 0).sum(dim=-1)
        eligible = rule.eligible(masked & ~core)
    eligible = eligible & (num_masked > (0 if inputs.allows_complete else step_size))[..., None]
    log_q = order_model(core_tokens, eligible, prediction)
    base = torch.where(eligible, parent_mass[..., None] + log_q, -torch.inf)
    log_mass = torch.stack(
        (
            base + first_log_probability,
            torch.where(choices.hedge, base + second_log_probability, -torch.inf),
        ),
        dim=-1,
    )
    hashes = parent_hashes[..., None, None] + choices.hashes
    flat = (num_samples, width * length * 2)
    tokens = choices.tokens.flatten(2)
    return _Children(
        log_mass=log_mass.reshape(flat),
        hashes=hashes.reshape(flat),
        core=core_tokens,
        tokens=tokens[:, 0] if tokens.shape[1] == 1 else tokens.flatten(1),
        per_state=length * 2,
    )


def _without_weakest(step: Tensor, confidence: Tensor) -> Tensor:
    """The positions of a step but its last choice; empty for a step of one."""
    scores = torch.where(step, confidence, torch.full_like(confidence, -torch.inf))
    rank = scores.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)
    return step & (rank < step.sum(dim=-1, keepdim=True) - 1)


def merge_equal(hashes: Tensor, log_mass: Tensor, parent_log_mass: Tensor) -> Tensor:
    """The log masses fp64 [S, C] after joining equal states: one representative, a child of the best parent, keeps the
    sum, capped by that parent's mass; the rest are -inf.

    Args:
        hashes: int64 [S, C]; log_mass, parent_log_mass: fp64 [S, C], -inf where there is no candidate.
    """
    absent = log_mass == -torch.inf
    # Absent candidates go to groups of their own so that they never meet a real state's hash.
    order = torch.where(absent, torch.iinfo(torch.int64).max, hashes).sort(dim=1, stable=True).indices
    hashes, log_mass = hashes.gather(1, order), log_mass.gather(1, order)
    parent_log_mass = parent_log_mass.gather(1, order)
    starts = torch.ones_like(absent)
    starts[:, 1:] = (hashes[:, 1:] != hashes[:, :-1]) | (log_mass[:, 1:] == -torch.inf)
    group = starts.cumsum(dim=1) - 1
    total = torch.zeros_like(log_mass).scatter_add(1, group, log_mass.exp())
    best_parent = torch.full_like(log_mass, -torch.inf).scatter_reduce(1, group, parent_log_mass, "amax")
    is_best = parent_log_mass == best_parent.gather(1, group)
    index = torch.arange(hashes.shape[1], device=hashes.device).expand_as(order)
    sentinel = hashes.shape[1]
    representative = torch.full_like(order, sentinel).scatter_reduce(
        1, group, torch.where(is_best, index, sentinel), "amin"
    )
    merged = torch.minimum(total.log(), best_parent).gather(1, group)
    keeps = (representative.gather(1, group) == index) & (log_mass > -torch.inf)
    kept = torch.where(keeps, merged, -torch.inf)
    return torch.full_like(merged, -torch.inf).scatter(1, order, kept)


def _cut(listed: Listed, children: _Children, own_index: Tensor, depth: int) -> tuple[Listed, Tensor]:
    """Keep the D best of list and children, whose parents stand at ``own_index`` int64 [S, W] in it.

    Returns the new list and which of its entries are new, bool [S, D].
    """
    budget = listed.log_mass.shape[1]
    log_mass = torch.cat((listed.log_mass, children.log_mass), dim=1)
    order = log_mass.sort(dim=1, descending=True, stable=True).indices[:, :budget]
    kept_mass = log_mass.gather(1, order)
    is_new = (order >= budget) & (kept_mass > -torch.inf)
    old = order.clamp_max(budget - 1)
    child = (order - budget).clamp_min(0)

    frontier = child // children.per_state
    length = listed.tokens.shape[-1]
    tokens = children.core.gather(1, frontier[..., None].expand(-1, -1, length))
    which = child % children.per_state
    is_shared = children.tokens.shape[1] == children.per_state
    opened = children.tokens.gather(1, which if is_shared else child)
    tokens.scatter_(2, (which // 2)[..., None], opened[..., None])

    # Entries move with the cut; the parents of kept entries are themselves kept.
    parents = torch.where(is_new, own_index.gather(1, frontier), listed.parents.gather(1, old))
    parents = torch.where(parents >= 0, remap(order, parents), parents)
    return (
        Listed(
            tokens=torch.where(
                is_new[..., None], tokens, listed.tokens.gather(1, old[..., None].expand_as(tokens))
            ),
            log_mass=kept_mass,
            depths=torch.where(is_new, depth, listed.depths.gather(1, old)),
            parents=parents,
            hashes=torch.where(is_new, children.hashes.gather(1, child), listed.hashes.gather(1, old)),
        ),
        is_new,
    )


def remap(order: Tensor, parents: Tensor) -> Tensor:
    """Where the old entries ``parents`` [S, D] stand after entries were taken in ``order`` [S, D]."""
    matches = order[:, None, :] == parents[..., None]
    return matches.to(torch.int8).argmax(dim=-1)


def write_list(tree: DraftTree, listed: Listed) -> None:
    """Put the list behind the root, in topological order (by depth, then mass)."""
    present = listed.log_mass > -torch.inf
    depths = torch.where(present, listed.depths, torch.iinfo(torch.int64).max)
    order = depths.sort(dim=1, stable=True).indices
    parents = listed.parents.gather(1, order)
    parents = torch.where(parents >= 0, remap(order, parents) + 1, 0)
    tree.tokens[:, 1:] = listed.tokens.gather(1, order[..., None].expand_as(listed.tokens))
    tree.parents[:, 1:] = parents.to(torch.int32)
    tree.depths[:, 1:] = listed.depths.gather(1, order).to(torch.int32)
    tree.log_mass[:, 1:] = listed.log_mass.gather(1, order)
    tree.hashes[:, 1:] = listed.hashes.gather(1, order)
    tree.num_nodes[:] = present.sum(dim=1) + 1
