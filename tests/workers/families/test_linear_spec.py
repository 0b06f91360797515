"""Linear self-speculation against a plain loop over the oracle, and against the autoregressive run it drafts for."""

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
from dlmgrid.workers.decoding.linear_spec import LinearSpecDecoder
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.drafting import none
from dlmgrid.workers.engine.engine import Engine, load_engine
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.unit_runner import decode_settings

SEED = 5
LENGTH = 8
GEN = 24
PROMPTS = [
    Prompt(item_id=f"item-{count}", repeat=0, token_ids=tuple((5 * index) % 251 for index in range(count)))
    for count in (1, 16, 21)
]


def causal_cell(**settings: Any) -> Cell:
    values: dict[str, Any] = {
        "model": "tiny", "family": "nemotron", "benchmark": "words", "prompt_version": "1", "method": "none",
        "budget": 0, "temperature": 0.0, "block_length": LENGTH, "gen_length": GEN, "seed": SEED,
        "decoder": "causal", "cache": "causal",
    }  # fmt: skip
    return Cell(**(values | settings))


def decode_alone(engine: Engine, **settings: Any) -> list[Generation]:
    """The autoregressive run, one sample at a time."""
    wanted = decode_settings(causal_cell(**settings), engine, profiled=False)
    return Decoder(engine, none.build(), wanted).decode(PROMPTS, 1)


def decode_drafted(engine: Engine, budget: int, **settings: Any) -> list[Generation]:
    cell = causal_cell(method="linear_spec", budget=budget, **settings)
    return LinearSpecDecoder(engine, decode_settings(cell, engine, profiled=False)).decode(PROMPTS)


def plain_loop(
    oracle: Callable[[Tensor, Tensor], Tensor],
    config: ModelConfig,
    prompt: Prompt,
    temperature: float,
    num_drafts: int,
    stops: tuple[int, ...] = (),
) -> tuple[list[int], int]:
    """Output and forwards of the published loop, without a cache: every pass computes everything again."""
    table = NoiseTable(SEED)
    start = len(prompt.token_ids)

    def choose(row: Tensor, position: int) -> int:
        if temperature == 0:
            return int(row.argmax())
        key, at = torch.tensor([table.key(prompt.item_id, 0)]), torch.tensor([position])
        noise = table.rows(key, Stream.TOKEN, at, (at - start) % LENGTH, config.vocab_size)[0]
        return int((row / temperature + noise).argmax())

    def run(tokens: list[int], first: int) -> Tensor:
        """Logits [T, V]: positions from ``first`` on see each other, the others what is before them."""
        at = torch.arange(len(tokens))
        allowed = (at[:, None] >= at[None, :]) | (at[:, None] >= first)
        return oracle(torch.tensor(tokens), allowed)

    tokens = list(prompt.token_ids)
    tokens.append(choose(run(tokens, len(tokens))[-1], start))
    forwards = 1
    while len(tokens) - start < GEN and tokens[-1] not in stops:
        newest = len(tokens) - 1
        drafting = run(tokens + [-1] * (LENGTH - 1), newest)
        drafts = [choose(drafting[newest + i], newest + i) for i in range(1, num_drafts + 1)]
        verifying = run(tokens + drafts, len(tokens) + num_drafts)
        forwards += 2
        for index in range(num_drafts + 1):
            tokens.append(choose(verifying[newest + index], newest + index + 1))
            if tokens[-1] in stops or index == num_drafts or drafts[index] != tokens[-1]:
                break
    output = tokens[start : start + GEN]
    ends = [index for index, token in enumerate(output) if token in stops]
    return output[: ends[0] + 1] if ends else output, forwards


@pytest.mark.parametrize(
    ("budget", "temperature"), [(1, 0.0), (3, 1.0), (LENGTH - 1, 0.0), (LENGTH - 1, 0.7)]
)
def test_a_drafted_run_is_the_plain_loop_and_the_autoregressive_run(
    budget: int,
    temperature: float,
    make_model: Callable[..., Any],
    make_oracle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, folder = make_model("nemotron", 0.3, block_length=LENGTH)
    engine = load_engine(folder, num_slots=8, max_length=96, self_test=False)
    plain, head = make_oracle(config, folder), engine.logits
    likings = torch.randn(engine.vocab_padded, generator=torch.Generator().manual_seed(2))
    liking = likings  # of tokens, by both modes, so that drafts are accepted

    def oracle(tokens: Tensor, allowed: Tensor) -> Tensor:
        return plain(tokens, allowed) + liking[: config.vocab_size]

    monkeypatch.setattr(engine, "logits", lambda rows: head(rows) + liking)
    stops: tuple[int, ...] = ()
    accepted: list[int] = []
    for strength, stops_early in ((2.0, False), (2.0, True), (40.0, False)):
        liking = likings * strength
        engine.config = replace(config, stop_token_ids=stops if stops_early else ())
        serialized = decode_alone(engine, temperature=temperature)
        drafted = decode_drafted(engine, budget, temperature=temperature)
        for prompt, ours, theirs in zip(PROMPTS, drafted, serialized, strict=True):
            output, forwards = plain_loop(
                oracle, config, prompt, temperature, budget, engine.config.stop_token_ids
            )
            assert ours.token_ids == output
            assert ours.nfe_prefill + ours.nfe_draft + ours.nfe_denoise + ours.nfe_commit == forwards
            assert (ours.token_ids, ours.stop_reason) == (theirs.token_ids, theirs.stop_reason)
            assert (ours.steps, ours.seeds) == (theirs.steps, theirs.seeds)
            assert (ours.digests, ours.margins) == (theirs.digests, theirs.margins)
            assert ours.argmax_commits == theirs.argmax_commits
            accepted += ours.accepted
        assert drafted[1].stop_reason == ("eos" if stops_early else "length")
        stops = (drafted[1].token_ids[10],)
    assert {0, budget} <= set(accepted)


def test_the_drafters_own_noise_costs_drafts_and_no_token(make_model: Callable[..., Any]) -> None:
    _, folder = make_model("nemotron", 0.3, block_length=LENGTH)
    engine = load_engine(folder, num_slots=8, max_length=96, self_test=False)
    coupled, uncoupled = (
        decode_drafted(engine, LENGTH - 1, temperature=1.0, verification=mode)
        for mode in ("coupled", "uncoupled")
    )
    assert [found.steps for found in coupled] == [found.steps for found in uncoupled]
    assert sum(sum(found.accepted) for found in uncoupled) < sum(sum(found.accepted) for found in coupled)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_the_engine_answers_itself_keep_the_autoregressive_run(
    temperature: float, make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = make_model("nemotron", 0.3, block_length=LENGTH)
    engine = load_engine(folder, num_slots=8, max_length=96, self_test=False)
    from_logits = decode_drafted(engine, 5, temperature=temperature)
    monkeypatch.setattr(Engine, "predicts_rows", True)
    serialized = decode_alone(engine, temperature=temperature)
    for ours, theirs, other in zip(
        decode_drafted(engine, 5, temperature=temperature), serialized, from_logits, strict=True
    ):
        assert (ours.steps, ours.seeds, ours.digests) == (theirs.steps, theirs.seeds, theirs.digests)
        assert ours.argmax_commits == theirs.argmax_commits == other.argmax_commits
        assert (ours.token_ids, ours.accepted) == (other.token_ids, other.accepted)


@pytest.mark.gpu  # the interpreter takes minutes
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_triton_kernels_keep_the_autoregressive_run(
    temperature: float, make_model: Callable[..., Any], triton_device: torch.device
) -> None:
    _, folder = make_model(
        "nemotron", 0.3, block_length=4, head_dim=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    engine = load_engine(
        folder, num_slots=4, max_length=32, device=triton_device.type, kernels="triton", self_test=False
    )
    settings: dict[str, Any] = {"temperature": temperature, "block_length": 4, "gen_length": 4}
    free, drafting = (
        decode_settings(causal_cell(**settings, **method), engine, profiled=False)
        for method in ({}, {"method": "linear_spec", "budget": 3})
    )
    prompts = PROMPTS[:1] if triton_device.type == "cpu" else PROMPTS[:2]
    serialized = Decoder(engine, none.build(), free, logits_pass=engine.logits_pass).decode(prompts, 1)
    drafted = LinearSpecDecoder(engine, drafting, engine.logits_pass).decode(prompts)
    for ours, theirs in zip(drafted, serialized, strict=True):
        assert (ours.token_ids, ours.steps, ours.seeds) == (theirs.token_ids, theirs.steps, theirs.seeds)
        assert (ours.digests, ours.margins) == (theirs.digests, theirs.margins)
        assert ours.argmax_commits == theirs.argmax_commits


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decoder": "static"}, "the decoder causal"),
        ({"budget": LENGTH}, f"1 to {LENGTH - 1} tokens of a block, not {LENGTH}"),
        ({"budget": 0}, "not 0"),
        ({"verification": "greedy_match"}, "no verification greedy_match"),
        ({"fold_tau": 0.1}, "no tree that could fold"),
    ],
)
def test_settings_that_it_cannot_have_are_refused(
    settings: dict[str, Any], message: str, make_model: Callable[..., Any]
) -> None:
    _, folder = make_model("nemotron", 0.3, block_length=LENGTH)
    engine = load_engine(folder, num_slots=2, max_length=64, self_test=False)
    cell = causal_cell(**({"method": "linear_spec", "budget": 3} | settings))
    with pytest.raises(ValueError, match=message):
        LinearSpecDecoder(engine, decode_settings(cell, engine, profiled=False))


@pytest.mark.parametrize(("before", "after"), [(13, 13), (13, 18), (40, 71)])
def test_a_copied_prefix_holds_the_positions_where_a_block_may_start(
    before: int, after: int, make_model: Callable[[str], tuple[ModelConfig, Path]]
) -> None:
    """A block of the copy is computed as the same block of a slot whose prompt ended there."""
    _, folder = make_model("nemotron")
    engine = load_engine(folder, num_slots=3, max_length=160, block_length=LENGTH, self_test=False)
    tokens = torch.randint(0, 250, (after + 2 * LENGTH,), generator=torch.Generator().manual_seed(1)).int()

    def store(slot: int, last: int) -> None:
        lead = -last % LENGTH
        blocks = torch.cat((torch.full((lead,), -1, dtype=torch.int32), tokens[:last])).view(-1, LENGTH)
        starts = torch.arange(-lead, last, LENGTH, dtype=torch.int32)
        engine.forward(
            blocks, torch.full_like(starts, slot), starts, torch.ones(len(starts), dtype=torch.bool)
        )

    store(0, after)
    store(1, before)
    for start in range(before, after, LENGTH):  # on, as verify passes do
        block = tokens[start : start + LENGTH][None]
        engine.forward(block, torch.tensor([1]), torch.tensor([start]), torch.tensor([True]))
    engine.copy_prefix(1, 2, first_start=before, block_start=after)
    block = torch.full((1, LENGTH), -1, dtype=torch.int32)
    block[0, 0] = tokens[after]
    direct, copied = (
        engine.forward(block, torch.tensor([slot]), torch.tensor([after]), torch.tensor([False]))
        for slot in (0, 2)
    )
    torch.testing.assert_close(copied, direct, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="positions of slot 0, which holds"):
        engine.copy_prefix(0, 2, first_start=after, block_start=after + 1)
