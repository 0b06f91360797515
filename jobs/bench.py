"""``make bench``: how long a verification pass takes on this device, against stock transformers in the same run.

usage: python -m dlmgrid.jobs.bench [--checkpoint DIR] [--device cpu|cuda] [--dtype float32] [--prefix 512]
                                    [--budgets 0 3 8 20] [--shapes NAME …] [--taus T …] [--items N] [--out FILE.json]

For each draft budget D the table has the time of one packed pass over (1 + D) blocks behind a shared prefix, head
included on the rows of one block a walked state, and the same work by the stock transformers class of the
checkpoint's layout (cached prefix, explicit mask, 1 + D copies in the batch). Weights are the checkpoint's own, so
both do the same work. With ``--shapes`` passes by model shape over their floor (all shapes on a GPU), with ``--taus``
folded passes, with ``--items`` decoding end to end, by samples in flight and by part. Times hold on this device only,
ratios are what to compare. Results go to a JSON file with
device, versions and commit. Needs torch and transformers, nothing else.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dlmgrid
from dlmgrid.jobs.bench_shapes import SHAPES
from dlmgrid.jobs.bench_tables import (
    EXACT,
    FAST,
    add_exact_over_fast,
    batch_table,
    decode_table,
    fold_table,
    part_table,
    pass_table,
    random_prompts,
)
from dlmgrid.kernels.benchmark import Timing, measure, measure_ceilings
from dlmgrid.workers.engine.engine import DTYPES, Engine, load_engine
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.models.checkpoint import ModelConfig, stream_tensors
from dlmgrid.workers.runtime import device_name


def main() -> int:
    """The command of the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m dlmgrid.jobs.bench", description="Time verification passes."
    )
    parser.add_argument("--checkpoint", default="reference", help="checkpoint folder or model name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--prefix", type=int, default=512, help="cached tokens before the block")
    parser.add_argument("--budgets", type=int, nargs="+", default=[0, 3, 8, 20])
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, help="models by shape, random weights")
    parser.add_argument("--taus", type=float, nargs="*", help="folded passes of the checkpoint")
    parser.add_argument("--items", type=int, default=0, help="prompts of the decoding tables (0: none)")
    parser.add_argument("--gen-length", type=int, default=256)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("out/bench.json"))
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    folder = resolve_checkpoint(arguments.checkpoint)
    numerics = ["exact", "fast"] if arguments.device == "cpu" else ["fast"]
    rows: list[dict[str, Any]] = []
    stock = time_stock(folder, arguments)
    for mode in numerics:
        for budget, timing in time_engine(folder, mode, arguments).items():
            rows.append(
                {
                    "numerics": mode,
                    "budget": budget,
                    "engine": asdict(timing),
                    "transformers": asdict(stock[budget]),
                    "speed_up": stock[budget].median_ms / timing.median_ms,
                }
            )
    write_report(rows, more_tables(folder, arguments), folder, arguments)
    return 0


def more_tables(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The tables that the arguments ask for: passes by shape, folded passes, decoding, batches, time by part."""
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    tables: dict[str, Any] = {}
    shapes = ["SDAR-8B", "SDAR-4B", "SDAR-1.7B", "smollm2-135m"] if device.type == "cuda" else []
    if asked := shapes if arguments.shapes is None else arguments.shapes:
        ceilings = measure_ceilings(device, dtype)
        tables["ceilings"] = asdict(ceilings)
        modes = [FAST, ("triton", "fast"), EXACT] if device.type == "cuda" else [FAST, ("torch", "exact")]
        passes = [
            row
            for shape in asked
            for row in pass_table(
                shape, arguments.budgets, arguments.prefix, modes, device=arguments.device, dtype=dtype,
                ceilings=ceilings, repeats=arguments.repeats,
            )
        ]  # fmt: skip
        tables["passes"] = add_exact_over_fast(passes)
    if not arguments.taus and not arguments.items:
        return tables
    engine = load_engine(
        folder, num_slots=max(arguments.in_flight), max_length=arguments.prefix + arguments.gen_length + 64,
        device=arguments.device, dtype=arguments.dtype, numerics="exact" if device.type == "cpu" else "fast",
        self_test=False,
    )  # fmt: skip
    if arguments.taus:
        tables["folded"] = [
            row
            for budget in arguments.budgets
            if budget
            for row in fold_table(engine, budget, arguments.prefix, arguments.taus, arguments.repeats)
        ]
    if arguments.items:
        prompts = random_prompts(engine.config, arguments.items, min(64, arguments.prefix or 64))
        length = arguments.gen_length
        tables["decoding"] = decode_table(engine, arguments.budgets, prompts, length)
        tables["in_flight"] = batch_table(engine, arguments.in_flight, prompts, length)
        tables["parts"] = part_table(engine, max(arguments.budgets), prompts, length)
    return tables


def time_engine(folder: Path, numerics: str, arguments: argparse.Namespace) -> dict[int, Timing]:
    """Milliseconds of one pass and one block's head, by draft budget."""
    engine = load_engine(
        folder,
        num_slots=1,
        max_length=arguments.prefix + 64,
        device=arguments.device,
        dtype=arguments.dtype,
        numerics=numerics,
        self_test=False,
    )
    length = engine.block_length
    prefix = random_tokens(engine.config, arguments.prefix // length, length)
    slots = torch.zeros(len(prefix), dtype=torch.int32)
    engine.forward(
        prefix.to(engine.device),
        slots,
        torch.arange(len(prefix), dtype=torch.int32) * length,
        torch.ones(len(prefix), dtype=torch.bool),
    )
    start = len(prefix) * length
    return {
        budget: measure(partial(_pass, engine, budget, start), engine.device, repeats=arguments.repeats)
        for budget in arguments.budgets
    }


def _pass(engine: Engine, budget: int, start: int) -> Tensor:
    blocks = random_tokens(engine.config, 1 + budget, engine.block_length).to(engine.device)
    num = len(blocks)
    hidden = engine.forward(
        blocks,
        torch.zeros(num, dtype=torch.int32),
        torch.full((num,), start, dtype=torch.int32),
        torch.zeros(num, dtype=torch.bool),
    )
    return engine.logits(hidden[0])


@torch.inference_mode()
def time_stock(folder: Path, arguments: argparse.Namespace) -> dict[int, Timing]:
    """The same work by the stock class: each branch a row of the batch, over its own copy of the cached prefix."""
    from transformers import DynamicCache

    engine_config = load_config(folder)
    device = torch.device(arguments.device)
    model = stock_model(folder, engine_config, device, DTYPES[arguments.dtype])
    length = engine_config.block_length
    num_prefix = arguments.prefix // length * length
    blocks = num_prefix // length
    prefix = random_tokens(engine_config, 1, num_prefix).to(device)
    grid = torch.arange(num_prefix, device=device) // length
    allowed = grid[:, None] >= grid[None, :]
    mask = torch.zeros(1, 1, num_prefix, num_prefix, dtype=model.dtype, device=device).masked_fill(
        ~allowed, -torch.inf
    )
    timings = {}
    for budget in arguments.budgets:
        cache = DynamicCache()
        if blocks:
            model(input_ids=prefix.long(), attention_mask=mask, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(1 + budget)
        block = random_tokens(engine_config, 1 + budget, length).long().to(device)
        positions = torch.arange(num_prefix, num_prefix + length, device=device)[None].expand(1 + budget, -1)
        open_mask = torch.zeros(1 + budget, 1, length, num_prefix + length, dtype=model.dtype, device=device)

        def one_pass(
            block: Tensor = block, positions: Tensor = positions, open_mask: Tensor = open_mask,
            cache: Any = cache,
        ) -> Tensor:  # fmt: skip
            hidden = model.model(
                input_ids=block,
                attention_mask=open_mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            cache.crop(-block.shape[1])
            logits: Tensor = model.lm_head(hidden[0])
            return logits

        timings[budget] = measure(one_pass, device, repeats=arguments.repeats)
    return timings


def load_config(folder: Path) -> ModelConfig:
    """The checkpoint's settings, its files checked."""
    from dlmgrid.workers.models.checkpoint import check_checkpoint

    return check_checkpoint(folder)


def stock_model(folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' own class of this layout: Qwen3 with q/k norms, Llama without."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }
    if config.qk_norm:
        model: Any = Qwen3ForCausalLM(Qwen3Config(**settings))
    else:
        model = LlamaForCausalLM(LlamaConfig(**settings))
    model = model.to(device=device, dtype=dtype).eval()
    tensors = dict(stream_tensors(folder, str(device)))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"stock class and checkpoint differ: missing {missing}, unexpected {unexpected}")
    return model


def random_tokens(config: ModelConfig, num_rows: int, length: int) -> Tensor:
    """int32 [num_rows, length] from the vocabulary, the same on every call of one shape."""
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randint(0, config.vocab_size, (num_rows, length), generator=generator, dtype=torch.int32)


def write_report(
    rows: list[dict[str, Any]], tables: dict[str, Any], folder: Path, arguments: argparse.Namespace
) -> None:
    """Print the table and write the JSON file."""
    report = {
        "what": "one packed verification pass with the head of one block, milliseconds",
        "checkpoint": folder.name,
        "device": device_name(arguments.device),
        "dtype": arguments.dtype,
        "prefix": arguments.prefix,
        "versions": {
            "dlmgrid": dlmgrid.__version__,
            "torch": torch.__version__,
            "transformers": importlib.metadata.version("transformers"),
        },
        "commit": commit(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": rows,
        "tables": tables,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{folder.name} on {report['device']}, {arguments.dtype}, prefix {arguments.prefix}")
    print("numerics      D   engine ms   transformers ms   times faster")
    for row in rows:
        engine, stock = row["engine"]["median_ms"], row["transformers"]["median_ms"]
        print(f"{row['numerics']:8} {row['budget']:6} {engine:11.2f} {stock:17.2f} {row['speed_up']:14.2f}")
    for row in tables.get("passes", []):
        print(
            f"{row['shape']:14} {row['kernels']:6} {row['numerics']:5} D {row['budget']:3} "
            f"{row['pass']['median_ms']:9.2f} ms, {row['over_floor']:6.2f} x floor"
            + (f", {row['over_fast']:.2f} x fast" if "over_fast" in row else "")
        )
    for row in tables.get("folded", []):
        print(
            f"folded D {row['budget']:3} tau {row['tau']:g}: recomputes {row['recompute_ratio']:.2f}, "
            f"{row['folded']['median_ms']:.2f} ms against {row['unfolded']['median_ms']:.2f} ms"
        )
    for row in [*tables.get("decoding", []), *tables.get("in_flight", [])]:
        print(
            f"{row['method']:16} D {row['budget']:3} in flight {row['in_flight']:3}: {row['tokens_per_second']:8.1f} "
            f"tokens/s, {row['over_draft_free']:.2f} x; same bits {row['same_bits']} of {row['items']}"
        )
    print(f"written to {arguments.out}")


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
