"""Folded passes on this device: by model shape over their floor, and on a checkpoint's own drafts.

usage: python -m dlmgrid.jobs.bench_folding [--shapes NAME …] [--checkpoint DIR --items N [--prompts FILE.json]]
                                            [--budgets 8 20] [--taus T …] [--ratios R …] [--out FILE.json]

By shape, with random weights: a folded pass by draft budget and recompute ratio, beside the unfolded pass and the
floor. On a checkpoint, over the drafted passes of a greedy decode: how far nodes are from their parents by layer,
position and step (SpecFold, Fig. 2), the recompute ratio by drafter, budget and τ (appendix D), and the time of a pass
against the budget, folded and not (Fig. 3). Prompts are token ids from a JSON file (a list of lists), which
``--save-prompts`` writes from a generated benchmark where tokenizers are installed; without a file they are random
tokens, and the output says so. Needs torch only. Times hold on this device; results go to a JSON file with device,
versions and commit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import dlmgrid
from dlmgrid.jobs.bench import commit
from dlmgrid.jobs.bench_decode import random_prompts
from dlmgrid.jobs.bench_passes import Row
from dlmgrid.jobs.bench_print import row_line
from dlmgrid.jobs.bench_shapes import SHAPES
from dlmgrid.jobs.folding_tables import (
    difference_table,
    drafted_passes,
    ratio_rows,
    shape_table,
    time_row,
)
from dlmgrid.kernels.benchmark import measure_ceilings
from dlmgrid.workers.decoding.decoder import Prompt
from dlmgrid.workers.drafting import confidence_tree, spiffy, spot, ssd
from dlmgrid.workers.drafting.drafter import Drafter
from dlmgrid.workers.drafting.order_checkpoint import find_order_checkpoint
from dlmgrid.workers.engine.engine import DTYPES, Engine, load_engine
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.runtime import device_name


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of the module docstring."""
    options = _parser().parse_args(arguments)
    if options.save_prompts is not None:
        save_prompts(options)
        return 0
    if options.device == "cpu":
        torch.set_num_threads(1)
    tables: dict[str, Any] = {}
    if options.shapes:
        tables["shapes"] = shape_rows(options)
    if options.items:
        tables.update(checkpoint_tables(options))
    report = {
        "what": "folded passes, milliseconds",
        "checkpoint": options.checkpoint if options.items else None,
        "prompts": None if not options.items else "file" if options.prompts else "random tokens",
        "device": device_name(options.device),
        "dtype": options.dtype,
        "kernels": options.kernels,
        "numerics": options.numerics,
        "prefix": options.prefix,
        "versions": {"dlmgrid": dlmgrid.__version__, "torch": torch.__version__},
        "commit": commit(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "tables": tables,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m dlmgrid.jobs.bench_folding", description="Time folded passes."
    )
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[], help="by shape, random weights")
    parser.add_argument("--checkpoint", default="reference", help="checkpoint folder or model name")
    parser.add_argument(
        "--chat-template", default="", help="a shipped template, for a checkpoint without one"
    )
    parser.add_argument("--items", type=int, default=0, help="prompts decoded on the checkpoint (0: none)")
    parser.add_argument("--prompts", type=Path, help="JSON list of lists of token ids")
    parser.add_argument("--save-prompts", type=Path, help="write the prompts of --benchmark and stop")
    parser.add_argument("--benchmark", default="words", help="generated benchmark of --save-prompts")
    parser.add_argument("--graph", type=Path, help="Spiffy's calibrated graph: adds the drafter spiffy")
    parser.add_argument("--order", help="an order model, or reference: adds the drafter spot")
    parser.add_argument("--gen-length", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 20])
    parser.add_argument("--taus", type=float, nargs="+", default=[0.0, 0.02, 0.05, 0.1, 0.2, 0.5])
    parser.add_argument("--tau", type=float, default=0.1, help="of the table of times")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.25, 0.5, 1.0])
    parser.add_argument("--prefix", type=int, default=512, help="stored tokens before the block, by shape")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32", choices=sorted(DTYPES))
    parser.add_argument("--kernels", default="triton" if on_gpu else "torch", choices=("torch", "triton"))
    parser.add_argument("--numerics", default="exact", choices=("exact", "fast"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("out/folding.json"))
    return parser


def shape_rows(options: argparse.Namespace) -> list[Row]:
    """The table by shape, printed as it comes."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    ceilings = measure_ceilings(device, dtype)
    rows: list[Row] = [{"ceilings": asdict(ceilings)}]
    for shape in options.shapes:
        found = shape_table(
            shape, options.budgets, options.prefix, options.ratios, device=options.device, dtype=dtype,
            kernels=options.kernels, numerics=options.numerics, ceilings=ceilings, repeats=options.repeats,
        )  # fmt: skip
        rows += found
        for row in found:
            print(row_line("folding", row))
    return rows


def checkpoint_tables(options: argparse.Namespace) -> dict[str, Any]:
    """The tables of a checkpoint's drafted passes, printed in short."""
    prompts = None if options.prompts is None else read_prompts(options.prompts, options.items)
    longest = 64 if prompts is None else max(len(prompt.token_ids) for prompt in prompts)
    engine = load_engine(
        resolve_checkpoint(options.checkpoint), num_slots=1, max_length=longest + options.gen_length + 64,
        device=options.device, dtype=options.dtype, numerics=options.numerics, kernels=options.kernels,
        self_test=False,
    )  # fmt: skip
    if prompts is None:
        prompts = random_prompts(engine.config, options.items, longest)
    drafters: dict[str, Drafter] = {"ssd": ssd.build(), "confidence_tree": confidence_tree.build()}
    if options.graph is not None:
        drafters["spiffy"] = spiffy.build(options.graph)
    if options.order is not None:
        drafters["spot"] = spot.build(find_order_checkpoint(options.order))
    differences: dict[str, Any] = {}
    ratios: list[Row] = []
    times: list[Row] = []
    for name, drafter in drafters.items():
        for budget in options.budgets:
            rows, timed, seen = _of_drafter(engine, drafter, budget, prompts, options)
            ratios += [{"drafter": name, "budget": budget, **row} for row in rows]
            times.append({"drafter": name, "budget": budget, **timed})
            if budget == max(options.budgets):
                differences[name] = seen
            shown = ", ".join(f"{row['tau']:g}: {row['recompute_ratio']:.2f}" for row in rows)
            print(f"{name:16} D {budget:3} recompute ratio by tau  {shown}")
            print(
                f"{name:16} D {budget:3} ms a pass  unfolded {timed['unfolded_ms']:.2f}, "
                f"tau {timed['tau']:g} {timed['folded_ms']:.2f}"
            )
    for name, seen in differences.items():
        print(f"{name:16} difference by layer  {' '.join(f'{value:.3f}' for value in seen['by_layer'])}")
    return {"differences": differences, "recompute_ratios": ratios, "times": times}


def _of_drafter(
    engine: Engine, drafter: Drafter, budget: int, prompts: Sequence[Prompt], options: argparse.Namespace
) -> tuple[list[Row], Row, Row]:
    """Ratios and times over all prompts; differences of the first: a pass is run where its prompt was decoded last."""
    ratios: list[list[Row]] = []
    times: list[Row] = []
    seen: Row = {}
    for index, prompt in enumerate(prompts):
        passes = drafted_passes(engine, drafter, budget, prompt, options.gen_length)
        if not passes:
            continue
        ratios.append(ratio_rows(engine, passes, options.taus))
        if not seen and budget == max(options.budgets):
            seen = difference_table(engine, passes)
        if index == 0:
            times.append(time_row(engine, passes, options.tau, options.repeats))
    if not ratios or not times:
        raise SystemExit("bench_folding: no pass had drafts; lower --budgets or raise --gen-length")
    return [_mean(rows) for rows in zip(*ratios, strict=True)], times[0], seen


def _mean(rows: Sequence[Row]) -> Row:
    """One row of a τ from those of all prompts."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    by_layer = [mean(layer) for layer in zip(*(row["recompute_ratios"] for row in rows), strict=True)]
    return {
        "tau": rows[0]["tau"], "prompts": len(rows), "recompute_ratio": mean(by_layer), "recompute_ratios": by_layer,
        "nodes_per_pass": mean([row["nodes_per_pass"] for row in rows]),
    }  # fmt: skip


def read_prompts(file: Path, count: int) -> list[Prompt]:
    """The first ``count`` prompts of a JSON file; ends the program where it holds none."""
    tokens = json.loads(file.read_text(encoding="utf-8"))[:count]
    if not tokens:
        raise SystemExit(f"bench_folding: {file} holds no prompts; make it with --save-prompts")
    return [Prompt(item_id=str(index), repeat=0, token_ids=tuple(ids)) for index, ids in enumerate(tokens)]


def save_prompts(options: argparse.Namespace) -> None:
    """Write the token ids of a generated benchmark's prompts under the checkpoint's tokenizer and template."""
    from dlmgrid.workers.benchmarks.catalog import get_benchmark
    from dlmgrid.workers.tokenization import load_tokenizer

    encoder = load_tokenizer(resolve_checkpoint(options.checkpoint), options.chat_template)
    items = get_benchmark(options.benchmark).load(None, options.items)
    options.save_prompts.write_text(json.dumps([list(encoder.encode(item)) for item in items]) + "\n")
    print(f"{len(items)} prompts written to {options.save_prompts}")


if __name__ == "__main__":
    raise SystemExit(main())
