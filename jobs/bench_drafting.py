"""What drafting costs a round, apart from any model: ``python -m dlmgrid.jobs.bench_drafting``.

Rows of blocks with random stale distributions, sharper or flatter, go through the drafters as a decoder asks them:
states on the host, trees back on the host. ``draft_ms`` is the host's clock over one call, all copies and the wait
for the answer in it; ``device_ms`` the graph alone, of the first levels; ``host_ms`` the growth on the host with the
order model on the device, what a decoder did before. ``levels`` is the depth of the deepest tree, ``same`` whether
every tree is the host's, state by state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from dlmgrid.jobs.bench_arguments import (
    OneLineParser,
    add_device,
    check_kernels,
    default_kernels,
    real_number,
    whole_number,
)
from dlmgrid.jobs.bench_passes import Row
from dlmgrid.jobs.refusals import in_one_line
from dlmgrid.kernels.benchmark import measure, measure_queued
from dlmgrid.kernels.logits import LogitsPass, summarize
from dlmgrid.workers.decoding.commit_rules import static
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.confidence_tree import ConfidenceTreeDrafter
from dlmgrid.workers.drafting.device_growth import (
    MOST_POSITIONS,
    DeviceGrowth,
    growth_operators,
    order_weights,
)
from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.drafting.order_checkpoint import REFERENCE, find_order_checkpoint, load_order_model
from dlmgrid.workers.drafting.order_model import OrderModel
from dlmgrid.workers.drafting.spot import SpotDrafter

Draft = Callable[[DraftInputs, DraftTree], None]

SHARPNESS = {"flat": 1.0, "usual": 6.0, "sharp": 40.0}
"""Standard deviation of the logits of 512 tokens at the left of a block; at its right it is a quarter of that."""


def block_inputs(count: int, length: int, temperature: float, sharpness: float) -> DraftInputs:
    """Inputs of ``count`` blocks, each a quarter filled, whose snapshot is one commit old."""
    generator = torch.Generator().manual_seed(count)
    roots = torch.full((count, length), MASKED, dtype=torch.int32)
    filled = torch.rand(count, length, generator=generator).argsort(dim=1)[:, : length // 4]
    roots.scatter_(1, filled, 5)
    masked = roots == MASKED
    sample, position = masked.nonzero(as_tuple=True)
    scale = sharpness * (1 - 0.75 * position / length)
    logits = torch.randn(sample.numel(), 512, generator=generator) * scale[:, None]
    snapshots = Snapshots(count, length, torch.device("cpu"))
    snapshots.store(torch.arange(count), masked, sample, position, summarize(logits, temperature))
    opened = masked.to(torch.int8).argmax(dim=1)
    everyone = torch.arange(count)
    roots[everyone, opened] = snapshots.token_ids[everyone, opened, 0].int()
    return DraftInputs(
        roots=roots,
        commit_counts=(roots != MASKED).sum(dim=1),
        block_starts=torch.full((count,), 512),
        keys=torch.randint(0, 2**32, (count, 2), generator=generator),
        snapshots=snapshots,
        rule=static(1),
        temperature=temperature,
        noise=NoiseTable(0),
        stream=Stream.TOKEN,
    )


def growth_rows(
    device: torch.device, *, budgets: Sequence[int] = (8, 20), widths: Sequence[int] = (1, 8),
    temperatures: Sequence[float] = (0.0, 1.0), length: int = 32, kernels: str = "triton", repeats: int = 30,
    methods: Sequence[str] = ("spot", "confidence_tree"),
) -> Iterator[Row]:  # fmt: skip
    """Rows by method, sharpness, temperature, D and blocks at once, with the order model that ships."""
    for method in methods:
        weights, host = None, ConfidenceTreeDrafter().draft
        if method == "spot":
            model = load_order_model(find_order_checkpoint(REFERENCE))
            assert isinstance(model, OrderModel), "the one that ships reads distributions alone"
            weights, drafter = order_weights(model, device), SpotDrafter(model)
            drafter.place(device)  # its model alone: the trees stay
            host = drafter.draft
        growth = DeviceGrowth(device, weights, growth_operators(kernels))
        for temperature in temperatures:
            for name, sharpness in SHARPNESS.items():
                for budget in budgets:
                    for width in widths:
                        inputs = block_inputs(width, length, temperature, sharpness)
                        tree, draft_ms = _timed(growth.grow, inputs, budget, repeats)
                        expected, host_ms = _timed(host, inputs, budget, max(3, repeats // 10))
                        queued = measure_queued(growth.queue_again, device, repeats=max(3, repeats // 5))
                        is_node = expected.is_node()
                        levels = int(torch.where(is_node, expected.depths, 0).max())
                        yield {
                            "method": method, "distributions": name, "temperature": temperature, "budget": budget,
                            "in_flight": width, "draft_ms": draft_ms, "device_ms": queued.median_ms,
                            "host_ms": host_ms, "levels": levels,
                            "same": sum(_same(tree, expected, sample) for sample in range(width)),
                        }  # fmt: skip


def summary_and_noise_ms(
    device: torch.device, logits_pass: Callable[..., LogitsPass], rows: int, vocab: int, temperature: float
) -> float:
    """Milliseconds of a logits pass, summary and noise in it, on ``rows`` rows of ``vocab`` entries."""
    logits = torch.randn(rows, vocab, device=device)
    keys = torch.ones(rows, 2, dtype=torch.int64, device=device)
    places = torch.arange(rows, device=device)
    noise = (keys, 0, places, places) if temperature else None
    return measure(lambda: logits_pass(logits, temperature, noise=noise), device).median_ms


def _timed(draft: Draft, inputs: DraftInputs, budget: int, repeats: int) -> tuple[DraftTree, float]:
    """The trees of a draft, and the median of the host's milliseconds of one call."""
    times = []
    tree = DraftTree(inputs.roots.shape[0], budget, inputs.roots.shape[1], torch.device("cpu"))
    for turn in range(3 + repeats):
        tree.plant(inputs.roots)
        begun = time.perf_counter()
        with torch.inference_mode():
            draft(inputs, tree)
        if turn >= 3:
            times.append(1e3 * (time.perf_counter() - begun))
    return tree, statistics.median(times)


def _same(found: DraftTree, expected: DraftTree, sample: int) -> bool:
    """Whether the trees of a sample hold the same states in the same order, with the same parents."""
    count = int(expected.num_nodes[sample])
    return int(found.num_nodes[sample]) == count and all(
        torch.equal(getattr(found, name)[sample, :count], getattr(expected, name)[sample, :count])
        for name in ("tokens", "parents", "depths")
    )


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
    """The command of the module docstring."""
    given = make_parser().parse_args(arguments)
    device = torch.device(given.device)
    kernels = default_kernels(given.device)
    check_kernels(kernels, given.device, "float32")
    for row in growth_rows(
        device, budgets=given.budgets, widths=given.in_flight, temperatures=given.temperatures, kernels=kernels,
        repeats=given.repeats,
    ):  # fmt: skip
        print(" ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)
    if device.type == "cuda":
        from dlmgrid.kernels.logits.kernel import logits_pass  # Triton is imported where there is a GPU

        for rows in (144, 336):
            for temperature in given.temperatures:
                spent = summary_and_noise_ms(device, logits_pass, rows, 151936, temperature)
                print(f"summary_and_noise rows {rows} temperature {temperature:g} ms {spent:.4g}", flush=True)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The options of the command, each within its bounds."""
    parser = OneLineParser(prog="python -m dlmgrid.jobs.bench_drafting", description="Time drafting.")
    add_device(parser)
    parser.add_argument(
        "--budgets",
        type=whole_number(1, MOST_POSITIONS - 1),
        nargs="+",
        default=[8, 20],
        help="D of the trees",
    )
    parser.add_argument(
        "--in-flight",
        type=whole_number(1),
        nargs="+",
        default=[1, 8],
        help="blocks that are drafted for at once",
    )
    parser.add_argument(
        "--temperatures", type=real_number(), nargs="+", default=[0.0, 1.0], help="T that tokens are drawn at"
    )
    parser.add_argument(
        "--repeats",
        type=whole_number(1),
        default=30,
        help="calls that a median is taken of, fewer of the slow ones",
    )
    return parser


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
