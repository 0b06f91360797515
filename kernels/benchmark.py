"""Timing of device work: warm-up, repeats, median and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Milliseconds of one call: the median of ``repeats`` calls, the fastest and the slowest."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    repeats: int


def measure(
    call: Callable[[], object], device: torch.device, *, warm_up: int = 3, repeats: int = 10
) -> Timing:
    """Time ``call`` on ``device``; on CUDA by events around it, so that queued work is counted where it runs."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize(device)
            times.append(start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            call()
            times.append((time.perf_counter() - begun) * 1e3)
    return Timing(
        median_ms=statistics.median(times), fastest_ms=min(times), slowest_ms=max(times), repeats=repeats
    )


def measure_queued(
    queue: Callable[[], object],
    device: torch.device,
    *,
    in_a_row: int = 10,
    warm_up: int = 3,
    repeats: int = 10,
) -> Timing:
    """Milliseconds on the device of one call that only queues work: ``in_a_row`` of them between two events, so that
    the host's time between calls is hidden as long as it is shorter than the device's."""

    def several() -> None:
        for _ in range(in_a_row):
            queue()

    found = measure(several, device, warm_up=warm_up, repeats=repeats)
    return Timing(
        median_ms=found.median_ms / in_a_row,
        fastest_ms=found.fastest_ms / in_a_row,
        slowest_ms=found.slowest_ms / in_a_row,
        repeats=repeats,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """What the device does at best, read in the same run: bytes copied and FLOPs of a square product, a second."""

    bytes_per_second: float
    flops_per_second: float


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Copy bandwidth (read and write counted) and the rate of a large product on random data."""
    is_gpu = device.type == "cuda"
    source = torch.randn((1 << 28) if is_gpu else (1 << 24), device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device)
    size = 8192 if is_gpu else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = measure(lambda: left @ right, device)
    return Ceilings(
        bytes_per_second=2 * source.nbytes / copy.median_ms * 1e3,
        flops_per_second=2 * size**3 / product.median_ms * 1e3,
    )


def pass_floor_parts(
    ceilings: Ceilings, *, hidden: int, layers: int, heads: int, kv_heads: int, width: int, inner: int, vocab: int,
    rows: int, head_rows: int, prefix: int, bytes_per_value: int, block_length: int = 32,
) -> dict[str, float]:  # fmt: skip
    """Least milliseconds of the parts of a verification pass, max(bytes / bandwidth, FLOPs / rate) an operation.

    ``products`` of the layers, ``attention`` of ``rows`` query rows over ``prefix`` keys that are read once and a block
    of their own, ``head`` on ``head_rows``, and ``logits``, written and read once. Norms and rotary embedding are left
    out: they can be fused.
    """

    def operation(num_bytes: float, flops: float) -> float:
        return max(num_bytes / ceilings.bytes_per_second, flops / ceilings.flops_per_second)

    def product(outputs: int, inputs: int, count: int) -> float:
        moved = bytes_per_value * (outputs * inputs + count * (outputs + inputs))
        return operation(moved, 2.0 * count * outputs * inputs)

    attention = operation(
        bytes_per_value * (2 * (prefix + rows) * kv_heads + 2 * rows * heads) * width,
        4.0 * rows * heads * width * (prefix + block_length),
    )
    products = (
        product((heads + 2 * kv_heads) * width, hidden, rows)
        + product(hidden, heads * width, rows)
        + product(2 * inner, hidden, rows)
        + product(hidden, inner, rows)
    )
    return {
        "products": 1e3 * layers * products,
        "attention": 1e3 * layers * attention,
        "head": 1e3 * product(vocab, hidden, head_rows),
        "logits": 1e3 * operation(8.0 * head_rows * vocab, 0.0),
    }
