"""Where torch can compute, as the commands are told."""

from __future__ import annotations

import pytest

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.runtime import check_device


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:99", "", "cpu:0"])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(InputError, match="device"):
        check_device(device)


def test_the_cpu_is_one() -> None:
    assert check_device("cpu") == "cpu"
