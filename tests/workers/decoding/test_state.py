"""Hashes of states: one function, whatever computes it."""

from __future__ import annotations

import torch

from dlmgrid.workers.decoding.state import MASKED, commit_hashes, state_hashes
from dlmgrid.workers.decoding.tree import DraftTree


def test_a_hash_is_the_same_alone_and_among_others() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(-1, 2**31 - 1, (5, 32), generator=generator, dtype=torch.int32)
    tokens[:, 3] = MASKED
    positions = torch.arange(32)
    together = commit_hashes(positions, tokens)
    # a hash without dimensions is worked out by torch, others on the CPU by numpy
    alone = torch.stack([commit_hashes(p, t) for row in tokens for p, t in zip(positions, row, strict=True)])
    assert torch.equal(together.flatten(), alone)
    assert together[:, 3].eq(0).all() and together.unique().numel() > 5 * 30
    assert torch.equal(state_hashes(tokens), together.sum(dim=-1))


def test_nodes_are_found_by_their_state() -> None:
    tree = DraftTree(2, 3, 4, torch.device("cpu"))
    tree.plant(torch.tensor([[7, MASKED, MASKED, MASKED], [MASKED] * 4], dtype=torch.int32))
    tree.tokens[0, 1] = torch.tensor([7, 8, MASKED, MASKED], dtype=torch.int32)
    tree.num_nodes[0] = 2
    first, second = tree.nodes_by_state()
    assert [first[tree.tokens[0, node].numpy().tobytes()] for node in (0, 1)] == [0, 1]
    assert list(second.values()) == [0]  # entries past the last node are none
