"""Settings of a decode, checked."""

from __future__ import annotations

from dataclasses import dataclass

from dlmgrid.workers.decoding.commit_rules import CommitRule
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.window import WINDOWS

STOP_POLICIES = ("eos", "none")
VERIFICATIONS = {"coupled": Stream.TOKEN, "uncoupled": Stream.DRAFT}
"""The verification modes that keep to the serialized path, and the noise that the drafter's predictions read."""

GREEDY_MATCH = "greedy_match"
"""The mode that leaves the serialized path at T > 0: live only; its predictions read no noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSettings:
    """Settings of a decode. ``stop_token_ids`` are ignored under the stop policy ``none``.

    ``fused_commit``: the commit pass of a block and the first denoising pass of the next one are one pass.
    ``window``: how drafts leave their block, see ``window.py``. ``product_tau``: the floor of product max-commit.
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
    window: str = ""
    product_tau: float | None = None
    records_window: bool = False
    profiled: bool = False

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
