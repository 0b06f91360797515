"""Recording through Ray actors: files beside the rows, resumed and extended by the same command."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlmgrid.cluster.grid import read_grid
from dlmgrid.cluster.run import ExitCode, RunRequest, run_grid
from dlmgrid.cluster.sources import installed_sources
from dlmgrid.cluster.store import load
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.trajectories.trajectory import load_trajectories

GRID = """
name: recorded
models: [reference]
benchmarks: [{{name: words, gen_length: 8, limit: 1}}]
temperatures: {temperatures}
methods: [ssd]
budgets: [4]
resources: {{num_actors: 1}}
"""


def record(folder: Path, temperatures: list[int]) -> ExitCode:
    path = folder / "grid.yaml"
    path.write_text(GRID.format(temperatures=temperatures))
    return run_grid(
        RunRequest(
            grid=read_grid(path), out=folder / "out", sources=installed_sources(), style="quiet", records=True
        )
    )


@pytest.mark.usefixtures("local_ray")
def test_the_draft_free_cells_are_recorded_and_the_same_command_resumes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert record(tmp_path, [0]) is ExitCode.DONE
    (first,) = (out / "trajectories").iterdir()
    written = first.stat().st_mtime_ns
    assert record(tmp_path, [0, 1]) is ExitCode.DONE
    assert first.stat().st_mtime_ns == written
    rows = {row["cell_key"]: row for row in load(out).table.to_pylist()}
    assert {row["method"] for row in rows.values()} == {"none"}
    trajectories = list(load_trajectories(out))
    assert sorted(t.temperature for t in trajectories) == [0, 1]
    for trajectory in trajectories:
        row = rows[trajectory.settings["cell_key"]]
        assert trajectory.num_steps == row["nfe_denoise"]
        assert [token for commits in trajectory.commits for _, token in commits] == row["commit_tokens"]


@pytest.mark.usefixtures("local_ray")
def test_rows_whose_steps_are_damaged_or_gone_are_recorded_again_by_the_same_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert record(tmp_path, [0]) is ExitCode.DONE
    (file,) = (out / "trajectories").iterdir()
    whole = [trajectory.commits for trajectory in load_trajectories(out)]
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(InputError, match="not a whole trajectory file"):
        list(load_trajectories(out))
    assert record(tmp_path, [0]) is ExitCode.DONE
    assert [trajectory.commits for trajectory in load_trajectories(out)] == whole
    assert sorted(path.name for path in (out / "damaged").iterdir()) == [file.name, f"steps-{file.name}"]

    (again,) = (out / "trajectories").iterdir()
    again.unlink()
    assert record(tmp_path, [0]) is ExitCode.DONE
    assert [trajectory.commits for trajectory in load_trajectories(out)] == whole
    assert load(out).complete
