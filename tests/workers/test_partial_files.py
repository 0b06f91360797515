"""Files that others read while they are replaced: old or new, never half, and no writer takes another's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlmgrid.workers.partial_files import partial_path, write_whole

ROOT = Path(__file__).resolve().parents[2]


def test_every_writer_has_a_name_of_its_own(tmp_path: Path) -> None:
    names = {partial_path(tmp_path / "rows.parquet") for _ in range(50)}
    assert len(names) == 50
    assert all(path.parent == tmp_path and path.suffix == ".part" for path in names)


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.json"
    write_whole(path, "ä\n")
    write_whole(path, b"new\n")
    assert path.read_bytes() == b"new\n"
    write = Path.write_bytes

    def write_half(self: Path, content: bytes) -> int:
        write(self, content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "newer\n")
    assert path.read_bytes() == b"new\n"
    assert [file.name for file in tmp_path.iterdir()] == ["progress.json"]


def test_no_other_module_makes_up_names_of_partial_files() -> None:
    own = re.compile(r"\.(part|tmp)[\"']|\{os\.getpid\(\)\}")
    found = [
        str(path.relative_to(ROOT))
        for folder in ("workers", "cluster", "jobs")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if own.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["workers/partial_files.py"]
