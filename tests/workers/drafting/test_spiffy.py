"""Spiffy: rewinding recorded runs, and what a graph drafts at a root."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dlmgrid.kernels.logits import summarize
from dlmgrid.workers.decoding.commit_rules import static
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED, num_masked, state_hashes
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.drafting.spiffy import SpiffyDrafter
from dlmgrid.workers.drafting.spiffy_calibration import calibrate_graph, rewind
from dlmgrid.workers.drafting.spiffy_graph import DraftGraph, GraphKey, GraphNode
from dlmgrid.workers.drafting.stale_roots import root_steps, stale_inputs, steps_left
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.trajectories.replay import ReplayBatch
from dlmgrid.workers.trajectories.trajectory import Trajectory

KEY = GraphKey(
    weight_fingerprint="", decoder="static", commits_per_step=1, threshold=None, temperature=0.0,
    noise="commit_count", block_length=4,
)  # fmt: skip

# From the root: the first position's first and second token; the first two positions; positions one to three.
NODES = (
    GraphNode(pairs=((0, 0),), parents=(-1,), count=8),
    GraphNode(pairs=((0, 1),), parents=(-1,), count=2),
    GraphNode(pairs=((0, 0), (1, 0)), parents=(0,), count=4),
    GraphNode(pairs=((0, 0), (1, 0), (2, 0)), parents=(2,), count=1),
)


def graph(nodes: tuple[GraphNode, ...] = NODES, **key: Any) -> DraftGraph:
    return DraftGraph(
        key=replace(KEY, **key), selection="marginal_gain", budget=len(nodes), num_roots=10, calibration={},
        nodes=nodes,
    )  # fmt: skip


def inputs_of(roots: torch.Tensor, logits: torch.Tensor, temperature: float = 0.0) -> DraftInputs:
    num_samples, length = roots.shape
    snapshots = Snapshots(num_samples, length, roots.device)
    masked = roots == MASKED
    row_samples, positions = masked.nonzero(as_tuple=True)
    rows = summarize(logits[row_samples, positions], temperature)
    snapshots.store(torch.arange(num_samples), masked, row_samples, positions, rows)
    return DraftInputs(
        roots=roots, commit_counts=torch.zeros(num_samples, dtype=torch.int64),
        block_starts=torch.zeros(num_samples, dtype=torch.int64),
        keys=torch.arange(num_samples * 2).view(num_samples, 2), snapshots=snapshots, rule=static(1),
        temperature=temperature, noise=NoiseTable(0), stream=Stream.TOKEN,
    )  # fmt: skip


def drafted(drafter: SpiffyDrafter, inputs: DraftInputs, budget: int) -> DraftTree:
    tree = DraftTree(inputs.roots.shape[0], budget, inputs.roots.shape[1], inputs.roots.device)
    tree.plant(inputs.roots)
    drafter.draft(inputs, tree)
    return tree


def peaked() -> torch.Tensor:
    """Logits [1, 4, 64]: position 2 is surest (tokens 20, 21), then 0 (tokens 0, 1), then 3 (tokens 30, 31)."""
    logits = torch.full((1, 4, 64), -10.0)
    for position, first, strength in ((2, 20, 6.0), (0, 0, 4.0), (3, 30, 2.0)):
        logits[0, position, first] = strength
        logits[0, position, first + 1] = strength - 3
    return logits


def test_pairs_become_positions_and_tokens_of_the_root() -> None:
    roots = torch.tensor([[MASKED, 9, MASKED, MASKED]], dtype=torch.int32)
    tree = drafted(SpiffyDrafter(graph()), inputs_of(roots, peaked()), 4)
    # Three masks are left, so the node of three pairs would complete the block and is not drafted.
    assert tree.num_nodes.tolist() == [4]
    assert tree.tokens[0, 1:4].tolist() == [
        [MASKED, 9, 20, MASKED], [MASKED, 9, 21, MASKED], [0, 9, 20, MASKED],
    ]  # fmt: skip
    assert tree.parents[0, 1:4].tolist() == [0, 0, 1]
    assert tree.depths[0, 1:4].tolist() == [1, 1, 2]
    assert tree.log_mass[0, 1:4].tolist() == pytest.approx([math.log(0.8), math.log(0.2), math.log(0.4)])
    assert tree.hashes[0, 1:4].tolist() == state_hashes(tree.tokens[0, 1:4]).tolist()


def test_a_smaller_budget_takes_the_first_nodes_and_few_masks_drop_nodes() -> None:
    roots = torch.tensor(
        [[MASKED, 9, MASKED, MASKED], [5, 9, MASKED, MASKED], [5, 9, MASKED, 5]], dtype=torch.int32
    )
    inputs = inputs_of(roots, peaked().expand(3, -1, -1))
    drafter = SpiffyDrafter(graph())
    assert drafted(drafter, inputs, 2).num_nodes.tolist() == [3, 3, 1]
    # With two masks left only single commits leave one open, with one mask left none does.
    assert drafted(drafter, inputs, 4).num_nodes.tolist() == [4, 3, 1]
    inputs.snapshots.invalidate(torch.tensor([0]))
    assert drafted(drafter, inputs, 4).num_nodes.tolist() == [1, 3, 1]


def test_a_state_that_two_nodes_give_is_packed_once() -> None:
    # At T > 0 the second-ranked draw of one depth may be the first-ranked one of another.
    logits = torch.full((64, 8, 64), -10.0)
    logits[..., :2] = 5.0
    nodes = (
        GraphNode(pairs=((0, 0),), parents=(-1,), count=5),
        GraphNode(pairs=((1, 0),), parents=(-1,), count=5),
        GraphNode(pairs=((0, 0), (1, 0)), parents=(0,), count=4),
        GraphNode(pairs=((0, 1), (1, 0)), parents=(1,), count=3),
        GraphNode(pairs=((0, 1), (1, 0), (2, 0)), parents=(3,), count=2),
    )
    roots = torch.full((64, 8), MASKED, dtype=torch.int32)
    inputs = inputs_of(roots, logits, temperature=1.0)
    tree = drafted(SpiffyDrafter(graph(nodes, temperature=1.0)), inputs, 5)
    assert int((tree.num_nodes < 6).sum()) > 0, "no repeat among 64 roots: the case is not met"
    for sample in range(64):
        count = int(tree.num_nodes[sample])
        assert len({tuple(state.tolist()) for state in tree.tokens[sample, :count]}) == count
        for node in range(1, count):
            parent = int(tree.parents[sample, node])
            changed = tree.tokens[sample, node] != tree.tokens[sample, parent]
            assert (
                int(changed.sum()) == 1
                and int(tree.depths[sample, parent]) == int(tree.depths[sample, node]) - 1
            )


def test_pruning_keeps_the_likeliest_nodes_and_their_parents() -> None:
    logits = peaked()
    roots = torch.tensor([[MASKED, MASKED, MASKED, MASKED]], dtype=torch.int32)
    logits[0, 1] = 0.0
    plain = drafted(SpiffyDrafter(graph()), inputs_of(roots, logits), 2)
    pruned = drafted(SpiffyDrafter(graph(), prunes=True), inputs_of(roots, logits), 2)
    # The second token of the surest position is unlikely, so the pair of positions is better.
    assert plain.tokens[0, 1:3].tolist() == [[MASKED, MASKED, 20, MASKED], [MASKED, MASKED, 21, MASKED]]
    assert pruned.tokens[0, 1:3].tolist() == [[MASKED, MASKED, 20, MASKED], [0, MASKED, 20, MASKED]]
    assert pruned.parents[0, 1:3].tolist() == [0, 1]
    whole = drafted(SpiffyDrafter(graph(), prunes=True), inputs_of(roots, logits), 4)
    assert int(whole.num_nodes[0]) == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5])
@pytest.mark.parametrize("commits_per_step", [1, 2])
def test_a_path_is_what_the_graph_drafts_at_its_root(
    tiny_runs: Callable[..., list[Trajectory]], temperature: float, commits_per_step: int
) -> None:
    """Rewinding and drafting read ranks alike: a graph of one root's path gives that run's own next states there."""
    run = tiny_runs(1, temperature=temperature, commits_per_step=commits_per_step, gen_length=40)[0]

    steps, left = root_steps(run), steps_left(run)
    paths = rewind(run, horizon=20)
    num_checked = 0
    for row, path in enumerate(paths):
        step = int(steps[row])
        assert len(path) <= int(left[step]) - 1
        if not path:
            continue
        nodes = tuple(GraphNode(pairs=pairs, parents=(n - 1,), count=1) for n, pairs in enumerate(path))
        drafter = SpiffyDrafter(graph(nodes, block_length=8, temperature=temperature))
        inputs = stale_inputs(ReplayBatch([run]), steps[row : row + 1])
        tree = drafted(drafter, inputs, len(path))
        assert int(tree.num_nodes[0]) == len(path) + 1
        assert torch.equal(tree.tokens[0, : len(path) + 1], run.states[step : step + len(path) + 1])
        assert int(num_masked(tree.tokens[0, len(path)])) > 0
        num_checked += len(path)
    assert num_checked > 10


def test_calibration_counts_every_root_and_refuses_test_items(
    tiny_runs: Callable[..., list[Trajectory]],
) -> None:
    runs = tiny_runs(12)
    made = calibrate_graph(runs, budget=8, selection="marginal_gain")
    assert made.num_roots == sum(len(run.commits) - len(set(run.block_starts.tolist())) for run in runs)
    assert len(made.nodes) == 8 and made.nodes[0].count > made.num_roots / 4
    assert made.key == GraphKey(
        weight_fingerprint="f" * 24, decoder="static", commits_per_step=1, threshold=None, temperature=0.0,
        noise="commit_count", block_length=8,
    )  # fmt: skip
    assert made.calibration["items"] == {"words_train": 12}
    with pytest.raises(InputError, match="item 'item-0' is of 'words', which is no calibration set"):
        calibrate_graph(tiny_runs(2, benchmark="words"), budget=8, selection="marginal_gain")
    with pytest.raises(InputError, match="is of 'my_set', which is no calibration set"):
        calibrate_graph(tiny_runs(2, benchmark="my_set"), budget=8, selection="marginal_gain")
    with pytest.raises(InputError, match=r"2 combinations of model, .*: take one by --temperature \(0, 1\)"):
        calibrate_graph([*runs, *tiny_runs(2, temperature=1.0)], budget=8, selection="marginal_gain")
    with pytest.raises(
        InputError, match=r"2 combinations of model, .*: record them into folders of their own"
    ):
        calibrate_graph([*runs, *tiny_runs(2, model="other", weight_fingerprint="a" * 24)], budget=8,
                        selection="marginal_gain")  # fmt: skip
    with pytest.raises(InputError, match="nothing is recorded"):
        calibrate_graph([], budget=8, selection="marginal_gain")
