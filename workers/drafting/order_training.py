"""Training of the order model: cross-entropy over the next position, weighted by exp(-depth / 8).

AdamW with a cosine fall; every ``evaluate_every`` steps the loss on held-out prompts is taken (on a fixed part of
their examples, on all of them at the end), the best model kept,
and training ends early after ``patience`` evaluations without a better one. The examples of a step are drawn by a
generator keyed by seed and step, so a run that was stopped and resumed takes the same batches as one that was not.
A step of the decoder that fills several positions counts as predicted by any of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.drafting.order_examples import OrderExamples
from dlmgrid.workers.drafting.order_model import OrderModel, masked_log_softmax
from dlmgrid.workers.errors import InputError

NUM_PROBED = 4096
"""Held-out examples, evenly spread, that an evaluation during training takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """What fixes the weights, given the examples and a kind of device. ``depth_scale`` is in steps."""

    steps: int = 2000
    batch_size: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    depth_scale: float = 8.0
    evaluate_every: int = 100
    patience: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.evaluate_every, self.patience) < 1:
            raise ValueError("steps, batch_size, evaluate_every and patience must be at least 1")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The best model, its evaluation, the step it is of, steps taken, and (step, held-out loss) of each evaluation."""

    model: OrderModel
    evaluation: Evaluation
    best_step: int
    steps_taken: int
    curve: tuple[tuple[int, float], ...]


class _Progress:
    """What a resumed run needs: weights, optimizer moments, best weights, and the loss curve."""

    def __init__(self, model: OrderModel, optimizer: torch.optim.AdamW, settings: TrainSettings) -> None:
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self.best = {name: value.clone() for name, value in model.state_dict().items()}
        self.best_step = 0
        self.curve: list[tuple[int, float]] = []
        self.step = 0

    @property
    def best_loss(self) -> float:
        return min((loss for _, loss in self.curve), default=math.inf)

    @property
    def is_over(self) -> bool:
        behind = sum(step > self.best_step for step, _ in self.curve)
        return self.step >= self.settings.steps or behind >= self.settings.patience

    def note(self, loss: float) -> None:
        if loss < self.best_loss:
            self.best_step = self.step
            self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.curve.append((self.step, loss))

    def save(self, path: Path, data: str) -> None:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        for name, parameter in self.model.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq", "step"):
                tensors[f"{moment}.{name}"] = self.optimizer.state[parameter][moment]
        state = {
            "step": self.step, "best_step": self.best_step, "curve": self.curve,
            "settings": asdict(self.settings), "data": data,
        }  # fmt: skip
        partial = path.with_name(path.name + ".part")
        kept = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        save_file(kept, str(partial), metadata={"state": json.dumps(state)})
        partial.replace(path)

    def load(self, path: Path, data: str) -> None:
        """Raises InputError where the file is of other settings or examples."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as file:
                state = json.loads((file.metadata() or {})["state"])
            tensors = load_file(str(path))
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise InputError(
                f"{path}: not a resumable training state ({error}); delete it to start over"
            ) from error
        if state["settings"] != asdict(self.settings) or state["data"] != data:
            raise InputError(
                f"{path} is of another training (settings or runs differ); delete it to start over"
            )
        self.step, self.best_step = state["step"], state["best_step"]
        self.curve = [(step, loss) for step, loss in state["curve"]]
        self.model.load_state_dict(_part(tensors, "model."))
        self.best = _part(tensors, "best.")
        for name, parameter in self.model.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                self.optimizer.state[parameter][moment] = tensors[f"{moment}.{name}"].to(parameter.device)
            self.optimizer.state[parameter]["step"] = tensors[f"step.{name}"]


def train_order(
    training: OrderExamples,
    held_out: OrderExamples,
    settings: TrainSettings,
    *,
    state: Path | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> Trained:
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
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    progress = _Progress(model, optimizer, settings)
    data = _fingerprint(training)
    probed = torch.arange(0, held_out.num_examples, max(1, held_out.num_examples // NUM_PROBED))
    if state is not None and state.exists():
        progress.load(state, data)
        say(f"resumed at step {progress.step} of {settings.steps}")
    while not progress.is_over:
        _step(model, optimizer, training, settings, progress.step, device)
        progress.step += 1
        if progress.step % settings.evaluate_every == 0 or progress.step == settings.steps:
            found = evaluate_order(model, held_out, settings, which=probed, device=device)
            progress.note(found.loss)
            say(
                f"step {progress.step}: held-out loss {found.loss:.4f}, accuracy {found.accuracy:.3f} "
                f"(stale-confidence order {found.stale:.3f})"
            )
            if state is not None:
                progress.save(state, data)
    model.load_state_dict(progress.best)
    return Trained(
        model=model,
        evaluation=evaluate_order(model, held_out, settings, device=device),
        best_step=progress.best_step,
        steps_taken=progress.step,
        curve=tuple(progress.curve),
    )


def _step(
    model: OrderModel,
    optimizer: torch.optim.AdamW,
    examples: OrderExamples,
    settings: TrainSettings,
    step: int,
    device: str,
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * (1 + math.cos(math.pi * step / settings.steps)) / 2
    key = hashlib.sha256(f"{settings.seed}/{step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    which = torch.randint(examples.num_examples, (settings.batch_size,), generator=generator)
    model.train()
    optimizer.zero_grad()
    losses, _ = _losses(model, examples, which, device)
    weights = (-examples.depths[which] / settings.depth_scale).exp().to(device)
    ((losses * weights).sum() / weights.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
    optimizer.step()


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
    weights = (-depths.double() / settings.depth_scale).exp()
    still = examples.masked[snapshot] & (examples.states[which] == MASKED)
    confidence = torch.where(still, examples.features[..., 0][snapshot], -1.0)
    stale_hits = examples.labels[which].gather(1, confidence.argmax(dim=-1, keepdim=True)).squeeze(1)
    return Evaluation(
        loss=float((losses * weights).sum() / weights.sum()),
        accuracy=float(hits.double().mean()),
        accuracy_by_depth=_means(hits, depths),
        accuracy_by_block=_means(hits, blocks),
        stale=float(stale_hits.double().mean()),
        stale_by_depth=_means(stale_hits, depths),
    )


def card_of(trained: Trained, settings: TrainSettings, calibration: dict[str, Any]) -> dict[str, Any]:
    """What the checkpoint says of itself: settings, what it was trained on, held-out accuracy, loss curve."""
    return {
        "settings": asdict(settings),
        "trained_on": calibration,
        "best_step": trained.best_step,
        "steps_taken": trained.steps_taken,
        "held_out": {
            name: {str(key): round(part, 4) for key, part in value.items()}
            if isinstance(value, dict)
            else round(value, 4)
            for name, value in asdict(trained.evaluation).items()
        },
        "held_out_loss_by_step": [[step, round(loss, 4)] for step, loss in trained.curve],
    }


def _means(hits: Tensor, groups: Tensor) -> dict[int, float]:
    return {int(group): float(hits[groups == group].double().mean()) for group in groups.unique()}


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _fingerprint(examples: OrderExamples) -> str:
    whole = hashlib.sha256()
    for part in (examples.states, examples.labels, examples.features):
        whole.update(part.contiguous().numpy().tobytes())
    return whole.hexdigest()[:24]
