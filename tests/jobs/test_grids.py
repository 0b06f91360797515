"""The example grids: they load, and their first lines say what to change and how the files that they name are made."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer

from dlmgrid.cluster.grid import read_grid
from dlmgrid.jobs import cli

GRIDS = sorted((Path(__file__).resolve().parents[2] / "jobs" / "grids").glob("*.yaml"))
NEEDS_NO_DATA = {"words", "functions", "words_train", "functions_train"}


def _header(grid: Path) -> list[str]:
    lines = grid.read_text(encoding="utf-8").splitlines()
    first = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:first]]


def _commands(grid: Path) -> list[list[str]]:
    return [shlex.split(line) for line in _header(grid) if line.startswith("dlmgrid ")]


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_a_grid_loads_and_says_what_to_change_and_what_data_it_needs(path: Path) -> None:
    grid = read_grid(path).grid
    header = " ".join(_header(path))
    assert header
    assert grid.name == path.stem
    if any(model.path.startswith("/") for model in grid.models):
        assert "Change the model's path to" in header
    is_replayed = any(words[1] == "replay" for words in _commands(path))
    if not is_replayed and {entry.name for entry in grid.benchmarks} - NEEDS_NO_DATA:
        assert "--data DIR" in header and "prefetch" in header
    if grid.kernels == "triton" and not is_replayed:
        assert grid.resources.device == "cuda"


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_the_commands_in_its_first_lines_have_the_options_that_they_use(path: Path) -> None:
    for words in _commands(path):
        group = typer.main.get_command(cli.build_app([words[1]]))
        (command,) = (found for name, found in vars(group)["commands"].items() if name == words[1])
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, words
        for word in words:
            if word.startswith("jobs/"):
                assert path.parents[2] / word in GRIDS, word


def test_every_file_that_a_grid_names_is_made_by_a_command_in_their_first_lines() -> None:
    made = {
        words[words.index("--out") + 1]
        for grid in GRIDS
        for words in _commands(grid)
        if words[1] in ("calibrate", "train-order", "train-sets")
    }
    for path in GRIDS:
        for method in read_grid(path).grid.methods:
            named = [*(method.graph or []), *([method.checkpoint] if method.checkpoint else [])]
            assert set(named) - {"reference"} <= made, path


def test_the_study_is_numbered_without_a_gap() -> None:
    headers = [_header(path)[0] for path in GRIDS if path.stem.startswith("study_")]
    numbers = sorted(header.removeprefix("The study, ").partition(":")[0] for header in headers)
    assert numbers == [f"{number} of 5" for number in range(1, 6)]
