"""Checkpoints with random weights, in the published layout: for tests, and for measuring speed at a model's
shape without its weights. What they say is noise; acceptance measured on them means nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlmgrid.workers.models.config import ExpertConfig, ModelConfig, QueryScaling, YarnScaling
from dlmgrid.workers.models.families import get_family
from dlmgrid.workers.models.layout import expected_tensors
from dlmgrid.workers.models.shards import product

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
"""Special tokens of the tokenizer written here, at ids 256, 257, …; ids below are single bytes."""


def tiny_config(
    *,
    hidden_size: int = 64,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 96,
    tie_word_embeddings: bool = False,
    qk_norm: bool = True,
    block_length: int = 32,
    max_position_embeddings: int = 2048,
) -> ModelConfig:
    """A small model over bytes: a vocabulary of 261, which no power of two divides."""
    return ModelConfig(
        family="sdar",
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        vocab_size=256 + len(SPECIAL_TOKENS) + 1,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tie_word_embeddings,
        qk_norm=qk_norm,
        block_length=block_length,
        mask_token_id=256 + SPECIAL_TOKENS.index("<|mask|>"),
        stop_token_ids=(256 + SPECIAL_TOKENS.index("<|im_end|>"),),
        bos_token_id=None,
        eos_token_id=256 + SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=256,
        max_position_embeddings=max_position_embeddings,
        torch_dtype="float32",
    )


def tiny_family_config(family: str, **settings: Any) -> ModelConfig:
    """:func:`tiny_config` with the blocks that ``family`` uses: biases, experts, partial rotary, YaRN within reach."""
    config = replace(tiny_config(qk_norm=family in ("sdar", "llada2"), **settings), family=family)
    if family == "fast_dllm_v2":
        return replace(config, qkv_bias=True)
    if family == "nemotron":
        return replace(
            config,
            yarn=YarnScaling(factor=4.0, original_length=16, beta_fast=4.0),
            query_scaling=QueryScaling(beta=0.1, original_length=16),
        )
    if family == "llada2":
        experts = ExpertConfig(
            num_experts=16, num_chosen=4, num_groups=4, num_kept_groups=2, expert_size=32, shared_size=32,
            routed_scale=2.5, first_layer=1,
        )  # fmt: skip
        return replace(config, rotary_dim=config.head_dim // 2, experts=experts)
    return config


def write_random_checkpoint(
    folder: Path, config: ModelConfig, *, seed: int = 0, num_shards: int = 1, scale: float = 0.08
) -> None:
    """Write a checkpoint folder: config.json, weights (normal, standard deviation ``scale``; norms around 1),
    and a byte-level tokenizer. Weights are fp32 or, where ``config.torch_dtype`` says so, bf16."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if config.torch_dtype == "bfloat16" else torch.float32
    tensors = {}
    for name, shape in expected_tensors(config).items():
        values = scale * torch.randn(shape, generator=generator)
        tensors[name] = (values + 1.0 if len(shape) == 1 else values).to(dtype)
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names = list(tensors)
        files = {
            name: f"model-{1 + i % num_shards:05d}-of-{num_shards:05d}.safetensors"
            for i, name in enumerate(names)
        }
        for file in set(files.values()):
            shard = {name: tensors[name] for name in names if files[name] == file}
            save_file(shard, folder / file, metadata={"format": "pt"})
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config_json(config), indent=1), encoding="utf-8")
    write_byte_tokenizer(folder / "tokenizer.json")


def write_full_shape_checkpoint(
    folder: Path, config: ModelConfig, *, shard_bytes: int = 4_000_000_000, device: str = "cpu", seed: int = 0
) -> None:
    """Write a checkpoint of a published shape with random bf16 weights, one shard of at most ``shard_bytes`` in memory
    at a time (a larger tensor has its own). Drawn on ``device``: a GPU takes seconds where a CPU takes minutes.

    Norms are ones; other weights are normal with the variance 1 / K of their input width, so that activations stay
    in range whatever the depth.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device=device).manual_seed(seed)
    shards: list[list[str]] = [[]]
    places, filled = expected_tensors(config), 0
    for name, shape in places.items():
        size = 2 * product(shape)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files: dict[str, str] = {}
    for index, names in enumerate(shards, 1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            shape = places[name]
            if len(shape) == 1:
                tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
                continue
            values = torch.empty(shape, dtype=torch.bfloat16, device=device)
            tensors[name] = values.normal_(0.0, shape[-1] ** -0.5, generator=generator).cpu()
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    total = sum(2 * product(shape) for shape in places.values())
    index_values = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_values), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config_json(config), indent=1), encoding="utf-8")
    write_byte_tokenizer(folder / "tokenizer.json", names_mask=False)
    added = {"<|mask|>": config.mask_token_id}
    added |= {f"<|stop {token}|>": token for token in config.stop_token_ids}
    (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")


def config_json(config: ModelConfig) -> dict[str, object]:
    """The config.json of a checkpoint with these settings, as its family publishes it."""
    return get_family(config.family).config_json(config)


def write_byte_tokenizer(path: Path, *, names_mask: bool = True) -> None:
    """A tokenizer.json with one token a byte and the special tokens after them; nothing is merged.

    Without ``names_mask`` there are no special tokens: a larger model has its own ids for them.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if names_mask:
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path))
