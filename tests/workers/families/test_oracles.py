"""Logits of every block-causal and token-causal family against its oracle: alone, packed, and from the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dlmgrid.workers.engine.engine import Engine, load_engine
from dlmgrid.workers.models.checkpoint import check_checkpoint
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.synthetic import config_json, tiny_family_config, write_random_checkpoint

TOLERANCE = 1e-5
CASES: dict[str, dict[str, Any]] = {
    "sdar": {"block_length": 8},
    "llada2": {"block_length": 16},
    "fast_dllm_v2": {"block_length": 8, "tie_word_embeddings": True},
    "nemotron": {"block_length": 8},
}


def prompt_tokens(config: ModelConfig) -> Tensor:
    """72 tokens and, where blocks need not lie on the grid, 5 fewer."""
    count = 67 if config.family == "nemotron" else 80 if config.block_length == 16 else 72
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(1))


def drafts_of(config: ModelConfig) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    shape = (3, config.block_length)
    tokens = torch.randint(0, 256, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, -1, tokens)


def allowed_positions(config: ModelConfig, num_prompt: int, *, is_causal: bool = False) -> Tensor:
    """What each of the prompt's and the active block's positions sees, bool [T, T]."""
    positions = torch.arange(num_prompt + config.block_length)
    if config.family != "nemotron":
        blocks = positions // config.block_length
        return blocks[:, None] >= blocks[None, :]
    causal = positions[:, None] >= positions[None, :]
    return causal if is_causal else causal | (positions[:, None] >= num_prompt)


def run(
    engine: Engine, blocks: Tensor, slots: list[int], starts: list[int], store: list[bool], **mode: bool
) -> Tensor:
    hidden = engine.forward(
        blocks.int(), torch.tensor(slots), torch.tensor(starts), torch.tensor(store), **mode
    )
    logits = engine.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
    return logits[..., : engine.config.vocab_size]


def prompt_blocks(engine: Engine, prompt: Tensor) -> tuple[Tensor, list[int]]:
    """The prompt's blocks, filled up at the front where they end with it, and their starts."""
    lead = -len(prompt) % engine.block_length
    filled = torch.cat((torch.full((lead,), -1), prompt)).view(-1, engine.block_length)
    return filled, list(range(-lead, len(prompt), engine.block_length))


def difference(ours: Tensor, theirs: Tensor) -> float:
    known = theirs > -torch.inf
    assert torch.equal(known, ours > -torch.inf)
    return float((ours[known] - theirs[known]).abs().max())


@pytest.mark.parametrize("family", CASES)
def test_logits_equal_the_oracles_alone_packed_and_from_the_cache(
    family: str, make_model: Callable[..., Any], make_oracle: Callable[..., Any]
) -> None:
    config, folder = make_model(family, **CASES[family])
    oracle = make_oracle(config, folder)
    engine = load_engine(folder, num_slots=2, max_length=192)
    prompt, drafts = prompt_tokens(config), drafts_of(config)
    allowed = allowed_positions(config, len(prompt))
    expected = [oracle(torch.cat((prompt, draft)), allowed) for draft in drafts]
    blocks, starts = prompt_blocks(engine, prompt)
    lead, end, many = -starts[0], len(prompt), len(blocks)

    stored = run(engine, blocks, [0] * many, starts, [True] * many)
    assert difference(stored.flatten(0, 1)[lead:], expected[0][:end]) <= TOLERANCE
    alone = [run(engine, draft[None], [0], [end], [False])[0] for draft in drafts]
    packed = run(engine, drafts, [0] * 3, [end] * 3, [False] * 3)
    whole = run(
        engine,
        torch.cat((blocks, drafts)),
        [1] * (many + 3),
        [*starts, *[end] * 3],
        [True] * many + [False] * 3,
    )[many:]
    for index, logits in enumerate(expected):
        assert difference(alone[index], logits[end:]) <= TOLERANCE
        for other in (packed[index], whole[index]):
            assert torch.equal(alone[index], other)


def test_the_causal_mode_of_a_token_causal_family(
    make_model: Callable[..., Any], make_oracle: Callable[..., Any]
) -> None:
    config, folder = make_model("nemotron", block_length=8)
    engine = load_engine(folder, num_slots=1, max_length=192)
    prompt, draft = prompt_tokens(config), torch.arange(20, 28)
    expected = make_oracle(config, folder)(
        torch.cat((prompt, draft)), allowed_positions(config, len(prompt), is_causal=True)
    )
    blocks, starts = prompt_blocks(engine, prompt)
    run(engine, blocks, [0] * len(blocks), starts, [True] * len(blocks))
    ours = run(engine, draft[None], [0], [len(prompt)], [False], causal=True)[0]
    assert difference(ours, expected[len(prompt) :]) <= TOLERANCE
    committed = run(engine, draft[None], [0], [len(prompt)], [True])[0]
    assert torch.equal(committed, ours)


def test_only_a_token_causal_family_has_a_causal_mode(make_model: Callable[..., Any]) -> None:
    _, folder = make_model("sdar", block_length=8)
    engine = load_engine(folder, num_slots=1, max_length=64, self_test=False)
    with pytest.raises(ValueError, match="the family sdar has no causal mode"):
        run(engine, torch.zeros(1, 8), [0], [0], [False], causal=True)


@pytest.mark.parametrize("length", [4, 32, 64])
def test_sdar_at_other_block_widths(
    length: int, make_model: Callable[..., Any], make_oracle: Callable[..., Any]
) -> None:
    config, folder = make_model("sdar", block_length=8)
    config = replace(config, block_length=length)
    engine = load_engine(folder, num_slots=1, max_length=192, block_length=length, self_test=False)
    prompt = torch.arange(2 * length) % 256
    draft = drafts_of(config)[0]
    expected = make_oracle(config, folder)(torch.cat((prompt, draft)), allowed_positions(config, len(prompt)))
    blocks, starts = prompt_blocks(engine, prompt)
    ours = run(engine, torch.cat((blocks, draft[None])), [0] * 3, [*starts, len(prompt)], [True, True, False])
    assert difference(ours.flatten(0, 1), expected) <= TOLERANCE


def test_merged_experts_are_the_same_model(tmp_path: Path) -> None:
    config = tiny_family_config("llada2", block_length=8)
    assert config.experts is not None
    write_random_checkpoint(tmp_path / "each", config)
    tensors = load_file(tmp_path / "each" / "model.safetensors")
    merged = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(1, config.num_hidden_layers):
        for kind in ("gate", "up", "down"):
            names = [
                f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight"
                for expert in range(config.experts.num_experts)
            ]
            merged[f"model.layers.{layer}.mlp.experts.{kind}_proj.weight"] = torch.stack(
                [tensors[name] for name in names]
            )
    folder = tmp_path / "merged"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((tmp_path / "each" / name).read_bytes())
    save_file(merged, folder / "model.safetensors")
    assert check_checkpoint(folder).experts == replace(config.experts, is_merged=True)
    assert check_checkpoint(folder).num_parameters == config.num_parameters
    tokens = drafts_of(config)
    logits = [
        run(load_engine(path, num_slots=1, max_length=64), tokens, [0] * 3, [0] * 3, [False] * 3)
        for path in (tmp_path / "each", folder)
    ]
    assert torch.equal(*logits)
    assert config_json(replace(config, experts=replace(config.experts, is_merged=True))) == config_json(
        config
    )
