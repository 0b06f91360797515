"""What every Triton kernel here shares: whether and where Triton can run, and the checks of a launcher.

Nothing is imported from Triton until it is asked for, so that the torch twins work without it.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class KernelsUnavailableError(RuntimeError):
    """Triton kernels cannot run here or cannot take this model. The text says why and what to do."""


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter on the CPU (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on", "yes", "y")


def check_triton(device: torch.device | str, dtype: torch.dtype) -> None:
    """Raise :class:`KernelsUnavailableError` where Triton kernels cannot work on ``device`` in ``dtype``."""
    device = torch.device(device)
    if importlib.util.find_spec("triton") is None:
        raise KernelsUnavailableError(
            "kernels: triton is not installed; pip install triton, or kernels: torch"
        )
    if dtype not in FLOAT_TYPES:
        raise KernelsUnavailableError(f"kernels: triton takes float32, float16 and bfloat16, not {dtype}")
    if device.type == "cpu":
        if not is_interpreted():
            raise KernelsUnavailableError(
                "kernels: triton needs a CUDA device; use kernels: torch on the CPU (TRITON_INTERPRET=1 runs the "
                "kernels in Triton's interpreter, for tests only)"
            )
        if dtype == torch.bfloat16:
            raise KernelsUnavailableError(
                "kernels: Triton's interpreter does not compute bfloat16 as a GPU does; use dtype: float32"
            )
        return
    if device.type != "cuda":
        raise KernelsUnavailableError(
            f"kernels: triton is written for CUDA, the device is {device}; use kernels: torch"
        )
    if is_interpreted():
        raise KernelsUnavailableError("kernels: TRITON_INTERPRET is set; unset it to use the GPU")
    capability = torch.cuda.get_device_capability(device)
    if dtype == torch.bfloat16 and capability < (8, 0):
        raise KernelsUnavailableError(
            f"kernels: {torch.cuda.get_device_name(device)} has no bfloat16 (compute capability "
            f"{capability[0]}.{capability[1]}, 8.0 needed); use dtype: float32"
        )


def usable_types(device: torch.device | str) -> dict[str, str]:
    """For float32 and bfloat16: "" where Triton kernels work on ``device`` in that type, else why they do not."""
    reasons = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        try:
            check_triton(device, dtype)
            reasons[name] = ""
        except KernelsUnavailableError as error:
            reasons[name] = str(error)
    return reasons


def power_of_two(value: int) -> int:
    """The least power of two that is not below ``value`` (≥ 1)."""
    return 1 << max(0, value - 1).bit_length()


def check_rows_contiguous(operator: str, **tensors: Tensor | None) -> None:
    """Raise ValueError, naming operator and argument, for a tensor whose last dimension is not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1:
            raise ValueError(
                f"{operator}: {name} has strides {tensor.stride()}; its last dimension must be contiguous"
            )


def check_one_device(operator: str, **tensors: Tensor | None) -> None:
    """Raise ValueError, naming operator and argument, where tensors lie on different devices."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    devices = {tensor.device for tensor in given.values()}
    if len(devices) > 1:
        listed = ", ".join(f"{name} on {tensor.device}" for name, tensor in given.items())
        raise ValueError(f"{operator}: tensors on different devices ({listed})")


def check_float_type(operator: str, **tensors: Tensor | None) -> None:
    """Raise ValueError, naming operator and argument, for a dtype that the kernels do not take."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOAT_TYPES:
            raise ValueError(f"{operator}: {name} is {tensor.dtype}; want float32, float16 or bfloat16")
