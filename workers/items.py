"""Benchmark items as they travel: one JSON object a line in ``OUT/inputs/<benchmark>.jsonl``.

The driver side loads a benchmark once and writes this file; workers read prompts from it, the scorer reads the
gold answers from it, so neither touches a data set cache or the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlmgrid.workers.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One benchmark item.

    Exactly one of ``messages`` (chat: a list of ``{"role", "content"}``, rendered by the model's template) and
    ``prompt`` (raw text, encoded as it is) is set. ``assistant_prefix`` is put after the rendered prompt and
    belongs to the prompt, not to the answer. ``document`` is the data set's own row, read by the scorer only.
    """

    item_id: str
    messages: list[dict[str, str]] | None = None
    prompt: str | None = None
    assistant_prefix: str = ""
    document: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise InputError(f"item {self.item_id!r}: give either messages or a raw prompt")


def write_items(path: Path, items: Iterable[Item]) -> None:
    """Write ``items`` as JSON lines, replacing the file whole. Documents keep the column order of their source."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("w", encoding="utf-8") as file:
        for item in items:
            file.write(json.dumps(asdict(item), ensure_ascii=False) + "\n")
    temporary.replace(path)


def read_items(path: Path) -> Iterator[Item]:
    """Read what :func:`write_items` wrote. Raises InputError naming the file and line that is not an item."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield Item(**json.loads(line))
            except (TypeError, ValueError) as error:
                raise InputError(f"{path}:{number}: not a benchmark item ({error})") from error
