"""Tables of ``make bench`` on decoding: tokens/s by method, time of a round by part, samples in flight, and the share
of drafting in a round.

A speed of a drafting method or of a batch stands beside whether its output is the serialized run's: same tokens, same
path, same bits, as counts of items.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dlmgrid.jobs.bench_drafting import summary_and_noise_ms
from dlmgrid.jobs.bench_passes import Row, fill_prefix, synchronize, time_pass
from dlmgrid.kernels.benchmark import Ceilings
from dlmgrid.workers.decoding.commit_rules import static
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.drafting.catalog import METHODS
from dlmgrid.workers.drafting.drafter import Drafter
from dlmgrid.workers.drafting.order_checkpoint import REFERENCE, find_order_checkpoint
from dlmgrid.workers.engine.engine import Engine
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.folding.fold import FoldSettings
from dlmgrid.workers.models.config import ModelConfig

DECODED = ("ssd", "confidence_tree", "spiffy", "spot", "spot_gamma")
END_TO_END_GOAL = 0.9
"""Least share of NFE ratio x pass(0) / pass(D) that tokens/s over draft-free should reach."""

SATURATION_GOAL, WIDTH_GOAL = 0.6, 8.0
"""Least share of the compute-bound rate at saturation, and least tokens/s over batch 1."""

DRAFTING_GOAL = 0.05
"""Most of an SDAR-8B round that drafting, summary and noise should take."""


def parse_drafters(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Builder arguments by method from ``METHOD=FILE`` or ``METHOD=FILE,gamma=VALUE``; InputError for another form."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        method, _, rest = text.partition("=")
        file, *others = rest.split(",")
        info = METHODS.get(method)
        if info is None or method not in DECODED or not info.file_key or not file:
            raise InputError(f"--drafters: {text!r} is not METHOD=FILE of a method with a file that is timed")
        given: dict[str, Any] = {}
        for name, _, value in (other.partition("=") for other in others):
            if name not in info.parameters or name == info.file_key:
                raise InputError(f"--drafters: {method} has no parameter {name!r}")
            try:
                given[name] = float(value)
            except ValueError:
                raise InputError(f"--drafters: {name} of {method} is {value!r}, want a number") from None
        path = find_order_checkpoint(file) if info.reads == "order_model" else Path(file)
        found[method] = {info.file_key: path, **given}
    return found


def build_drafter(method: str, given: Mapping[str, Mapping[str, Any]]) -> Drafter | None:
    """The drafter of a method; None where it needs settings that were not given.

    Raises InputError for a file that holds something else, and for a setting out of its bounds.
    """
    info = METHODS[method]
    if set(info.parameters) - set(given.get(method, {})):
        return None
    module, function = info.implementation.split(":")
    try:
        drafter: Drafter = getattr(importlib.import_module(module), function)(**given.get(method, {}))
    except ValueError as error:
        raise InputError(f"--drafters: {method}: {error}") from error
    return drafter


def not_run(method: str) -> Row:
    """The row of a method whose settings were not given."""
    needs = ", ".join(METHODS[method].needs)
    return {"method": method, "not_run": f"needs {needs}; give --drafters {method}=FILE"}


def decode_rows(
    engine: Engine, budgets: Sequence[int], prompts: Sequence[Prompt], gen_length: int,
    given: Mapping[str, Mapping[str, Any]], repeats: int = 10, drafts: str = "host",
) -> Iterator[Row]:  # fmt: skip
    """Tokens/s of each method at batch 1 over draft-free; a method without its file is a row that says so.

    ``drafts`` is where trees were asked to grow, ``growth`` where they do."""
    serialized, base = timed_decode(engine, "none", 0, prompts, gen_length, 1)
    pass_ms = pass_times(engine, [0, *budgets], gen_length, repeats)
    yield decode_row("none", 0, 1, serialized, serialized, base, base) | {
        "host_ms_a_round": round_parts(engine, "none", 0, prompts[:1], gen_length, given)
    }
    for method in DECODED:
        if build_drafter(method, given) is None:
            yield not_run(method)
            continue
        for budget in budgets:
            found, seconds = timed_decode(
                engine, method, budget, prompts, gen_length, 1, given=given, drafts=drafts
            )
            row = decode_row(method, budget, 1, found, serialized, seconds, base)
            expected = row["forward_ratio"] * pass_ms[0] / pass_ms[budget]
            yield row | {
                "pass_ms": pass_ms[budget], "pass_ms_draft_free": pass_ms[0],
                "goal": END_TO_END_GOAL * expected,
                "of_goal": row["over_draft_free"] / (END_TO_END_GOAL * expected),
                "growth": make_decoder(engine, method, budget, gen_length, given=given, drafts=drafts).growth,
                "host_ms_a_round": round_parts(
                    engine, method, budget, prompts[:1], gen_length, given, drafts=drafts
                ),
            }  # fmt: skip


def pass_times(engine: Engine, budgets: Sequence[int], gen_length: int, repeats: int) -> dict[int, float]:
    """Device milliseconds of a pass by D, with the rows that the decoder reads ahead, behind half a generation."""
    prefix = min(64 + gen_length // 2, engine.max_length - 64) // engine.block_length * engine.block_length
    fill_prefix(engine, prefix)
    return {
        budget: time_pass(engine, budget, prefix, "ahead", repeats)["device_ms"] for budget in set(budgets)
    }


def round_parts(
    engine: Engine, method: str, budget: int, prompts: Sequence[Prompt], gen_length: int,
    given: Mapping[str, Mapping[str, Any]], warm_ups: int = 0, width: int = 1, temperature: float = 0.0,
    drafts: str = "host",
) -> dict[str, float]:  # fmt: skip
    """Milliseconds of a round of ``width`` prompts by part, of a run whose parts are timed apart: ``draft`` all of
    drafting with its copies and waits, ``pass`` the layers, ``walk`` the head, the logits pass and the walk over what
    they say, ``other`` the host's rest."""
    found, _ = timed_decode(
        engine, method, budget, prompts, gen_length, width, True, given, warm_ups, temperature, drafts
    )
    rounds = sum(one.nfe_denoise for one in found) / width
    names = {"draft": "draft", "pass": "verify", "walk": "sample", "other": "other"}
    return {
        part: 1e3 * sum(getattr(one.seconds, name) for one in found) / rounds for part, name in names.items()
    }


def batch_rows(
    engine: Engine, widths: Sequence[int], prompts: Sequence[Prompt], gen_length: int, ceilings: Ceilings
) -> Iterator[Row]:
    """Draft-free tokens/s by samples in flight: over one at a time, and over the compute-bound rate.

    The compute-bound rate is what the device would reach if it did nothing but the run's products (layers for every
    row of every forward, head for the rows that predict masks) at the rate of a large product of the same run.
    Each width decodes as many prompts as it has in flight, but at least two; tokens, path and bits are compared with
    those of one at a time on the first eight.
    """
    most = max(2, *widths)
    serialized, base = timed_decode(engine, "none", 0, prompts[: min(most, 8)], gen_length, 1)
    base_rate = num_tokens(serialized) / base
    for width in widths:
        some = prompts[: max(2, width)]
        found, seconds = timed_decode(engine, "none", 0, some, gen_length, width)
        pairs = list(zip(found, serialized, strict=False))
        rate = num_tokens(found) / seconds
        bound = num_tokens(found) / (run_flops(engine.config, found) / ceilings.flops_per_second)
        yield {
            "in_flight": width, "tokens_per_second": rate, "over_batch_1": rate / base_rate,
            "compute_bound_rate": bound, "of_compute_bound": rate / bound,
            "of_saturation_goal": rate / bound / SATURATION_GOAL, "of_width_goal": rate / base_rate / WIDTH_GOAL,
            **same_output(pairs),
        }  # fmt: skip


def run_flops(config: ModelConfig, found: Sequence[Generation]) -> float:
    """FLOPs of the products of a run: layers on all rows that were computed, head on rows that predict masks."""
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = hidden * (heads + 2 * kv_heads) * width + heads * width * hidden + 3 * hidden * inner
    rows = sum(one.rows_computed for one in found)
    length = config.block_length
    head_rows = sum(one.nfe_denoise for one in found) * (length + 1) / 2
    return 2.0 * (rows * config.num_hidden_layers * layer + head_rows * hidden * config.vocab_size)


def drafting_row(
    shape: str,
    engine: Engine,
    budget: int,
    prompts: Sequence[Prompt],
    gen_length: int,
    temperature: float = 1.0,
    drafts: str = "host",
) -> Row:
    """The share of drafting, summary and noise in a round of all ``prompts`` at once, with the order model that ships.

    ``draft`` of ``round_ms`` is all of drafting: inputs, order model, growth, copies, and noise of the predictions.
    Summary and noise of the target are the logits pass on the rows read ahead. ``drafts`` is where trees were asked to
    grow, ``growth`` where they do.
    """
    given = {"spot": {"checkpoint": find_order_checkpoint(REFERENCE)}}
    width = len(prompts)
    parts = round_parts(engine, "spot", budget, prompts, gen_length, given, 2, width, temperature, drafts)
    rows = width * (1 + budget) * engine.block_length // 2
    logits_ms = summary_and_noise_ms(
        engine.device, engine.operators.logits_pass, rows, engine.vocab_padded, temperature
    )
    share = (parts["draft"] + logits_ms) / sum(parts.values())
    row: Row = {
        "shape": shape, "method": "spot", "budget": budget, "in_flight": width, "temperature": temperature,
        "drafts": drafts, "growth": make_decoder(engine, "spot", budget, gen_length, given=given, drafts=drafts).growth,
        "round_ms": parts,
        "summary_and_noise_ms": logits_ms, "share": share,
    }  # fmt: skip
    has_goal = shape == "SDAR-8B" and width == 1
    return row | ({"goal": DRAFTING_GOAL, "of_goal": share / DRAFTING_GOAL} if has_goal else {})


def timed_decode(
    engine: Engine, method: str, budget: int, prompts: Sequence[Prompt], gen_length: int, width: int,
    profiled: bool = False, given: Mapping[str, Mapping[str, Any]] | None = None, warm_ups: int = 2,
    temperature: float = 0.0, drafts: str = "host", fold: FoldSettings | None = None,
) -> tuple[list[Generation], float]:  # fmt: skip
    """Decode after ``warm_ups`` runs; wall seconds of the last one.

    A shape's first pass compiles and its second is captured, so an engine that has not decoded these prompts needs two.
    """
    decoder = make_decoder(engine, method, budget, gen_length, profiled, given, temperature, drafts, fold)
    for _ in range(warm_ups):
        decoder.decode(prompts, width)
    synchronize(engine.device)
    begun = time.perf_counter()
    found = decoder.decode(prompts, width)
    synchronize(engine.device)
    return found, time.perf_counter() - begun


def make_decoder(
    engine: Engine, method: str, budget: int, gen_length: int, profiled: bool = False,
    given: Mapping[str, Mapping[str, Any]] | None = None, temperature: float = 0.0, drafts: str = "host",
    fold: FoldSettings | None = None,
) -> Decoder:  # fmt: skip
    """A decoder of one commit a step that stops at nothing."""
    settings = DecodeSettings(
        block_length=engine.block_length, gen_length=gen_length, budget=budget, temperature=temperature,
        rule=static(1), noise=NoiseTable(0), stop_token_ids=(), profiled=profiled, drafts=drafts,
        fold=fold,
    )  # fmt: skip
    drafter = build_drafter(method, given or {})
    assert drafter is not None, f"{method} was asked for without its file"
    return Decoder(engine, drafter, settings, logits_pass=engine.logits_pass)


def decode_row(
    method: str, budget: int, width: int, found: list[Generation], serialized: list[Generation], seconds: float,
    base: float,
) -> Row:  # fmt: skip
    """Speed and forwards of a run over those of the serialized one, and how many items are the same."""
    forwards = [sum(g.nfe_prefill + g.nfe_denoise + g.nfe_commit for g in run) for run in (found, serialized)]
    return {
        "method": method, "budget": budget, "in_flight": width, "tokens_per_second": num_tokens(found) / seconds,
        "over_draft_free": base / seconds, "forwards": forwards[0], "forward_ratio": forwards[1] / forwards[0],
        **same_output(list(zip(found, serialized, strict=True))),
    }  # fmt: skip


def same_output(pairs: Sequence[tuple[Generation, Generation]]) -> dict[str, int]:
    """Of how many items tokens, path and bits are the same."""
    return {
        "same_tokens": sum(a.token_ids == b.token_ids for a, b in pairs),
        "same_path": sum(a.steps == b.steps for a, b in pairs),
        "same_bits": sum(a.digests == b.digests for a, b in pairs),
        "items": len(pairs),
    }


def num_tokens(found: Sequence[Generation]) -> int:
    """Tokens of all outputs."""
    return sum(len(one.token_ids) for one in found)


def random_prompts(config: ModelConfig, count: int, length: int) -> list[Prompt]:
    """Prompts of random tokens, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, config.vocab_size - 1, (count, length), generator=generator).tolist()
    return [Prompt(item_id=str(i), repeat=0, token_ids=tuple(tokens)) for i, tokens in enumerate(drawn)]
