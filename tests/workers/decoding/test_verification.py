"""Verification modes: what each accepts, what noise each reads, and that none weighs a draft's probability."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dlmgrid.kernels.logits import choose
from dlmgrid.workers.decoding.commit_rules import CommitRule, entropy_bounded, factor, static, threshold
from dlmgrid.workers.decoding.decoder import (
    GREEDY_MATCH,
    VERIFICATIONS,
    Decoder,
    DecodeSettings,
    Generation,
    Prompt,
)
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting import confidence_tree, none, ssd
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs
from dlmgrid.workers.testing.tiny_target import TinyTarget

BUILDERS = {"none": none.build, "ssd": ssd.build, "confidence_tree": confidence_tree.build}
RULES = {
    "static": static(1),
    "static-2": static(2),
    "threshold": threshold(0.5),
    "threshold-dinfer": threshold(0.9, comparison="dinfer"),
    "factor": factor(1.0),
    "entropy_bounded": entropy_bounded(1.0),
}
LENGTH, VOCAB = 8, 40
PROMPTS = [Prompt(item_id=f"item-{index}", repeat=0, token_ids=(1 + index,)) for index in range(6)]


def decode(
    drafter: Drafter,
    rule: CommitRule,
    *,
    verification: str,
    temperature: float = 1.5,
    budget: int = 6,
    noise: NoiseTable | None = None,
) -> list[Generation]:
    target = TinyTarget(block_length=LENGTH, vocab_size=VOCAB, num_slots=len(PROMPTS), sharpness=3.0)
    settings = DecodeSettings(
        block_length=LENGTH,
        gen_length=LENGTH - 1,
        budget=budget,
        temperature=temperature,
        rule=rule,
        noise=noise or NoiseTable(7),
        stop_token_ids=(),
        verification=verification,
    )
    return Decoder(target, drafter, settings).decode(PROMPTS)


def next_states(prompt: Prompt, state: Tensor, rule: CommitRule, temperature: float) -> tuple[Tensor, Tensor]:
    """The argmax and the drawn next state of ``state`` int32 [L], worked out beside the decoder."""
    target = TinyTarget(block_length=LENGTH, vocab_size=VOCAB, sharpness=3.0)
    zero = torch.zeros(1, dtype=torch.int32)
    logits = target.logits(target.forward(state[None], zero, zero, zero.bool())[0])
    positions = torch.arange(LENGTH)
    commits = int((state != MASKED).sum()) - 1
    table = NoiseTable(7)
    keys = torch.tensor([table.key(prompt.item_id, 0)]).expand(LENGTH, 2)
    gumbel = table.rows(keys, Stream.TOKEN, positions, torch.full((LENGTH,), commits), logits.shape[1])
    masked = state == MASKED
    found = []
    for noise in (torch.zeros_like(gumbel), gumbel):
        choice = choose(logits, temperature, noise)
        selected = rule.select(masked[None], torch.where(masked, choice.probabilities, -1.0)[None])[0]
        found.append(torch.where(selected & masked, choice.tokens.to(torch.int32), state))
    return found[0], found[1]


def transitions(generation: Generation) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Every state on the path with its next state, and whether that one had been drafted."""
    state = torch.full((LENGTH,), MASKED, dtype=torch.int32)
    state[0] = generation.prompt.token_ids[0]
    steps = iter(generation.steps)
    for accepted in generation.accepted:
        for index in range(accepted + 1):
            following = state.clone()
            for position, token in next(steps):
                following[position] = token
            yield state, following, index < accepted
            state = following
    assert next(steps, None) is None


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("verification", ["coupled", "uncoupled"])
def test_equality_with_the_drawn_state_keeps_the_serialized_path_under_every_rule(
    verification: str, rule: CommitRule
) -> None:
    for temperature in (0.0, 1.5):
        serialized = decode(none.build(), rule, verification="coupled", temperature=temperature, budget=0)
        for method in ("ssd", "confidence_tree"):
            drafted = decode(BUILDERS[method](), rule, verification=verification, temperature=temperature)
            assert [g.steps for g in drafted] == [g.steps for g in serialized]
            assert [g.digests for g in drafted] == [g.digests for g in serialized]
            assert sum(g.nfe_denoise for g in drafted) <= sum(g.nfe_denoise for g in serialized)
        assert temperature > 0 or any(sum(g.accepted) for g in drafted)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("method", ["ssd", "confidence_tree"])
def test_greedy_match_takes_argmax_states_that_were_drafted_and_draws_elsewhere(
    method: str, rule: CommitRule
) -> None:
    num_accepted, num_forced = 0, 0
    for generation in decode(BUILDERS[method](), rule, verification="greedy_match"):
        for state, following, is_accepted in transitions(generation):
            argmax, drawn = next_states(generation.prompt, state, rule, 1.5)
            assert torch.equal(following, argmax if is_accepted else drawn)
            num_accepted += is_accepted
            num_forced += is_accepted and not torch.equal(argmax, drawn)
    assert num_accepted > 0
    assert num_forced > 0


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_greedy_match_is_the_serialized_run_where_nothing_is_drawn_or_drafted(rule: CommitRule) -> None:
    for temperature, budget in ((0.0, 6), (1.5, 0)):
        serialized = decode(none.build(), rule, verification="coupled", temperature=temperature, budget=0)
        found = decode(ssd.build(), rule, verification="greedy_match", temperature=temperature, budget=budget)
        assert [g.steps for g in found] == [g.steps for g in serialized]
        assert [g.digests for g in found] == [g.digests for g in serialized]


class StreamRecorder(NoiseTable):
    """A noise table that notes which streams the target (whole rows) and the drafter (single entries) read."""

    def __init__(self) -> None:
        super().__init__(7)
        self.target: set[Stream] = set()
        self.drafter: set[Stream] = set()

    def rows(
        self, keys: Tensor, stream: Stream, positions: Tensor, commit_counts: Tensor, vocab: int
    ) -> Tensor:
        self.target.add(stream)
        return super().rows(keys, stream, positions, commit_counts, vocab)

    def entries(
        self, keys: Tensor, stream: Stream, positions: Tensor, commit_counts: Tensor, token_ids: Tensor
    ) -> Tensor:
        self.drafter.add(stream)
        return super().entries(keys, stream, positions, commit_counts, token_ids)


@pytest.mark.parametrize("method", ["ssd", "confidence_tree"])
@pytest.mark.parametrize(
    ("verification", "drafter_reads"),
    [("coupled", {Stream.TOKEN}), ("uncoupled", {Stream.DRAFT}), ("greedy_match", set())],
)
def test_each_mode_reads_its_own_noise_and_no_mode_draws_to_accept(
    method: str, verification: str, drafter_reads: set[Stream]
) -> None:
    noise = StreamRecorder()
    decode(BUILDERS[method](), static(1), verification=verification, noise=noise)
    assert noise.target == {Stream.TOKEN}
    assert noise.drafter == drafter_reads


class Forgetful:
    """A drafter whose states keep no probability."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def draft(self, inputs: DraftInputs, tree: DraftTree) -> None:
        self.drafter.draft(inputs, tree)
        tree.log_mass.fill_(torch.nan)
        tree.parents.fill_(-1)


@pytest.mark.parametrize("verification", [*VERIFICATIONS, GREEDY_MATCH])
@pytest.mark.parametrize("method", ["ssd", "confidence_tree"])
def test_acceptance_is_equality_and_never_a_ratio_of_probabilities(method: str, verification: str) -> None:
    drafted = decode(BUILDERS[method](), static(1), verification=verification)
    blind = decode(Forgetful(BUILDERS[method]()), static(1), verification=verification)
    assert [g.accepted for g in blind] == [g.accepted for g in drafted]
    assert [g.steps for g in blind] == [g.steps for g in drafted]
    assert sum(sum(g.accepted) for g in drafted) > 0


def test_the_modes_are_these_three() -> None:
    assert VERIFICATIONS == {"coupled": Stream.TOKEN, "uncoupled": Stream.DRAFT}
    with pytest.raises(ValueError, match="'ratio' is not one of coupled, uncoupled, greedy_match"):
        decode(none.build(), static(1), verification="ratio")
