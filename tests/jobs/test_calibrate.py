"""``calibrate``, ``train-order``, ``train-sets``: from a recording to a file that a grid can name; what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.jobs import calibrate, train_order, train_sets
from dlmgrid.workers.drafting import training_loop
from dlmgrid.workers.drafting.catalog import get_method
from dlmgrid.workers.drafting.drafter_file import find_drafter_file, misfit
from dlmgrid.workers.drafting.order_checkpoint import read_order_checkpoint
from dlmgrid.workers.drafting.set_checkpoint import read_set_checkpoint
from dlmgrid.workers.drafting.spiffy_graph import load_graph
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing.tiny_runs import record_tiny_runs, tiny_cell


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "runs.parquet"
    record_tiny_runs(path, 16, gen_length=8)
    return path


def test_an_order_model_is_trained_and_a_floor_chosen_for_it(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "order.safetensors"
    train_order.command(recorded, out, steps=4, batch_size=8, evaluate_every=2)
    card = read_order_checkpoint(out).card
    assert card["trained_on"]["items"] == {"words_train": 16}
    assert card["steps_taken"] == 4 and len(card["held_out_loss_by_step"]) == 2
    assert (
        json.loads(out.with_suffix(".json").read_text())["fingerprint"]
        == read_order_checkpoint(out).fingerprint
    )
    assert not out.with_suffix(".state").exists(), "the state of a finished training is removed"
    printed = capsys.readouterr().out
    assert f"{{name: spot, checkpoint: {out}}}" in printed and "stale-confidence order" in printed

    chosen = tmp_path / "gamma.json"
    calibrate.command(recorded, "spot_gamma", chosen, budget=6, checkpoint=str(out))
    record = json.loads(chosen.read_text())
    assert record["order_model"] == read_order_checkpoint(out).fingerprint
    assert record["gamma"] in [point["gamma"] for point in record["sweep"]]
    assert f"gamma: {record['gamma']:g}}}" in capsys.readouterr().out


def test_a_graph_is_calibrated_and_drawn(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "graph.json"
    calibrate.command(recorded, "spiffy", out, budget=8)
    graph = load_graph(out)
    assert (len(graph.nodes), graph.selection, graph.budget) == (8, "marginal_gain", 8)
    assert out.with_suffix(".svg").read_text().startswith("<svg")


def test_a_graph_of_runs_at_two_temperatures_is_refused_before_their_steps_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("generations", "trajectories"):
        (tmp_path / folder).mkdir()
    for name, temperature in (("a", 0.0), ("b", 1.0)):
        (tmp_path / "generations" / f"{name}.parquet").touch()
        record_tiny_runs(tmp_path / "trajectories" / f"{name}.parquet", 2, temperature=temperature)
    read = "dlmgrid.workers.trajectories.trajectory.load_trajectories"
    monkeypatch.setattr(read, lambda *_, **__: pytest.fail("steps were read"))
    with pytest.raises(InputError, match=r"runs at the temperatures 0, 1; .*: take it by --temperature 0"):
        calibrate.command(tmp_path, "spiffy", tmp_path / "graph.json")


def test_runs_of_test_items_and_bad_arguments_are_refused_and_nothing_is_written(
    recorded: Path, tmp_path: Path
) -> None:
    scored = tmp_path / "scored.parquet"
    record_tiny_runs(scored, 4, benchmark="gsm8k")
    graph, order = tmp_path / "graph.json", tmp_path / "order.safetensors"
    with pytest.raises(InputError, match="is of 'gsm8k', which is no calibration set"):
        calibrate.command(scored, "spiffy", graph)
    with pytest.raises(InputError, match="is of 'gsm8k', which is no calibration set"):
        train_order.command(scored, order)
    with pytest.raises(InputError, match="--method 'ssd' is not calibrated"):
        calibrate.command(recorded, "ssd", graph)
    for method, options in (
        ("spiffy", {"checkpoint": "reference"}),
        ("spiffy", {"max_rise": 2.0}),
        ("spiffy", {"device": "cpu"}),
        ("spot_gamma", {"selection": "degree_1", "checkpoint": "reference"}),
    ):
        with pytest.raises(InputError, match=f"is no option of --method {method}; leave it out"):
            calibrate.command(recorded, method, graph, **options)
    with pytest.raises(InputError, match="needs --checkpoint"):
        calibrate.command(recorded, "spot_gamma", graph)
    with pytest.raises(InputError, match=r"give a \.json file"):
        calibrate.command(recorded, "spiffy", order)
    with pytest.raises(InputError, match=r"give a \.safetensors file"):
        train_order.command(recorded, graph)
    with pytest.raises(InputError, match="nothing is recorded at temperature 1"):
        calibrate.command(recorded, "spiffy", graph, temperature=1.0)
    with pytest.raises(InputError, match="does not exist; make it first"):
        train_order.command(recorded, tmp_path / "none" / "order.safetensors")
    with pytest.raises(InputError, match=r"the training diverged: .* nan at step 2; lower --learning-rate"):
        train_order.command(recorded, order, steps=4, evaluate_every=2, learning_rate=1e30)
    assert not graph.exists() and not order.exists() and not order.with_suffix(".state").exists()


def test_a_set_model_is_trained_and_fitted_to_another_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sets.parquet"
    settings: dict[str, Any] = {
        "model": "reference",
        "decoder": "threshold",
        "threshold": 0.5,
        "gen_length": 8,
    }
    record_tiny_runs(path, 16, records=("hidden",), **settings)
    out, fitted = tmp_path / "sets.safetensors", tmp_path / "fitted.safetensors"
    small: dict[str, Any] = {"width": 16, "layers": 1, "steps": 2, "batch_size": 4, "evaluate_every": 1}
    train_sets.command(path, out, **small)
    printed = capsys.readouterr().out
    assert f"{{name: spot_sets, checkpoint: {out}}}" in printed and "stale ones in brackets" in printed
    assert "hidden states are read" in printed
    found = read_set_checkpoint(out)
    assert (found.target, found.card["trained_on"]["items"]) == ("f" * 24, {"words_train": 16})
    cell = tiny_cell(method="spot_sets", budget=4, decoder="threshold", threshold=0.5)
    spot_sets = get_method("spot_sets")
    file = find_drafter_file(spot_sets, str(out))
    assert misfit(file, cell) is None and file.records == ("hidden",)

    other = tmp_path / "other.parquet"
    record_tiny_runs(other, 16, records=("hidden",), weight_fingerprint="a" * 24, **settings)
    fit = {name: value for name, value in small.items() if name not in ("width", "layers")}
    with pytest.raises(InputError, match="is --out as well, and would be replaced; name another --out"):
        train_sets.command(other, out, refit=out, **fit)
    with pytest.raises(InputError, match="--refit keeps the shape of its model; leave --width and --layers"):
        train_sets.command(other, fitted, refit=out, **small)
    train_sets.command(other, fitted, refit=out, **fit)
    assert read_set_checkpoint(fitted).card["refit_of"] == found.fingerprint
    reason = misfit(find_drafter_file(spot_sets, str(fitted)), cell)
    assert reason is not None and "reads tokens of other weights" in reason
    with pytest.raises(InputError, match="reads hidden states; give --hidden or nothing"):
        train_sets.command(other, fitted, refit=out, hidden=False, **fit)

    capsys.readouterr()
    record_tiny_runs(path, 16, **settings)
    train_sets.command(path, out, **small)
    assert "hidden states are not read" in capsys.readouterr().out
    assert find_drafter_file(spot_sets, str(out)).records == ()
    with pytest.raises(InputError, match="holds nothing of hidden states"):
        train_sets.command(path, out, hidden=True, **small)
    with pytest.raises(InputError, match="no multiple of 8"):
        train_sets.command(path, out, width=12)
    with pytest.raises(InputError, match=r"give a \.safetensors file"):
        train_sets.command(path, tmp_path / "sets.json")
    record_tiny_runs(path, 16, model="reference", gen_length=8)
    with pytest.raises(
        InputError, match=r"of the decoders static; a set model learns from one, threshold or factor"
    ):
        train_sets.command(path, out, **small)


def test_a_file_of_another_kind_is_not_overwritten(recorded: Path, tmp_path: Path) -> None:
    graph, order = tmp_path / "both.json", tmp_path / "both.safetensors"
    calibrate.command(recorded, "spiffy", graph, budget=4)
    before = graph.read_bytes()
    with pytest.raises(InputError, match=r"both\.json exists and is no card of an order model"):
        train_order.command(recorded, order, steps=2)
    with pytest.raises(InputError, match=r"both\.json exists and is no card of a set model"):
        train_sets.command(recorded, order, steps=2)
    with pytest.raises(InputError, match=r"both\.json exists and is no calibration of γ"):
        calibrate.command(recorded, "spot_gamma", graph, checkpoint="reference")
    assert graph.read_bytes() == before
    values = json.loads(before)
    graph.write_text(json.dumps(values | {"format": "dlmgrid-draft-graph-0"}))  # an older version of its kind
    calibrate.command(recorded, "spiffy", graph, budget=6)
    assert len(load_graph(graph).nodes) == 6
    graph.write_text("not json")
    with pytest.raises(InputError, match="exists and is no draft graph"):
        calibrate.command(recorded, "spiffy", graph, budget=4)


def test_a_long_training_says_so_and_keeps_what_it_did_between_evaluations(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class StoppedError(Exception):
        pass

    undisturbed, stopped = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    settings: dict[str, Any] = {"steps": 6, "batch_size": 8, "evaluate_every": 6}
    train_order.command(recorded, undisturbed, **settings)
    monkeypatch.setattr(training_loop, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(training_loop, "SECONDS_BETWEEN_STATES", 0.0)
    step = training_loop.Progress._step

    def step_until_stopped(progress: training_loop.Progress, *rest: Any) -> None:
        if progress.step == 4:
            raise StoppedError
        step(progress, *rest)

    monkeypatch.setattr(training_loop.Progress, "_step", step_until_stopped)
    with pytest.raises(StoppedError):
        train_order.command(recorded, stopped, **settings)
    assert "step 3 of 6" in capsys.readouterr().out
    monkeypatch.setattr(training_loop.Progress, "_step", step)
    train_order.command(recorded, stopped, **settings)
    assert "resumed at step 4 of 6" in capsys.readouterr().out
    assert stopped.read_bytes() == undisturbed.read_bytes()


def test_an_order_model_that_reads_tokens_is_trained_for_one_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "runs.parquet", tmp_path / "tokens.safetensors"
    record_tiny_runs(path, 16, records=("hidden",), model="reference", gen_length=8)
    small: dict[str, Any] = {"width": 16, "layers": 1, "steps": 2, "batch_size": 4, "evaluate_every": 1}
    for hidden in (False, True):
        train_order.command(path, out, tokens=True, hidden=hidden, **small)
        found = read_order_checkpoint(out)
        assert (found.target, found.card["trained_on"]["items"]) == ("f" * 24, {"words_train": 16})
        assert found.records == (("hidden",) if hidden else ())
        printed = capsys.readouterr().out
        assert f"{{name: spot, checkpoint: {out}}}" in printed and "stale ones in brackets" in printed
    assert not out.with_suffix(".state").exists()
    calibrate.command(path, "spot_gamma", tmp_path / "gamma.json", budget=4, checkpoint=str(out))
    assert json.loads((tmp_path / "gamma.json").read_text())["order_model"] == found.fingerprint
    record_tiny_runs(path, 16, records=("hidden",), gen_length=8, weight_fingerprint="a" * 24)
    with pytest.raises(InputError, match="it reads tokens of other weights"):
        calibrate.command(path, "spot_gamma", tmp_path / "gamma.json", budget=4, checkpoint=str(out))

    record_tiny_runs(path, 16, model="reference", gen_length=8)
    with pytest.raises(InputError, match="holds nothing of hidden states"):
        calibrate.command(path, "spot_gamma", tmp_path / "gamma.json", budget=4, checkpoint=str(out))
    with pytest.raises(InputError, match="holds nothing of hidden states"):
        train_order.command(path, out, tokens=True, hidden=True, **small)
    with pytest.raises(InputError, match="no multiple of 8"):
        train_order.command(path, out, tokens=True, width=12)
    of_tokens: list[dict[str, Any]] = [{"hidden": True}, {"width": 16}, {"dropout": 0.0}]
    for foreign in of_tokens:
        with pytest.raises(InputError, match="are options of --tokens"):
            train_order.command(path, out, **foreign)
