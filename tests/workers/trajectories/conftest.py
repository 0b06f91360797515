"""Recordings of the shipped model and of a tiny target, with live decodes to hold against them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.workers.benchmarks.words import PROMPT_VERSION, held_out_items
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.commit_rules import build_rule
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.items import write_items
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.testing.tiny_target import TinyTarget
from dlmgrid.workers.trajectories.recording import TrajectoryRecorder
from dlmgrid.workers.unit_runner import UnitRunner, build_drafter
from dlmgrid.workers.units import Key, WorkUnit

NUM_ITEMS = 2
PROMPTS = [
    Prompt(item_id=f"item-{length}", repeat=0, token_ids=tuple(1 + i % 5 for i in range(length)))
    for length in (1, 8, 21)
]


@dataclass(frozen=True)
class Recording:
    """A trajectory file, and how to decode live under the settings that it was recorded with."""

    path: Path
    cell: Callable[..., Cell]
    decode: Callable[[Cell], list[dict[str, Any]]]


class Recordings:
    """Units on the shipped model; each draft-free cell is recorded once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runner = UnitRunner(actor="test")
        self.items = held_out_items(NUM_ITEMS)
        write_items(folder / "words.jsonl", self.items)

    def unit(self, cell: Cell) -> WorkUnit:
        return WorkUnit(
            cell=cell,
            keys=tuple(Key(item.item_id, 0) for item in self.items),
            checkpoint=str(resolve_checkpoint("reference")),
            inputs=str(self.folder / "words.jsonl"),
            output=str(self.folder / f"{cell.cell_key}-rows.parquet"),
            trajectories=str(self.folder / "units"),
        )

    def record(self, **settings: Any) -> Recording:
        def cell(**changes: Any) -> Cell:
            values: dict[str, Any] = {
                "model": "reference", "benchmark": "words", "prompt_version": PROMPT_VERSION, "method": "none",
                "budget": 0, "temperature": 0.0, "block_length": 32, "gen_length": 8,
            }  # fmt: skip
            return Cell(**(values | settings | changes)).canonical()

        path = self.folder / f"{cell().cell_key}.parquet"
        if not path.exists():
            recorder = TrajectoryRecorder()
            unit = self.unit(cell())
            self.runner.decode_rows(unit, max_in_flight=NUM_ITEMS, recorder=recorder)
            recorder.write(path, unit.cell, [(key.item_id, key.repeat) for key in unit.keys])
        return Recording(path, cell, lambda asked: self.runner.decode_rows(self.unit(asked), max_in_flight=2))


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("recordings"))


@pytest.fixture
def record(recordings: Recordings) -> Callable[..., Recording]:
    """Records two items with the shipped model under the settings given."""
    return recordings.record


@pytest.fixture
def record_tiny(tmp_path: Path) -> Callable[..., Recording]:
    """Records three prompts with a tiny target: blocks of 8, prompts that end inside and at the end of a block."""

    def record_it(**settings: Any) -> Recording:
        def cell(**changes: Any) -> Cell:
            values: dict[str, Any] = {
                "model": "tiny", "benchmark": "none", "prompt_version": "1", "method": "none", "budget": 0,
                "temperature": 0.0, "block_length": 8, "gen_length": 12, "seed": 7,
            }  # fmt: skip
            return Cell(**(values | settings | changes)).canonical()

        def decode(asked: Cell, recorder: TrajectoryRecorder | None = None) -> list[dict[str, Any]]:
            settings = DecodeSettings(
                block_length=asked.block_length,
                gen_length=asked.gen_length,
                budget=asked.budget,
                temperature=asked.temperature,
                rule=build_rule(asked),
                noise=NoiseTable(asked.seed, asked.noise),
                stop_token_ids=(),
                verification=asked.verification,
            )
            target = TinyTarget(block_length=8, vocab_size=40, num_slots=3)
            return [
                _counts(g) for g in Decoder(target, build_drafter(asked), settings, recorder).decode(PROMPTS)
            ]

        recorder = TrajectoryRecorder()
        decode(cell(), recorder)
        path = tmp_path / f"{cell().cell_key}.parquet"
        recorder.write(path, cell(), [(prompt.item_id, prompt.repeat) for prompt in PROMPTS])
        return Recording(path, cell, decode)

    return record_it


def _counts(generation: Generation) -> dict[str, Any]:
    names = (
        "nfe_prefill",
        "nfe_denoise",
        "nfe_commit",
        "accepted",
        "drafted_nodes",
        "rows_computed",
        "steps",
    )
    counts = {name: getattr(generation, name) for name in names}
    return counts | {
        "item_id": generation.prompt.item_id,
        "prompt_tokens": len(generation.prompt.token_ids),
        "nfe_total": generation.nfe_prefill + generation.nfe_denoise + generation.nfe_commit,
    }
