"""Why actors are not up yet, in words that tell a busy machine from a full cluster."""

from __future__ import annotations

import pytest

from dlmgrid.cluster.connect import explain_wait
from dlmgrid.cluster.grid import Resources


@pytest.mark.parametrize(
    ("num_starting", "free", "is_own", "load", "text"),
    [
        (2, {}, True, 0.5, "the resources are held by this run's own 2 actors, still starting"),
        (
            1,
            {},
            True,
            9.25,
            "the resources are held by this run's own 1 actor, still starting; this machine is busy "
            "(load 9.2 on 2 CPUs), which makes that slow",
        ),
        (
            2,
            {"CPU": 0.0},
            False,
            9.0,
            "the resources are held by this run's 2 actors, still starting, or by others (see `ray status`)",
        ),
        (
            1,
            {"CPU": 1.0},
            True,
            0.5,
            "there is room for more, Ray is still starting the processes of 1 actor",
        ),
        (0, {"CPU": 1.0}, False, 0.5, "none is asked for yet, the cluster is too small for one"),
    ],
)
def test_a_wait_says_whether_actors_start_or_lack_room(
    num_starting: int, free: dict[str, float], is_own: bool, load: float, text: str
) -> None:
    said = explain_wait(Resources(), num_starting, free=free, is_own=is_own, load=load, num_cpus=2)
    assert said == text


def test_a_missing_gpu_is_a_missing_resource() -> None:
    resources = Resources(device="cuda")
    said = explain_wait(resources, 1, free={"CPU": 8.0}, is_own=False, load=0, num_cpus=8)
    assert said.startswith("the resources are held by")
