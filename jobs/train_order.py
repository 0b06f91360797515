"""``dlmgrid train-order TRAJ --out FILE``: train the order model that SPOT drafts with, from recorded runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlmgrid.workers.drafting.order_checkpoint import FORMAT, TOKEN_FORMAT
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.out_file import check_out_file, check_own_json, has_format

if TYPE_CHECKING:
    from torch import Tensor

    from dlmgrid.workers.drafting.calibration_data import Label


def command(
    trajectories: Annotated[
        Path, typer.Argument(metavar="TRAJ", help="Folder of dlmgrid record, of a calibration set.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Checkpoint to write: FILE.safetensors.")],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Read tokens too, for the recorded target alone.")
    ] = False,
    hidden: Annotated[
        bool, typer.Option("--hidden", help="With --tokens, read hidden states: of record: [hidden].")
    ] = False,
    width: Annotated[int | None, typer.Option(min=8, help="With --tokens: 256, a multiple of 8.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="With --tokens: 4.")] = None,
    dropout: Annotated[float | None, typer.Option(min=0, max=0.9, help="With --tokens: 0.1.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps at most: 2000, with --tokens 6000.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Examples a step: 256, with --tokens 512.")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(min=0, help="Peak; it falls along a cosine to 0: 2e-3, with --tokens 1.5e-3."),
    ] = None,
    depth_scale: Annotated[
        float, typer.Option(min=0.1, help="An example of depth d weighs exp(-d / this).")
    ] = 8.0,
    evaluate_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between held-out evaluations: 100, with --tokens 300.")
    ] = None,
    patience: Annotated[int, typer.Option(min=1, help="Evaluations without a better one that end it.")] = 5,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of the first weights and of the batches.")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Train an order model on recorded draft-free runs; one prompt in ten is held out.

    Without --tokens it reads stale distributions alone and drafts for any target. With --tokens it also predicts what
    the positions hold, from the target's own embeddings.

    Runs of test items are refused. The best model by held-out loss is written to --out, with a card beside it. A
    training that was stopped goes on when the same command is given again.
    """
    check_out_file(out, "--out", ".safetensors", beside=[".json", ".state"])
    is_card = has_format(FORMAT, TOKEN_FORMAT)
    check_own_json(out.with_suffix(".json"), f"--out {out}", "card of an order model", is_card)
    if not tokens and (hidden or (width, layers, dropout) != (None, None, None)):
        raise InputError(
            "--hidden, --width, --layers and --dropout are options of --tokens; give it too, or leave them out"
        )
    if width is not None and width % 8:
        raise InputError(f"--width {width} is no multiple of 8; give 128 or 256")
    from dlmgrid.workers.runtime import check_device
    from dlmgrid.workers.trajectories.files import unrecorded_text

    check_device(device)
    if missing := unrecorded_text(trajectories):
        typer.echo(f"note: {missing}", err=True)
    given = {
        "steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "depth_scale": depth_scale,
        "evaluate_every": evaluate_every, "patience": patience, "seed": seed, "dropout": dropout,
    }  # fmt: skip
    settings = {name: value for name, value in given.items() if value is not None}
    if tokens:
        sizes = {name: size for name, size in (("width", width), ("num_layers", layers)) if size is not None}
        _train_tokens(trajectories, out, settings, sizes, hidden=hidden, device=device)
    else:
        _train_order(trajectories, out, settings, device=device)


def _train_order(trajectories: Path, out: Path, given: Mapping[str, Any], *, device: str) -> None:
    from dlmgrid.workers.drafting.calibration_data import check_calibration, describe_calibration
    from dlmgrid.workers.drafting.order_checkpoint import save_order_model
    from dlmgrid.workers.drafting.order_examples import make_examples, split_runs
    from dlmgrid.workers.drafting.order_training import TrainSettings, card_of, train_order
    from dlmgrid.workers.trajectories.trajectory import load_trajectories

    runs = list(load_trajectories(trajectories))
    check_calibration(runs)
    settings = TrainSettings(**given)
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
    _say_written(out, fingerprint, trained.best_step)


def _train_tokens(
    trajectories: Path,
    out: Path,
    given: Mapping[str, Any],
    sizes: Mapping[str, int],
    *,
    hidden: bool,
    device: str,
) -> None:
    from dlmgrid.workers.drafting.calibration_data import check_calibration, describe_calibration, labels_of
    from dlmgrid.workers.drafting.order_checkpoint import save_token_model
    from dlmgrid.workers.drafting.set_model import embedding_table
    from dlmgrid.workers.drafting.token_examples import load_token_examples
    from dlmgrid.workers.drafting.token_model import TokenShape
    from dlmgrid.workers.drafting.token_training import (
        TokenTrainSettings,
        summary_of,
        token_card,
        train_tokens,
    )
    from dlmgrid.workers.trajectories.files import recorded_generations

    labels = labels_of(recorded_generations(trajectories))
    check_calibration(labels)
    target, embedding = _target_of(labels)
    settings = TokenTrainSettings(**given)
    training, held_out = load_token_examples(trajectories, hidden=hidden, say=typer.echo)
    typer.echo(f"{training.num_examples} training and {held_out.num_examples} held-out examples")
    hidden_size = 0 if training.hidden is None else training.hidden.shape[-1]
    shape = TokenShape(vocab_size=embedding.shape[0], hidden_size=hidden_size, **sizes)
    state = out.with_suffix(".state")
    trained = train_tokens(
        shape,
        embedding_table(embedding.float(), shape.table_width),
        training,
        held_out,
        settings,
        state=state,
        device=device,
        say=typer.echo,
    )
    card = token_card(trained, settings, describe_calibration(labels))
    fingerprint = save_token_model(out, trained.model, target=target, card=card)
    state.unlink(missing_ok=True)
    found = trained.evaluation
    typer.echo(f"held-out shares, stale ones in brackets: {summary_of(found)}; by depth:")
    for depth in found.by_depth["order"]:
        typer.echo(f"  {depth:>2}  {summary_of(found, depth)}")
    _say_written(out, fingerprint, trained.best_step)


def _target_of(labels: list[Label]) -> tuple[str, Tensor]:
    """The weight fingerprint of the one target that was recorded, and its embedding matrix [V, H]."""
    from dlmgrid.workers.models.catalog import resolve_checkpoint
    from dlmgrid.workers.models.checkpoint import read_embedding

    targets = sorted({label.settings["weight_fingerprint"] for label in labels})
    if len(targets) > 1:
        raise InputError(
            f"the recorded runs are of {len(targets)} models; a model that reads tokens drafts for one"
        )
    first = labels[0].settings
    return str(targets[0]), read_embedding(resolve_checkpoint(first["model"], first["revision"]))


def _say_written(out: Path, fingerprint: str, best_step: int) -> None:
    typer.echo(f"wrote {out} ({fingerprint}, step {best_step}); in a grid: {{name: spot, checkpoint: {out}}}")
