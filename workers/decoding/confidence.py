"""What a commit rule compares: the confidence of the token chosen at a position, by name.

``tempered``: the probability of the chosen token under softmax(logits / T), before any filter. ``plain``: under
softmax(logits), whatever the temperature, as LLaDA, Nemotron-Labs-Diffusion and SGLang gate their commits. At T = 0
and T = 1 the two are one.
"""

from __future__ import annotations

from torch import Tensor

from dlmgrid.kernels.logits import Choice, token_probabilities

CONFIDENCES = ("tempered", "plain")


def confidence_of(name: str, logits: Tensor, temperature: float, choice: Choice) -> Tensor:
    """Confidence fp32 [R] of what was chosen from ``logits`` fp32 [R, V]."""
    if name == "plain" and temperature not in (0, 1):
        return token_probabilities(logits, choice.tokens)
    return choice.probabilities
