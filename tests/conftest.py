"""Where Triton kernels run in tests: in Triton's interpreter, on the CPU, unless the GPU tests are asked for.

Triton reads the switch when it is imported and again when a kernel is decorated, so it is set here, before any
test module is. A run that asks for the GPU tests where none could run ends at once: nothing passed is no success.
"""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest
import torch


def _asks_for_gpu(expression: str) -> bool:
    """Whether the ``-m`` of a run selects tests marked ``gpu``."""
    return re.search(r"(?<!not )\bgpu\b", expression) is not None


def pytest_configure(config: pytest.Config) -> None:
    if not _asks_for_gpu(config.option.markexpr):
        os.environ.setdefault("TRITON_INTERPRET", "1")
        return
    if not torch.cuda.is_available():
        pytest.exit("the GPU tests were asked for and torch sees no CUDA device here", returncode=2)


def _is_interpreted() -> bool:
    pytest.importorskip("triton")
    from dlmgrid.kernels.triton_support import is_interpreted

    return is_interpreted()


def _dot_in_order(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
    """The interpreter's ``tl.dot``, each element summed over K one term after another.

    The interpreter calls NumPy, whose BLAS sums a row in an order that hangs on the tile's shape on some processors, so
    that bits of one row differ between tiles where a GPU's do not.
    """
    from triton.runtime.interpreter import TensorHandle

    rows, columns = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
    total = np.zeros(d.data.shape, d.data.dtype)
    term = np.empty_like(total)
    for k in range(rows.shape[-1]):
        np.multiply(rows[..., :, k, None], columns[..., k, None, :], out=term)
        np.add(total, term, out=total)
    return TensorHandle(total + d.data, d.dtype.scalar)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where kernels are launched: the CPU in the interpreter, a GPU in the GPU tests."""
    if request.param == "cuda":
        device: torch.device = request.getfixturevalue("cuda_device")
        return device
    if not _is_interpreted():
        pytest.skip("the interpreter is off in a run of the GPU tests")
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot_in_order)
    return torch.device("cpu")


@pytest.fixture
def cuda_device() -> torch.device:
    """A CUDA device with kernels compiled for it; for tests marked ``gpu``."""
    if _is_interpreted() or not torch.cuda.is_available():
        pytest.skip("runs with -m gpu (make gpu-test), on a CUDA device")
    return torch.device("cuda")
