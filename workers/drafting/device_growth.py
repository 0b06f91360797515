"""Growth beside the target: where a GPU verifies, all levels of a round's trees grow there in one submission.

What a round needs goes up in one copy, the order model and the growth of ``LEVELS`` levels are one CUDA graph, and
the trees come back in one copy that the host waits for. A tree that is still growing then goes on for as many levels
in a second graph, so no depth is lost; the trees are those of ``growth.grow``, masses to rounding. A tie at that
rounding may fall to another state than on the host: that changes which drafts are verified, never a token.

It takes rules that commit exactly one position a step, whatever they compare, but for a confidence tree under
``confidence: random``, whose order is drawn. Which path a decoder takes is settled when it is built, from its rule
alone (:func:`reason_for_host`), and logged.

Legend: S samples, rounded up to a power of two in a graph, D budget, L block length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlmgrid.kernels.draft_growth import (
    ENTROPY,
    FIRST_MARGIN,
    TEMPERED,
    Answer,
    Given,
    GrowthPlan,
    GrowthState,
    reference,
)
from dlmgrid.kernels.order_scores import OrderWeights, order_scores, stale_features
from dlmgrid.workers.decoding.commit_rules import CommitRule
from dlmgrid.workers.decoding.state import state_hashes
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import DraftInputs, DraftSetting
from dlmgrid.workers.drafting.growth import HEDGE_BELOW
from dlmgrid.workers.drafting.order_model import NUM_HEADS, OrderModel

LEVELS = 8
"""Levels of one submission; even, since a level reads one table and writes the other."""

MOST_POSITIONS = 64
"""Greatest L, and greatest 1 + D, that a growth on a device takes."""

_KINDS = {"tempered": TEMPERED, "plain": TEMPERED, "topk_margin": FIRST_MARGIN, "entropy": ENTROPY}


class GrowthOperators(NamedTuple):
    """What a growth is made of: the functions of ``kernels.draft_growth.reference``, or kernels with their names.

    ``open_scores`` (weights, state) prepares the order model, once for a state: ``prepare`` reads a round's
    snapshots, ``compute`` (table) fills ``state.scores``.
    """

    begin: Callable[[GrowthState], None]
    expand: Callable[..., None]
    merge: Callable[[GrowthState, int], None]
    cut: Callable[[GrowthState, int], None]
    answer: Callable[[GrowthState, int], None]
    open_scores: Callable[[OrderWeights, GrowthState], Any]


class TwinScores:
    """The order model by its twin, for the states of a growth."""

    def __init__(self, weights: OrderWeights, state: GrowthState) -> None:
        self._weights, self._state = weights, state
        num_samples, length = state.words.shape[0], state.plan.length
        self._stale = torch.zeros(num_samples, length, 72, device=state.words.device)

    def prepare(self) -> None:
        """Work out the features that the states of a round share."""
        given = self._given
        self._stale.copy_(
            stale_features(given.masked > 0, given.probabilities, given.entropy, given.tail_mass)
        )

    def compute(self, table: int) -> None:
        """Fill ``state.scores`` for the rows of ``table``."""
        given, state = self._given, self._state
        state.scores.copy_(
            order_scores(self._weights, self._stale, given.masked > 0, given.roots, state.tokens[table])
        )

    @property
    def _given(self) -> Given:
        return Given(self._state.words, self._state.plan.length)


TWINS = GrowthOperators(
    reference.begin, reference.expand, reference.merge, reference.cut, reference.answer, TwinScores
)


def order_weights(model: OrderModel, device: torch.device) -> OrderWeights:
    """The weights of an order model as its kernels read them: fp64, on ``device``."""
    named = {name: values.detach().to(device, torch.float64) for name, values in model.named_parameters()}

    def of_layers(*names: str) -> Tensor:
        """Parameters of all layers, stacked: [K, ...], or [K, names, ...] of several."""
        parts = [[named[f"layers.{layer}.{name}"] for name in names] for layer in range(len(model.layers))]
        return torch.stack([own[0] if len(names) == 1 else torch.stack(own) for own in parts]).contiguous()

    pairs = {name: of_layers(f"{name}.weight") for name in ("project", "merge", "up", "down")}
    biases = {f"{name}_bias": of_layers(f"{name}.bias") for name in pairs}
    norms = of_layers(
        "norm_attention.weight", "norm_attention.bias", "norm_feed_forward.weight", "norm_feed_forward.bias"
    )
    return OrderWeights(
        num_heads=NUM_HEADS, embed=named["embed.weight"], embed_bias=named["embed.bias"], **pairs, **biases,
        norms=norms.unflatten(1, (2, 2)), head=named["head.0.weight"], head_bias=named["head.0.bias"],
        score=named["head.2.weight"][0], score_bias=named["head.2.bias"],
    )  # fmt: skip


def reason_for_host(rule: CommitRule, block_length: int, budget: int, *, by_confidence: bool) -> str:
    """Why drafts of a decoder grow on the host, "" where they can grow on a device.

    ``by_confidence``: q follows the stale confidences, not an order model.
    """
    if rule.max_commits != 1 or rule.may_open_nothing:
        return f"a step of the rule {rule.name!r} may commit another number of positions than one"
    if by_confidence and rule.confidence not in _KINDS:
        return f"confidence {rule.confidence!r} is drawn for every state"
    if max(block_length, 1 + budget) > MOST_POSITIONS:
        return f"blocks of {block_length} and {budget} drafts: the kernels take {MOST_POSITIONS} positions and rows"
    return ""


def plan_of(inputs: DraftInputs, budget: int, min_log_mass: float) -> GrowthPlan:
    """What a growth from such inputs is built for."""
    return GrowthPlan(
        budget=budget,
        length=inputs.roots.shape[1],
        sub_block_length=inputs.rule.sub_block_length,
        temperature=inputs.temperature,
        stream=None if inputs.stream is None else int(inputs.stream),
        counts_draws=inputs.noise.mode == "commit_count",
        confidence=_KINDS.get(inputs.rule.confidence, TEMPERED),
        plain=inputs.rule.confidence == "plain",
        hedge_below=HEDGE_BELOW,
        min_log_mass=min_log_mass,
    )


@dataclass(slots=True)
class _Graph:
    """A part of a submission: run once launch by launch, which compiles it, then captured."""

    run: Callable[[], None]
    is_warm: bool = False
    graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *, captures: bool) -> None:
        if not captures or not self.is_warm:
            self.run()
            self.is_warm = True
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run()
        self.graph.replay()


class _Submission:
    """Buffers and graphs of one plan and number of samples."""

    def __init__(
        self,
        plan: GrowthPlan,
        num_samples: int,
        weights: OrderWeights | None,
        operators: GrowthOperators,
        device: torch.device,
    ) -> None:
        self._device, self._operators = device, operators
        self._is_gpu = device.type == "cuda"
        self._state = GrowthState(plan, num_samples, device)
        self._scores = None if weights is None else operators.open_scores(weights, self._state)
        self._up = torch.zeros_like(self._state.words, device="cpu", pin_memory=self._is_gpu)
        self._down = torch.zeros_like(self._state.answer, device="cpu", pin_memory=self._is_gpu)
        self._first, self._more = _Graph(self._start_growth), _Graph(self._grow_levels)
        self.given = Given(self._up, plan.length)
        self.answer = Answer(self._down, plan.budget, plan.length)

    def run(self, count: int) -> None:
        """Grow the trees of the first ``count`` samples, which ``given`` describes; they are in ``answer`` then."""
        self.given.is_valid[count:] = 0
        self._state.words.copy_(self._up, non_blocking=True)
        self._first(captures=self._is_gpu)
        self._fetch()
        while bool(self.answer.is_open.any()):
            self._more(captures=self._is_gpu)
            self._fetch()

    def queue_again(self) -> None:
        """Replay the first part, over what it was given; to be measured."""
        self._first(captures=self._is_gpu)

    def _fetch(self) -> None:
        self._down.copy_(self._state.answer, non_blocking=True)
        if self._is_gpu:
            torch.cuda.current_stream(self._device).synchronize()

    def _start_growth(self) -> None:
        self._operators.begin(self._state)
        if self._scores is not None:
            self._scores.prepare()
        self._grow_levels()

    def _grow_levels(self) -> None:
        operators, state = self._operators, self._state
        for level in range(LEVELS):
            table = level % 2
            if self._scores is not None:
                self._scores.compute(table)
            operators.expand(state, table, by_scores=self._scores is not None)
            operators.merge(state, table)
            operators.cut(state, table)
        operators.answer(state, 0)


class DeviceGrowth:
    """Grows trees on ``device``.

    Args:
        weights: of the order model, on the device; None: q follows the stale confidences.
        operators: the kernels, or their twins, which run on any device.
        min_log_mass: states below it are left out.
    """

    def __init__(
        self,
        device: torch.device,
        weights: OrderWeights | None,
        operators: GrowthOperators,
        *,
        min_log_mass: float = -torch.inf,
    ) -> None:
        self.device, self._weights, self._operators = device, weights, operators
        self._min_log_mass = min_log_mass
        self._submissions: dict[tuple[GrowthPlan, int], _Submission] = {}
        self._last: _Submission | None = None

    @torch.inference_mode()
    def grow(self, inputs: DraftInputs, tree: DraftTree) -> None:
        """Fill ``tree``, on the CPU like the inputs, as ``growth.grow`` does.

        Raises ValueError for a rule or a size that :func:`reason_for_host` names.
        """
        count, length = inputs.roots.shape
        if tree.budget == 0:
            return
        reason = reason_for_host(inputs.rule, length, tree.budget, by_confidence=self._weights is None)
        if reason:
            raise ValueError(f"drafts cannot grow on the device: {reason}")
        plan = plan_of(inputs, tree.budget, self._min_log_mass)
        key = (plan, 1 << (count - 1).bit_length())
        submission = self._submissions.get(key)
        if submission is None:
            submission = _Submission(*key, self._weights, self._operators, self.device)
            self._submissions[key] = submission
        self._last = submission
        _fill(submission.given, inputs)
        submission.run(count)
        _read(submission.answer, tree)

    @torch.inference_mode()
    def queue_again(self) -> None:
        """Queue the levels of the last round again. Raises RuntimeError before there is one."""
        if self._last is None:
            raise RuntimeError("nothing was grown yet")
        self._last.queue_again()


def _fill(given: Given, inputs: DraftInputs) -> None:
    """Describe the samples of a round in the first rows of ``given``."""
    snapshots, rows = inputs.snapshots, slice(0, inputs.roots.shape[0])
    given.is_valid[rows] = snapshots.is_valid
    given.commit_counts[rows] = inputs.commit_counts
    given.block_starts[rows] = inputs.block_starts
    given.keys[rows] = inputs.keys
    given.allows_complete[rows] = int(inputs.allows_complete)
    given.roots[rows] = inputs.roots
    given.masked[rows] = snapshots.masked
    given.entropy[rows] = snapshots.entropy
    given.tail_mass[rows] = snapshots.tail_mass
    given.log_tempered_mass[rows] = snapshots.log_tempered_mass
    given.token_ids[rows] = snapshots.token_ids
    given.probabilities[rows] = snapshots.probabilities


def _read(answer: Answer, tree: DraftTree) -> None:
    """Put the trees of the first samples of ``answer`` behind their planted roots."""
    rows = slice(0, tree.tokens.shape[0])
    states: Tensor = answer.tokens[rows]
    tree.tokens[:, 1:] = states
    tree.parents[:, 1:] = answer.parents[rows]
    tree.depths[:, 1:] = answer.depths[rows]
    tree.log_mass[:, 1:] = answer.log_mass[rows]
    tree.hashes[:, 1:] = state_hashes(states)
    tree.num_nodes[:] = answer.num_states[rows] + 1


def growth_operators(kernels: str) -> GrowthOperators:
    """The operators of a kernel set, ``torch`` or ``triton``. Raises ValueError for another name."""
    if kernels == "torch":
        return TWINS
    if kernels != "triton":
        raise ValueError(f"kernels {kernels!r} have no growth; want torch or triton")
    from dlmgrid.kernels.draft_growth import kernel  # Triton is imported where it is asked for
    from dlmgrid.kernels.order_scores.kernel import OrderScores

    return GrowthOperators(kernel.begin, kernel.expand, kernel.merge, kernel.cut, kernel.answer, OrderScores)


def place_growth(
    device: torch.device,
    setting: DraftSetting | None,
    weights: Callable[[], OrderWeights] | None,
    *,
    kernels: str = "triton",
    min_log_mass: float = -torch.inf,
) -> tuple[DeviceGrowth | None, str]:
    """A growth on ``device`` where ``setting`` allows one, and where trees grow, with the reason if that is the host
    although there is a setting.

    ``weights``: gives those of the order model; None: q follows the stale confidences. States are kept apart from the
    target only where its kernels are Triton's, so these are what is there.
    """
    if setting is None:
        return None, "host"
    reason = reason_for_host(
        setting.rule, setting.block_length, setting.budget, by_confidence=weights is None
    )
    if reason:
        return None, f"host: {reason}"
    operators = growth_operators(kernels)
    growth = DeviceGrowth(
        device, None if weights is None else weights(), operators, min_log_mass=min_log_mass
    )
    return growth, f"device: {device}, {kernels} kernels"
