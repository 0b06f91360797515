"""Runs work units: decodes their items, compares every row with its serialized run, writes one Parquet file.

A reference unit (draft-free) is decoded twice: packed, as its rows are stored, and again one sample at a time;
the verdict of its rows is whether the two agree. The rows of every other unit are compared with the committed
rows of their reference. Nothing here imports Ray: an actor wraps this class, and so does a plain process.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.canvas_decoder import CanvasDecoder, whole_canvas_length
from dlmgrid.workers.decoding.commit_rules import build_rule
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt, canvas_length
from dlmgrid.workers.decoding.linear_spec import LinearSpecDecoder
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.paths import compare
from dlmgrid.workers.drafting.catalog import get_method
from dlmgrid.workers.drafting.drafter import Drafter
from dlmgrid.workers.drafting.drafter_file import read_drafter_file
from dlmgrid.workers.engine.canvas import CanvasEngine
from dlmgrid.workers.engine.family_engine import FamilyEngine, is_bidirectional, open_engine, with_room
from dlmgrid.workers.engine.sub_blocks import SubBlockTarget
from dlmgrid.workers.errors import InputError, OutOfMemoryError, TransientError
from dlmgrid.workers.folding.fold import FoldSettings
from dlmgrid.workers.generation_rows import generation_row, set_verdict
from dlmgrid.workers.items import Item, read_items
from dlmgrid.workers.models.checkpoint import read_config
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.families import get_family
from dlmgrid.workers.models.fingerprint import weight_fingerprint
from dlmgrid.workers.partial_files import partial_path
from dlmgrid.workers.rows import Provenance, error_row
from dlmgrid.workers.runtime import device_name, package_versions, runtime_fingerprint
from dlmgrid.workers.tables import GENERATIONS, read_table, to_table, write_table
from dlmgrid.workers.tokenization import PromptEncoder, load_tokenizer
from dlmgrid.workers.trajectories.recording import TrajectoryRecorder
from dlmgrid.workers.units import Key, UnitResult, WorkUnit

logger = logging.getLogger(__name__)

REFERENCE_COLUMNS = (
    "cell_key", "item_id", "repeat", "prompt_digest", "token_ids", "commit_positions", "commit_tokens",
    "commit_steps", "commit_margins", "seed_positions", "seed_tokens", "step_digests", "runtime_fingerprint", "error",
)  # fmt: skip

Row = dict[str, Any]


def build_drafter(cell: Cell, drafter_path: str = "") -> Drafter:
    """The drafter of a cell, with its learned or calibrated part from the file at ``drafter_path``.

    Raises InputError where that file is missing, or is another one than the cell names.
    """
    method = get_method(cell.method)
    parameters: dict[str, Any] = {}
    if method.file_key:
        path = Path(drafter_path)
        found = read_drafter_file(method, path).fingerprint
        if found != cell.drafter_fingerprint:
            raise InputError(
                f"{path}: it is drafter {found}, the run was planned with {cell.drafter_fingerprint}; plan again"
            )
        parameters[method.file_key] = path
    if "gamma" in method.parameters:
        parameters["gamma"] = cell.gamma
    module, _, function = method.implementation.partition(":")
    drafter: Drafter = getattr(import_module(module), function)(**parameters)
    return drafter


class UnitRunner:
    """Keeps one model loaded and runs units on it; another model replaces it.

    Args:
        device: ``cpu`` or a CUDA device of torch.
        actor: a name for the rows' ``actor`` column.
    """

    def __init__(self, device: str = "cpu", actor: str = "") -> None:
        self.device = device
        self.actor = actor
        self._engine: FamilyEngine | None = None
        self._engine_key: tuple[str, ...] = ()
        self._fingerprint = runtime_fingerprint(device)
        self._versions = package_versions()

    def fingerprint(self) -> str:
        """The runtime fingerprint that enters ``reference_key``."""
        return self._fingerprint

    def run(self, unit: WorkUnit) -> UnitResult:
        """Decode a unit and write its file.

        Raises:
            InputError: checkpoint, inputs or cell are not what the unit says.
            OutOfMemoryError: the device is too small for ``max_in_flight`` samples.
            TransientError: every item failed on a first attempt, or the device is in a bad state.
        """
        started = time.perf_counter()
        rows = self._rows(unit)
        size, sha256 = _write(Path(unit.output), rows)
        must_equal = unit.cell.keeps_to_reference
        return UnitResult(
            unit_key=unit.unit_key,
            output=unit.output,
            num_rows=len(rows),
            num_bytes=size,
            sha256=sha256,
            num_errors=sum(row["error"] is not None for row in rows),
            num_inexact=sum(
                must_equal and False in (row["exact_tokens"], row["exact_path"], row["exact_bits"])
                for row in rows
            ),
            num_unchecked=sum(row["exact_tokens"] is None for row in rows),
            num_tokens=sum(row["generated_tokens"] or 0 for row in rows),
            seconds=time.perf_counter() - started,
            runtime_fingerprint=self._fingerprint,
            failures={f"{row['item_id']}/{row['repeat']}": row["error"] for row in rows if row["error"]},
        )

    def decode_rows(
        self, unit: WorkUnit, *, max_in_flight: int, recorder: TrajectoryRecorder | None = None
    ) -> list[Row]:
        """The rows of a unit, in the order of its keys, without verdicts; ``recorder`` is shown every step."""
        cell = unit.cell.canonical()
        encoder = load_tokenizer(Path(unit.checkpoint), cell.chat_template)
        config = read_config(Path(unit.checkpoint))
        prompts, rows = self._prompts(unit, encoder, config)
        engine = self._load(unit, config, prompts.values(), max_in_flight)
        settings = replace(decode_settings(cell, engine, profiled=unit.profiled), drafts=unit.drafts)
        if recorder is not None:
            recorder.stop_token_ids = settings.stop_token_ids
            settings = replace(settings, records_window=recorder.records_window)
        decoder = make_decoder(cell, engine, build_drafter(cell, unit.drafter_path), settings, recorder)
        provenance = self._provenance(unit)
        generations, failures = self._decode(decoder, prompts, max_in_flight, unit.attempt)
        for key, generation in generations.items():
            text = encoder.decode(generation.token_ids)
            rows[key] = generation_row(unit.cell, key, provenance, generation, text, profiled=unit.profiled)
        for key, error in failures.items():
            rows[key] = error_row(unit.cell, key, provenance, error)
        return [rows[key] for key in unit.keys]

    def _rows(self, unit: WorkUnit) -> list[Row]:
        recorder = TrajectoryRecorder(unit.records) if unit.trajectories else None
        rows = self.decode_rows(unit, max_in_flight=unit.max_in_flight, recorder=recorder)
        if recorder is not None:
            _record(unit, rows, recorder)
        compared = unit.keys
        if unit.cell.is_reference:
            compared = unit.keys[: unit.num_compared]
            serialized = self.decode_rows(replace(unit, keys=compared), max_in_flight=1) if compared else []
            references = {Key(row["item_id"], row["repeat"]): row for row in serialized}
        else:
            references = self._references(unit)
        for row in rows[: len(compared)]:
            if row["error"] is None:
                self._judge(row, references.get(Key(row["item_id"], row["repeat"])))
        return rows

    def _judge(self, row: Row, reference: Mapping[str, Any] | None) -> None:
        problem = None
        if reference is None:
            problem = "the serialized run of this item is missing"
        elif reference["error"] is not None:
            problem = f"the serialized run of this item failed: {reference['error']}"
        elif reference["prompt_digest"] != row["prompt_digest"]:
            problem = "the serialized run had another prompt; use a new output folder"
        elif reference["runtime_fingerprint"] != row["runtime_fingerprint"]:
            problem = (
                "the serialized run was made on another device or other versions; use a new output folder"
            )
        if problem is not None or reference is None:
            row["error"] = problem
            return
        set_verdict(row, compare(row, reference))

    def _references(self, unit: WorkUnit) -> dict[Key, Row]:
        wanted = unit.cell.reference().cell_key
        try:
            table = read_table(list(unit.reference_shards), GENERATIONS, REFERENCE_COLUMNS)
        except InputError as error:  # the driver commits whole files only: another actor may see this one
            raise TransientError(str(error)) from error
        return {
            Key(row["item_id"], row["repeat"]): row for row in table.to_pylist() if row["cell_key"] == wanted
        }

    def _prompts(
        self, unit: WorkUnit, encoder: PromptEncoder, config: ModelConfig
    ) -> tuple[dict[Key, Prompt], dict[Key, Row]]:
        """Encoded prompts, and the error rows of items whose prompt cannot be used."""
        wanted = {key.item_id for key in unit.keys}
        items: dict[str, Item] = {
            item.item_id: item for item in read_items(Path(unit.inputs)) if item.item_id in wanted
        }
        prompts: dict[Key, Prompt] = {}
        failed: dict[Key, Row] = {}
        for key in unit.keys:
            if key.item_id not in items:
                raise InputError(f"{unit.inputs}: no item {key.item_id!r}; plan the run again")
            try:
                token_ids = tuple(encoder.encode(items[key.item_id]))
                _check_fit(unit.cell, token_ids, config)
            except InputError as error:
                failed[key] = error_row(unit.cell, key, self._provenance(unit), str(error))
                continue
            prompts[key] = Prompt(item_id=key.item_id, repeat=key.repeat, token_ids=token_ids)
        return prompts, failed

    def _load(
        self, unit: WorkUnit, config: ModelConfig, prompts: Iterable[Prompt], max_in_flight: int
    ) -> FamilyEngine:
        cell = unit.cell
        drafts_by_pass = get_method(cell.method).drafts_by_pass
        num_slots = max_in_flight * (2 if drafts_by_pass else 1)
        longest = max(
            (_num_positions(cell, config, len(prompt.token_ids)) for prompt in prompts),
            default=cell.block_length,
        )
        longest += (
            cell.block_length if drafts_by_pass else 0
        )  # the last draft may begin before the canvas ends
        key = (
            unit.checkpoint,
            cell.weight_fingerprint,
            cell.dtype,
            cell.numerics,
            cell.kernels,
            str(cell.block_length),
        )
        engine = self._engine
        if engine is None or self._engine_key != key:
            self._engine = None
            gc.collect()  # an engine's graphs refer back to it: its memory is to be free before the next one's is taken
            if (
                cell.weight_fingerprint
                and weight_fingerprint(Path(unit.checkpoint)) != cell.weight_fingerprint
            ):
                raise InputError(
                    f"{unit.checkpoint}: the weights changed since the run was planned; start it again"
                )
            engine = open_engine(
                Path(unit.checkpoint),
                cell,
                config,
                num_slots=num_slots,
                max_length=longest,
                device=self.device,
            )
            self._engine_key = key
        else:
            self._engine = None  # its buffers may be gone when larger ones do not fit
            engine = with_room(engine, cell.cache, num_slots, longest)
        self._engine = engine
        return engine

    def _decode(
        self, decoder: Decoder, prompts: Mapping[Key, Prompt], max_in_flight: int, attempt: int
    ) -> tuple[dict[Key, Generation], dict[Key, str]]:
        """Decode together; if that fails, one by one, so that an item that breaks the model fails alone."""
        try:
            done = decoder.decode(list(prompts.values()), max_in_flight) if prompts else []
            return dict(zip(prompts, done, strict=True)), {}
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(_one_line(error)) from error
        except (RuntimeError, ValueError, IndexError, ArithmeticError) as error:
            _raise_if_device_is_lost(error)
            logger.warning(
                "decoding %d items together failed (%s); one by one now", len(prompts), _one_line(error)
            )
        generations: dict[Key, Generation] = {}
        failures: dict[Key, str] = {}
        for key, prompt in prompts.items():
            try:
                generations[key] = decoder.decode([prompt], 1)[0]
            except torch.OutOfMemoryError as error:
                failures[key] = f"out of memory for this item alone: {_one_line(error)}"
            except (RuntimeError, ValueError, IndexError, ArithmeticError) as error:
                _raise_if_device_is_lost(error)
                failures[key] = f"{type(error).__name__}: {_one_line(error)}"
        if not generations and len(prompts) > 1 and attempt == 1:
            raise TransientError(f"all {len(prompts)} items failed, first: {next(iter(failures.values()))}")
        return generations, failures

    def _provenance(self, unit: WorkUnit) -> Provenance:
        return Provenance(
            run_id=unit.run_id,
            actor=self.actor,
            attempt=unit.attempt,
            device=device_name(self.device),
            runtime_fingerprint=self._fingerprint,
            versions=self._versions,
        )


def _check_fit(cell: Cell, token_ids: Sequence[int], config: ModelConfig) -> None:
    """Raises InputError for a prompt that is empty or leaves no room for the generation."""
    if not token_ids:
        raise InputError("the prompt is empty")
    max_positions = config.max_position_embeddings
    canvas = _num_positions(cell, config, len(token_ids))
    if canvas > max_positions:
        raise InputError(
            f"prompt of {len(token_ids)} tokens and gen_length {cell.gen_length} need {canvas} positions, the "
            f"model has {max_positions}; lower gen_length"
        )


def _num_positions(cell: Cell, config: ModelConfig, prompt_tokens: int) -> int:
    """Positions that a prompt and its generation take."""
    if is_bidirectional(config):
        return whole_canvas_length(prompt_tokens, cell.gen_length, cell.block_length)
    grid = get_family(config.family).grid
    return canvas_length(prompt_tokens, cell.gen_length, cell.block_length, grid)


def make_decoder(
    cell: Cell,
    engine: FamilyEngine,
    drafter: Drafter,
    settings: DecodeSettings,
    recorder: TrajectoryRecorder | None = None,
) -> Decoder:
    """The decode loop that fits a cell and its engine."""
    if isinstance(engine, CanvasEngine):
        return CanvasDecoder(engine, drafter, settings, recorder)
    if get_method(cell.method).drafts_by_pass:
        return LinearSpecDecoder(engine, settings, engine.logits_pass)
    target = SubBlockTarget(engine, cell.sub_block_length) if cell.cache == "sub_block" else engine
    return Decoder(target, drafter, settings, recorder, engine.logits_pass)


def decode_settings(cell: Cell, engine: FamilyEngine, *, profiled: bool) -> DecodeSettings:
    """The decoder's settings of a canonical cell on its model."""
    family = get_family(engine.config.family)
    is_causal = cell.decoder == "causal"
    return DecodeSettings(
        block_length=cell.block_length,
        gen_length=cell.gen_length,
        budget=cell.budget,
        temperature=cell.temperature,
        rule=build_rule(cell),
        noise=NoiseTable(cell.seed, cell.noise),
        stop_token_ids=engine.config.stop_token_ids,
        verification=cell.verification,
        stop=cell.stop,
        end_token_ids=engine.config.end_token_ids,
        fused_commit=cell.fused_commit,
        shifted=family.shifted or is_causal,
        causal=is_causal,
        grid=family.grid,
        seed=family.seed,
        stop_rule="prefix" if is_causal else family.stop_rule,
        window=cell.window,
        product_tau=cell.product_tau,
        fold=fold_settings(cell),
        profiled=profiled,
    )


def fold_settings(cell: Cell) -> FoldSettings | None:
    """SpecFold's settings of a cell; None where it does not fold."""
    if cell.fold_tau is None:
        return None
    by_layer = [float(value) for value in cell.fold_tau_by_layer.split(",") if value]
    return FoldSettings(
        tau=tuple(by_layer) or (cell.fold_tau,),
        gate=cell.fold_gate,
        recheck=cell.fold_recheck,
        pipelined=cell.fold_pipelined,
    )


def _record(unit: WorkUnit, rows: Sequence[Row], recorder: TrajectoryRecorder) -> None:
    """Write the trajectories of the rows that were decoded. Raises InputError for a unit that drafts."""
    cell = unit.cell.canonical()
    if not cell.is_reference:
        raise InputError(f"method {cell.method!r}: only draft-free runs are recorded; use dlmgrid record")
    decoded = [(row["item_id"], row["repeat"]) for row in rows if row["generated_tokens"] is not None]
    recorder.write(Path(unit.trajectories) / f"{unit.unit_key}.parquet", cell, decoded)


def _write(path: Path, rows: Sequence[Row]) -> tuple[int, str]:
    """Write the file whole or not at all; its size in bytes and its SHA-256."""
    partial = partial_path(path)
    write_table(str(partial), to_table(GENERATIONS, rows))
    with partial.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    size = partial.stat().st_size
    partial.replace(path)
    return size, sha256


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def _raise_if_device_is_lost(error: Exception) -> None:
    """A CUDA error poisons the process: only a fresh one can go on."""
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
        raise TransientError(f"the device failed: {_one_line(error)}") from error
