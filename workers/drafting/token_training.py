"""Training of an order model that reads tokens.

The loss of an example in nats is the sum of three cross-entropies: of the next position, as for
:mod:`~dlmgrid.workers.drafting.order_training`; of the token committed there, where it is none of the candidates of
*none of them*; and, weighted, of the target's own distribution at the virtual state, the mean over the positions
still masked. The last one teaches from every position and not from one, without the noise of a single token. Training
ends early, and the best model is kept, by the first two alone: they are what a drafted state is weighed by. The loop
is that of
:mod:`~dlmgrid.workers.drafting.training_loop`.

Legend: B examples of a batch, L block length, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.drafting.order_model import masked_log_softmax
from dlmgrid.workers.drafting.token_examples import TokenExamples
from dlmgrid.workers.drafting.token_model import TokenModel, TokenShape, path_of
from dlmgrid.workers.drafting.training_loop import (
    Progress,
    TrainSettings,
    fingerprint,
    means_by,
    probe,
    weighted_mean,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTrainSettings(TrainSettings):
    """The settings of a training, with the defaults of a token model."""

    steps: int = 6000
    batch_size: int = 512
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.05
    warmup: int = 200
    evaluate_every: int = 300
    dropout: float = 0.1
    fresh_weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvaluation:
    """On held-out prompts: the weighted loss in nats (position and token), and shares of examples, over all and by
    depth.

    ``order``: the likeliest position is filled next; ``stale_order``: the one of highest stale confidence is.
    ``token``: of the positions filled next, the likeliest token is the one committed; ``stale_token``: the stale one.
    ``joint``: the likeliest position is next and its token right; ``stale_joint``: the same positions, stale tokens.
    """

    loss: float
    shares: dict[str, float]
    by_depth: dict[str, dict[int, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedTokens:
    """The best model, its evaluation, the step it is of, steps taken, and (step, held-out loss) of each evaluation."""

    model: TokenModel
    evaluation: TokenEvaluation
    best_step: int
    steps_taken: int
    curve: tuple[tuple[int, float], ...]


def train_tokens(
    shape: TokenShape,
    table: Tensor,
    training: TokenExamples,
    held_out: TokenExamples,
    settings: TokenTrainSettings,
    *,
    state: Path | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> TrainedTokens:
    """Train a token model whose table of embeddings is ``table`` [V, T].

    Args:
        state: a file that holds the training's state after every evaluation; an existing one is resumed.
        device: computes; it also holds the examples where they fit into two thirds of what is free there.

    Raises:
        InputError: ``state`` is of another training.
    """
    target = torch.device(device)
    examples = (training.states, training.at, training.log_probabilities[::64].contiguous(), table)
    data = fingerprint(examples) + f" {asdict(shape)}"
    training, held_out = (placed(part, target) for part in (training, held_out))
    probed = probe(held_out.num_examples)
    with torch.random.fork_rng(devices=[target] if target.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        model = TokenModel(shape, dropout=settings.dropout)
        model.table.copy_(table)
        model.to(target)
        progress = Progress(model, settings)

        def losses(which: Tensor) -> Tensor:
            torch.manual_seed(settings.seed * 1_000_003 + progress.step)  # dropout: the same after a resume
            found = _look(model, training, which, target)
            return found.position + found.token + settings.fresh_weight * found.fresh

        def evaluate() -> tuple[float, str]:
            found = evaluate_tokens(model, held_out, settings, which=probed, device=device)
            return found.loss, summary_of(found)

        progress.run(losses, training.depths, evaluate, state=state, data=data, say=say)
    return TrainedTokens(
        model=model,
        evaluation=evaluate_tokens(model, held_out, settings, device=device),
        best_step=progress.best_step,
        steps_taken=progress.step,
        curve=tuple(progress.curve),
    )


def placed(examples: TokenExamples, device: torch.device) -> TokenExamples:
    """The examples on the device where they fit; else they stay on the host and every batch is sent."""
    if device.type != "cuda" or examples.num_bytes > torch.cuda.mem_get_info(device)[0] * 2 // 3:
        return examples
    return examples.to(device)


class _Found(NamedTuple):
    """Of B examples: the three losses fp32 [B], and for the first choice of a position, bool [B] each, whether it is
    filled next, and is with the re-scored and with the stale token; ``token`` and ``stale`` hits are shares [B] of the
    positions filled."""

    position: Tensor
    token: Tensor
    fresh: Tensor
    order_hit: Tensor
    joint_hit: Tensor
    stale_joint_hit: Tensor
    stale_order_hit: Tensor
    token_hit: Tensor
    stale_hit: Tensor


def _look(model: TokenModel, examples: TokenExamples, which: Tensor, device: torch.device) -> _Found:
    where = examples.states.device
    index = which.to(where)
    stale_step, at = examples.snapshots[index], examples.at[index]
    snapshots = examples.steps(stale_step, device)
    states = examples.states[at].to(device)
    following = examples.following[at].to(device)
    roots = examples.states[stale_step + 1].to(device)
    path = path_of(snapshots, roots, states[:, None], snapshots.probabilities.dtype)[:, 0]
    stale = model.read(snapshots)
    found = model(stale, path, states.long())
    masked = states == MASKED
    labels = masked & (following != MASKED)

    log_q = masked_log_softmax(found.scores, masked)
    position = -torch.where(labels, log_q, -torch.inf).logsumexp(dim=-1)
    is_token = stale.token_ids == following[..., None]
    is_token = torch.cat((is_token, ~is_token.any(dim=-1, keepdim=True)), dim=-1)
    count = labels.sum(dim=-1)
    per_token = -torch.where(is_token, found.log_committed, 0.0).sum(dim=-1)
    token = torch.where(labels, per_token, 0.0).sum(dim=-1) / count

    fresh = fresh_shares(examples, at, stale.token_ids, device)
    per_position = -(fresh * found.log_fresh).sum(dim=-1)
    fresh_loss = torch.where(masked, per_position, 0.0).sum(dim=-1) / masked.sum(dim=-1)

    best = log_q.argmax(dim=-1, keepdim=True)
    choice = found.log_committed[..., :-1].argmax(dim=-1, keepdim=True)
    right = is_token[..., :-1].gather(-1, choice).squeeze(-1) & labels
    stale_right = is_token[..., 0] & labels
    confidence = torch.where(masked, snapshots.probabilities[..., 0], -1.0)
    return _Found(
        position=position,
        token=token,
        fresh=fresh_loss,
        order_hit=labels.gather(1, best).squeeze(1),
        joint_hit=right.gather(1, best).squeeze(1),
        stale_joint_hit=stale_right.gather(1, best).squeeze(1),
        stale_order_hit=labels.gather(1, confidence.argmax(dim=-1, keepdim=True)).squeeze(1),
        token_hit=right.sum(dim=-1) / count,
        stale_hit=stale_right.sum(dim=-1) / count,
    )


def fresh_shares(examples: TokenExamples, at: Tensor, token_ids: Tensor, device: torch.device) -> Tensor:
    """fp32 [B, L, K + 1]: the target's probabilities at the steps ``at`` of candidates ``token_ids``, and of none."""
    fresh: Snapshots = examples.steps(at, device, with_hidden=False)
    same = fresh.token_ids[..., None, :] == token_ids[..., None]
    shares = torch.where(same, fresh.probabilities[..., None, :], 0.0).sum(dim=-1).clamp_max(1.0)
    return torch.cat((shares, (1 - shares.sum(dim=-1, keepdim=True)).clamp_min(0.0)), dim=-1)


@torch.no_grad()
def evaluate_tokens(
    model: TokenModel,
    examples: TokenExamples,
    settings: TokenTrainSettings,
    *,
    which: Tensor | None = None,
    device: str = "cpu",
) -> TokenEvaluation:
    """Loss and shares over the examples ``which`` (int64 [B]; all for None)."""
    model.eval()
    which = torch.arange(examples.num_examples) if which is None else which
    target = torch.device(device)
    parts = [_look(model, examples, some, target) for some in which.split(4 * settings.batch_size)]
    found = _Found(*(torch.cat(column).double().cpu() for column in zip(*parts, strict=True)))
    depths = examples.depths[which]
    hits = {
        "order": found.order_hit,
        "token": found.token_hit,
        "joint": found.joint_hit,
        "stale_order": found.stale_order_hit,
        "stale_token": found.stale_hit,
        "stale_joint": found.stale_joint_hit,
    }
    return TokenEvaluation(
        loss=weighted_mean(found.position + found.token, depths, settings.depth_scale),
        shares={name: float(part.mean()) for name, part in hits.items()},
        by_depth={name: means_by(part, depths) for name, part in hits.items()},
    )


def summary_of(found: TokenEvaluation, depth: int | None = None) -> str:
    """The shares of an evaluation, in all or at one depth, in words; in brackets the stale ones."""
    own = found.shares if depth is None else {name: part[depth] for name, part in found.by_depth.items()}
    return ", ".join(
        f"{words} {own[name]:.3f} ({own[f'stale_{name}']:.3f})"
        for name, words in (("order", "order"), ("token", "token"), ("joint", "both"))
    )


def token_card(
    trained: TrainedTokens, settings: TokenTrainSettings, calibration: dict[str, Any]
) -> dict[str, Any]:
    """What the checkpoint says of itself: settings, what it was trained on, held-out shares, loss curve."""
    found = trained.evaluation
    return {
        "settings": asdict(settings),
        "trained_on": calibration,
        "best_step": trained.best_step,
        "steps_taken": trained.steps_taken,
        "held_out": {
            "loss": round(found.loss, 4),
            **{name: round(share, 4) for name, share in found.shares.items()},
            **{
                f"{name}_by_depth": {str(depth): round(share, 4) for depth, share in shares.items()}
                for name, shares in found.by_depth.items()
            },
        },
        "held_out_loss_by_step": [[step, round(loss, 4)] for step, loss in trained.curve],
    }
