"""A cell of the grid: every setting that can change a token or its cost, and the keys made from them.

A *key* is cell × item × repeat; it is stored exactly once. A cell's ``cell_key`` is a hash of its canonical
form, so the order of a grid file never matters and any changed setting gives another key.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

SCHEMA_OF_KEYS = 1
# The method, and the claim, of texts that were made elsewhere.
IMPORTED = "imported"

CANVAS_CACHES = ("none", "prefix", "dual")
"""Kinds of cache of bidirectional models."""

APPROXIMATE_CACHES = ("sub_block", "prefix", "dual")
"""Caches that hold keys and values of earlier states; their rows are exact against each other only."""

SHIFTED_CANVAS_FAMILIES = ("dream",)
"""Bidirectional families whose row i predicts position i + 1."""

SCHEDULES = ("llada", "dream")
"""Decoders with ``steps``."""

MAY_OPEN_NOTHING = ("dream",)
"""Decoders of which a step may leave the state as it is."""

DEFAULT_COMPARISON = "sdar"
"""What a ``threshold`` decoder compares with where nothing is said: c > τ."""

DEFAULT_CONFIDENCE = "tempered"
"""What a commit rule compares where nothing is said: the probability of the chosen token under softmax(logits / T)."""

CERTAINTY = "certainty"
"""What the ``entropy_bounded`` decoder compares, which no other one does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One combination of settings. All fields are plain values; lengths in tokens.

    ``model`` is the name or path given in the grid, ``weight_fingerprint`` what identifies its weights,
    ``chat_template`` the name of a shipped template ("": the checkpoint's own).
    ``budget`` is the number of drafted nodes D a round (root not counted). ``threshold`` and ``comparison`` belong to
    the ``threshold`` decoder (``threshold`` is the bound in nats of ``entropy_bounded``), ``factor`` to ``factor``,
    ``steps`` (of a whole generation) to ``llada`` and ``dream``, ``confidence`` (what is compared) and
    ``sub_block_length`` (sub-blocks filled in order, 0 for none) to all, ``gamma`` to SPOT-γ, ``product_tau`` to
    SPOT-Sets, ``fold_tau`` to SpecFold (with ``fold_tau_by_layer``, comma-separated, where it differs by layer and
    ``fold_tau`` is the largest; what the gate compares with; whether walked nodes are computed again unfolded, and that
    in the next round's pass); each is None where it does not apply.
    ``alg_temp``, ``top_p``, ``top_k`` and ``eos_policy`` are settings of the draw (workers/decoding/sampling), None
    where not set. ``fused_commit`` joins a block's commit pass with the next block's first pass: fewer forwards, the
    same tokens. ``window`` lets drafts leave their block: ``cross_block``, ``refresh``, ``full`` for both, "" for
    neither. ``drafter_fingerprint`` identifies a learned or calibrated part ("" if none). ``family`` is the
    model's ("" in texts made elsewhere). ``cache`` is ``block`` for block-causal models; bidirectional ones have
    ``none``, ``prefix`` or ``dual``.
    """

    model: str
    family: str = ""
    revision: str = ""
    weight_fingerprint: str = ""
    benchmark: str
    prompt_version: str
    chat_template: str = ""
    num_fewshot: int = 0
    method: str
    drafter_fingerprint: str = ""
    budget: int
    temperature: float
    verification: str = "coupled"
    noise: str = "commit_count"
    seed: int = 0
    decoder: str = "static"
    commits_per_step: int = 1
    threshold: float | None = None
    comparison: str | None = None
    factor: float | None = None
    steps: int | None = None
    confidence: str = DEFAULT_CONFIDENCE
    alg_temp: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    eos_policy: str | None = None
    sub_block_length: int = 0
    fused_commit: bool = False
    window: str = ""
    gamma: float | None = None
    fold_tau: float | None = None
    fold_tau_by_layer: str = ""
    fold_gate: str = "parent"
    fold_recheck: bool = False
    fold_pipelined: bool = False
    product_tau: float | None = None
    cache: str = "block"
    block_length: int
    gen_length: int
    stop: str = "eos"
    numerics: str = "exact"
    kernels: str = "torch"
    dtype: str = "float32"
    max_in_flight: int = 8

    def __post_init__(self) -> None:
        """Equal cells have equal keys: 1 and 1.0, or -0.0 and 0.0, are one setting but not one text."""
        for name in _REAL_FIELDS:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, float(value) + 0.0)

    def canonical(self) -> Cell:
        """The cell that stands for this one: ``none`` and any drafter at D = 0 are the same run; at T = 0 the
        three verification modes accept the same states and no noise is read, whatever its keying; a threshold
        without a comparison has the default one; at T in {0, 1} the plain and the tempered confidence are one, and
        without filters that of maskgit_plus is; a schedule without steps has one a token."""
        cell = self
        if cell.method == IMPORTED:
            return cell
        if cell.method == "none" or cell.budget == 0:
            cell = replace(
                cell,
                method="none",
                budget=0,
                drafter_fingerprint="",
                gamma=None,
                verification="coupled",
                fold_tau=None,
                fold_tau_by_layer="",
                fold_gate="parent",
                fold_recheck=False,
                fold_pipelined=False,
                product_tau=None,
                window="",
            )
        if cell.decoder == "threshold" and cell.comparison is None:
            cell = replace(cell, comparison=DEFAULT_COMPARISON)
        if cell.temperature == 0:
            cell = replace(cell, verification="coupled", noise="commit_count", temperature=0.0)
        if cell.confidence == "plain" and cell.temperature in (0, 1):
            cell = replace(cell, confidence=DEFAULT_CONFIDENCE)
        if cell.confidence == "maskgit_plus" and cell.top_p is None and cell.top_k is None:
            cell = replace(cell, confidence=DEFAULT_CONFIDENCE)
        if cell.decoder in SCHEDULES and cell.steps is None:
            cell = replace(cell, steps=cell.gen_length)
        if cell.eos_policy == "none" or cell.alg_temp == 0:
            no_policy = None if cell.eos_policy == "none" else cell.eos_policy
            cell = replace(cell, eos_policy=no_policy, alg_temp=cell.alg_temp or None)
        return cell

    def reference(self) -> Cell:
        """The draft-free cell whose rows this cell's rows are compared with; its passes are never fused."""
        return replace(self, method="none", budget=0, fused_commit=False, window="").canonical()

    @property
    def is_reference(self) -> bool:
        """Whether this is a draft-free cell. Imported texts are not: nothing is known of their decoding."""
        return self.canonical() == self.reference()

    @property
    def claim(self) -> str:
        """What a row of this cell promises: ``exact`` or ``approximate``; ``imported`` where the text was made
        elsewhere. Uncoupled rows are exact too: only the drafter's noise differs, the target draws its own."""
        cell = self.canonical()
        if cell.method == IMPORTED:
            return IMPORTED
        if cell.cache in APPROXIMATE_CACHES or not cell.keeps_to_reference:
            return "approximate"
        return "exact"

    @property
    def keeps_to_reference(self) -> bool:
        """Whether a row must equal its serialized run, which has the same cache, on all three levels.

        An approximate cache changes what the model computes, not whether drafting is lossless.
        """
        cell = self.canonical()
        if cell.method == IMPORTED or cell.numerics == "fast" or cell.verification == "greedy_match":
            return False
        keeps_rows = cell.fold_tau in (None, 0.0) or cell.fold_recheck
        return cell.product_tau is None and keeps_rows

    @property
    def opens_first_position(self) -> bool:
        """Whether the first step of a block commits its first position alone: a shifted model with a cache."""
        return self.family in SHIFTED_CANVAS_FAMILIES and self.cache in APPROXIMATE_CACHES

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        """Rebuild a cell written by :meth:`to_dict`. Raises TypeError for an unknown or missing field."""
        return cls(**values)

    @property
    def cell_key(self) -> str:
        """24 hexadecimal digits that identify the canonical form."""
        return _cell_key(self)


_REAL_FIELDS = ("temperature", "threshold", "factor", "gamma", "fold_tau", "product_tau")


@lru_cache(maxsize=16384)
def _cell_key(cell: Cell) -> str:
    return digest({"keys": SCHEMA_OF_KEYS, **cell.canonical().to_dict()})


def digest(values: Any) -> str:
    """24 hexadecimal digits of the SHA-256 of the canonical JSON of ``values``."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def reference_key(cell: Cell, repeat: int, runtime_fingerprint: str) -> str:
    """Identifies the serialized run that a row is compared with: every setting but drafter, budget, verification
    and fused passes, with the repeat and the fingerprint of device, kernels, torch and triton."""
    return digest({"cell": cell.reference().cell_key, "repeat": repeat, "runtime": runtime_fingerprint})


CELL_FIELDS = tuple(field.name for field in fields(Cell))
