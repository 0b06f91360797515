"""The fused commit pass: one forward fewer for every block but the last, and nothing else changes."""

from __future__ import annotations

import pytest

from dlmgrid.workers.decoding.commit_rules import CommitRule, factor, static
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.drafting import confidence_tree, none, ssd
from dlmgrid.workers.engine.engine import load_engine
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.testing.tiny_target import TinyTarget

BUILDERS = {"none": none.build, "ssd": ssd.build, "confidence_tree": confidence_tree.build}
LENGTHS = (1, 7, 8, 13)  # of the prompts, with blocks of 8


def make_settings(
    rule: CommitRule, *, fused: bool, method: str, block_length: int = 8, **values: int
) -> DecodeSettings:
    return DecodeSettings(
        block_length=block_length,
        gen_length=values.get("gen_length", 20),
        budget=0 if method == "none" else 6,
        temperature=float(values.get("temperature", 0)),
        rule=rule,
        noise=NoiseTable(7),
        stop_token_ids=(values["stop"],) if "stop" in values else (),
        fused_commit=fused,
    )


def decode(
    rule: CommitRule, *, fused: bool, method: str, max_in_flight: int = 3, **values: int
) -> list[Generation]:
    target = TinyTarget(block_length=8, vocab_size=40, num_slots=3)
    prompts = [
        Prompt(item_id=f"item-{index}", repeat=0, token_ids=tuple(1 + i % 5 for i in range(length)))
        for index, length in enumerate(LENGTHS)
    ]
    settings = make_settings(rule, fused=fused, method=method, **values)
    return Decoder(target, BUILDERS[method](), settings).decode(prompts, max_in_flight)


def saves_all_commits_but_one(fused: Generation, plain: Generation) -> bool:
    """Holds the two runs of one prompt together; True where a forward was saved."""
    assert fused.steps == plain.steps
    assert fused.digests == plain.digests
    assert fused.token_ids == plain.token_ids
    assert fused.stop_reason == plain.stop_reason
    assert (fused.accepted, fused.drafted_nodes) == (plain.accepted, plain.drafted_nodes)
    assert fused.rows_computed == plain.rows_computed
    assert (fused.nfe_prefill, fused.nfe_denoise) == (plain.nfe_prefill, plain.nfe_denoise)
    assert fused.nfe_commit == 1
    return plain.nfe_commit > 1


@pytest.mark.parametrize("method", BUILDERS)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("rule", [static(1), factor(1.0)], ids=["static", "factor"])
def test_fused_passes_save_one_forward_for_every_block_but_the_last(
    method: str, temperature: int, rule: CommitRule
) -> None:
    plain = decode(rule, fused=False, method=method, temperature=temperature)
    for max_in_flight in (1, 3):
        fused = decode(rule, fused=True, method=method, temperature=temperature, max_in_flight=max_in_flight)
        saved = [saves_all_commits_but_one(*pair) for pair in zip(fused, plain, strict=True)]
        assert all(saved)


def test_a_single_block_has_nothing_to_fuse() -> None:
    plain = decode(static(1), fused=False, method="ssd", gen_length=1)
    fused = decode(static(1), fused=True, method="ssd", gen_length=1)
    saved = [saves_all_commits_but_one(*pair) for pair in zip(fused, plain, strict=True)]
    assert saved == [False] * len(LENGTHS)


def test_no_block_is_begun_after_one_that_holds_a_stop_id() -> None:
    free = decode(static(1), fused=False, method="none", gen_length=40)
    stop = free[0].token_ids[10]
    plain = decode(static(1), fused=False, method="none", gen_length=40, stop=stop)
    fused = decode(static(1), fused=True, method="none", gen_length=40, stop=stop)
    for pair in zip(fused, plain, strict=True):
        saves_all_commits_but_one(*pair)
    assert fused[0].stop_reason == "eos"
    assert len(fused[0].steps) < len(free[0].steps)


def test_a_real_model_gives_the_same_bits_from_a_block_stored_within_the_pass() -> None:
    engine = load_engine(resolve_checkpoint("reference"), num_slots=3, max_length=128, self_test=False)
    prompts = [
        Prompt(item_id=f"item-{index}", repeat=0, token_ids=tuple(range(20, 20 + length)))
        for index, length in enumerate((5, 40))
    ]
    runs = []
    for fused in (False, True):
        settings = make_settings(
            factor(1.0),
            fused=fused,
            method="ssd",
            block_length=engine.block_length,
            gen_length=40,
            temperature=1,
        )
        runs.append(Decoder(engine, ssd.build(), settings).decode(prompts, 2))
    for plain, fused_run in zip(*runs, strict=True):
        assert saves_all_commits_but_one(fused_run, plain)
