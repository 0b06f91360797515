"""Training of a model that reads tokens: its examples, that it beats stale tokens, and that it can be resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlmgrid.workers.drafting.order_examples import MAX_DEPTH, is_held_out, make_examples, split_runs
from dlmgrid.workers.drafting.token_examples import TokenExamples, load_token_examples
from dlmgrid.workers.drafting.token_model import TokenShape
from dlmgrid.workers.drafting.token_training import (
    TokenTrainSettings,
    TrainedTokens,
    summary_of,
    token_card,
    train_tokens,
)
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing.tiny_runs import record_tiny_runs
from dlmgrid.workers.trajectories.trajectory import load_trajectories

SETTINGS = TokenTrainSettings(steps=9, batch_size=16, evaluate_every=3, warmup=2, patience=40, seed=3)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "runs.parquet"
    record_tiny_runs(path, 16, records=("hidden",))
    return path


def train(
    examples: tuple[TokenExamples, TokenExamples],
    settings: TokenTrainSettings = SETTINGS,
    state: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    device: str = "cpu",
) -> TrainedTokens:
    hidden_size = 0 if examples[0].hidden is None else examples[0].hidden.shape[-1]
    shape = TokenShape(vocab_size=40, hidden_size=hidden_size, width=32, num_layers=1, table_width=16)
    table = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    return train_tokens(shape, table, *examples, settings, state=state, device=device, say=say)


@pytest.mark.parametrize("commits_per_step", [1, 3])
def test_examples_are_those_of_the_order_model_with_what_the_target_said(
    tmp_path: Path, commits_per_step: int
) -> None:
    path = tmp_path / "runs.parquet"
    record_tiny_runs(path, 16, records=("hidden",), commits_per_step=commits_per_step)
    runs = list(load_trajectories(path, records=("hidden",)))
    for found, own in zip(
        load_token_examples(path, hidden=True, say=lambda _: None), split_runs(runs), strict=True
    ):
        expected = make_examples(own)
        assert found.num_examples == expected.num_examples
        assert torch.equal(found.depths, expected.depths) and int(found.depths.max()) <= MAX_DEPTH
        assert torch.equal(found.states[found.at], expected.states)
        assert torch.equal(found.states[found.snapshots + 1], expected.roots[expected.snapshot])
        assert torch.equal(found.states[found.at + 1] != found.states[found.at], expected.labels)
        steps = found.steps(found.snapshots, torch.device("cpu"))
        assert torch.equal(steps.masked, expected.masked[expected.snapshot])
        features = expected.features[expected.snapshot]
        at = steps.masked[..., None]
        torch.testing.assert_close(
            steps.probabilities * at, features[..., :32] * at, rtol=0.02, atol=1e-4
        )  # fp16 logarithms
        hidden = torch.cat([run.hidden for run in own if run.hidden is not None])
        assert found.hidden is not None
        torch.testing.assert_close(found.hidden.float(), hidden, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_beats_stale_tokens_on_held_out_prompts(recorded: Path, device: str) -> None:
    examples = load_token_examples(recorded, hidden=False, say=lambda _: None)
    settings = TokenTrainSettings(steps=40, batch_size=64, learning_rate=3e-3, evaluate_every=20, warmup=5)
    trained = train(examples, settings, device=device)
    found = trained.evaluation
    assert found.shares["joint"] > found.shares["stale_joint"] + 0.1
    assert found.shares["token"] > found.shares["stale_token"] + 0.1
    assert found.shares["order"] > found.shares["stale_order"]
    assert found.by_depth["joint"].keys() == {1, 2, 3, 4, 5, 6}
    card = token_card(trained, settings, {"items": {"words_train": 16}})
    assert card["held_out"]["joint"] == pytest.approx(found.shares["joint"], abs=1e-4)
    assert card["held_out"]["token_by_depth"].keys() == {"1", "2", "3", "4", "5", "6"}
    assert card["settings"]["dropout"] == settings.dropout > 0
    assert f"both {found.by_depth['joint'][2]:.3f}" in summary_of(found, 2)


def test_a_stopped_training_goes_on_as_if_it_had_not_been(recorded: Path, tmp_path: Path) -> None:
    """Dropout included: its draws hang on seed and step."""
    examples = load_token_examples(recorded, hidden=True, say=lambda _: None)
    state = tmp_path / "tokens.state"
    before = torch.random.get_rng_state()
    whole = train(examples)
    assert torch.equal(torch.random.get_rng_state(), before)

    class StoppedError(Exception):
        pass

    def stop(message: str) -> None:
        if message.startswith("step 6"):
            raise StoppedError

    with pytest.raises(StoppedError):  # before step 6 is written, so it goes on from step 3
        train(examples, state=state, say=stop)
    said: list[str] = []
    rest = train(examples, state=state, say=said.append)
    assert said[0] == "resumed at step 3 of 9"
    assert rest.curve == whole.curve and rest.best_step == whole.best_step
    for name, value in whole.model.state_dict().items():
        assert torch.equal(rest.model.state_dict()[name], value), name
    with pytest.raises(InputError, match="of another training"):
        train(examples, replace(SETTINGS, seed=4), state)
    with pytest.raises(InputError, match="of another training"):
        train(load_token_examples(recorded, hidden=False, say=lambda _: None), state=state)


def test_recordings_that_cannot_teach_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.parquet"

    def load(*, hidden: bool = False) -> None:
        load_token_examples(path, hidden=hidden, say=lambda _: None)

    record_tiny_runs(path, 16)
    with pytest.raises(
        InputError, match=r"holds nothing of hidden states; record it with record: \[hidden\]"
    ):
        load(hidden=True)
    record_tiny_runs(path, 16, commits_per_step=8)
    with pytest.raises(InputError, match="hold no step to learn from"):
        load()
    record_tiny_runs(path, 2)
    assert not any(is_held_out(f"item-{index}") for index in range(2))
    with pytest.raises(InputError, match="of 2 recorded items 2 are for training and 0 held out"):
        load()
