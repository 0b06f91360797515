"""The training loop of the small networks that draft: AdamW with a cosine fall, early stop, resumable.

Every ``evaluate_every`` steps the loss on held-out prompts is taken, the best model kept, and training ends early
after ``patience`` evaluations without a better one. The examples of a step are drawn by a generator keyed by seed and
step, so a run that was stopped and resumed takes the same batches as one that was not. Examples weigh
exp(-depth / ``depth_scale``).

Legend: B examples of a batch.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import partial_path

NUM_PROBED = 4096
"""Held-out examples, evenly spread, that an evaluation during training takes."""

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_STATES = 20.0, 60.0
"""How long a training between two evaluations says nothing, and how much of it a kill may cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """What fixes the weights, given the examples, the first weights and a kind of device. ``depth_scale`` is in
    steps, and so is ``warmup``, over which the learning rate rises."""

    steps: int = 2000
    batch_size: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    warmup: int = 0
    depth_scale: float = 8.0
    evaluate_every: int = 100
    patience: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.evaluate_every, self.patience) < 1:
            raise ValueError("steps, batch_size, evaluate_every and patience must be at least 1")


class Progress:
    """A training under way: weights, optimizer moments, best weights, and the loss curve.

    ``curve`` holds (step, held-out loss) of each evaluation. ``parameters`` are those that are trained; None: all.
    """

    def __init__(
        self, model: nn.Module, settings: TrainSettings, parameters: Iterable[nn.Parameter] | None = None
    ) -> None:
        self.model, self.settings = model, settings
        self.trained = list(model.parameters() if parameters is None else parameters)
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.best = _copy(model)
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

    def run(
        self,
        losses: Callable[[Tensor], Tensor],
        depths: Tensor,
        evaluate: Callable[[], tuple[float, str]],
        *,
        state: Path | None = None,
        data: str = "",
        say: Callable[[str], None] = print,
    ) -> None:
        """Train to the end; the best weights are left in the model.

        Args:
            losses: of the training examples int64 [B], fp32 [B] in nats.
            depths: int64, of all training examples.
            evaluate: the loss on held-out prompts, and what else to say of it.
            state: a file that holds the training after every evaluation, and once a minute between them; an existing
                one is resumed.
            data: identifies examples and first weights, see :func:`fingerprint`.

        Raises:
            InputError: ``state`` is of another training, or the training diverged: nothing of it is kept.
        """
        if state is not None and state.exists():
            self._load(state, data)
            say(f"resumed at step {self.step} of {self.settings.steps}")
        said = saved = time.monotonic()
        while not self.is_over:
            self._step(losses, depths)
            if self.step % self.settings.evaluate_every and self.step < self.settings.steps:
                now = time.monotonic()
                if now - said >= SECONDS_BETWEEN_LINES:
                    said = now
                    say(f"step {self.step} of {self.settings.steps}")
                if state is not None and now - saved >= SECONDS_BETWEEN_STATES:
                    self._save(state, data)
                    saved = time.monotonic()
                continue
            loss, words = evaluate()
            if not math.isfinite(loss):
                if state is not None:
                    state.unlink(missing_ok=True)
                raise InputError(
                    f"the training diverged: held-out loss {loss} at step {self.step}; lower --learning-rate "
                    f"({self.settings.learning_rate:g})"
                )
            if loss < self.best_loss:
                self.best, self.best_step = _copy(self.model), self.step
            self.curve.append((self.step, loss))
            say(f"step {self.step}: held-out loss {loss:.4f}, {words}")
            if state is not None:
                self._save(state, data)
            said = saved = time.monotonic()
        self.model.load_state_dict(self.best)

    def _step(self, losses: Callable[[Tensor], Tensor], depths: Tensor) -> None:
        settings = self.settings
        rise = min(1.0, (self.step + 1) / (settings.warmup + 1))
        fall = (1 + math.cos(math.pi * self.step / settings.steps)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * rise * fall
        key = hashlib.sha256(f"{settings.seed}/{self.step}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        which = torch.randint(depths.shape[0], (settings.batch_size,), generator=generator)
        self.model.train()
        self.optimizer.zero_grad()
        found = losses(which)
        weights = (-depths[which] / settings.depth_scale).exp().to(found.device)
        ((found * weights).sum() / weights.sum()).backward()
        nn.utils.clip_grad_norm_(self.trained, settings.clip_norm)
        self.optimizer.step()
        self.step += 1

    def _moments(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name: those that the optimizer holds moments of."""
        trained = {id(parameter) for parameter in self.trained}
        return {name: value for name, value in self.model.named_parameters() if id(value) in trained}

    def _save(self, path: Path, data: str) -> None:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        for name, parameter in self._moments().items():
            for moment in _MOMENTS:
                tensors[f"{moment}.{name}"] = self.optimizer.state[parameter][moment]
        state = {
            "step": self.step, "best_step": self.best_step, "curve": self.curve,
            "settings": asdict(self.settings), "data": data,
        }  # fmt: skip
        partial = partial_path(path)
        kept = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        save_file(kept, str(partial), metadata={"state": json.dumps(state)})
        partial.replace(path)

    def _load(self, path: Path, data: str) -> None:
        """Raises InputError where the file is of other settings, examples or first weights."""
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
        for name, parameter in self._moments().items():
            for moment in ("exp_avg", "exp_avg_sq"):
                self.optimizer.state[parameter][moment] = tensors[f"{moment}.{name}"].to(parameter.device)
            self.optimizer.state[parameter]["step"] = tensors[f"step.{name}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """An evaluation on held-out prompts: the weighted loss in nats, and shares by name, over all examples and by
    depth. A share ``stale_NAME`` is the same for the stale distributions."""

    loss: float
    shares: dict[str, float]
    by_depth: dict[str, dict[int, float]]

    def summary(self, words: Mapping[str, str], depth: int | None = None) -> str:
        """The shares named in ``words``, in all or at one depth, in these words; in brackets the stale ones."""
        own = self.shares if depth is None else {name: part[depth] for name, part in self.by_depth.items()}
        return ", ".join(
            f"{word} {own[name]:.3f} ({own[f'stale_{name}']:.3f})" for name, word in words.items()
        )

    def figures(self) -> dict[str, float | dict[int, float]]:
        """Every figure by a name of its own."""
        by_depth = {f"{name}_by_depth": shares for name, shares in self.by_depth.items()}
        return {"loss": self.loss, **self.shares, **by_depth}


Model = TypeVar("Model", bound=nn.Module)
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained(Generic[Model, Found]):
    """The best model, its evaluation, the step it is of, steps taken, and (step, held-out loss) of each evaluation."""

    model: Model
    evaluation: Found
    best_step: int
    steps_taken: int
    curve: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, progress: Progress, model: Model, evaluation: Found) -> Trained[Model, Found]:
        """What a training that is over leaves."""
        return cls(
            model=model, evaluation=evaluation, best_step=progress.best_step, steps_taken=progress.step,
            curve=tuple(progress.curve),
        )  # fmt: skip

    def card(
        self,
        settings: TrainSettings,
        calibration: Mapping[str, Any],
        figures: Mapping[str, float | dict[int, float]],
        **more: str,
    ) -> dict[str, Any]:
        """What the checkpoint says of itself: settings, what it was trained on, held-out ``figures``, loss curve."""
        return {
            "settings": asdict(settings),
            "trained_on": calibration,
            **more,
            "best_step": self.best_step,
            "steps_taken": self.steps_taken,
            "held_out": {
                name: {str(key): round(part, 4) for key, part in value.items()}
                if isinstance(value, dict)
                else round(value, 4)
                for name, value in figures.items()
            },
            "held_out_loss_by_step": [[step, round(loss, 4)] for step, loss in self.curve],
        }


def probe(num_examples: int) -> Tensor:
    """Indices int64 of the held-out examples that an evaluation during training takes."""
    return torch.arange(0, num_examples, max(1, num_examples // NUM_PROBED))


def weighted_mean(losses: Tensor, depths: Tensor, depth_scale: float) -> float:
    """The mean of losses fp64 [B], each weighing exp(-depth / ``depth_scale``)."""
    weights = (-depths.double() / depth_scale).exp()
    return float((losses * weights).sum() / weights.sum())


def means_by(hits: Tensor, groups: Tensor) -> dict[int, float]:
    """The share of hits (bool [B]) in each group (int64 [B])."""
    return {int(group): float(hits[groups == group].double().mean()) for group in groups.unique()}


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """24 hexadecimal digits of the bytes of tensors."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return whole.hexdigest()[:24]


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
