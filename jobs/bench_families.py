"""Every published shape, loaded and decoded: do all models run here, how fast, in how much memory?

usage: python -m dlmgrid.jobs.bench_families [--models NAME …] [--device cpu|cuda] [--dtype bfloat16]
                                             [--numerics exact|fast] [--kernels torch|triton] [--gen-length 64]
                                             [--budget 6] [--folder DIR] [--out FILE.json]

For each known model a checkpoint of its full shape is written with random weights, shard by shard, and read the way a
real one is; two prompts are decoded draft-free and with drafted chains under the family's published rule, every row
compared with its serialized run; then the checkpoint is deleted. One line a model: verdict, milliseconds of a
forward of one sample, peak memory of device and host while it is loaded and decoded (the host's with what the process
held before). Random weights say nothing of acceptance. The folder needs room
for the largest model's files. Bidirectional families run on the torch twins, whatever ``--kernels`` says: no other
kernels have attention over a canvas. Needs torch, no network.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

import dlmgrid
from dlmgrid.jobs.bench_arguments import (
    MOST_DRAFTS,
    OneLineParser,
    add_device,
    add_out,
    check_kernels,
    check_results,
    default_kernels,
    whole_number,
)
from dlmgrid.jobs.refusals import in_one_line
from dlmgrid.kernels.operators import KERNELS
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.engine.family_engine import is_bidirectional
from dlmgrid.workers.engine.model_head import DTYPES, NUMERICS
from dlmgrid.workers.errors import DlmgridError, InputError
from dlmgrid.workers.items import Item, write_items
from dlmgrid.workers.models.catalog import known_models
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.synthetic import write_full_shape_checkpoint
from dlmgrid.workers.out_file import refuses_files
from dlmgrid.workers.partial_files import write_whole
from dlmgrid.workers.runtime import device_name
from dlmgrid.workers.unit_runner import UnitRunner
from dlmgrid.workers.units import Key, WorkUnit

PROMPTS = (
    "A train leaves at nine. How far has it come at noon?",
    "Name the days of the week, the last one first.",
)
METHOD = "ssd"


@in_one_line
def main(given: Sequence[str] | None = None) -> int:
    """The command of the module docstring."""
    arguments = make_parser().parse_args(given)
    arguments.kernels = arguments.kernels or default_kernels(arguments.device)
    check_kernels(arguments.kernels, arguments.device, arguments.dtype)
    refused = refuses_files(arguments.folder)
    if refused:
        raise InputError(
            f"--folder {arguments.folder}: no checkpoint can be written there ({refused}); name another"
        )
    check_results(arguments.out)
    rows = []
    for model in known_models():
        if model.name in arguments.models:
            rows.append(bench_model(model.name, model.config, arguments))
            print_rows(rows[-1:], with_heading=len(rows) == 1)
    report = {
        "what": "random weights at published shapes: two prompts, each row against its serialized run",
        "device": device_name(arguments.device),
        "dtype": arguments.dtype,
        "numerics": arguments.numerics,
        "kernels": arguments.kernels,
        "gen_length": arguments.gen_length,
        "budget": arguments.budget,
        "versions": {"dlmgrid": dlmgrid.__version__, "torch": torch.__version__},
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": rows,
    }
    write_whole(arguments.out, json.dumps(report, indent=1) + "\n")
    print(f"written to {arguments.out}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The options of the module docstring, each within its bounds."""
    names = [model.name for model in known_models()]
    parser = OneLineParser(
        prog="python -m dlmgrid.jobs.bench_families", description="Load and decode every published shape."
    )
    parser.add_argument(
        "--models", nargs="+", choices=names, default=names, metavar="NAME",
        help="known models (dlmgrid models lists them); all by default",
    )  # fmt: skip
    add_device(parser)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES), help="of weights and passes")
    parser.add_argument(
        "--numerics", default="exact", choices=NUMERICS, help="exact: rows keep their bits in any company"
    )
    parser.add_argument("--kernels", choices=KERNELS, help="default: triton on a GPU, else torch")
    parser.add_argument("--gen-length", type=whole_number(1), default=64, help="tokens decoded a prompt")
    parser.add_argument(
        "--budget", type=whole_number(1, MOST_DRAFTS), default=6, help="D of the drafted chains"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()),
        help="where each checkpoint is written and deleted again; the system's temporary folder by default",
    )  # fmt: skip
    add_out(parser, "out/bench_families.json")
    return parser


def bench_model(name: str, config: ModelConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """One line of the table; an error that a model ends in is its line, and the next model is tried."""
    row: dict[str, Any] = {"model": name, "parameters": config.num_parameters}
    row["kernels"] = "torch" if is_bidirectional(config) else arguments.kernels
    folder = Path(tempfile.mkdtemp(prefix="dlmgrid-shape-", dir=arguments.folder))
    is_cuda = arguments.device.startswith("cuda")
    try:
        started = time.perf_counter()
        write_full_shape_checkpoint(folder / "model", config, device=arguments.device)
        row["seconds_to_write"] = time.perf_counter() - started
        row["largest_shard_bytes"] = max(
            path.stat().st_size for path in (folder / "model").glob("*.safetensors")
        )
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        row["host_bytes_before"] = reset_host_peak()
        row |= _decode(folder, name, config, arguments)
        row["device_peak_bytes"] = torch.cuda.max_memory_allocated() if is_cuda else None
        row["host_peak_bytes"] = host_memory("VmHWM")
    except (DlmgridError, RuntimeError, OSError) as error:  # the other models are still measured
        row["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    finally:
        shutil.rmtree(folder)
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
    return row


def reset_host_peak() -> int:
    """Forget this process' peak of resident memory; the bytes resident now. Raises OSError where the system is not
    Linux."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return host_memory("VmRSS")


def host_memory(name: str) -> int:
    """Bytes of an entry of /proc/self/status: ``VmRSS``, resident now, or ``VmHWM``, at most since it was reset."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    entry = next(line for line in lines if line.startswith(f"{name}:"))
    return int(entry.split()[1]) * 1024


def _decode(folder: Path, name: str, config: ModelConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """The two units: draft-free, decoded packed and one sample at a time; and drafted."""
    items = [Item(item_id=f"prompt-{index}", prompt=text) for index, text in enumerate(PROMPTS)]
    write_items(folder / "items.jsonl", items)
    reference = Cell(
        model=name,
        family=config.family,
        benchmark="shapes",
        prompt_version="1",
        method="none",
        budget=0,
        temperature=0.0,
        block_length=config.block_length or arguments.gen_length,
        gen_length=arguments.gen_length,
        stop="none",
        numerics=arguments.numerics,
        kernels="torch" if is_bidirectional(config) else arguments.kernels,
        dtype=arguments.dtype,
        cache=config.caches[0],
        **config.published_decoder(),
    )
    runner = UnitRunner(arguments.device, actor="bench")
    values: dict[str, Any] = {}
    for label, cell in (
        ("draft_free", reference),
        ("drafted", replace(reference, method=METHOD, budget=arguments.budget)),
    ):
        unit = WorkUnit(
            cell=cell,
            keys=tuple(Key(item.item_id, 0) for item in items),
            checkpoint=str(folder / "model"),
            inputs=str(folder / "items.jsonl"),
            output=str(folder / f"{label}.parquet"),
            max_in_flight=len(items),
            device=arguments.device,
            reference_shards=() if label == "draft_free" else (str(folder / "draft_free.parquet"),),
        )
        started = time.perf_counter()
        runner.run(unit)
        values[f"seconds_{label}"] = time.perf_counter() - started
        rows = pq.read_table(unit.output).to_pylist()
        errors = [row["error"] for row in rows if row["error"]]
        if errors:
            raise RuntimeError(f"{label}: {errors[0]}")
        values[label] = {
            "claim": rows[0]["claim"],
            "exact_tokens": all(row["exact_tokens"] for row in rows),
            "exact_path": all(row["exact_path"] for row in rows),
            "exact_bits": all(row["exact_bits"] for row in rows),
            "nfe": sum(row["nfe_total"] for row in rows),
            "pass_ms": 1000
            * sum(row["seconds_wall"] for row in rows)
            / sum(row["nfe_total"] for row in rows),
        }
    return values


def print_rows(rows: list[dict[str, Any]], *, with_heading: bool) -> None:
    """The table, a line a model; ``TPB`` are the verdicts on tokens, path and bits, - where one fails."""
    if with_heading:
        print(
            f"{'model':42} params  draft-free    ms/pass  drafted    ms/pass  device GB  host GB  largest shard GB"
        )
    for row in rows:
        start = f"{row['model']:42} {row['parameters'] / 1e9:5.2f}B"
        if "error" in row:
            print(f"{start}  {row['error']}", flush=True)
            continue
        device = f"{row['device_peak_bytes'] / 1e9:9.2f}" if row["device_peak_bytes"] else f"{'-':>9}"
        print(
            f"{start}  {_verdict(row['draft_free']):10} {row['draft_free']['pass_ms']:10.2f}  "
            f"{_verdict(row['drafted']):7} {row['drafted']['pass_ms']:10.2f}  {device}  "
            f"{row['host_peak_bytes'] / 1e9:7.2f}  {row['largest_shard_bytes'] / 1e9:16.2f}",
            flush=True,
        )


def _verdict(run: dict[str, Any]) -> str:
    levels = (("T", "exact_tokens"), ("P", "exact_path"), ("B", "exact_bits"))
    return "".join(letter if run[name] else "-" for letter, name in levels)


if __name__ == "__main__":
    raise SystemExit(main())
