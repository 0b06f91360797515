"""Joining Ray, what an actor asks for, and the environment it gets.

``ray.init`` is called plainly: it honours RAY_ADDRESS and a submitted job's own runtime environment, and
starts a local Ray where there is no cluster.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from dlmgrid.cluster.grid import Resources
from dlmgrid.workers.errors import InputError

FORWARDED_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "DLMGRID_DATA",
    "HF_DATASETS_CACHE",
    "HF_DATASETS_OFFLINE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "XDG_CACHE_HOME",
)
AUTH_REMEDY = (
    "set RAY_AUTH_MODE=token with the cluster's token in RAY_AUTH_TOKEN (or in a file that "
    "RAY_AUTH_TOKEN_PATH names; "
    "`ray get-auth-token` on the head node prints it), or RAY_AUTH_MODE=disabled on both sides"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """A joined Ray. ``is_own`` when this process started it, so no other node will ever join; ``opened`` when
    :func:`connect` joined it, so that closing leaves it."""

    is_own: bool
    opened: bool
    address: str
    job_id: str

    def close(self) -> None:
        if self.opened:
            ray.shutdown()


def connect(address: str | None) -> Connection:
    """Join the cluster at ``address`` (None: RAY_ADDRESS, a running one, or a new local one).

    Raises InputError when the cluster cannot be reached or refuses this client.
    """
    if ray.is_initialized():
        context = ray.get_runtime_context()
        return Connection(
            is_own=_is_own(), opened=False, address=context.gcs_address, job_id=context.get_job_id()
        )
    # A Ray started here gives its workers a low priority (nice 15) unless told otherwise: a busy machine then starves
    # the very processes that do the work. On a cluster that others started, their setting stands.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError as error:
        raise InputError(
            f"the Ray cluster refuses this client (token authentication): {AUTH_REMEDY}"
        ) from error
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = address or os.environ.get("RAY_ADDRESS") or "this machine"
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"no Ray at {where} ({reason}); check --address and RAY_ADDRESS, and if authentication is on "
            f"{AUTH_REMEDY}"
        ) from error
    context = ray.get_runtime_context()
    return Connection(is_own=_is_own(), opened=True, address=context.gcs_address, job_id=context.get_job_id())


def num_slots(resources: Resources) -> int:
    """How many actors the cluster's nodes can hold, by total resources of the nodes alive now."""
    slots = 0
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if not node["Alive"]:
            continue
        total = node["Resources"]
        fits = int(total.get("CPU", 0) // resources.cpus_per_actor)
        if resources.num_gpus:
            fits = min(fits, int(total.get("GPU", 0) / resources.num_gpus + 1e-6))
        slots += fits
    return slots


def describe_resources(resources: Resources) -> str:
    """``needs 1 CPU, 1 GPU an actor; the cluster has 8 CPU, 0 GPU (free: 8 CPU, 0 GPU)``."""
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    need = f"{resources.cpus_per_actor} CPU" + (f", {resources.num_gpus:g} GPU" if resources.num_gpus else "")
    return f"needs {need} an actor; the cluster has {cluster_amounts()} (free: {_amounts(free)})"


def describe_wait(resources: Resources, num_starting: int, *, is_own: bool) -> str:
    """Why ``num_starting`` actors are not up, as far as the cluster's amounts and this machine's load tell."""
    return explain_wait(
        resources,
        num_starting,
        free=ray.available_resources(),  # type: ignore[no-untyped-call]
        is_own=is_own,
        load=os.getloadavg()[0],
        num_cpus=os.cpu_count() or 1,
    )


def explain_wait(
    resources: Resources,
    num_starting: int,
    *,
    free: Mapping[str, float],
    is_own: bool,
    load: float,
    num_cpus: int,
) -> str:
    """Whether actors hold what they need and are starting, or wait for it; and whether the machine is too busy.

    ``free`` is what Ray has not handed out, ``load`` the runnable processes of the last minute on ``num_cpus``. A
    Ray of one's own (``is_own``) is used by nobody else, so what is not free there is held by these actors.
    """
    actors = f"{num_starting} actor{'s' if num_starting != 1 else ''}"
    lacks = free.get("CPU", 0) < resources.cpus_per_actor or free.get("GPU", 0) < resources.num_gpus
    if not num_starting:
        text = "none is asked for yet, the cluster is too small for one"
    elif not lacks:
        text = f"there is room for more, Ray is still starting the processes of {actors}"
    elif is_own:
        text = f"the resources are held by this run's own {actors}, still starting"
    else:
        text = (
            f"the resources are held by this run's {actors}, still starting, or by others (see `ray status`)"
        )
    if is_own and load > num_cpus:
        text += f"; this machine is busy (load {load:.1f} on {num_cpus} CPUs), which makes that slow"
    return text


def cluster_amounts() -> str:
    """``8 CPU, 1 GPU``: what the nodes have in all."""
    return _amounts(ray.cluster_resources())  # type: ignore[no-untyped-call]


def actor_options(resources: Resources, index: int) -> dict[str, Any]:
    """Options of one actor. Ray retries nothing: the driver owns every retry."""
    return {
        "num_cpus": resources.cpus_per_actor,
        "num_gpus": resources.num_gpus,
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": actor_environment(resources, index)},
    }


def actor_environment(resources: Resources, index: int) -> dict[str, str]:
    """Variables of an actor: our defaults, then the driver's own, and nothing that the submitted job sets
    itself."""
    triton = os.environ.get("TRITON_CACHE_DIR") or Path(tempfile.gettempdir()) / f"dlmgrid-triton-{_user()}"
    values = {
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(resources.cpus_per_actor),
        "TRITON_CACHE_DIR": str(Path(triton) / f"actor-{index}"),
    }
    values |= {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
    set_by_job = (ray.get_runtime_context().runtime_env or {}).get("env_vars") or {}
    return {name: value for name, value in values.items() if name not in set_by_job}


def _amounts(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU, {resources.get('GPU', 0):g} GPU"


def _is_own() -> bool:
    node = ray._private.worker._global_node
    return node is not None and bool(node.head)


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else "user"
