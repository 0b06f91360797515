"""A drafting network on another device than the states it is asked about: where a GPU verifies, the host drafts.

States are padded to one of a few numbers, each of which replays one CUDA graph. Sums in fp64 may differ from the CPU's
by rounding, far below the differences between masses.

Shapes: S samples, B states, M positions of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.drafting.order_model import NUM_FEATURES, OrderModel
from dlmgrid.workers.drafting.token_model import Stale, TokenEncoder

STATE_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""States are padded to the next of these, and each number replays one CUDA graph; more are computed in parts."""


@dataclass(slots=True)
class _Submission:
    """Buffers of one bucket; ``found`` after a run."""

    given: Sequence[Tensor]  # [B, …]
    found: Sequence[Tensor] | None = None
    graph: torch.cuda.CUDAGraph | None = None

    def run(self, compute: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor]:
        """What ``compute`` gives for the buffers: directly the first time, which warms up, then as a graph."""
        if self.found is None or not self.given[0].is_cuda:
            self.found = compute(*self.given)
        elif self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.found = compute(*self.given)
            self.graph.replay()
        else:
            self.graph.replay()
        return self.found


def _bucket(count: int) -> int:
    return next(bucket for bucket in STATE_BUCKETS if bucket >= count)


class PlacedModel:
    """Scores of ``model`` for features on the CPU, computed on ``device``."""

    def __init__(self, model: OrderModel, device: torch.device) -> None:
        self._model = model.to(device)
        self._device = device
        self._submissions: dict[tuple[int, int], _Submission] = {}

    @torch.inference_mode()
    def __call__(self, features: Tensor, present: Tensor) -> Tensor:
        """As :class:`OrderModel`: features [B, M, 74], present bool [B, M], both on the CPU, to fp64 [B, M] there."""
        count, width, _ = features.shape
        most = STATE_BUCKETS[-1]
        if count > most:
            parts = zip(features.split(most), present.split(most), strict=True)
            return torch.cat([self(*part) for part in parts])
        key = (_bucket(count), width)
        if key not in self._submissions:
            self._submissions[key] = _Submission(
                (
                    torch.zeros((*key, NUM_FEATURES), dtype=torch.float64, device=self._device),
                    torch.ones(key, dtype=torch.bool, device=self._device),
                )
            )
        submission = self._submissions[key]
        submission.given[0][:count] = features.double().to(self._device)
        submission.given[1][:count] = present.to(self._device)
        (scores,) = submission.run(lambda *given: (self._model(*given),))
        return scores[:count].cpu()


class PlacedTokens:
    """What a model that reads tokens gives for states on the CPU, computed on ``device``: snapshots go up once a
    draft."""

    def __init__(self, model: TokenEncoder, device: torch.device) -> None:
        self._model = model.to(device)
        self._device = device
        self._submissions: dict[tuple[int, int], _Submission] = {}

    @torch.inference_mode()
    def read(self, snapshots: Snapshots) -> Stale:
        """As :meth:`TokenEncoder.read`, of snapshots on the CPU; the result stays on the device."""
        reads_hidden = self._model.shape.hidden_size > 0
        return self._model.read(snapshots.to(self._device, with_hidden=reads_hidden))

    @torch.inference_mode()
    def __call__(self, stale: Stale, sample: Tensor, path: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        """What the model gives for B states on the CPU, fp64 and there, drafted from the rows ``sample`` int64 [B] of
        ``stale``; ``path`` and ``states`` as :meth:`TokenEncoder.judge` takes them."""
        count, most = states.shape[0], STATE_BUCKETS[-1]
        if count > most:
            chunks = zip(sample.split(most), path.split(most), states.split(most), strict=True)
            parts = [self(stale, *chunk) for chunk in chunks]
            return tuple(torch.cat(part) for part in zip(*parts, strict=True))
        size = _bucket(count)
        key = (size, states.shape[1])
        if key not in self._submissions:
            rows = [
                torch.zeros((size, *part.shape[1:]), dtype=part.dtype, device=self._device) for part in stale
            ]
            self._submissions[key] = _Submission(
                (
                    *rows,
                    torch.zeros((size, *path.shape[1:]), dtype=path.dtype, device=self._device),
                    torch.zeros((size, states.shape[1]), dtype=torch.int64, device=self._device),
                )
            )
        submission = self._submissions[key]
        which = sample.to(self._device)
        for buffer, part in zip(submission.given[: len(stale)], stale, strict=True):
            buffer[:count] = part[which]
        submission.given[-2][:count] = path.to(self._device)
        submission.given[-1][:count] = states.to(self._device)
        found = submission.run(lambda *given: self._model(Stale(*given[:-2]), *given[-2:]))
        return tuple(part[:count].cpu() for part in found)
