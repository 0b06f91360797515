"""Tables of ``make bench`` against transformers' own classes: the same pass as their users would run it.

Each branch is a row of the batch over its own copy of the cached prefix, with an explicit mask; the head runs on the
rows of one block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlmgrid.jobs.bench_passes import random_blocks, time_pass
from dlmgrid.kernels.benchmark import Timing, measure
from dlmgrid.workers.engine.engine import Engine
from dlmgrid.workers.models.checkpoint import stream_tensors
from dlmgrid.workers.models.config import ModelConfig

STOCK_GOALS = {"SDAR-8B": 10.0, "SDAR-1.7B": 20.0}
"""Least times faster than the stock class at D = 0, batch 1."""


def stock_rows(
    name: str, engine: Engine, stock: Mapping[int, Timing], prefix: int, repeats: int
) -> list[dict[str, Any]]:
    """A row for each D that was timed: the engine's wall time of the same work, and how many times faster it is."""
    rows = []
    for budget, timing in stock.items():
        ours = time_pass(engine, budget, prefix, "block", repeats)
        row = {
            "model": name, "kernels": engine.kernels, "numerics": engine.numerics, "budget": budget,
            "prefix": prefix, "transformers": asdict(timing), "engine": ours,
            "speed_up": timing.median_ms / ours["wall_ms"],
        }  # fmt: skip
        if budget == 0 and name in STOCK_GOALS:
            row |= {"goal": STOCK_GOALS[name], "of_goal": row["speed_up"] / STOCK_GOALS[name]}
        rows.append(row)
    return rows


@torch.inference_mode()
def time_stock(
    model: Any, config: ModelConfig, budgets: Sequence[int], prefix: int, device: torch.device, repeats: int
) -> dict[int, Timing]:
    """Milliseconds of one pass of the stock class and one block's head, by draft budget; the answer is waited for."""
    from transformers import DynamicCache

    length = config.block_length
    num_prefix = prefix // length * length
    tokens = random_blocks(config, num_prefix // length).view(1, -1).to(device)
    grid = torch.arange(num_prefix, device=device) // length
    allowed = grid[:, None] >= grid[None, :]
    mask = torch.zeros(1, 1, num_prefix, num_prefix, dtype=model.dtype, device=device).masked_fill(
        ~allowed, -torch.inf
    )
    timings = {}
    for budget in budgets:
        cache = DynamicCache()
        if num_prefix:
            model.model(input_ids=tokens.long(), attention_mask=mask, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(1 + budget)
        block = random_blocks(config, 1 + budget).long().to(device)
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
            return logits.argmax(dim=-1).cpu()

        timings[budget] = measure(one_pass, torch.device("cpu"), repeats=repeats)
    return timings


def stock_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, folder: Path | None = None
) -> Any:
    """transformers' own class of this layout: Qwen3 with q/k norms, Llama without; with the weights of a checkpoint
    folder, or random ones drawn on the device."""
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
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            if config.qk_norm:
                model: Any = Qwen3ForCausalLM(Qwen3Config(**settings))
            else:
                model = LlamaForCausalLM(LlamaConfig(**settings))
    finally:
        torch.set_default_dtype(before)
    model = model.to(device=device, dtype=dtype).eval()
    if folder is not None:
        missing, unexpected = model.load_state_dict(dict(stream_tensors(folder, str(device))), strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise RuntimeError(
                f"stock class and checkpoint differ: missing {missing}, unexpected {unexpected}"
            )
    return model
