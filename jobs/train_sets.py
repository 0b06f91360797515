"""``dlmgrid train-sets TRAJ --out FILE``: train the drafter of SPOT-Sets, or fit one to another target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlmgrid.workers.drafting.set_checkpoint import FORMAT
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.out_file import check_out_file, check_own_json, has_format

if TYPE_CHECKING:
    from dlmgrid.workers.cell import Cell
    from dlmgrid.workers.decoding.commit_rules import CommitRule
    from dlmgrid.workers.drafting.calibration_data import Label
    from dlmgrid.workers.drafting.set_checkpoint import SetCheckpoint
    from dlmgrid.workers.drafting.set_model import SetModel


def command(
    trajectories: Annotated[
        Path,
        typer.Argument(metavar="TRAJ", help="Folder of dlmgrid record, of a calibration set."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Checkpoint to write: FILE.safetensors.")],
    refit: Annotated[
        Path | None,
        typer.Option("--refit", help="Set model to fit to these runs' target: its input layer alone."),
    ] = None,
    hidden: Annotated[
        bool | None,
        typer.Option("--hidden/--no-hidden", help="Read hidden states: where all runs have them."),
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=8, help="Of the encoder, a multiple of 8; default 320.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Of the encoder; default 4.")] = None,
    dropout: Annotated[float, typer.Option(min=0, max=0.9, help="In training.")] = 0.1,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps at most.")] = 3000,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples a step.")] = 512,
    learning_rate: Annotated[float, typer.Option(min=0, help="Peak; it falls along a cosine to 0.")] = 1e-3,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between held-out evaluations.")] = 200,
    patience: Annotated[int, typer.Option(min=1, help="Evaluations without a better one that end it.")] = 5,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of the first weights and of the batches.")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Train the drafter of SPOT-Sets on recorded draft-free runs of a threshold decoder; one prompt in ten is held out.

    It reads the target's hidden states where they were recorded (record: [hidden]); --no-hidden leaves them out.
    Runs of test items are refused. A training that was stopped goes on when the same command is given again. The
    checkpoint drafts for the recorded target only; --refit moves one to another.
    """
    check_out_file(out, "--out", ".safetensors", beside=[".json", ".state"])
    is_card = has_format(FORMAT)
    check_own_json(out.with_suffix(".json"), f"--out {out}", "card of a set model", is_card)
    if refit is not None and refit.expanduser().resolve() == out.expanduser().resolve():
        raise InputError(f"--refit {refit} is --out as well, and would be replaced; name another --out")
    if refit is not None and (width, layers) != (None, None):
        raise InputError("--refit keeps the shape of its model; leave --width and --layers out")
    if width is not None and width % 8:
        raise InputError(f"--width {width} is no multiple of 8; give 128 or 320")
    from dlmgrid.workers.drafting.calibration_data import check_calibration, describe_calibration, labels_of
    from dlmgrid.workers.drafting.set_checkpoint import read_set_checkpoint, save_set_model
    from dlmgrid.workers.drafting.set_training import (
        SetTrainSettings,
        load_set_examples,
        set_card,
        summary_of,
        train_sets,
    )
    from dlmgrid.workers.runtime import check_device
    from dlmgrid.workers.trajectories.files import recorded_generations, unrecorded_text

    check_device(device)
    base = None if refit is None else read_set_checkpoint(refit)
    if missing := unrecorded_text(trajectories):
        typer.echo(f"note: {missing}", err=True)
    generations = list(recorded_generations(trajectories))
    labels = labels_of(generations)
    check_calibration(labels)
    target = _only_target(labels)
    rule = _only_rule([generation.cell for generation in generations])
    if hidden is None:
        hidden = bool(base.records) if base else _all_hidden(trajectories)
    if base and hidden != bool(base.records):
        raise InputError(
            f"--refit {refit} {'reads' if base.records else 'does not read'} hidden states; give "
            f"{'--hidden' if base.records else '--no-hidden'} or nothing"
        )
    typer.echo("hidden states are " + ("read" if hidden else "not read"))
    settings = SetTrainSettings(
        steps=steps, batch_size=batch_size, learning_rate=learning_rate, evaluate_every=evaluate_every,
        patience=patience, seed=seed, dropout=dropout,
    )  # fmt: skip
    training, held_out = load_set_examples(trajectories, hidden=hidden, say=typer.echo)
    typer.echo(f"{training.num_examples} training and {held_out.num_examples} held-out examples")
    hidden_size = 0 if training.hidden is None else training.hidden.shape[-1]
    sizes = {"hidden_size": hidden_size}
    sizes |= {name: size for name, size in (("width", width), ("num_layers", layers)) if size is not None}
    model = _first_model(labels[0], base, sizes, seed, dropout)
    state = out.with_suffix(".state")
    trained = train_sets(
        model,
        training,
        held_out,
        settings,
        rule,
        refit=base is not None,
        state=state,
        device=device,
        say=typer.echo,
    )
    card = set_card(trained, settings, describe_calibration(labels), base.fingerprint if base else "")
    fingerprint = save_set_model(out, trained.model, target=target, card=card)
    state.unlink(missing_ok=True)
    found = trained.evaluation
    typer.echo(f"held-out shares, stale ones in brackets: {summary_of(found)}; by depth:")
    for depth in found.by_depth["sets"]:
        typer.echo(f"  {depth:>2}  {summary_of(found, depth)}")
    typer.echo(
        f"wrote {out} ({fingerprint}, step {trained.best_step}); in a grid: {{name: spot_sets, checkpoint: {out}}}"
    )


def _only_target(labels: Sequence[Label]) -> str:
    targets = sorted({label.settings["weight_fingerprint"] for label in labels})
    if len(targets) > 1:
        raise InputError(
            f"the recorded runs are of {len(targets)} models; a set model reads the tokens of one"
        )
    return str(targets[0])


def _only_rule(cells: Sequence[Cell]) -> CommitRule:
    """The rule of the one decoder that was recorded. Raises InputError for several, or one that has no level."""
    from dlmgrid.workers.decoding.commit_rules import build_rule

    decoders = {(cell.decoder, cell.threshold, cell.comparison, cell.factor) for cell in cells}
    decoders_text = ", ".join(
        sorted(f"{name} {threshold or factor or ''}".strip() for name, threshold, _, factor in decoders)
    )
    rule = build_rule(cells[0])
    if len(decoders) > 1 or rule.level is None:
        raise InputError(
            f"the recorded runs are of the decoders {decoders_text}; a set model learns from one, threshold or factor"
        )
    return rule


def _all_hidden(trajectories: Path) -> bool:
    from dlmgrid.workers.trajectories.files import is_recorded, trajectory_files

    return all(is_recorded(file, ("hidden",)) for file in trajectory_files(trajectories))


def _first_model(
    first: Label, base: SetCheckpoint | None, sizes: dict[str, int], seed: int, dropout: float
) -> SetModel:
    """The model to train: a new one, or that of ``base`` with a new input layer, around the target's embeddings."""
    import torch

    from dlmgrid.workers.drafting.set_checkpoint import load_set_model
    from dlmgrid.workers.drafting.set_model import INPUT_LAYER, SetModel, SetShape, embedding_table
    from dlmgrid.workers.models.catalog import resolve_checkpoint
    from dlmgrid.workers.models.checkpoint import read_embedding

    embedding = read_embedding(resolve_checkpoint(first.settings["model"], first.settings["revision"]))
    own = {"vocab_size": embedding.shape[0], "hidden_size": sizes["hidden_size"]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SetModel(SetShape(**((base.shape | own) if base else (sizes | own))), dropout=dropout)
    if base:
        body = {
            name: value
            for name, value in load_set_model(base.path).state_dict().items()
            if not name.startswith(INPUT_LAYER)
        }
        missing, unknown = model.load_state_dict(body, strict=False)
        assert not unknown and all(name.startswith(INPUT_LAYER) for name in missing), (missing, unknown)
    model.table.copy_(embedding_table(embedding.float(), model.shape.table_width))
    return model
