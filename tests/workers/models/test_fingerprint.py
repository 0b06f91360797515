from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dlmgrid.workers.models.fingerprint import cache_folder, weight_fingerprint
from dlmgrid.workers.models.synthetic import tiny_config, write_random_checkpoint


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLMGRID_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_same_weights_have_one_fingerprint_wherever_they_lie_and_however_they_are_cut(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "a", tiny_config())
    write_random_checkpoint(tmp_path / "b", tiny_config(), num_shards=3)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    first = weight_fingerprint(tmp_path / "a")
    assert len(first) == 24
    assert {weight_fingerprint(tmp_path / "b"), weight_fingerprint(tmp_path / "c")} == {first}


def test_one_changed_bit_setting_or_tokenizer_changes_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_random_checkpoint(folder, tiny_config())
    seen = [weight_fingerprint(folder)]
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    os.utime(weights, ns=(1, 1))
    seen.append(weight_fingerprint(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    seen.append(weight_fingerprint(folder))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["truncation"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    seen.append(weight_fingerprint(folder))
    assert len(set(seen)) == 4


def test_block_length_is_no_part_of_it(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "a", tiny_config(block_length=32))
    write_random_checkpoint(tmp_path / "b", tiny_config(block_length=4))
    assert weight_fingerprint(tmp_path / "a") == weight_fingerprint(tmp_path / "b")


def test_it_is_read_from_the_cache_while_files_keep_size_and_time(tmp_path: Path, own_cache: Path) -> None:
    write_random_checkpoint(tmp_path / "model", tiny_config())
    first = weight_fingerprint(tmp_path / "model")
    (record,) = (own_cache / "fingerprints").iterdir()
    record.write_text("from-the-cache\n")
    assert weight_fingerprint(tmp_path / "model") == "from-the-cache"
    os.utime(tmp_path / "model" / "model.safetensors", ns=(5, 5))
    assert weight_fingerprint(tmp_path / "model") == first


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("DLMGRID_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "dlmgrid"
