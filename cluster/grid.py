"""The grid file: YAML, validated; an unknown key is an error that names the key, its place and the nearest
one.

    name: demo
    models: [reference]              # or {path: …, revision: …, dtype: bfloat16, block_length: 32}
    benchmarks: [words, {name: gsm8k, limit: 8, num_fewshot: 0, gen_length: 128}]
    temperatures: [0, 1]
    methods: [none, ssd, {name: confidence_tree, budgets: [8]}, {name: spot, checkpoint: order.safetensors}]
    budgets: [6, 12]
    decoder: [published, {name: threshold, threshold: 0.9}]    # left out: the model's published rule

``resources`` says where to run and never enters a cell key, nor does ``record``, what ``dlmgrid record`` keeps beyond
the steps; every other key does, or chooses what is run.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from dlmgrid.cluster.grid_text import parse_yaml
from dlmgrid.workers.cell import digest
from dlmgrid.workers.errors import InputError

MAX_BUDGET = 4096
MAX_ACTORS = 4096
MAX_CPUS_PER_ACTOR = 1024
MAX_GPUS_PER_ACTOR = 64

Budget = Annotated[int, Field(ge=0, le=MAX_BUDGET)]
Count = Annotated[int, Field(ge=1)]
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4
"""Bounds of a temperature that is not 0: within them logits / T and the noise keep their meaning in fp32."""


def _usable_temperature(value: float) -> float:
    if value != 0 and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        raise ValueError(
            f"temperature must be 0, or between {MIN_TEMPERATURE} and {MAX_TEMPERATURE:g} (found {value!r})"
        )
    return value


Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_usable_temperature)]
Name = Annotated[str, Field(min_length=1)]


class _Entry(BaseModel):
    """A mapping of the grid file: exact types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, values: Any) -> Any:
        if isinstance(values, dict):
            known = list(cls.model_fields)
            for key in values:
                if key not in known:
                    raise ValueError(f"unknown key {_shown(key)}; {_nearest(str(key), known)}")
        return values


class ModelEntry(_Entry):
    """A checkpoint: ``path`` is a folder or the name of a shipped or cached model; ``cache`` one of the kinds of
    key/value cache that its family has, by default the first (see ``dlmgrid models``)."""

    path: Name
    revision: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    block_length: Count | None = None
    chat_template: str = ""
    cache: Name | None = None


class BenchmarkEntry(_Entry):
    """A benchmark; ``limit`` takes its first items, ``gen_length`` is in tokens."""

    name: Name
    limit: Count | None = None
    num_fewshot: Annotated[int, Field(ge=0)] = 0
    gen_length: Count | None = None


Tau = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FoldEntry(_Entry):
    """SpecFold over a drafter: positions closer than ``tau`` to their parent reuse what it computed. ``tau`` is one
    number or one a layer; ``gate`` compares with the ``parent`` or its ``source``; ``recheck`` computes the walked
    nodes again unfolded, so that the output stays the serialized run's: in a pass of their own, or in the next round's
    (``pipelined``)."""

    tau: Tau | Annotated[list[Tau], Field(min_length=1)]
    gate: Literal["parent", "source"] = "parent"
    recheck: bool | Literal["pipelined"] = False

    @property
    def values(self) -> list[float]:
        return [float(value) for value in (self.tau if isinstance(self.tau, list) else [self.tau])]


class MethodEntry(_Entry):
    """A drafting method; its own ``budgets`` replace the grid's.

    ``checkpoint`` is an order or set model and ``graph`` a draft graph, or several of which each cell takes the one
    that was calibrated for it; ``gamma`` is SPOT-γ's floor on mass, ``product_tau`` that of product max-commit. Which
    of them a method takes is in the method catalog.
    """

    name: Name
    budgets: Annotated[list[Budget], Field(min_length=1)] | None = None
    checkpoint: Name | None = None
    graph: Annotated[list[Name], Field(min_length=1)] | None = None
    gamma: Annotated[float, Field(gt=0, le=1)] | None = None
    product_tau: Annotated[float, Field(gt=0, lt=1)] | None = None
    fold: FoldEntry | None = None

    @field_validator("graph", mode="before")
    @classmethod
    def _one_or_many_graphs(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _folds_drafts(self) -> MethodEntry:
        if self.fold is not None and self.product_tau is not None:
            raise ValueError("fold and product_tau do not go together; remove one of the two")
        if self.fold is not None and self.name == "none":
            raise ValueError("method none drafts nothing that could fold; remove fold")
        return self


DRAW_SETTINGS = ("confidence", "alg_temp", "top_p", "top_k", "eos_policy")
"""Keys of a decoder that say how tokens are drawn and positions rated."""


class DecoderEntry(_Entry):
    """The commit rule. ``published``, the default, is that of the model's reference implementation, or of the one
    that ``variant`` names. ``static`` commits a fixed number a step, ``sequential`` the leftmost, ``threshold`` all
    that are confident enough, ``factor`` as many as the confidences allow together, ``entropy_bounded`` as many as keep
    the sum of their entropies below ``threshold`` nats. ``commits_per_step`` is the number of a ``static`` or
    ``sequential`` step, and the least of a ``threshold`` step.

    ``llada`` and ``dream`` are the schedules of the models of these names, in ``steps`` steps a generation (by default
    one a token); they are for bidirectional models.

    ``confidence``: what is compared, the ``tempered`` probability of a token (the default), the ``plain`` one, or
    another of workers/decoding/sampling, where ``alg_temp``, ``top_p``, ``top_k`` and ``eos_policy`` are said too.
    ``sub_block_length``: sub-blocks of that many tokens are filled one after another.

    ``comparison`` names whose threshold comparison is meant: ``sdar`` c > τ (the default), ``fast_dllm`` c ≥ τ,
    ``dinfer`` c ≥ min(τ, max c - 1e-5). ``fused_commit`` makes a block's commit pass and the next block's first
    pass one. ``window`` lets drafts enter the next block (``cross_block``), drafts a block's first round
    (``refresh``), or both (``full``).
    """

    name: Literal[
        "published", "static", "sequential", "threshold", "factor", "entropy_bounded", "llada", "dream"
    ]
    variant: Name | None = None
    commits_per_step: Count = 1
    threshold: float | None = None
    comparison: Literal["sdar", "fast_dllm", "dinfer"] | None = None
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    steps: Count | None = None
    confidence: (
        Literal["tempered", "plain", "random", "maskgit_plus", "topk_margin", "entropy", "origin"] | None
    ) = None
    alg_temp: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None
    eos_policy: Literal["none", "logits_eos_inf", "confidence_eos_eot_inf"] | None = None
    sub_block_length: Count | None = None
    fused_commit: bool = False
    window: Literal["cross_block", "refresh", "full"] | None = None

    @field_validator("comparison", mode="before")
    @classmethod
    def _is_confidence_ordered(cls, value: Any) -> Any:
        if value == "jetengine":
            raise ValueError(
                "jetengine opens the leftmost positions where too few pass, which is not confidence-ordered "
                "decoding; use sdar, which has the same comparison"
            )
        return value

    @model_validator(mode="after")
    def _belongs_together(self) -> DecoderEntry:
        if self.name != "published" and self.variant is not None:
            raise ValueError("variant belongs to the published decoder; remove it or name that decoder")
        if self.name == "published":
            for name in (*DRAW_SETTINGS, "sub_block_length"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"the published decoder has its own {name}; remove it or name another decoder"
                    )
        if self.name not in ("published", "llada", "dream") and self.steps is not None:
            raise ValueError("steps belongs to the decoders llada and dream; remove it or name one of them")
        if self.confidence == "origin" and self.name != "dream":
            raise ValueError("confidence: origin opens positions by dream's schedule; name that decoder")
        if self.name in ("threshold", "factor"):
            if self.confidence in ("random", "topk_margin", "entropy"):
                raise ValueError(
                    f"the {self.name} decoder compares probabilities, confidence {self.confidence} is none; use "
                    "tempered, plain or maskgit_plus"
                )
            if self.alg_temp:
                raise ValueError(f"the {self.name} decoder compares probabilities; remove alg_temp")
        if self.name == "entropy_bounded":
            for name in ("confidence", "alg_temp"):
                if getattr(self, name) is not None:
                    raise ValueError(f"the entropy_bounded decoder compares entropies; remove {name}")
        if self.name not in ("static", "sequential", "threshold") and self.commits_per_step != 1:
            raise ValueError(
                "commits_per_step belongs to the decoders static, sequential and threshold; remove it"
            )
        if self.name == "factor" and self.factor is None:
            raise ValueError("the factor decoder needs a factor; add factor: 1.0")
        if self.name != "factor" and self.factor is not None:
            raise ValueError("factor belongs to the factor decoder; remove it or name that decoder")
        if self.name != "threshold" and self.comparison is not None:
            raise ValueError("comparison belongs to the threshold decoder; remove it or name that decoder")
        if self.name == "threshold":
            if self.threshold is None or not 0 < self.threshold < 1:
                raise ValueError(f"threshold must lie strictly between 0 and 1 (found {self.threshold!r})")
        elif self.name == "entropy_bounded":
            if self.threshold is None or not 0 < self.threshold < math.inf:
                raise ValueError(
                    f"threshold, the bound of the entropies in nats, must be above 0 (found {self.threshold!r})"
                )
        elif self.threshold is not None:
            raise ValueError(
                "threshold belongs to the decoders threshold and entropy_bounded; remove it or name one of them"
            )
        return self


Bound = Annotated[float, Field(ge=1, allow_inf_nan=False)]
"""A limit on a wait, in seconds: under a second no actor answers, and a wait without end tells nobody."""


class Resources(_Entry):
    """Where to run. ``num_actors`` left out: one per free slot of the cluster, as far as there is work. ``drafts``:
    where the trees of methods grow that can grow them beside the target; tokens are the same. Left out: on the GPU
    with ``kernels: triton``, where that is several times faster.

    ``wait_seconds`` bounds the wait for a first actor, ``unit_seconds`` one call before its actor is
    replaced.
    """

    num_actors: Annotated[int, Field(ge=1, le=MAX_ACTORS)] | None = None
    cpus_per_actor: Annotated[int, Field(ge=1, le=MAX_CPUS_PER_ACTOR)] = 1
    gpus_per_actor: Annotated[float, Field(ge=0, le=MAX_GPUS_PER_ACTOR)] | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    drafts: Literal["host", "device"] | None = None
    wait_seconds: Bound = 600
    unit_seconds: Bound = 7200
    items_per_unit: Count | None = None

    @model_validator(mode="after")
    def _device_has_gpus(self) -> Resources:
        if self.device == "cuda" and self.gpus_per_actor == 0:
            raise ValueError("device: cuda needs gpus_per_actor above 0")
        if self.device == "cpu" and self.gpus_per_actor:
            raise ValueError("gpus_per_actor needs device: cuda")
        return self

    @property
    def num_gpus(self) -> float:
        """GPUs that one actor asks for."""
        if self.gpus_per_actor is not None:
            return self.gpus_per_actor
        return 1.0 if self.device == "cuda" else 0.0


class Grid(_Entry):
    """A whole grid file. Lists are axes: the grid is their product."""

    name: Name
    models: Annotated[list[ModelEntry], Field(min_length=1)]
    benchmarks: Annotated[list[BenchmarkEntry], Field(min_length=1)]
    temperatures: Annotated[list[Temperature], Field(min_length=1)]
    methods: Annotated[list[MethodEntry], Field(min_length=1)]
    budgets: Annotated[list[Budget], Field(min_length=1)] | None = None
    decoder: Annotated[list[DecoderEntry], Field(min_length=1)] = [DecoderEntry(name="published")]
    verification: Literal["coupled", "uncoupled", "greedy_match"] = "coupled"
    noise: Literal["commit_count", "per_position"] = "commit_count"
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    repeats: Count = 1
    gen_length: Count | None = None
    limit: Count | None = None
    stop: Literal["eos", "full"] | None = None
    record: list[Literal["window", "hidden"]] = []
    numerics: Literal["exact", "fast"] = "exact"
    kernels: Literal["torch", "triton"] = "torch"
    max_in_flight: Annotated[int, Field(ge=1, le=MAX_BUDGET)] = 8
    resources: Resources = Resources()

    @field_validator("models", mode="before")
    @classmethod
    def _models_by_path(cls, values: Any) -> Any:
        return _spell_out(values, "path")

    @field_validator("benchmarks", "methods", mode="before")
    @classmethod
    def _entries_by_name(cls, values: Any) -> Any:
        return _spell_out(values, "name")

    @field_validator("record", mode="before")
    @classmethod
    def _one_or_many_records(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("decoder", mode="before")
    @classmethod
    def _one_or_many(cls, values: Any) -> Any:
        return _spell_out(values if isinstance(values, list) else [values], "name")

    @property
    def draft_place(self) -> str:
        """Where trees grow that can grow beside the target, ``host`` or ``device``."""
        if self.resources.drafts is not None:
            return self.resources.drafts
        return "device" if self.kernels == "triton" and self.resources.device == "cuda" else "host"

    @model_validator(mode="after")
    def _fits_together(self) -> Grid:
        for method in self.methods:
            if method.name != "none" and method.budgets is None and self.budgets is None:
                raise ValueError(f"method {method.name!r} needs budgets; add budgets: [8] to the grid")
        if self.numerics == "exact" and self.resources.device == "cuda" and self.kernels == "torch":
            raise ValueError(
                "numerics: exact on a GPU needs kernels: triton (the torch twins fix their bits on the CPU only); "
                "or use numerics: fast, whose rows are compared as well"
            )
        if self.resources.drafts == "device" and self.kernels != "triton":
            raise ValueError(
                "resources: drafts: device needs kernels: triton; other kernels keep all of a decoder on one device"
            )
        has_folds = any(method.fold is not None for method in self.methods)
        if has_folds and any(decoder.window for decoder in self.decoder):
            raise ValueError(
                "fold and window do not go together; put the folded methods into a grid of their own"
            )
        return self

    @property
    def digest(self) -> str:
        """24 hexadecimal digits of everything in the file but ``resources`` and ``record``."""
        return digest(self.model_dump(exclude={"resources", "record"}))


@dataclass(frozen=True, kw_only=True, slots=True)
class GridFile:
    """A grid and the text it was read from."""

    grid: Grid
    text: str
    path: Path


def read_grid(path: Path) -> GridFile:
    """Read and validate a grid file. Raises InputError, one line, for anything wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such grid file; see jobs/grids/ for examples") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the grid file cannot be read ({error})") from error
    return GridFile(grid=parse_grid(text, str(path)), text=text, path=path)


def parse_grid(text: str, origin: str) -> Grid:
    """Validate the text of a grid file; ``origin`` names it in errors. Raises InputError."""
    values = parse_yaml(text, origin)
    if not isinstance(values, dict):
        raise InputError(
            f"{origin}: the grid is empty or not a mapping; start with name:, models:, benchmarks:"
        )
    try:
        return Grid.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{origin}: {_first_error(error)}") from error


def _spell_out(values: Any, key: str) -> Any:
    if not isinstance(values, list):
        return values
    return [{key: value} if isinstance(value, str) else value for value in values]


def nearest_name(name: str, known: Sequence[str]) -> str:
    """``did you mean 'x'?``, or the list of what is known."""
    return _nearest(name, known)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _first_error(error: ValidationError) -> str:
    """One line for the first thing wrong: its place in the file, what was found, what is allowed."""
    first = error.errors(include_url=False)[0]
    kind, found = first["type"], first["input"]
    place = ""
    for part in first["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
        if part in _EITHER and part != first["loc"][-1]:  # what follows names the form that was tried first
            return f"{place}: should be {_EITHER[str(part)]} (found {_shown(found)})"
    limits = first.get("ctx", {})
    if kind == "missing":
        return f"{place}: missing; add it to the grid"
    if kind == "too_short":
        return f"{place}: the list is empty; name at least one"
    if place.endswith("]") and "budgets[" in place and kind in ("greater_than_equal", "less_than_equal"):
        return (
            f"{place}: budget {found} is impossible; the number of drafted nodes a round is 0 to {MAX_BUDGET}"
        )
    if kind == "literal_error":
        return f"{place}: {_shown(found)} is not one of {limits['expected']}"
    if kind == "model_type":
        return f"{place}: should be a mapping of keys to values{_or_name(place)} (found {_shown(found)})"
    if kind in ("int_type", "float_type") and isinstance(found, str) and _EXPONENT.fullmatch(found):
        return f"{place}: YAML reads {found} as text; write {_as_yaml_number(found, kind)}"
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if kind == "value_error":
        return f"{place}: {message}" if place else message
    return f"{place}: {message[0].lower()}{message[1:]} (found {_shown(found)})"


_EITHER = {
    "tau": "a number of at least 0, or a list of one for each layer",
    "recheck": "true, false or pipelined",
}
"""What a key may be that takes values of several forms."""

_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]{1,3}")
"""Numbers that YAML 1.2 reads as such and YAML 1.1 as text, for want of a point or of the exponent's sign."""

_NAMED = ("models", "benchmarks", "methods", "decoder")
"""Lists whose entries may be a bare name."""


def _as_yaml_number(text: str, kind: str) -> str:
    """The same number as YAML 1.1 wants it: whole where an integer is due and it is one, else with point and
    signed exponent."""
    value = float(text)
    if kind == "int_type" and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    mantissa, _, exponent = text.lower().partition("e")
    point = "" if "." in mantissa else ".0"
    sign = "" if exponent[0] in "+-" else "+"
    return f"{mantissa}{point}e{sign}{exponent}"


def _or_name(place: str) -> str:
    return ", or a name" if place.partition("[")[0] in _NAMED else ""


def _shown(found: Any) -> str:
    """What stands in the file, cut to a line whatever it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(found)
