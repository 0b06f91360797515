"""The command line: which commands and flags there are, and how errors end."""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from dlmgrid.cluster.run import ExitCode
from dlmgrid.jobs import cli, run
from dlmgrid.workers.errors import InputError

# Every flag is a promise to scripts. Add one here on purpose, or not at all.
FLAGS = {
    "run": {"--out", "--limit", "--data", "--address", "--retry-failed", "--progress", "--quiet"},
    "plan": {"--out", "--limit", "--data", "--units", "--record"},
    "record": {"--out", "--limit", "--data", "--address", "--progress", "--quiet"},
    "replay": {"--out", "--verify", "--device"},
    "study": {"--drafter", "--csv"},
    "diagnose": {"--limit"},
    "decode": {"--out", "--checkpoint", "--device", "--compare", "--part"},
    "train-order": {
        "--out",
        "--tokens",
        "--hidden",
        "--width",
        "--layers",
        "--dropout",
        "--steps",
        "--batch-size",
        "--learning-rate",
        "--depth-scale",
        "--evaluate-every",
        "--patience",
        "--seed",
        "--device",
    },
    "train-sets": {
        "--out",
        "--refit",
        "--hidden",
        "--no-hidden",
        "--width",
        "--layers",
        "--dropout",
        "--steps",
        "--batch-size",
        "--learning-rate",
        "--evaluate-every",
        "--patience",
        "--seed",
        "--device",
    },
    "calibrate": {
        "--method",
        "--out",
        "--budget",
        "--selection",
        "--checkpoint",
        "--max-rise",
        "--temperature",
        "--device",
    },
    "submit": {"--out", "--address", "--limit", "--data", "--submission-id", "--wait", "--no-wait"},
    "score": {"--benchmarks", "--confirm-run-unsafe-code", "--workers"},
    "check": {"--sample", "--seed", "--device"},
    "report": {"--html", "--json", "--csv"},
    "models": set[str](),
    "benchmarks": {"--data", "--num-fewshot"},
    "prefetch": {"--data"},
    "methods": set[str](),
    "export": {"--format", "--to", "--benchmarks"},
    "import": {"--benchmark", "--out", "--data", "--model", "--temperature", "--repeats"},
    "lm-eval": set[str](),
    "doctor": {"--data", "--out"},
}


def _flags(name: str) -> set[str]:
    """The option names of a command as typer builds it."""
    group = typer.main.get_command(cli.build_app([name]))
    (command,) = (found for known, found in vars(group)["commands"].items() if known == name)
    names = {word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts)}
    return {word for word in names if word.startswith("--")}


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_flags_are_the_listed_ones(name: str) -> None:
    assert _flags(name) == FLAGS[name]


def test_commands_are_the_listed_ones() -> None:
    assert set(cli.COMMANDS) == set(FLAGS)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dlmgrid.jobs.cli", *arguments],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_help_lists_every_command_and_loads_none() -> None:
    program = (
        "import sys\n"
        "from dlmgrid.jobs import cli\n"
        "try:\n    cli.main(['--help'])\n"
        "except SystemExit as end:\n    print('status', end.code)\n"
        "print([name for name in ('torch', 'ray', 'pyarrow', 'pydantic') if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    for name, summary in cli.COMMANDS.items():
        assert f"  {name} " in result.stdout
        assert summary in result.stdout
    assert result.stdout.endswith("status 0\n[]\n")


@pytest.mark.parametrize("arguments", [(), ("reprot",), ("--verbose",), ("methods", "--all"), ("check",)])
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    result = _run(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_input_error_is_one_line_and_exit_code_2() -> None:
    result = _run("methods", "sdd")
    assert result.returncode == 2
    assert result.stderr == "error: unknown method 'sdd'; did you mean 'ssd'?\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "grid.yaml", "--out", ""), "--out is empty; give a value"),
        (("plan", "grid.yaml", "--out="), "--out is empty; give a value"),
        (("report", ""), "argument is empty; give a value"),
        (("plan", "a\0b"), r"argument 'a\x00b' holds a NUL character; remove it"),
    ],
)
def test_an_argument_that_no_path_can_be_is_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}")
    assert printed.count("\n") == 1


def test_the_command_to_run_next_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    out = tmp_path / "kill t1 ü"
    out.mkdir()
    for code in (ExitCode.DONE, ExitCode.NOT_EXACT):
        command = run.summary(out, code).rpartition("dlmgrid ")[2]
        assert shlex.split(command)[1:] == [str(out)]


def test_version() -> None:
    result = _run("--version")
    assert (result.returncode, result.stdout) == (0, "0.1.0\n")


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (1, 1), (4, 4), (5, 5)])
def test_a_commands_return_value_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, returned: int | None, status: int
) -> None:
    monkeypatch.setattr(cli, "load_command", lambda name: lambda: returned)
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor"])
    assert end.value.code == status


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_command", lambda name: interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor"])
    assert end.value.code == 130


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'evalplus'", name="evalplus.data")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        InputError, match="`dlmgrid score` needs the package evalplus, which is not installed"
    ):
        cli.load_command("score")


def test_a_fault_of_our_own_is_not_taken_for_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'dlmgrid.workers.scoer'", name="dlmgrid.workers.scoer")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError):
        cli.load_command("score")
