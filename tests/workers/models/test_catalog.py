from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models import catalog
from dlmgrid.workers.models.catalog import known_models, resolve_checkpoint


def test_a_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    assert resolve_checkpoint(str(tmp_path / "model")) == (tmp_path / "model").resolve()
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("model") == (tmp_path / "model").resolve()


def test_the_reference_model_is_the_packaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "REFERENCE_FOLDER", tmp_path / "reference")
    with pytest.raises(InputError, match="reference model is not in this installation"):
        resolve_checkpoint("reference")
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "config.json").write_text("{}")
    assert resolve_checkpoint("reference") == tmp_path / "reference"


@pytest.mark.parametrize("name", ["./nowhere", "no-such-model", "/a/b/c", "a/b/c", "~/nowhere", ""])
def test_a_name_that_leads_nowhere(name: str) -> None:
    with pytest.raises(InputError, match="no folder here and no hub repository"):
        resolve_checkpoint(name)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/model"])
def test_a_name_that_no_path_can_have(name: str) -> None:
    with pytest.raises(InputError, match=r"is no usable path .*; give another") as caught:
        resolve_checkpoint(name)
    assert len(str(caught.value)) < 300


def test_what_is_no_hub_repository_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the shipped model has no revision 'abc'; remove `revision`"):
        resolve_checkpoint("reference", "abc")
    with pytest.raises(InputError, match=r"the local folder .* has no revision 'abc'"):
        resolve_checkpoint(str(tmp_path), "abc")
    assert resolve_checkpoint(str(tmp_path), "") == tmp_path.resolve()


def test_a_name_that_the_hub_does_not_allow_is_not_asked_for() -> None:
    with pytest.raises(InputError, match="is no name of a hub repository"):
        resolve_checkpoint("owner/na me")


def test_offline_and_not_cached_names_the_remedy(tmp_path: Path) -> None:
    code = (
        "from dlmgrid.workers.errors import InputError\n"
        "from dlmgrid.workers.models.catalog import resolve_checkpoint\n"
        "try:\n    resolve_checkpoint('owner/name')\n"
        "except InputError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
        env={"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "", "HOME": str(tmp_path)},
    )
    assert done.stdout.startswith(
        "model: 'owner/name' is not in the local cache and the hub cannot be reached"
    )
    assert "dlmgrid prefetch" in done.stdout
    assert "HF_HOME" in done.stdout


def test_a_cached_snapshot_is_found_offline(tmp_path: Path) -> None:
    commit = "0" * 40
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "hub" / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    code = (
        "from dlmgrid.workers.models.catalog import resolve_checkpoint; "
        "print(resolve_checkpoint('owner/name'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
        env={"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "", "HOME": str(tmp_path)},
    )
    assert done.stdout.strip() == str(snapshot)


def test_the_catalogue_agrees_with_the_published_sizes() -> None:
    sizes = {model.name: model.weight_bytes for model in known_models()}
    assert sizes["JetLM/SDAR-4B-Chat"] == 8_822_848_512
    assert sizes["JetLM/SDAR-8B-Chat"] == 16_381_470_720
    assert all(model.cache == "block (exact)" for model in known_models())
