"""SPOT-Sets: the law of a set, growth against enumeration, exact rows, replay, product max-commit, training."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlmgrid.workers.decoding.commit_rules import CommitRule, factor, static, threshold
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.state import MASKED, state_hashes
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting import none
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs, reads_hidden
from dlmgrid.workers.drafting.set_checkpoint import load_set_model, read_set_checkpoint, save_set_model
from dlmgrid.workers.drafting.set_distribution import SetDistribution
from dlmgrid.workers.drafting.set_growth import SetPrediction, grow_sets
from dlmgrid.workers.drafting.set_model import SetModel, SetShape, embedding_table
from dlmgrid.workers.drafting.set_training import (
    MAX_DEPTH,
    SetTrainSettings,
    TrainedSets,
    load_set_examples,
    set_card,
    summary_of,
    train_sets,
)
from dlmgrid.workers.drafting.spot_sets import SetDrafter, predict_sets
from dlmgrid.workers.drafting.spot_tokens import LocalTokens
from dlmgrid.workers.drafting.stale_roots import root_steps, stale_inputs
from dlmgrid.workers.drafting.token_examples import TokenExamples
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing.tiny_runs import record_tiny_runs, tiny_cell, tiny_decode
from dlmgrid.workers.testing.tiny_target import TinyTarget
from dlmgrid.workers.trajectories.replay import ReplayBatch, without_future
from dlmgrid.workers.trajectories.trajectory import Trajectory

THRESHOLD: dict[str, Any] = {"decoder": "threshold", "threshold": 0.5}
RULE = threshold(0.5)
SHAPE = SetShape(  # the tiny target's rows are its logits
    hidden_size=40, vocab_size=40, width=32, num_layers=1, table_width=16
)
SETTINGS = SetTrainSettings(steps=9, batch_size=16, evaluate_every=3, warmup=2, patience=40)
NUM_ITEMS = 2

TinyRuns = Callable[..., list[Trajectory]]


def make_model(
    seed: int = 0, shape: SetShape = SHAPE, *, trained: bool = True, dropout: float = 0.0
) -> SetModel:
    """A random model; ``trained``: its heads are random too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SetModel(shape, dropout=dropout)
        model.table.copy_(embedding_table(torch.randn(shape.vocab_size, 24), shape.table_width))
        if trained:
            for part in (*model.fresh.parameters(), *model.committed.parameters(), model.candidate.weight):
                torch.nn.init.normal_(part, std=0.3)
            for head in (model.head, model.pass_head):
                torch.nn.init.normal_(head.get_parameter("2.weight"))
    return model


def path(generation: Generation) -> Any:
    return generation.steps, generation.digests, generation.token_ids


def probability_of(
    chosen: set[int], masked: list[int], passing: list[float], alone: dict[int, float]
) -> float:
    """By the definition in ``set_distribution``."""
    share = math.prod(passing[i] if i in chosen else 1 - passing[i] for i in masked)
    if len(chosen) == 1:
        share += math.prod(1 - passing[i] for i in masked) * alone[min(chosen)]
    return share


def test_the_law_of_a_set_is_that_of_a_level_and_of_the_best_where_none_passes() -> None:
    generator = torch.Generator().manual_seed(0)
    passing, scores = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    among = torch.tensor([True, False, True, True, True])
    law = SetDistribution.of(passing, scores, among)
    masked = among.nonzero().flatten().tolist()
    shares = scores[among].softmax(dim=0).tolist()
    alone = dict(zip(masked, shares, strict=True))
    chosen = [set(some) for n in range(1, 5) for some in itertools.combinations(masked, n)]
    sets = torch.tensor([[i in some for i in range(5)] for some in chosen])
    found = law.log_probability(sets).exp()
    expected = [probability_of(some, masked, passing.sigmoid().tolist(), alone) for some in chosen]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert float(found.sum()) == pytest.approx(1)
    assert float(law.log_probability(torch.zeros(1, 5, dtype=torch.bool))) == -math.inf
    assert law.likeliest().tolist() == [bool(a and p >= 0) for a, p in zip(among, passing, strict=True)]
    none_passes = SetDistribution.of(passing - 9, scores, among)
    assert none_passes.likeliest().nonzero().tolist() == [[max(masked, key=lambda i: float(scores[i]))]]


def enumerate_sets(prediction: SetPrediction, root: tuple[int, ...], budget: int) -> dict[Any, float]:
    """The best states by trying, level by level, every set that the rule of the module names."""
    odds = prediction.sets.passing.flatten().tolist()
    q = [1 / (1 + math.exp(-value)) for value in odds]
    scores = prediction.sets.log_alone.flatten().tolist()
    tokens = [prediction.first.flatten().tolist(), prediction.second.flatten().tolist()]
    p = [prediction.first_probability.flatten().tolist(), prediction.second_probability.flatten().tolist()]
    level, listed = {root: 1.0}, dict[Any, float]()
    while level:
        found: dict[Any, float] = {}
        cap: dict[Any, float] = {}
        for state, mass in level.items():
            masked = [i for i, token in enumerate(state) if token == MASKED]
            total = sum(math.exp(scores[i]) for i in masked)
            alone = {i: math.exp(scores[i]) / total for i in masked}
            base = {i for i in masked if odds[i] >= 0}
            doubt = sorted(masked, key=lambda i: (abs(odds[i]), i))
            tried = [base, *(base ^ {i} for i in doubt[:4]), base ^ set(doubt[:2])]
            tried += [{i} for i in sorted(masked, key=lambda i: (-scores[i], i))[:3]]
            for chosen in [some for n, some in enumerate(tried) if some and some not in tried[:n]]:
                if len(chosen) == len(masked):
                    continue
                weakest = min(chosen, key=lambda i: (p[0][i], i))
                for hedged in (None, weakest):
                    rank = {i: int(i == hedged) for i in chosen}
                    share = probability_of(chosen, masked, q, alone)
                    share *= math.prod(p[rank[i]][i] for i in chosen)
                    child = tuple(tokens[rank[i]][i] if i in chosen else t for i, t in enumerate(state))
                    if child not in listed:
                        found[child] = found.get(child, 0.0) + mass * share
                        cap[child] = max(cap.get(child, 0.0), mass)
        level = {child: min(mass, cap[child]) for child, mass in found.items()}
        listed = dict(sorted((listed | level).items(), key=lambda pair: -pair[1])[:budget])
        level = {child: mass for child, mass in level.items() if child in listed}
    return listed


@pytest.mark.parametrize("shift", [0.0, -4.0], ids=["some-pass", "none-passes"])
@pytest.mark.parametrize("budget", [3, 12])
def test_growth_over_sets_equals_enumeration(tiny_runs: TinyRuns, budget: int, shift: float) -> None:
    (run,) = tiny_runs(1, **THRESHOLD)
    steps = root_steps(run)[:2]
    inputs = stale_inputs(ReplayBatch([run]), steps)
    generator = torch.Generator().manual_seed(budget)
    shape = (len(steps), 1, 8)
    first = torch.randint(0, 20, shape, generator=generator).int()
    passing, scores = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    every = torch.ones(shape, dtype=torch.bool)
    prediction = SetPrediction(
        sets=SetDistribution(2 * passing + shift, scores, every),
        first=first,
        second=first + 20,
        first_probability=0.3 + 0.6 * torch.rand(shape, generator=generator, dtype=torch.float64),
        second_probability=torch.full(shape, 0.2, dtype=torch.float64),
    )

    def propose(states: torch.Tensor, counts: torch.Tensor, is_asked: torch.Tensor) -> SetPrediction:
        among = (states == MASKED) & is_asked[..., None]
        law = SetDistribution.of(2 * passing + shift, scores, among)
        return SetPrediction(law, *(part.expand(states.shape) for part in prediction[1:]))

    tree = DraftTree(len(steps), budget, 8, inputs.roots.device)
    tree.plant(inputs.roots)
    grow_sets(inputs, tree, propose)
    for sample in range(len(steps)):
        own = SetPrediction(
            SetDistribution(*(part[sample] for part in prediction.sets)),
            *(part[sample] for part in prediction[1:]),
        )
        expected = enumerate_sets(own, tuple(inputs.roots[sample].tolist()), budget)
        grown = {
            tuple(tree.tokens[sample, node].tolist()): math.exp(float(tree.log_mass[sample, node]))
            for node in range(1, int(tree.num_nodes[sample]))
        }
        assert grown == pytest.approx(expected)


def predicted(model: SetModel, inputs: DraftInputs) -> SetPrediction:
    """What a model says of the roots."""
    reader = LocalTokens(model.double().eval())
    is_asked = torch.ones(inputs.roots.shape[0], 1, dtype=torch.bool)
    with torch.inference_mode():
        stale = reader.read(inputs.snapshots)
        counts = inputs.commit_counts[:, None]
        return predict_sets(model, reader, inputs, stale, inputs.roots[:, None], counts, is_asked)


@pytest.mark.parametrize("rule", [threshold(0.5), threshold(0.8), factor(1.0)], ids=["0.5", "0.8", "factor"])
def test_an_untrained_model_takes_the_stale_confidences_for_fresh(
    tiny_runs: TinyRuns, rule: CommitRule
) -> None:
    (run,) = tiny_runs(1, records=("hidden",), **THRESHOLD)
    inputs = replace(stale_inputs(ReplayBatch([run]), root_steps(run)), rule=rule)
    found = predicted(make_model(trained=False), inputs)
    masked = inputs.roots == MASKED
    stale = inputs.snapshots.probabilities[..., 0].double()
    assert rule.level is not None
    odds = torch.logit(stale, eps=1e-9) - math.log(rule.level / (1 - rule.level))
    torch.testing.assert_close(
        found.sets.passing[:, 0][masked], odds.clamp(-14, 14)[masked], rtol=1e-4, atol=1e-4
    )
    likeliest = found.sets.likeliest()[:, 0]
    if rule.name == "threshold":  # the factor rule asks more of each further position
        assert torch.equal(likeliest, rule.select(masked, stale))
    assert torch.equal(found.first[:, 0][masked].long(), inputs.snapshots.token_ids[..., 0][masked])
    with pytest.raises(AssertionError, match="static has no level"):
        predicted(make_model(), replace(inputs, rule=static(1)))


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_with_noise_a_position_passes_by_the_token_that_the_noise_picks(
    tiny_runs: TinyRuns, temperature: float
) -> None:
    (run,) = tiny_runs(1, records=("hidden",), temperature=temperature, **THRESHOLD)
    inputs = stale_inputs(ReplayBatch([run]), root_steps(run))
    found = predicted(make_model(trained=False), inputs)
    masked = inputs.roots == MASKED
    snapshots = inputs.snapshots
    is_first = snapshots.token_ids == found.first[:, 0, :, None]
    chosen = (snapshots.probabilities.double() * is_first).sum(dim=-1).log() / temperature
    odds = torch.logit((chosen - snapshots.log_tempered_mass.double()).exp(), eps=1e-9)
    torch.testing.assert_close(
        found.sets.passing[:, 0][masked], odds.clamp(-14, 14)[masked], rtol=1e-3, atol=1e-3
    )
    assert not torch.equal(found.first[:, 0][masked].long(), snapshots.token_ids[..., 0][masked])


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


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "runs.parquet"
    record_tiny_runs(path, 16, records=("hidden",), **THRESHOLD)
    return path


def train(
    examples: tuple[TokenExamples, TokenExamples],
    settings: SetTrainSettings = SETTINGS,
    model: SetModel | None = None,
    **options: Any,
) -> TrainedSets:
    hidden_size = 0 if examples[0].hidden is None else 40
    model = model or make_model(
        shape=replace(SHAPE, hidden_size=hidden_size), trained=False, dropout=settings.dropout
    )
    return train_sets(model, *examples, settings, RULE, **({"say": lambda _: None} | options))


def test_examples_hold_what_each_step_commits_the_last_of_a_block_too(
    recorded: Path, tiny_runs: TinyRuns
) -> None:
    examples = load_set_examples(recorded, hidden=False, say=lambda _: None)
    for part in examples:
        assert part.num_examples and int(part.depths.max()) <= MAX_DEPTH
        labels = (part.states[part.at] == MASKED) & (part.following[part.at] != MASKED)
        assert bool(labels.any(dim=1).all()), "every step commits"
        is_last = (part.following[part.at] != MASKED).all(dim=1)
        assert bool(is_last.any())
        inside = part.at[~is_last]
        assert torch.equal(part.following[inside], part.states[inside + 1])
    whole = {run.item_id: sum(len(commits) for commits in run.commits) for run in tiny_runs(16, **THRESHOLD)}
    committed = sum(int(((p.states == MASKED) & (p.following != MASKED)).sum()) for p in examples)
    assert committed == sum(whole.values())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_beats_stale_sets_and_tokens_on_held_out_prompts(recorded: Path, device: str) -> None:
    examples = load_set_examples(recorded, hidden=False, say=lambda _: None)
    settings = SetTrainSettings(steps=60, batch_size=64, learning_rate=3e-3, evaluate_every=20, warmup=5)
    trained = train(examples, settings, device=device)
    found = trained.evaluation
    for name, margin in (("states", 0.05), ("tokens", 0.1), ("sets", 0.02), ("positions", 0.0)):
        assert found.shares[name] > found.shares[f"stale_{name}"] + margin, name
    card = set_card(trained, settings, {"items": {"words_train": 16}}, "")
    assert card["held_out"]["states"] == pytest.approx(found.shares["states"], abs=1e-4)
    assert card["held_out"]["tokens_by_depth"].keys() == {str(d) for d in found.by_depth["stale_sets"]}
    assert len(card["held_out_loss_by_step"]) == 3 and card["settings"]["dropout"] > 0
    assert f"tokens {found.by_depth['tokens'][2]:.3f}" in summary_of(found, 2)


def test_a_refit_keeps_the_body_and_files_are_checked(recorded: Path, tmp_path: Path) -> None:
    examples = load_set_examples(recorded, hidden=True, say=lambda _: None)
    file = tmp_path / "sets.safetensors"
    fingerprint = save_set_model(file, train(examples).model, target="f" * 24, card={})
    again = load_set_model(file)
    assert save_set_model(tmp_path / "again.safetensors", again, target="f" * 24, card={}) == fingerprint
    body = {name: value.clone() for name, value in again.state_dict().items()}
    refit = train(examples, model=again, refit=True)
    changed = {name for name, value in refit.model.state_dict().items() if not torch.equal(value, body[name])}
    assert changed == {"candidate.weight", "from_hidden.weight"}
    found = read_set_checkpoint(file)
    assert (found.target, found.records) == ("f" * 24, ("hidden",))
    without = make_model(shape=replace(SHAPE, hidden_size=0))
    save_set_model(tmp_path / "without.safetensors", without, target="", card={})
    assert read_set_checkpoint(tmp_path / "without.safetensors").records == ()
    assert reads_hidden(SetDrafter(again)) and not reads_hidden(SetDrafter(without))

    old = tmp_path / "old.safetensors"
    header = {"format": "dlmgrid-set-model-1", "target": "", "shape": {}, "card": {}}
    save_file(load_file(str(file)), str(old), metadata={"dlmgrid": json.dumps(header)})
    with pytest.raises(
        InputError, match=r"it holds dlmgrid-set-model-1, this version reads .*-2; train it again"
    ):
        read_set_checkpoint(old)
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(InputError, match="not a whole safetensors file"):
        read_set_checkpoint(file)
    with pytest.raises(InputError, match="dlmgrid train-sets TRAJ"):
        read_set_checkpoint(tmp_path / "none.safetensors")


@pytest.mark.parametrize("refit", [False, True], ids=["whole", "refit"])
def test_a_stopped_training_goes_on_as_if_it_had_not_been(
    recorded: Path, tmp_path: Path, refit: bool
) -> None:
    """Dropout included: its draws hang on seed and step."""
    examples = load_set_examples(recorded, hidden=True, say=lambda _: None)
    state = tmp_path / "sets.state"

    class StoppedError(Exception):
        pass

    def stop(message: str) -> None:
        if message.startswith("step 6"):
            raise StoppedError

    whole = train(examples, refit=refit)
    with pytest.raises(StoppedError):  # before step 6 is written, so it goes on from step 3
        train(examples, refit=refit, state=state, say=stop)
    said: list[str] = []
    rest = train(examples, refit=refit, state=state, say=said.append)
    assert said[0] == "resumed at step 3 of 9"
    assert (rest.best_step, rest.curve) == (whole.best_step, whole.curve)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(rest.model.state_dict()[name], value), name
    with pytest.raises(InputError, match="of another training"):
        train(examples, replace(SETTINGS, seed=1), refit=refit, state=state)
    with pytest.raises(InputError, match="of another training"):
        train(examples, refit=not refit, state=state)


def test_the_default_network_has_the_published_size() -> None:
    model = SetModel(SetShape(hidden_size=4096, vocab_size=8))
    body = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in model.input_layer())
    assert 4.9e6 < body < 5.6e6
    table = embedding_table(torch.randn(50, 30), model.shape.table_width)
    assert table.shape == (50, 128)
    assert bool((table[:, 30:] == 0).all()) and float(table.square().mean()) == pytest.approx(1, rel=1e-4)


def test_a_recording_without_hidden_states_is_refused_where_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.parquet"
    record_tiny_runs(path, 16, **THRESHOLD)
    with pytest.raises(
        InputError, match=r"holds nothing of hidden states; record it with record: \[hidden\]"
    ):
        load_set_examples(path, hidden=True, say=lambda _: None)
