"""Training of a set model from recorded runs: which positions the next step commits, and the tokens there.

For a stale snapshot of step t and a depth d ≥ 1, the virtual state holds the first d steps after the snapshot with
inputs frozen; the label is the set of positions that step t + d commits, and the tokens that the run ends with. The
loss of an example, in nats, is the cross-entropy of inclusion over the masked positions plus that of the token over
those whose final token is a candidate: in full where the next step commits it, a fifth elsewhere. The loop is that of
:mod:`~dlmgrid.workers.drafting.training_loop`; prompts are held out as for the order model.

``refit`` trains the input layer alone: that is how a drafter moves to another target.

Legend: E examples, P snapshots, L block length, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.drafting.order_model import path_features, stale_features
from dlmgrid.workers.drafting.set_model import NUM_RESCORED, SetModel
from dlmgrid.workers.drafting.stale_roots import root_steps, stale_inputs, steps_left
from dlmgrid.workers.drafting.training_loop import (
    Progress,
    TrainSettings,
    fingerprint,
    means_by,
    probe,
    weighted_mean,
)
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.trajectories.replay import ReplayBatch
from dlmgrid.workers.trajectories.trajectory import Trajectory

MAX_DEPTH = 12
TOKEN_WEIGHT_ELSEWHERE = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTrainSettings(TrainSettings):
    """The settings of a training, with the defaults of a set model."""

    batch_size: int = 128
    learning_rate: float = 1e-3
    depth_scale: float = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SetExamples:
    """All examples of some runs; the first seven tensors have a row a snapshot, the others one an example.

    ``features`` fp32 [P, L, 72]; ``hidden`` fp32 [P, L, H]; ``token_ids`` int64 and ``probabilities`` fp32 [P, L, 8];
    ``masked`` bool [P, L]; ``roots`` and ``final`` int32 [P, L]; ``snapshot`` int64 [E]; ``states`` int32 [E, L];
    ``labels`` bool [E, L]; ``depths`` int64 [E].
    """

    features: Tensor
    hidden: Tensor
    token_ids: Tensor
    probabilities: Tensor
    masked: Tensor
    roots: Tensor
    final: Tensor
    snapshot: Tensor
    states: Tensor
    labels: Tensor
    depths: Tensor

    @property
    def num_examples(self) -> int:
        return int(self.depths.shape[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class SetEvaluation:
    """On held-out prompts: the weighted loss in nats; the share of next steps whose set of positions was proposed
    exactly; of the tokens that the next step commits, the share that the model and the stale argmax predict, by
    depth."""

    loss: float
    exact_sets: float
    token_hits: dict[int, float]
    stale_hits: dict[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedSets:
    """The best model, its evaluation, the step it is of, and the steps taken."""

    model: SetModel
    evaluation: SetEvaluation
    best_step: int
    steps_taken: int


def make_set_examples(runs: Sequence[Trajectory]) -> SetExamples:
    """Every snapshot and depth of runs loaded with their hidden states. Raises InputError for none."""
    parts = [part for run in runs if (part := _examples_of(run)) is not None]
    if not parts:
        raise InputError("the recorded runs hold no step to learn from: their blocks take one step")
    offset = 0
    columns: dict[str, list[Tensor]] = {name: [] for name in SetExamples.__dataclass_fields__}
    for part in parts:
        for name, values in columns.items():
            column = getattr(part, name)
            values.append(column + offset if name == "snapshot" else column)
        offset += part.masked.shape[0]
    return SetExamples(**{name: torch.cat(values) for name, values in columns.items()})


def _examples_of(run: Trajectory) -> SetExamples | None:
    steps, left = root_steps(run), steps_left(run)
    if not steps.numel():
        return None
    labels = torch.zeros(run.states.shape, dtype=torch.bool)
    for step, commits in enumerate(run.commits):
        labels[step, [position for position, _ in commits]] = True
    counts = left[steps].clamp_max(MAX_DEPTH)
    snapshot = torch.arange(steps.numel()).repeat_interleave(counts)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    depths = torch.arange(snapshot.numel()) - starts + 1
    at = steps[snapshot] + depths - 1
    batch = ReplayBatch([run])
    snapshots = stale_inputs(batch, steps).snapshots
    assert snapshots.hidden is not None, "runs must be loaded with their hidden states"
    return SetExamples(
        features=stale_features(snapshots),
        hidden=snapshots.hidden,
        token_ids=snapshots.token_ids[..., :NUM_RESCORED],
        probabilities=snapshots.probabilities[..., :NUM_RESCORED],
        masked=snapshots.masked,
        roots=run.states[steps],
        final=batch.final_tokens[steps],
        snapshot=snapshot,
        states=run.states[at],
        labels=labels[at],
        depths=depths,
    )


def train_sets(
    model: SetModel,
    training: SetExamples,
    held_out: SetExamples,
    settings: SetTrainSettings,
    *,
    refit: bool = False,
    state: Path | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> TrainedSets:
    """Train ``model`` in place, with ``refit`` its input layer alone; the best weights are left in it.

    Args:
        state: a file that holds the training's state after every evaluation; an existing one is resumed.

    Raises:
        InputError: ``state`` is of another training.
    """
    examples = (training.states, training.labels, training.features, training.hidden)
    data = fingerprint((*examples, *model.state_dict().values()))
    model.to(device)
    progress = Progress(model, settings, model.input_layer() if refit else None)
    probed = probe(held_out.num_examples)

    def evaluate() -> tuple[float, str]:
        found = evaluate_sets(model, held_out, settings, which=probed, device=device)
        return found.loss, f"exact sets {found.exact_sets:.3f}"

    progress.run(
        lambda which: _losses(model, training, which, device)[0],
        training.depths,
        evaluate,
        state=state,
        data=data,
        say=say,
    )
    evaluation = evaluate_sets(model, held_out, settings, device=device)
    return TrainedSets(
        model=model, evaluation=evaluation, best_step=progress.best_step, steps_taken=progress.step
    )


def _losses(
    model: SetModel, examples: SetExamples, which: Tensor, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss fp32 [B] of each example in nats, the proposed sets bool [B, L], and the index of the likeliest
    candidate int64 [B, L]."""
    row, states = examples.snapshot[which], examples.states[which]
    masked, roots = examples.masked[row], examples.roots[row]
    path = path_features(masked, roots, states[:, None])[:, 0]
    features = torch.cat((examples.features[row], path), dim=-1).to(device)
    filled = torch.where(masked, states, MASKED).long().to(device)
    token_ids = examples.token_ids[row].to(device)
    logits, log_p = model(
        features,
        examples.hidden[row].to(device),
        token_ids,
        examples.probabilities[row].to(device),
        filled,
        masked.to(device),
    )
    still = (masked & (states == MASKED)).to(device)
    labels = examples.labels[which].to(device)
    inclusion = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none")
    is_token = token_ids == examples.final[row].to(device)[..., None]
    token_loss = -torch.where(is_token, log_p, -torch.inf).logsumexp(dim=-1)
    weight = torch.where(labels, 1.0, TOKEN_WEIGHT_ELSEWHERE) * is_token.any(dim=-1)
    token_loss = torch.where(is_token.any(dim=-1) & still, token_loss, 0.0) * weight
    loss = torch.where(still, inclusion, 0.0).sum(dim=-1) + token_loss.sum(dim=-1)
    proposed = still & (logits >= 0)
    best = torch.where(still, logits, -torch.inf).argmax(dim=-1, keepdim=True)
    alone = torch.zeros_like(proposed).scatter(1, best, True)
    proposed = torch.where(proposed.any(dim=-1, keepdim=True), proposed, alone)
    return loss, proposed, log_p.argmax(dim=-1)


@torch.no_grad()
def evaluate_sets(
    model: SetModel,
    examples: SetExamples,
    settings: SetTrainSettings,
    *,
    which: Tensor | None = None,
    device: str = "cpu",
) -> SetEvaluation:
    """Loss, proposed sets and tokens over the examples ``which`` (int64 [B]; all for None)."""
    model.eval()
    which = torch.arange(examples.num_examples) if which is None else which
    losses, exact, hits, stale, at = [], [], [], [], []
    for some in which.split(4 * settings.batch_size):
        loss, proposed, best = (part.cpu() for part in _losses(model, examples, some, device))
        labels, row = examples.labels[some], examples.snapshot[some]
        final = examples.final[row].long()
        losses.append(loss.double())
        exact.append((proposed == labels).all(dim=-1))
        found = examples.token_ids[row].gather(-1, best[..., None]).squeeze(-1) == final
        hits.append(found[labels])
        stale.append((examples.token_ids[row][..., 0] == final)[labels])
        at.append(examples.depths[some][:, None].expand(labels.shape)[labels])
    depth = torch.cat(at)
    return SetEvaluation(
        loss=weighted_mean(torch.cat(losses), examples.depths[which], settings.depth_scale),
        exact_sets=float(torch.cat(exact).double().mean()),
        token_hits=means_by(torch.cat(hits), depth),
        stale_hits=means_by(torch.cat(stale), depth),
    )


def set_card(
    trained: TrainedSets, settings: SetTrainSettings, calibration: dict[str, Any], refit_of: str
) -> dict[str, Any]:
    """What the checkpoint says of itself. ``refit_of`` is the fingerprint of the model that it was fitted from, ""."""
    found = trained.evaluation
    return {
        "settings": asdict(settings),
        "trained_on": calibration,
        "refit_of": refit_of,
        "best_step": trained.best_step,
        "steps_taken": trained.steps_taken,
        "held_out": {
            "loss": round(found.loss, 4),
            "exact_sets": round(found.exact_sets, 4),
            "token_hits": {str(depth): round(share, 4) for depth, share in found.token_hits.items()},
            "stale_hits": {str(depth): round(share, 4) for depth, share in found.stale_hits.items()},
        },
    }
