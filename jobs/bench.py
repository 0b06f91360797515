"""``make bench``: verification passes, decoding and drafting on this device, each as measured / goal.

usage: python -m dlmgrid.jobs.bench [--tables passes stock decode folds batch parts drafting folding]
                                    [--checkpoint DIR [--chat-template NAME]] [--drafts host|device]
                                    [--drafters spiffy=FILE spot=FILE spot_gamma=FILE,gamma=VALUE …] [--out FILE.json]

Tables, all read in one run:

    passes    a whole pass by shape, prefix and D: device and wall time, over its floor, over (the vendor's products in
              one graph + the floor of the rest), exact over fast
    parts     a pass by group of kernels
    stock     against transformers' own class, by shape and with the checkpoint's weights
    decode    tokens/s of each method at batch 1 over draft-free, and the time of a round by part
    folds     tokens/s of folded drafts by τ at batch 1, over the same drafts unfolded and over draft-free
    batch     draft-free tokens/s by samples in flight
    drafting  the share of drafting, summary and noise in a round
    folding   folded passes by recompute ratio, over their floor and the unfolded pass

Shapes have random weights; decode, folds and batch take the checkpoint's. A table that fails is a line under
``errors`` and exit code 1; the others stay. Times hold on this device only, ratios are what to compare. Results go to
a JSON file with device, versions and commit, written again after every table from the first row on. Options that
cannot be are refused in one line, exit code 2, before anything is measured. Needs torch and transformers, nothing else.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import dlmgrid
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
from dlmgrid.jobs.bench_decode import (
    batch_rows,
    build_drafter,
    decode_rows,
    drafting_row,
    parse_drafters,
    random_prompts,
)
from dlmgrid.jobs.bench_folds import fold_rows
from dlmgrid.jobs.bench_passes import (
    SPARE_POSITIONS,
    Row,
    add_exact_over_fast,
    fill_prefix,
    part_rows,
    pass_rows,
)
from dlmgrid.jobs.bench_print import row_line
from dlmgrid.jobs.bench_shapes import SHAPES, random_engine, random_weights, shape_config
from dlmgrid.jobs.bench_stock import stock_model, stock_rows, time_stock
from dlmgrid.jobs.folding_tables import shape_table
from dlmgrid.jobs.refusals import in_one_line
from dlmgrid.kernels.benchmark import Ceilings, measure_ceilings
from dlmgrid.workers.benchmarks.words import MAX_ITEMS, held_out_items
from dlmgrid.workers.decoding.decoder import Prompt
from dlmgrid.workers.drafting.spiffy_graph import load_graph
from dlmgrid.workers.engine.engine import DTYPES, Engine, load_engine
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import write_whole
from dlmgrid.workers.runtime import device_name
from dlmgrid.workers.tokenization import load_tokenizer
from dlmgrid.workers.units import DRAFT_PLACES

TABLES = ("passes", "parts", "stock", "decode", "folds", "batch", "drafting", "folding")
_SHAPES = ("SDAR-8B", "SDAR-4B", "SDAR-1.7B", "smollm2-135m")
_DRAFTING_SHAPES = ("SDAR-8B", "SDAR-1.7B", "smollm2-135m")


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
    """The command of the module docstring."""
    given = make_parser().parse_args(arguments)
    given.dtype = given.dtype or default_dtype(given.device)
    if given.device == "cpu":
        torch.set_num_threads(1)
    bench = Bench(given)
    for table in TABLES:
        if table in given.tables:
            bench.run(table)
    print(
        f"{'written to' if bench.has_rows else 'nothing was measured, nothing written to'} {given.out}"
        + f", {len(bench.report['errors'])} errors" * bool(bench.report["errors"])
    )
    return 1 if bench.report["errors"] else 0


def make_parser() -> argparse.ArgumentParser:
    """The options of the module docstring, each within its bounds."""
    is_gpu = torch.cuda.is_available()
    parser = OneLineParser(prog="python -m dlmgrid.jobs.bench", description="Time passes and decoding.")
    any_budget, drafted = whole_number(0, MOST_DRAFTS), whole_number(1, MOST_DRAFTS)
    parser.add_argument(
        "--tables",
        nargs="+",
        choices=TABLES,
        default=list(TABLES),
        help="what to measure; all of it by default",
    )
    add_checkpoint(parser)
    add_device(parser)
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="bfloat16 on a GPU, else float32")
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=list(_SHAPES) if is_gpu else ["tiny"],
        help="models with random weights, of the tables by shape",
    )  # fmt: skip
    parser.add_argument(
        "--prefixes", type=whole_number(0), nargs="+", default=[512, 2048],
        help="cached tokens of the passes, whole blocks; the first one is every other table's",
    )  # fmt: skip
    parser.add_argument(
        "--budgets", type=any_budget, nargs="+", default=[0, 3, 8, 20, 41], help="D of the passes"
    )
    parser.add_argument(
        "--stock-budgets",
        type=any_budget,
        nargs="+",
        default=[0, 8, 20],
        help="D of the passes against transformers",
    )
    parser.add_argument(
        "--part-budgets",
        type=any_budget,
        nargs="+",
        default=[0, 8],
        help="D of the parts and of folded passes",
    )
    parser.add_argument(
        "--decode-budgets", type=drafted, nargs="+", default=[8, 20], help="D of decode, folds and drafting"
    )
    parser.add_argument(
        "--drafters", nargs="*", default=[], metavar="METHOD=FILE", help="learned or calibrated parts"
    )
    parser.add_argument(
        "--drafts", choices=DRAFT_PLACES, default="device" if is_gpu else "host", help="where trees grow"
    )
    parser.add_argument(
        "--items", type=whole_number(1, MAX_ITEMS), default=4, help="words prompts at batch 1"
    )
    parser.add_argument("--gen-length", type=whole_number(1), default=128, help="tokens decoded a prompt")
    parser.add_argument(
        "--in-flight", type=whole_number(1, MAX_ITEMS), nargs="+", default=[1, 8, 32, 64, 128],
        help="samples decoded at once, of the table batch",
    )  # fmt: skip
    parser.add_argument(
        "--ratios", type=real_number(1), nargs="+", default=[0.25, 0.5, 1.0], help="ρ of folded passes"
    )
    parser.add_argument(
        "--taus",
        type=real_number(),
        nargs="+",
        default=[0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8],
        help="τ of folded drafts",
    )
    parser.add_argument(
        "--repeats", type=whole_number(1), default=3, help="readings that a median is taken of"
    )
    add_out(parser, "out/bench.json")
    return parser


class Bench:
    """The tables of one run and their report. Raises InputError, before anything is measured, for options that cannot
    be."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device, self.dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
        self.kernels = default_kernels(arguments.device)
        self._check_options()
        check_results(arguments.out)  # before a checkpoint may be fetched
        self.folder, self.config = check_block_causal(arguments.checkpoint)
        self.given = parse_drafters(arguments.drafters)
        self._check_inputs()
        self.ceilings: Ceilings = measure_ceilings(self.device, self.dtype)
        self.report: dict[str, Any] = {
            "what": "measured / goal by table, milliseconds and tokens/s of one run",
            "device": device_name(arguments.device),
            "dtype": arguments.dtype,
            "checkpoint": self.folder.name,
            "versions": {
                "dlmgrid": dlmgrid.__version__,
                "torch": torch.__version__,
                **{name: _version(name) for name in ("triton", "transformers")},
            },
            "commit": commit(),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "arguments": {name: str(value) for name, value in vars(arguments).items() if name != "out"},
            "ceilings": asdict(self.ceilings),
            "seconds": {},
            "errors": [],
            "tables": {},
        }
        copy, rate = self.ceilings.bytes_per_second / 1e12, self.ceilings.flops_per_second / 1e12
        print(
            f"{self.report['device']}, {arguments.dtype}: copies {copy:.2f} TB/s, multiplies {rate:.1f} TFLOP/s"
        )

    def run(self, table: str) -> None:
        """Fill one table, shape by shape where it has shapes."""
        begun = time.perf_counter()
        print(f"-- {table}", flush=True)
        self.report["tables"][table] = []
        make: Callable[[str], Iterable[Row]] = getattr(self, f"_{table}")
        for shape in self._parts_of(table):
            try:
                for row in make(shape):
                    self.report["tables"][table].append(row)
                    print(row_line(table, row), flush=True)
            except Exception as error:  # noqa: BLE001 - the other tables stay
                line = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                where = traceback.format_exc().splitlines()[-4:]
                self.report["errors"].append({"table": table, "of": shape, "error": line, "where": where})
                print(f"{table} {shape}: {line}", flush=True)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if table == "passes":
            self.report["tables"][table] = add_exact_over_fast(self.report["tables"][table])
            for row in self.report["tables"][table]:
                if "over_fast" in row:
                    print(row_line("exact", row))
        self.report["seconds"][table] = round(time.perf_counter() - begun, 1)
        if self.has_rows:
            write_whole(self.arguments.out, json.dumps(self.report, indent=1) + "\n")

    @property
    def has_rows(self) -> bool:
        """Whether a table has any row yet: the file is written from then on."""
        return any(self.report["tables"].values())

    def _check_options(self) -> None:
        given = self.arguments
        check_kernels(self.kernels, given.device, given.dtype)
        if not any(self._measures(table) for table in given.tables):
            raise InputError(
                f"--tables {' '.join(given.tables)} measure nothing here: parts needs a GPU, folding a --part-budgets "
                "of 1 or more, drafting a shape that it times"
            )
        for prefix in given.prefixes:
            for shape in given.shapes:
                check_prefix(prefix, shape_config(shape), shape, "--prefixes")

    def _check_inputs(self) -> None:
        given = self.arguments
        if "stock" in given.tables:
            check_prefix(given.prefixes[0], self.config, self.folder.name, "--prefixes")
        for method, parts in self.given.items():
            if "checkpoint" in parts:
                check_target(parts["checkpoint"], self.folder)
            build_drafter(method, self.given)
            if "graph" in parts and {"decode", "folds"} & set(given.tables):
                nodes, most = load_graph(parts["graph"]).budget, max(given.decode_budgets)
                if nodes < most:
                    raise InputError(
                        f"draft graph {parts['graph']} was calibrated for {nodes} nodes, --decode-budgets asks for "
                        f"{most}; calibrate one for as many"
                    )
        if {"decode", "folds", "batch"} & set(given.tables):
            widths = given.in_flight if "batch" in given.tables else []
            needed = self._longest(self._prompts(max(given.items, *widths, 2)))
            check_positions(needed, self.config, self.folder.name, f"--gen-length {given.gen_length}")

    def _measures(self, table: str) -> bool:
        if table == "parts":
            return self.device.type == "cuda"
        return bool(self._parts_of(table)) and (table != "folding" or any(self.arguments.part_budgets))

    def _parts_of(self, table: str) -> list[str]:
        shapes = list(self.arguments.shapes)
        if table in ("passes", "parts", "folding"):
            return shapes
        if table == "stock":
            return [*shapes, "checkpoint"]
        if table == "drafting":
            return [shape for shape in shapes if shape in (*_DRAFTING_SHAPES, "tiny")]
        return ["checkpoint"]

    def _engine(self, shape: str, max_length: int, num_slots: int = 1) -> Engine:
        return random_engine(
            shape_config(shape), num_slots=num_slots, max_length=max_length, device=self.arguments.device,
            dtype=self.dtype, numerics="exact", kernels=self.kernels,
        )  # fmt: skip

    def _loaded(self, num_slots: int, max_length: int) -> Engine:
        return load_engine(
            self.folder, num_slots=num_slots, max_length=max_length, device=self.arguments.device,
            dtype=self.arguments.dtype, numerics="exact", kernels=self.kernels, self_test=False,
        )  # fmt: skip

    def _passes(self, shape: str) -> Iterable[Row]:
        given, config = self.arguments, shape_config(shape)
        weights = random_weights(config, given.device, self.dtype)
        modes = [(self.kernels, "exact"), (self.kernels, "fast")]
        return pass_rows(
            shape, config, weights, modes, given.prefixes, given.budgets, device=given.device,
            ceilings=self.ceilings, repeats=given.repeats,
        )  # fmt: skip

    def _parts(self, shape: str) -> Iterable[Row]:
        if self.device.type != "cuda":
            return
        prefix = self.arguments.prefixes[0]
        yield from part_rows(
            shape, self._engine(shape, prefix + SPARE_POSITIONS), prefix, self.arguments.part_budgets
        )

    def _stock(self, shape: str) -> Iterable[Row]:
        given, prefix = self.arguments, self.arguments.prefixes[0]
        is_checkpoint = shape == "checkpoint"
        config = self.config if is_checkpoint else shape_config(shape)
        model = stock_model(config, self.device, self.dtype, self.folder if is_checkpoint else None)
        stock = time_stock(model, config, given.stock_budgets, prefix, self.device, given.repeats)
        del model
        length = prefix + SPARE_POSITIONS
        engine = self._loaded(1, length) if is_checkpoint else self._engine(shape, length)
        fill_prefix(engine, prefix)
        return stock_rows(self.folder.name if is_checkpoint else shape, engine, stock, prefix, given.repeats)

    def _decode(self, _: str) -> Iterable[Row]:
        given = self.arguments
        prompts = self._prompts(given.items)
        engine = self._loaded(1, self._longest(prompts))
        return decode_rows(
            engine, given.decode_budgets, prompts, given.gen_length, self.given, repeats=given.repeats,
            drafts=given.drafts,
        )  # fmt: skip

    def _folds(self, _: str) -> Iterable[Row]:
        given = self.arguments
        prompts = self._prompts(given.items)
        engine = self._loaded(1, self._longest(prompts))
        return fold_rows(
            engine, given.decode_budgets, given.taus, prompts, given.gen_length, self.given, given.drafts
        )

    def _batch(self, _: str) -> Iterable[Row]:
        given = self.arguments
        prompts = self._prompts(max(2, *given.in_flight))
        engine = self._loaded(max(given.in_flight), self._longest(prompts))
        return batch_rows(engine, sorted(given.in_flight), prompts, given.gen_length, self.ceilings)

    def _drafting(self, shape: str) -> Iterable[Row]:
        length = min(self.arguments.gen_length, 64)
        engine = self._engine(shape, 64 + length + SPARE_POSITIONS, num_slots=8)
        for budget in self.arguments.decode_budgets:
            for width in (1, 8):
                prompts = random_prompts(engine.config, width, 64)
                for drafts in DRAFT_PLACES if self.kernels == "triton" else DRAFT_PLACES[:1]:
                    yield drafting_row(shape, engine, budget, prompts, length, drafts=drafts)

    def _folding(self, shape: str) -> Iterable[Row]:
        given = self.arguments
        return shape_table(
            shape, [budget for budget in given.part_budgets if budget], given.prefixes[0], given.ratios,
            device=given.device, dtype=self.dtype, kernels=self.kernels, numerics="exact", ceilings=self.ceilings,
            repeats=given.repeats,
        )  # fmt: skip

    def _prompts(self, count: int) -> list[Prompt]:
        tokenizer = load_tokenizer(self.folder, self.arguments.chat_template)
        items = held_out_items(count)
        return [Prompt(item_id=i.item_id, repeat=0, token_ids=tuple(tokenizer.encode(i))) for i in items]

    def _longest(self, prompts: list[Prompt]) -> int:
        return max(len(one.token_ids) for one in prompts) + int(self.arguments.gen_length) + SPARE_POSITIONS


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """The checkout's commit, with a + where files differ from it; "" outside a checkout."""
    root = Path(dlmgrid.__file__).resolve().parent.parent
    found = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty=+"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() if found.returncode == 0 else ""


if __name__ == "__main__":
    raise SystemExit(main())
