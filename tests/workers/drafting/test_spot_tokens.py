"""SPOT with an order model that reads tokens: predictions, growth against brute force, exact rows, replay, files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from dlmgrid.kernels.logits import summarize
from dlmgrid.workers.benchmarks.words import PROMPT_VERSION, held_out_items
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.commit_rules import static
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.catalog import get_method
from dlmgrid.workers.drafting.drafter import DraftInputs, reads_hidden
from dlmgrid.workers.drafting.drafter_file import find_drafter_file, misfit
from dlmgrid.workers.drafting.order_checkpoint import (
    load_order_model,
    read_order_checkpoint,
    save_token_model,
)
from dlmgrid.workers.drafting.placed_model import STATE_BUCKETS, PlacedTokens
from dlmgrid.workers.drafting.spot_tokens import LocalTokens, TokenDrafter, predict_tokens
from dlmgrid.workers.drafting.token_model import TokenModel, TokenShape, path_of, shifted
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import write_items
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.models.checkpoint import read_config
from dlmgrid.workers.testing.tiny_runs import tiny_cell, tiny_decode
from dlmgrid.workers.trajectories.recording import TrajectoryRecorder
from dlmgrid.workers.trajectories.replay import ReplayBatch, without_future
from dlmgrid.workers.trajectories.trajectory import Trajectory, load_trajectories
from dlmgrid.workers.unit_runner import UnitRunner
from dlmgrid.workers.units import Key, WorkUnit

State = tuple[int, ...]
TinyRuns = Callable[..., list[Trajectory]]


def make_model(
    vocab_size: int = 64, hidden_size: int = 0, *, trained: bool = True, seed: int = 0
) -> TokenModel:
    """A random model; ``trained``: its heads are random too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = TokenShape(
            vocab_size=vocab_size, hidden_size=hidden_size, width=32, num_layers=2, table_width=8
        )
        model = TokenModel(shape)
        model.table.normal_()
        if trained:
            for part in (*model.fresh.parameters(), *model.committed.parameters(), model.distance):
                torch.nn.init.normal_(part, std=0.5)
            torch.nn.init.normal_(model.head.get_parameter("2.weight"), std=2.0)
    return model.double().eval()


def make_inputs(
    length: int = 5, num_samples: int = 3, temperature: float = 0.0, seed: int = 0
) -> DraftInputs:
    """Inputs with random stale distributions; every root has filled position 1 since, sample 0 knew position 0."""
    generator = torch.Generator().manual_seed(seed)
    stale = torch.full((num_samples, length), MASKED, dtype=torch.int32)
    stale[0, 0] = 9
    roots = stale.clone()
    roots[:, 1] = torch.arange(num_samples, dtype=torch.int32) + 5
    logits = torch.randn(num_samples, length, 64, generator=generator) * 2
    snapshots = Snapshots(num_samples, length, roots.device, hidden_size=6)
    masked = stale == MASKED
    samples, positions = masked.nonzero(as_tuple=True)
    snapshots.store(
        torch.arange(num_samples),
        masked,
        samples,
        positions,
        summarize(logits[samples, positions], temperature),
        torch.randn(samples.numel(), 6, generator=generator),
    )
    return DraftInputs(
        roots=roots, commit_counts=torch.ones(num_samples, dtype=torch.int64),
        block_starts=torch.zeros(num_samples, dtype=torch.int64),
        keys=torch.arange(2 * num_samples).view(num_samples, 2),
        snapshots=snapshots, rule=static(1), temperature=temperature, noise=NoiseTable(0), stream=Stream.TOKEN,
    )  # fmt: skip


def test_an_untrained_model_gives_the_stale_distributions() -> None:
    inputs = make_inputs()
    model = make_model(trained=False)
    states = inputs.roots[:, None]
    is_asked = torch.ones(3, 1, dtype=torch.bool)
    reader = LocalTokens(model)
    with torch.inference_mode():
        stale = reader.read(inputs.snapshots)
        found = predict_tokens(reader, inputs, stale, states, inputs.commit_counts[:, None], is_asked)
    masked = inputs.roots == MASKED
    snapshots = inputs.snapshots
    for name, rank in (("first", 0), ("second", 1)):
        assert torch.equal(getattr(found, name)[:, 0][masked].long(), snapshots.token_ids[..., rank][masked])
        expected = snapshots.probabilities[..., rank][masked].double()
        torch.testing.assert_close(
            getattr(found, f"{name}_probability")[:, 0][masked], expected, rtol=1e-5, atol=0
        )
    with pytest.raises(ValueError, match="reads hidden states of size 7, not such of size 6"):
        make_model(hidden_size=7).read(snapshots)


def test_a_drafted_token_changes_what_is_predicted_and_the_rest_of_the_batch_does_not() -> None:
    inputs, model = make_inputs(), make_model()
    states = inputs.roots[:, None].repeat(1, 3, 1)
    states[:, 1, 3], states[:, 2, 3] = 5, 6  # the same position, another token
    reader = LocalTokens(model)
    counts = torch.full((3, 3), 2)
    with torch.inference_mode():
        stale = reader.read(inputs.snapshots)
        is_asked = torch.ones(3, 3, dtype=torch.bool)
        found = predict_tokens(reader, inputs, stale, states, counts, is_asked)
        for sample in range(3):
            one = torch.zeros_like(is_asked)
            one[sample, 2] = True
            alone = predict_tokens(reader, inputs, stale, states, counts, one)
            for ours, theirs in zip(alone, found, strict=True):
                assert ours is not None and theirs is not None
                torch.testing.assert_close(ours[sample, 2], theirs[sample, 2], rtol=0, atol=1e-12)
    assert found.position_scores is not None
    assert not torch.allclose(found.position_scores[:, 1], found.position_scores[:, 2])
    assert not torch.allclose(found.first_probability[:, 1], found.first_probability[:, 2])


def test_values_are_shifted_within_the_block() -> None:
    values = torch.arange(1, 6)[None]
    assert shifted(values, 1, 0).tolist() == [[2, 3, 4, 5, 0]]
    assert shifted(values, -2, -1).tolist() == [[-1, -1, 1, 2, 3]]


def children_of(
    model: TokenModel, inputs: DraftInputs, sample: int, state: State
) -> list[tuple[State, float]]:
    """All children of a state with their share of its mass, by the definition, at T = 0."""
    masked = [position for position, token in enumerate(state) if token == MASKED]
    if len(masked) <= 1:
        return []
    snapshots = inputs.snapshots.select(torch.tensor([sample]))
    states = torch.tensor([[state]], dtype=torch.int32)
    path = path_of(snapshots, inputs.roots[sample : sample + 1], states, torch.float64)
    with torch.inference_mode():
        found = model(model.read(snapshots), path[:, 0], states[:, 0].long())
    q = found.scores[0, masked].softmax(dim=0).tolist()
    children = []
    for position, share in zip(masked, q, strict=True):
        ids = snapshots.token_ids[0, position].tolist()
        stale = snapshots.probabilities[0, position].double()
        p = found.log_committed[0, position].exp()
        rest = stale[16:] / (stale[16:].sum() + snapshots.tail_mass[0, position].double()) * p[16]
        ranked = sorted(zip([*p[:16].tolist(), *rest.tolist()], ids, strict=True), reverse=True)
        children += [
            ((*state[:position], token, *state[position + 1 :]), share * probability)
            for probability, token in ranked[:2]
        ]
    return children


def brute_force(model: TokenModel, inputs: DraftInputs, sample: int, budget: int) -> dict[State, float]:
    """The top-D by enumeration; a state that fell out of the best D passes no mass on."""
    level: dict[State, float] = {tuple(inputs.roots[sample].tolist()): 1.0}
    listed: dict[State, float] = {}
    while level:
        following: dict[State, float] = {}
        cap: dict[State, float] = {}
        for state, mass in level.items():
            for child, share in children_of(model, inputs, sample, state):
                following[child] = following.get(child, 0.0) + mass * share
                cap[child] = max(cap.get(child, 0.0), mass)
        listed.update({child: min(mass, cap[child]) for child, mass in following.items()})
        listed = dict(sorted(listed.items(), key=lambda pair: -pair[1])[:budget])
        level = {child: listed[child] for child in following if child in listed}
    return listed


@pytest.mark.parametrize("hidden_size", [0, 6], ids=["tokens", "hidden"])
@pytest.mark.parametrize("budget", [3, 12])
def test_growth_that_depends_on_the_state_equals_brute_force(budget: int, hidden_size: int) -> None:
    inputs, model = make_inputs(), make_model(hidden_size=hidden_size)
    tree = DraftTree(3, budget, 5, torch.device("cpu"))
    tree.plant(inputs.roots)
    drafter = TokenDrafter(model)
    assert reads_hidden(drafter) == (hidden_size > 0)
    drafter.draft(inputs, tree)
    for sample in range(3):
        nodes = range(1, int(tree.num_nodes[sample]))
        grown = {
            tuple(tree.tokens[sample, node].tolist()): math.exp(float(tree.log_mass[sample, node]))
            for node in nodes
        }
        assert len(grown) == len(nodes), "a state is packed once"
        assert grown == pytest.approx(brute_force(model, inputs, sample, budget))
        for node in nodes:
            parent = int(tree.parents[sample, node])
            assert parent < node
            assert float(tree.log_mass[sample, node]) <= float(tree.log_mass[sample, parent]) + 1e-12


DECODERS: dict[str, dict[str, Any]] = {
    "static-1": {},
    "static-3": {"commits_per_step": 3},
    "threshold": {"decoder": "threshold", "threshold": 0.5},
}


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5], ids=lambda t: f"T{t}")
def test_rows_are_exact_and_replay_to_the_live_counts(
    tiny_runs: TinyRuns, temperature: float, decoder: dict[str, Any]
) -> None:
    settings = {"temperature": temperature, **decoder}
    runs = tiny_runs(3, records=("hidden", "window"), **settings)
    serialized = tiny_decode(tiny_cell(**settings), None, num_items=3)
    batch = ReplayBatch(runs)
    hidden = TokenDrafter(make_model(hidden_size=40), min_log_mass=math.log(1e-3))
    for window, drafter in {"": TokenDrafter(make_model()), "full": hidden}.items():
        cell = replace(tiny_cell(**settings), method="ssd", budget=6, window=window)  # the drafter is given
        live = tiny_decode(cell, drafter, num_items=3)
        assert [g.steps for g in live] == [g.steps for g in serialized]
        assert sum(g.drafted_nodes for g in live) > 0
        replayed = batch.replay(cell, without_future(drafter))
        for ours, counts in zip(live, replayed, strict=True):
            assert (ours.accepted, ours.drafted_nodes) == (counts.accepted, counts.drafted_nodes)
            assert ours.rows_computed == counts.rows_computed


def reference_cell(**settings: Any) -> Cell:
    values: dict[str, Any] = {
        "model": "reference", "benchmark": "words", "prompt_version": PROMPT_VERSION, "method": "none", "budget": 0,
        "temperature": 0.0, "block_length": 32, "gen_length": 8,
    }  # fmt: skip
    return Cell(**(values | settings)).canonical()


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda t: f"T{t}")
@pytest.mark.parametrize("hidden", [False, True], ids=["tokens", "hidden"])
def test_rows_of_the_reference_model_are_exact_and_replay(
    tmp_path: Path, temperature: float, hidden: bool
) -> None:
    runner, items = UnitRunner(actor="test"), held_out_items(1)
    write_items(tmp_path / "items.jsonl", items)
    config = read_config(resolve_checkpoint("reference"))
    file = tmp_path / "tokens.safetensors"
    model = make_model(config.vocab_size, config.hidden_size if hidden else 0)
    mark = save_token_model(file, model, target="", card={})

    def unit(cell: Cell, **changes: Any) -> WorkUnit:
        return WorkUnit(
            cell=cell, keys=(Key(items[0].item_id, 0),), checkpoint=str(resolve_checkpoint("reference")),
            inputs=str(tmp_path / "items.jsonl"), output=str(tmp_path / f"{cell.cell_key}.parquet"), **changes,
        )  # fmt: skip

    recorded = reference_cell(temperature=temperature)
    recorder = TrajectoryRecorder(("hidden",))
    runner.decode_rows(unit(recorded), max_in_flight=1, recorder=recorder)
    recorder.write(tmp_path / "runs.parquet", recorded, [(items[0].item_id, 0)])
    reference = unit(recorded)
    runner.run(reference)
    cell = reference_cell(temperature=temperature, method="spot", budget=6, drafter_fingerprint=mark)
    drafted = unit(cell, drafter_path=str(file), reference_shards=(reference.output,))
    result = runner.run(drafted)
    assert (result.num_errors, result.num_inexact, result.num_unchecked) == (0, 0, 0)
    (row,) = pq.read_table(drafted.output).to_pylist()
    assert row["exact_tokens"] and row["exact_path"] and row["exact_bits"] and row["drafted_nodes"] > 0
    batch = ReplayBatch(list(load_trajectories(tmp_path / "runs.parquet", records=("hidden",))))
    (counts,) = batch.replay(cell, without_future(TokenDrafter(load_token_model(file))))
    assert (row["accepted"], row["nfe_total"]) == (counts.accepted, counts.nfe_total)
    assert (row["drafted_nodes"], row["rows_computed"]) == (counts.drafted_nodes, counts.rows_computed)


def load_token_model(file: Path) -> TokenModel:
    model = load_order_model(file)
    assert isinstance(model, TokenModel)
    return model


def test_a_file_gives_the_model_again_and_names_its_target_and_what_it_reads(tmp_path: Path) -> None:
    file = tmp_path / "tokens.safetensors"
    mark = save_token_model(file, make_model(hidden_size=6), target="f" * 24, card={"steps": 3})
    again = load_token_model(file)
    assert save_token_model(tmp_path / "again.safetensors", again, target="f" * 24, card={"steps": 3}) == mark
    found = read_order_checkpoint(file)
    assert (found.target, found.reads_tokens, found.records) == ("f" * 24, True, ("hidden",))
    spot = get_method("spot")
    drafter = find_drafter_file(spot, str(file))
    assert (drafter.fingerprint, drafter.records) == (mark, ("hidden",))
    cell = tiny_cell(method="spot", budget=4)
    assert misfit(drafter, cell) is None
    reason = misfit(drafter, replace(cell, weight_fingerprint="a" * 24))
    assert reason is not None and "it reads tokens of other weights" in reason
    save_token_model(file, make_model(), target="", card={})
    assert read_order_checkpoint(file).records == ()
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(InputError, match="not a whole safetensors file"):
        find_drafter_file(spot, str(file))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scores_beside_the_target_are_those_beside_the_states(device: str) -> None:
    inputs = make_inputs(length=8, num_samples=4)
    here = make_model(hidden_size=6)
    there = make_model(hidden_size=6)
    placed, local = PlacedTokens(there, torch.device(device)), LocalTokens(here)
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        stale, stale_there = local.read(inputs.snapshots), placed.read(inputs.snapshots)
        for count in (1, 3, 3, 3, 20, 0, 1, STATE_BUCKETS[-1] + 1):
            sample = torch.randint(4, (count,), generator=generator)
            states = inputs.roots[sample]
            states = torch.where(torch.rand(states.shape, generator=generator) < 0.5, 7, states)
            path = path_of(inputs.snapshots, inputs.roots, inputs.roots[:, None], torch.float64)[sample, 0]
            expected = local(stale, sample, path, states.long())
            found = placed(stale_there, sample, path, states.long())
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.device.type == "cpu"
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    drafter = TokenDrafter(make_model(hidden_size=6))
    trees = []
    for is_placed in (False, True):
        if is_placed:
            drafter.place(torch.device(device))
        tree = DraftTree(4, 10, 8, torch.device("cpu"))
        tree.plant(inputs.roots)
        drafter.draft(inputs, tree)
        trees.append(tree.tokens)
    assert torch.equal(*trees)
