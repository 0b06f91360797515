"""Methods, benchmarks and checkpoints for tests of the driver: no model, no data set, nothing to download.

A model is a folder with a ``config.json``; a benchmark is ``letters`` or ``digits``, or a file
``DATA/<name>.jsonl`` of items whose documents may ask for faults (:mod:`dlmgrid.workers.testing.faults`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item, read_items


@dataclass(frozen=True, slots=True)
class FakeMethod:
    name: str
    title: str
    parameters: tuple[str, ...] = ()
    file_key: str = ""
    decoders: tuple[str, ...] = ("static", "threshold", "factor")


METHODS = {
    "none": FakeMethod("none", "draft-free"),
    "ssd": FakeMethod("ssd", "chain"),
    "confidence_tree": FakeMethod("confidence_tree", "tree"),
    "spiffy": FakeMethod("spiffy", "graph", ("graph",), "graph"),
    "spot": FakeMethod("spot", "learned", ("checkpoint",), "checkpoint"),
    "spot_gamma": FakeMethod("spot_gamma", "learned, floor", ("checkpoint", "gamma"), "checkpoint"),
}


@dataclass(frozen=True, slots=True)
class FakeBenchmark:
    name: str
    num_items: int = 12
    default_gen_length: int = 16
    max_fewshot: int = 0

    def prompt_version(self, num_fewshot: int) -> str:
        return f"{self.name}-fake-{num_fewshot}"

    def load(self, data: str | None, limit: int | None, num_fewshot: int) -> list[Item]:
        if data is None:
            items = [Item(item_id=f"{self.name}-{i}", prompt=f"item {i}") for i in range(self.num_items)]
        else:
            path = Path(data) / f"{self.name}.jsonl"
            if not path.exists():
                raise InputError(f"{path} is missing; put the benchmark's items there")
            items = list(read_items(path))
        return items[:limit]


_BENCHMARKS = {
    "letters": FakeBenchmark("letters"),
    "digits": FakeBenchmark("digits"),
    "many": FakeBenchmark("many", num_items=2000),
}


def benchmark_names() -> Sequence[str]:
    return list(_BENCHMARKS)


def get_benchmark(name: str) -> FakeBenchmark:
    return _BENCHMARKS[name]


@dataclass(frozen=True, slots=True)
class FakeShape:
    block_length: int
    max_position_embeddings: int
    family: str = "fake"
    num_hidden_layers: int = 4
    seeds_next_block: bool = False
    caches: tuple[str, ...] = ("block",)
    stop: str = "eos"
    confidence: str = "tempered"

    def published_decoder(self, variant: str | None = None) -> dict[str, Any]:
        if variant not in (None, "strict"):
            raise InputError(f"variant {variant!r} is not a published decoder; known: strict")
        if variant is None:
            return {"decoder": "static"}
        return {"decoder": "threshold", "threshold": 0.9, "comparison": "sdar"}


def resolve_checkpoint(name: str, revision: str) -> Path:
    folder = Path(name)
    if not (folder / "config.json").exists():
        raise InputError(f"model {name!r} has no checkpoint at {folder}; give the path of its folder")
    return folder


def check_checkpoint(folder: Path, block_length: int | None) -> FakeShape:
    config = json.loads((folder / "config.json").read_text())
    if block_length is not None and config["block_length"] % block_length:
        raise InputError(
            f"{folder}: block_length {block_length} does not fit a model of {config['block_length']}"
        )
    return FakeShape(**config)


def check_prompts(folder: Path, chat_template: str, items: Sequence[Item]) -> None:
    if chat_template not in ("", "chatml"):
        raise InputError(f"{folder}: chat_template {chat_template!r} is not one of chatml")


def weight_fingerprint(folder: Path) -> str:
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]


def write_fake_checkpoint(
    folder: Path,
    *,
    block_length: int = 32,
    max_position_embeddings: int = 512,
    seeds_next_block: bool = False,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shape: dict[str, Any] = {
        "block_length": block_length,
        "max_position_embeddings": max_position_embeddings,
        "seeds_next_block": seeds_next_block,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return folder
