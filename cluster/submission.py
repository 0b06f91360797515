"""Sending a grid to a Ray cluster as a job: what is uploaded, what would be missed there, and why a cluster refuses.

Ray zips the working folder, so it is looked at first: its size, and files that ignore rules would leave out.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmgrid.cluster.connect import AUTH_REMEDY
from dlmgrid.cluster.diagnosis import OFFLINE_FLAGS
from dlmgrid.workers.errors import InputError

MAX_UPLOAD_BYTES = 100 * 2**20
EXCLUDES = (
    ".git",
    ".venv",
    ".ci",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
    "__pycache__",
    "*.egg-info",
    "/build",
    "/dist",
    "/out",
    "/runs",
    "/scratch",
    "/tests",
)
FORWARDED = (*OFFLINE_FLAGS, "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "DLMGRID_DATA")


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """What Ray would send: size in bytes, and the largest entries at the top of the folder."""

    num_files: int
    num_bytes: int
    largest: tuple[tuple[str, int], ...]


def measure_upload(folder: Path, needed: Sequence[Path]) -> Upload:
    """Look at what Ray would upload from ``folder``.

    Links are followed, as Ray does. Raises InputError when it is too large, naming the largest entries, or when one
    of the ``needed`` files is not among it.
    """
    included = list(uploaded_files(folder))
    sizes: dict[str, int] = {}
    for path in included:
        top = path.relative_to(folder).parts[0]
        sizes[top] = sizes.get(top, 0) + path.stat().st_size
    largest = tuple(sorted(sizes.items(), key=lambda entry: -entry[1])[:3])
    total = sum(sizes.values())
    if total > MAX_UPLOAD_BYTES:
        names = ", ".join(f"{name} ({size / 2**20:.0f} MiB)" for name, size in largest)
        raise InputError(
            f"{folder} would upload {total / 2**20:.0f} MiB, more than the {MAX_UPLOAD_BYTES / 2**20:.0f} MiB that "
            f"Ray takes: {names}; move the largest out of the checkout or name them in .rayignore"
        )
    present = {path.resolve() for path in included}
    for path in needed:
        if path.resolve() not in present:
            raise InputError(
                f"{path} would not be uploaded (outside {folder}, or left out by .gitignore, .rayignore or the "
                "excludes); move it, or change the ignore rule"
            )
    return Upload(num_files=len(included), num_bytes=total, largest=largest)


def uploaded_files(folder: Path) -> Iterator[Path]:
    """The files that Ray would put into the package: its own walk and ignore rules, with :data:`EXCLUDES`.

    Ray has no public name for that walk; a test holds these two functions to what is used here.
    """
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    found: list[Path] = []
    is_ignored: Callable[[Path], bool] = _get_excludes(folder, list(EXCLUDES))
    include_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE") != "1"
    quiet = logging.getLogger("dlmgrid.submission.quiet")
    quiet.setLevel(logging.WARNING)
    _dir_travel(folder, [is_ignored], found.append, include_gitignore=include_gitignore, logger=quiet)
    return (path for path in found if path.is_file())


def entrypoint(grid: str, out: Path, options: Sequence[str]) -> str:
    """The command of the job, as the head node runs it in the unpacked folder."""
    return shlex.join(["python", "-m", "dlmgrid.jobs.grid", grid, "--out", str(out), *options])


def connect_client(address: str) -> Any:
    """A job client. Raises InputError with the remedy when the cluster is not there or refuses."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    if not address.startswith(("http://", "https://")):
        raise InputError(f"--address {address} is not a dashboard address; give http://HOST:8265")
    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        raise explain_refusal(address, error) from error
    except ConnectionError as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"no Ray dashboard at {address} ({reason}); check the port, and any proxy"
        ) from error
    except RuntimeError as error:
        raise explain_refusal(address, error) from error


def explain_refusal(address: str, error: Exception) -> InputError:
    """An InputError for a request that a cluster refused: what to set where, if it is about authentication."""
    text = " ".join(str(error).split())
    if any(word in text.lower() for word in ("401", "403", "unauthorized", "forbidden", "authentication")):
        mode = os.environ.get("RAY_AUTH_MODE", "unset")
        return InputError(f"{address} refuses this client (RAY_AUTH_MODE is {mode} here): {AUTH_REMEDY}")
    return InputError(f"{address} did not take the job: {text[:300]}")


def runtime_environment(folder: Path) -> dict[str, Any]:
    """The job's environment: the checkout, and the host's variables that workers must agree with."""
    variables = {name: os.environ[name] for name in FORWARDED if name in os.environ}
    environment: dict[str, Any] = {"working_dir": str(folder), "excludes": list(EXCLUDES)}
    if variables:
        environment["env_vars"] = variables
    return environment
