"""The file of a set model: one safetensors file whose header names its format, its target and its sizes.

    CKPT.safetensors   weights (the candidate table in fp16); metadata key dlmgrid: format, target, shape and card
    CKPT.json          the card with the fingerprint, for people

Reading header and fingerprint needs no torch; only :func:`load_set_model` does.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlmgrid.workers.drafting.checkpoint_header import HEADER, read_header
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import partial_path, publish, write_whole

if TYPE_CHECKING:
    from dlmgrid.workers.drafting.set_model import SetModel

FORMAT = "dlmgrid-set-model-2"
"""Names architecture and inputs: 1 had another network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetCheckpoint:
    """A checked file. ``target`` is the weight fingerprint of the model whose tokens it reads."""

    path: Path
    fingerprint: str
    target: str
    shape: dict[str, int]
    card: dict[str, Any]

    @property
    def records(self) -> tuple[str, ...]:
        """What a recording must hold beyond its steps for a replay with this model."""
        return ("hidden",) if self.shape.get("hidden_size") else ()


def read_set_checkpoint(path: Path) -> SetCheckpoint:
    """Check a file by its header. Raises InputError for a missing, damaged or foreign one."""
    header = read_header(
        path, "set model", (FORMAT,), needs=("card", "shape", "target"), make_it="dlmgrid train-sets TRAJ"
    )
    fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()[:24]
    return SetCheckpoint(
        path=path,
        fingerprint=fingerprint,
        target=header["target"],
        shape=header["shape"],
        card=header["card"],
    )


def save_set_model(path: Path, model: SetModel, *, target: str, card: dict[str, Any]) -> str:
    """Write the model, and the card beside it, each whole; returns the fingerprint."""
    from safetensors.torch import save_file

    tensors = {
        name: (value.detach().half() if name == "table" else value.detach().float()).cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    header = {"format": FORMAT, "target": target, "shape": asdict(model.shape), "card": card}
    partial = partial_path(path)
    save_file(tensors, str(partial), metadata={HEADER: json.dumps(header, sort_keys=True)})
    publish(partial, path)
    fingerprint = read_set_checkpoint(path).fingerprint
    text = json.dumps({"fingerprint": fingerprint, **header}, indent=1, sort_keys=True)
    write_whole(path.with_suffix(".json"), text + "\n")
    return fingerprint


def load_set_model(path: Path) -> SetModel:
    """The model of a checked file, fp32. Raises InputError as :func:`read_set_checkpoint`, or for other weights."""
    from safetensors.torch import load_file

    from dlmgrid.workers.drafting.set_model import SetModel, SetShape

    found = read_set_checkpoint(path)
    tensors = load_file(str(path))
    try:
        model = SetModel(SetShape(**found.shape))
        model.load_state_dict(tensors)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"set model {path}: its weights do not fit this version; train it again") from error
    return model
