"""``dlmgrid train-sets TRAJ --out FILE``: train the drafter of SPOT-Sets, or fit one to another target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlmgrid.cluster.out_folder import check_out_file
from dlmgrid.workers.errors import InputError

if TYPE_CHECKING:
    from dlmgrid.workers.drafting.set_model import SetModel
    from dlmgrid.workers.trajectories.trajectory import Trajectory


def command(
    trajectories: Annotated[
        Path,
        typer.Argument(
            metavar="TRAJ", help="Folder of dlmgrid record with record: [hidden], of a calibration set."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Checkpoint to write: FILE.safetensors.")],
    refit: Annotated[
        Path | None,
        typer.Option("--refit", help="Set model to fit to these runs' target: its input layer alone."),
    ] = None,
    width: Annotated[int, typer.Option(min=8, help="Of the encoder, a multiple of 8.")] = 320,
    layers: Annotated[int, typer.Option(min=1, help="Of the encoder.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps at most.")] = 2000,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples a step.")] = 128,
    learning_rate: Annotated[float, typer.Option(min=0, help="Peak; it falls along a cosine to 0.")] = 1e-3,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between held-out evaluations.")] = 100,
    patience: Annotated[int, typer.Option(min=1, help="Evaluations without a better one that end it.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the batches.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Train the drafter of SPOT-Sets on recorded draft-free runs of a threshold decoder; one prompt in ten is held out.

    Runs of test items are refused. A training that was stopped goes on when the same command is given again. The
    checkpoint drafts for the recorded target only; --refit moves one to another.
    """
    check_out_file(out, "--out", ".safetensors", beside=[".json", ".state"])
    if width % 8:
        raise InputError(f"--width {width} is no multiple of 8; give 128 or 320")
    from dlmgrid.workers.drafting.calibration_data import check_calibration, describe_calibration
    from dlmgrid.workers.drafting.order_examples import split_runs
    from dlmgrid.workers.drafting.set_checkpoint import read_set_checkpoint, save_set_model
    from dlmgrid.workers.drafting.set_training import (
        SetTrainSettings,
        make_set_examples,
        set_card,
        train_sets,
    )
    from dlmgrid.workers.runtime import check_device
    from dlmgrid.workers.trajectories.files import unrecorded_text
    from dlmgrid.workers.trajectories.trajectory import load_trajectories

    check_device(device)
    refit_of = "" if refit is None else read_set_checkpoint(refit).fingerprint
    if missing := unrecorded_text(trajectories):
        typer.echo(f"note: {missing}", err=True)
    runs = list(load_trajectories(trajectories, records=("hidden",)))
    check_calibration(runs)
    target = _only_target(runs)
    settings = SetTrainSettings(
        steps=steps, batch_size=batch_size, learning_rate=learning_rate, evaluate_every=evaluate_every,
        patience=patience, seed=seed,
    )  # fmt: skip
    training, held_out = (make_set_examples(part) for part in split_runs(runs))
    typer.echo(f"{training.num_examples} training and {held_out.num_examples} held-out examples")
    model = _first_model(runs, refit, width, layers, seed)
    state = out.with_suffix(".state")
    trained = train_sets(
        model,
        training,
        held_out,
        settings,
        refit=refit is not None,
        state=state,
        device=device,
        say=typer.echo,
    )
    card = set_card(trained, settings, describe_calibration(runs), refit_of)
    fingerprint = save_set_model(out, trained.model, target=target, card=card)
    state.unlink(missing_ok=True)
    found = trained.evaluation
    typer.echo(f"held-out: whole sets proposed {found.exact_sets:.3f}; committed tokens predicted, by depth:")
    for depth, share in found.token_hits.items():
        typer.echo(f"  {depth:>2}  {share:.3f}  stale {found.stale_hits[depth]:.3f}")
    typer.echo(
        f"wrote {out} ({fingerprint}, step {trained.best_step}); in a grid: {{name: spot_sets, checkpoint: {out}}}"
    )


def _only_target(runs: Sequence[Trajectory]) -> str:
    targets = sorted({run.settings["weight_fingerprint"] for run in runs})
    if len(targets) > 1:
        raise InputError(
            f"the recorded runs are of {len(targets)} models; a set model reads the hidden states of one"
        )
    return str(targets[0])


def _first_model(
    runs: Sequence[Trajectory], refit: Path | None, width: int, layers: int, seed: int
) -> SetModel:
    """The model to train: a new one, or ``refit`` with a new input layer, around the target's embeddings."""
    import torch

    from dlmgrid.workers.drafting.set_checkpoint import load_set_model
    from dlmgrid.workers.drafting.set_model import SetModel, SetShape, embedding_table
    from dlmgrid.workers.models.catalog import resolve_checkpoint
    from dlmgrid.workers.models.checkpoint import read_embedding

    first = runs[0]
    folder = resolve_checkpoint(first.settings["model"], first.settings["revision"])
    embedding = read_embedding(folder)
    assert first.hidden is not None
    shape = SetShape(
        hidden_size=first.hidden.shape[-1], vocab_size=embedding.shape[0], width=width, num_layers=layers
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if refit is None:
            model = SetModel(shape)
        else:
            base = load_set_model(refit)
            model = SetModel(replace(shape, width=base.shape.width, num_layers=base.shape.num_layers))
            own = {f"{name}.weight" for name in ("candidate", "from_hidden")} | {"from_hidden.bias", "table"}
            body = {name: value for name, value in base.state_dict().items() if name not in own}
            missing, unknown = model.load_state_dict(body, strict=False)
            assert set(missing) == own and not unknown, (missing, unknown)
    model.table.copy_(embedding_table(embedding.float()))
    return model
