"""The head and the logits pass behind it as one submission: rows of hidden states in, what the pass says of them out.

On a GPU every number of rows up to a bucket replays one CUDA graph: indices and noise places go up in one copy, the
answers come back in one, and the host waits once. In Triton's interpreter the same steps run without a graph.

Shapes: R rows, H hidden size, V vocabulary padded to whole 64s.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlmgrid.kernels.logits import NUM_CANDIDATES, Choice, LogitsPass, Summary

ROW_BUCKETS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rows are padded to the next of these; more are read in several submissions."""

RowNoise = tuple[Tensor, int, Tensor, Tensor]

_COLUMNS = 5  # of the places of a row: its index, two key words, position, draw index


@dataclass(slots=True)
class _Submission:
    """Buffers of one bucket: ``places`` int64 [R, 5], ``rows`` [R, H], ``answer`` uint8 [R, bytes] after a run."""

    places: Tensor
    rows: Tensor
    answer: Tensor | None = None
    graph: torch.cuda.CUDAGraph | None = None


class RowGraphs:
    """Answers for rows of one model.

    Args:
        logits: rows [R, H] to fp32 logits [R, V].
        logits_pass: as ``kernels.logits.logits_pass``.
    """

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        logits_pass: Callable[..., LogitsPass],
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._logits, self._logits_pass = logits, logits_pass
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._submissions: dict[tuple[int, float, int], _Submission] = {}
        self._is_gpu = device.type == "cuda"
        self._pool: Any = (
            None  # torch's handle: logits of all buckets share memory, since every answer is copied out
        )
        self._up = self._host(ROW_BUCKETS[-1], _COLUMNS, torch.int64)
        self._down: dict[int, Tensor] = {}
        self._last: _Submission | None = None

    def predict(self, hidden: Tensor, rows: Tensor, temperature: float, noise: RowNoise | None) -> LogitsPass:
        """What the pass says of ``rows`` int64 [R] of ``hidden`` [N, L, H], all on the CPU but ``hidden``."""
        flat = hidden.flatten(0, 1)
        most = ROW_BUCKETS[-1]
        parts = [
            self._some(
                flat,
                rows[first : first + most],
                temperature,
                None if noise is None else _slice(noise, first, first + most),
            )
            for first in range(0, max(rows.numel(), 1), most)
        ]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def queue_again(self) -> None:
        """Replay the graph of the last submission. Raises RuntimeError before there is one."""
        if self._last is None or self._last.graph is None:
            raise RuntimeError("the last rows ran launch by launch; read as many twice first")
        self._last.graph.replay()

    def _some(self, flat: Tensor, rows: Tensor, temperature: float, noise: RowNoise | None) -> LogitsPass:
        count = rows.numel()
        size = ROW_BUCKETS[bisect_left(ROW_BUCKETS, count)]
        stream = 0 if noise is None else noise[1]
        key = (size, temperature, stream)
        submission = self._submissions.get(key)
        is_new = submission is None
        if submission is None:
            submission = _Submission(
                places=torch.zeros((size, _COLUMNS), dtype=torch.int64, device=self._device),
                rows=torch.zeros((size, self._hidden_size), dtype=self._dtype, device=self._device),
            )
            self._submissions[key] = submission
        up = self._up[:size]
        up.zero_()
        up[:count, 0] = rows
        if noise is not None:
            keys, _, positions, draws = noise
            up[:count, 1:3] = keys
            up[:count, 3] = positions
            up[:count, 4] = draws
        submission.places.copy_(up, non_blocking=True)
        torch.index_select(flat, 0, submission.places[:, 0], out=submission.rows)
        if is_new or not self._is_gpu:  # a first run compiles what a graph must find compiled
            submission.answer = self._answer(submission, temperature, stream)
        elif submission.graph is None:
            submission.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(submission.graph, pool=self._pool):
                submission.answer = self._answer(submission, temperature, stream)
            self._pool = self._pool or submission.graph.pool()
            submission.graph.replay()
        else:
            submission.graph.replay()
        self._last = submission
        answer = submission.answer
        assert answer is not None
        down = self._down.get(size)
        if down is None or down.shape[1] != answer.shape[1]:
            down = self._down[size] = self._host(size, answer.shape[1], torch.uint8)
        down.copy_(answer, non_blocking=True)
        if self._is_gpu:
            torch.cuda.current_stream(self._device).synchronize()
        return _unpacked(down[:count])

    def _answer(self, submission: _Submission, temperature: float, stream: int) -> Tensor:
        places = submission.places
        noise = None
        if temperature > 0:
            noise = (
                places[:, 1:3].contiguous(),
                stream,
                places[:, 3].contiguous(),
                places[:, 4].contiguous(),
            )
        return _packed(self._logits_pass(self._logits(submission.rows), temperature, noise=noise))

    def _host(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((rows, columns), dtype=dtype, pin_memory=self._is_gpu)


def _slice(noise: RowNoise, first: int, last: int) -> RowNoise:
    keys, stream, positions, draws = noise
    return keys[first:last], stream, positions[first:last], draws[first:last]


def _packed(passed: LogitsPass) -> Tensor:
    """All of a pass in one tensor uint8 [R, bytes], 64-bit values first."""
    choice, summary = passed.choice, passed.summary
    wide = torch.cat((choice.tokens[:, None], passed.digests[:, None], summary.token_ids), dim=1)
    narrow = torch.cat(
        (
            torch.stack(
                (
                    choice.probabilities, choice.margins, summary.entropy, summary.tail_mass,
                    summary.log_tempered_mass, passed.log_sums,
                ),
                dim=1,
            ),
            summary.probabilities,
        ),
        dim=1,
    )  # fmt: skip
    return torch.cat((wide.view(torch.uint8), narrow.view(torch.uint8)), dim=1)


def _unpacked(answer: Tensor) -> LogitsPass:
    split = (2 + NUM_CANDIDATES) * 8
    wide = answer[:, :split].contiguous().view(torch.int64)
    narrow = answer[:, split:].contiguous().view(torch.float32)
    return LogitsPass(
        Choice(wide[:, 0], narrow[:, 0], narrow[:, 1]),
        Summary(wide[:, 2:], narrow[:, 6:], narrow[:, 2], narrow[:, 3], narrow[:, 4]),
        wide[:, 1],
        narrow[:, 5],
    )


def _joined(parts: list[LogitsPass]) -> LogitsPass:
    choices, summaries = zip(*((part.choice, part.summary) for part in parts), strict=True)
    return LogitsPass(
        Choice(*(torch.cat(values) for values in zip(*choices, strict=True))),
        Summary(*(torch.cat(values) for values in zip(*summaries, strict=True))),
        torch.cat([part.digests for part in parts]),
        torch.cat([part.log_sums for part in parts]),
    )
