"""Decoding and recording on the tiny target: items, a cell, and trajectory files made in a blink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.commit_rules import build_rule
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.drafting import none
from dlmgrid.workers.drafting.drafter import Drafter
from dlmgrid.workers.testing.tiny_target import TinyTarget
from dlmgrid.workers.trajectories.recording import TrajectoryRecorder


def tiny_cell(**settings: Any) -> Cell:
    """A draft-free cell of the tiny target: blocks of 8 tokens, a calibration set."""
    values: dict[str, Any] = {
        "model": "tiny", "weight_fingerprint": "f" * 24, "benchmark": "words_train", "prompt_version": "1",
        "method": "none", "budget": 0, "temperature": 0.0, "block_length": 8, "gen_length": 20, "seed": 7,
    }  # fmt: skip
    return Cell(**(values | settings)).canonical()


def tiny_prompts(count: int) -> list[Prompt]:
    """Prompts of 1 to 21 tokens, so that they end inside and at the end of a block."""
    return [
        Prompt(
            item_id=f"item-{index}",
            repeat=0,
            token_ids=tuple(1 + (i + index) % 5 for i in range(1 + index % 21)),
        )
        for index in range(count)
    ]


def tiny_decode(
    cell: Cell,
    drafter: Drafter | None,
    *,
    num_items: int = 4,
    max_in_flight: int = 3,
    recorder: TrajectoryRecorder | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> list[Generation]:
    """Decode items on the tiny target under a cell, whose budget is used where there is a drafter."""
    settings = DecodeSettings(
        block_length=cell.block_length,
        gen_length=cell.gen_length,
        budget=0 if drafter is None else cell.budget,
        temperature=cell.temperature,
        rule=build_rule(cell),
        noise=NoiseTable(cell.seed, cell.noise),
        stop_token_ids=stop_token_ids,
        verification=cell.verification,
        fused_commit=cell.fused_commit,
        window="" if drafter is None else cell.window,
        product_tau=cell.product_tau,
        records_window=recorder is not None and recorder.records_window,
    )
    target = TinyTarget(block_length=8, vocab_size=40, num_slots=3)
    decoder = Decoder(target, drafter or none.build(), settings, recorder)
    return decoder.decode(tiny_prompts(num_items), max_in_flight)


def record_tiny_runs(
    path: Path,
    num_items: int,
    *,
    records: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    **settings: Any,
) -> None:
    """Record draft-free runs under :func:`tiny_cell` into the trajectory file ``path``."""
    cell = tiny_cell(**settings)
    recorder = TrajectoryRecorder(records, stop_token_ids)
    tiny_decode(cell, None, num_items=num_items, recorder=recorder, stop_token_ids=stop_token_ids)
    recorder.write(path, cell, [(prompt.item_id, prompt.repeat) for prompt in tiny_prompts(num_items)])
