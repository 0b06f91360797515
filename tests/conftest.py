"""How the suite is shared out when it runs in several processes (``make test``), and where Triton kernels run: in
Triton's interpreter, on the CPU, unless the GPU tests are asked for.

Triton reads the switch when it is imported and again when a kernel is decorated, so it is set here, before any
test module is.
"""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr.strip() != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a file's tests in one process, and all that start a Ray in the same one: two at a time on two cores
    make both late."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        starts_ray = "local_ray" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("ray" if starts_ray else str(item.path)))
