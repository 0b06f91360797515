"""States of a block: rows of an int32 tensor with a sentinel for masked positions, and their 64-bit hashes.

Legend: S samples in flight, N nodes (root first), L block length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MASKED = -1
"""The sentinel of a masked position. Never the mask token's id: a prompt may hold that id as text."""

_C1 = 0xBF58476D1CE4E5B9 - 2**64
_C2 = 0x94D049BB133111EB - 2**64
_POSITION = 0x9E3779B97F4A7C15 - 2**64
_WORDS = tuple(np.uint64(word % 2**64) for word in (1, _POSITION, 30, 27, 31, _C1, _C2))


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Logical right shift of int64 words."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def commit_hashes(positions: Tensor, tokens: Tensor) -> Tensor:
    """The hash of one filled position, int64 of the broadcast shape: splitmix64 of (position in block, token).

    A masked position hashes to 0, so that the hash of a state is the sum over its filled positions and a commit
    adds its own hash to its parent's.
    """
    if (
        tokens.device.type == "cpu" and tokens.dim()
    ):  # states are tiny, and numpy's calls take a third of the time
        return torch.from_numpy(_commit_hashes(positions.numpy(), tokens.numpy()))
    words = (positions.to(torch.int64) + 1) * _POSITION + tokens.to(torch.int64)
    words = (words ^ _shift_right(words, 30)) * _C1
    words = (words ^ _shift_right(words, 27)) * _C2
    words = words ^ _shift_right(words, 31)
    return torch.where(tokens == MASKED, torch.zeros_like(words), words)


def _commit_hashes(positions: NDArray[Any], tokens: NDArray[Any]) -> NDArray[np.int64]:
    """``commit_hashes`` of arrays with at least one dimension."""
    one, position, by_30, by_27, by_31, first, second = _WORDS
    words = (positions.astype(np.uint64) + one) * position
    words = words + tokens.astype(np.int64).view(np.uint64)
    words ^= words >> by_30
    words *= first
    words ^= words >> by_27
    words *= second
    words ^= words >> by_31
    words *= tokens != MASKED
    return words.view(np.int64)


def state_hashes(states: Tensor) -> Tensor:
    """int64 [...] hashes of int32 states [..., L]; equal states have equal hashes."""
    positions = torch.arange(states.shape[-1], device=states.device)
    return commit_hashes(positions, states).sum(dim=-1)


def num_masked(states: Tensor) -> Tensor:
    """int64 [...]: positions still masked in states [..., L]."""
    return (states == MASKED).sum(dim=-1)


def stopped_states(states: Tensor, stops: tuple[int, ...], first: Tensor | int = 0) -> Tensor:
    """bool [...]: whether states int32 [..., L] hold one of ``stops`` at or after position ``first`` (an integer, or
    int64 [..., 1]) with nothing masked before it."""
    positions = torch.arange(states.shape[-1], device=states.device)
    is_open = (states == MASKED).cumsum(dim=-1) == 0
    is_stop = torch.isin(states, torch.tensor(stops, dtype=states.dtype, device=states.device))
    return (is_stop & is_open & (positions >= first)).any(dim=-1)
