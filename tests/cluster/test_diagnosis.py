"""The findings of ``doctor``: what fails, what only warns, and that each says what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import dlmgrid
from dlmgrid.cluster.diagnosis import (
    OFFLINE_FLAGS,
    Level,
    check_data,
    check_links,
    check_memory,
    check_offline_flags,
    check_out,
    check_packages,
    check_python,
    check_ray,
    check_shadow,
    judge_version,
    kernel_findings,
    shadowing_folder,
)


def test_an_old_python_fails() -> None:
    assert [finding.level for finding in check_python((3, 10))] == [Level.FAIL]
    assert [finding.level for finding in check_python((3, 12))] == [Level.OK]


def test_a_checkout_without_its_links_says_how_to_get_them_back(tmp_path: Path) -> None:
    for name in ("cluster", "workers", "kernels"):
        (tmp_path / name).mkdir()
    (tmp_path / "jobs").write_text("../jobs")  # what git writes without symlinks
    (finding,) = check_links(tmp_path)
    assert finding.level is Level.FAIL
    assert finding.state.endswith("has lost its links to jobs")
    assert "core.symlinks" in finding.remedy
    assert [finding.level for finding in check_links(Path(dlmgrid.__file__).parent)] == [Level.OK]


def test_a_folder_around_a_clone_is_no_place_to_call_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(dlmgrid.__file__).resolve().parent.parent
    (tmp_path / "dlmgrid" / "dlmgrid").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(root)])  # not editable: the package comes first
    assert list(check_shadow(tmp_path)) == []
    monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere")])
    assert list(check_shadow(tmp_path / "elsewhere")) == []
    (finding,) = check_shadow(tmp_path)
    assert finding.level is Level.FAIL and "another folder" in finding.remedy
    assert shadowing_folder(root) is None


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.10.1", Level.FAIL),
        ("2.11", Level.OK),
        ("2.13.0+cpu", Level.OK),
        ("2.14.0", Level.WARN),
        ("3.0rc1", Level.WARN),
    ],
)
def test_versions_are_held_against_the_tested_range(version: str, level: Level) -> None:
    assert judge_version("torch", version, "2.11", "2.13").level is level


def test_every_installed_package_is_judged() -> None:
    subjects = [finding.subject for finding in check_packages()]
    assert subjects[0] == "ray"
    assert len(subjects) == len(set(subjects))


def test_token_mode_without_a_token_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    first = next(check_ray())
    assert (first.level, "RAY_AUTH_TOKEN" in first.remedy) == (Level.FAIL, True)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "very-secret")
    findings = list(check_ray())
    assert findings[0].level is Level.OK
    assert not any("very-secret" in finding.state for finding in findings)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "missing"))
    assert any(
        finding.level is Level.FAIL and "which is not there" in finding.state for finding in check_ray()
    )


def test_kernels_are_found_usable_or_not_by_dtype() -> None:
    reasons = {
        "float32": "",
        "bfloat16": "kernels: Tesla has no bfloat16 (compute capability 7.5); use dtype: float32",
    }
    usable, refused = kernel_findings(reasons)
    assert (usable.level, usable.state) == (Level.OK, "triton works here for float32")
    assert (refused.level, refused.remedy) == (Level.WARN, "use dtype: float32")
    assert refused.state == "bfloat16: Tesla has no bfloat16 (compute capability 7.5)"
    missing = "kernels: triton is not installed; pip install triton, or kernels: torch"
    assert [one.level for one in kernel_findings({"float32": missing})] == [Level.WARN]


def test_offline_flags_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OFFLINE_FLAGS:
        monkeypatch.delenv(name, raising=False)
    assert [finding.level for finding in check_offline_flags()] == [Level.OK]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [finding.level for finding in check_offline_flags()] == [Level.WARN]


def test_data_and_output_folders_are_looked_at_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DLMGRID_DATA", raising=False)
    monkeypatch.setenv("DLMGRID_CACHE", str(tmp_path / "cache"))
    (unfilled,) = check_data(None)
    assert (unfilled.level, unfilled.state) == (Level.OK, "the pinned public sources")
    assert "dlmgrid prefetch" in unfilled.remedy
    (tmp_path / "cache" / "data").mkdir(parents=True)
    assert [str(tmp_path / "cache/data") in finding.state for finding in check_data(None)] == [True]
    assert [finding.level for finding in check_data(str(tmp_path / "none"))] == [Level.FAIL]
    assert [finding.level for finding in check_data(str(tmp_path))] == [Level.OK]
    assert [finding.level for finding in check_out(tmp_path / "a" / "b")] == [Level.OK]
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    assert [finding.level for finding in check_out(tmp_path / "file")] == [Level.FAIL]


def test_memory_is_read_from_the_system() -> None:
    assert any("GiB free" in finding.state for finding in check_memory())
