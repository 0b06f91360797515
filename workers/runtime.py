"""What can change the bits of a forward pass on this machine, and the versions that a row records."""

from __future__ import annotations

import importlib.metadata

import torch

import dlmgrid
from dlmgrid.workers.cell import digest
from dlmgrid.workers.errors import InputError


def package_versions() -> dict[str, str]:
    """Versions of the product and of the packages it decodes with; "" for one that is not installed."""
    versions = {"dlmgrid": dlmgrid.__version__}
    for name in ("torch", "triton", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    versions["torch"] = torch.__version__
    return versions


def check_device(device: str) -> str:
    """``device`` where torch can compute on it: cpu, cuda or cuda:N. Raises InputError for another."""
    kind, _, index = device.partition(":")
    if device == "cpu":
        return device
    if kind != "cuda" or (index and not index.isdigit()):
        raise InputError(f"device {device!r}: give cpu, cuda or cuda:N")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= found:
        raise InputError(
            f"device {device}: torch {torch.__version__} sees {found} CUDA devices here; use cpu"
        )
    return device


def device_name(device: str) -> str:
    """The model name of a GPU, or the instruction set that the CPU kernels use."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def runtime_fingerprint(device: str) -> str:
    """Identifies device, torch, triton and the product's kernels: runs that share it can be compared bit for bit."""
    versions = package_versions()
    return digest(
        {
            "device": device_name(device),
            "torch": versions["torch"],
            "triton": versions["triton"] if device.startswith("cuda") else "",
            "dlmgrid": versions["dlmgrid"],
        }
    )
