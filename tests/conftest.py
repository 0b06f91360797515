"""How the suite is shared out when it runs in several processes (``make test``)."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a file's tests in one process, and all that start a Ray in the same one: two at a time on two cores
    make both late."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        starts_ray = "local_ray" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("ray" if starts_ray else str(item.path)))
