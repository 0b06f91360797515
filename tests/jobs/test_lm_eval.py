"""``dlmgrid lm-eval`` hands its arguments to lm-eval's own command line."""

from __future__ import annotations

import sys

import pytest

from dlmgrid.jobs import cli, lm_eval

pytest.importorskip("lm_eval")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--tasks", "x"], ["run", "--model", "dlmgrid", "--device", "cpu", "--tasks", "x"]),
        (["run", "--tasks", "x"], ["run", "--model", "dlmgrid", "--device", "cpu", "--tasks", "x"]),
        (["--model", "dlmgrid", "-t", "x"], ["run", "--device", "cpu", "--model", "dlmgrid", "-t", "x"]),
        (["--device=cpu", "-t", "x"], ["run", "--model", "dlmgrid", "--device=cpu", "-t", "x"]),
        (["run", "--model", "hf", "-t", "x"], ["run", "--model", "hf", "-t", "x"]),
        (["--config", "a.yaml"], ["--config", "a.yaml"]),
        (["ls", "tasks"], ["ls", "tasks"]),
        (["run", "--help"], ["run", "--help"]),
        ([], []),
    ],
)
def test_model_and_device_are_put_in_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch, given: list[str], expected: list[str]
) -> None:
    monkeypatch.setattr(lm_eval, "has_gpu", lambda: False)
    assert lm_eval.completed(given) == expected


def test_no_device_is_put_in_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_eval, "has_gpu", lambda: True)
    assert lm_eval.completed(["-t", "x"]) == ["run", "--model", "dlmgrid", "-t", "x"]


def test_help_is_that_of_lm_eval(capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.argv)
    with pytest.raises(SystemExit) as end:
        cli.main(["lm-eval", "run", "--help"])
    assert end.value.code == 0
    assert "usage: lm-eval run" in capsys.readouterr().out
    assert sys.argv == before


@pytest.mark.parametrize(("num_broken", "status"), [(0, 0), (2, 4)])
def test_broken_claims_give_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, num_broken: int, status: int
) -> None:
    import lm_eval.__main__ as program

    from dlmgrid.jobs.lm_eval_model import DlmgridLM

    monkeypatch.setattr(DlmgridLM, "num_broken_claims", 5)

    given = ["--device", "cpu", "--tasks", "x", "--model_args", "path=reference"]

    def evaluate() -> None:
        assert sys.argv == ["lm-eval", "run", "--model", "dlmgrid", *given]
        DlmgridLM.num_broken_claims += num_broken

    monkeypatch.setattr(program, "cli_evaluate", evaluate)
    with pytest.raises(SystemExit) as end:
        cli.main(["lm-eval", *given])
    assert end.value.code == status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("path=reference,metod=ssd", "unknown argument 'metod'; did you mean 'method'?"),
        ("path=reference,method=ssd,budget=-8", "budget -8 is impossible"),
        ("path=/no/such/folder", "'/no/such/folder' is no folder here"),
        ("method=ssd", "name one checkpoint"),
    ],
)
def test_model_arguments_are_refused_before_lm_eval_loads_anything(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import lm_eval.__main__ as program

    monkeypatch.setattr(program, "cli_evaluate", lambda: pytest.fail("lm-eval was started"))
    with pytest.raises(SystemExit) as end:
        cli.main(["lm-eval", "--tasks", "x", "--model_args", arguments, "--device", "cpu"])
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_a_task_that_lm_eval_lacks_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.tasks import TaskManager

    task_manager = TaskManager(include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda *_, **__: task_manager)
    words = ["--tasks", "gsm8kk", "--model_args", "path=reference", "--device", "cpu"]
    with pytest.raises(SystemExit) as end:
        cli.main(["lm-eval", *words])
    assert end.value.code == 2
    assert "error: lm-eval: Tasks not found: gsm8kk; `dlmgrid lm-eval ls tasks`" in capsys.readouterr().err
