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
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import dlmgrid
from dlmgrid.jobs.bench import commit
from dlmgrid.jobs.bench_arguments import (
    MOST_DRAFTS,
    OneLineParser,
    add_checkpoint,
    add_device,
    add_out,
    check_block_causal,
    check_kernels,
    check_positions,
    check_prefix,
    check_results,
    check_target,
    default_dtype,
    default_kernels,
    real_number,
    whole_number,
)
from dlmgrid.jobs.bench_decode import random_prompts
from dlmgrid.jobs.bench_passes import SPARE_POSITIONS, Row
from dlmgrid.jobs.bench_print import row_line
from dlmgrid.jobs.bench_shapes import SHAPES, shape_config
from dlmgrid.jobs.folding_tables import (
    difference_table,
    drafted_passes,
    ratio_rows,
    shape_table,
    time_row,
)
from dlmgrid.jobs.refusals import in_one_line
from dlmgrid.kernels.benchmark import measure_ceilings
from dlmgrid.kernels.operators import KERNELS
from dlmgrid.workers.decoding.decoder import Prompt
from dlmgrid.workers.drafting import confidence_tree, spiffy, spot, ssd
from dlmgrid.workers.drafting.drafter import Drafter
from dlmgrid.workers.drafting.order_checkpoint import find_order_checkpoint
from dlmgrid.workers.engine.engine import DTYPES, Engine, load_engine
from dlmgrid.workers.engine.model_head import NUMERICS
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.partial_files import write_whole
from dlmgrid.workers.runtime import device_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What is decoded on a checkpoint, checked: its folder, the prompts, and the drafters by name."""

    folder: Path
    prompts: list[Prompt]
    drafters: dict[str, Drafter]

    def num_positions(self, gen_length: int) -> int:
        """Positions that the longest prompt and its generation take."""
        return max(len(prompt.token_ids) for prompt in self.prompts) + gen_length + SPARE_POSITIONS


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
    """The command of the module docstring."""
    options = make_parser().parse_args(arguments)
    options.dtype = options.dtype or default_dtype(options.device)
    options.kernels = options.kernels or default_kernels(options.device)
    if options.save_prompts is not None:
        save_prompts(options)
        return 0
    inputs = check(options)
    if options.device == "cpu":
        torch.set_num_threads(1)
    tables: dict[str, Any] = {}
    if options.shapes:
        tables["shapes"] = shape_rows(options)
    if inputs is not None:
        tables.update(checkpoint_tables(options, inputs))
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
    write_whole(options.out, json.dumps(report, indent=1) + "\n")
    print(f"written to {options.out}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The options of the module docstring, each within its bounds."""
    parser = OneLineParser(prog="python -m dlmgrid.jobs.bench_folding", description="Time folded passes.")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[], help="by shape, random weights")
    add_checkpoint(parser)
    parser.add_argument(
        "--items", type=whole_number(0), default=0, help="prompts decoded on the checkpoint (0: none)"
    )
    parser.add_argument("--prompts", type=Path, help="JSON list of lists of token ids")
    parser.add_argument("--save-prompts", type=Path, help="write the prompts of --benchmark and stop")
    parser.add_argument("--benchmark", default="words", help="generated benchmark of --save-prompts")
    parser.add_argument("--graph", type=Path, help="Spiffy's calibrated graph: adds the drafter spiffy")
    parser.add_argument("--order", help="an order model, or reference: adds the drafter spot")
    parser.add_argument("--gen-length", type=whole_number(1), default=128, help="tokens decoded a prompt")
    parser.add_argument(
        "--budgets", type=whole_number(1, MOST_DRAFTS), nargs="+", default=[8, 20], help="D of the passes"
    )
    parser.add_argument(
        "--taus", type=real_number(), nargs="+", default=[0.0, 0.02, 0.05, 0.1, 0.2, 0.5],
        help="of the recompute ratios on the checkpoint",
    )  # fmt: skip
    parser.add_argument("--tau", type=real_number(), default=0.1, help="of the table of times")
    parser.add_argument(
        "--ratios",
        type=real_number(1),
        nargs="+",
        default=[0.1, 0.25, 0.5, 1.0],
        help="ρ of the passes by shape",
    )
    parser.add_argument(
        "--prefix", type=whole_number(0), default=512,
        help="stored tokens before the block, by shape; whole blocks",
    )  # fmt: skip
    add_device(parser)
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="bfloat16 on a GPU, else float32")
    parser.add_argument("--kernels", choices=KERNELS, help="default: triton on a GPU, else torch")
    parser.add_argument(
        "--numerics", default="exact", choices=NUMERICS, help="exact: rows keep their bits in any company"
    )
    parser.add_argument(
        "--repeats", type=whole_number(1), default=10, help="readings that a median is taken of"
    )
    add_out(parser, "out/folding.json")
    return parser


def check(options: argparse.Namespace) -> Inputs | None:
    """What is decoded on the checkpoint, None for nothing; the folder of the results is there afterwards.

    Raises InputError, before anything is measured, for options that cannot be or that measure nothing.
    """
    if not options.shapes and not options.items:
        raise InputError("nothing is measured: give --shapes, or --items of a --checkpoint")
    for name in ("prompts", "graph", "order"):
        if getattr(options, name) is not None and not options.items:
            raise InputError(
                f"--{name} is of what is decoded on a checkpoint; give --items, the number of prompts"
            )
    check_kernels(options.kernels, options.device, options.dtype)
    for shape in options.shapes:
        check_prefix(options.prefix, shape_config(shape), shape, "--prefix")
    check_results(options.out)  # before a checkpoint may be fetched
    return read_inputs(options) if options.items else None


def read_inputs(options: argparse.Namespace) -> Inputs:
    """Prompts and drafters of the checkpoint. Raises InputError for files that are not there or hold something else."""
    folder, config = check_block_causal(options.checkpoint)
    drafters: dict[str, Drafter] = {"ssd": ssd.build(), "confidence_tree": confidence_tree.build()}
    if options.graph is not None:
        drafters["spiffy"] = spiffy.build(options.graph)
    if options.order is not None:
        order = find_order_checkpoint(options.order)
        check_target(order, folder)
        drafters["spot"] = spot.build(order)
    prompts = (
        random_prompts(config, options.items, 64)
        if options.prompts is None
        else read_prompts(options.prompts, options.items, config.vocab_size)
    )
    inputs = Inputs(folder=folder, prompts=prompts, drafters=drafters)
    needed = inputs.num_positions(options.gen_length)
    check_positions(needed, config, folder.name, f"--gen-length {options.gen_length}")
    return inputs


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


def checkpoint_tables(options: argparse.Namespace, inputs: Inputs) -> dict[str, Any]:
    """The tables of a checkpoint's drafted passes, printed in short. Raises InputError where no pass has drafts."""
    engine = load_engine(
        inputs.folder, num_slots=1, max_length=inputs.num_positions(options.gen_length),
        device=options.device, dtype=options.dtype, numerics=options.numerics, kernels=options.kernels,
        self_test=False,
    )  # fmt: skip
    differences: dict[str, Any] = {}
    ratios: list[Row] = []
    times: list[Row] = []
    for name, drafter in inputs.drafters.items():
        for budget in options.budgets:
            rows, timed, seen = _of_drafter(engine, drafter, budget, inputs.prompts, options)
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
    """Ratios over all prompts; times and differences of the first with drafts: a pass is run where its prompt was
    decoded last."""
    ratios: list[list[Row]] = []
    times: list[Row] = []
    seen: Row = {}
    for prompt in prompts:
        passes = drafted_passes(engine, drafter, budget, prompt, options.gen_length)
        if not passes:
            continue
        ratios.append(ratio_rows(engine, passes, options.taus))
        if not seen and budget == max(options.budgets):
            seen = difference_table(engine, passes)
        if not times:
            times.append(time_row(engine, passes, options.tau, options.repeats))
    if not ratios:
        raise InputError("no pass had drafts; raise --gen-length, or --items for more prompts")
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


def read_prompts(file: Path, count: int, vocab_size: int) -> list[Prompt]:
    """The first ``count`` prompts of a JSON file, at least one.

    Raises InputError for a file that is no list of lists of token ids below ``vocab_size``, or one with an empty list.
    """
    remedy = "make it with --save-prompts"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--prompts {file} cannot be read as JSON ({reason}); {remedy}") from error
    if not isinstance(found, list) or not found:
        raise InputError(f"--prompts {file} holds no list of prompts; {remedy}")
    for number, ids in enumerate(found, 1):
        if not isinstance(ids, list) or not ids:
            raise InputError(
                f"--prompts {file}: prompt {number} is no list of token ids, or an empty one; {remedy}"
            )
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise InputError(
                    f"--prompts {file}: prompt {number} holds {str(token_id)[:40]!r}, token ids of this checkpoint "
                    f"are 0 to {vocab_size - 1}; {remedy} and this --checkpoint"
                )
    return [
        Prompt(item_id=str(index), repeat=0, token_ids=tuple(ids)) for index, ids in enumerate(found[:count])
    ]


def save_prompts(options: argparse.Namespace) -> None:
    """Write the token ids of a generated benchmark's prompts under the checkpoint's tokenizer and template.

    Raises InputError for no items, an unknown benchmark, a faulty checkpoint, and a file that cannot be written.
    """
    from dlmgrid.workers.benchmarks.catalog import get_benchmark
    from dlmgrid.workers.tokenization import load_tokenizer

    if not options.items:
        raise InputError("--save-prompts writes no prompts; give --items, their number")
    benchmark = get_benchmark(options.benchmark)
    check_results(options.save_prompts, "--save-prompts")
    encoder = load_tokenizer(resolve_checkpoint(options.checkpoint), options.chat_template)
    items = benchmark.load(None, options.items)
    write_whole(options.save_prompts, json.dumps([list(encoder.encode(item)) for item in items]) + "\n")
    print(f"{len(items)} prompts written to {options.save_prompts}")


if __name__ == "__main__":
    raise SystemExit(main())
