"""What a round tells a growth on a device, and what the growth answers, as rows of 32-bit words: one copy each way.

Legend: S samples, D budget, L block length, K candidates of a position, T predictions of a sample: one where every
state is predicted alike, else one for each number of commits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlmgrid.kernels.logits import NUM_CANDIDATES

MASKED = -1
"""The sentinel of a masked position."""

HEAD_WORDS = 8
"""Words before the positions: valid, commits, block start, two key words, whether complete states may be listed, and
two that are not used."""

TEMPERED, FIRST_MARGIN, ENTROPY = 0, 1, 2
"""What a position's confidence is: the (tempered) probability of the first token, top-1 minus top-2, exp(-entropy)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthPlan:
    """What a growth is built for; all of it is fixed in a graph.

    Attributes:
        budget: D; length: L.
        sub_block_length: sub-blocks of that width are filled one after another, 0 for none.
        temperature: of the target; with one above 0, first and second tokens are those of the perturbed scores.
        stream: the noise that predictions read, None for none.
        counts_draws: whether noise depends on the number of commits.
        confidence: TEMPERED, FIRST_MARGIN or ENTROPY; ``plain`` where TEMPERED means the probability at T = 1.
        hedge_below: a second token is tried where the first has a smaller probability.
        min_log_mass: states below it are left out.
    """

    budget: int
    length: int
    sub_block_length: int = 0
    temperature: float = 0.0
    stream: int | None = None
    counts_draws: bool = True
    confidence: int = TEMPERED
    plain: bool = False
    hedge_below: float = 0.6
    min_log_mass: float = -torch.inf

    @property
    def num_predictions(self) -> int:
        """T."""
        differs = self.temperature > 0 and self.stream is not None and self.counts_draws
        return self.length if differs else 1

    @property
    def words(self) -> int:
        """Words of a sample's input."""
        return HEAD_WORDS + self.length * (5 + 2 * NUM_CANDIDATES)

    @property
    def answer_words(self) -> int:
        """Words of a sample's answer, even in number: states, whether more levels may add some; log masses; depths;
        parents; tokens."""
        words = 2 + self.budget * (4 + self.length)
        return words + words % 2


class Given:
    """The parts of input words int32 [S, words], as views."""

    def __init__(self, words: Tensor, length: int) -> None:
        num_samples = words.shape[0]
        head, per_position = words[:, :HEAD_WORDS], words[:, HEAD_WORDS : HEAD_WORDS + 5 * length]
        self.is_valid, self.commit_counts, self.block_starts = head[:, 0], head[:, 1], head[:, 2]
        self.keys, self.allows_complete = head[:, 3:5], head[:, 5]
        parts = per_position.unflatten(1, (5, length)).unbind(1)
        self.roots, self.masked = parts[:2]
        self.entropy, self.tail_mass, self.log_tempered_mass = (
            part.view(torch.float32) for part in parts[2:]
        )
        candidates = words[:, HEAD_WORDS + 5 * length :].view(num_samples, 2, length, NUM_CANDIDATES)
        self.token_ids, self.probabilities = candidates[:, 0], candidates[:, 1].view(torch.float32)


class Answer:
    """The parts of answer words int32 [S, answer words], as views. States are in topological order: by depth, then
    mass; entries past ``num_states`` hold no meaning."""

    def __init__(self, words: Tensor, budget: int, length: int) -> None:
        ends = torch.tensor([2, 2 * budget, budget, budget, budget * length]).cumsum(0).tolist()
        self.num_states, self.is_open = words[:, 0], words[:, 1]
        self.log_mass = words[:, ends[0] : ends[1]].view(torch.float64)
        self.depths, self.parents = words[:, ends[1] : ends[2]], words[:, ends[2] : ends[3]]
        self.tokens = words[:, ends[3] : ends[4]].unflatten(1, (budget, length))


class GrowthState:
    """Buffers of a growth on a device. Row 0 of a table is the root, the others its list by falling mass.

    Attributes:
        words: int32 [S, words]; answer: int32 [S, answer words].
        choices: int32 [S, T, L, 2], first and second token; log_probability: fp64 [S, T, L, 2], -inf for a second
            token that is not tried; confidence: fp64 [S, T, L].
        tokens: int32 [S, 1 + D, L]; log_mass: fp64 [S, 1 + D], -inf for no entry; depths, parents: int32 [S, 1 + D].
            Two of each: a level reads one and writes the other.
        depth: int32 [S], of the states that are expanded next; is_open: int32 [S], whether there are such.
        scores: fp64 [S, 1 + D, L], of the order model; children, merged: log masses fp64 [S, 1 + D, L, 2].
        places: int32 [S, 1 + D], and live: int32 [S, 1 + 2 L (1 + D)], of a cut that is being made.
    """

    def __init__(self, plan: GrowthPlan, num_samples: int, device: torch.device) -> None:
        self.plan = plan
        rows, length = (num_samples, 1 + plan.budget), plan.length

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def doubles(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.words = ints(num_samples, plan.words)
        self.answer = ints(num_samples, plan.answer_words)
        self.choices = ints(num_samples, plan.num_predictions, length, 2)
        self.log_probability = doubles(num_samples, plan.num_predictions, length, 2)
        self.confidence = doubles(num_samples, plan.num_predictions, length)
        self.tokens = [ints(*rows, length) for _ in range(2)]
        self.log_mass = [doubles(*rows) for _ in range(2)]
        self.depths = [ints(*rows) for _ in range(2)]
        self.parents = [ints(*rows) for _ in range(2)]
        self.depth, self.is_open = ints(num_samples), ints(num_samples)
        self.scores = doubles(*rows, length)
        self.children, self.merged = doubles(*rows, length, 2), doubles(*rows, length, 2)
        self.places = ints(*rows)
        self.live = ints(num_samples, 1 + 2 * length * (1 + plan.budget))
