"""The Ray actor's body: one process, one device, one model at a time. It imports neither ray nor torch.

The driver wraps the class with ``ray.remote``; :class:`~dlmgrid.workers.unit_runner.UnitRunner` loads models.

Nothing large travels: a work unit goes in, counts and a checksum come out, rows stay in the staging file.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import dlmgrid
from dlmgrid.workers.errors import DlmgridError, InputError, OutOfMemoryError
from dlmgrid.workers.units import UnitResult, WorkUnit

REPORTED_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "HF_DATASETS_OFFLINE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "TOKENIZERS_PARALLELISM",
    "TRANSFORMERS_OFFLINE",
    "TRITON_CACHE_DIR",
)


class Runner(Protocol):
    """What decodes a unit: ``UnitRunner``, or a fake of :mod:`dlmgrid.workers.testing`."""

    def __init__(self, device: str, actor: str) -> None: ...

    def run(self, unit: WorkUnit) -> UnitResult: ...

    def fingerprint(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorDescription:
    """What an actor says about itself once it is up; plain values for the run record.

    ``sees_output`` tells whether the output folder, probed by a file the driver wrote, is the same one there.
    """

    name: str
    host: str
    pid: int
    package: str
    version: str
    source_digest: str
    python: str
    runtime_fingerprint: str
    environment: dict[str, str]
    num_threads: int
    sees_output: bool


def source_digest() -> str:
    """16 hexadecimal digits over every Python source of this package: equal when the code is equal."""
    root = Path(dlmgrid.__file__).parent
    sha = hashlib.sha256()
    for folder in ("cluster", "jobs", "kernels", "workers"):
        for path in sorted((root / folder).rglob("*.py")):
            sha.update(path.relative_to(root).as_posix().encode() + b"\0")
            sha.update(path.read_bytes() + b"\0")
    return sha.hexdigest()[:16]


def load_runner(reference: str) -> type[Runner]:
    """The class named by ``module:Class``. Raises InputError when there is none."""
    module_name, _, class_name = reference.partition(":")
    try:
        found: type[Runner] = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"the runner {reference!r} cannot be imported here ({error}); run `dlmgrid doctor`"
        ) from error
    return found


class DecodeActor:
    """Runs work units one after another on ``device`` with ``num_threads`` CPU threads.

    The runner starts with the first call, :meth:`describe`, so that its errors arrive as what they are.
    """

    def __init__(self, name: str, runner: str, device: str, num_threads: int) -> None:
        self._name = name
        self._runner_name = runner
        self._device = device
        self._num_threads = num_threads
        self._runner: Runner | None = None

    def ping(self) -> int:
        """The process id: an answer means that the actor is alive and idle."""
        return os.getpid()

    def describe(self, probe: str) -> ActorDescription:
        """Who and where this actor is, the effective environment, and whether it sees the file ``probe``.

        Raises InputError when the runner cannot start on this machine (a missing package, no such device).
        """
        runner = self._start()
        return ActorDescription(
            name=self._name,
            host=socket.gethostname(),
            pid=os.getpid(),
            package=str(Path(dlmgrid.__file__).parent),
            version=dlmgrid.__version__,
            source_digest=source_digest(),
            python=sys.version.split()[0],
            runtime_fingerprint=runner.fingerprint(),
            environment={name: os.environ[name] for name in REPORTED_VARIABLES if name in os.environ},
            num_threads=self._num_threads,
            sees_output=Path(probe).is_file(),
        )

    def run(self, unit: WorkUnit) -> UnitResult:
        """Decode one unit. Raises the package's own errors; running out of device memory becomes
        OutOfMemoryError whatever library said it."""
        try:
            return self._start().run(unit)
        except DlmgridError:
            raise
        except MemoryError as error:
            raise OutOfMemoryError(
                f"host memory exhausted at {unit.max_in_flight} samples in flight"
            ) from error
        except Exception as error:
            if _is_device_out_of_memory(error):
                first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
                message = f"device memory exhausted at {unit.max_in_flight} samples in flight: {first_line}"
                raise OutOfMemoryError(message) from error
            raise

    def _start(self) -> Runner:
        if self._runner is None:
            os.environ["OMP_NUM_THREADS"] = str(self._num_threads)
            runner_class = load_runner(self._runner_name)
            self._runner = runner_class(self._device, f"{self._name}@{socket.gethostname()}")
            torch = sys.modules.get("torch")
            if torch is not None:
                torch.set_num_threads(self._num_threads)
        return self._runner


def _is_device_out_of_memory(error: BaseException) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)
