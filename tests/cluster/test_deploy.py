"""The deployment files: valid YAML that says what a run needs, and versions that agree with the tested ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "cluster" / "deploy"


def pinned(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))


@pytest.fixture
def job() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    return document


def test_the_job_runs_the_entry_point_into_the_mounted_volume(job: dict[str, Any]) -> None:
    spec = job["spec"]
    words = spec["entrypoint"].split()
    assert words[:3] == ["python", "-m", "dlmgrid.jobs.grid"]
    out = Path(words[words.index("--out") + 1])
    cluster = spec["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert out.is_relative_to(mounts["results"])
        assert mounts["shared-memory"] == "/dev/shm"
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert "persistentVolumeClaim" in volumes["results"]
        assert volumes["shared-memory"]["emptyDir"]["sizeLimit"]


def test_the_job_is_retried_by_a_fresh_cluster_not_by_a_second_submitter(job: dict[str, Any]) -> None:
    assert job["spec"]["backoffLimit"] > 0
    assert job["spec"]["submitterConfig"]["backoffLimit"] == 0
    assert job["spec"]["shutdownAfterJobFinishes"] is True


def test_the_head_computes_nothing_and_workers_have_gpus_and_scale_from_zero(job: dict[str, Any]) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] == 0
        container = group["template"]["spec"]["containers"][0]
        assert container["resources"]["limits"]["nvidia.com/gpu"] >= 1
    variables = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    assert all(isinstance(value, str) for value in variables.values())


def test_versions_agree_with_the_tested_ones(job: dict[str, Any]) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == pinned("ray")
    images = {
        group["template"]["spec"]["containers"][0]["image"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    }
    assert len(images) == 1
    assert images.pop().endswith(f"ray{pinned('ray')}")
    commands = "\n".join(yaml.safe_load((DEPLOY / "cluster.yaml").read_text())["setup_commands"])
    for package in ("torch", "triton", "transformers", "pyarrow"):
        assert f'"{package}=={pinned(package)}"' in commands
    assert f'"ray[default]=={pinned("ray")}"' in commands


def test_the_launcher_starts_a_head_without_gpus_and_workers_on_demand() -> None:
    cluster = yaml.safe_load((DEPLOY / "cluster.yaml").read_text())
    types = cluster["available_node_types"]
    assert types[cluster["head_node_type"]]["resources"] == {"CPU": 0, "GPU": 0}
    workers = {name: kind for name, kind in types.items() if name != cluster["head_node_type"]}
    assert all(kind["min_workers"] == 0 and kind["resources"]["GPU"] >= 1 for kind in workers.values())
    assert {
        "cluster_name",
        "provider",
        "idle_timeout_minutes",
        "file_mounts",
        "setup_commands",
    } <= cluster.keys()
