"""Snapshots: all that a drafter may know of the last target pass on a sample's block.

Preallocated tensors of S samples; position i of a row is position i of the block. Only positions that were masked
in the state the pass saw hold values; the state itself is older than the root by one step, hence *stale*.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlmgrid.kernels.logits import NUM_CANDIDATES, Summary


class Snapshots:
    """Stale distributions of S samples.

    Attributes:
        masked: bool [S, L], the positions that hold values.
        token_ids: int64 [S, L, 32]; probabilities: fp32 [S, L, 32], as ``kernels.logits.Summary`` orders them.
        entropy, tail_mass, log_tempered_mass: fp32 [S, L].
        is_valid: bool [S]; False where nothing stale is known: a fresh block without a two-block window.
        hidden: fp32 [S, L, H], what the target's head read at each position; None unless a drafter reads it.
    """

    def __init__(
        self, num_samples: int, block_length: int, device: torch.device, *, hidden_size: int | None = None
    ) -> None:
        shape = (num_samples, block_length)
        self.masked = torch.zeros(shape, dtype=torch.bool, device=device)
        self.token_ids = torch.zeros((*shape, NUM_CANDIDATES), dtype=torch.int64, device=device)
        self.probabilities = torch.zeros((*shape, NUM_CANDIDATES), device=device)
        self.entropy = torch.zeros(shape, device=device)
        self.tail_mass = torch.zeros(shape, device=device)
        self.log_tempered_mass = torch.zeros(shape, device=device)
        self.is_valid = torch.zeros(num_samples, dtype=torch.bool, device=device)
        self.hidden = None if hidden_size is None else torch.zeros((*shape, hidden_size), device=device)

    @classmethod
    def of(
        cls,
        *,
        masked: Tensor,
        token_ids: Tensor,
        probabilities: Tensor,
        entropy: Tensor,
        tail_mass: Tensor,
        log_tempered_mass: Tensor,
        is_valid: Tensor,
        hidden: Tensor | None = None,
    ) -> Snapshots:
        """A struct around existing tensors, of the shapes in the class docstring; nothing is copied."""
        out = object.__new__(cls)
        out.masked = masked
        out.token_ids = token_ids
        out.probabilities = probabilities
        out.entropy = entropy
        out.tail_mass = tail_mass
        out.log_tempered_mass = log_tempered_mass
        out.is_valid = is_valid
        out.hidden = hidden
        return out

    def invalidate(self, samples: Tensor) -> None:
        """Forget the snapshots of ``samples`` (int64): their block is new."""
        self.is_valid[samples] = False

    def store(
        self,
        samples: Tensor,
        masked: Tensor,
        row_samples: Tensor,
        positions: Tensor,
        summary: Summary,
        hidden: Tensor | None = None,
    ) -> None:
        """Replace the snapshots of some samples.

        Args:
            samples: int64 [A], whose; masked: bool [A, L], the masked positions of the state that the pass saw.
            row_samples: int64 [R], the sample of each summarised row; positions: int64 [R], its position.
            summary: of the R rows; hidden: [R, H], what the head read, needed where hidden states are kept.
        """
        self.masked[samples] = masked
        self.is_valid[samples] = True
        at = row_samples * self.masked.shape[1] + positions
        for name in Summary._fields:
            getattr(self, name).flatten(0, 1).index_copy_(0, at, getattr(summary, name))
        if self.hidden is not None:
            if hidden is None:
                raise ValueError("hidden states are kept here, and none were given")
            self.hidden[row_samples, positions] = hidden.float()

    def take(self, samples: Tensor, other: Snapshots, rows: Tensor) -> None:
        """Replace the snapshots of ``samples`` (int64 [A]) by the ``rows`` (int64 [A]) of another struct."""
        for name in (*_PER_POSITION, "is_valid"):
            getattr(self, name)[samples] = getattr(other, name)[rows]
        if self.hidden is not None and other.hidden is not None:
            self.hidden[samples] = other.hidden[rows]

    def to(self, device: torch.device, *, with_hidden: bool = True) -> Snapshots:
        """The snapshots on another device, with their hidden states where they hold any and these are asked for."""
        hidden = self.hidden if with_hidden else None
        return Snapshots.of(
            **{name: getattr(self, name).to(device) for name in (*_PER_POSITION, "is_valid")},
            hidden=None if hidden is None else hidden.to(device),
        )

    def select(self, samples: Tensor) -> Snapshots:
        """The snapshots of ``samples`` (int64 [A]) as a struct of its own, A rows; of one sample, a view."""
        if samples.numel() == 1:
            first = int(samples)
            return Snapshots.of(
                **{name: getattr(self, name)[first : first + 1] for name in (*_PER_POSITION, "is_valid")},
                hidden=None if self.hidden is None else self.hidden[first : first + 1],
            )
        return Snapshots.of(
            **{name: getattr(self, name)[samples] for name in (*_PER_POSITION, "is_valid")},
            hidden=None if self.hidden is None else self.hidden[samples],
        )


_PER_POSITION = ("masked", "token_ids", "probabilities", "entropy", "tail_mass", "log_tempered_mass")
