"""SPOT-Sets: growth over sets against enumeration, exact rows, replay, product max-commit, training and refit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dlmgrid.workers.decoding.commit_rules import threshold
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.state import MASKED, state_hashes
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting import none
from dlmgrid.workers.drafting.drafter import Drafter
from dlmgrid.workers.drafting.set_checkpoint import load_set_model, read_set_checkpoint, save_set_model
from dlmgrid.workers.drafting.set_growth import SetPrediction, grow_sets
from dlmgrid.workers.drafting.set_model import TABLE_WIDTH, SetModel, SetShape, embedding_table
from dlmgrid.workers.drafting.set_training import SetTrainSettings, make_set_examples, train_sets
from dlmgrid.workers.drafting.spot_sets import SetDrafter
from dlmgrid.workers.drafting.stale_roots import root_steps, stale_inputs
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing.tiny_runs import tiny_cell, tiny_decode
from dlmgrid.workers.testing.tiny_target import TinyTarget
from dlmgrid.workers.trajectories.replay import ReplayBatch, without_future
from dlmgrid.workers.trajectories.trajectory import Trajectory, load_trajectories

THRESHOLD: dict[str, Any] = {"decoder": "threshold", "threshold": 0.5}
SHAPE = SetShape(
    hidden_size=40, vocab_size=40, width=16, num_layers=1
)  # the tiny target's rows are its logits
NUM_ITEMS = 2

TinyRuns = Callable[..., list[Trajectory]]


def make_model(seed: int = 0, shape: SetShape = SHAPE) -> SetModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SetModel(shape)
        model.table.copy_(embedding_table(torch.randn(shape.vocab_size, 24)))
    return model


def path(generation: Generation) -> Any:
    return generation.steps, generation.digests, generation.token_ids


def enumerate_sets(prediction: SetPrediction, root: tuple[int, ...], budget: int) -> dict[Any, float]:
    """The best states by trying, level by level, every set that the rule of the module names."""
    q = prediction.inclusion.flatten().tolist()
    tokens = [prediction.first.flatten().tolist(), prediction.second.flatten().tolist()]
    p = [prediction.first_probability.flatten().tolist(), prediction.second_probability.flatten().tolist()]
    level, listed = {root: 1.0}, dict[Any, float]()
    while level:
        found: dict[Any, float] = {}
        cap: dict[Any, float] = {}
        for state, mass in level.items():
            masked = [i for i, token in enumerate(state) if token == MASKED]
            base = {i for i in masked if q[i] >= 0.5} or {max(masked, key=lambda i: (q[i], -i))}
            doubt = sorted(masked, key=lambda i: (abs(q[i] - 0.5), i))
            tried = [(base, None)] + [(base ^ {i}, None) for i in doubt[:4]]
            tried.append((base ^ set(doubt[:2]), None))
            weakest = min(base, key=lambda i: (p[0][i], i))
            if p[0][weakest] < 0.6:
                tried.append((base, weakest))
            if len(doubt) < 2:
                tried = [tried[0], tried[1], *tried[3:]]  # one position cannot be flipped as two
            for chosen, hedged in tried:
                if not chosen or len(chosen) == len(masked):
                    continue
                rank = {i: int(i == hedged) for i in chosen}
                share = math.prod(q[i] * p[rank[i]][i] for i in chosen)
                share *= math.prod(1 - q[i] for i in masked if i not in chosen)
                child = tuple(tokens[rank[i]][i] if i in chosen else token for i, token in enumerate(state))
                if child not in listed:
                    found[child] = found.get(child, 0.0) + mass * share
                    cap[child] = max(cap.get(child, 0.0), mass)
        level = {child: min(mass, cap[child]) for child, mass in found.items()}
        listed = dict(sorted((listed | level).items(), key=lambda pair: -pair[1])[:budget])
        level = {child: mass for child, mass in level.items() if child in listed}
    return listed


@pytest.mark.parametrize("budget", [3, 12])
def test_growth_over_sets_equals_enumeration(tiny_runs: TinyRuns, budget: int) -> None:
    (run,) = tiny_runs(1, **THRESHOLD)
    steps = root_steps(run)[:2]
    inputs = stale_inputs(ReplayBatch([run]), steps)
    generator = torch.Generator().manual_seed(budget)
    shape = (len(steps), 1, 8)
    first = torch.randint(0, 20, shape, generator=generator).int()
    prediction = SetPrediction(
        inclusion=torch.rand(shape, generator=generator, dtype=torch.float64),
        first=first,
        second=first + 20,
        first_probability=0.3 + 0.6 * torch.rand(shape, generator=generator, dtype=torch.float64),
        second_probability=torch.full(shape, 0.2, dtype=torch.float64),
    )

    def propose(states: torch.Tensor, counts: torch.Tensor) -> SetPrediction:
        return SetPrediction(*(part.expand(states.shape) for part in prediction))

    tree = DraftTree(len(steps), budget, 8, inputs.roots.device)
    tree.plant(inputs.roots)
    grow_sets(inputs, tree, propose)
    for sample in range(len(steps)):
        own = SetPrediction(*(part[sample] for part in prediction))
        expected = enumerate_sets(own, tuple(inputs.roots[sample].tolist()), budget)
        grown = {
            tuple(tree.tokens[sample, node].tolist()): math.exp(float(tree.log_mass[sample, node]))
            for node in range(1, int(tree.num_nodes[sample]))
        }
        assert grown == pytest.approx(expected)


@pytest.mark.parametrize(
    "there", [torch.device("cpu", 0), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_grown_beside_the_target_are_those_grown_beside_the_states(
    tiny_runs: TinyRuns, there: torch.device, temperature: float
) -> None:
    (run,) = tiny_runs(1, records=("hidden",), temperature=temperature, **THRESHOLD)
    steps = root_steps(run)
    inputs = stale_inputs(ReplayBatch([run]), steps)
    drafter, placed = SetDrafter(make_model()), SetDrafter(make_model())
    placed.place(there)
    trees = []
    for one in (drafter, placed):
        trees.append(DraftTree(len(steps), 5, 8, inputs.roots.device))
        trees[-1].plant(inputs.roots)
        one.draft(inputs, trees[-1])
    here, beside = trees
    assert int(here.num_nodes.max()) > 1 and beside.tokens.device == inputs.roots.device
    assert torch.equal(here.num_nodes, beside.num_nodes)
    is_node = here.is_node()
    for name in ("tokens", "parents", "depths", "hashes"):
        assert torch.equal(getattr(here, name)[is_node], getattr(beside, name)[is_node]), name
    torch.testing.assert_close(here.log_mass[is_node], beside.log_mass[is_node])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5], ids=lambda t: f"T{t}")
def test_rows_are_exact_and_replay_to_the_live_counts(tiny_runs: TinyRuns, temperature: float) -> None:
    settings = {"temperature": temperature, **THRESHOLD}
    runs = tiny_runs(NUM_ITEMS, records=("hidden", "window"), **settings)
    serialized = tiny_decode(tiny_cell(**settings), None, num_items=NUM_ITEMS)
    batch = ReplayBatch(runs)
    floors = {"": SetDrafter(make_model()), "full": SetDrafter(make_model(), min_log_mass=math.log(1e-3))}
    for window, drafter in floors.items():
        cell = replace(tiny_cell(**settings), method="spot_sets", budget=6, window=window)
        live = tiny_decode(cell, drafter, num_items=NUM_ITEMS)
        assert [path(g) for g in live] == [path(g) for g in serialized]
        replayed = batch.replay(cell, without_future(drafter))
        for ours, counts in zip(live, replayed, strict=True):
            assert (ours.accepted, ours.drafted_nodes) == (counts.accepted, counts.drafted_nodes)
            assert (ours.rows_computed, ours.nfe_commit) == (counts.rows_computed, counts.nfe_commit)


class _AllButOne:
    """Drafts the finished block of a recorded run, less one position: what only product max-commit can take whole."""

    def __init__(self, final: list[int]) -> None:
        self.final = torch.tensor(final, dtype=torch.int32)

    def draft(self, inputs: Any, tree: DraftTree) -> None:
        masked = inputs.roots == MASKED
        keeps = masked & (masked.cumsum(dim=1) == 1)
        states = torch.where(masked & ~keeps, self.final, inputs.roots)
        grows = inputs.snapshots.is_valid & (masked.sum(dim=1) > 2)
        tree.tokens[:, 1] = states
        tree.hashes[:, 1] = state_hashes(states)
        tree.num_nodes[grows] = 2


def test_product_max_commit_takes_larger_steps_of_the_targets_own_tokens() -> None:
    target = TinyTarget(block_length=8, vocab_size=40, sharpness=1.0, pair=torch.zeros(8, 8, 40, 40))
    prompt = Prompt(item_id="item", repeat=0, token_ids=(1,))

    def decode(drafter: Drafter, product_tau: float | None) -> Generation:
        settings = DecodeSettings(
            block_length=8, gen_length=7, budget=1, temperature=0.0, rule=threshold(0.95), noise=NoiseTable(0),
            stop_token_ids=(), product_tau=product_tau,
        )  # fmt: skip
        return Decoder(target, drafter, settings).decode([prompt])[0]

    free = decode(none.build(), None)
    final = [1, *free.token_ids]
    assert path(decode(_AllButOne(final), None)) == path(free)
    assert len(free.steps) == 7
    # Positions do not depend on each other, so the draft holds the target's own choices whatever the state.
    likely, unlikely = decode(_AllButOne(final), 1e-9), decode(_AllButOne(final), 0.99)
    assert [len(step) for step in likely.steps] == [1, 5, 1]
    assert likely.accepted == [0, 1]
    assert path(unlikely) == path(free)
    wrong = [token + 1 for token in final]
    assert path(decode(_AllButOne(wrong), 1e-9)) == path(free)
    cell = replace(tiny_cell(**THRESHOLD), method="spot_sets_product", budget=1, product_tau=0.4)
    assert (cell.claim, cell.reference().claim) == ("approximate", "exact")


def test_training_learns_a_refit_keeps_the_body_and_files_are_checked(
    tiny_runs: TinyRuns, tmp_path: Path
) -> None:
    runs = tiny_runs(6, records=("hidden",), **THRESHOLD)
    training, held_out = make_set_examples(runs[2:]), make_set_examples(runs[:2])
    assert bool((training.labels & (training.states != MASKED)).sum() == 0)
    settings = SetTrainSettings(steps=20, batch_size=16, learning_rate=3e-3, evaluate_every=10)
    losses: list[str] = []
    trained = train_sets(make_model(), training, held_out, settings, say=losses.append)
    untrained = train_sets(
        make_model(), training, held_out, replace(settings, steps=1, learning_rate=0.0), say=lambda _: None
    )
    assert trained.evaluation.loss < 0.9 * untrained.evaluation.loss
    file = tmp_path / "sets.safetensors"
    fingerprint = save_set_model(file, trained.model, target="f" * 24, card={})
    again = load_set_model(file)
    assert save_set_model(tmp_path / "again.safetensors", again, target="f" * 24, card={}) == fingerprint
    body = {name: value.clone() for name, value in again.state_dict().items()}
    refit = train_sets(again, training, held_out, settings, refit=True, say=lambda _: None)
    changed = {name for name, value in refit.model.state_dict().items() if not torch.equal(value, body[name])}
    assert changed == {"candidate.weight", "from_hidden.weight", "from_hidden.bias"}
    assert read_set_checkpoint(file).target == "f" * 24
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(InputError, match="not a whole safetensors file"):
        read_set_checkpoint(file)
    with pytest.raises(InputError, match="dlmgrid train-sets TRAJ"):
        read_set_checkpoint(tmp_path / "none.safetensors")


@pytest.mark.parametrize("refit", [False, True], ids=["whole", "refit"])
def test_a_stopped_training_goes_on_as_if_it_had_not_been(
    tiny_runs: TinyRuns, tmp_path: Path, refit: bool
) -> None:
    runs = tiny_runs(4, records=("hidden",), **THRESHOLD)
    training, held_out = make_set_examples(runs[1:]), make_set_examples(runs[:1])
    settings = SetTrainSettings(steps=9, batch_size=8, evaluate_every=3)
    state = tmp_path / "sets.state"

    class StoppedError(Exception):
        pass

    def stop(message: str) -> None:
        if message.startswith("step 6"):
            raise StoppedError

    whole = train_sets(make_model(), training, held_out, settings, refit=refit, say=lambda _: None)
    with pytest.raises(StoppedError):  # before step 6 is written, so it goes on from step 3
        train_sets(make_model(), training, held_out, settings, refit=refit, state=state, say=stop)
    said: list[str] = []
    rest = train_sets(make_model(), training, held_out, settings, refit=refit, state=state, say=said.append)
    assert said[0] == "resumed at step 3 of 9"
    assert rest.best_step == whole.best_step
    for name, value in whole.model.state_dict().items():
        assert torch.equal(rest.model.state_dict()[name], value), name
    with pytest.raises(InputError, match="of another training"):
        train_sets(make_model(), training, held_out, replace(settings, seed=1), refit=refit, state=state)


def test_the_default_network_has_the_published_size() -> None:
    model = SetModel(SetShape(hidden_size=4096, vocab_size=8))
    body = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in model.input_layer())
    assert 4.9e6 < body < 5.3e6
    table = embedding_table(torch.randn(50, 30))
    assert table.shape == (50, TABLE_WIDTH)
    assert bool((table[:, 30:] == 0).all()) and float(table.square().mean()) == pytest.approx(1, rel=1e-4)


def test_runs_without_hidden_states_are_refused(tiny_runs: TinyRuns, tmp_path: Path) -> None:
    tiny_runs(1, **THRESHOLD)
    with pytest.raises(
        InputError, match=r"holds nothing of hidden states; record it with record: \[hidden\]"
    ):
        list(load_trajectories(tmp_path / "runs.parquet", records=("hidden",)))
