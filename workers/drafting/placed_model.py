"""An order model on another device than the states it is asked about: where a GPU verifies, the host drafts.

Shapes: B states, M positions of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlmgrid.workers.drafting.order_model import NUM_FEATURES, OrderModel

STATE_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""States are padded to the next of these, and each number replays one CUDA graph; more are computed in parts."""


@dataclass(slots=True)
class _Submission:
    """Buffers of one bucket; ``scores`` [B, M] after a run."""

    features: Tensor  # [B, M, 74]
    present: Tensor  # [B, M]
    scores: Tensor | None = None
    graph: torch.cuda.CUDAGraph | None = None


class PlacedModel:
    """Scores of ``model`` for features on the CPU, computed on ``device``.

    Sums in fp64 may differ from the CPU's by rounding, far below the differences between masses.
    """

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
        size = next(bucket for bucket in STATE_BUCKETS if bucket >= count)
        key = (size, width)
        is_new = key not in self._submissions
        if is_new:
            self._submissions[key] = _Submission(
                torch.zeros((size, width, NUM_FEATURES), dtype=torch.float64, device=self._device),
                torch.ones((size, width), dtype=torch.bool, device=self._device),
            )
        given = self._submissions[key]
        given.features[:count] = features.double().to(self._device)
        given.present[:count] = present.to(self._device)
        if is_new or self._device.type != "cuda":
            given.scores = self._model(given.features, given.present)
        elif given.graph is None:
            given.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(given.graph):
                given.scores = self._model(given.features, given.present)
            given.graph.replay()
        else:
            given.graph.replay()
        assert given.scores is not None
        return given.scores[:count].cpu()
