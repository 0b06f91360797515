"""Training of the order model: cross-entropy over the next position, weighted by exp(-depth / 8).

The loop is that of :mod:`~dlmgrid.workers.drafting.training_loop`; evaluations during training take a fixed part of
the held-out examples, the one at the end all of them. A step of the decoder that fills several positions counts as
predicted by any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.drafting.order_examples import OrderExamples
from dlmgrid.workers.drafting.order_model import OrderModel, masked_log_softmax
from dlmgrid.workers.drafting.training_loop import (
    Progress,
    Trained,
    TrainSettings,
    fingerprint,
    means_by,
    probe,
    weighted_mean,
)

__all__ = ["Evaluation", "TrainSettings", "Trained", "card_of", "evaluate_order", "train_order"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """On held-out prompts: the weighted loss in nats, and the share of next positions that were the first choice,
    over all examples, by depth and by block; ``stale`` is the same share for the stale-confidence order."""

    loss: float
    accuracy: float
    accuracy_by_depth: dict[int, float]
    accuracy_by_block: dict[int, float]
    stale: float
    stale_by_depth: dict[int, float]


def train_order(
    training: OrderExamples,
    held_out: OrderExamples,
    settings: TrainSettings,
    *,
    state: Path | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> Trained[OrderModel, Evaluation]:
    """Train an order model.

    Args:
        state: a file that holds the training's state after every evaluation; an existing one is resumed.

    Raises:
        InputError: ``state`` is of another training.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = OrderModel()
    model.to(device)
    progress = Progress(model, settings)
    probed = probe(held_out.num_examples)

    def evaluate() -> tuple[float, str]:
        found = evaluate_order(model, held_out, settings, which=probed, device=device)
        return found.loss, f"accuracy {found.accuracy:.3f} (stale-confidence order {found.stale:.3f})"

    progress.run(
        lambda which: _losses(model, training, which, device)[0],
        training.depths,
        evaluate,
        state=state,
        data=fingerprint((training.states, training.labels, training.features)),
        say=say,
    )
    return Trained.of(progress, model, evaluate_order(model, held_out, settings, device=device))


def _losses(model: OrderModel, examples: OrderExamples, which: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """The loss fp32 [B] of each example in nats, and whether its first choice is filled next, bool [B]."""
    features, present, masked, labels = (part.to(device) for part in examples.batch(which))
    log_q = masked_log_softmax(model(features, present), masked)
    losses = -torch.where(labels, log_q, -torch.inf).logsumexp(dim=-1)
    first = log_q.argmax(dim=-1, keepdim=True)
    return losses, labels.gather(1, first).squeeze(1)


@torch.no_grad()
def evaluate_order(
    model: OrderModel,
    examples: OrderExamples,
    settings: TrainSettings,
    *,
    which: Tensor | None = None,
    device: str = "cpu",
) -> Evaluation:
    """Loss and accuracy over the examples ``which`` (int64 [B]; all for None)."""
    model.eval()
    which = torch.arange(examples.num_examples) if which is None else which
    parts = [_losses(model, examples, some, device) for some in which.split(4 * settings.batch_size)]
    losses = torch.cat([part[0] for part in parts]).cpu().double()
    hits = torch.cat([part[1] for part in parts]).cpu()
    depths, blocks, snapshot = examples.depths[which], examples.blocks[which], examples.snapshot[which]
    still = examples.masked[snapshot] & (examples.states[which] == MASKED)
    confidence = torch.where(still, examples.features[..., 0][snapshot], -1.0)
    stale_hits = examples.labels[which].gather(1, confidence.argmax(dim=-1, keepdim=True)).squeeze(1)
    return Evaluation(
        loss=weighted_mean(losses, depths, settings.depth_scale),
        accuracy=float(hits.double().mean()),
        accuracy_by_depth=means_by(hits, depths),
        accuracy_by_block=means_by(hits, blocks),
        stale=float(stale_hits.double().mean()),
        stale_by_depth=means_by(stale_hits, depths),
    )


def card_of(
    trained: Trained[OrderModel, Evaluation], settings: TrainSettings, calibration: dict[str, Any]
) -> dict[str, Any]:
    """What the checkpoint says of itself; see :meth:`Trained.card`."""
    return trained.card(settings, calibration, asdict(trained.evaluation))
