"""Training of a set model from recorded runs: which positions the next step commits, and the tokens there.

For a stale snapshot of step t and a depth d ≥ 1, the virtual state is the one that step t + d saw, its inputs those of
the snapshot (the examples of ``token_examples``, steps that complete a block among them). The loss of an example in
nats is the sum of three: minus the log probability of the set that step t + d committed; the cross-entropy of the
tokens it committed, the mean over them; and, weighted, that of the target's own distribution there, the mean over the
positions still masked. The last one teaches most: what a threshold decoder commits follows from those distributions.
Training ends early, and the best model is kept, by the first two. The loop is that of
:mod:`~dlmgrid.workers.drafting.training_loop`; prompts are held out as for the order model.

``refit`` trains the input layer alone: that is how a drafter moves to another target.

Legend: B examples of a batch, L block length, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlmgrid.workers.decoding.commit_rules import CommitRule
from dlmgrid.workers.drafting.set_distribution import SetDistribution
from dlmgrid.workers.drafting.set_model import SetModel
from dlmgrid.workers.drafting.token_examples import TokenExamples, load_token_examples
from dlmgrid.workers.drafting.token_training import ask, placed
from dlmgrid.workers.drafting.training_loop import (
    Progress,
    Shares,
    Trained,
    TrainSettings,
    fingerprint,
    means_by,
    probe,
    weighted_mean,
)

MAX_DEPTH = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTrainSettings(TrainSettings):
    """The settings of a training, with the defaults of a set model."""

    steps: int = 3000
    batch_size: int = 512
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup: int = 100
    depth_scale: float = 4.0
    evaluate_every: int = 200
    dropout: float = 0.1
    fresh_weight: float = 1.0


TrainedSets = Trained[SetModel, Shares]
"""``sets``: of next steps, the likeliest set of positions is the one committed; ``states``: its likeliest tokens too,
so that the likeliest next state is the right one. ``positions``: of the positions masked, in the set or not as
predicted; ``tokens``: of the positions committed, the likeliest token is the one committed. The loss is that of set and
tokens."""

_WORDS = {name: name for name in ("sets", "states", "positions", "tokens")}


def load_set_examples(
    path: Path, *, hidden: bool, say: Callable[[str], None] = print
) -> tuple[TokenExamples, TokenExamples]:
    """The examples of a recorded folder (or file), of training and of held-out items; see
    :func:`~dlmgrid.workers.drafting.token_examples.load_token_examples`."""
    training, held_out = load_token_examples(path, hidden=hidden, complete=True, say=say)
    return _shallow(training), _shallow(held_out)


def _shallow(examples: TokenExamples) -> TokenExamples:
    """The examples of depths that matter: a deeper one would weigh nothing and take its place in a batch."""
    kept = examples.depths <= MAX_DEPTH
    return replace(
        examples,
        snapshots=examples.snapshots[kept],
        at=examples.at[kept],
        depths=examples.depths[kept],
    )


def train_sets(
    model: SetModel,
    training: TokenExamples,
    held_out: TokenExamples,
    settings: SetTrainSettings,
    rule: CommitRule,
    *,
    refit: bool = False,
    state: Path | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> TrainedSets:
    """Train ``model`` in place, with ``refit`` its input layer alone; the best weights are left in it.

    Args:
        rule: of the decoder that was recorded; it has a level.
        state: a file that holds the training's state after every evaluation; an existing one is resumed.
        device: computes; it also holds the examples where they fit into two thirds of what is free there.

    Raises:
        InputError: ``state`` is of another training.
    """
    target = torch.device(device)
    examples = (training.states, training.at, training.log_probabilities[::64].contiguous())
    data = fingerprint((*examples, *model.state_dict().values())) + f" {rule.name} {rule.level} {refit}"
    training, held_out = (placed(part, target) for part in (training, held_out))
    probed = probe(held_out.num_examples)
    with torch.random.fork_rng(devices=[target] if target.type == "cuda" else []):
        model.to(target)
        progress = Progress(model, settings, model.input_layer() if refit else None)

        def losses(which: Tensor) -> Tensor:
            torch.manual_seed(settings.seed * 1_000_003 + progress.step)  # dropout: the same after a resume
            found = _look(model, training, which, rule, target)
            return found.set + found.token + settings.fresh_weight * found.fresh

        def evaluate() -> tuple[float, str]:
            found = evaluate_sets(model, held_out, settings, rule, which=probed, device=device)
            return found.loss, summary_of(found)

        progress.run(losses, training.depths, evaluate, state=state, data=data, say=say)
    return Trained.of(progress, model, evaluate_sets(model, held_out, settings, rule, device=device))


class _Found(NamedTuple):
    """Of B examples: the three losses fp32 [B]; of the likeliest set, and of the stale one, the positions bool [B, L]
    and whether their tokens are right; the positions committed and those masked."""

    set: Tensor
    token: Tensor
    fresh: Tensor
    likeliest: Tensor
    is_token: Tensor
    stale: Tensor
    is_stale_token: Tensor
    labels: Tensor
    masked: Tensor


def _look(
    model: SetModel, examples: TokenExamples, which: Tensor, rule: CommitRule, device: torch.device
) -> _Found:
    assert rule.level is not None
    asked = ask(model, examples, which, device)
    found = model(asked.stale, asked.path, asked.states)
    masked, labels, is_token = asked.masked, asked.labels, asked.is_token
    log_top = found.log_fresh[..., :-1].amax(dim=-1)
    passing = model.passing(found.offset, log_top, rule.level)
    sets = SetDistribution.of(passing, found.scores, rule.eligible(masked))
    set_loss = -sets.log_probability(labels[:, None]).squeeze(1)
    choice = found.log_committed[..., :-1].argmax(dim=-1, keepdim=True)
    stale_top = torch.where(masked, asked.snapshots.probabilities[..., 0], 0.0)
    return _Found(
        set=set_loss,
        token=asked.token_loss(found.log_committed),
        fresh=asked.fresh_loss(found.log_fresh),
        likeliest=sets.likeliest(),
        is_token=is_token[..., :-1].gather(-1, choice).squeeze(-1),
        stale=rule.select(masked, stale_top),
        is_stale_token=is_token[..., 0],
        labels=labels,
        masked=masked,
    )


@torch.no_grad()
def evaluate_sets(
    model: SetModel,
    examples: TokenExamples,
    settings: SetTrainSettings,
    rule: CommitRule,
    *,
    which: Tensor | None = None,
    device: str = "cpu",
) -> Shares:
    """Loss and shares over the examples ``which`` (int64 [B]; all for None)."""
    model.eval()
    which = torch.arange(examples.num_examples) if which is None else which
    target = torch.device(device)
    parts = [_look(model, examples, some, rule, target) for some in which.split(4 * settings.batch_size)]
    found = _Found(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))
    depths = examples.depths[which]
    of_position = depths[:, None].expand(found.labels.shape)
    shares: dict[str, float] = {}
    by_depth: dict[str, dict[int, float]] = {}
    for prefix, sets, is_token in (
        ("", found.likeliest, found.is_token),
        ("stale_", found.stale, found.is_stale_token),
    ):
        is_set = (sets == found.labels).all(dim=-1)
        hits = {
            "sets": (is_set, depths),
            "states": (is_set & (is_token | ~found.labels).all(dim=-1), depths),
            "positions": ((sets == found.labels)[found.masked], of_position[found.masked]),
            "tokens": (is_token[found.labels], of_position[found.labels]),
        }
        for name, (hit, group) in hits.items():
            shares[prefix + name] = float(hit.double().mean())
            by_depth[prefix + name] = means_by(hit, group)
    return Shares(
        loss=weighted_mean((found.set + found.token).double(), depths, settings.depth_scale),
        shares=shares,
        by_depth=by_depth,
    )


def summary_of(found: Shares, depth: int | None = None) -> str:
    """The shares of an evaluation, in all or at one depth, in words; in brackets the stale ones."""
    return found.summary(_WORDS, depth)


def set_card(
    trained: TrainedSets, settings: SetTrainSettings, calibration: dict[str, Any], refit_of: str
) -> dict[str, Any]:
    """What the checkpoint says of itself; ``refit_of`` is the fingerprint of the model that it was fitted from, ""."""
    return trained.card(settings, calibration, trained.evaluation.figures(), refit_of=refit_of)
