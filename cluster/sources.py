"""Where the names of a grid are looked up: methods, benchmarks, checkpoints. Torch-free.

:func:`installed_sources` gives the product's own catalogs; tests of the driver give fakes of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dlmgrid.workers.items import Item


class MethodInfo(Protocol):
    """What the grid needs to know of a drafting method."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def parameters(self) -> tuple[str, ...]: ...

    @property
    def file_key(self) -> str: ...

    @property
    def decoders(self) -> tuple[str, ...]: ...


class Benchmark(Protocol):
    """What the grid needs to know of a benchmark."""

    @property
    def name(self) -> str: ...

    @property
    def default_gen_length(self) -> int: ...

    @property
    def max_fewshot(self) -> int: ...

    def prompt_version(self, num_fewshot: int) -> str: ...

    def load(self, data: str | None, limit: int | None, num_fewshot: int) -> list[Item]: ...


class ModelShape(Protocol):
    """What the grid needs to know of a checkpoint, read from its headers."""

    @property
    def family(self) -> str: ...

    @property
    def block_length(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def seeds_next_block(self) -> bool: ...

    @property
    def caches(self) -> tuple[str, ...]: ...

    @property
    def stop(self) -> str: ...

    @property
    def confidence(self) -> str: ...

    def published_decoder(self, variant: str | None = None) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Look-ups that raise InputError naming what is unknown or missing and the remedy.

    ``check_checkpoint`` takes the folder and the grid's block length (None: the checkpoint's own) and reads
    headers only; ``weight_fingerprint`` reads every weight, so the driver has a worker do it;
    ``check_prompts`` takes the folder, the grid's chat template ("": the checkpoint's own) and items to try.
    """

    methods: Mapping[str, MethodInfo]
    benchmark_names: Callable[[], Sequence[str]]
    get_benchmark: Callable[[str], Benchmark]
    resolve_checkpoint: Callable[[str, str], Path]
    check_checkpoint: Callable[[Path, int | None], ModelShape]
    weight_fingerprint: Callable[[Path], str]
    check_prompts: Callable[[Path, str, Sequence[Item]], None]


def installed_sources() -> Sources:
    """The catalogs of this package."""
    from dlmgrid.workers.benchmarks.catalog import benchmark_names, get_benchmark
    from dlmgrid.workers.drafting.catalog import METHODS
    from dlmgrid.workers.models.catalog import resolve_checkpoint
    from dlmgrid.workers.models.checkpoint import check_checkpoint
    from dlmgrid.workers.models.fingerprint import weight_fingerprint
    from dlmgrid.workers.tokenization import check_prompts

    methods: Mapping[str, Any] = METHODS
    return Sources(
        methods=methods,
        benchmark_names=benchmark_names,
        get_benchmark=get_benchmark,
        resolve_checkpoint=resolve_checkpoint,
        check_checkpoint=check_checkpoint,
        weight_fingerprint=weight_fingerprint,
        check_prompts=check_prompts,
    )
