"""From a grid to its cells: names looked up, checkpoints and data checked, references added, duplicates
folded.

Everything here runs on the driver before any model loads; only headers of checkpoints are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlmgrid.cluster.decoder_settings import check_canvas, check_canvas_kernels, decoder_settings
from dlmgrid.cluster.grid import (
    BenchmarkEntry,
    DecoderEntry,
    Grid,
    MethodEntry,
    ModelEntry,
    nearest_name,
)
from dlmgrid.cluster.sources import Benchmark, ModelShape, Sources
from dlmgrid.workers.cell import (
    SCHEDULES,
    Cell,
    digest,
)
from dlmgrid.workers.drafting.catalog import ALL_METHODS, DIAGNOSTIC_METHODS, get_method
from dlmgrid.workers.drafting.drafter_file import DrafterFile, find_drafter_file, misfit, stored_drafter
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item
from dlmgrid.workers.units import Key

MAX_BLOCK = 2**31 - 1

MAX_CELLS = 10_000
MAX_ROWS = 2_000_000
"""Bounds of one grid: what one driver plans and holds in a minute and a few gigabytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A checkpoint of the grid, found and checked by its headers."""

    entry: ModelEntry
    folder: Path
    shape: ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """The items of one benchmark in one prompt form."""

    entry: BenchmarkEntry
    prompt_version: str
    gen_length: int
    items: tuple[Item, ...]

    @property
    def file_name(self) -> str:
        """The file in ``OUT/inputs`` that holds these items; the digest is that of the prompt form."""
        form = digest([self.entry.name, self.prompt_version, self.entry.num_fewshot])
        return f"{self.entry.name.replace('/', '_')}-{form[:12]}.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class CellWork:
    """A canonical cell with what is to be generated in it.

    ``drafter_path`` is where the output folder keeps the drafter's file, ``drafter_source`` the file that the grid
    names; both "" where the method has none. ``default_block_length`` is the model's, where the grid names none.
    """

    cell: Cell
    checkpoint: str
    inputs: str
    keys: tuple[Key, ...]
    drafter_path: str = ""
    drafter_source: str = ""
    default_block_length: int = 0


@contextmanager
def naming(place: str) -> Iterator[None]:
    """An InputError raised inside says where: ``place`` (a file, or a key of it) is put before its text."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def check_methods(grid: Grid, sources: Sources) -> None:
    """Raises InputError for a method that does not exist, not in a live run, with other parameters than it
    takes."""
    for index, method in enumerate(grid.methods):
        with naming(f"methods[{index}]"):
            _check_method(method, sources)


def _check_method(method: MethodEntry, sources: Sources) -> None:
    if method.name not in sources.methods:
        if method.name in DIAGNOSTIC_METHODS:
            raise InputError(
                f"method {method.name!r} looks ahead, so it exists in replay only; use dlmgrid replay"
            )
        known = list(sources.methods)
        raise InputError(f"method {method.name!r} does not exist; {nearest_name(method.name, known)}")
    takes = sources.methods[method.name].parameters
    for name in ("checkpoint", "graph", "gamma", "product_tau"):
        is_given = getattr(method, name) is not None
        if is_given and name not in takes:
            raise InputError(f"method {method.name!r} takes no {name}; remove it")
        if name in takes and not is_given:
            raise InputError(
                f"method {method.name!r} needs {name}; see dlmgrid methods {method.name} for how to make one"
            )


def check_size(grid: Grid, num_items: Sequence[int] | None = None) -> None:
    """Raises InputError for a grid of more cells or rows than one run can plan.

    ``num_items`` counts the items of each benchmark; None, before they are loaded: cells only.
    """
    budgets = sum(
        1 if method.name == "none" else len(method.budgets or grid.budgets or [0]) for method in grid.methods
    )
    per_benchmark = len(grid.models) * len(grid.decoder) * len(grid.temperatures) * budgets
    num_cells = per_benchmark * len(grid.benchmarks)
    if num_cells > MAX_CELLS:
        raise InputError(
            f"the grid has {num_cells:,} cells; one run takes {MAX_CELLS:,}, split it into several grids"
        )
    at_least = "at least " if num_items is None else ""
    num_rows = per_benchmark * grid.repeats * sum(num_items or [1] * len(grid.benchmarks))
    if num_rows > MAX_ROWS:
        raise InputError(
            f"the grid has {at_least}{num_rows:,} rows ({num_cells:,} cells, {grid.repeats:,} repeats); one run takes "
            f"{MAX_ROWS:,}, lower repeats or limit, or split it into several grids"
        )


def find_models(grid: Grid, sources: Sources) -> list[Model]:
    """Find every checkpoint and check its headers. Raises InputError for a missing or unfit one."""
    models = []
    for index, entry in enumerate(grid.models):
        with naming(f"models[{index}]"):
            models.append(_find_model(entry, grid.decoder, sources))
    return models


def find_benchmark(entry: BenchmarkEntry, sources: Sources) -> Benchmark:
    """The benchmark that an entry names. Raises InputError for an unknown one."""
    names = list(sources.benchmark_names())
    if entry.name not in names:
        raise InputError(f"benchmark {entry.name!r} does not exist; {nearest_name(entry.name, names)}")
    return sources.get_benchmark(entry.name)


def _find_model(entry: ModelEntry, decoders: Sequence[DecoderEntry], sources: Sources) -> Model:
    folder = sources.resolve_checkpoint(entry.path, entry.revision).absolute()
    shape = sources.check_checkpoint(folder, entry.block_length)
    block_length = entry.block_length or shape.block_length or MAX_BLOCK
    cache = entry.cache or shape.caches[0]
    if cache not in shape.caches:
        raise InputError(
            f"model {entry.path!r}: cache {cache!r} is not one of {', '.join(shape.caches)}, which its family has"
        )
    for decoder in decoders:
        settings = decoder_settings(decoder, shape)
        sub_block = settings.get("sub_block_length") or block_length
        if block_length % sub_block:
            raise InputError(
                f"model {entry.path!r}: sub_block_length {sub_block} does not divide its block of {block_length} tokens"
            )
        if decoder.commits_per_step > block_length:
            raise InputError(
                f"model {entry.path!r}: commits_per_step {decoder.commits_per_step} is more than its block "
                f"of {block_length} tokens; lower it"
            )
        if shape.seeds_next_block:
            for name in ("fused_commit", "window"):
                if getattr(decoder, name):
                    raise InputError(
                        f"model {entry.path!r}: its commit pass gives the first token of the next block, so a block "
                        f"cannot begin before it; remove {name}"
                    )
    return Model(entry=entry, folder=folder, shape=shape)


def load_questions(grid: Grid, sources: Sources, data: str | None, limit: int | None) -> list[Questions]:
    """Load the items of every benchmark; ``limit`` caps each. Raises InputError for an unknown benchmark,
    missing data, or item ids given twice."""
    loaded = []
    for index, entry in enumerate(grid.benchmarks):
        limits = [bound for bound in (entry.limit or grid.limit, limit) if bound is not None]
        with naming(f"benchmarks[{index}]"):
            loaded.append(_load(entry, grid.gen_length, sources, data, min(limits, default=None)))
    return loaded


def _load(
    entry: BenchmarkEntry, gen_length: int | None, sources: Sources, data: str | None, limit: int | None
) -> Questions:
    benchmark = find_benchmark(entry, sources)
    if entry.num_fewshot > benchmark.max_fewshot:
        raise InputError(
            f"benchmark {entry.name!r}: num_fewshot {entry.num_fewshot} is more than the "
            f"{benchmark.max_fewshot} examples it has; lower it"
        )
    items = benchmark.load(data, limit, entry.num_fewshot)
    if not items:
        raise InputError(f"benchmark {entry.name!r} has no items; check its data source")
    if len({item.item_id for item in items}) != len(items):
        raise InputError(f"benchmark {entry.name!r} gives an item id twice; mend its data")
    return Questions(
        entry=entry,
        prompt_version=benchmark.prompt_version(entry.num_fewshot),
        gen_length=entry.gen_length or gen_length or benchmark.default_gen_length,
        items=tuple(items),
    )


def check_prompts(models: Sequence[Model], questions: Sequence[Questions], sources: Sources) -> None:
    """Render and encode one item of every benchmark for every model. Raises InputError for a chat template that is
    unknown, broken or missing, and for a tokenizer that cannot be loaded."""
    items = [asked.items[0] for asked in questions]
    for index, model in enumerate(models):
        with naming(f"models[{index}]"):
            sources.check_prompts(model.folder, model.entry.chat_template, items)


def _fold_fields(method: MethodEntry) -> dict[str, Any]:
    """The cell's fields for what a method's entry says of folding."""
    fold = method.fold
    if fold is None:
        return {}
    values = fold.values
    return {
        "fold_tau": max(values),
        "fold_tau_by_layer": ",".join(map(str, values)) if len(values) > 1 else "",
        "fold_gate": fold.gate,
        "fold_recheck": bool(fold.recheck),
        "fold_pipelined": fold.recheck == "pipelined",
    }


def _check_taus(grid: Grid, model: Model) -> None:
    """Raises InputError for a fold whose list of thresholds is not one a layer of the model."""
    for method in grid.methods:
        if method.fold is None or not isinstance(method.fold.tau, list):
            continue
        count = len(method.fold.tau)
        if count != model.shape.num_hidden_layers:
            raise InputError(
                f"method {method.name!r}: fold: tau has {count} value{'s' * (count != 1)}, model "
                f"{model.entry.path!r} has {model.shape.num_hidden_layers} layers; give one number, or one a layer"
            )


def make_cells(
    grid: Grid, models: list[Model], questions: list[Questions], fingerprints: Mapping[str, str], inputs: Path
) -> list[CellWork]:
    """Every cell of the grid, canonical and once, each reference before the cells compared with it.

    ``fingerprints`` maps a checkpoint folder to what identifies its weights ("" where not computed yet);
    ``inputs`` is the folder of the item files, ``drafters`` beside it that of the drafters' files. Raises InputError
    where a length does not fit a model, or a drafter's file is missing or does not fit a cell.
    """
    for model in models:
        for asked in questions:
            with naming(f"model {model.entry.path!r} on benchmark {asked.entry.name!r}"):
                check_canvas_kernels(grid, model.shape)
                for decoder in grid.decoder:
                    check_canvas(model.entry, model.shape, decoder, asked.gen_length)
    for model in models:
        _check_taus(grid, model)
    works: dict[str, CellWork] = {}
    drafters = [find_drafters(method) for method in grid.methods]
    for model in models:
        for asked in questions:
            if asked.gen_length > model.shape.max_position_embeddings:
                raise InputError(
                    f"gen_length {asked.gen_length} of benchmark {asked.entry.name!r} is more than the "
                    f"{model.shape.max_position_embeddings} positions of model {model.entry.path!r}; lower it"
                )
            keys = tuple(Key(item.item_id, repeat) for item in asked.items for repeat in range(grid.repeats))
            for decoder in grid.decoder:
                for cell, drafter in _cells(
                    grid, model, asked, decoder, fingerprints[str(model.folder)], drafters
                ):
                    for wanted in (cell.reference(), cell.canonical()):
                        found = works.get(wanted.cell_key)
                        if found is None:
                            has_drafter = drafter is not None and bool(wanted.drafter_fingerprint)
                            works[wanted.cell_key] = CellWork(
                                cell=wanted,
                                checkpoint=str(model.folder),
                                inputs=str(inputs / asked.file_name),
                                keys=keys,
                                drafter_path=stored_drafter(inputs.parent / "drafters", wanted),
                                drafter_source=str(drafter.path) if drafter and has_drafter else "",
                                default_block_length=model.shape.block_length,
                            )
                        elif len(keys) > len(found.keys):
                            works[wanted.cell_key] = replace(found, keys=keys)
    return list(works.values())


def find_drafters(entry: MethodEntry) -> list[DrafterFile]:
    """The checked files that a method of the grid names."""
    names = entry.graph or [name for name in (entry.checkpoint,) if name is not None]
    return [find_drafter_file(get_method(entry.name), name) for name in names]


def with_drafter(cell: Cell, files: list[DrafterFile]) -> tuple[Cell, DrafterFile | None]:
    """The cell as drafted by the one of ``files`` that fits it; unchanged where there are none, or nothing to draft.

    Raises InputError where none fits, or more than one.
    """
    if not files or cell.budget == 0:
        return cell, None
    drafter = _choose_drafter(cell, files)
    return replace(cell, drafter_fingerprint=drafter.fingerprint), drafter


def _choose_drafter(cell: Cell, files: list[DrafterFile]) -> DrafterFile:
    """The one of ``files`` that was made for ``cell``. Raises InputError where there is none, or more than one."""
    misfits = {file.path: misfit(file, cell) for file in files}
    fitting = [file for file in files if misfits[file.path] is None]
    if not fitting:
        reasons = "; ".join(str(reason) for reason in misfits.values())
        raise InputError(f"method {cell.method!r} at T = {cell.temperature:g}: {reasons}")
    if len(fitting) > 1 and cell.weight_fingerprint:
        raise InputError(
            f"method {cell.method!r} at T = {cell.temperature:g}: {fitting[0].path} and {fitting[1].path} both fit; "
            "name one of them"
        )
    return fitting[0]


def _check_draft_passes(model: Model, method: MethodEntry, budget: int, verification: str) -> None:
    """Raises InputError for what a method that drafts by passes of the model cannot do."""
    most = (model.entry.block_length or model.shape.block_length or 1) - 1
    if budget > most:
        raise InputError(
            f"method {method.name!r} drafts at most {most} tokens of a block of model {model.entry.path!r}; lower "
            f"budget {budget}"
        )
    if method.fold is not None:
        raise InputError(f"method {method.name!r} drafts no tree that could fold; remove fold")
    if verification == "greedy_match":
        raise InputError(
            f"method {method.name!r} has no verification greedy_match; use coupled, or uncoupled"
        )


def _cells(
    grid: Grid,
    model: Model,
    asked: Questions,
    decoder: DecoderEntry,
    weight_fingerprint: str,
    drafters: list[list[DrafterFile]],
) -> list[tuple[Cell, DrafterFile | None]]:
    cells: list[tuple[Cell, DrafterFile | None]] = []
    settings = decoder_settings(decoder, model.shape)
    if settings["decoder"] in SCHEDULES:
        settings["steps"] = settings["steps"] or asked.gen_length
    else:
        settings["steps"] = None
    for temperature in grid.temperatures:
        for method, files in zip(grid.methods, drafters, strict=True):
            for budget in [0] if method.name == "none" else method.budgets or grid.budgets or [0]:
                drafts_for = ALL_METHODS[method.name].decoders
                if settings["decoder"] not in drafts_for:
                    raise InputError(
                        f"method {method.name!r} does not draft for the decoder {settings['decoder']}; it does for "
                        f"{' and '.join(drafts_for)}"
                    )
                if ALL_METHODS[method.name].drafts_by_pass:
                    _check_draft_passes(model, method, budget, grid.verification if temperature else "")
                if model.entry.cache == "sub_block" and method.name != "none":
                    raise InputError(
                        f"model {model.entry.path!r}: with cache sub_block a state's next step depends on the path to "
                        f"it, so nothing can be drafted; remove method {method.name!r} or the cache"
                    )
                cell = Cell(
                    model=model.entry.path,
                    family=model.shape.family,
                    revision=model.entry.revision,
                    weight_fingerprint=weight_fingerprint,
                    benchmark=asked.entry.name,
                    prompt_version=asked.prompt_version,
                    chat_template=model.entry.chat_template,
                    num_fewshot=asked.entry.num_fewshot,
                    method=method.name,
                    gamma=method.gamma,
                    product_tau=method.product_tau,
                    **_fold_fields(method),
                    budget=budget,
                    temperature=float(temperature),
                    verification=grid.verification,
                    noise=grid.noise,
                    seed=grid.seed,
                    **settings,
                    fused_commit=decoder.fused_commit,
                    window=decoder.window or "",
                    cache=model.entry.cache or model.shape.caches[0],
                    block_length=model.entry.block_length or model.shape.block_length or asked.gen_length,
                    gen_length=asked.gen_length,
                    stop=grid.stop or model.shape.stop,
                    numerics=grid.numerics,
                    kernels=grid.kernels,
                    dtype=model.entry.dtype,
                    max_in_flight=grid.max_in_flight,
                )
                cells.append(with_drafter(cell, files))
    return cells
