"""Torch twin of the logits pass.

Rows are fp32 [R, V] with -inf where a token may not be chosen (the mask token, padding of the vocabulary).
Every function treats rows apart: what else is in the batch changes no bit, given that V is a multiple of the
CPU's vector width (the engine pads it to 64), so that no element falls into a scalar tail.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from dlmgrid.kernels.philox import gumbel_rows

NUM_CANDIDATES = 32

_DIGEST_SEED = 0x9E3779B97F4A7C15


class Choice(NamedTuple):
    """What the commit rule needs of each row.

    ``tokens`` int64 [R]; ``probabilities`` fp32 [R], the tempered probability of the chosen token;
    ``margins`` fp32 [R], the lead of the chosen score over the next one (scores are perturbed at T > 0).
    """

    tokens: Tensor
    probabilities: Tensor
    margins: Tensor


class Summary(NamedTuple):
    """What a drafter may know of each row.

    ``token_ids`` int64 [R, 32] and ``probabilities`` fp32 [R, 32]: the most probable tokens at T = 1, by value
    descending, then id ascending, ties at the boundary by id. ``entropy`` fp32 [R] in nats over the whole
    vocabulary; ``tail_mass`` fp32 [R] outside the 32; ``log_tempered_mass`` fp32 [R] = log Σ p^(1/T), which turns
    a stored probability into a tempered one.
    """

    token_ids: Tensor
    probabilities: Tensor
    entropy: Tensor
    tail_mass: Tensor
    log_tempered_mass: Tensor


class LogitsPass(NamedTuple):
    """All that one pass over the logits gives: ``digests`` int64 [R], ``log_sums`` fp32 [R] (log-sum-exp at T = 1)."""

    choice: Choice
    summary: Summary
    digests: Tensor
    log_sums: Tensor


def logits_pass(
    logits: Tensor, temperature: float, *, noise: tuple[Tensor, int, Tensor, Tensor] | None = None
) -> LogitsPass:
    """Choice, summary, digest and log-sum-exp of each row of fp32 [R, V].

    ``noise``: (keys int64 [R, 2], stream, positions int64 [R], draw indices int64 [R]) of the noise table at T > 0,
    None at T = 0. Raises ValueError where it is missing or not wanted.
    """
    gumbel = None if noise is None else gumbel_rows(*noise, logits.shape[1])
    choice = choose(logits, temperature, gumbel)
    _, total = _exponentials(logits)
    log_sums = logits.amax(dim=1) + total.squeeze(1).log()
    return LogitsPass(choice, summarize(logits, temperature), row_digests(logits), log_sums)


def _first_argmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and its lowest index, [R] each; torch leaves the index of a tie open."""
    best = scores.amax(dim=1)
    return best, (scores == best[:, None]).to(torch.int8).argmax(dim=1)


def _exponentials(rows: Tensor) -> tuple[Tensor, Tensor]:
    """exp(x - max) [R, V] and its sum [R, 1]: the softmax's own terms.

    A probability is the quotient of the two. exp(x - logsumexp) would lose it: near 1 the rounding of the
    logsumexp is many times the distance between neighbouring confidences, and the order of commits would be a
    matter of ties. A lone row is summed as one of two, since torch splits a single reduction between threads.
    """
    terms = (rows - rows.amax(dim=1, keepdim=True)).exp()
    pair = terms if terms.shape[0] > 1 else terms.expand(2, -1)
    return terms, pair.sum(dim=1, keepdim=True)[: terms.shape[0]]


def choose(logits: Tensor, temperature: float, gumbel: Tensor | None) -> Choice:
    """Choose a token for each row: argmax at T = 0, else argmax of logits / T + Gumbel noise; ties to the lowest id.

    Args:
        logits: fp32 [R, V].
        temperature: T ≥ 0.
        gumbel: fp32 [R, V] at T > 0, None at T = 0.

    Raises:
        ValueError: noise is missing at T > 0 or given at T = 0.
    """
    if (gumbel is None) != (temperature == 0):
        raise ValueError(f"temperature {temperature} {'needs' if temperature else 'takes no'} noise")
    tempered = logits if temperature in (0, 1) else logits / temperature
    scores = tempered if gumbel is None else tempered + gumbel
    best, tokens = _first_argmax(scores)
    terms, total = _exponentials(tempered)
    probabilities = (terms.gather(1, tokens[:, None]) / total).squeeze(1)
    runner_up = scores.scatter(1, tokens[:, None], -torch.inf).amax(dim=1)
    return Choice(tokens, probabilities, best - runner_up)


def token_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """fp32 [R]: the probability at T = 1 of ``tokens`` int64 [R] under ``logits`` fp32 [R, V]."""
    terms, total = _exponentials(logits)
    return (terms.gather(1, tokens[:, None]) / total).squeeze(1)


def summarize(logits: Tensor, temperature: float) -> Summary:
    """Top-32 candidates and summary statistics of each row; ``temperature`` enters ``log_tempered_mass`` only."""
    terms, total = _exponentials(logits)
    probabilities = terms / total
    token_ids = _top_ids(logits)
    top = probabilities.gather(1, token_ids)
    entropy = torch.special.entr(probabilities).sum(dim=1)
    if temperature in (0, 1):
        log_tempered_mass = torch.zeros_like(entropy)
    else:
        tempered_total = _exponentials(logits / temperature)[1]
        log_tempered_mass = (tempered_total.log() - total.log() / temperature).squeeze(1)
    # Summed, not taken as a difference from 1: beside a probability near 1 it is far below the rounding of 1.
    tail_mass = terms.scatter(1, token_ids, 0.0).sum(dim=1) / total.squeeze(1)
    return Summary(token_ids, top, entropy, tail_mass, log_tempered_mass)


def _top_ids(logits: Tensor) -> Tensor:
    """int64 [R, 32]: ids by value descending then id ascending, also across the boundary of the 32."""
    count = NUM_CANDIDATES
    values, ids = logits.topk(count + 1, dim=1)
    order = ids[:, :count].sort(dim=1).indices
    values_by_id = values[:, :count].gather(1, order)
    ids_by_id = ids[:, :count].gather(1, order)
    by_value = values_by_id.sort(dim=1, descending=True, stable=True).indices
    out = ids_by_id.gather(1, by_value)
    tied = values[:, count - 1] == values[:, count]
    if bool(tied.any()):
        rows = logits[tied].sort(dim=1, descending=True, stable=True).indices
        out[tied] = rows[:, :count]
    return out


@functools.lru_cache(maxsize=8)
def _multipliers(vocab_size: int, device: torch.device) -> Tensor:
    """Odd int64 multipliers [V], from the splitmix64 sequence."""
    words = []
    state = _DIGEST_SEED
    for _ in range(vocab_size):
        state = (state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        z = (z ^ (z >> 31)) | 1
        words.append(z - 2**64 if z >= 2**63 else z)
    return torch.tensor(words, dtype=torch.int64, device=device)


def row_digests(logits: Tensor) -> Tensor:
    """int64 [R]: Σ_v bits(logit_v) · m_v modulo 2^64 with odd m_v, over the bits of fp32 [R, V].

    Integer addition commutes, so the order in which a kernel adds changes nothing.
    """
    bits = logits.view(torch.int32).to(torch.int64)
    return (bits * _multipliers(logits.shape[1], logits.device)).sum(dim=1)
