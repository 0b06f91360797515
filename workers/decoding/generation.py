"""What goes into a decode and what comes out: prompts, decoded samples, and where a sample in flight stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.state import MASKED


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
    """

    wall: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    other: float = 0.0


@dataclass(kw_only=True, slots=True)
class Generation:
    """One decoded sample. Steps are counted over the whole generation; positions are absolute.

    ``argmax_commits`` counts the commits whose token is the most probable one where it was committed.
    """

    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    stop_reason: str = ""
    steps: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    margins: list[tuple[float, ...]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    nfe_prefill: int = 0
    nfe_denoise: int = 0
    nfe_commit: int = 0
    argmax_commits: int = 0
    drafted_nodes: int = 0
    rows_computed: int = 0
    batch_position: int = 0
    batch_size: int = 0
    seconds: Seconds = field(default_factory=Seconds)


def canvas_length(prompt_tokens: int, gen_length: int, block_length: int) -> int:
    """Tokens of the whole blocks that cover prompt and generation."""
    return -(-(prompt_tokens + gen_length) // block_length) * block_length


class Sample:
    """A sample in flight: where it stands in its canvas."""

    def __init__(
        self, prompt: Prompt, *, block_length: int, gen_length: int, noise: NoiseTable, slot: int
    ) -> None:
        length = block_length
        self.prompt = prompt
        self.slot = slot
        self.block_length = length
        self.canvas = canvas_length(len(prompt.token_ids), gen_length, length)
        self.tokens = list(prompt.token_ids) + [MASKED] * (self.canvas - len(prompt.token_ids))
        self.block_start = len(prompt.token_ids) // length * length
        self.key = noise.key(prompt.item_id, prompt.repeat)
        self.needs_prefill = self.block_start > 0
        self.generation = Generation(prompt=prompt, batch_position=slot)

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
    def is_block_complete(self) -> bool:
        return MASKED not in self.block

    @property
    def stored_span(self) -> tuple[int, int]:
        """First and last (exclusive) position that the next pass stores: the prompt's whole blocks, or the block."""
        if self.needs_prefill:
            return 0, self.block_start
        return self.block_start, self.block_start + self.block_length
