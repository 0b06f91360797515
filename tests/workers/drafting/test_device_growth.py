"""Trees that grow beside the target are those that grow beside the states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlmgrid.kernels.logits import summarize
from dlmgrid.workers.decoding.commit_rules import CommitRule, in_sub_blocks, sequential, static, threshold
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.sampling import Sampling
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.confidence_tree import ConfidenceTreeDrafter, stale_confidence_order
from dlmgrid.workers.drafting.device_growth import (
    LEVELS,
    TWINS,
    DeviceGrowth,
    growth_operators,
    order_weights,
    reason_for_host,
)
from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.drafting.growth import grow
from dlmgrid.workers.drafting.order_checkpoint import REFERENCE, find_order_checkpoint, load_order_model
from dlmgrid.workers.drafting.order_model import OrderModel, log_next_position
from dlmgrid.workers.drafting.spot import SpotDrafter
from dlmgrid.workers.drafting.ssd import ChainDrafter
from dlmgrid.workers.engine.engine import load_engine
from dlmgrid.workers.models.synthetic import tiny_family_config, write_random_checkpoint
from dlmgrid.workers.testing.tiny_target import TinyTarget

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> OrderModel:
    torch.manual_seed(3)
    return OrderModel().double().eval()


def draft_inputs(
    num_samples: int,
    length: int,
    *,
    seed: int = 0,
    sharpness: float = 3.0,
    rule: CommitRule | None = None,
    temperature: float = 0.0,
    noise: str = "commit_count",
    stream: Stream | None = Stream.TOKEN,
    allows_complete: bool = False,
) -> DraftInputs:
    """Inputs of random blocks: the snapshot is one commit older than the root, and each block is filled otherwise."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, length, 80, generator=generator) * sharpness
    roots = torch.full((num_samples, length), MASKED, dtype=torch.int32)
    for sample in range(1, num_samples):
        filled = torch.randperm(length, generator=generator)[: (sample * 7) % length]
        roots[sample, filled] = torch.randint(
            0, 80, (filled.numel(),), generator=generator, dtype=torch.int32
        )
    masked = roots == MASKED
    sample, position = masked.nonzero(as_tuple=True)
    snapshots = Snapshots(num_samples, length, CPU)
    summary = summarize(logits[sample, position], temperature)
    snapshots.store(torch.arange(num_samples), masked, sample, position, summary)
    for row in range(num_samples):
        opened = int(masked[row].to(torch.int8).argmax())
        roots[row, opened] = int(snapshots.token_ids[row, opened, 0])
    return DraftInputs(
        roots=roots,
        commit_counts=(roots != MASKED).sum(dim=1),
        block_starts=torch.arange(num_samples) * length + 64,
        keys=torch.randint(0, 2**32, (num_samples, 2), generator=generator),
        snapshots=snapshots,
        rule=rule or static(1),
        temperature=temperature,
        noise=NoiseTable(0, noise),
        stream=stream,
        allows_complete=allows_complete,
    )


def planted(inputs: DraftInputs, budget: int) -> DraftTree:
    num_samples, length = inputs.roots.shape
    tree = DraftTree(num_samples, budget, length, CPU)
    tree.plant(inputs.roots)
    return tree


def grown_on_host(
    inputs: DraftInputs, budget: int, model: OrderModel | None, min_log_mass: float = -math.inf
) -> DraftTree:
    tree = planted(inputs, budget)

    def order(states: Tensor, eligible: Tensor, _: object) -> Tensor:
        assert model is not None
        return log_next_position(model, inputs.snapshots, inputs.roots, states, eligible)

    grow(inputs, tree, stale_confidence_order if model is None else order, min_log_mass=min_log_mass)
    return tree


def assert_same_trees(found: DraftTree, expected: DraftTree) -> None:
    assert found.num_nodes.tolist() == expected.num_nodes.tolist()
    is_node = expected.is_node()
    assert torch.equal(found.tokens[is_node], expected.tokens[is_node])
    for name in ("parents", "depths", "hashes"):
        assert torch.equal(getattr(found, name)[is_node], getattr(expected, name)[is_node]), name
    torch.testing.assert_close(found.log_mass[is_node], expected.log_mass[is_node], rtol=1e-9, atol=1e-9)


Compare = Callable[..., None]
Place = Callable[..., DeviceGrowth]


@pytest.fixture(
    params=["torch", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("graph", "triton"))]
)
def place(request: pytest.FixtureRequest, model: OrderModel) -> Place:
    """Makes growths: the twins on the CPU, the twins in graphs, or the kernels."""
    name = request.param
    device = CPU if name == "torch" else request.getfixturevalue("cuda_device")
    operators = growth_operators("triton" if name == "triton" else "torch")

    def make(by_order: bool, **given: Any) -> DeviceGrowth:
        return DeviceGrowth(device, order_weights(model, device) if by_order else None, operators, **given)

    return make


@pytest.fixture
def compare(model: OrderModel, place: Place) -> Compare:
    """Grow the same inputs on both sides, by an order model and by confidences; thrice, so that a graph is made and
    replayed."""

    def run(
        inputs: DraftInputs, budget: int, methods: tuple[str, ...] = ("order", "confidence"), **given: Any
    ) -> None:
        for method in methods:
            growth = place(method == "order", **given)
            expected = grown_on_host(inputs, budget, model if method == "order" else None, **given)
            for _ in range(3 if growth.device.type == "cuda" else 1):
                tree = planted(inputs, budget)
                growth.grow(inputs, tree)
                assert_same_trees(tree, expected)

    return run


@pytest.mark.parametrize("budget", [1, 2, 8, 20, 41])
@pytest.mark.parametrize(("num_samples", "length", "sharpness"), [(1, 32, 3.0), (3, 9, 1.0), (2, 32, 6.0)])
def test_trees_at_every_budget(
    compare: Compare, budget: int, num_samples: int, length: int, sharpness: float
) -> None:
    compare(draft_inputs(num_samples, length, seed=budget, sharpness=sharpness), budget)


@pytest.mark.parametrize("stream", [Stream.TOKEN, Stream.DRAFT, None], ids=["coupled", "uncoupled", "greedy"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("noise", ["commit_count", "per_position"])
def test_trees_of_drawn_tokens(
    compare: Compare, stream: Stream | None, temperature: float, noise: str
) -> None:
    inputs = draft_inputs(3, 12, seed=5, temperature=temperature, noise=noise, stream=stream, sharpness=2.0)
    compare(inputs, 12)


@pytest.mark.parametrize("allows_complete", [False, True])
def test_trees_that_reach_the_end_of_a_block(compare: Compare, allows_complete: bool) -> None:
    inputs = draft_inputs(4, 5, seed=2, sharpness=6.0, allows_complete=allows_complete)
    compare(inputs, 30)


@pytest.mark.parametrize("gamma", [0.02, 0.3, 1.0])
def test_states_below_gamma_are_left_out(compare: Compare, gamma: float) -> None:
    for seed in range(3):
        compare(draft_inputs(3, 16, seed=seed, sharpness=4.0), 20, min_log_mass=math.log(gamma))


@pytest.mark.parametrize(
    "rule", [sequential(1), in_sub_blocks(static(1), 4)], ids=["sequential", "sub_blocks"]
)
def test_trees_of_other_rules_of_one_commit(compare: Compare, rule: CommitRule) -> None:
    compare(draft_inputs(3, 16, seed=9, rule=rule), 14)


@pytest.mark.parametrize("confidence", ["plain", "topk_margin", "entropy"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trees_of_other_confidences(compare: Compare, confidence: str, temperature: float) -> None:
    rule = replace(static(1), sampling=Sampling(confidence=confidence))
    compare(draft_inputs(2, 12, seed=4, rule=rule, temperature=temperature), 10, ("confidence",))


def test_samples_without_a_snapshot_keep_their_root_alone(compare: Compare) -> None:
    inputs = draft_inputs(5, 8, seed=1)
    inputs.snapshots.invalidate(torch.tensor([0, 3]))
    compare(inputs, 6)
    inputs.snapshots.invalidate(torch.arange(5))
    compare(inputs, 6)


def test_equal_masses_keep_the_order_of_the_host(compare: Compare) -> None:
    """Text that has ended: all positions hold the same token, surely."""
    inputs = draft_inputs(1, 12)
    snapshots = inputs.snapshots
    snapshots.probabilities[...] = 0.0
    snapshots.probabilities[..., 0] = 1.0
    snapshots.tail_mass[...] = 0.0
    snapshots.token_ids[..., 0] = 7
    compare(inputs, 30, ("confidence",))


def test_a_growth_serves_many_rounds_of_changing_size(model: OrderModel, place: Place) -> None:
    growth = place(True)
    for seed, num_samples in enumerate((1, 3, 2, 4, 1, 1, 3, 1)):
        inputs = draft_inputs(num_samples, 10, seed=seed, sharpness=6.0)
        tree = planted(inputs, 9)
        growth.grow(inputs, tree)
        assert_same_trees(tree, grown_on_host(inputs, 9, model))


def test_a_chain_goes_on_past_the_levels_of_one_submission(place: Place) -> None:
    """Nothing is lost where a tree is deeper: tokens are sure, and each position is far ahead of the next."""
    rule = replace(static(1), sampling=Sampling(confidence="entropy"))
    inputs = draft_inputs(2, 32, rule=rule)
    inputs.snapshots.probabilities[...] = 0.0
    inputs.snapshots.probabilities[..., 0] = 1.0
    inputs.snapshots.entropy[...] = 5.0 * torch.arange(32)
    growth, expected = place(False), grown_on_host(inputs, 20, None)
    assert int(expected.depths[0].max()) > LEVELS
    for _ in range(3):
        tree = planted(inputs, 20)
        growth.grow(inputs, tree)
        assert_same_trees(tree, expected)


def test_what_stays_on_the_host_says_why() -> None:
    assert reason_for_host(static(1), 32, 20, by_confidence=True) == ""
    assert "one" in reason_for_host(static(2), 32, 20, by_confidence=False)
    assert "one" in reason_for_host(threshold(0.9), 32, 20, by_confidence=False)
    drawn = replace(static(1), sampling=Sampling(confidence="random"))
    assert reason_for_host(drawn, 32, 20, by_confidence=False) == ""
    assert "drawn" in reason_for_host(drawn, 32, 20, by_confidence=True)
    assert "64" in reason_for_host(static(1), 128, 20, by_confidence=True)
    inputs = draft_inputs(1, 8, rule=static(2))
    with pytest.raises(ValueError, match="another number"):
        DeviceGrowth(CPU, None, TWINS).grow(inputs, planted(inputs, 4))


class FarTarget(TinyTarget):
    """A target whose passes run on another device than the decoder's states; nothing is computed there."""

    def __init__(self) -> None:
        super().__init__(block_length=8, vocab_size=9)
        self.device = torch.device("meta")


@pytest.mark.parametrize(
    ("drafts", "rule", "method", "expected"),
    [
        ("host", static(1), "spot", "host"),
        ("device", static(1), "spot", "device: meta, triton kernels"),
        ("device", sequential(1), "confidence_tree", "device: meta, triton kernels"),
        ("device", threshold(0.9), "spot", "host: a step of the rule 'threshold' may commit another number"),
        ("device", static(1), "ssd", "host: the method grows no trees on a device"),
    ],
)
def test_a_decoder_says_where_its_drafts_grow(
    drafts: str, rule: CommitRule, method: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    settings = DecodeSettings(
        block_length=8, gen_length=8, budget=4, temperature=0.0, rule=rule, noise=NoiseTable(0), stop_token_ids=(),
        drafts=drafts,
    )  # fmt: skip
    drafters = {
        "spot": lambda: SpotDrafter(OrderModel()),
        "confidence_tree": ConfidenceTreeDrafter,
        "ssd": ChainDrafter,
    }
    with caplog.at_level("INFO"):
        decoder = Decoder(FarTarget(), drafters[method](), settings)
    assert decoder.growth.startswith(expected)
    assert f"drafts grow on the {decoder.growth}" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("window", ["", "full"])
def test_a_decode_with_drafts_from_the_device_takes_the_passes_of_one_with_drafts_from_the_host(
    tmp_path: Path, cuda_device: torch.device, temperature: float, window: str
) -> None:
    config = tiny_family_config(
        "sdar", block_length=8, head_dim=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    write_random_checkpoint(tmp_path, config, scale=0.3)
    engine = load_engine(
        tmp_path, num_slots=3, max_length=96, device=cuda_device.type, kernels="triton", self_test=False
    )
    settings = DecodeSettings(
        block_length=8, gen_length=40, budget=9, temperature=temperature, rule=static(1), noise=NoiseTable(3),
        stop_token_ids=(), window=window, fused_commit=True, drafts="device",
    )  # fmt: skip
    prompts = [
        Prompt(item_id=f"{n}", repeat=0, token_ids=tuple(5 * i % 251 for i in range(n)))
        for n in (5, 8, 11, 2)
    ]
    runs = []
    for on_host in (False, True):
        for drafter in (
            SpotDrafter(load_order_model(find_order_checkpoint(REFERENCE))),
            ConfidenceTreeDrafter(),
        ):
            decoder = Decoder(engine, drafter, settings, logits_pass=engine.logits_pass)
            assert decoder.growth.startswith("device")
            if on_host:
                assert drafter.place(CPU).startswith("host")
            runs.append(decoder.decode(prompts, 3))
    for live, host in zip(runs[:2], runs[2:], strict=True):
        for ours, theirs in zip(live, host, strict=True):
            assert ours.steps == theirs.steps and ours.digests == theirs.digests
            assert ours.nfe_denoise == theirs.nfe_denoise and ours.drafted_nodes == theirs.drafted_nodes
            assert ours.accepted == theirs.accepted
    assert sum(sum(one.accepted) for run in runs for one in run) > 0
