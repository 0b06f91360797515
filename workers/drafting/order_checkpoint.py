"""The file of an order model: one safetensors file whose header says which features it reads, and a card beside it.

    CKPT.safetensors   fp32 weights; metadata key dlmgrid: format and card as JSON
    CKPT.json          the card with the fingerprint, for people

There are two kinds, told apart by their format: one reads stale distributions only and drafts for any target
(``order_model``), the other reads tokens and belongs to one target (``token_model``); its header also has the target's
weight fingerprint and its sizes, and its table of embeddings is fp16.

The fingerprint is taken from the bytes of the safetensors file, so a changed weight or card is another drafter.
Reading header and fingerprint needs no torch; only loading does.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlmgrid.workers.drafting.checkpoint_header import HEADER, read_header
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import partial_path, publish, write_whole

if TYPE_CHECKING:
    from torch import nn

    from dlmgrid.workers.drafting.order_model import OrderModel
    from dlmgrid.workers.drafting.token_model import TokenModel

FORMAT = "dlmgrid-order-model-1"
"""Names the architecture and the meaning of every feature; another reading of a feature is another format."""

TOKEN_FORMAT = "dlmgrid-token-model-1"
"""The same of an order model that reads tokens."""

REFERENCE = "reference"
"""The name of the order model that ships with the package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderCheckpoint:
    """A checked order-model file. ``card`` says how it was trained and how well it predicts held-out orders. Of one
    that reads tokens, ``target`` is the weight fingerprint of the model that it drafts for ("" for the other kind) and
    ``shape`` its sizes."""

    path: Path
    fingerprint: str
    card: dict[str, Any]
    target: str = ""
    shape: dict[str, int] = field(default_factory=dict)

    @property
    def reads_tokens(self) -> bool:
        return bool(self.shape)

    @property
    def records(self) -> tuple[str, ...]:
        """What a recording must hold beyond its steps for a replay with this model."""
        return ("hidden",) if self.shape.get("hidden_size") else ()


def find_order_checkpoint(name: str) -> Path:
    """The file that a grid names: ``reference`` is the shipped one, anything else a path."""
    if name == REFERENCE:
        return Path(__file__).parent / "order_reference" / "order.safetensors"
    return Path(name).expanduser().absolute()


def read_order_checkpoint(path: Path) -> OrderCheckpoint:
    """Check a file by its header. Raises InputError for a missing, damaged or foreign one, or for other features."""
    header = read_header(
        path, "order model", (FORMAT, TOKEN_FORMAT), needs=("card",), make_it="dlmgrid train-order TRAJ"
    )
    return OrderCheckpoint(
        path=path,
        fingerprint=hashlib.sha256(path.read_bytes()).hexdigest()[:24],
        card=header["card"],
        target=header.get("target", ""),
        shape=header.get("shape", {}),
    )


def save_order_model(path: Path, model: OrderModel, card: dict[str, Any]) -> str:
    """Write the model, and the card beside it, each whole; returns the fingerprint."""
    return _save(path, model, {"format": FORMAT}, card)


def save_token_model(path: Path, model: TokenModel, *, target: str, card: dict[str, Any]) -> str:
    """Write a model that reads tokens, made for the weights ``target``, and the card beside it, each whole; returns the
    fingerprint."""
    header = {"format": TOKEN_FORMAT, "target": target, "shape": asdict(model.shape)}
    return _save(path, model, header, card)


def _save(path: Path, model: nn.Module, header: dict[str, Any], card: dict[str, Any]) -> str:
    from safetensors.torch import save_file

    tensors = {
        name: (value.detach().half() if name == "table" else value.detach().float()).cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    partial = partial_path(path)
    text = json.dumps({**header, "card": card}, sort_keys=True)  # one key: many are written in any order
    save_file(tensors, str(partial), metadata={HEADER: text})
    publish(partial, path)
    fingerprint = read_order_checkpoint(path).fingerprint
    text = json.dumps({"fingerprint": fingerprint, **header, **card}, indent=1, sort_keys=True)
    write_whole(path.with_suffix(".json"), text + "\n")
    return fingerprint


def load_order_model(path: Path) -> OrderModel | TokenModel:
    """The model of a checked file, fp32; of which kind, the file says. Raises InputError as
    :func:`read_order_checkpoint`, or for other weights."""
    from safetensors.torch import load_file

    from dlmgrid.workers.drafting.order_model import OrderModel
    from dlmgrid.workers.drafting.token_model import TokenModel, TokenShape

    found = read_order_checkpoint(path)
    tensors = load_file(str(path))
    try:
        model = TokenModel(TokenShape(**found.shape)) if found.reads_tokens else OrderModel()
        model.load_state_dict(tensors)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"order model {path}: its weights do not fit this version; train it again"
        ) from error
    return model
