"""The two-block window: fewer forwards, the same tokens, path and bits, and replay that counts as live decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.workers.decoding.commit_rules import CommitRule, threshold
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting import confidence_tree, none, ssd
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs
from dlmgrid.workers.drafting.spiffy import SpiffyDrafter
from dlmgrid.workers.drafting.spiffy_calibration import calibrate_graph
from dlmgrid.workers.engine.engine import Engine, load_engine
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.testing.tiny_runs import record_tiny_runs, tiny_cell, tiny_decode
from dlmgrid.workers.trajectories.replay import ReplayBatch, without_future
from dlmgrid.workers.trajectories.trajectory import load_trajectories

CASES = (("cross_block", False), ("refresh", False), ("full", True))
NUM_ITEMS = 2
DECODERS: dict[str, dict[str, Any]] = {
    "static": {},
    "static-3": {"commits_per_step": 3},
    "threshold": {"decoder": "threshold", "threshold": 0.5},
}


def forwards(generations: list[Generation]) -> int:
    return sum(g.nfe_prefill + g.nfe_denoise + g.nfe_commit for g in generations)


def paths(generations: list[Generation]) -> list[Any]:
    return [(g.steps, g.digests, g.token_ids, g.stop_reason) for g in generations]


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize("temperature", [0.0, 1.5], ids=lambda t: f"T{t}")
def test_windows_save_forwards_keep_the_path_and_replay_to_the_live_counts(
    tmp_path: Path, temperature: float, decoder: dict[str, Any]
) -> None:
    settings = {"temperature": temperature, **decoder}
    free = tiny_decode(tiny_cell(**settings), None, num_items=NUM_ITEMS)
    stop = free[-1].token_ids[4]
    for stops in ((), (stop,)):
        path = tmp_path / f"{len(stops)}.parquet"
        record_tiny_runs(path, NUM_ITEMS, records=("window",), stop_token_ids=stops, **settings)
        runs = list(load_trajectories(path, records=("window",)))
        batch = ReplayBatch(runs)
        serialized = tiny_decode(tiny_cell(**settings), None, num_items=NUM_ITEMS, stop_token_ids=stops)
        drafters: dict[str, Drafter] = {"ssd": ssd.build(), "tree": confidence_tree.build()}
        if not decoder:
            drafters["spiffy"] = SpiffyDrafter(calibrate_graph(runs, budget=8, selection="marginal_gain"))
        for name, drafter in drafters.items():
            plain = forwards(_decode(drafter, settings, stops))
            for window, fused in CASES:
                changes = {"window": window, "fused_commit": fused}
                live = _decode(drafter, settings | changes, stops)
                assert paths(live) == paths(serialized), (name, window)
                if fused and not decoder and not stops:
                    assert forwards(live) < plain
                counts = batch.replay(_cell(settings | changes), without_future(drafter))
                for ours, theirs in zip(live, counts, strict=True):
                    assert ours.accepted == theirs.accepted, (name, window)
                    for count in (
                        "nfe_prefill",
                        "nfe_denoise",
                        "nfe_commit",
                        "drafted_nodes",
                        "rows_computed",
                    ):
                        assert getattr(ours, count) == getattr(theirs, count), (name, window, count)
                    assert sum(ours.accepted) + len(ours.accepted) == len(ours.steps)
                    assert ours.drafted_nodes <= len(ours.accepted) * 8


def _cell(settings: dict[str, Any]) -> Any:
    return replace(tiny_cell(), method="ssd", budget=8, **settings)  # any method: the drafter is given


def _decode(drafter: Drafter, settings: dict[str, Any], stops: tuple[int, ...]) -> list[Generation]:
    return tiny_decode(_cell(settings), drafter, num_items=NUM_ITEMS, stop_token_ids=stops)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(resolve_checkpoint("reference"), num_slots=1, max_length=96, self_test=False)


@pytest.mark.parametrize("temperature", [0.0, 1.5], ids=lambda t: f"T{t}")
def test_a_real_model_gives_the_same_bits_behind_a_drafted_block(engine: Engine, temperature: float) -> None:
    rule: CommitRule = threshold(0.6)
    prompt = Prompt(item_id="item", repeat=0, token_ids=tuple(range(20, 40)))

    def decode(drafter: Drafter, budget: int, window: str) -> list[Generation]:
        settings = DecodeSettings(
            block_length=32, gen_length=40, budget=budget, temperature=temperature, rule=rule, noise=NoiseTable(3),
            stop_token_ids=(), window=window, fused_commit=window == "full",
        )  # fmt: skip
        return Decoder(engine, drafter, settings).decode([prompt])

    serialized = decode(none.build(), 0, "")
    plain = decode(confidence_tree.build(), 6, "")
    drafted = decode(confidence_tree.build(), 6, "full")
    assert paths(drafted) == paths(serialized) == paths(plain)
    assert forwards(drafted) < forwards(plain)


class _Watcher:
    """A drafter that keeps what the inner one was asked."""

    def __init__(self) -> None:
        self.inner = ssd.build()
        self.asked: list[tuple[list[int], list[bool]]] = []

    def draft(self, inputs: DraftInputs, tree: DraftTree) -> None:
        self.asked.append((inputs.block_starts.tolist(), inputs.snapshots.is_valid.tolist()))
        self.inner.draft(inputs, tree)


def test_nothing_is_drafted_past_a_block_that_holds_a_stop_id() -> None:
    free = tiny_decode(tiny_cell(gen_length=40), None, num_items=1)[0]
    every_token = tuple(set(free.token_ids))  # whatever completes the block, it holds a stop id
    watcher = _Watcher()
    cell = replace(tiny_cell(gen_length=40), method="ssd", budget=8, window="full")
    stopped = tiny_decode(cell, watcher, num_items=1, stop_token_ids=every_token)[0]
    assert {start for starts, _ in watcher.asked for start in starts} == {0}
    assert stopped.stop_reason == "eos"
    assert len(stopped.accepted) * 8 >= stopped.drafted_nodes
    unstopped = _Watcher()
    tiny_decode(cell, unstopped, num_items=1)
    assert {start for starts, _ in unstopped.asked for start in starts} > {0, 8}


def test_a_replay_without_the_recorded_window_is_refused(tmp_path: Path) -> None:
    record_tiny_runs(tmp_path / "runs.parquet", 2)
    with pytest.raises(
        InputError,
        match=r"holds nothing of the next block beside each state; record it with record: \[window\]",
    ):
        list(load_trajectories(tmp_path / "runs.parquet", records=("window",)))
    batch = ReplayBatch(list(load_trajectories(tmp_path / "runs.parquet")))
    with pytest.raises(ValueError, match="needs trajectories loaded with their window"):
        batch.replay(_cell({"window": "full"}), lambda inputs, tree, _: None)
