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
from dlmgrid.workers.drafting.token_model import Stale, TokenEncoder, TokenModel, TokenShape, path_of
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


TrainedTokens = Trained[TokenModel, Shares]
"""``order``: the likeliest position is filled next; ``stale_order``: the one of highest stale confidence is. ``token``:
of the positions filled next, the likeliest token is the one committed; ``stale_token``: the stale one. ``joint``: the
likeliest position is next and its token right; ``stale_joint``: the same positions, stale tokens. The loss is that of
position and token."""

_WORDS = {"order": "order", "token": "token", "joint": "both"}


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
    return Trained.of(progress, model, evaluate_tokens(model, held_out, settings, device=device))


def placed(examples: TokenExamples, device: torch.device) -> TokenExamples:
    """The examples on the device where they fit; else they stay on the host and every batch is sent."""
    if device.type != "cuda" or examples.num_bytes > torch.cuda.mem_get_info(device)[0] * 2 // 3:
        return examples
    return examples.to(device)


class Asked(NamedTuple):
    """What a network is asked about B examples, and what is right.

    ``snapshots`` B rows and what the network read of them, ``stale``; ``path`` and ``states`` as it takes them; the
    positions still ``masked`` and those that the next step fills, ``labels``, bool [B, L]; ``is_token`` bool
    [B, L, K + 1], which candidate the next step commits, or none of them; ``fresh`` fp32 [B, L, K + 1], the target's
    probabilities of the candidates at the virtual state, and of none.
    """

    snapshots: Snapshots
    stale: Stale
    path: Tensor
    states: Tensor
    masked: Tensor
    labels: Tensor
    is_token: Tensor
    fresh: Tensor

    def token_loss(self, log_committed: Tensor) -> Tensor:
        """Cross-entropy [B] of the tokens committed, the mean over them."""
        per_token = -torch.where(self.is_token, log_committed, 0.0).sum(dim=-1)
        return torch.where(self.labels, per_token, 0.0).sum(dim=-1) / self.labels.sum(dim=-1)

    def fresh_loss(self, log_fresh: Tensor) -> Tensor:
        """Cross-entropy [B] of the target's own distribution, the mean over the positions still masked."""
        per_position = -(self.fresh * log_fresh).sum(dim=-1)
        return torch.where(self.masked, per_position, 0.0).sum(dim=-1) / self.masked.sum(dim=-1)


def ask(model: TokenEncoder, examples: TokenExamples, which: Tensor, device: torch.device) -> Asked:
    """The examples ``which`` (int64 [B]) as a network on ``device`` is asked about them."""
    index = which.to(examples.states.device)
    stale_step, at = examples.snapshots[index], examples.at[index]
    snapshots = examples.steps(stale_step, device)
    states, following = examples.states[at].to(device), examples.following[at].to(device)
    roots = examples.following[stale_step].to(device)
    stale = model.read(snapshots)
    masked = states == MASKED
    is_token = stale.token_ids == following[..., None]
    return Asked(
        snapshots=snapshots,
        stale=stale,
        path=path_of(snapshots, roots, states[:, None], snapshots.probabilities.dtype)[:, 0],
        states=states.long(),
        masked=masked,
        labels=masked & (following != MASKED),
        is_token=torch.cat((is_token, ~is_token.any(dim=-1, keepdim=True)), dim=-1),
        fresh=_fresh_shares(examples, at, stale.token_ids, device),
    )


def _fresh_shares(examples: TokenExamples, at: Tensor, token_ids: Tensor, device: torch.device) -> Tensor:
    fresh = examples.steps(at, device, with_hidden=False)
    same = fresh.token_ids[..., None, :] == token_ids[..., None]
    shares = torch.where(same, fresh.probabilities[..., None, :], 0.0).sum(dim=-1).clamp_max(1.0)
    return torch.cat((shares, (1 - shares.sum(dim=-1, keepdim=True)).clamp_min(0.0)), dim=-1)


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
    asked = ask(model, examples, which, device)
    found = model(asked.stale, asked.path, asked.states)
    masked, labels, is_token = asked.masked, asked.labels, asked.is_token
    log_q = masked_log_softmax(found.scores, masked)
    position = -torch.where(labels, log_q, -torch.inf).logsumexp(dim=-1)
    count = labels.sum(dim=-1)

    best = log_q.argmax(dim=-1, keepdim=True)
    choice = found.log_committed[..., :-1].argmax(dim=-1, keepdim=True)
    right = is_token[..., :-1].gather(-1, choice).squeeze(-1) & labels
    stale_right = is_token[..., 0] & labels
    confidence = torch.where(masked, asked.snapshots.probabilities[..., 0], -1.0)
    return _Found(
        position=position,
        token=asked.token_loss(found.log_committed),
        fresh=asked.fresh_loss(found.log_fresh),
        order_hit=labels.gather(1, best).squeeze(1),
        joint_hit=right.gather(1, best).squeeze(1),
        stale_joint_hit=stale_right.gather(1, best).squeeze(1),
        stale_order_hit=labels.gather(1, confidence.argmax(dim=-1, keepdim=True)).squeeze(1),
        token_hit=right.sum(dim=-1) / count,
        stale_hit=stale_right.sum(dim=-1) / count,
    )


@torch.no_grad()
def evaluate_tokens(
    model: TokenModel,
    examples: TokenExamples,
    settings: TokenTrainSettings,
    *,
    which: Tensor | None = None,
    device: str = "cpu",
) -> Shares:
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
    return Shares(
        loss=weighted_mean(found.position + found.token, depths, settings.depth_scale),
        shares={name: float(part.mean()) for name, part in hits.items()},
        by_depth={name: means_by(part, depths) for name, part in hits.items()},
    )


def summary_of(found: Shares, depth: int | None = None) -> str:
    """The shares of an evaluation, in all or at one depth, in words; in brackets the stale ones."""
    return found.summary(_WORDS, depth)


def token_card(
    trained: TrainedTokens, settings: TokenTrainSettings, calibration: dict[str, Any]
) -> dict[str, Any]:
    """What the checkpoint says of itself; see :meth:`Trained.card`."""
    return trained.card(settings, calibration, trained.evaluation.figures())
