"""``dlmgrid train-order TRAJ --out FILE``: train the order model that SPOT drafts with, from recorded runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlmgrid.cluster.out_folder import check_out_file


def command(
    trajectories: Annotated[
        Path, typer.Argument(metavar="TRAJ", help="Folder of dlmgrid record, of a calibration set.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Checkpoint to write: FILE.safetensors.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps at most.")] = 2000,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples a step.")] = 256,
    learning_rate: Annotated[float, typer.Option(min=0, help="Peak; it falls along a cosine to 0.")] = 2e-3,
    depth_scale: Annotated[
        float, typer.Option(min=0.1, help="An example of depth d weighs exp(-d / this).")
    ] = 8.0,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between held-out evaluations.")] = 100,
    patience: Annotated[int, typer.Option(min=1, help="Evaluations without a better one that end it.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the batches.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Train an order model on recorded draft-free runs; one prompt in ten is held out.

    Runs of test items are refused. The best model by held-out loss is written to --out, with a card beside it. A
    training that was stopped goes on when the same command is given again.
    """
    check_out_file(out, "--out", ".safetensors", beside=[".json", ".state"])
    from dlmgrid.workers.drafting.calibration_data import check_calibration, describe_calibration
    from dlmgrid.workers.drafting.order_checkpoint import save_order_model
    from dlmgrid.workers.drafting.order_examples import make_examples, split_runs
    from dlmgrid.workers.drafting.order_training import TrainSettings, card_of, train_order
    from dlmgrid.workers.runtime import check_device
    from dlmgrid.workers.trajectories.files import unrecorded_text
    from dlmgrid.workers.trajectories.trajectory import load_trajectories

    check_device(device)
    if missing := unrecorded_text(trajectories):
        typer.echo(f"note: {missing}", err=True)
    runs = list(load_trajectories(trajectories))
    check_calibration(runs)
    settings = TrainSettings(
        steps=steps, batch_size=batch_size, learning_rate=learning_rate, depth_scale=depth_scale,
        evaluate_every=evaluate_every, patience=patience, seed=seed,
    )  # fmt: skip
    training, held_out = (make_examples(part) for part in split_runs(runs))
    typer.echo(f"{training.num_examples} training and {held_out.num_examples} held-out examples")
    state = out.with_suffix(".state")
    trained = train_order(training, held_out, settings, state=state, device=device, say=typer.echo)
    fingerprint = save_order_model(out, trained.model, card_of(trained, settings, describe_calibration(runs)))
    state.unlink(missing_ok=True)
    found = trained.evaluation
    typer.echo(f"held-out accuracy {found.accuracy:.3f}, stale-confidence order {found.stale:.3f}; by depth:")
    for depth, accuracy in found.accuracy_by_depth.items():
        typer.echo(f"  {depth:>2}  {accuracy:.3f}  stale {found.stale_by_depth[depth]:.3f}")
    typer.echo("by block: " + ", ".join(f"{b} {share:.3f}" for b, share in found.accuracy_by_block.items()))
    typer.echo(
        f"wrote {out} ({fingerprint}, step {trained.best_step}); in a grid: {{name: spot, checkpoint: {out}}}"
    )
