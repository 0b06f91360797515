"""What the machine refuses: one line and the right exit code, and outputs that cannot be written before any work."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlmgrid.cluster.out_folder import check_out
from dlmgrid.jobs import calibrate, cli, decode, plan, study, train_order, train_sets
from dlmgrid.jobs.refusals import refusal
from dlmgrid.workers.errors import InputError, OutOfMemoryError, TransientError
from dlmgrid.workers.offline import Decoded
from dlmgrid.workers.out_file import check_out_file


def _ends(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def command() -> None:
        raise error

    monkeypatch.setattr(cli, "load_command", lambda name: command)
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor"])
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "a.json"), 2, "a.json: Permission denied; name another"),
        (OSError(errno.ENOSPC, "No space left on device", "a.json"), 5, "a.json: No space left on device; mend it"),
        (TransientError("the worker died"), 5, "the worker died"),
        (OutOfMemoryError("no room for 8 samples"), 5, "no room for 8 samples"),
        (MemoryError("Unable to allocate 9 PiB"), 5, "there is not enough memory (Unable to allocate 9 PiB)"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), 5, "there is not enough memory (CUDA out of memory. T"),
        (RuntimeError("shapes\ndiffer"), 5, "shapes differ (a RuntimeError at tests/jobs/test_refusals.py:"),
    ],
)  # fmt: skip
def test_a_refusal_of_the_machine_is_one_line_with_its_code(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _ends(error, monkeypatch) == code
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {line}")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [TransientError("evalplus.evaluate ended with status 1: boom"), subprocess.TimeoutExpired("evalplus", 9)],
)
def test_a_tool_that_fails_ends_a_comparison_of_scores_in_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parity = pytest.importorskip("dlmgrid.jobs.parity")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(parity, "compare_run", fail)
    assert parity.main([str(tmp_path)]) == 5
    assert capsys.readouterr().err == f"error: {error}; nothing was compared\n"


def test_what_torch_cannot_allocate_is_told_as_memory() -> None:
    with pytest.raises(RuntimeError) as met:
        torch.empty(2**61, dtype=torch.uint8)
    message, code = refusal(met.value)
    assert message.startswith("there is not enough memory") and code == 5


def test_a_fault_of_our_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise KeyError("cell")

    monkeypatch.setattr(cli, "load_command", lambda name: command)
    with pytest.raises(KeyError):
        cli.main(["doctor"])


def _plan(path: Path) -> None:
    plan.command(path.parent / "no_grid.yaml", out=path.parent, units=path)


COMMANDS: dict[str, Callable[[Path], object]] = {
    ".json": lambda path: calibrate.command(path / "no", "spiffy", path),
    ".safetensors": lambda path: train_order.command(path / "no", path),
    "sets.safetensors": lambda path: train_sets.command(path / "no", path),
    ".csv": lambda path: study.command([path / "no"], csv_file=path),
    "units.json": _plan,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    command = COMMANDS[name]
    file = f"x{name}"
    (tmp_path / file).mkdir()
    with pytest.raises(InputError, match="is a folder; name a file"):
        command(tmp_path / file)
    with pytest.raises(InputError, match="none does not exist; make it first"):
        command(tmp_path / "none" / file)
    if Path("/proc").is_dir():
        with pytest.raises(InputError, match=r"cannot be written .*; name a file in a folder you can write"):
            command(Path("/proc") / file)
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_what_is_written_beside_a_file_is_looked_at_too(tmp_path: Path) -> None:
    (tmp_path / "order.state").mkdir()
    with pytest.raises(InputError, match=r"order\.state is a folder"):
        check_out_file(tmp_path / "order.safetensors", "--out", ".safetensors", beside=[".json", ".state"])
    assert check_out_file(tmp_path / "a.json", "--out", ".json") == tmp_path / "a.json"
    assert not (tmp_path / "a.json").exists()


def test_decode_takes_a_part_of_the_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def decode_units(path: Path, **settings: object) -> Decoded:
        given.append(settings["part"])
        return Decoded(num_errors=0, num_inexact=0)

    monkeypatch.setattr("dlmgrid.workers.offline.decode_units", decode_units)
    assert decode.command(tmp_path / "units.json", part="2/4") == 0
    assert decode.command(tmp_path / "units.json") == 0
    assert given == [(2, 4), (1, 1)]
    for part in ("0/4", "5/4", "2", "a/b", "-1/2"):
        with pytest.raises(InputError, match="give I/N with 1 <= I <= N"):
            decode.command(tmp_path / "units.json", part=part)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that takes no file, as /proc")
def test_an_output_folder_where_nothing_can_be_made_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be made, /proc is not writable"):
        check_out(Path("/proc/dlmgrid_out"))
