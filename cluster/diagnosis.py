"""What ``doctor`` looks at. Each check is a function of its own that returns findings and changes nothing.

Torch is asked in a process of its own: the head node has none, and a CUDA context here would outlive the question.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import dlmgrid
from dlmgrid.workers.benchmarks.data import DATA_VARIABLE, prefetched_folder

MIN_PYTHON = (3, 11)
# lowest version supported, newest version tested
TESTED = {
    "ray": ("2.52", "2.60"),
    "torch": ("2.11", "2.13"),
    "triton": ("3.6", "3.7"),
    "transformers": ("5.17", "5.24"),
    "tokenizers": ("0.22", "0.23"),
    "safetensors": ("0.6", "0.8"),
    "pyarrow": ("20", "26"),
    "datasets": ("4.0", "5.2"),
    "lm-eval": ("0.4.13", "0.4.13"),
    "evalplus": ("0.3.1", "0.3.1"),
    "pydantic": ("2.11", "2.14"),
    "typer": ("0.20", "0.29"),
}
NEEDED_BY_DRIVER = ("ray", "pyarrow", "pydantic", "typer")
FOLDERS = ("cluster", "workers", "kernels", "jobs")
OFFLINE_FLAGS = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
GPU_VISIBILITY_VARIABLE = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
MIN_FREE_GIBIBYTES = 2.0

_TORCH_PROBE = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": []}
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found["devices"].append([torch.cuda.get_device_name(index), free, total])
    found["bf16"] = torch.cuda.is_bf16_supported()
    from dlmgrid.kernels.triton_support import usable_types
    found["kernels"] = usable_types("cuda")
print(json.dumps(found))
"""


class Level(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of ``doctor``. ``remedy`` is a command or a setting, "" where none is needed."""

    level: Level
    subject: str
    state: str
    remedy: str = ""


def diagnose(*, data: str | None = None, out: Path | None = None) -> list[Finding]:
    """Every finding about this machine, in the order to read them."""
    return [
        *check_python(),
        *check_links(Path(dlmgrid.__file__).parent),
        *check_shadow(Path.cwd()),
        *check_packages(),
        *check_ray(),
        *check_devices(),
        *check_memory(),
        *check_data(data),
        *check_offline_flags(),
        *check_out(out),
    ]


def check_python(
    version: tuple[int, int] = (sys.version_info.major, sys.version_info.minor),
) -> Iterator[Finding]:
    text = ".".join(map(str, version))
    if version < MIN_PYTHON:
        yield Finding(level=Level.FAIL, subject="python", state=text, remedy="install Python 3.11 or newer")
    else:
        yield Finding(level=Level.OK, subject="python", state=f"{text} at {sys.executable}")


def check_links(package: Path) -> Iterator[Finding]:
    """The four folders must be there as links or folders, not as the small text files of a checkout without links."""
    lost = [name for name in FOLDERS if not (package / name).is_dir()]
    if lost:
        yield Finding(
            level=Level.FAIL,
            subject="dlmgrid",
            state=f"{package} has lost its links to {', '.join(lost)}",
            remedy="git config core.symlinks true && git checkout -- dlmgrid (or clone: a zip keeps no links)",
        )
    else:
        yield Finding(level=Level.OK, subject="dlmgrid", state=f"{dlmgrid.__version__} at {package}")


def shadowing_folder(current: Path) -> Path | None:
    """The folder ``dlmgrid`` in ``current`` that worker processes would import in place of the package: a clone of this
    repository seen from the folder around it. Only an editable installation can be hidden so: a package that an entry
    of the path holds comes before a folder that is none."""
    folder = current / "dlmgrid"
    package = Path(dlmgrid.__file__).resolve().parent
    is_on_path = any((Path(entry or ".") / "dlmgrid").resolve() == package for entry in sys.path)
    is_package = (folder / "__init__.py").exists()
    return folder if folder.is_dir() and not is_package and not is_on_path else None


def check_shadow(current: Path) -> Iterator[Finding]:
    """Nothing in the current folder may hide the package."""
    if (folder := shadowing_folder(current)) is not None:
        yield Finding(
            level=Level.FAIL,
            subject="folder",
            state=f"{folder} hides the package dlmgrid from processes started here",
            remedy="call dlmgrid from another folder, best from within the clone",
        )


def check_packages() -> Iterator[Finding]:
    for name, (lowest, newest) in TESTED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            level = Level.FAIL if name in NEEDED_BY_DRIVER else Level.WARN
            why = "" if level is Level.FAIL else " (workers and scorers need it, a head node does not)"
            yield Finding(
                level=level,
                subject=name,
                state=f"not installed{why}",
                remedy=f"pip install '{name}>={lowest}'",
            )
            continue
        yield judge_version(name, version, lowest, newest)


def judge_version(name: str, version: str, lowest: str, newest: str) -> Finding:
    """A version below the range fails; one above it is untested."""
    found = _release(version)
    if found < _release(lowest):
        remedy = f"pip install '{name}>={lowest}'"
        return Finding(level=Level.FAIL, subject=name, state=f"{version} is below {lowest}", remedy=remedy)
    if found[: len(_release(newest))] > _release(newest):
        remedy = "constraints.txt names the tested versions"
        return Finding(
            level=Level.WARN,
            subject=name,
            state=f"{version} is newer than {newest}, the newest tested",
            remedy=remedy,
        )
    return Finding(level=Level.OK, subject=name, state=version)


def check_ray() -> Iterator[Finding]:
    """How Ray authenticates here, and what a process that asked for no GPU sees."""
    mode = os.environ.get("RAY_AUTH_MODE")
    token = _token_source()
    if mode == "token" and token is None:
        yield Finding(
            level=Level.FAIL,
            subject="ray auth",
            state="RAY_AUTH_MODE=token, but there is no token",
            remedy="set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, or run `ray get-auth-token --generate`",
        )
    elif mode is None:
        state = f"RAY_AUTH_MODE is unset (token: {token or 'none'}): a local Ray uses one, a cluster's client does not"
        yield Finding(
            level=Level.WARN if token is None else Level.OK,
            subject="ray auth",
            state=state,
            remedy="if a cluster refuses you, set RAY_AUTH_MODE=token and its token here, or disabled on both sides",
        )
    else:
        yield Finding(
            level=Level.OK, subject="ray auth", state=f"RAY_AUTH_MODE={mode} (token: {token or 'none'})"
        )
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if path and not Path(path).is_file():
        yield Finding(
            level=Level.FAIL, subject="ray auth", state=f"RAY_AUTH_TOKEN_PATH names {path}, which is not there",
            remedy="mend or unset it: Ray stops at a bad path",
        )  # fmt: skip
    home_ray = Path.home() / ".ray"
    if (
        token is None
        and mode != "disabled"
        and not os.access(home_ray if home_ray.exists() else Path.home(), os.W_OK)
    ):
        yield Finding(
            level=Level.FAIL, subject="ray auth", state="the home folder is read-only: a local Ray cannot keep a token",
            remedy="set RAY_AUTH_TOKEN, or RAY_AUTH_MODE=disabled",
        )  # fmt: skip
    flag = os.environ.get(GPU_VISIBILITY_VARIABLE)
    yield Finding(
        level=Level.OK,
        subject="ray gpus",
        state=f"{GPU_VISIBILITY_VARIABLE}={flag or 'unset'}: tasks with num_gpus=0 "
        + ("see no GPU" if flag == "1" else "may see the host's GPUs (older Ray hides them)"),
    )
    address = os.environ.get("RAY_ADDRESS")
    yield Finding(
        level=Level.OK,
        subject="ray address",
        state=address or "unset: a running cluster here, else a local Ray",
    )


def check_devices() -> Iterator[Finding]:
    """Torch, CUDA, bf16 and the memory of each GPU, asked in a process of its own."""
    if not _is_installed("torch"):
        return
    result = subprocess.run(
        [sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=300, check=False
    )
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding(
            level=Level.FAIL,
            subject="torch",
            state=f"does not start: {last}",
            remedy="reinstall it: pip install -c constraints.txt torch",
        )
        return
    found = json.loads(result.stdout.splitlines()[-1])
    if not found["devices"]:
        state = "no CUDA device" + (
            f" (torch is built for CUDA {found['cuda']})" if found["cuda"] else " (torch is built for CPU)"
        )
        yield Finding(
            level=Level.WARN, subject="gpu", state=state, remedy="grids run here with resources.device: cpu"
        )
        return
    for name, free, total in found["devices"]:
        yield Finding(
            level=Level.OK,
            subject="gpu",
            state=f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free, CUDA {found['cuda']}",
        )
    if not found["bf16"]:
        yield Finding(level=Level.WARN, subject="gpu", state="no bf16", remedy="use dtype: float32")
    yield from kernel_findings(found["kernels"])


def kernel_findings(reasons: Mapping[str, str]) -> Iterator[Finding]:
    """Whether ``kernels: triton`` works on the GPU, from the reason ("" for none) against each dtype.

    What the kernels ask of a model (head width, vocabulary) is said when a run loads it.
    """
    working = [dtype for dtype, reason in reasons.items() if not reason]
    if working:
        yield Finding(level=Level.OK, subject="kernels", state=f"triton works here for {', '.join(working)}")
    for dtype, reason in reasons.items():
        if reason:
            state, _, remedy = reason.removeprefix("kernels: ").partition("; ")
            yield Finding(level=Level.WARN, subject="kernels", state=f"{dtype}: {state}", remedy=remedy)


def check_memory() -> Iterator[Finding]:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return
    available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    free = int(available.split()[1]) / 2**20
    level = Level.OK if free >= MIN_FREE_GIBIBYTES else Level.WARN
    remedy = "" if level is Level.OK else "close something, or lower resources.num_actors and max_in_flight"
    yield Finding(level=level, subject="memory", state=f"{free:.1f} GiB free", remedy=remedy)
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total / 2**30
        small = size < 1
        yield Finding(
            level=Level.WARN if small else Level.OK, subject="shared memory", state=f"{size:.1f} GiB at {shared}",
            remedy="give the container more: --shm-size=2g" if small else "",
        )  # fmt: skip


def check_data(data: str | None) -> Iterator[Finding]:
    source = data or os.environ.get(DATA_VARIABLE)
    prefetched = prefetched_folder()
    if source is None and prefetched.is_dir():
        yield Finding(level=Level.OK, subject="data", state=f"{prefetched}, filled by `dlmgrid prefetch`")
    elif source is None:
        yield Finding(
            level=Level.OK,
            subject="data",
            state="the pinned public sources",
            remedy=f"run `dlmgrid prefetch` to work offline, or give --data DIR, or set {DATA_VARIABLE}",
        )
    elif Path(source).is_dir():
        yield Finding(
            level=Level.OK, subject="data", state=f"{source} ({len(list(Path(source).iterdir()))} entries)"
        )
    else:
        yield Finding(
            level=Level.FAIL,
            subject="data",
            state=f"{source} is not a folder",
            remedy=f"mend --data or {DATA_VARIABLE}",
        )


def check_offline_flags() -> Iterator[Finding]:
    flags = {name: os.environ[name] for name in OFFLINE_FLAGS if name in os.environ}
    is_mixed = 0 < len(flags) < len(OFFLINE_FLAGS)
    state = ", ".join(f"{name}={value}" for name, value in flags.items()) or "unset: the hub may be asked"
    remedy = f"set all of {', '.join(OFFLINE_FLAGS)}" if is_mixed else ""
    yield Finding(level=Level.WARN if is_mixed else Level.OK, subject="offline", state=state, remedy=remedy)


def check_out(out: Path | None) -> Iterator[Finding]:
    """Whether a folder can be written, and how much room it has; nothing is created."""
    if out is None:
        return
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield Finding(
            level=Level.FAIL,
            subject="output",
            state=f"{out} cannot be written",
            remedy="choose another --out",
        )
        return
    free = shutil.disk_usage(existing).free / 2**30
    level = Level.OK if free >= 1 else Level.WARN
    yield Finding(
        level=level,
        subject="output",
        state=f"{out}: {free:.0f} GiB free",
        remedy="" if level is Level.OK else "make room",
    )


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _release(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as (2, 13, 0)."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _token_source() -> str | None:
    """Where Ray would take its token from; never the token itself."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if path:
        return path
    default = Path.home() / ".ray" / "auth_token"
    return str(default) if default.exists() else None
