"""The passes over the logits: token choice, its probability, the stale summary, and the row digest."""

from dlmgrid.kernels.logits.reference import (
    NUM_CANDIDATES,
    Choice,
    LogitsPass,
    Summary,
    choose,
    logits_pass,
    row_digests,
    summarize,
    token_probabilities,
)

__all__ = [
    "NUM_CANDIDATES",
    "Choice",
    "LogitsPass",
    "Summary",
    "choose",
    "logits_pass",
    "row_digests",
    "summarize",
    "token_probabilities",
]
