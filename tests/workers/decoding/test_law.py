"""The law of drafted decoding: order and tokens against the exact sampler, by chi-square.

20,000 draws a case in the usual tests; ``make law`` takes 200,000 of every method under every decoder. All p-values
are held against 1e-3 divided by the number of tests (Bonferroni); seeds are fixed, so a result does not change.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import pytest
import torch

from dlmgrid.workers.decoding.commit_rules import CommitRule, factor, static, threshold
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.paths import Step
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.drafting import confidence_tree, none, ssd
from dlmgrid.workers.drafting.catalog import METHODS
from dlmgrid.workers.drafting.drafter import Drafter
from dlmgrid.workers.drafting.order_model import OrderModel
from dlmgrid.workers.drafting.set_model import SetModel, SetShape
from dlmgrid.workers.drafting.spiffy import SpiffyDrafter
from dlmgrid.workers.drafting.spiffy_graph import DraftGraph, GraphKey, GraphNode
from dlmgrid.workers.drafting.spot import SpotDrafter
from dlmgrid.workers.drafting.spot_sets import SetDrafter
from dlmgrid.workers.testing.exact_law import (
    Path,
    Rule,
    factor_rule,
    marginal,
    path_law,
    static_rule,
    threshold_rule,
)
from dlmgrid.workers.testing.tiny_target import TinyTarget

stats = pytest.importorskip("scipy.stats", reason="the law tests need scipy")


def small_graph() -> Drafter:
    """A draft graph made by hand: the two likeliest tokens of the two most confident positions, and a pair."""
    key = GraphKey(
        weight_fingerprint="", decoder="static", commits_per_step=1, threshold=None, temperature=1.5,
        noise="commit_count", block_length=4,
    )  # fmt: skip
    nodes = tuple(
        GraphNode(pairs=pairs, parents=parents, count=count)
        for pairs, parents, count in (
            (((0, 0),), (-1,), 9),
            (((1, 0),), (-1,), 5),
            (((0, 1),), (-1,), 3),
            (((0, 0), (1, 0)), (0, 1), 2),
        )
    )
    return SpiffyDrafter(
        DraftGraph(key=key, selection="marginal_gain", budget=4, num_roots=10, calibration={}, nodes=nodes)
    )


def random_order() -> Drafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SpotDrafter(OrderModel())


def random_sets() -> Drafter:
    """A set model with random weights and heads; the rows of the tiny target are its logits of 3 tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SetModel(SetShape(hidden_size=3, vocab_size=36, width=16, num_layers=1, table_width=16))
        for part in (model.table, *model.head.parameters(), *model.pass_head.parameters()):
            torch.nn.init.normal_(part)
    return SetDrafter(model)


BUILDERS: dict[str, Callable[[], Drafter]] = {
    "none": none.build, "ssd": ssd.build, "confidence_tree": confidence_tree.build, "spiffy": small_graph,
    "spot": random_order, "spot_sets": random_sets,
}  # fmt: skip
RULES: dict[str, tuple[CommitRule, Rule]] = {
    "static": (static(1), static_rule(1)),
    "threshold": (threshold(0.45), threshold_rule(0.45)),
    "factor": (factor(1.8), factor_rule(1.8)),
}
DRAFTING_RULES: dict[str, tuple[CommitRule, Rule]] = {
    "static": RULES["static"],
    "threshold": (threshold(0.55), threshold_rule(0.55)),
    "factor": (factor(1.2), factor_rule(1.2)),
}
"""Rules under which the argmax commits one position at first, so that a block of three has a state to draft."""

TEMPERATURE = 1.5
# A chain in a block of three has one state: the first pass drafts nothing, and a complete state is never a node.
BUDGETS = {"none": 0, "ssd": 1, "confidence_tree": 4, "spiffy": 4, "spot": 2, "spot_sets": 4}
PROMPT_TOKEN = 1
POSITIONS = (1, 2, 3)  # of a block of 4 whose first token is the prompt
DRAWS, MANY_DRAWS = 20_000, 200_000
DRAWS_AT_ONCE = 20_000
SOME = (
    ("none", "coupled", "static"),
    ("ssd", "coupled", "static"),
    ("ssd", "uncoupled", "threshold"),
    ("ssd", "coupled", "factor"),
    ("confidence_tree", "uncoupled", "static"),
    ("confidence_tree", "coupled", "threshold"),
    ("confidence_tree", "uncoupled", "factor"),
    ("spiffy", "coupled", "static"),
    ("spot_sets", "coupled", "threshold"),
)
ALL = tuple(
    (method, verification, rule)
    for method in BUILDERS
    for verification in (("coupled",) if method == "none" else ("coupled", "uncoupled"))
    for rule in RULES
    if rule in METHODS[method].decoders
    and (
        method != "spot" or (verification, rule) == ("coupled", "static")
    )  # its model is the same size for any block
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Observed paths and the draft states that were accepted on the way."""

    paths: Counter[Path]
    num_accepted: int


def make_target(num_slots: int = 1) -> TinyTarget:
    return TinyTarget(block_length=4, vocab_size=3, num_slots=num_slots, sharpness=1.2, seed=2, width=36)


def sample(
    target: TinyTarget,
    rule: CommitRule,
    *,
    method: str,
    verification: str,
    num_draws: int,
    temperature: float = TEMPERATURE,
    noise: str = "commit_count",
    seed: int = 11,
    window: str = "",
) -> Sampled:
    """Draw one block after a prompt of one token, many samples in one decode; with a window two, of which the second
    is kept."""
    length = target.bias.shape[0]
    settings = DecodeSettings(
        block_length=length,
        gen_length=2 * length - 1 if window else length - 1,
        window=window,
        budget=4 if window else BUDGETS[method],
        temperature=temperature,
        rule=rule,
        noise=NoiseTable(seed, noise),
        stop_token_ids=(),
        verification=verification,
    )
    decoder = Decoder(target, BUILDERS[method](), settings)
    paths: Counter[Path] = Counter()
    num_accepted = 0
    for first in range(0, num_draws, DRAWS_AT_ONCE):
        prompts = [
            Prompt(item_id=f"{method}-{verification}", repeat=draw, token_ids=(PROMPT_TOKEN,))
            for draw in range(first, min(first + DRAWS_AT_ONCE, num_draws))
        ]
        generations: list[Generation] = decoder.decode(prompts)
        paths.update(
            tuple(_in_block(step, length) for step in g.steps if step[0][0] >= length)
            if window
            else tuple(g.steps)
            for g in generations
        )
        num_accepted += sum(sum(generation.accepted) for generation in generations)
    return Sampled(paths=paths, num_accepted=num_accepted)


def _in_block(step: Step, length: int) -> Step:
    """A step of the second block, its positions counted from the block's start."""
    return tuple((position - length, token) for position, token in step)


@functools.cache
def second_block_law(rule: str) -> dict[Path, float]:
    """Of a block without a prompt; the tiny target sees no earlier block."""
    return path_law(make_target(), (MASKED,) * 4, RULES[rule][1], TEMPERATURE)


@functools.cache
def exact_law(rule: str) -> dict[Path, float]:
    root = (PROMPT_TOKEN, *(MASKED for _ in POSITIONS))
    return path_law(make_target(), root, RULES[rule][1], TEMPERATURE)


def p_value(observed: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> float:
    """Chi-square of counts against a law; outcomes expected fewer than 5 times are joined into one."""
    total = sum(observed.values())
    assert set(observed) <= set(law), "an outcome that the exact sampler never gives"
    rare = [outcome for outcome, probability in law.items() if total * probability < 5]
    counts = [observed.get(outcome, 0) for outcome in law if outcome not in set(rare)]
    expected = [total * law[outcome] for outcome in law if outcome not in set(rare)]
    if rare and sum(total * law[outcome] for outcome in rare) >= 5:
        counts.append(sum(observed.get(outcome, 0) for outcome in rare))
        expected.append(sum(total * law[outcome] for outcome in rare))
    scale = sum(counts) / sum(expected)
    return float(stats.chisquare(counts, [value * scale for value in expected]).pvalue)


def p_values(paths: Mapping[Path, int], law: Mapping[Path, float]) -> dict[str, float]:
    """Of the joint (order, tokens) and of every position's token."""
    found = {"joint": p_value(paths, law)}
    for position in POSITIONS:
        tokens: Counter[int] = Counter()
        for path, count in paths.items():
            tokens[next(token for step in path for at, token in step if at == position)] += count
        found[f"position {position}"] = p_value(tokens, marginal(law, position))
    return found


def level(num_cases: int) -> float:
    """1e-3 over the number of tests."""
    return 1e-3 / (num_cases * (1 + len(POSITIONS)))


def has_the_law(method: str, verification: str, rule: str, num_draws: int, num_cases: int) -> None:
    target = make_target(DRAWS_AT_ONCE)
    drawn = sample(target, RULES[rule][0], method=method, verification=verification, num_draws=num_draws)
    assert sum(drawn.paths.values()) == num_draws
    assert (drawn.num_accepted == 0) == (method == "none")
    found = p_values(drawn.paths, exact_law(rule))
    assert min(found.values()) > level(num_cases), found


@pytest.mark.parametrize("rule", RULES)
def test_the_enumerated_law_is_a_law_with_many_orders(rule: str) -> None:
    law = exact_law(rule)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert min(law.values()) > 0
    assert all(sum(marginal(law, position).values()) == pytest.approx(1) for position in POSITIONS)
    num_steps = {len(path) for path in law}
    assert num_steps == {"static": {3}, "threshold": {1, 2, 3}, "factor": {2, 3}}[rule]


@pytest.mark.parametrize(("method", "verification", "rule"), SOME, ids=["-".join(case) for case in SOME])
def test_drafted_decoding_has_the_law_of_the_exact_sampler(method: str, verification: str, rule: str) -> None:
    has_the_law(method, verification, rule, DRAWS, len(SOME))


@pytest.mark.law
@pytest.mark.parametrize(("method", "verification", "rule"), ALL, ids=["-".join(case) for case in ALL])
def test_every_method_has_the_law_under_every_decoder(method: str, verification: str, rule: str) -> None:
    has_the_law(method, verification, rule, MANY_DRAWS, len(ALL))


def second_block_has_the_law(window: str, rule: str, num_draws: int, num_cases: int) -> None:
    drawn = sample(
        make_target(DRAWS_AT_ONCE), RULES[rule][0], method="ssd", verification="coupled", num_draws=num_draws,
        window=window,
    )  # fmt: skip
    found = p_values(drawn.paths, second_block_law(rule))
    assert min(found.values()) > level(num_cases), found


def test_a_block_that_a_window_entered_has_the_law_of_the_exact_sampler() -> None:
    second_block_has_the_law("full", "threshold", DRAWS, 1)


@pytest.mark.law
@pytest.mark.parametrize("window", ["cross_block", "refresh", "full"])
@pytest.mark.parametrize("rule", RULES)
def test_every_window_has_the_law_under_every_decoder(rule: str, window: str) -> None:
    second_block_has_the_law(window, rule, MANY_DRAWS, 3 * len(RULES))


def is_biased(method: str, rule: str, num_draws: int) -> None:
    target = make_target(DRAWS_AT_ONCE)
    commits, law_of = DRAFTING_RULES[rule]
    drawn = sample(target, commits, method=method, verification="greedy_match", num_draws=num_draws)
    assert drawn.num_accepted > 0
    root = (PROMPT_TOKEN, *(MASKED for _ in POSITIONS))
    found = p_values(drawn.paths, path_law(make_target(), root, law_of, TEMPERATURE))
    assert found["joint"] < level(len(DRAFTING_RULES) * len(BUILDERS)), found


def test_greedy_match_does_not_have_the_law() -> None:
    is_biased("ssd", "static", DRAWS)


@pytest.mark.law
@pytest.mark.parametrize("method", ["ssd", "confidence_tree"])
@pytest.mark.parametrize("rule", DRAFTING_RULES)
def test_greedy_match_has_the_law_under_no_decoder(method: str, rule: str) -> None:
    is_biased(method, rule, MANY_DRAWS)


# Two independent positions, p1 = (0.6, 0.4) and p2 = (0.7, 0.3): the more confident draw is committed first. Where
# position 2 loses, it is drawn again; a table with one row a position would give the losing draw once more.
P1, P2 = (0.6, 0.4), (0.7, 0.3)


def two_positions(num_slots: int = 1) -> TinyTarget:
    bias = torch.tensor([(0.5, 0.5), P1, P2]).log()
    return TinyTarget(
        block_length=3, vocab_size=2, num_slots=num_slots, bias=bias, pair=torch.zeros(3, 3, 2, 2), width=36
    )


def test_the_losing_draw_is_drawn_again() -> None:
    law = path_law(two_positions(), (PROMPT_TOKEN, MASKED, MASKED), static_rule(1), 1.0)
    # (0, 0) and (1, 0) commit position 2 first; otherwise it is drawn a second time.
    assert (
        marginal(law, 2)[0]
        == pytest.approx(0.6 * 0.7 + 0.4 * 0.7 + 0.3 * 0.7, abs=1e-6)
        == pytest.approx(0.91)
    )
    assert marginal(law, 1)[0] == pytest.approx(0.7 * 0.6 + 0.3 * 0.6, abs=1e-6)


@pytest.mark.parametrize(("noise", "expected"), [("commit_count", 0.91), ("per_position", 0.70)])
@pytest.mark.parametrize("num_draws", [DRAWS, pytest.param(MANY_DRAWS, marks=pytest.mark.law)])
def test_noise_keyed_by_position_alone_is_biased_where_the_order_depends_on_the_draw(
    noise: str, expected: float, num_draws: int
) -> None:
    law = path_law(two_positions(), (PROMPT_TOKEN, MASKED, MASKED), static_rule(1), 1.0)
    drawn = sample(
        two_positions(DRAWS_AT_ONCE),
        static(1),
        method="none",
        verification="coupled",
        num_draws=num_draws,
        temperature=1.0,
        noise=noise,
    )
    zeros = sum(
        count for path, count in drawn.paths.items() if (2, 0) in [commit for step in path for commit in step]
    )
    tolerance = 5 * math.sqrt(expected * (1 - expected) / num_draws)
    assert zeros / num_draws == pytest.approx(expected, abs=tolerance)
    assert (p_value(drawn.paths, law) < 1e-3 / 2) == (noise == "per_position")
