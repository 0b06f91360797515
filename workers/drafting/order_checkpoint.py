"""The file of an order model: one safetensors file whose header says which features it reads, and a card beside it.

    CKPT.safetensors   fp32 weights; metadata key dlmgrid: format and card as JSON
    CKPT.json          the card with the fingerprint, for people

The fingerprint is taken from the bytes of the safetensors file, so a changed weight or card is another drafter.
Reading header and fingerprint needs no torch; only :func:`load_order_model` does.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import partial_path, write_whole

if TYPE_CHECKING:
    from dlmgrid.workers.drafting.order_model import OrderModel

FORMAT = "dlmgrid-order-model-1"
"""Names the architecture and the meaning of every feature; another reading of a feature is another format."""

_HEADER = "dlmgrid"

REFERENCE = "reference"
"""The name of the order model that ships with the package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderCheckpoint:
    """A checked order-model file. ``card`` says how it was trained and how well it predicts held-out orders."""

    path: Path
    fingerprint: str
    card: dict[str, Any]


def find_order_checkpoint(name: str) -> Path:
    """The file that a grid names: ``reference`` is the shipped one, anything else a path."""
    if name == REFERENCE:
        return Path(__file__).parent / "order_reference" / "order.safetensors"
    return Path(name).expanduser().absolute()


def read_order_checkpoint(path: Path) -> OrderCheckpoint:
    """Check a file by its header. Raises InputError for a missing, damaged or foreign one, or for other features."""
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        raise InputError(f"order model {path} is a folder; name the .safetensors file in it")
    if not path.is_file():
        raise InputError(
            f"order model {path} does not exist; make one with dlmgrid train-order TRAJ --out {path}"
        )
    try:
        with safe_open(str(path), framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"order model {path}: not a whole safetensors file ({error}); train it again"
        ) from error
    found = header.get("format", "no format")
    if found != FORMAT:
        raise InputError(
            f"order model {path}: it holds {found}, this version reads the features of {FORMAT}; "
            "train it again with dlmgrid train-order"
        )
    fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()[:24]
    return OrderCheckpoint(path=path, fingerprint=fingerprint, card=header["card"])


def save_order_model(path: Path, model: OrderModel, card: dict[str, Any]) -> str:
    """Write the model, and the card beside it, each whole; returns the fingerprint."""
    from safetensors.torch import save_file

    tensors = {name: value.detach().float().cpu().contiguous() for name, value in model.state_dict().items()}
    partial = partial_path(path)
    header = json.dumps(
        {"format": FORMAT, "card": card}, sort_keys=True
    )  # one key: many are written in any order
    save_file(tensors, str(partial), metadata={_HEADER: header})
    partial.replace(path)
    fingerprint = read_order_checkpoint(path).fingerprint
    text = json.dumps({"fingerprint": fingerprint, "format": FORMAT, **card}, indent=1, sort_keys=True)
    write_whole(path.with_suffix(".json"), text + "\n")
    return fingerprint


def load_order_model(path: Path) -> OrderModel:
    """The model of a checked file, fp32. Raises InputError as :func:`read_order_checkpoint`, or for other weights."""
    from safetensors.torch import load_file

    from dlmgrid.workers.drafting.order_model import OrderModel

    read_order_checkpoint(path)
    model = OrderModel()
    try:
        model.load_state_dict(load_file(str(path)))
    except RuntimeError as error:
        raise InputError(
            f"order model {path}: its weights do not fit this version; train it again"
        ) from error
    return model
