"""Training of the order model: its examples, that it learns, and that it can be repeated and resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlmgrid.workers.drafting.order_examples import MAX_DEPTH, is_held_out, make_examples, split_runs
from dlmgrid.workers.drafting.order_training import Trained, TrainSettings, card_of, train_order
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.trajectories.trajectory import Trajectory

SETTINGS = TrainSettings(steps=12, batch_size=16, evaluate_every=4, patience=40, seed=3)


@pytest.fixture
def runs(tiny_runs: Callable[..., list[Trajectory]]) -> list[Trajectory]:
    return tiny_runs(16)


def train(runs: list[Trajectory], settings: TrainSettings = SETTINGS, state: Path | None = None) -> Trained:
    training, held_out = (make_examples(part) for part in split_runs(runs))
    return train_order(training, held_out, settings, state=state, say=lambda _: None)


def weights(trained: Trained) -> torch.Tensor:
    return torch.cat([value.flatten() for value in trained.model.state_dict().values()])


@pytest.mark.parametrize("commits_per_step", [1, 3])
def test_examples_are_every_prefix_of_what_followed_a_snapshot(
    tiny_runs: Callable[..., list[Trajectory]], commits_per_step: int
) -> None:
    (run,) = tiny_runs(1, commits_per_step=commits_per_step)
    examples = make_examples([run])
    starts = run.block_starts.tolist()
    expected = []
    for stale in range(len(starts)):
        for depth in range(1, MAX_DEPTH + 1):
            at = stale + depth
            # The step that sees the virtual state lies in the block and does not complete it.
            if at + 1 < len(starts) and starts[at + 1] == starts[stale]:
                expected.append((stale, at, depth))
    assert examples.num_examples == len(expected) >= 3
    blocks = sorted(set(starts))
    for number, (stale, at, depth) in enumerate(expected):
        snapshot = int(examples.snapshot[number])
        assert torch.equal(examples.masked[snapshot], run.states[stale] == -1)
        assert torch.equal(examples.roots[snapshot], run.states[stale + 1])
        assert torch.equal(examples.features[snapshot, :, :32], run.probabilities[stale])
        assert torch.equal(examples.states[number], run.states[at])
        assert examples.labels[number].nonzero().flatten().tolist() == [p for p, _ in run.commits[at]]
        assert (int(examples.depths[number]), int(examples.blocks[number])) == (
            depth,
            blocks.index(starts[at]),
        )


def test_prompts_are_split_and_repeats_of_one_stay_together(runs: list[Trajectory]) -> None:
    training, held_out = split_runs(runs)
    assert {run.item_id for run in training}.isdisjoint(run.item_id for run in held_out)
    assert all(is_held_out(run.item_id) for run in held_out)
    shares = [is_held_out(f"words-train-{number:04d}") for number in range(2000)]
    assert 0.08 < sum(shares) / 2000 < 0.12
    with pytest.raises(InputError, match="record more items"):
        split_runs([run for run in runs if not is_held_out(run.item_id)])


def test_training_lowers_the_loss_and_beats_the_stale_order(runs: list[Trajectory]) -> None:
    trained = train(runs, TrainSettings(steps=50, batch_size=32, evaluate_every=10, seed=3))
    losses = [loss for _, loss in trained.curve]
    assert min(losses) < 0.95 * losses[0]
    assert trained.evaluation.accuracy > trained.evaluation.stale
    assert trained.evaluation.accuracy_by_depth.keys() == {1, 2, 3, 4, 5, 6}
    card = card_of(trained, SETTINGS, {"items": {"words_train": 24}})
    assert card["held_out"]["accuracy"] == pytest.approx(trained.evaluation.accuracy, abs=1e-4)
    assert card["trained_on"] == {"items": {"words_train": 24}}


def test_the_same_seed_gives_the_same_weights_and_another_one_others(runs: list[Trajectory]) -> None:
    first = weights(train(runs))
    assert torch.equal(first, weights(train(runs)))
    other = TrainSettings(steps=12, batch_size=16, evaluate_every=4, patience=40, seed=4)
    assert not torch.equal(first, weights(train(runs, other)))


def test_a_stopped_training_goes_on_as_if_it_had_not_been(runs: list[Trajectory], tmp_path: Path) -> None:
    state = tmp_path / "order.state"
    whole = train(runs)

    class StoppedError(Exception):
        pass

    def stop_at(message: str) -> None:
        if message.startswith("step 12"):
            raise StoppedError

    training, held_out = (make_examples(part) for part in split_runs(runs))
    with pytest.raises(StoppedError):
        train_order(training, held_out, SETTINGS, state=state, say=stop_at)
    said: list[str] = []
    resumed = train_order(training, held_out, SETTINGS, state=state, say=said.append)
    assert said[0] == "resumed at step 8 of 12"
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.curve == whole.curve and resumed.best_step == whole.best_step

    with pytest.raises(InputError, match="is of another training"):
        train(runs, TrainSettings(steps=13, batch_size=16, evaluate_every=4, patience=40, seed=3), state)
    with pytest.raises(InputError, match="is of another training"):
        train(runs[:-1], state=state)
    state.write_bytes(b"torn")
    with pytest.raises(InputError, match="not a resumable training state"):
        train(runs, state=state)


def test_training_ends_when_held_out_prompts_gain_nothing_more(runs: list[Trajectory]) -> None:
    # At so high a rate the loss cannot fall for long.
    settings = TrainSettings(steps=400, batch_size=8, learning_rate=0.3, evaluate_every=5, patience=3, seed=0)
    trained = train(runs, settings)
    assert trained.steps_taken < 400
    assert trained.steps_taken == trained.best_step + 3 * 5
    assert trained.evaluation.loss == pytest.approx(min(loss for _, loss in trained.curve), rel=1e-6)


def test_runs_without_an_order_to_learn_and_of_two_block_lengths_are_refused(
    tiny_runs: Callable[..., list[Trajectory]],
) -> None:
    with pytest.raises(InputError, match="hold no step to learn an order from"):
        make_examples(tiny_runs(2, commits_per_step=8))
    (run,) = tiny_runs(1)
    with pytest.raises(InputError, match=r"have blocks of \[8, 16\] tokens"):
        make_examples([run, replace(run, block_length=16)])
