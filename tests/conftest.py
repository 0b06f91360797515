"""Where Triton kernels run in tests: in Triton's interpreter, on the CPU, unless the GPU tests are asked for.

Triton reads the switch when it is imported and again when a kernel is decorated, so it is set here, before any
test module is.
"""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr.strip() != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
