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

from dlmgrid.workers.cell import digest
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import write_whole


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
        for name, kind in (("item_id", str), ("assistant_prefix", str), ("document", dict)):
            if not isinstance(getattr(self, name), kind):
                found = type(getattr(self, name)).__name__
                raise InputError(f"item {self.item_id!r}: {name} is of type {found}, not {kind.__name__}")


def inputs_file_name(benchmark: str, prompt_version: str, num_fewshot: int) -> str:
    """The file of ``inputs/`` that holds a benchmark's items in one prompt form, as the driver names it."""
    form = digest([benchmark, prompt_version, num_fewshot])
    return f"{benchmark.replace('/', '_')}-{form[:12]}.jsonl"


def encode_items(items: Iterable[Item]) -> bytes:
    """Items as JSON lines, each ended by a line feed; documents keep the column order of their source."""
    lines = [json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items]
    return "".join(lines).encode()


def write_items(path: Path, items: Iterable[Item]) -> None:
    """Write ``items`` as JSON lines, replacing the file whole. Documents keep the column order of their source."""
    write_whole(path, encode_items(items))


def read_items(path: Path) -> Iterator[Item]:
    """Read what :func:`write_items` wrote. Raises InputError naming the file, or its line that is not an item."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); restore it, or run the same grid again, which writes it"
        ) from error
    yield from parse_items(content, path)


def parse_items(content: bytes, path: Path) -> Iterator[Item]:
    """The items of a file's ``content``. Raises InputError naming ``path`` and the line that is not an item."""
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n") if content else [], 1):
        try:
            yield Item(**json.loads(line))
        except (TypeError, ValueError, RecursionError, InputError) as error:
            raise InputError(
                f"{path}:{number}: not a benchmark item ({error}); restore the file, or use a new --out"
            ) from error
