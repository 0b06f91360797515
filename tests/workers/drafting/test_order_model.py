"""The order model: its size, what it reads, and growth with it against brute force."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlmgrid.kernels.logits import summarize
from dlmgrid.workers.decoding.commit_rules import static
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.drafting.growth import HEDGE_BELOW
from dlmgrid.workers.drafting.order_checkpoint import (
    find_order_checkpoint,
    load_order_model,
    read_order_checkpoint,
    save_order_model,
)
from dlmgrid.workers.drafting.order_model import (
    NUM_FEATURES,
    OrderModel,
    ScoreMemo,
    log_next_position,
    path_features,
    stale_features,
)
from dlmgrid.workers.drafting.spot import SpotDrafter
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.models.fingerprint import weight_fingerprint

State = tuple[int, ...]


def make_model(seed: int = 0) -> OrderModel:
    """A random model whose distributions are far from uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = OrderModel()
        last = model.head[-1]
        assert isinstance(last, torch.nn.Linear)
        torch.nn.init.normal_(last.weight, std=2.0)
    return model.double().eval()


def make_inputs(snapshot_states: torch.Tensor, roots: torch.Tensor, seed: int = 0) -> DraftInputs:
    """Inputs with random stale distributions at the masked positions of ``snapshot_states``."""
    num_samples, length = roots.shape
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, length, 64, generator=generator) * 2
    snapshots = Snapshots(num_samples, length, roots.device)
    masked = snapshot_states == MASKED
    samples, positions = masked.nonzero(as_tuple=True)
    snapshots.store(
        torch.arange(num_samples), masked, samples, positions, summarize(logits[samples, positions], 0.0)
    )
    return DraftInputs(
        roots=roots, commit_counts=(roots != MASKED).sum(dim=1),
        block_starts=torch.zeros(num_samples, dtype=torch.int64), keys=torch.zeros(num_samples, 2, dtype=torch.int64),
        snapshots=snapshots, rule=static(1), temperature=0.0, noise=NoiseTable(0), stream=Stream.TOKEN,
    )  # fmt: skip


def fresh(num_samples: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fully masked snapshot states, and roots whose position 1 was filled since."""
    states = torch.full((num_samples, length), MASKED, dtype=torch.int32)
    roots = states.clone()
    roots[:, 1] = 5
    return states, roots


def test_the_model_has_the_published_number_of_parameters() -> None:
    assert sum(parameter.numel() for parameter in OrderModel().parameters()) == 621_057


def test_features_are_what_the_table_says() -> None:
    states = torch.tensor([[MASKED, 7, MASKED, MASKED, 9, MASKED]], dtype=torch.int32)
    inputs = make_inputs(states, states)
    features = stale_features(inputs.snapshots)[0]
    assert features.shape == (6, NUM_FEATURES - 2)
    probabilities = inputs.snapshots.probabilities[0]
    for position in (0, 2, 3, 5):
        assert torch.equal(features[position, :32], probabilities[position])
        assert features[position, 32:64].tolist() == pytest.approx(
            [math.log(p) / 10 for p in probabilities[position].tolist()], abs=1e-6
        )
        assert float(features[position, 64]) == float(probabilities[position, 0])
        assert float(features[position, 65]) == pytest.approx(float(probabilities[position, :2].diff().abs()))
        assert float(features[position, 67]) == pytest.approx(
            1 - float(probabilities[position].sum()), abs=1e-5
        )
    assert features[[0, 2, 3, 5], 68].tolist() == pytest.approx([0.0, 0.4, 0.6, 1.0])
    assert features[[0, 2, 3, 5], 69].tolist() == pytest.approx([1 / 6, 1 / 6, 2 / 6, 1 / 6])
    assert features[[0, 2, 3, 5], 70].tolist() == pytest.approx([1 / 6, 2 / 6, 1 / 6, 1 / 6])
    assert features[[0, 2, 3, 5], 71].tolist() == pytest.approx([2 / 6] * 4)


def test_path_features_tell_the_roots_commit_from_drafted_ones() -> None:
    snapshot_masked = torch.tensor([[True, False, True, True, True]])
    roots = torch.tensor([[MASKED, 7, 3, MASKED, MASKED]], dtype=torch.int32)
    drafted = torch.tensor([[[MASKED, 7, 3, MASKED, MASKED], [4, 7, 3, MASKED, 8]]], dtype=torch.int32)
    found = path_features(snapshot_masked, roots, drafted)[0]
    by_root, by_draft = found[:, [0, 2, 3, 4]]
    assert by_root[:, 0].tolist() == [0, 1, 0, 0]
    assert by_root[:, 1].tolist() == pytest.approx([0.2] * 4)
    assert by_draft[:, 0].tolist() == [1, 1, 0, 1]
    assert by_draft[:, 1].tolist() == pytest.approx([0.6, 0.2, 0.6, 0.6])


def test_log_q_is_a_distribution_over_the_eligible_positions_and_ignores_the_batch() -> None:
    model = make_model()
    snapshot_states, roots = fresh(5, 8)
    snapshot_states[3, 4:] = 2
    roots[3, 4:] = 2
    inputs = make_inputs(snapshot_states, roots)
    states = roots[:, None].repeat(1, 3, 1)
    states[:, 1, 0] = 6
    eligible = states == MASKED
    eligible[:, 2] = False  # a state that is not there
    log_q = log_next_position(model, inputs.snapshots, roots, states, eligible)
    assert log_q.dtype == torch.float64
    assert torch.equal(log_q > -torch.inf, eligible)
    assert log_q[:, :2].exp().sum(dim=-1).flatten().tolist() == pytest.approx([1.0] * 10)
    for sample in range(5):
        alone = log_next_position(
            model,
            inputs.snapshots.select(torch.tensor([sample])),
            roots[sample : sample + 1],
            states[sample : sample + 1, 1:2],
            eligible[sample : sample + 1, 1:2],
        )
        assert torch.allclose(alone[0, 0], log_q[sample, 1], rtol=0, atol=1e-12)


def test_equal_sets_and_remembered_scores_give_the_same_distribution() -> None:
    """States that fill the same positions with other tokens share a score; a memo gives what was computed before."""
    model = make_model().double().eval()
    snapshot_states, roots = fresh(3, 8)
    inputs = make_inputs(snapshot_states, roots)
    states = roots[:, None].expand(-1, 4, -1).clone()
    free = [(roots[sample] == MASKED).nonzero().flatten().tolist() for sample in range(3)]
    for sample in range(3):
        states[sample, 1, free[sample][0]] = 5
        states[sample, 2, free[sample][0]] = 6  # the same position, another token
        states[sample, 3, free[sample][1]] = 5
    eligible = states == MASKED

    def log_q(states: torch.Tensor, eligible: torch.Tensor, **memory: Any) -> torch.Tensor:
        return log_next_position(model, inputs.snapshots, roots, states, eligible, **memory)

    found = log_q(states, eligible)
    assert torch.equal(found[:, 1], found[:, 2])
    assert not torch.allclose(found[:, 1], found[:, 3], equal_nan=True)
    alone = torch.cat([log_q(states[:, [w]], eligible[:, [w]]) for w in range(4)], dim=1)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)
    memo, keys = ScoreMemo(), torch.tensor([11, 12, 13])
    first = log_q(states[:, :2], eligible[:, :2], memo=memo, root_keys=keys)
    model.head[2].weight.data.zero_()  # whatever is computed from here on is another score
    again = log_q(states, eligible, memo=memo, root_keys=keys)
    assert torch.equal(again[:, :2], first) and torch.equal(again[:, 2], first[:, 1])
    assert not torch.allclose(again[:, 3], found[:, 3], equal_nan=True)


def brute_force(model: OrderModel, inputs: DraftInputs, sample: int, budget: int) -> dict[State, float]:
    """The top-D by enumeration of states; one that fell out of the best D passes no mass on."""
    snapshots = inputs.snapshots.select(torch.tensor([sample]))
    roots = inputs.roots[sample : sample + 1]
    ids, probabilities = snapshots.token_ids[0], snapshots.probabilities[0].double()
    level: dict[State, float] = {tuple(roots[0].tolist()): 1.0}
    listed: dict[State, float] = {}
    while level:
        following: dict[State, float] = {}
        cap: dict[State, float] = {}
        for state, mass in level.items():
            states = torch.tensor([[state]], dtype=torch.int32)
            eligible = states == MASKED
            if int(eligible.sum()) <= 1:
                continue
            q = log_next_position(model, snapshots, roots, states, eligible)[0, 0].exp()
            for position in eligible[0, 0].nonzero().flatten().tolist():
                for rank in range(2 if probabilities[position, 0] < HEDGE_BELOW else 1):
                    child = (*state[:position], int(ids[position, rank]), *state[position + 1 :])
                    share = float(q[position] * probabilities[position, rank])
                    following[child] = following.get(child, 0.0) + mass * share
                    cap[child] = max(cap.get(child, 0.0), mass)
        level = {child: min(mass, cap[child]) for child, mass in following.items()}
        listed.update(level)
        listed = dict(sorted(listed.items(), key=lambda pair: -pair[1])[:budget])
        level = {state: mass for state, mass in level.items() if state in listed}
    return listed


@pytest.mark.parametrize(("length", "budget"), [(4, 6), (5, 20)])
def test_growth_with_an_order_model_equals_brute_force_and_gamma_cuts_it(length: int, budget: int) -> None:
    model = make_model(length)
    inputs = make_inputs(*fresh(4, length), seed=length)
    trees = {}
    for gamma in (0.0, 0.02, 0.1, 1.0):
        tree = DraftTree(4, budget, length, inputs.roots.device)
        tree.plant(inputs.roots)
        SpotDrafter(model, min_log_mass=math.log(gamma) if gamma else -math.inf).draft(inputs, tree)
        trees[gamma] = tree
    for sample in range(4):
        expected = brute_force(model, inputs, sample, budget)
        for gamma, tree in trees.items():
            count = int(tree.num_nodes[sample])
            grown = {
                tuple(tree.tokens[sample, node].tolist()): math.exp(float(tree.log_mass[sample, node]))
                for node in range(1, count)
            }
            assert grown == pytest.approx({s: m for s, m in expected.items() if m >= gamma})
            parents = tree.parents[sample, 1:count]
            assert bool((parents >= 0).all()) and bool((parents < torch.arange(1, count)).all())
    assert 0 < int((trees[0.1].num_nodes - 1).sum()) < int((trees[0.02].num_nodes - 1).sum())
    assert trees[1.0].num_nodes.tolist() == [1] * 4, "where nothing survives the round is a plain step"


def test_a_checkpoint_keeps_weights_and_says_what_is_wrong(tmp_path: Path) -> None:
    model, path = make_model(), tmp_path / "order.safetensors"
    fingerprint = save_order_model(path, model, {"settings": {"seed": 0}})
    loaded = load_order_model(path)
    for name, value in model.state_dict().items():
        assert torch.equal(value.float(), loaded.state_dict()[name])
    found = read_order_checkpoint(path)
    assert (found.fingerprint, found.card) == (fingerprint, {"settings": {"seed": 0}})
    assert f'"fingerprint": "{fingerprint}"' in path.with_suffix(".json").read_text()
    again = tmp_path / "again.safetensors"
    assert save_order_model(again, model, {"settings": {"seed": 0}}) == fingerprint
    assert again.read_bytes() == path.read_bytes()
    assert save_order_model(again, make_model(1), {"settings": {"seed": 0}}) != fingerprint

    tensors = load_file(str(path))
    save_file(tensors, str(again), metadata={"dlmgrid": '{"format": "dlmgrid-order-model-0", "card": {}}'})
    with pytest.raises(InputError, match="holds dlmgrid-order-model-0, this version reads the features of"):
        read_order_checkpoint(again)
    save_file(tensors, str(again))
    with pytest.raises(InputError, match="it holds no format"):
        load_order_model(again)
    again.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(InputError, match="not a whole safetensors file"):
        read_order_checkpoint(again)
    with pytest.raises(InputError, match="does not exist; make one with dlmgrid train-order"):
        read_order_checkpoint(tmp_path / "none.safetensors")
    del tensors["embed.bias"]
    header = '{"format": "dlmgrid-order-model-1", "card": {}}'
    save_file(tensors, str(again), metadata={"dlmgrid": header})
    with pytest.raises(InputError, match="its weights do not fit this version"):
        load_order_model(again)


def test_the_shipped_model_is_small_whole_and_of_the_shipped_target() -> None:
    path = find_order_checkpoint("reference")
    found = read_order_checkpoint(path)
    assert path.stat().st_size <= 3_000_000
    card = json.loads(path.with_suffix(".json").read_text())
    assert card.pop("fingerprint") == found.fingerprint
    assert card.pop("format") and card == found.card
    assert card["trained_on"]["weight_fingerprints"] == [weight_fingerprint(resolve_checkpoint("reference"))]
    assert set(card["trained_on"]["items"]) == {"words_train", "functions_train"}
    assert card["held_out"]["accuracy"] > card["held_out"]["stale"]
    assert sum(p.numel() for p in load_order_model(path).parameters()) == 621_057


HEADER = '{"format": "dlmgrid-order-model-1", "card": {}}'


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda tensor: torch.full_like(tensor, torch.nan),
            r"tensor layers\.1\.up\.weight holds NaN or infinity",
        ),
        (lambda tensor: tensor.int(), r"tensor layers\.1\.up\.weight holds int32 numbers"),
    ],
)
def test_a_damaged_tensor_is_found_before_anything_is_loaded(
    tmp_path: Path, damage: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    path = tmp_path / "order.safetensors"
    save_order_model(path, OrderModel(), {})
    tensors = load_file(str(path))
    name = "layers.1.up.weight"
    save_file(tensors | {name: damage(tensors[name])}, str(path), metadata={"dlmgrid": HEADER})
    with pytest.raises(InputError, match=message):
        read_order_checkpoint(path)


@pytest.mark.parametrize(
    "header",
    ["{not json", "[]", '{"format": "dlmgrid-order-model-1"}', HEADER.replace("{}", "[]"), "[" * 100_000],
)
def test_a_damaged_header_is_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "order.safetensors"
    save_order_model(path, OrderModel(), {})
    save_file(load_file(str(path)), str(path), metadata={"dlmgrid": header})
    with pytest.raises(
        InputError, match=r"order\.safetensors: not a whole safetensors file .*; train it again"
    ):
        read_order_checkpoint(path)


def test_a_checkpoint_is_as_readable_as_its_card(tmp_path: Path) -> None:
    path = tmp_path / "order.safetensors"
    save_order_model(path, OrderModel(), {})
    assert path.stat().st_mode == path.with_suffix(".json").stat().st_mode
