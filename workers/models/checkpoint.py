"""Reading a checkpoint folder: its settings, and whether its files hold what the model needs.

Everything but :func:`stream_tensors` works without torch and reads headers only, so a grid is refused for a
missing or truncated checkpoint in seconds, on a machine without a GPU, before any model loads. Errors name
the file, the tensor, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.config import KEY_TILE, ConfigFile, ModelConfig, check_block_length, check_ids
from dlmgrid.workers.models.families import family_of, get_family
from dlmgrid.workers.models.layout import expected_tensors
from dlmgrid.workers.models.shards import (
    INDEX_FILE,
    SINGLE_FILE,
    TensorEntry,
    existing_folder,
    read_entries,
    read_json,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "KEY_TILE",
    "ModelConfig",
    "check_block_length",
    "check_checkpoint",
    "expected_tensors",
    "read_config",
    "stream_tensors",
]


def read_config(folder: Path | str, block_length: int | None = None) -> ModelConfig:
    """Read config.json, generation_config.json and the tensor names of a checkpoint folder.

    ``block_length`` overrides the checkpoint's own. Raises InputError for a missing folder or file, broken
    JSON, an unknown family, a missing or impossible value, and settings the forward pass does not implement.
    """
    folder = existing_folder(folder)
    values = read_json(folder / "config.json")
    family = family_of(folder / "config.json", values.get("model_type"))
    config = family.read(ConfigFile(folder, values, block_length))
    check_ids(folder / "config.json", config)
    return config


def check_checkpoint(folder: Path | str, block_length: int | None = None) -> ModelConfig:
    """Check a checkpoint folder whole, without torch and without reading its weights.

    Every expected tensor is in the header it should be in, with its shape, and no other; every shard is there
    with the size its header says; special ids fit the vocabulary and the tokenizer knows the mask id. Raises
    InputError for the first fault.
    """
    from dlmgrid.workers.models.vocabulary import check_vocabulary

    folder = existing_folder(folder)
    config = read_config(folder, block_length)
    found = {entry.name: entry for entry in read_entries(folder)}
    expected = expected_tensors(config)
    where = folder / (INDEX_FILE if (folder / INDEX_FILE).exists() else SINGLE_FILE)
    tied = config.tie_word_embeddings
    family = get_family(config.family)
    names, tying = family.tensor_names, family.tying_key
    head = names["head"]
    if not tied and head not in found and names["embedding"] in found:
        raise InputError(
            f"{where}: tensor {head} is missing, expected {list(expected[head])} since "
            f"{folder / 'config.json'} says {tying} false; set it to true if the head "
            "is the embedding"
        )
    if tied and head in found:
        raise InputError(
            f"{found[head].file}: found tensor {head}, expected none since "
            f"{folder / 'config.json'} says {tying} true; set it to false to use this head"
        )
    for name, shape in expected.items():
        entry = found.get(name)
        if entry is None:
            raise InputError(f"{where}: tensor {name} is missing, expected shape {list(shape)}")
        if entry.shape != shape:
            raise InputError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}, expected {list(shape)}"
            )
        if entry.dtype not in ("F32", "BF16", "F16"):
            raise InputError(f"{entry.file}: tensor {name} has type {entry.dtype}, expected F32, BF16 or F16")
    extra = sorted(found.keys() - expected.keys())
    if extra:
        raise InputError(
            f"{found[extra[0]].file}: tensor {extra[0]} is not part of a {config.family} model with "
            f"{config.num_hidden_layers} layers ({len(extra)} such); expected the names of config.json's "
            "geometry"
        )
    check_vocabulary(folder, config)
    return config


def stream_tensors(folder: Path | str, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder in its stored type, shard by shard and one at a time onto ``device``: the host holds
    no more than the largest. Raises InputError for a file that ends early or a type that torch has not."""
    for entry in sorted(read_entries(folder), key=lambda entry: (entry.file, entry.start)):
        yield entry.name, _read_tensor(entry).to(device)


def read_embedding(folder: Path | str) -> Tensor:
    """The embedding matrix [V, H] of a checkpoint, in its stored type. Raises InputError where none is found."""
    for entry in read_entries(folder):
        if entry.name.endswith(("embed_tokens.weight", "word_embeddings.weight", "wte.weight")):
            return _read_tensor(entry)
    raise InputError(f"{folder}: no embedding matrix is found, so candidates cannot be embedded")


def _read_tensor(entry: TensorEntry) -> Tensor:
    import torch

    values = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.start)
        into = values.numpy().data
        while len(into):  # one read gives two gigabytes at most
            count = file.readinto(into)
            if not count:
                raise InputError(f"{entry.file}: ends within tensor {entry.name}; download it again")
            into = into[count:]
    return values.view(getattr(torch, _TORCH_TYPES[entry.dtype])).reshape(entry.shape)


_TORCH_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
