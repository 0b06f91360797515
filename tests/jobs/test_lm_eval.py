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

    def evaluate() -> None:
        assert sys.argv == ["lm-eval", "run", "--model", "dlmgrid", "--device", "cpu", "--tasks", "x"]
        DlmgridLM.num_broken_claims += num_broken

    monkeypatch.setattr(program, "cli_evaluate", evaluate)
    with pytest.raises(SystemExit) as end:
        cli.main(["lm-eval", "--device", "cpu", "--tasks", "x"])
    assert end.value.code == status
