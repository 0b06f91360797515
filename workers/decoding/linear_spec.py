"""Linear self-speculation of Nemotron-Labs-Diffusion: the model drafts for its own autoregressive mode.

A round is two passes. The *draft* pass sees the newest token and masks behind it as one diffusion block on the cached
prefix, and fills all of them; nothing of it is kept. The *verify* pass sees the drafted tokens causally and stores
them; its row i gives the autoregressive token i + 1. The longest run of drafts that equal those tokens is accepted,
and the token behind it, which is the newest one of the next round, comes for free. Drafts that were not accepted are
overwritten by the next verify pass.

The draft block starts at any position. The engine keeps a sample's blocks on one grid, so a draft pass reads a copy of
the prefix in a second slot, moved onto the grid of that block; a verify pass computes the one or two blocks of the grid
that its tokens lie in, whose earlier rows come out as they were stored.

The tokens are those of the decoder ``causal``, whose noise is read where that one reads it: at T > 0 too a row is the
serialized autoregressive run. Tokens at the first position of a block of the grid are *seeds* there, and here.

Source: ``linear_spec_generate`` of the published modeling_nemotron_labs_diffusion.py with its default threshold of 0,
without its optional draft adapter. Legend: A samples of a round, D drafted tokens, L block length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dlmgrid.kernels.logits import Choice, LogitsPass, choose, row_digests
from dlmgrid.workers.decoding.decoder import Decoder
from dlmgrid.workers.decoding.generation import Sample
from dlmgrid.workers.decoding.noise import Stream
from dlmgrid.workers.decoding.packing import Packed
from dlmgrid.workers.decoding.reading import predictor_of
from dlmgrid.workers.decoding.settings import VERIFICATIONS, DecodeSettings
from dlmgrid.workers.decoding.state import MASKED, commit_hashes
from dlmgrid.workers.decoding.target import Target
from dlmgrid.workers.drafting import none


class CopyingTarget(Target, Protocol):
    """A target that lays a sample's stored positions out again in another slot."""

    def copy_prefix(self, source: int, target: int, *, first_start: int, block_start: int) -> None: ...


class _Read(NamedTuple):
    """What R rows say: the ``choice``, the ``digests`` int64 [R] of their logits, ``is_argmax`` bool [R]."""

    choice: Choice
    digests: Tensor
    is_argmax: Tensor


class _Round(NamedTuple):
    """A sample's round: ``newest`` is the position of its newest token, ``drafts`` the tokens put behind it."""

    sample: Sample
    newest: int
    drafts: list[int]


class LinearSpecDecoder(Decoder):
    """Decodes prompts autoregressively, drafted by the model's own diffusion mode.

    Half of the target's slots hold samples, the other half what their draft passes read.

    Raises ValueError for settings that are not those of the autoregressive mode, a budget beyond what a draft block
    holds, or a verification that leaves the serialized path.
    """

    def __init__(
        self,
        target: CopyingTarget,
        settings: DecodeSettings,
        logits_pass: Callable[..., LogitsPass] | None = None,
    ) -> None:
        if not settings.causal or settings.grid != "prompt" or settings.stop_rule != "prefix":
            raise ValueError("linear_spec drafts for the autoregressive mode: the decoder causal")
        if not 1 <= settings.budget < settings.block_length:
            raise ValueError(
                f"linear_spec drafts 1 to {settings.block_length - 1} tokens of a block, not {settings.budget}"
            )
        if settings.verification not in VERIFICATIONS:
            raise ValueError(f"linear_spec has no verification {settings.verification}")
        if settings.fold is not None or settings.product_tau is not None:
            raise ValueError("linear_spec drafts no tree that could fold or be taken whole")
        super().__init__(target, none.build(), settings, logits_pass=logits_pass)
        self.copying_target = target

    @property
    def _num_samples(self) -> int:
        return self.target.num_slots // 2

    def _pass(self, samples: list[Sample]) -> None:
        """Prefill samples that begin; of the others a whole round: their draft pass, then one causal pass for all."""
        start = self._clock()
        beginning = [sample for sample in samples if sample.needs_prefill]
        rounds = self._draft_rounds([sample for sample in samples if not sample.needs_prefill])
        drafted = self._clock()
        packed = Packed(self._device)
        rows = {id(sample): 0 for sample in samples}
        spans = [sample.stored_span for sample in beginning]
        for sample, (first, last) in zip(beginning, spans, strict=True):
            self._pack_blocks(packed, sample, first, last, sample.tokens_of(first, last))
            rows[id(sample)] += last - first
        firsts = [self._pack_round(packed, each, rows) for each in rounds]
        hidden = packed.run(self.target, causal=True)
        verified = self._clock()
        seeds = self._seeds(beginning, spans, hidden)
        found = self._read_rounds(rounds, firsts, hidden) if rounds else None
        sampled = self._clock()
        for sample in beginning:
            self._stored(sample, seeds[id(sample)])
        if found is not None:
            self._accept(rounds, found)
        denoising = [each.sample for each in rounds]
        self._share_time(samples, rows, denoising, (start, drafted, verified, sampled, self._clock()))

    def _draft_rounds(self, samples: list[Sample]) -> list[_Round]:
        """One diffusion pass over the newest token of each sample and the masks behind it."""
        if not samples:
            return []
        settings, device, length = self.settings, self._device, self.settings.block_length
        packed = Packed(device)
        newest: list[int] = []
        counts: list[int] = []
        for sample in samples:
            at = sample.tokens.index(MASKED) - 1
            newest.append(at)
            counts.append(min(settings.budget, sample.canvas - 1 - at))
            copy = self._num_samples + sample.slot
            prompt_tokens = len(sample.prompt.token_ids)
            self.copying_target.copy_prefix(sample.slot, copy, first_start=prompt_tokens, block_start=at)
            block = [sample.tokens[at]] + [MASKED] * (length - 1)
            packed.add(torch.tensor([block], dtype=torch.int32, device=device), copy, at)
            sample.generation.nfe_draft += 1
        hidden = packed.run(self.target)
        owner, offset = _counted(counts)
        rows = owner * length + 1 + offset
        positions = torch.tensor(newest)[owner] + 1 + offset
        stream = VERIFICATIONS[settings.verification]
        tokens = self._read(hidden, rows, samples, owner, positions, stream).choice.tokens.tolist()
        rounds = []
        for sample, at, count in zip(samples, newest, counts, strict=True):
            rounds.append(_Round(sample, at, tokens[:count]))
            del tokens[:count]
        return rounds

    def _pack_round(self, packed: Packed, each: _Round, rows: dict[int, int]) -> int:
        """Add the blocks that hold a round's tokens; the index of the first one."""
        sample, length = each.sample, self.settings.block_length
        start = sample.block_start
        tokens = [*sample.tokens[start : each.newest + 1], *each.drafts]
        tokens += [MASKED] * (-len(tokens) % length)
        rows[id(sample)] += length + len(tokens)
        return self._pack_blocks(packed, sample, start, start + len(tokens), tokens)

    def _pack_blocks(self, packed: Packed, sample: Sample, first: int, last: int, tokens: list[int]) -> int:
        length = self.settings.block_length
        blocks = torch.tensor(tokens, dtype=torch.int32, device=self._device).view(-1, length)
        indices = [
            packed.add(block[None], sample.slot, at, stores=True)
            for at, block in zip(range(first, last, length), blocks, strict=True)
        ]
        return indices[0]

    def _read_rounds(self, rounds: list[_Round], firsts: list[int], hidden: Tensor) -> _Read:
        """The autoregressive tokens behind the newest token and behind each draft of every round, in order."""
        length = self.settings.block_length
        owner, offset = _counted([1 + len(each.drafts) for each in rounds])
        before = torch.tensor([each.newest for each in rounds])[owner] + offset
        starts = torch.tensor([each.sample.block_start for each in rounds])[owner]
        rows = torch.tensor(firsts)[owner] * length + before - starts
        return self._read(hidden, rows, [each.sample for each in rounds], owner, before + 1, Stream.TOKEN)

    def _read(
        self,
        hidden: Tensor,
        rows: Tensor,
        samples: list[Sample],
        owner: Tensor,
        positions: Tensor,
        stream: Stream,
    ) -> _Read:
        """What ``rows`` int64 [R] of ``hidden`` [N, L, H] say of ``positions`` int64 [R] of the samples ``owner`` int64
        [R], everything on the CPU. The noise of a position is that of its draw in the decoder ``causal``."""
        settings = self.settings
        noise = None
        prompts = torch.tensor([len(sample.prompt.token_ids) for sample in samples])[owner]
        counts = (positions - prompts) % settings.block_length
        keys = torch.tensor([sample.key for sample in samples], dtype=torch.int64)[owner]
        if settings.temperature > 0:
            noise = keys, int(stream), positions, settings.noise.draw_indices(counts)
        predictor = predictor_of(self.target)
        if predictor is not None:
            passed = predictor.predict(hidden, rows, settings.temperature, noise)
            summary = passed.summary
            is_top = summary.probabilities == summary.probabilities[:, :1]
            is_argmax = (is_top & (summary.token_ids == passed.choice.tokens[:, None])).any(dim=1)
            return _Read(passed.choice, passed.digests, is_argmax)
        logits = self.target.logits(hidden.flatten(0, 1)[rows.to(hidden.device)])
        if self._logits_pass is not None:
            one_pass = self._logits_pass(
                logits, temperature=settings.temperature, noise=_on(logits.device, noise)
            )
            choice, digests = one_pass.choice, one_pass.digests
        else:
            gumbel = None
            if noise is not None:
                keys, positions, counts = (part.to(logits.device) for part in (keys, positions, counts))
                gumbel = settings.noise.rows(keys, stream, positions, counts, logits.shape[1])
            choice, digests = choose(logits, settings.temperature, gumbel), row_digests(logits)
        is_argmax = logits.gather(1, choice.tokens[:, None]).squeeze(1) == logits.amax(dim=1)
        return _Read(Choice(*(part.cpu() for part in choice)), digests.cpu(), is_argmax.cpu())

    def _accept(self, rounds: list[_Round], found: _Read) -> None:
        """Take from each round the drafts that the autoregressive tokens confirm, and the token behind them."""
        tokens, margins = found.choice.tokens.tolist(), found.choice.margins.tolist()
        is_argmax, finite = found.is_argmax.tolist(), torch.isfinite(found.choice.probabilities).tolist()
        first = 0
        for sample, newest, drafts in rounds:
            prompt_tokens, length = len(sample.prompt.token_ids), self.settings.block_length
            generation = sample.generation
            generation.nfe_denoise += 1
            generation.drafted_nodes += len(drafts)
            taken = 0
            for index in range(len(drafts) + 1):
                row, position = first + index, newest + 1 + index
                if not finite[row]:
                    raise FloatingPointError("the model's logits are not finite at a state of this item")
                token = tokens[row]
                taken += 1
                self._take(sample, position, token)
                offset = (position - prompt_tokens) % length
                if offset:
                    digest = int(commit_hashes(torch.tensor([offset]), found.digests[row : row + 1])[0])
                    generation.steps.append(((position, token),))
                    generation.margins.append((margins[row],))
                    generation.digests.append(f"{digest % 2**64:016x}")
                    generation.argmax_commits += is_argmax[row]
                is_last = position + 1 == sample.canvas or token in self.settings.stops
                if is_last:
                    self._finish(sample)
                if is_last or index == len(drafts) or drafts[index] != token:
                    break
            generation.accepted.append(taken - 1)
            first += len(drafts) + 1

    def _take(self, sample: Sample, position: int, token: int) -> None:
        """Put a token in its place; the first one of a block of the grid is a seed, as in the decoder ``causal``."""
        sample.tokens[position] = token
        if (position - len(sample.prompt.token_ids)) % self.settings.block_length == 0:
            sample.block_start = position
            sample.generation.seeds.append((position, token))


def _counted(counts: list[int]) -> tuple[Tensor, Tensor]:
    """For ``counts`` entries of each of A owners in order: whose each is, and its place among them, int64 [R] each."""
    sizes = torch.tensor(counts)
    owner = torch.arange(len(counts)).repeat_interleave(sizes)
    return owner, torch.arange(owner.numel()) - (sizes.cumsum(0) - sizes)[owner]


def _on(
    device: torch.device, noise: tuple[Tensor, int, Tensor, Tensor] | None
) -> tuple[Tensor, int, Tensor, Tensor] | None:
    if noise is None:
        return None
    keys, stream, positions, draws = noise
    return keys.to(device), stream, positions.to(device), draws.to(device)
