"""The token ids a checkpoint's tokenizer files define, read without loading a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.shards import read_json

if TYPE_CHECKING:
    from dlmgrid.workers.models.checkpoint import ModelConfig


def read_token_ids(folder: Path) -> tuple[Path, set[int]]:
    """The file that holds the vocabulary and all ids that it and the files of added tokens define.

    A folder has tokenizer.json, or vocab.json with merges.txt (SDAR as published). Raises InputError where
    both are missing or a file cannot be read.
    """
    path = folder / "tokenizer.json"
    if path.exists():
        values = read_json(path)
        model = values.get("model", {})
        vocabulary = model.get("vocab", {})
        ids = set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
        ids |= {token["id"] for token in values.get("added_tokens", [])}
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        path = folder / "vocab.json"
        ids = set(read_json(path).values())
    else:
        raise InputError(
            f"{folder}: no tokenizer.json (nor vocab.json with merges.txt); download the tokenizer"
        )
    added = folder / "added_tokens.json"
    if added.exists():
        ids |= set(read_json(added).values())
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        ids |= {int(token) for token in read_json(settings).get("added_tokens_decoder", {})}
    if not ids:
        raise InputError(f"{path}: the tokenizer defines no tokens")
    return path, ids


def named_mask_tokens(folder: Path) -> dict[str, int]:
    """Added tokens whose text says that they are the mask, with their ids; empty where a tokenizer names none.

    SDAR's files spell the token in two ways for one id, so the text is not compared with anything.
    """
    found: dict[str, int] = {}
    path = folder / "tokenizer.json"
    if path.exists():
        found |= {
            str(token["content"]): int(token["id"]) for token in read_json(path).get("added_tokens", [])
        }
    if (folder / "added_tokens.json").exists():
        found |= {str(text): int(token) for text, token in read_json(folder / "added_tokens.json").items()}
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        decoder = read_json(settings).get("added_tokens_decoder", {})
        found |= {str(entry["content"]): int(token) for token, entry in decoder.items()}
    return {text: token for text, token in found.items() if "mask" in text.lower()}


def check_vocabulary(folder: Path, config: ModelConfig) -> None:
    """Raise InputError where the tokenizer is not one for this model."""
    path, ids = read_token_ids(folder)
    if max(ids) >= config.vocab_size:
        raise InputError(
            f"{path}: the tokenizer has ids up to {max(ids)}, the model's vocabulary is {config.vocab_size}; "
            "it is another model's tokenizer"
        )
    wanted = [("mask_token_id", config.mask_token_id)]
    wanted += [("stop token id", token) for token in config.stop_token_ids]
    for name, token in wanted:
        if token not in ids:
            raise InputError(f"{path}: {name} {token} of {folder / 'config.json'} is not in the tokenizer")
    masks = named_mask_tokens(folder)
    if masks and config.mask_token_id not in masks.values():
        named = ", ".join(f"{text} {token}" for text, token in sorted(masks.items()))
        raise InputError(
            f"{folder / 'config.json'}: mask_token_id is {config.mask_token_id}, the tokenizer's mask is {named}; "
            "with another id the model never saw a mask"
        )
