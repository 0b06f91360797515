from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.commit_rules import build_rule
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models import catalog
from dlmgrid.workers.models.catalog import known_models, resolve_checkpoint
from dlmgrid.workers.models.checkpoint import expected_tensors, read_config
from dlmgrid.workers.models.families import FAMILIES
from dlmgrid.workers.models.family import Family


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


def test_a_file_is_told_from_the_folder_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"model\.safetensors' is a file; a checkpoint is the folder"):
        resolve_checkpoint(str(tmp_path / "model.safetensors"))


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
    models = {model.name.partition("/")[2]: model for model in known_models()}
    assert models["SDAR-4B-Chat"].weight_bytes == 8_822_848_512
    assert models["SDAR-8B-Chat"].weight_bytes == 16_381_470_720
    assert models["SDAR-8B-Chat"].cache == "block (exact)"
    billions = {"LLaDA2.0-mini": 16.256, "Fast_dLLM_v2_1.5B": 1.5437, "Fast_dLLM_v2_7B": 7.6156}
    for name, count in billions.items():
        digits = len(str(count).partition(".")[2])
        assert round(models[name].parameters / 1e9, digits) == count
    gibibytes = {"Nemotron-Labs-Diffusion-8B": 15.81, "Nemotron-Labs-Diffusion-14B": 25.16}
    for name, size in gibibytes.items():
        assert round(models[name].weight_bytes / 2**30, 2) == size
    tensors = {"Fast_dLLM_v2_1.5B": 338, "Nemotron-Labs-Diffusion-14B": 363}
    for name, number in tensors.items():
        assert len(expected_tensors(models[name].config)) == number


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_family_reads_what_it_writes(family: Family, tmp_path: Path) -> None:
    for model in family.published:
        folder = tmp_path / model.name.replace("/", "-")
        folder.mkdir()
        values = family.config_json(model.config)
        (folder / "config.json").write_text(json.dumps(values))
        weight_map = dict.fromkeys(expected_tensors(model.config), "shard.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (folder / "shard.safetensors").touch()
        assert read_config(folder) == model.config


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_published_decoder_builds_its_rule(family: Family) -> None:
    block_length = family.published[0].block_length or 8  # Dream: the whole generation
    for rule in (family.decoder, *family.variants.values()):
        cell = Cell(
            model="m", benchmark="b", prompt_version="1", method="none", budget=0, temperature=0.7,
            block_length=block_length, gen_length=8, **rule.settings,
        )  # fmt: skip
        assert build_rule(cell).confidence == rule.confidence
    with pytest.raises(
        InputError, match=f"'none-such' is not a published decoder of the family {family.name}"
    ):
        family.published_decoder("none-such")


def test_families_are_read_without_torch() -> None:
    code = (
        "import sys; from dlmgrid.workers.models.families import FAMILIES, known_models; "
        "assert all(model.parameters for model in known_models()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])
