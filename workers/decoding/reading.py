"""What a walk reads of the rows of a pass: the draw, digest and summary of each row that predicts a masked position.

The walk lives on one device, the *control device*, and the pass on the target's; where they differ (a GPU), what is
read crosses in one copy. Two ways to read, of the same values:

    by level    the head runs on the states that the walk visits, level by level (the CPU, where the head is dear; rules
                that need the logits themselves)
    ahead       the head runs on every node of the trees in one go, before the walk (a GPU, where it is bound by reading
                its weights), so that a round waits for the device once

Legend: S samples, A samples still walking, L block length, R rows, V vocabulary, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from dlmgrid.kernels.gemm import PANEL_ROWS
from dlmgrid.kernels.logits import Choice, LogitsPass, Summary, row_digests, summarize
from dlmgrid.workers.decoding.commit_rules import CommitRule
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.sampling import (
    READS_STEP,
    Drawn,
    PositionNoise,
    draw,
    forbid_tokens,
    needs_logits,
)
from dlmgrid.workers.decoding.state import MASKED, num_masked
from dlmgrid.workers.decoding.tree import DraftTree

MOST_ROWS_AHEAD = 1024
"""Rows of a pass that the head runs on ahead; with more, the nodes that nobody visits would cost too much."""

RowNoise = tuple[Tensor, int, Tensor, Tensor]
"""Where the noise of R rows is found: keys int64 [R, 2], stream, positions int64 [R], draw indices int64 [R]."""


class Head(Protocol):
    """The language-model head: hidden rows [R, H] to fp32 logits [R, V], with -inf where no token may be chosen."""

    def logits(self, rows: Tensor) -> Tensor: ...


class Predictor(Protocol):
    """A head with the logits pass behind it: rows (int64 [R], on the CPU) of ``hidden`` [N, L, H] to what the pass says
    of them, on the CPU. ``predicts_rows``: whether this one does."""

    predicts_rows: bool

    def predict(
        self, hidden: Tensor, rows: Tensor, temperature: float, noise: RowNoise | None
    ) -> LogitsPass: ...


def predictor_of(head: object) -> Predictor | None:
    """``head`` where it answers rows itself, else None."""
    return cast("Predictor", head) if getattr(head, "predicts_rows", False) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionRule:
    """Everything T(state) depends on besides the logits.

    ``accepts_argmax``: a drafted state that equals the argmax next state is taken in place of T(state).
    ``product_tau``: the floor of product max-commit, None without it.
    ``end_token_ids``: the tokens that end a text, and then a turn, for the rule's policy on them.
    ``logits_pass``: one pass for choice, summary and digest of each row; None: the twins, each where it is needed.
    """

    rule: CommitRule
    temperature: float
    noise: NoiseTable
    accepts_argmax: bool = False
    product_tau: float | None = None
    end_token_ids: tuple[int, ...] = ()
    logits_pass: Callable[..., LogitsPass] | None = None

    @property
    def reads_logits(self) -> bool:
        """Whether a transition needs more of the logits than the logits pass says."""
        sampling = self.rule.sampling
        return (
            self.accepts_argmax
            or sampling.confidence in READS_STEP
            or sampling.eos_policy == "logits_eos_inf"
            or needs_logits(sampling, self.temperature)
        )


class Level(NamedTuple):
    """One state of each of A samples, and what its R rows say, all on the control device.

    ``states`` int32 and ``masked`` bool [A, L]; ``commit_counts`` int64 [A]; ``row_of`` int64 [R] into the A samples
    and ``positions`` int64 [R] in the block, ascending; ``drawn`` of the rows; ``is_argmax`` bool [R], whether the
    token is the row's most probable one; ``digests`` int64 [R].``summary`` and ``hidden`` (of some rows, bool [R] or
    indices int64, or of all) give the summary and what the head read; ``likeliest`` what would be drawn without noise.
    """

    states: Tensor
    masked: Tensor
    commit_counts: Tensor
    row_of: Tensor
    positions: Tensor
    drawn: Drawn
    is_argmax: Tensor
    digests: Tensor
    summary: Callable[[Tensor | None], Summary]
    hidden: Callable[[Tensor | None], Tensor]
    likeliest: Callable[[], tuple[Drawn, Tensor]]


class RowReader:
    """Reads the rows of the trees of one walk; the arguments are those of ``verification.walk``."""

    def __init__(
        self,
        *,
        head: Head,
        transition: TransitionRule,
        hidden: Tensor,
        first_segment: Tensor,
        tree: DraftTree,
        commit_counts: Tensor,
        block_starts: Tensor,
        keys: Tensor,
    ) -> None:
        self._head, self._transition = head, transition
        self._hidden = hidden
        self._first_segment, self._tree = first_segment, tree
        self._block_starts, self._keys = block_starts, keys
        self._root_counts = commit_counts + num_masked(tree.tokens[:, 0])
        self._predictor = None if transition.reads_logits else predictor_of(head)
        self._ahead: LogitsPass | None = None
        self._ahead_rows: tuple[
            Tensor, Tensor, Tensor, Tensor, Tensor
        ]  # masked, samples, nodes, positions, rows
        if self._predictor is not None:
            self._read_ahead(self._predictor)

    def read(self, samples: Tensor, node: Tensor, block_step: Tensor) -> Level:
        """The level at which ``samples`` int64 [A] stand at ``node`` int64 [A] of their trees, ``block_step`` int64 [A]
        steps into their blocks."""
        states = self._tree.tokens[samples, node]
        masked = states == MASKED
        row_of, positions = masked.nonzero(as_tuple=True)
        counts = self._root_counts[samples] - num_masked(states)
        segments = self._first_segment[samples] + node
        rows = segments[row_of] * states.shape[1] + positions
        place = (states, masked, counts, row_of, positions)
        if self._predictor is None:
            return self._from_logits(samples, place, rows, block_step)
        if self._ahead is None:
            noise = self._noise(samples[row_of], positions, counts[row_of])
            passed = self._predictor.predict(self._hidden, rows, self._transition.temperature, noise)
        else:
            passed = rows_of_pass(self._ahead, self._ahead_index[samples, node][masked])
        return self._from_pass(samples, place, rows, passed)

    @property
    def is_ahead(self) -> bool:
        """Whether the rows of every node have been read."""
        return self._ahead is not None

    def read_all(self) -> tuple[Tensor, Tensor, Level]:
        """Every node that has masks left as one level: samples int64 [A] and nodes int64 [A], and the level."""
        assert self._ahead is not None, "the rows were not read ahead"
        masked, _, _, positions, rows = self._ahead_rows
        left = masked.sum(dim=-1)
        of, node = left.nonzero(as_tuple=True)
        flat = of * masked.shape[1] + node
        left = left.flatten().index_select(0, flat)
        counts = self._root_counts.index_select(0, of) - left
        if of.numel() == 1:
            row_of = torch.zeros_like(positions)
        else:
            row_of = torch.arange(of.numel(), device=of.device).repeat_interleave(left)
        states, masked = (part.flatten(0, 1).index_select(0, flat) for part in (self._tree.tokens, masked))
        place = (states, masked, counts, row_of, positions)
        return of, node, self._from_pass(of, place, rows, self._ahead)

    def _read_ahead(self, predictor: Predictor) -> None:
        tree = self._tree
        masked = (tree.tokens == MASKED) & tree.is_node()[..., None]
        samples, nodes, positions = masked.nonzero(as_tuple=True)
        if samples.numel() > MOST_ROWS_AHEAD:
            return
        rows = (self._first_segment.index_select(0, samples) + nodes) * masked.shape[-1] + positions
        noise = None
        if self._transition.temperature > 0:
            counts = self._root_counts[samples] - masked.sum(dim=-1)[samples, nodes]
            noise = self._noise(samples, positions, counts)
        self._ahead = predictor.predict(self._hidden, rows, self._transition.temperature, noise)
        self._ahead_rows = (masked, samples, nodes, positions, rows)

    @functools.cached_property
    def _ahead_index(self) -> Tensor:
        """int64 [S, 1 + D, L]: which row read ahead belongs to a position, -1 where none does."""
        masked, samples, nodes, positions, _ = self._ahead_rows
        index = torch.full(masked.shape, -1, dtype=torch.int64, device=masked.device)
        index[samples, nodes, positions] = torch.arange(samples.numel(), device=masked.device)
        return index

    def _noise(self, samples: Tensor, positions: Tensor, counts: Tensor) -> RowNoise | None:
        """Where the token noise of rows is found: all int64 [R]; None at T = 0."""
        if self._transition.temperature == 0:
            return None
        draws = self._transition.noise.draw_indices(counts)
        return self._keys[samples], int(Stream.TOKEN), self._block_starts[samples] + positions, draws

    def _from_pass(
        self, samples: Tensor, place: tuple[Tensor, ...], rows: Tensor, passed: LogitsPass
    ) -> Level:
        _, _, counts, row_of, positions = place
        transition = self._transition
        noise = transition.noise

        def at() -> tuple[Tensor, Tensor, Tensor]:
            owners = samples[row_of]
            return self._keys[owners], self._block_starts[owners] + positions, counts[row_of]

        position_noise = PositionNoise(
            lambda: noise.position_uniforms(*at()), lambda: noise.position_gumbels(*at())
        )
        drawn = draw(
            None,
            transition.rule.sampling,
            transition.temperature,
            None,
            position_noise,
            transition.end_token_ids,
            choose_from=lambda _: passed.choice,
            entropies=passed.summary.entropy,
        )
        summary = passed.summary
        is_top = summary.probabilities == summary.probabilities[:, :1]
        is_argmax = (is_top & (summary.token_ids == passed.choice.tokens[:, None])).any(dim=1)

        def some(which: Tensor | None) -> Summary:
            return (
                summary
                if which is None
                else Summary(
                    *(
                        part[which] if which.dtype == torch.bool else part.index_select(0, which)
                        for part in summary
                    )
                )
            )

        return Level(
            *cast("tuple[Tensor, Tensor, Tensor, Tensor, Tensor]", place),
            drawn, is_argmax, passed.digests, some, functools.partial(self._read_hidden, rows), _no_likeliest,
        )  # fmt: skip

    def _read_hidden(self, rows: Tensor, which: Tensor | None) -> Tensor:
        wanted = rows if which is None else rows[which]
        return self._hidden.flatten(0, 1)[wanted.to(self._hidden.device)]

    def _from_logits(
        self, samples: Tensor, place: tuple[Tensor, ...], rows: Tensor, block_step: Tensor
    ) -> Level:
        _, _, counts, row_of, positions = place
        transition, sampling = self._transition, self._transition.rule.sampling
        control, device = counts.device, self._hidden.device
        read = self._read_hidden(rows, None)
        logits = forbid_tokens(self._head.logits(read), sampling, transition.end_token_ids)
        keys = self._keys[samples][row_of].to(device)
        at = (self._block_starts[samples][row_of] + positions).to(device)
        row_counts = counts[row_of].to(device)
        gumbel, passed, choose_from = None, None, None
        if transition.logits_pass is not None:
            draw_indices = transition.noise.draw_indices(row_counts)
            noise = (keys, int(Stream.TOKEN), at, draw_indices) if transition.temperature > 0 else None
            one_pass = functools.partial(
                transition.logits_pass, temperature=transition.temperature, noise=noise
            )
            passed = one_pass(logits)
            choose_from = functools.partial(_chosen_in, one_pass, logits, passed)
        elif transition.temperature > 0:
            gumbel = transition.noise.rows(keys, Stream.TOKEN, at, row_counts, logits.shape[1])
        reads_step = sampling.confidence in READS_STEP
        draws = block_step[row_of].to(device) if reads_step else row_counts
        position_noise = PositionNoise(
            functools.partial(transition.noise.position_uniforms, keys, at, draws),
            functools.partial(transition.noise.position_gumbels, keys, at, draws),
        )

        def draw_with(
            token_noise: Tensor | None, chooses: Callable[[Tensor], Choice] | None
        ) -> tuple[Drawn, Tensor]:
            if device.type == "cuda" and chooses is None:
                drawn = _draw_in_panels(logits, transition, token_noise, position_noise)
            else:
                drawn = draw(
                    logits,
                    sampling,
                    transition.temperature,
                    token_noise,
                    position_noise,
                    transition.end_token_ids,
                    choose_from=chooses,
                )
            chosen = logits.gather(1, drawn.choice.tokens[:, None]).squeeze(1)
            is_argmax = chosen == logits.amax(dim=1)
            choice = Choice(*(part.to(control) for part in drawn.choice))
            return Drawn(choice, drawn.confidence.to(control)), is_argmax.to(control)

        def some(which: Tensor | None) -> Summary:
            where = None if which is None else which.to(device)
            if passed is not None:
                found = (
                    passed.summary if where is None else Summary(*(part[where] for part in passed.summary))
                )
            else:
                found = summarize(logits if where is None else logits[where], transition.temperature)
            return Summary(*(part.to(control) for part in found))

        def hidden(which: Tensor | None) -> Tensor:
            return read if which is None else read[which.to(device)]

        drawn, is_argmax = draw_with(gumbel, choose_from)
        digests = row_digests(logits) if passed is None else passed.digests
        return Level(
            *cast("tuple[Tensor, Tensor, Tensor, Tensor, Tensor]", place),
            drawn, is_argmax, digests.to(control), some, hidden,
            lambda: draw_with(torch.zeros_like(logits), None),
        )  # fmt: skip


def _draw_in_panels(
    logits: Tensor, transition: TransitionRule, token_noise: Tensor | None, position_noise: PositionNoise
) -> Drawn:
    """``draw`` for torch on a GPU, where how a row is summed depends on how many there are: panels of PANEL_ROWS rows,
    the last one filled up with its last row."""
    sampling, ends = transition.rule.sampling, transition.end_token_ids
    count = logits.shape[0]
    uniform, gumbel = functools.cache(position_noise.uniform), functools.cache(position_noise.gumbel)
    drawn = []
    for first in range(0, count, PANEL_ROWS):
        rows = torch.arange(first, first + PANEL_ROWS, device=logits.device).clamp_max(count - 1)
        part = draw(
            logits[rows],
            sampling,
            transition.temperature,
            None if token_noise is None else token_noise[rows],
            PositionNoise(
                functools.partial(_rows_of, uniform, rows), functools.partial(_rows_of, gumbel, rows)
            ),
            ends,
        )
        held = min(PANEL_ROWS, count - first)
        drawn.append(Drawn(Choice(*(values[:held] for values in part.choice)), part.confidence[:held]))
    choices = zip(*(part.choice for part in drawn), strict=True)
    return Drawn(Choice(*map(torch.cat, choices)), torch.cat([part.confidence for part in drawn]))


def _rows_of(noise: Callable[[], Tensor], rows: Tensor) -> Tensor:
    return noise()[rows]


def rows_of_pass(passed: LogitsPass, rows: Tensor) -> LogitsPass:
    """What a pass says of some of its rows, int64 [R]."""
    return LogitsPass(
        Choice(*(part[rows] for part in passed.choice)),
        Summary(*(part[rows] for part in passed.summary)),
        passed.digests[rows],
        passed.log_sums[rows],
    )


def _chosen_in(
    one_pass: Callable[[Tensor], LogitsPass], logits: Tensor, passed: LogitsPass, filtered: Tensor
) -> Choice:
    """The choice from ``filtered``: that of ``passed``, the pass over ``logits``, where nothing was filtered."""
    return passed.choice if filtered is logits else one_pass(filtered).choice


def _no_likeliest() -> tuple[Drawn, Tensor]:
    raise AssertionError("a rule that takes the argmax reads the logits")
