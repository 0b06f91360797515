"""How a step draws tokens and rates positions: filters, confidences, and what is done about end tokens.

The token of a row is the argmax of its logits at T = 0, else of logits / T + Gumbel noise, after the filters. The
*confidence* is what a commit rule orders positions by; its published forms, by the names of their sources:

    tempered        tempered probability of the drawn token, before filters (SDAR as OpenCompass runs it)
    plain           probability of the drawn token under the logits as they are (``low_confidence`` of ML-GSAI/LLaDA
                    generate.py; Nemotron-Labs-Diffusion, SGLang)
    random          uniform noise (ML-GSAI/LLaDA generate.py, remasking="random")
    maskgit_plus    tempered, filtered probability of the drawn token (DreamLM/Dream generation_utils.py)
    topk_margin     lead of the first over the second tempered, filtered probability (same)
    entropy         Σ p log(p + 1e-10), the negative entropy, of the tempered, filtered distribution (same)
    origin          none: every position opens with the probability that the schedule gives (same)
    certainty       e^-H, H the entropy in nats of the tempered, filtered distribution (what Labman42/JetEngine's
                    entropy_bounded sums up, brought into [0, 1])

Every function treats rows apart. Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dlmgrid.kernels.logits import Choice, choose, token_probabilities
from dlmgrid.workers.cell import Cell

CONFIDENCES = ("tempered", "plain", "random", "maskgit_plus", "topk_margin", "entropy", "origin", "certainty")

READS_STEP = ("origin",)
"""Confidences whose noise is keyed by the step of the block: a step may open nothing, and the next draws anew."""

EOS_POLICIES = ("none", "logits_eos_inf", "confidence_eos_eot_inf")
"""What is done about end tokens (LLaDA, arXiv 2502.09992, appendix B.4): nothing; the end token is never drawn;
positions that drew a token that ends a text or turn are opened last."""

LEAST_CONFIDENCE = torch.finfo(torch.float32).min
"""Below every confidence, and above the -inf of a position that is not masked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The settings of a draw.

    ``alg_temp`` above 0 chooses positions at random, by the softmax of confidence / alg_temp, without replacement.
    ``top_p`` and ``top_k`` filter the tempered distribution, in this order; None filters nothing.
    """

    confidence: str = "tempered"
    alg_temp: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    eos_policy: str = "none"

    def __post_init__(self) -> None:
        if self.confidence not in CONFIDENCES:
            raise ValueError(f"confidence {self.confidence!r} is not one of {', '.join(CONFIDENCES)}")
        if self.eos_policy not in EOS_POLICIES:
            raise ValueError(f"eos_policy {self.eos_policy!r} is not one of {', '.join(EOS_POLICIES)}")
        if not self.alg_temp >= 0:
            raise ValueError(f"alg_temp is {self.alg_temp}, it must not be negative")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, it must lie above 0 and at most at 1")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}, it must be at least 1")


DEFAULT_SAMPLING = Sampling()
"""The tempered probability of the drawn token, nothing filtered."""


def sampling_of(cell: Cell) -> Sampling:
    """The draw of a cell. Raises ValueError for a setting out of range."""
    return Sampling(
        confidence=cell.confidence,
        alg_temp=cell.alg_temp or 0.0,
        top_p=cell.top_p,
        top_k=cell.top_k,
        eos_policy=cell.eos_policy or "none",
    )


class PositionNoise(NamedTuple):
    """The noise of choosing positions, read only where a setting asks for it: uniforms fp64 [R], Gumbel fp32 [R]."""

    uniform: Callable[[], Tensor]
    gumbel: Callable[[], Tensor]


class Drawn(NamedTuple):
    """``choice`` of each row; ``confidence`` fp32 [R], what the commit rule compares."""

    choice: Choice
    confidence: Tensor


def forbid_tokens(logits: Tensor, sampling: Sampling, end_token_ids: tuple[int, ...]) -> Tensor:
    """``logits`` [R, V] with the end token's column at -inf where the policy says so; else themselves.

    ``end_token_ids``: the end-of-text token first, then those that end a turn.
    """
    if sampling.eos_policy == "logits_eos_inf" and end_token_ids:
        logits[:, end_token_ids[0]] = -torch.inf
    return logits


def needs_logits(sampling: Sampling, temperature: float) -> bool:
    """Whether a draw reads more of the logits than the choice from them as they are."""
    filters = (sampling.top_p is not None and sampling.top_p < 1) or sampling.top_k is not None
    if filters or sampling.confidence in ("topk_margin", "entropy"):
        return True
    return sampling.confidence in ("plain", "certainty") and temperature not in (0, 1)


def draw(
    logits: Tensor | None,
    sampling: Sampling,
    temperature: float,
    token_noise: Tensor | None,
    position_noise: PositionNoise,
    end_token_ids: tuple[int, ...] = (),
    *,
    choose_from: Callable[[Tensor], Choice] | None = None,
    entropies: Tensor | None = None,
) -> Drawn:
    """Draw the token of each row of ``logits`` fp32 [R, V] and rate its position.

    ``logits`` may be None where :func:`needs_logits` is false and ``choose_from`` knows the choice.
    ``token_noise``: Gumbel fp32 [R, V] at T > 0, None at T = 0. ``choose_from``: what chooses from the filtered logits
    instead, with noise of its own; where nothing is filtered it is shown ``logits`` itself. ``entropies`` fp32 [R] of
    the rows at T = 1, where ``logits`` is None.
    """
    if logits is None:
        assert choose_from is not None, "a draw without logits is told its choice"
        assert not needs_logits(sampling, temperature), "this draw reads the logits"
        filtered = torch.empty(0)
        logits = filtered
    else:
        filtered = filter_logits(logits, temperature, sampling.top_p, sampling.top_k)
    choice = choose(filtered, temperature, token_noise) if choose_from is None else choose_from(filtered)
    if sampling.confidence == "certainty" and entropies is not None:
        confidence = (-entropies).exp()
    else:
        confidence = _rate(logits, filtered, choice, sampling, temperature, position_noise)
    if sampling.alg_temp > 0:
        confidence = (confidence / sampling.alg_temp + position_noise.gumbel()).clamp_min(LEAST_CONFIDENCE)
    if sampling.eos_policy == "confidence_eos_eot_inf":
        ends = torch.tensor(end_token_ids, dtype=choice.tokens.dtype, device=choice.tokens.device)
        confidence = torch.where(torch.isin(choice.tokens, ends), LEAST_CONFIDENCE, confidence)
    return Drawn(choice, confidence)


def filter_logits(logits: Tensor, temperature: float, top_p: float | None, top_k: int | None) -> Tensor:
    """``logits`` with -inf where nucleus (first) and top-k filters drop a token; ties at a boundary by id.

    The nucleus is the fewest likeliest tokens whose tempered mass exceeds ``top_p``; at T = 0 nothing is tempered.
    """
    if top_p is not None and top_p < 1:
        tempered = logits if temperature in (0, 1) else logits / temperature
        ranked, order = tempered.sort(dim=1, descending=True, stable=True)
        terms = (ranked - ranked[:, :1]).exp()
        before = (terms / terms.sum(dim=1, keepdim=True)).cumsum(dim=1)
        dropped = torch.zeros_like(before, dtype=torch.bool)
        dropped[:, 1:] = before[:, :-1] > top_p
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -torch.inf)
    if top_k is not None and top_k < logits.shape[1]:
        order = logits.sort(dim=1, descending=True, stable=True).indices[:, top_k:]
        logits = logits.scatter(1, order, -torch.inf)
    return logits


def _rate(
    logits: Tensor,
    filtered: Tensor,
    choice: Choice,
    sampling: Sampling,
    temperature: float,
    position_noise: PositionNoise,
) -> Tensor:
    kind = sampling.confidence
    if kind == "random":
        return position_noise.uniform().float()
    if kind == "origin":
        return -position_noise.uniform().float()
    if kind == "maskgit_plus":
        return choice.probabilities
    if kind == "tempered":
        if filtered is logits:
            return choice.probabilities
        return _distribution(logits, temperature).gather(1, choice.tokens[:, None]).squeeze(1)
    if kind == "plain":
        if filtered is logits and temperature in (0, 1):
            return choice.probabilities
        return token_probabilities(logits, choice.tokens)
    probabilities = _distribution(filtered, temperature)
    if kind == "topk_margin":
        two = probabilities.topk(2, dim=1).values
        return two[:, 0] - two[:, 1]
    if kind == "certainty":
        return (-_sum_rows(torch.special.entr(probabilities))).exp()
    return _sum_rows(probabilities * (probabilities + 1e-10).log())


def _distribution(logits: Tensor, temperature: float) -> Tensor:
    """Tempered probabilities fp32 [R, V], as quotients of the softmax's own terms."""
    tempered = logits if temperature in (0, 1) else logits / temperature
    terms = (tempered - tempered.amax(dim=1, keepdim=True)).exp()
    return terms / _sum_rows(terms)[:, None]


def _sum_rows(terms: Tensor) -> Tensor:
    """Sums of rows [R]. A lone row is summed as one of two, since torch splits a single reduction between threads."""
    return (terms if terms.shape[0] > 1 else terms.expand(2, -1)).sum(dim=1)[: terms.shape[0]]
