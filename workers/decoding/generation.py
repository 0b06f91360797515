"""What goes into a decode and what comes out: prompts, decoded samples, and where a sample in flight stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.models.family import BlockGrid

if TYPE_CHECKING:
    from dlmgrid.workers.decoding.decoder import DecodeSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What to continue: ``token_ids`` of the rendered prompt, with the identity that its noise hangs on."""

    item_id: str
    repeat: int
    token_ids: tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class Seconds:
    """Time of one sample: its share, by rows computed, of the passes it took part in.

    ``wall`` comes from an unprofiled decode. The parts come from a profiled one, whose stages are timed apart.
    ``select``, ``move``, ``compute`` and ``correct`` are what ``verify`` spends on folding (``folding.FoldReport``).
    """

    wall: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    other: float = 0.0
    select: float = 0.0
    move: float = 0.0
    compute: float = 0.0
    correct: float = 0.0


@dataclass(kw_only=True, slots=True)
class Generation:
    """One decoded sample. Steps are counted over the whole generation; positions are absolute.

    ``seeds``: (position, token) of each block's first token that a storing pass gave.
    ``nfe_draft`` counts the target's passes that only draft, ``argmax_commits`` the commits whose token is the most
    probable one where it was committed.
    ``fold_rows``: rows of drafted nodes that could fold; ``fold_recomputed``: how many of them were computed, by layer.
    """

    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    stop_reason: str = ""
    steps: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    margins: list[tuple[float, ...]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seeds: list[tuple[int, int]] = field(default_factory=list)
    nfe_prefill: int = 0
    nfe_denoise: int = 0
    nfe_commit: int = 0
    nfe_draft: int = 0
    argmax_commits: int = 0
    drafted_nodes: int = 0
    rows_computed: int = 0
    fold_recomputed: list[int] = field(default_factory=list)
    fold_rows: int = 0
    batch_position: int = 0
    batch_size: int = 0
    seconds: Seconds = field(default_factory=Seconds)


def canvas_length(
    prompt_tokens: int, gen_length: int, block_length: int, grid: BlockGrid = "absolute"
) -> int:
    """Positions of the whole blocks that cover prompt and generation. Where blocks lie from the prompt's end on, the
    prompt takes whole blocks of its own."""
    if grid == "prompt":
        return (-(-prompt_tokens // block_length) + -(-gen_length // block_length)) * block_length
    return -(-(prompt_tokens + gen_length) // block_length) * block_length


class Sample:
    """A sample in flight: where it stands in its canvas. ``lead`` positions before its first fill a block up."""

    def __init__(self, prompt: Prompt, settings: DecodeSettings, slot: int) -> None:
        length = settings.block_length
        num_tokens = len(prompt.token_ids)
        self.prompt = prompt
        self.slot = slot
        self.block_length = length
        self.lead = -num_tokens % length if settings.grid == "prompt" else 0
        self.canvas = canvas_length(num_tokens, settings.gen_length, length, settings.grid) - self.lead
        self.tokens = list(prompt.token_ids) + [MASKED] * (self.canvas - num_tokens)
        self.block_start = num_tokens if settings.grid == "prompt" else num_tokens // length * length
        self.key = settings.noise.key(prompt.item_id, prompt.repeat)
        self.needs_prefill = self.block_start > 0
        self.pending: list[
            list[int]
        ] = []  # folded states on the way to the block's, not yet computed unfolded
        self.block_steps = 0  # steps of the block, those that opened nothing counted
        self.generation = Generation(prompt=prompt, batch_position=slot)
        self._stops_inside = settings.stops if settings.stop_rule != "block" else ()
        self._needs_step = settings.stop_rule == "prefix_commit"

    @property
    def block(self) -> list[int]:
        return self.tokens[self.block_start : self.block_start + self.block_length]

    def set_block(self, tokens: list[int]) -> None:
        """Put the tokens of the current block in place."""
        self.tokens[self.block_start : self.block_start + self.block_length] = tokens

    @property
    def prompt_in_block(self) -> int:
        return max(0, len(self.prompt.token_ids) - self.block_start)

    @property
    def commit_count(self) -> int:
        return self.block_length - self.block.count(MASKED) - self.prompt_in_block

    @property
    def has_next_block(self) -> bool:
        """Whether the canvas goes on after the block."""
        return self.block_start + self.block_length < self.canvas

    @property
    def has_stopped(self) -> bool:
        """Whether the block's state ends the sample: a stop id has no mask before it (stop rules ``prefix``).

        Under ``prefix_commit`` the reference looks only after a step, so a seed alone ends nothing.
        """
        if not self._stops_inside or (self._needs_step and self.commit_count <= 1):
            return False
        for token in self.block[self.prompt_in_block :]:
            if token == MASKED or token in self._stops_inside:
                return token != MASKED
        return False

    @property
    def is_block_complete(self) -> bool:
        """Whether the block takes no more steps."""
        return MASKED not in self.block or self.has_stopped

    @property
    def stored_span(self) -> tuple[int, int]:
        """First and last (exclusive) position that the next pass stores: the prompt's whole blocks, or the block."""
        if self.needs_prefill:
            return -self.lead, self.block_start
        return self.block_start, self.block_start + self.block_length

    def tokens_of(self, first: int, last: int) -> list[int]:
        """The tokens at ``first`` to ``last`` (exclusive); masked where it is before the prompt."""
        return [MASKED] * max(0, -first) + self.tokens[max(0, first) : last]
