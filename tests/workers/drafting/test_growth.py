"""Level-wise growth against brute force, and what trees look like."""

import itertools
import math

import pytest
import torch

from dlmgrid.kernels.logits import summarize
from dlmgrid.workers.decoding.commit_rules import static
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED, num_masked
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.confidence_tree import ConfidenceTreeDrafter
from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.drafting.growth import HEDGE_BELOW


def make_inputs(logits: torch.Tensor, roots: torch.Tensor, temperature: float = 0.0) -> DraftInputs:
    """Inputs whose stale distributions are softmax(logits [S, L, V]) at the masked positions of the roots."""
    num_samples, length, _ = logits.shape
    snapshots = Snapshots(num_samples, length, logits.device)
    masked = roots == MASKED
    row_samples, positions = masked.nonzero(as_tuple=True)
    snapshots.store(
        torch.arange(num_samples),
        masked,
        row_samples,
        positions,
        summarize(logits[row_samples, positions], temperature),
    )
    return DraftInputs(
        roots=roots,
        commit_counts=torch.zeros(num_samples, dtype=torch.int64),
        block_starts=torch.zeros(num_samples, dtype=torch.int64),
        keys=torch.arange(num_samples * 2).view(num_samples, 2),
        snapshots=snapshots,
        rule=static(1),
        temperature=temperature,
        noise=NoiseTable(0),
        stream=Stream.TOKEN,
    )


State = tuple[int, ...]


def children_of(inputs: DraftInputs, sample: int, state: State) -> list[tuple[State, float]]:
    """All children of a state with their share of its mass, by the definition."""
    ids = inputs.snapshots.token_ids[sample]
    probabilities = inputs.snapshots.probabilities[sample].double()
    masked = [position for position, token in enumerate(state) if token == MASKED]
    if len(masked) <= 1:
        return []
    confidence = 1 - probabilities[:, 1:].sum(dim=1) - inputs.snapshots.tail_mass[sample].double()
    total = sum(float(confidence[position]) for position in masked)
    children = []
    for position in masked:
        num_tokens = 2 if probabilities[position, 0] < HEDGE_BELOW else 1
        for rank in range(num_tokens):
            child = (*state[:position], int(ids[position, rank]), *state[position + 1 :])
            share = float(confidence[position]) / total * float(probabilities[position, rank])
            children.append((child, share))
    return children


def brute_force(inputs: DraftInputs, sample: int, budget: int, cut: int | None) -> dict[State, float]:
    """The top-D by enumeration; with ``cut``, a state that fell out of the best ``cut`` passes no mass on."""
    level: dict[State, float] = {tuple(inputs.roots[sample].tolist()): 1.0}
    listed: dict[State, float] = {}
    while level:
        following: dict[State, float] = {}
        cap: dict[State, float] = {}
        for state, mass in level.items():
            for child, share in children_of(inputs, sample, state):
                following[child] = following.get(child, 0.0) + mass * share
                cap[child] = max(cap.get(child, 0.0), mass)
        level = {child: min(mass, cap[child]) for child, mass in following.items()}
        listed.update(level)
        if cut is not None:
            listed = dict(sorted(listed.items(), key=lambda pair: -pair[1])[:cut])
            level = {state: mass for state, mass in level.items() if state in listed}
    return dict(sorted(listed.items(), key=lambda pair: -pair[1])[:budget])


@pytest.mark.parametrize(("length", "budget"), [(3, 4), (4, 8), (5, 20), (5, 3)])
@pytest.mark.parametrize("sharpness", [0.5, 2.0, 6.0])
def test_growth_equals_brute_force(length: int, budget: int, sharpness: float) -> None:
    torch.manual_seed(length * 100 + budget)
    num_samples = 6
    logits = torch.randn(num_samples, length, 64) * sharpness
    roots = torch.full((num_samples, length), MASKED, dtype=torch.int32)
    roots[0, 0] = 3
    inputs = make_inputs(logits, roots)
    tree = DraftTree(num_samples, budget, length, torch.device("cpu"))
    tree.plant(roots)
    ConfidenceTreeDrafter().draft(inputs, tree)
    for sample in range(num_samples):
        count = int(tree.num_nodes[sample])
        grown = {
            tuple(tree.tokens[sample, node].tolist()): math.exp(float(tree.log_mass[sample, node]))
            for node in range(1, count)
        }
        assert len(grown) == count - 1, "a state is packed once"
        expected = brute_force(inputs, sample, budget, cut=budget)
        assert grown.keys() == expected.keys()
        assert grown == pytest.approx(expected)
        # Parents that fell out of the list would have added a little mass to a merged child: it hardly matters.
        best = sum(brute_force(inputs, sample, budget, cut=None).values())
        assert 0.97 * best <= sum(grown.values()) <= best * (1 + 1e-9)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5])
def test_a_tree_is_in_topological_order_and_holds_no_complete_state(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 8, 64) * 3
    roots = torch.full((5, 8), MASKED, dtype=torch.int32)
    for sample in range(5):
        roots[sample, : sample + 2] = 1
    inputs = make_inputs(logits, roots, temperature)
    tree = DraftTree(5, 12, 8, torch.device("cpu"))
    tree.plant(roots)
    ConfidenceTreeDrafter().draft(inputs, tree)
    for sample in range(5):
        for node in range(1, int(tree.num_nodes[sample])):
            parent = int(tree.parents[sample, node])
            assert 0 <= parent < node
            assert int(tree.depths[sample, node]) == int(tree.depths[sample, parent]) + 1
            child_state, parent_state = tree.tokens[sample, node], tree.tokens[sample, parent]
            changed = (child_state != parent_state).nonzero().flatten().tolist()
            assert len(changed) == 1 and int(parent_state[changed[0]]) == MASKED
            assert int(num_masked(child_state)) > 0
            assert float(tree.log_mass[sample, node]) <= float(tree.log_mass[sample, parent]) + 1e-12
    assert int(tree.num_nodes.max()) == 13


def test_an_invalid_snapshot_leaves_the_root_alone() -> None:
    logits = torch.randn(2, 4, 64)
    roots = torch.full((2, 4), MASKED, dtype=torch.int32)
    inputs = make_inputs(logits, roots)
    inputs.snapshots.invalidate(torch.tensor([1]))
    tree = DraftTree(2, 5, 4, torch.device("cpu"))
    tree.plant(roots)
    ConfidenceTreeDrafter().draft(inputs, tree)
    assert tree.num_nodes.tolist()[1] == 1
    assert tree.num_nodes.tolist()[0] == 6


def test_states_reached_in_two_orders_are_one_node() -> None:
    logits = torch.full((1, 3, 64), -20.0)
    for position in range(3):
        logits[0, position, position] = 10.0
    roots = torch.full((1, 3), MASKED, dtype=torch.int32)
    tree = DraftTree(1, 20, 3, torch.device("cpu"))
    tree.plant(roots)
    ConfidenceTreeDrafter().draft(make_inputs(logits, roots), tree)
    # Three states with one commit, three with two: pairs, not ordered pairs.
    assert int(tree.num_nodes[0]) == 1 + 3 + 3
    masses = tree.log_mass[0, 1:7].exp()
    assert masses.tolist() == pytest.approx([1 / 3] * 6)
    assert len(set(itertools.chain(tree.hashes[0, 1:7].tolist()))) == 6
