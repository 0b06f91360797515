"""Fast-dLLM-v2's sub-block cache against a plain loop that patches the stock decoder's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.decoder import Decoder, Generation, Prompt
from dlmgrid.workers.drafting import none, ssd
from dlmgrid.workers.engine.engine import Engine, load_engine
from dlmgrid.workers.engine.sub_blocks import SubBlockTarget
from dlmgrid.workers.models.checkpoint import stream_tensors
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.unit_runner import decode_settings

LENGTH, WIDTH, GEN = 8, 4, 16


Pairs = list[tuple[Tensor, Tensor]]
"""Keys and values [1, Hkv, positions, d], a pair a layer."""


def _joined(first: Pairs, second: Pairs) -> Pairs:
    if not first:
        return second
    return [
        (torch.cat((keys, more_keys), 2), torch.cat((values, more_values), 2))
        for (keys, values), (more_keys, more_values) in zip(first, second, strict=True)
    ]


def _without(entries: Tensor, low: int, high: int) -> Tensor:
    return torch.cat((entries[:, :, :low], entries[:, :, high:]), 2)


class CachedLoop:
    """``generate`` with ``use_block_cache``: keys and values of the block are kept between passes, one list a layer."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        import transformers

        settings = transformers.Qwen2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
        self.config = config
        self.model = transformers.Qwen2ForCausalLM(settings).eval()
        self.model.load_state_dict(dict(stream_tensors(folder)))
        self.num_whole = self.num_part = 0

    @torch.no_grad()
    def forward(self, tokens: list[int], first: int, past: Pairs) -> tuple[Tensor, Pairs]:
        """Logits of ``tokens`` at positions from ``first`` on, all of which see all of ``past``; with their keys and
        values."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(past):
            cache.update(keys, values, layer)
        num_past = past[0][0].shape[2] if past else 0
        ids = torch.tensor([[self.config.mask_token_id if token < 0 else token for token in tokens]])
        logits = self.model(
            input_ids=ids,
            position_ids=torch.arange(first, first + len(tokens))[None],
            attention_mask=torch.zeros(1, 1, len(tokens), num_past + len(tokens)),
            past_key_values=cache,
            use_cache=True,
        ).logits[0]
        logits[:, self.config.mask_token_id] = -torch.inf
        own = [(layer.keys[:, :, num_past:], layer.values[:, :, num_past:]) for layer in cache.layers]
        return logits, own

    def run(self, prompt: list[int], threshold: float) -> tuple[list[int], list[list[tuple[int, int]]]]:
        assert len(prompt) % LENGTH
        canvas = prompt + [-1] * (-(-(len(prompt) + GEN) // LENGTH) * LENGTH - len(prompt))
        past: Pairs = []
        steps: list[list[tuple[int, int]]] = []
        for start in range(0, len(canvas), LENGTH):
            kept: Pairs | None = None
            for sub in range(start, start + LENGTH, WIDTH):
                while -1 in canvas[sub : sub + WIDTH]:
                    if kept is None or canvas[sub] < 0:
                        logits, kept = self.forward(canvas[start : start + LENGTH], start, past)
                        row_of = {position: position - start - 1 for position in range(sub, sub + WIDTH)}
                        self.num_whole += 1
                    else:
                        low, high = sub - start, sub - start + WIDTH
                        others = [
                            (_without(keys, low, high), _without(values, low, high)) for keys, values in kept
                        ]
                        logits, own = self.forward(canvas[sub : sub + WIDTH], sub, _joined(past, others))
                        for pair, new in zip(kept, own, strict=True):
                            pair[0][:, :, low:high], pair[1][:, :, low:high] = new
                        row_of = {position: position - sub - 1 for position in range(sub, sub + WIDTH)}
                        self.num_part += 1
                    masked = [p for p in range(sub, sub + WIDTH) if canvas[p] < 0]
                    tokens = {p: int(logits[row_of[p]].argmax()) for p in masked}
                    sure = {p: float(logits[row_of[p]].softmax(-1)[tokens[p]]) for p in masked}
                    best = max(masked, key=lambda p: (sure[p], -p))
                    opened = [p for p in masked if sure[p] > threshold or p == best]
                    for position in opened:
                        canvas[position] = tokens[position]
                    steps.append([(p, tokens[p]) for p in opened])
            logits, own = self.forward(canvas[start : start + LENGTH], start, past)
            past = _joined(past, own)
            if start + LENGTH < len(canvas):
                canvas[start + LENGTH] = int(logits[-1].argmax())
        return canvas[len(prompt) :][:GEN], steps


def sub_block_cell(temperature: float = 0.0) -> Cell:
    return Cell(
        model="tiny", family="fast_dllm_v2", benchmark="words", prompt_version="1", method="none", budget=0,
        temperature=temperature, block_length=LENGTH, gen_length=GEN, seed=4, decoder="threshold", threshold=0.6,
        comparison="sdar", sub_block_length=WIDTH, cache="sub_block", stop="none",
    )  # fmt: skip


def decode(engine: Engine, cell: Cell, prompts: list[list[int]], max_in_flight: int) -> list[Generation]:
    target = SubBlockTarget(engine, WIDTH)
    decoder = Decoder(target, none.build(), decode_settings(cell, engine, profiled=False))
    named = [
        Prompt(item_id=f"item-{index}", repeat=0, token_ids=tuple(tokens))
        for index, tokens in enumerate(prompts)
    ]
    return decoder.decode(named, max_in_flight)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_a_decode_is_the_plain_loop_with_stale_keys(make_model: Callable[..., Any]) -> None:
    config, folder = make_model("fast_dllm_v2", 0.2, block_length=LENGTH)
    engine = load_engine(folder, num_slots=1, max_length=64, self_test=False)
    for prompt in ([5, 9, 70], list(range(30, 35))):
        loop = CachedLoop(config, folder)
        tokens, steps = loop.run(prompt, 0.6)
        assert loop.num_part > 0
        (ours,) = decode(engine, sub_block_cell(), [prompt], 1)
        assert [list(step) for step in ours.steps] == steps
        assert ours.token_ids == tokens
        assert ours.nfe_denoise == loop.num_whole + loop.num_part


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_packed_and_serialized_runs_agree_and_claim_to_be_approximate(
    temperature: float, make_model: Callable[..., Any]
) -> None:
    _, folder = make_model("fast_dllm_v2", 0.2, block_length=LENGTH)
    engine = load_engine(folder, num_slots=2, max_length=64, self_test=False)
    prompts = [[5, 9, 70], list(range(30, 50)), [1, 2]]
    cell = sub_block_cell(temperature)
    assert cell.claim == "approximate"
    assert cell.reference().cache == "sub_block"
    packed, serialized = decode(engine, cell, prompts, 2), decode(engine, cell, prompts, 1)
    for ours, theirs in zip(packed, serialized, strict=True):
        assert (ours.steps, ours.digests, ours.seeds) == (theirs.steps, theirs.digests, theirs.seeds)


def test_it_differs_from_the_cache_of_whole_blocks_and_cannot_be_drafted(
    make_model: Callable[..., Any],
) -> None:
    _, folder = make_model("fast_dllm_v2", 0.2, block_length=LENGTH)
    engine = load_engine(folder, num_slots=1, max_length=64, self_test=False)
    cell = sub_block_cell()
    (ours,) = decode(engine, cell, [[5, 9, 70]], 1)
    settings = decode_settings(replace(cell, cache="block"), engine, profiled=False)
    exact = Decoder(engine, none.build(), settings).decode(
        [Prompt(item_id="item-0", repeat=0, token_ids=(5, 9, 70))]
    )
    assert ours.digests != exact[0].digests
    drafted = Decoder(
        SubBlockTarget(engine, WIDTH),
        ssd.build(),
        decode_settings(replace(cell, budget=4), engine, profiled=False),
    )
    with pytest.raises(ValueError, match="two states of one sample in a pass under the sub-block cache"):
        drafted.decode([Prompt(item_id="item-0", repeat=0, token_ids=(5, 9, 70))])
