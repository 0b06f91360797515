"""Which tile of the Triton products is the fastest on this GPU, by shape and rows: what the pinned table is made from.

    python -m dlmgrid.jobs.bench_tiles [--shapes SDAR-8B …] [--products qkv …] [--rows 32 288 …] [--out FILE]

Every tile computes the same product in one CUDA graph, over as many copies of the weight as keep it out of the L2
cache, beside the vendor's product (and, where the product is gated, the activation behind it). All tiles must give the
same bits. Ends with the entries of ``kernels/gemm/tiles.MEASURED`` that would be faster than what is chosen now; a
table is changed by hand, never at run time.

Exit codes: 0 done, 1 a tile gave other bits, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import dlmgrid
from dlmgrid.jobs.bench import commit
from dlmgrid.jobs.bench_arguments import (
    OneLineParser,
    add_device,
    add_out,
    check_kernels,
    check_results,
    whole_number,
)
from dlmgrid.jobs.refusals import in_one_line
from dlmgrid.kernels.benchmark import measure, measure_queued
from dlmgrid.kernels.gemm.shapes import PASS_ROWS, PRODUCTS
from dlmgrid.kernels.gemm.tiles import GATED_TILES, PLAIN_TILES, DescriptorTile, choose_descriptor_tile
from dlmgrid.workers.partial_files import write_whole
from dlmgrid.workers.runtime import device_name

Row = dict[str, Any]

CACHE_BYTES = 120_000_000
"""Bytes of the weights that take turns: more than twice the L2 cache of an H200."""

MOST_COPIES = 32

GAIN = 0.98
"""A tile is proposed where it takes less than this share of the time of what is chosen now."""


def tile_name(tile: DescriptorTile) -> str:
    """Row pieces x outputs / step / warps and stages, ``r`` where rows are the left operand: ``128+16x64/64/4w4s``."""
    pieces = "+".join(map(str, tile.pieces))
    side = "" if tile.swapped else "r"
    return f"{pieces}x{tile.outputs}{side}/{tile.step}/{tile.warps}w{tile.stages}s"


def tiles_for(num_rows: int, gated: bool) -> list[DescriptorTile]:
    """The tiles that waste less than half of their rows, or the smallest ones."""
    tiles = GATED_TILES if gated else PLAIN_TILES
    smallest = min(tile.rows for tile in tiles)
    return [tile for tile in tiles if tile.rows <= max(2 * num_rows, smallest)]


def tile_row(
    shape: str, product: str, num_rows: int, *, device: torch.device, dtype: torch.dtype, repeats: int
) -> Row:
    """Microseconds of one product by tile. ``same_bits``: of how many ``tiles`` the result is the first one's."""
    from dlmgrid.kernels.gemm.kernel import linear
    from dlmgrid.kernels.silu_gate.kernel import silu_gate

    outputs, width = PRODUCTS[shape][product]
    gated = product == "gate_up"
    generator = torch.Generator(device).manual_seed(num_rows)
    weight_bytes = outputs * width * dtype.itemsize
    copies = min(MOST_COPIES, max(2, -(-CACHE_BYTES // weight_bytes)))
    weights = [
        torch.randn(outputs, width, generator=generator, device=device).to(dtype) for _ in range(copies)
    ]
    x = torch.randn(num_rows, width, generator=generator, device=device).to(dtype)

    def vendor(weight: Tensor) -> Tensor:
        return functional.linear(x, weight)

    times: dict[str, float] = {}
    first: Tensor | None = None
    same = 0
    chosen = choose_descriptor_tile(num_rows, outputs, width, gated)
    tiles = list(dict.fromkeys([chosen, *tiles_for(num_rows, gated)]))
    for tile in tiles:
        product_of = partial(linear, x, gated=gated, tile=tile)
        found = product_of(weights[0])
        first = found if first is None else first
        same += int(torch.equal(found, first))
        times[tile_name(tile)] = _microseconds(product_of, weights, repeats)
    row: Row = {
        "shape": shape, "product": product, "rows": num_rows, "outputs": outputs, "inputs": width, "gated": gated,
        "vendor_us": _microseconds(vendor, weights, repeats), "tiles_us": times,
        "chosen": tile_name(chosen),
        "fastest": min(times, key=times.__getitem__), "tiles": len(tiles), "same_bits": same,
    }  # fmt: skip
    if gated:
        row["vendor_with_silu_us"] = _microseconds(lambda weight: silu_gate(vendor(weight)), weights, repeats)
    return row


def _microseconds(product: Callable[[Tensor], Tensor], weights: Sequence[Tensor], repeats: int) -> float:
    """Time of one product, of a pass over all ``weights``: by replays of a graph on a GPU."""
    device = weights[0].device

    def every() -> None:
        for weight in weights:
            product(weight)

    if device.type != "cuda":
        return 1e3 * measure(every, device, repeats=repeats).median_ms / len(weights)
    every()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every()
    return 1e3 * measure_queued(graph.replay, device, warm_up=1, repeats=repeats).median_ms / len(weights)


def row_text(row: Row) -> str:
    """One line of the terminal's table."""
    times, chosen, fastest = row["tiles_us"], row["chosen"], row["fastest"]
    vendor = f"vendor {row['vendor_us']:.1f}"
    if "vendor_with_silu_us" in row:
        vendor += f" ({row['vendor_with_silu_us']:.1f} with the activation)"
    return (
        f"{row['shape']:13} {row['product']:8} {row['rows']:5} rows: {vendor}, chosen {chosen} {times[chosen]:.1f}, "
        f"fastest {fastest} {times[fastest]:.1f} us; same bits {row['same_bits']} of {row['tiles']}"
    )


def proposals(rows: Sequence[Row]) -> Iterator[str]:
    """Entries of the pinned table that these rows speak for."""
    for row in rows:
        times, fastest = row["tiles_us"], row["fastest"]
        if times[fastest] < GAIN * times[row["chosen"]]:
            tiles = {tile_name(tile): tile for tile in (GATED_TILES if row["gated"] else PLAIN_TILES)}
            yield f"({row['outputs']}, {row['inputs']}, {row['gated']}, {row['rows']}): {_entry(tiles[fastest])},"


def _entry(tile: DescriptorTile) -> str:
    parts = [str(tile.pieces), *(str(part) for part in (tile.outputs, tile.step, tile.warps, tile.stages))]
    return f"DescriptorTile({', '.join(parts)}{'' if tile.swapped else ', swapped=False'})"


@in_one_line
def main(given: Sequence[str] | None = None) -> int:
    """The command of the module docstring."""
    arguments = make_parser().parse_args(given)
    dtype = torch.bfloat16 if arguments.device.startswith("cuda") else torch.float16
    check_kernels("triton", arguments.device, "bfloat16" if dtype is torch.bfloat16 else "float32")
    check_results(arguments.out)
    import triton  # the check above says where it is missing

    rows = []
    for shape in arguments.shapes:
        for product in arguments.products:
            for num_rows in arguments.rows:
                rows.append(
                    tile_row(
                        shape, product, num_rows, device=torch.device(arguments.device), dtype=dtype,
                        repeats=arguments.repeats,
                    )
                )  # fmt: skip
                print(row_text(rows[-1]), flush=True)
    report = {
        "what": "one product, microseconds, median of graph replays over weights that take turns",
        "device": device_name(arguments.device),
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {
            "dlmgrid": dlmgrid.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "commit": commit(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": rows,
    }
    write_whole(arguments.out, json.dumps(report, indent=1) + "\n")
    for line in proposals(rows):
        print(line)
    print(f"written to {arguments.out}")
    return 0 if all(row["same_bits"] == row["tiles"] for row in rows) else 1


def make_parser() -> argparse.ArgumentParser:
    """The options of the module docstring, each within its bounds."""
    parser = OneLineParser(
        prog="python -m dlmgrid.jobs.bench_tiles", description="Time the tiles of the products."
    )
    add_device(parser)
    names = list(PRODUCTS)
    parser.add_argument(
        "--shapes", nargs="+", choices=names, default=names, help="models whose weights are timed"
    )
    products = list(PRODUCTS[names[0]])
    parser.add_argument(
        "--products", nargs="+", choices=products, default=products, help="which of a layer's"
    )
    parser.add_argument(
        "--rows", nargs="+", type=whole_number(1, 8192), default=list(PASS_ROWS), help="rows of the pass"
    )
    parser.add_argument(
        "--repeats", type=whole_number(1), default=10, help="readings that a median is taken of"
    )
    add_out(parser, "out/bench_tiles.json")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
