"""Settings of a decode, checked."""

from __future__ import annotations

from dataclasses import dataclass

from dlmgrid.workers.decoding.commit_rules import CommitRule
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.window import WINDOWS
from dlmgrid.workers.folding.fold import FoldSettings
from dlmgrid.workers.models.family import BlockGrid, Seed, StopRule
from dlmgrid.workers.units import DRAFT_PLACES

STOP_POLICIES = ("eos", "full", "none")
"""``eos``: a sample ends after the block that holds a stop id; ``full``: the canvas is filled and then cut at the first
stop id, as LLaDA and Dream are published; ``none``: stop ids are tokens like others."""

VERIFICATIONS = {"coupled": Stream.TOKEN, "uncoupled": Stream.DRAFT}
"""The verification modes that keep to the serialized path, and the noise that the drafter's predictions read."""

GREEDY_MATCH = "greedy_match"
"""The mode that leaves the serialized path at T > 0: live only; its predictions read no noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSettings:
    """Settings of a decode. ``stop_token_ids`` are ignored under the stop policy ``none``; ``end_token_ids``, the end
    of a text first, are what the rule's policy on end tokens is about.

    ``fused_commit``: the commit pass of a block and the first denoising pass of the next one are one pass.
    ``shifted``: row i - 1 of a block predicts its position i; position 0 then takes its own row. ``causal``: every
    pass sees its block causally. ``grid``, ``seed``, ``stop_rule``: as the model's family declares them.
    ``window``: how drafts leave their block, see ``window.py``. ``product_tau``: the floor of product max-commit.
    ``fold``: drafted nodes fold onto their tree parents (SpecFold).
    ``drafts``: where a drafter's trees grow, if states are not on the target's device: on the ``host`` with them, or on
    the ``device``, where the drafter can do that under the rule.
    ``records_window``: a draft-free decode shows its recorder the next block beside every state; the rows for it are
    not counted.
    """

    block_length: int
    gen_length: int
    budget: int
    temperature: float
    rule: CommitRule
    noise: NoiseTable
    stop_token_ids: tuple[int, ...]
    verification: str = "coupled"
    stop: str = "eos"
    fused_commit: bool = False
    end_token_ids: tuple[int, ...] = ()
    shifted: bool = False
    causal: bool = False
    grid: BlockGrid = "absolute"
    seed: Seed = "none"
    stop_rule: StopRule = "block"
    window: str = ""
    product_tau: float | None = None
    fold: FoldSettings | None = None
    records_window: bool = False
    profiled: bool = False
    drafts: str = "host"

    def __post_init__(self) -> None:
        modes = (*VERIFICATIONS, GREEDY_MATCH)
        if self.verification not in modes:
            raise ValueError(f"verification {self.verification!r} is not one of {', '.join(modes)}")
        if self.stop not in STOP_POLICIES:
            raise ValueError(f"stop {self.stop!r} is not one of {', '.join(STOP_POLICIES)}")
        if self.window not in WINDOWS:
            raise ValueError(f"window {self.window!r} is not one of {', '.join(WINDOWS[1:])}")
        if self.budget < 0 or self.gen_length < 1 or self.temperature < 0:
            raise ValueError("budget and temperature must not be negative, gen_length must be positive")
        if self.drafts not in DRAFT_PLACES:
            raise ValueError(f"drafts {self.drafts!r} is not one of {', '.join(DRAFT_PLACES)}")
        looks_ahead = self.window != "" or self.records_window
        if looks_ahead and (self.seed != "none" or self.stop_rule != "block" or self.causal or self.shifted):
            raise ValueError(
                "window: the next block depends on more than the finished one, nothing drafts it"
            )
        if self.fused_commit and self.seed != "none":
            raise ValueError(
                "fused_commit: the commit pass gives the next block's first token, nothing joins the two"
            )

        if self.fold is not None and (self.window or self.product_tau is not None):
            name = f"window {self.window!r}" if self.window else "product_tau"
            raise ValueError(f"fold: folded passes are not defined with {name}; use one of the two")

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids that end a sample under the stop policy."""
        return self.stop_token_ids if self.stop == "eos" else ()

    @property
    def cuts(self) -> tuple[int, ...]:
        """The ids of which the first cuts the output."""
        return () if self.stop == "none" else self.stop_token_ids
