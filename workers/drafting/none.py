"""Draft-free decoding: every tree is its root, so a pass makes one step."""

from __future__ import annotations

from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs


class NoDrafter:
    """Drafts nothing."""

    def draft(self, inputs: DraftInputs, tree: DraftTree) -> None:
        """Leave every tree a root."""


def build() -> Drafter:
    """The drafter of the serialized run."""
    return NoDrafter()
