"""Oracles of the families: transformers' stock classes under an explicit mask, and a plain twin of LLaDA2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlmgrid.workers.models.checkpoint import stream_tensors
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.synthetic import tiny_family_config, write_random_checkpoint

Oracle = Callable[[Tensor, Tensor], Tensor]
"""Maps (tokens [T], -1 where masked; allowed bool [T, T]) to logits [T, V]."""


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[ModelConfig, Path]]:
    """A checkpoint folder of a tiny model of a family, made once for equal settings."""
    made: dict[Any, tuple[ModelConfig, Path]] = {}

    def make(family: str, scale: float = 0.08, **settings: Any) -> tuple[ModelConfig, Path]:
        key = (family, scale, *sorted(settings.items()))
        if key not in made:
            config = tiny_family_config(family, **settings)
            folder = tmp_path_factory.mktemp(family)
            write_random_checkpoint(folder, config, scale=scale, num_shards=2)
            made[key] = config, folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def make_oracle() -> Callable[[ModelConfig, Path], Oracle]:
    def make(config: ModelConfig, folder: Path) -> Oracle:
        tensors = dict(stream_tensors(folder))
        forward = plain_llada2(config, tensors) if config.experts else stock_decoder(config, tensors)

        @torch.inference_mode()
        def logits(tokens: Tensor, allowed: Tensor) -> Tensor:
            out = forward(torch.where(tokens < 0, config.mask_token_id, tokens).long(), allowed)
            out[:, config.mask_token_id] = -torch.inf
            return out

        return logits

    return make


def stock_decoder(config: ModelConfig, tensors: dict[str, Tensor]) -> Oracle:
    import transformers

    kind = {"sdar": "Qwen3", "fast_dllm_v2": "Qwen2", "nemotron": "Ministral3"}[config.family]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.yarn is not None and config.query_scaling is not None:
        rope = {
            "rope_type": "yarn",
            "rope_theta": config.rope_theta,
            "factor": config.yarn.factor,
            "original_max_position_embeddings": config.yarn.original_length,
            "beta_fast": config.yarn.beta_fast,
            "beta_slow": config.yarn.beta_slow,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": config.query_scaling.beta,
        }
    settings = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tie_word_embeddings,
        max_position_embeddings=config.max_position_embeddings,
        attn_implementation="eager",
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
    renamed = {
        name.replace("encoder.", "model.").replace("diffusion_head", "lm_head"): tensor
        for name, tensor in tensors.items()
    }
    if config.tie_word_embeddings:
        renamed["lm_head.weight"] = renamed["model.embed_tokens.weight"]
    model.load_state_dict(renamed)

    def forward(ids: Tensor, allowed: Tensor) -> Tensor:
        mask = torch.zeros(1, 1, *allowed.shape).masked_fill_(~allowed, -torch.inf)
        out: Tensor = model(ids[None], attention_mask=mask, use_cache=False).logits[0]
        return out

    return forward


def plain_llada2(config: ModelConfig, tensors: dict[str, Tensor]) -> Oracle:
    """LLaDA2's decoder as its published class computes it, routing token by token."""
    experts = config.experts
    assert experts is not None
    width, num_heads, num_kv = config.head_dim, config.num_attention_heads, config.num_key_value_heads

    def norm(x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        return scaled * tensors[name + ".weight"]

    def mlp(x: Tensor, prefix: str, index: int | None = None) -> Tensor:
        name = prefix if index is None else f"{prefix}.{index}"
        gate, up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def routed(rows: Tensor, prefix: str) -> Tensor:
        share = torch.zeros(len(rows), experts.num_experts)
        for row, scores in enumerate(torch.sigmoid(rows @ tensors[prefix + ".gate.weight"].T)):
            groups = (scores + tensors[prefix + ".gate.expert_bias"]).view(experts.num_groups, -1)
            kept = groups.topk(2, dim=1).values.sum(1).topk(experts.num_kept_groups).indices
            open_to = torch.full_like(groups, -torch.inf)
            open_to[kept] = groups[kept]
            chosen = open_to.flatten().topk(experts.num_chosen).indices
            share[row, chosen] = scores[chosen] / (scores[chosen].sum() + 1e-20) * experts.routed_scale
        parts = [
            share[:, expert, None] * mlp(rows, prefix + ".experts", expert)
            for expert in range(experts.num_experts)
        ]
        return torch.stack(parts).sum(0)

    def turn(x: Tensor) -> Tensor:
        rotary = config.rotary_dim
        powers = torch.arange(0, rotary, 2).float() / rotary
        angles = torch.arange(len(x)).float()[:, None] / config.rope_theta**powers
        cosines, sines = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
        head, rest = x[..., :rotary], x[..., rotary:]
        half = torch.cat((-head[..., rotary // 2 :], head[..., : rotary // 2]), -1)
        return torch.cat((head * cosines + half * sines, rest), -1)

    def forward(ids: Tensor, allowed: Tensor) -> Tensor:
        x = tensors["model.word_embeddings.weight"][ids]
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            fused = (
                norm(x, prefix + "input_layernorm") @ tensors[prefix + "attention.query_key_value.weight"].T
            )
            heads = fused.view(len(ids), num_heads + 2 * num_kv, width)
            queries, keys, values = heads.split((num_heads, num_kv, num_kv), 1)
            queries = turn(norm(queries, prefix + "attention.query_layernorm"))
            keys = turn(norm(keys, prefix + "attention.key_layernorm"))
            keys, values = (part.repeat_interleave(num_heads // num_kv, 1) for part in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * width**-0.5
            weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
            attended = torch.einsum("hqk,khd->qhd", weights, values).reshape(len(ids), -1)
            x = x + attended @ tensors[prefix + "attention.dense.weight"].T
            normed = norm(x, prefix + "post_attention_layernorm")
            if layer < experts.first_layer:
                x = x + mlp(normed, prefix + "mlp")
            else:
                x = x + routed(normed, prefix + "mlp") + mlp(normed, prefix + "mlp.shared_experts")
        return norm(x, "model.norm") @ tensors["lm_head.weight"].T

    return forward
