"""The chain in one sweep is the chain step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dlmgrid.kernels.logits import summarize
from dlmgrid.workers.decoding.commit_rules import static
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.drafting.ssd import ChainDrafter


@pytest.mark.parametrize("allows_complete", [False, True])
@pytest.mark.parametrize("budget", [1, 6, 30])
def test_a_chain_of_single_commits_is_the_same_step_by_step(budget: int, allows_complete: bool) -> None:
    generator = torch.Generator().manual_seed(budget)
    num_samples, length = 6, 12
    roots = torch.full((num_samples, length), MASKED, dtype=torch.int32)
    for sample in range(num_samples):
        roots[sample, torch.randperm(length, generator=generator)[: 2 * sample + 1]] = 3
    roots[-1] = 3
    masked = roots == MASKED
    of, position = masked.nonzero(as_tuple=True)
    logits = torch.randn(of.numel(), 50, generator=generator) * 20
    logits[::3] = 0.0
    logits[::3, 5] = 300.0  # many are as sure as each other
    snapshots = Snapshots(num_samples, length, torch.device("cpu"))
    snapshots.store(torch.arange(num_samples), masked, of, position, summarize(logits, 0.0))
    snapshots.invalidate(torch.tensor([2]))
    inputs = DraftInputs(
        roots=roots, commit_counts=(roots != MASKED).sum(dim=1),
        block_starts=torch.zeros(num_samples, dtype=torch.int64),
        keys=torch.zeros(num_samples, 2, dtype=torch.int64), snapshots=snapshots, rule=static(1), temperature=0.0,
        noise=NoiseTable(0), stream=Stream.TOKEN, allows_complete=allows_complete,
    )  # fmt: skip
    trees = []
    for rule in (static(1), replace(static(1), is_static=False)):
        tree = DraftTree(num_samples, budget, length, torch.device("cpu"))
        tree.plant(roots)
        ChainDrafter().draft(replace(inputs, rule=rule), tree)
        trees.append(tree)
    at_once, by_step = trees
    assert torch.equal(at_once.num_nodes, by_step.num_nodes) and int(by_step.num_nodes.max()) > 1
    is_node = by_step.is_node()
    for name in ("tokens", "parents", "depths", "log_mass", "hashes"):
        assert torch.equal(getattr(at_once, name)[is_node], getattr(by_step, name)[is_node]), name
