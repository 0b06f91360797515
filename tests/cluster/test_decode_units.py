"""Planned units decoded without Ray: what counts as decoded, exit codes, locks, recordings, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.cluster.plan import UnitSettings, plan_chains
from dlmgrid.cluster.run import refuse_unrecorded_work
from dlmgrid.cluster.sources import Sources
from dlmgrid.cluster.store import Store
from dlmgrid.jobs.plan import show_plan
from dlmgrid.workers import offline
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.offline import decode_units, rebase
from dlmgrid.workers.staging_lock import alone_in_staging, decoding_units
from dlmgrid.workers.testing.fake_runner import FakeUnitRunner
from dlmgrid.workers.testing.tiny_runs import record_tiny_runs
from dlmgrid.workers.unit_file import read_units

Plan = Callable[..., Path]


@pytest.fixture
def plan_units(
    write_grid: Callable[..., Path], sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Plan:
    """Plans the units of the usual grid, with changes, into ``out``; they are decoded by the fake runner."""
    monkeypatch.setattr(offline, "UnitRunner", FakeUnitRunner)

    def plan(*, data: Path | None = None, records: bool = False, **changes: Any) -> Path:
        units = tmp_path / "units.json"
        source = str(data) if data else None
        show_plan(
            write_grid(**changes),
            sources,
            out=tmp_path / "out",
            limit=None,
            data=source,
            units=units,
            records=records,
        )
        return units

    return plan


def decode(units: Path, **options: Any) -> tuple[int, list[str]]:
    """The exit code and the lines that were said."""
    said: list[str] = []
    return decode_units(units, say=said.append, **options).exit_code, said


def test_rows_that_are_not_exact_or_failed_give_their_codes_also_on_a_repeat(
    plan_units: Plan, write_data: Callable[..., Path]
) -> None:
    data = write_data(4, {1: {"diverges": True}, 2: {"prompt_fits": False}})
    units = plan_units(data=data)
    assert decode(units)[0] == 4
    code, said = decode(units)
    assert code == 4 and all("already decoded" in line for line in said)
    assert any("1 errors, 1 not exact" in line for line in said)


def test_a_failed_row_alone_is_code_1(plan_units: Plan, write_data: Callable[..., Path]) -> None:
    units = plan_units(data=write_data(2, {1: {"prompt_fits": False}}), methods=["none"])
    assert [decode(units)[0], decode(units)[0]] == [1, 1]


def test_only_a_whole_file_of_the_unit_counts_as_decoded(plan_units: Plan) -> None:
    units = plan_units()
    code, said = decode(units)
    assert code == 0 and not any("already decoded" in line for line in said)
    first, second, third, *_ = read_units(units)
    content = Path(first.output).read_bytes()
    Path(first.output).write_bytes(content[:-20])
    shutil.copy(third.output, second.output)
    _, said = decode(units)
    assert ["already decoded" in line for line in said[:3]] == [False, False, True]
    assert all("already decoded" in line for line in decode(units)[1])
    adopted = Path(first.output).parent.parent / "generations" / Path(first.output).name
    Path(first.output).replace(adopted)
    assert all("already decoded" in line for line in decode(units)[1])


def test_a_later_plan_leaves_out_what_is_staged_whole(plan_units: Plan) -> None:
    units = plan_units(resources={"items_per_unit": 4})
    decode(units)
    again = plan_units(resources={"items_per_unit": 3})
    assert read_units(again) == []
    assert decode(again) == (0, [f"{again}: no units in it"])


def test_a_plan_of_a_folder_without_its_manifest_leaves_out_what_a_run_adopts(
    plan_units: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    units, out = plan_units(), tmp_path / "out"
    decode(units)
    files = sorted((out / "staging").glob("*.parquet"))
    for file in files:
        file.replace(out / "generations" / file.name)
    (out / "manifest.jsonl").unlink()
    (out / "generations" / files[-1].name).write_bytes(b"PAR1")
    capsys.readouterr()
    torn = [unit.unit_key for unit in read_units(plan_units())]
    assert torn == [files[-1].stem]
    said = capsys.readouterr().out
    assert (
        f"{len(files)} files in generations/ are not in manifest.jsonl; run adopts those that are whole"
        in said
    )


def test_rows_that_units_of_another_plan_hold_are_not_decoded_again(plan_units: Plan, tmp_path: Path) -> None:
    first = plan_units(resources={"items_per_unit": 4}).rename(tmp_path / "first.json")
    second = plan_units(resources={"items_per_unit": 3})
    assert decode(first)[0] == 0
    staged = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "staging").glob("*.parquet")}
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"\d+ rows of its units are decoded in .* already, in units of another"
        ):
            decode(second)
        assert all("already decoded" in line for line in decode(first)[1])
    assert {file: file.stat().st_mtime_ns for file in staged} == staged
    for file in staged:  # half of a file is nothing decoded
        file.write_bytes(file.read_bytes()[:-9])
    assert decode(second)[0] == 0


def test_a_recording_is_known_as_one_and_adopts_no_rows_without_trajectories(
    plan_units: Plan, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    units = plan_units(records=True)
    with pytest.raises(
        InputError, match=r"is a folder of recorded runs, and .* would be decoded without a recording"
    ):
        plan_units()
    decode(units)
    assert not any("already decoded" in line for line in decode(units)[1])  # the fake runner records nothing
    first = read_units(units)[0]
    record_tiny_runs(out / "trajectories" / f"{first.unit_key}.parquet", 1)
    assert next(line for line in decode(units)[1] if "already decoded" in line).startswith("1/")
    store = Store(out)
    store.load(repair=True)
    adopted = store.recover(records=(), say=lambda _: None)
    assert [shard.unit_key for shard in adopted] == [first.unit_key]


def test_a_recording_without_what_the_grid_records_is_decoded_again(plan_units: Plan, tmp_path: Path) -> None:
    first = read_units(plan_units(records=True, record=["window"]))[0]
    file = tmp_path / "out" / "trajectories" / f"{first.unit_key}.parquet"
    FakeUnitRunner("cpu", "test").run(first)
    record_tiny_runs(file, 1)
    assert offline.stored_shard(first) is None
    record_tiny_runs(file, 1, records=("window",))
    assert offline.stored_shard(first) is not None


def test_recording_into_a_folder_of_plain_rows_is_refused_and_loses_none(
    plan_units: Plan, tmp_path: Path
) -> None:
    decode(plan_units())
    staged = sorted((tmp_path / "out" / "staging").iterdir())
    store = Store(tmp_path / "out")
    store.load(repair=True)
    with pytest.raises(InputError, match="decoded without a recording; take them in with dlmgrid run"):
        store.recover(records=())
    assert sorted((tmp_path / "out" / "staging").iterdir()) == staged and staged


def test_failed_rows_of_a_recording_are_not_run_again_without_a_recording(
    write_grid: Callable[..., Path],
    make_works: Callable[..., Any],
    write_data: Callable[..., Path],
    run_units: Callable[..., Any],
    tmp_path: Path,
) -> None:
    data = write_data(2, {1: {"prompt_fits": False}})
    works = make_works(write_grid(methods=["none"], temperatures=[0]), tmp_path / "out", data)
    store = Store(tmp_path / "out")
    store.mark_recording({})
    run_units(store, plan_chains(works, store, UnitSettings(run_id="test", device="cpu")))
    refuse_unrecorded_work(store, works)
    with pytest.raises(
        InputError, match="1 draft-free rows of this grid would be decoded without a recording"
    ):
        refuse_unrecorded_work(store, works, retry_failed=True)


HOLDER = """
import sys
from pathlib import Path
from dlmgrid.workers.staging_lock import alone_in_staging, decoding_units
from dlmgrid.workers.unit_file import read_units
out, units, keys = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
held = [unit for unit in read_units(units) if unit.unit_key in keys]
with decoding_units(out, held) if keys else alone_in_staging(out):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_units_are_decoded_by_one_process_and_a_run_is_alone(plan_units: Plan, tmp_path: Path) -> None:
    units, out = plan_units(), tmp_path / "out"
    mine, other = read_units(units)[:2]
    root = Path(__file__).resolve().parents[2]

    def hold(*keys: str) -> subprocess.Popen[str]:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(out), str(units), *keys],
            cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        return holder

    with hold(mine.unit_key) as holder:
        with decoding_units(out, [other]):
            pass
        cut_anew = replace(mine, keys=mine.keys[:1])
        with (
            pytest.raises(InputError, match="1 of these 1 units, or rows of them"),
            decoding_units(out, [cut_anew]),
        ):
            pass
        with pytest.raises(InputError, match=r"1 of these \d+ units, or rows of them, are being decoded by"):
            decode(units)
        with pytest.raises(InputError, match="planned units are being decoded"), alone_in_staging(out):
            pass
        holder.communicate("")
    with hold() as holder:
        with pytest.raises(InputError, match="is being written by a run"):
            decode(units)
        holder.communicate("")
    assert decode(units)[0] == 0


def test_a_file_that_is_none_of_units_is_not_overwritten(
    write_grid: Callable[..., Path], sources: Sources, tmp_path: Path
) -> None:
    grid = write_grid()
    text = grid.read_text()
    for place, message in (
        (grid, "exists and is no file of work units"),
        (tmp_path, "give a file in a folder that exists"),
        (tmp_path / "none" / "units.json", "give a file in a folder that exists"),
    ):
        with pytest.raises(InputError, match=message):
            show_plan(grid, sources, out=tmp_path / "out", limit=None, data=None, units=place)
    assert grid.read_text() == text and not (tmp_path / "out").exists()


def test_what_cannot_work_on_this_machine_is_refused(plan_units: Plan, tmp_path: Path) -> None:
    units = plan_units()
    unit = read_units(units)[0]
    for device in ("cuda", "cuda:1"):
        with pytest.raises(InputError, match="numerics: exact on a GPU needs kernels: triton"):
            rebase(unit, None, None, device)
    assert (
        rebase(replace(unit, cell=replace(unit.cell, kernels="triton")), None, None, "cuda").device == "cuda"
    )
    with pytest.raises(InputError, match="lies outside the planned folder"):
        rebase(replace(unit, inputs="/elsewhere/letters.jsonl"), tmp_path, None, None)
    with pytest.raises(InputError, match="the folder that the units were planned for is not there"):
        decode(units, out=tmp_path / "typo")
    assert not (tmp_path / "typo").exists()
    assert decode(units, part=(9, 9)) == (
        0,
        [f"{units}: part 9/9 holds none of its {len(read_units(units))} units"],
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_in_flight": "x"}, "max_in_flight is 'x', not of type int"),
        ({"max_in_flight": 0}, "max_in_flight is 0, less than 1"),
        ({"device": 3}, "device is 3, not of type str"),
        ({"drafts": "gpu"}, "drafts is 'gpu', not one of host, device"),
        ({"keys": []}, "the keys of a unit are distinct, one at least"),
        ({"keys": [{"item_id": 1, "repeat": 0}]}, "not an item_id and a repeat"),
        ({"cell": "x"}, "cell is 'x', not of type dict"),
        ({"records": "window"}, "records is 'window', not of type list"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_unit_of_another_shape_is_named(plan_units: Plan, change: dict[str, Any], message: str) -> None:
    units = plan_units()
    values = json.loads(units.read_text())
    units.write_text(json.dumps([values[0] | change]))
    with pytest.raises(InputError, match=f"not a file of work units .*{message}"):
        read_units(units)


def test_an_edited_cell_is_refused(plan_units: Plan) -> None:
    units = plan_units()
    values = json.loads(units.read_text())
    for name, value, message in (
        ("budget", "6", "budget of a cell is '6'"),
        ("method", "sdd", "did you mean 'ssd'"),
    ):
        units.write_text(json.dumps([values[0] | {"cell": values[0]["cell"] | {name: value}}]))
        with pytest.raises(InputError, match=message):
            decode(units)
    units.write_text("{}")
    with pytest.raises(InputError, match="it holds a dict, not a list"):
        read_units(units)
    with pytest.raises(InputError, match="cannot be read"):
        read_units(units.parent)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "x"), "x: Permission denied"),
        (RuntimeError("a\nb"), "RuntimeError: a b"),
    ],
)
def test_errors_of_the_system_and_of_torch_are_one_line(
    plan_units: Plan,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    message: str,
) -> None:
    units = plan_units()

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(FakeUnitRunner, "run", fail)
    monkeypatch.setattr(sys, "argv", ["offline", str(units)])
    with pytest.raises(SystemExit) as ended:
        offline.main()
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(lines) == 1 and message in lines[0]
