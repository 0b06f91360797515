"""Tests of Triton kernels run in the interpreter (fp32, fp16) and, marked ``gpu``, on a device (fp32, bf16)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Allowed norm of the difference over the norm of the fp64 result, by dtype."""


@pytest.fixture(params=["fp32", "half"])
def float_type(request: pytest.FixtureRequest, triton_device: torch.device) -> torch.dtype:
    """fp32, or the 16-bit type to be trusted there: fp16 in the interpreter, bf16 on a GPU."""
    if request.param == "fp32":
        return torch.float32
    return torch.bfloat16 if triton_device.type == "cuda" else torch.float16


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``torch.empty`` gives NaN (integers: their least value), so that an element never written is seen."""
    original = torch.empty

    def empty(*sizes: Any, **options: Any) -> Tensor:
        tensor = original(*sizes, **options)
        if tensor.is_floating_point():
            return tensor.fill_(torch.nan)
        return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).min)

    monkeypatch.setattr(torch, "empty", empty)
    yield


def relative_error(result: Tensor, expected: Tensor) -> float:
    """‖result − expected‖ / ‖expected‖ in fp64; NaN where the result holds one."""
    difference = (result.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


@pytest.fixture
def assert_near() -> Any:
    """Holds a result to its fp64 expectation by the tolerance of the result's own dtype (or the one given)."""

    def check(result: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
        assert result.shape == expected.shape
        error = relative_error(result.cpu(), expected.cpu())
        assert error <= TOLERANCES[dtype or result.dtype], f"relative error {error:.2e}"

    return check
