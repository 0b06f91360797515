"""The draft tree: unique states in topological order, as preallocated tensors.

Chains, trees and graphs whose nodes have several parents are one type: acceptance is equality of states, so an
edge is never looked at. Node 0 is the root; a node's parents have lower indices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED, state_hashes

_TENSORS = ("tokens", "parents", "depths", "log_mass", "hashes", "num_nodes")


class DraftTree:
    """Drafted states of S samples.

    Attributes:
        tokens: int32 [S, 1 + D, L], MASKED where a position is masked.
        parents: int32 [S, 1 + D], -1 for the root.
        depths: int32 [S, 1 + D], target steps from the root.
        log_mass: fp64 [S, 1 + D], the drafter's log probability that the path goes through the node.
        hashes: int64 [S, 1 + D].
        num_nodes: int64 [S], root included; entries past it are undefined.
    """

    def __init__(self, num_samples: int, budget: int, block_length: int, device: torch.device) -> None:
        shape = (num_samples, 1 + budget)
        self.budget = budget
        self.tokens = torch.full((*shape, block_length), MASKED, dtype=torch.int32, device=device)
        self.parents = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.depths = torch.zeros(shape, dtype=torch.int32, device=device)
        self.log_mass = torch.zeros(shape, dtype=torch.float64, device=device)
        self.hashes = torch.zeros(shape, dtype=torch.int64, device=device)
        self.num_nodes = torch.ones(num_samples, dtype=torch.int64, device=device)

    def plant(self, roots: Tensor) -> None:
        """Start anew from roots int32 [S, L]: every tree is its root alone."""
        self.tokens[:, 0] = roots
        if self.budget:  # no step leads to a root, so without drafts no one asks for its hash
            self.hashes[:, 0] = state_hashes(roots)
        self.num_nodes.fill_(1)

    def is_node(self) -> Tensor:
        """bool [S, 1 + D]: which entries are nodes."""
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return index[None, :] < self.num_nodes[:, None]

    def find(self, samples: Tensor, states: Tensor) -> Tensor:
        """Indices of the nodes equal to ``states``, -1 where there is none.

        Args:
            samples: int64 [A], which tree each state is sought in.
            states: int32 [A, L].
        """
        same_hash = (self.hashes[samples] == state_hashes(states)[:, None]) & self.is_node()[samples]
        same = same_hash & (self.tokens[samples] == states[:, None, :]).all(dim=-1)
        found = same.to(torch.int8).argmax(dim=1)
        return torch.where(same.any(dim=1), found, torch.full_like(found, -1))

    def nodes_by_state(self) -> list[dict[bytes, int]]:
        """For each sample, the index of the node that holds a state, by the state's bytes (int32 [L])."""
        states, counts = self.tokens.cpu().numpy(), self.num_nodes.tolist()
        return [
            {own[node].tobytes(): node for node in range(count - 1, -1, -1)}
            for own, count in zip(states, counts, strict=True)
        ]

    def select(self, samples: Tensor) -> DraftTree:
        """The trees of ``samples`` (int64 [A]) as a struct of its own."""
        out: DraftTree = object.__new__(DraftTree)
        out.budget = self.budget
        for name in _TENSORS:
            setattr(out, name, getattr(self, name)[samples])
        return out

    def keep(self, kept: Tensor) -> None:
        """Drop the nodes that are not ``kept`` (bool [S, 1 + D]); roots always stay, and so does the order.

        A node whose parent is dropped becomes a child of the root; acceptance never looks at edges.
        """
        kept = kept & self.is_node()
        kept[:, 0] = True
        order = (~kept).to(torch.int8).sort(dim=1, stable=True).indices
        place = (kept.cumsum(dim=1) - 1).to(torch.int32)
        has_parent = self.parents >= 0
        parent = self.parents.clamp_min(0).long()
        moved = torch.where(kept.gather(1, parent), place.gather(1, parent), 0)
        self.parents = torch.where(has_parent, moved, self.parents).gather(1, order)
        self.tokens = self.tokens.gather(1, order[..., None].expand_as(self.tokens))
        for name in ("depths", "log_mass", "hashes"):
            setattr(self, name, getattr(self, name).gather(1, order))
        self.num_nodes = kept.sum(dim=1)
