"""Launches that overlap: every kernel that takes part waits first, and no bit of a chain of kernels changes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from dlmgrid.kernels import dependent_launch
from dlmgrid.kernels.gemm.kernel import linear
from dlmgrid.kernels.rmsnorm.kernel import rms_norm

KERNELS = Path(dependent_launch.__file__).parent


def test_a_kernel_that_may_overlap_waits_before_anything_else() -> None:
    found = []
    for path in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or path.name == "dependent_launch.py":
                continue
            if "OVERLAP" in {argument.arg for argument in node.args.args}:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                assert ast.unparse(body[0]) == "wait_for_previous(OVERLAP)", f"{path.name}: {node.name}"
                found.append(node.name)
    assert {"attention_kernel", "merge_kernel", "_descriptor_kernel", "_rms_norm_kernel"} <= set(found)


def test_launches_overlap_on_a_device_that_can_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dependent_launch.launch_options(torch.device("cpu")) == {"OVERLAP": False}
    monkeypatch.setattr(dependent_launch, "_can_overlap", lambda _: True)
    assert dependent_launch.launch_options(torch.device("cuda")) == {"OVERLAP": True, "launch_pdl": True}
    monkeypatch.setattr(dependent_launch, "OVERLAPS_LAUNCHES", False)
    assert dependent_launch.launch_options(torch.device("cuda")) == {"OVERLAP": False}


@pytest.mark.gpu
def test_a_chain_in_a_graph_has_the_bits_of_launches_one_by_one(
    cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator(cuda_device).manual_seed(0)
    weight = torch.randn(576, 576, generator=generator, device=cuda_device, dtype=torch.bfloat16)
    scale = torch.rand(576, generator=generator, device=cuda_device, dtype=torch.bfloat16)
    rows = torch.randn(288, 576, generator=generator, device=cuda_device, dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        hidden = rows
        for _ in range(40):
            hidden = linear(rms_norm(hidden, scale, 1e-6), weight, residual=hidden)
        return hidden

    monkeypatch.setattr(dependent_launch, "OVERLAPS_LAUNCHES", False)
    expected = chain()
    monkeypatch.setattr(dependent_launch, "OVERLAPS_LAUNCHES", True)
    assert torch.equal(chain(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(5):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)
