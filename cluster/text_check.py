"""Stored texts held against the tokens that they are said to be the text of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from dlmgrid.workers.cell import IMPORTED
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.tokenization import PromptEncoder, load_tokenizer


class TextCheck:
    """Decodes tokens with the tokenizers that are on this machine; nothing is fetched.

    ``unread`` counts the rows that could not be decoded, by reason.
    """

    def __init__(self) -> None:
        self.unread: Counter[str] = Counter()
        self._tokenizers: dict[tuple[str, str], PromptEncoder | str] = {}

    def faults(self, row: Mapping[str, Any]) -> Iterator[str]:
        """At most one: the text is not what the tokens say. Imported rows have no tokens of their own."""
        if row["token_ids"] is None or row["text"] is None or row["claim"] == IMPORTED:
            return
        tokenizer = self._tokenizer(row["model"], row["revision"])
        if isinstance(tokenizer, str):
            self.unread[tokenizer] += 1
        elif tokenizer.decode(row["token_ids"]) != row["text"]:
            yield "the text is not that of its tokens"

    def _tokenizer(self, model: str, revision: str) -> PromptEncoder | str:
        """A model's tokenizer, or why there is none."""
        key = (model, revision)
        if key not in self._tokenizers:
            try:
                self._tokenizers[key] = load_tokenizer(resolve_checkpoint(model, revision, offline=True))
            except InputError as error:
                self._tokenizers[key] = str(error)
        return self._tokenizers[key]
