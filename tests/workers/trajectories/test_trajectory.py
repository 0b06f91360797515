"""Recorded trajectories: what the decoder saw comes back from disk, and files that are not whole are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dlmgrid.kernels.logits import summarize
from dlmgrid.workers.decoding.decoder import Decoder
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item, inputs_file_name, write_items
from dlmgrid.workers.tables import TRAJECTORIES
from dlmgrid.workers.testing.tiny_target import TinyTarget
from dlmgrid.workers.trajectories.diagnose_process import diagnosis_rows
from dlmgrid.workers.trajectories.files import (
    files_by_cell,
    recorded_generations,
    trajectory_files,
    unrecorded_text,
)
from dlmgrid.workers.trajectories.trajectory import Trajectory, load_trajectories
from dlmgrid.workers.unit_runner import UnitRunner


def absolute_steps(trajectory: Trajectory) -> list[tuple[tuple[int, int], ...]]:
    return [
        tuple((start + position, token) for position, token in commits)
        for start, commits in zip(trajectory.block_starts.tolist(), trajectory.commits, strict=True)
    ]


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.5}, {"commits_per_step": 3}])
def test_steps_come_back_as_the_decoder_made_them(
    record_tiny: Callable[..., Any], settings: dict[str, Any]
) -> None:
    recording = record_tiny(**settings)
    cell = recording.cell()
    assert pq.read_schema(recording.path).equals(TRAJECTORIES)
    for trajectory, live in zip(load_trajectories(recording.path), recording.decode(cell), strict=True):
        assert absolute_steps(trajectory) == live["steps"]
        assert (trajectory.item_id, trajectory.prompt_tokens) == (live["item_id"], live["prompt_tokens"])
        assert trajectory.cell == cell
        assert trajectory.key == NoiseTable(cell.seed, cell.noise).key(trajectory.item_id, 0)
        for step in range(1, trajectory.num_steps):
            if trajectory.block_starts[step] == trajectory.block_starts[step - 1]:
                expected = trajectory.states[step - 1].clone()
                for position, token in trajectory.commits[step - 1]:
                    expected[position] = token
                assert torch.equal(trajectory.states[step], expected)
                grown = len(trajectory.commits[step - 1])
                assert trajectory.commit_counts[step] == trajectory.commit_counts[step - 1] + grown
            else:
                assert trajectory.commit_counts[step] == 0


def test_summaries_are_those_of_the_logits_at_each_state(record_tiny: Callable[..., Any]) -> None:
    trajectory = list(load_trajectories(record_tiny(temperature=1.5).path))[2]
    target = TinyTarget(block_length=8, vocab_size=40)
    for step in range(trajectory.num_steps):
        masked = trajectory.states[step] == MASKED
        hidden = target.forward(trajectory.states[step : step + 1], *[torch.zeros(1)] * 3)
        expected = summarize(target.logits(hidden[0][masked]), 1.5)
        for name, values in expected._asdict().items():
            found = getattr(trajectory, name)[step]
            assert torch.equal(found[masked], values.to(found.dtype)), name
            assert not found[~masked].any()


def test_a_recorded_unit_has_the_rows_of_an_unrecorded_one(recordings: Any) -> None:
    cell = recordings.record().cell()
    unit = recordings.unit(cell)
    recordings.runner.run(unit)
    (path,) = (recordings.folder / "units").iterdir()
    assert path.stem == unit.unit_key
    rows = recordings.runner.decode_rows(replace(unit, trajectories=""), max_in_flight=1)
    for trajectory, row in zip(load_trajectories(path), rows, strict=True):
        commits = [commit for step in absolute_steps(trajectory) for commit in step]
        assert commits == list(zip(row["commit_positions"], row["commit_tokens"], strict=True))
    with pytest.raises(InputError, match="only draft-free runs are recorded"):
        recordings.runner.run(recordings.unit(replace(cell, method="ssd", budget=4)))


def test_a_decode_that_failed_half_way_is_recorded_anew(
    recordings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = recordings.record()
    decode, calls = Decoder._walk, []

    def failing(self: Decoder, *arguments: Any) -> None:
        calls.append(1)
        decode(self, *arguments)
        if len(calls) == 3:
            raise RuntimeError("the third pass fails")

    monkeypatch.setattr(Decoder, "_walk", failing)
    unit = replace(recordings.unit(whole.cell()), trajectories=str(tmp_path), output=str(tmp_path / "rows"))
    UnitRunner().run(unit)
    found = list(load_trajectories(tmp_path / f"{unit.unit_key}.parquet"))
    assert [t.commits for t in found] == [t.commits for t in load_trajectories(whole.path)]


def test_a_truncated_or_damaged_file_is_named(record_tiny: Callable[..., Any], tmp_path: Path) -> None:
    content = record_tiny().path.read_bytes()
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"torn\.parquet: not a whole trajectory file"):
        list(load_trajectories(torn))
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :])
    with pytest.raises(InputError, match=r"damaged\.parquet: damaged at generation 1"):
        list(load_trajectories(damaged))


def test_steps_that_are_missing_are_noticed(record_tiny: Callable[..., Any], tmp_path: Path) -> None:
    table = pq.read_table(record_tiny().path).slice(0, 5)
    pq.write_table(table, tmp_path / "short.parquet")
    with pytest.raises(InputError, match="has 5 of its"):
        list(load_trajectories(tmp_path / "short.parquet"))


def test_only_committed_units_of_a_folder_count(record_tiny: Callable[..., Any], tmp_path: Path) -> None:
    recording = record_tiny()
    out = tmp_path / "out"
    with pytest.raises(InputError, match="holds no trajectories"):
        list(load_trajectories(out))
    (out / "generations").mkdir(parents=True)
    with pytest.raises(
        InputError, match="is a run without recorded steps; record its grid into another folder"
    ):
        list(load_trajectories(out))
    (out / "trajectories").mkdir()
    for name in ("committed", "left-over"):
        (out / "trajectories" / f"{name}.parquet").write_bytes(recording.path.read_bytes())
    with pytest.raises(InputError, match="holds no finished trajectories"):
        list(load_trajectories(out))
    rows = out / "generations" / "committed.parquet"
    pq.write_table(pq.read_table(recording.path, columns=["method"]), rows)
    assert trajectory_files(out) == [out / "trajectories" / "committed.parquet"]
    assert list(files_by_cell(out)) == [recording.cell().cell_key]
    assert [found.key.item_id for found in recorded_generations(out)] == ["item-1", "item-8", "item-21"]


def test_a_generation_in_several_files_counts_once_and_one_with_a_torn_file_of_rows_not_at_all(
    record_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    recording = record_tiny()
    out = tmp_path / "out"
    for folder in ("trajectories", "generations", "staging", "inputs"):
        (out / folder).mkdir(parents=True)
    rows = pq.read_table(recording.path, columns=["method"])
    for name in ("once", "again"):
        (out / "trajectories" / f"{name}.parquet").write_bytes(recording.path.read_bytes())
        pq.write_table(rows, out / "generations" / f"{name}.parquet")
    other = record_tiny(seed=8)
    (out / "trajectories" / "torn.parquet").write_bytes(other.path.read_bytes())
    (out / "staging" / "torn.parquet").write_bytes(b"PAR1")
    assert len(list(load_trajectories(recording.path))) == 3
    assert [run.item_id for run in load_trajectories(out)] == ["item-1", "item-8", "item-21"]
    assert len(list(recorded_generations(out))) == 3
    (once, alone) = diagnosis_rows(out), diagnosis_rows(recording.path)
    assert [row["count"] for row in once] == [row["count"] for row in alone]

    assert unrecorded_text(out) == ""
    items = [Item(item_id=f"item-{number}", prompt="") for number in (1, 8, 21, 22, 23)]
    write_items(out / "inputs" / inputs_file_name("none", "1", 0), items)
    assert "2 of 5 planned generations are not recorded" in unrecorded_text(out)
    assert unrecorded_text(out).endswith("on none at T = 0, static: 2 of 5 missing, item-22, item-23)")
    (out / "trajectories" / "once.parquet").unlink()
    with pytest.raises(InputError, match=r"once\.parquet: dlmgrid.table is trajectories"):
        list(load_trajectories(out))


def _changed(name: str, change: Callable[[Any], Any]) -> Callable[[pa.Table], pa.Table]:
    """Replaces a list column by what ``change`` makes of its flat values."""

    def apply(table: pa.Table) -> pa.Table:
        column = table[name].combine_chunks()
        values = pa.array(change(column.flatten().to_numpy().copy()), column.type.value_type)
        made = pa.ListArray.from_arrays(column.offsets, values).cast(column.type)
        return table.set_column(table.schema.get_field_index(name), table.schema.field(name), made)

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_changed("probabilities", lambda values: values * float("nan")), "probabilities that are none"),
        (_changed("probabilities", lambda values: -values), "probabilities that are none"),
        (_changed("probabilities", lambda values: values[::-1]), "not in the order of their probabilities"),
        (_changed("probabilities", lambda values: values * 0 + 1), "probabilities of more than 1 in all"),
        (_changed("token_ids", lambda values: values - 1000), "candidates that are no tokens"),
        (_changed("entropy", lambda values: values + float("inf")), "entropy that is not finite"),
        (_changed("commit_positions", lambda values: values + 99), "step 0 commits position"),
        (_changed("commit_tokens", lambda values: values + 1), "a state is not the one before it"),
        (lambda table: table.slice(0, 0), "it has no steps"),
    ],
)
def test_values_that_no_run_can_have_are_refused(
    record_tiny: Callable[..., Any], tmp_path: Path, damage: Callable[[pa.Table], pa.Table], message: str
) -> None:
    file = pq.ParquetFile(record_tiny().path)
    damaged = tmp_path / "damaged.parquet"
    with pq.ParquetWriter(damaged, file.schema_arrow) as writer:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            writer.write_table(damage(table) if group == 1 else table)
    with pytest.raises(InputError, match=rf"damaged\.parquet.*damaged.*{message}"):
        list(load_trajectories(damaged))
