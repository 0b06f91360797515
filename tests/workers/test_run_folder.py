"""A run folder is read as its manifest says, and what differs from it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item
from dlmgrid.workers.run_folder import open_run, read_generations, read_inputs, read_manifest
from dlmgrid.workers.tables import SCHEMA_VERSION
from dlmgrid.workers.testing.stored_rows import commit_items, make_row, small_cell, write_run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    commit_items(tmp_path, "words-0.jsonl", [Item(item_id="a", prompt="a"), Item(item_id="b", prompt="b")])
    return write_run(tmp_path, [make_row(small_cell(), "a", [4, 5, 6])])


def test_blank_lines_and_a_torn_last_line_are_no_damage(out: Path) -> None:
    manifest = out / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace("\n", "\n\n") + '{"unit')
    found = read_manifest(out)
    assert (len(found.shards), len(found.inputs), found.num_torn) == (1, 1, 6)
    assert read_generations(out).num_rows == 1


@pytest.mark.parametrize(
    "line",
    [
        "garbage",
        "[]",
        "5",
        '{"dropped": ["x"]}',
        f'{{"inputs": 3, "schema_version": {SCHEMA_VERSION}}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_line_is_named(out: Path, line: str) -> None:
    with (out / "manifest.jsonl").open("a") as manifest:
        manifest.write(line + "\n")
    with pytest.raises(InputError, match=r"manifest.jsonl:3: damaged"):
        open_run(out)


@pytest.mark.parametrize(("name", "value"), [("num_bytes", "x"), ("keys", [[["a"], 0]]), ("unit_key", None)])
def test_a_line_of_wrong_types_is_damaged(out: Path, name: str, value: object) -> None:
    lines = (out / "manifest.jsonl").read_text().splitlines()
    changed = json.dumps({**json.loads(lines[1]), name: value})
    (out / "manifest.jsonl").write_text(f"{lines[0]}\n{changed}\n")
    with pytest.raises(InputError, match=r"manifest.jsonl:2: damaged \(TypeError"):
        open_run(out)


def test_a_manifest_that_is_a_folder_of_another_version_or_gone_is_named(out: Path) -> None:
    manifest = out / "manifest.jsonl"
    text = manifest.read_text()
    manifest.write_text(text.replace(f'"schema_version":{SCHEMA_VERSION}', '"schema_version":99'))
    with pytest.raises(InputError, match=f"schema version 99, this is {SCHEMA_VERSION}"):
        open_run(out)
    manifest.unlink()
    with pytest.raises(InputError, match=r"1 files in generations/ and no manifest.jsonl"):
        read_generations(out)
    manifest.mkdir()
    with pytest.raises(InputError, match=r"manifest.jsonl cannot be read \(Is a directory\)"):
        read_generations(out)


def test_inputs_are_read_as_recorded_and_what_follows_is_left_out(out: Path) -> None:
    path = out / "inputs" / "words-0.jsonl"
    (file,) = open_run(out).inputs.values()
    written = path.read_bytes()
    path.write_bytes(written + written)
    assert [item.item_id for item in read_inputs(out, file)] == ["a", "b"]
    for content, fault in ((written[:-1], "has .* bytes"), (written.replace(b'"a"', b'"c"'), "has sha256")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"words-0.jsonl {fault}.* restore it"):
            read_inputs(out, file)


def test_a_document_that_is_no_object_is_refused() -> None:
    with pytest.raises(InputError, match="item 'a': document is of type int, not dict"):
        Item(item_id="a", prompt="a", document=3)  # type: ignore[arg-type]
