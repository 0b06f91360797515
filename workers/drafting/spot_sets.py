"""SPOT-Sets (arXiv 2610.22543): drafts of whole steps of a threshold decoder, positions and tokens.

Nodes are target steps, grown as ``set_growth`` says under the network of ``set_model``. Exact (``spot_sets``): a
drafted state is accepted where it equals the target's own next state. Product max-commit (``spot_sets_product``): the
verifier may also take a larger drafted state, see ``decoding/verification.py``. Cross-block drafting and draft refresh
are the decoder's ``window``.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from dlmgrid.kernels.logits import NUM_CANDIDATES
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs, perturbed_scores
from dlmgrid.workers.drafting.order_model import path_features, stale_features
from dlmgrid.workers.drafting.set_checkpoint import load_set_model
from dlmgrid.workers.drafting.set_growth import SetPrediction, grow_sets
from dlmgrid.workers.drafting.set_model import NUM_RESCORED, SetModel


class SetDrafter:
    """The D states of largest mass under a set model; with ``min_log_mass`` only those of at least that log mass.

    The model is held in fp64 so that packing changes no tree.
    """

    reads_hidden = True

    def __init__(self, model: SetModel, *, min_log_mass: float = -torch.inf) -> None:
        self._model = model.double().eval()
        self._min_log_mass = min_log_mass
        self._device: torch.device | None = None

    def place(self, device: torch.device, setting: object = None) -> str:
        """Grow trees on ``device``, whatever device the states are on and whatever ``setting`` is known of the drafts;
        sums there may differ by rounding. Returns where trees grow."""
        self._device = device
        return "device: a network of this size is computed there only"

    def draft(self, inputs: DraftInputs, tree: DraftTree) -> None:
        """Fill every tree whose root has a valid snapshot."""
        device = self._device or inputs.roots.device
        if device != inputs.roots.device:
            placed = tree.to(device)
            self._grow(inputs.to(device), placed)
            tree.take(placed)
        else:
            self._grow(inputs, tree)

    def _grow(self, inputs: DraftInputs, tree: DraftTree) -> None:
        model = self._model.to(inputs.roots.device)

        def propose(states: Tensor, commit_counts: Tensor) -> SetPrediction:
            return predict_sets(model, inputs, states, commit_counts)

        grow_sets(inputs, tree, propose, min_log_mass=self._min_log_mass)


@torch.inference_mode()
def predict_sets(
    model: SetModel, inputs: DraftInputs, states: Tensor, commit_counts: Tensor
) -> SetPrediction:
    """What the model predicts for states int32 [S, W, L] with commit counts int64 [S, W]. Samples without a valid
    snapshot hold no meaning."""
    snapshots = inputs.snapshots
    assert snapshots.hidden is not None, "the snapshots hold no hidden states"
    num_samples, width, length = states.shape
    snapshot_masked = snapshots.masked
    stale = stale_features(snapshots)[:, None].expand(-1, width, -1, -1)
    features = torch.cat((stale, path_features(snapshot_masked, inputs.roots, states)), dim=-1)

    def flat(values: Tensor) -> Tensor:
        """[S, …] of a snapshot, as [S · W, …]."""
        return values[:, None].expand(-1, width, *values.shape[1:]).reshape(-1, *values.shape[1:])

    dtype = model.from_hidden.weight.dtype
    drafted = torch.where(snapshot_masked[:, None], states, MASKED).reshape(-1, length).long()
    logits, log_rescored = model(
        features.reshape(-1, length, features.shape[-1]).to(dtype),
        flat(snapshots.hidden).to(dtype),
        flat(snapshots.token_ids[..., :NUM_RESCORED]),
        flat(snapshots.probabilities[..., :NUM_RESCORED]).to(dtype),
        drafted,
        flat(snapshot_masked | ~snapshots.is_valid[:, None]),
    )
    log_p = snapshots.probabilities.double().log()[:, None].expand(-1, width, -1, -1).clone()
    log_p[..., :NUM_RESCORED] = log_rescored.view(num_samples, width, length, NUM_RESCORED).double()
    scores = log_p
    if inputs.temperature > 0:
        scores = perturbed_scores(inputs, commit_counts, log_p)
    two = scores.sort(dim=-1, descending=True, stable=True).indices[..., :2]
    shape = (num_samples, width, length, NUM_CANDIDATES)
    tokens = snapshots.token_ids[:, None].expand(shape).gather(-1, two).to(torch.int32)
    probabilities = log_p.gather(-1, two).exp()
    return SetPrediction(
        inclusion=logits.view(num_samples, width, length).double().sigmoid(),
        first=tokens[..., 0],
        second=tokens[..., 1],
        first_probability=probabilities[..., 0],
        second_probability=probabilities[..., 1],
    )


def build(checkpoint: Path) -> Drafter:
    """SPOT-Sets with the set model at ``checkpoint``. Raises InputError for a file that is none."""
    return SetDrafter(load_set_model(checkpoint))


def build_gamma(checkpoint: Path, gamma: float) -> Drafter:
    """SPOT-Sets-γ: only states with a mass of at least γ, 0 < γ ≤ 1. Raises InputError for a file that holds no set
    model, ValueError for another γ."""
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma is {gamma}, it must lie in (0, 1]")
    return SetDrafter(load_set_model(checkpoint), min_log_mass=math.log(gamma))
