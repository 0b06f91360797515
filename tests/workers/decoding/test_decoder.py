"""The decode loop on a target small enough to follow by hand."""

import itertools

import pytest

from dlmgrid.workers.decoding.commit_rules import CommitRule, static, threshold
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt, canvas_length
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.drafting import confidence_tree, none, ssd
from dlmgrid.workers.testing.tiny_target import TinyTarget

BUILDERS = {"ssd": ssd.build, "confidence_tree": confidence_tree.build}
RULES = {
    "static-1": static(1),
    "static-3": static(3),
    "threshold-0.5": threshold(0.5),
    "threshold-0.9": threshold(0.9),
}


def prompts(*lengths: int) -> list[Prompt]:
    return [
        Prompt(item_id=f"item-{index}", repeat=0, token_ids=tuple(1 + i % 5 for i in range(length)))
        for index, length in enumerate(lengths)
    ]


def decode(
    method: str,
    budget: int,
    temperature: float,
    rule: CommitRule,
    *,
    block_length: int = 8,
    gen_length: int = 20,
    lengths: tuple[int, ...] = (1, 7, 8, 13, 21),
    max_in_flight: int = 3,
    verification: str = "coupled",
    stop_token_ids: tuple[int, ...] = (),
    seed: int = 7,
    noise: str = "commit_count",
) -> list[Generation]:
    target = TinyTarget(block_length=block_length, vocab_size=40, num_slots=3)
    drafter = none.build() if method == "none" else BUILDERS[method]()
    settings = DecodeSettings(
        block_length=block_length,
        gen_length=gen_length,
        budget=budget,
        temperature=temperature,
        rule=rule,
        noise=NoiseTable(seed, noise),
        stop_token_ids=stop_token_ids,
        verification=verification,
    )
    return Decoder(target, drafter, settings).decode(prompts(*lengths), max_in_flight)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5], ids=lambda t: f"T{t}")
@pytest.mark.parametrize("verification", ["coupled", "uncoupled"])
def test_every_drafter_walks_the_path_of_the_serialized_run(
    rule: CommitRule, temperature: float, verification: str
) -> None:
    serialized = decode("none", 0, temperature, rule, max_in_flight=1)
    for method, budget in itertools.product(BUILDERS, (1, 6, 20)):
        drafted = decode(method, budget, temperature, rule, verification=verification)
        for ours, theirs in zip(drafted, serialized, strict=True):
            assert ours.steps == theirs.steps
            assert ours.digests == theirs.digests
            assert ours.token_ids == theirs.token_ids
            assert ours.nfe_denoise <= theirs.nfe_denoise
            assert sum(ours.accepted) + ours.nfe_denoise == len(ours.steps)


@pytest.mark.parametrize("method", BUILDERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda t: f"T{t}")
def test_drafting_saves_forwards(method: str, temperature: float) -> None:
    serialized = decode("none", 0, temperature, static(1))
    drafted = decode(method, 6, temperature, static(1))
    assert sum(g.nfe_denoise for g in drafted) < 0.85 * sum(g.nfe_denoise for g in serialized)


@pytest.mark.parametrize("method", BUILDERS)
def test_a_budget_of_zero_is_the_serialized_run(method: str) -> None:
    serialized = decode("none", 0, 1.0, static(1))
    drafted = decode(method, 0, 1.0, static(1))
    assert [(g.steps, g.nfe_denoise, g.drafted_nodes) for g in drafted] == [
        (g.steps, g.nfe_denoise, 0) for g in serialized
    ]


def test_forwards_follow_the_blocks() -> None:
    (generation,) = decode("none", 0, 0.0, static(1), lengths=(21,), gen_length=20)
    # 21 prompt tokens: two whole blocks are prefilled, 5 tokens stand in the first of 4 generated blocks.
    assert canvas_length(21, 20, 8) == 48
    assert generation.nfe_prefill == 1
    assert generation.nfe_denoise == 48 - 21
    assert generation.nfe_commit == 4
    assert len(generation.token_ids) == 20
    assert generation.stop_reason == "length"
    (short,) = decode("none", 0, 0.0, static(1), lengths=(3,), gen_length=4)
    assert (short.nfe_prefill, short.nfe_denoise, short.nfe_commit) == (0, 5, 1)


def test_static_k_commits_k_positions_a_step_and_the_rest_last() -> None:
    (generation,) = decode("none", 0, 0.0, static(3), lengths=(8,), gen_length=8)
    assert [len(step) for step in generation.steps] == [3, 3, 2]


def test_a_stop_id_ends_after_its_block_and_cuts_the_output() -> None:
    free = decode("none", 0, 0.0, static(1), lengths=(5,), gen_length=40)[0]
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    for method, budget in (("none", 0), ("ssd", 6), ("confidence_tree", 6)):
        stopped = decode(method, budget, 0.0, static(1), lengths=(5,), gen_length=40, stop_token_ids=(stop,))[
            0
        ]
        assert stopped.stop_reason == "eos"
        assert stopped.token_ids == free.token_ids[: first + 1]
        assert stopped.nfe_commit == (5 + first) // 8 + 1


def test_a_stop_id_in_the_prompt_does_not_stop() -> None:
    (generation,) = decode("none", 0, 0.0, static(1), lengths=(5,), gen_length=8, stop_token_ids=(2,))
    assert 2 in generation.prompt.token_ids
    assert generation.nfe_denoise >= 3


def test_seed_repeat_and_item_change_the_noise_and_order_does_not() -> None:
    base = decode("none", 0, 1.0, static(1))
    assert [g.steps for g in base] == [g.steps for g in decode("none", 0, 1.0, static(1), max_in_flight=1)]
    assert [g.steps for g in base] != [g.steps for g in decode("none", 0, 1.0, static(1), seed=8)]
    twins = decode("none", 0, 1.0, static(1), lengths=(9, 9))
    assert twins[0].steps != twins[1].steps


def test_a_canvas_longer_than_the_buffers_is_refused() -> None:
    with pytest.raises(ValueError, match="need 4112 positions, the buffers hold 4096"):
        decode("none", 0, 0.0, static(1), lengths=(8,), gen_length=4100)


def test_time_shares_add_up_over_samples() -> None:
    generations = decode("ssd", 6, 0.0, static(1))
    assert all(g.seconds.wall > 0 and g.seconds.verify == 0 for g in generations)
    assert all(g.rows_computed % 8 == 0 for g in generations)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")], ids=["nan", "no-token-possible"])
def test_logits_that_are_not_finite_stop_the_decode(value: float) -> None:
    target = TinyTarget(block_length=8, vocab_size=40, num_slots=1)
    target.bias.fill_(value)
    settings = DecodeSettings(
        block_length=8,
        gen_length=8,
        budget=0,
        temperature=0.0,
        rule=static(1),
        noise=NoiseTable(0),
        stop_token_ids=(),
    )
    with pytest.raises(FloatingPointError, match="not finite"):
        Decoder(target, none.build(), settings).decode(prompts(3))
