"""Programmatic dependent launch: a kernel of a pass is put on the processors while the one before it drains.

Every kernel that is launched so waits, before it touches memory, until the kernel before it has ended and its writes
are seen (``griddepcontrol.wait``); as that one has waited in turn, all earlier ones have ended too. What overlaps is
the launch alone, so no bit and no order of reads and writes changes. A kernel that takes no part (a vendor's, torch's)
is launched when the one before it has ended, as ever.

Stream capture turns such launches into programmatic edges of the graph (CUDA 12.3 and later; CUDA Programming Guide,
Programmatic Dependent Launch, Use in CUDA Graphs). Compute capability 9.0 and later.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAPS_LAUNCHES = True
"""Whether kernels are launched so, where the device can."""


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """First statement of a kernel. The next kernel may be put on the processors once all programs are past it."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments of the launch of a kernel that begins with :func:`wait_for_previous`."""
    if OVERLAPS_LAUNCHES and _can_overlap(device):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@functools.lru_cache(maxsize=64)
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
