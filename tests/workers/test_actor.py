"""The actor's body without Ray: what it says about itself, and how errors leave it."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

import dlmgrid
from dlmgrid.workers.actor import DecodeActor, load_runner, source_digest
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.errors import InputError, OutOfMemoryError, TransientError
from dlmgrid.workers.units import Key, UnitResult, WorkUnit

FAKE = "dlmgrid.workers.testing.fake_runner:FakeUnitRunner"


def unit() -> WorkUnit:
    cell = Cell(
        model="m", benchmark="b", prompt_version="1", method="none", budget=0, temperature=0.0,
        block_length=32, gen_length=64,
    )  # fmt: skip
    return WorkUnit(cell=cell, keys=(Key("a", 0),), checkpoint="", inputs="", output="", max_in_flight=4)


def raising(monkeypatch: pytest.MonkeyPatch, error: Exception) -> DecodeActor:
    """An actor whose runner raises ``error``."""

    class Runner:
        def __init__(self, device: str, actor: str) -> None:
            pass

        def fingerprint(self) -> str:
            return "f"

        def run(self, unit: WorkUnit) -> UnitResult:
            raise error

    module: Any = types.ModuleType("raising_runner")
    module.Runner = Runner
    monkeypatch.setitem(sys.modules, "raising_runner", module)
    return DecodeActor("actor-0", "raising_runner:Runner", "cpu", 1)


def test_an_actor_describes_its_place_code_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    probe = tmp_path / "probe"
    actor = DecodeActor("actor-3", FAKE, "cpu", 2)
    description = actor.describe(str(probe))
    assert not description.sees_output
    probe.touch()
    assert actor.describe(str(probe)).sees_output
    assert (description.name, description.version) == ("actor-3", dlmgrid.__version__)
    assert description.package == str(Path(dlmgrid.__file__).parent)
    assert description.environment["HF_HUB_OFFLINE"] == "1"
    assert description.environment["OMP_NUM_THREADS"] == "2"
    assert description.runtime_fingerprint == "fake-runtime-cpu"
    assert description.source_digest == source_digest()


def test_the_packages_own_errors_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (InputError("x"), OutOfMemoryError("y"), TransientError("z"), ValueError("unforeseen")):
        with pytest.raises(type(error), match=str(error)):
            raising(monkeypatch, error).run(unit())


def test_running_out_of_memory_is_one_error_whoever_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(
        OutOfMemoryError, match=r"device memory exhausted at 4 samples .*: CUDA out of memory"
    ):
        raising(monkeypatch, torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")).run(unit())
    with pytest.raises(OutOfMemoryError, match="host memory exhausted at 4 samples"):
        raising(monkeypatch, MemoryError()).run(unit())


def test_a_runner_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(
        InputError, match=r"'nowhere:Runner' cannot be imported here .*; run `dlmgrid doctor`"
    ):
        load_runner("nowhere:Runner")
    with pytest.raises(InputError, match="has no attribute 'Missing'"):
        DecodeActor("a", "dlmgrid.workers.testing.fake_runner:Missing", "cpu", 1).describe("")
