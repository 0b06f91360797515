"""The shape of the project: which way imports point, what the wheel holds, what the README promises."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections import deque
from pathlib import Path

import pytest

from dlmgrid.jobs.cli import COMMANDS, module_name

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "workers", "cluster", "jobs")  # an import may point to the left, never to the right
HEAVY = {"torch", "triton", "transformers"}
OPTIONAL_FOR_WORKERS = {"ray", "lm_eval", "evalplus", "datasets", "pydantic", "typer"}


def _sources(*folders: str) -> dict[str, Path]:
    """Module name → file, of everything under the given folders."""
    found = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("dlmgrid", *parts)).removesuffix(".__init__")] = path
    return found


def _imports(path: Path, *, top_level_only: bool) -> set[str]:
    """Names of the modules a file imports, absolute; ``from a import b`` counts as ``a`` and ``a.b``."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    nodes = _top_level(tree.body) if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _top_level(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that run at import, into ``if`` and ``try`` but not under ``if TYPE_CHECKING``."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            found += _top_level(node.body) + _top_level(node.orelse)
        elif isinstance(node, ast.Try):
            found += _top_level(node.body + node.orelse + node.finalbody)
            for handler in node.handlers:
                found += _top_level(handler.body)
    return found


def test_imports_point_one_way() -> None:
    upward = []
    for name, path in _sources(*FOLDERS).items():
        own = FOLDERS.index(name.split(".")[1])
        for imported in _imports(path, top_level_only=False):
            parts = imported.split(".")
            if parts[0] == "dlmgrid" and len(parts) > 1 and parts[1] in FOLDERS[own + 1 :]:
                upward.append(f"{name} imports {imported}")
    assert not upward


def test_the_walk_sees_an_upward_import(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    from dlmgrid.cluster import store\n    import torch\n")
    assert "dlmgrid.cluster.store" in _imports(path, top_level_only=False)
    assert _imports(path, top_level_only=True) == set()
    path.write_text("try:\n    import torch\nexcept ImportError:\n    torch = None\n")
    assert _imports(path, top_level_only=True) == {"torch"}


def test_only_absolute_imports_through_the_one_namespace() -> None:
    bare = [
        f"{path.relative_to(ROOT)} imports {imported}"
        for path in (*_sources(*FOLDERS).values(), *sorted((ROOT / "tests").rglob("*.py")))
        for imported in _imports(path, top_level_only=False)
        if imported.partition(".")[0] in FOLDERS and path != Path(__file__).resolve()
    ]
    assert not bare


def test_driver_side_imports_no_torch() -> None:
    """Whatever cluster/ and the entry points pull in at import, at any depth, is free of torch."""
    modules = _sources(*FOLDERS)
    starts = [name for name in modules if name.startswith("dlmgrid.cluster.")]
    starts += ["dlmgrid.jobs.cli", "dlmgrid.jobs.grid"]
    starts += [module_name(name) for name in COMMANDS if name != "decode"]
    assert set(starts) <= set(modules)
    parent: dict[str, str] = dict.fromkeys(starts, "")
    queue = deque(starts)
    heavy = []
    while queue:
        name = queue.popleft()
        if name not in modules:
            continue
        for imported in _imports(modules[name], top_level_only=True):
            if imported.partition(".")[0] in HEAVY:
                chain, at = [imported], name
                while at:
                    chain.append(at)
                    at = parent[at]
                heavy.append(" <- ".join(chain))
            elif imported.startswith("dlmgrid.") and imported not in parent:
                parent[imported] = name
                queue.append(imported)
    assert not heavy


def test_workers_and_kernels_import_without_the_service_packages() -> None:
    found = [
        f"{name} imports {imported}"
        for name, path in _sources("workers", "kernels").items()
        for imported in _imports(path, top_level_only=True)
        if imported.partition(".")[0] in OPTIONAL_FOR_WORKERS
    ]
    assert not found


@pytest.mark.parametrize("folder", FOLDERS)
def test_top_folders_are_no_packages_of_their_own(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()
    assert (ROOT / "dlmgrid" / folder).resolve() == ROOT / folder


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_sub_folder_with_sources_is_a_package(folder: str) -> None:
    sub_folders = {path.parent for path in (ROOT / folder).rglob("*.py")} - {ROOT / folder}
    assert [str(path.relative_to(ROOT)) for path in sub_folders if not (path / "__init__.py").exists()] == []


def test_model_classes_and_our_kernels_import_together() -> None:
    """transformers imports Hugging Face's ``kernels`` with every model class; ours must not stand in its way."""
    pytest.importorskip("transformers")
    hub_kernels = pytest.importorskip("kernels")
    assert Path(hub_kernels.__file__).parent != ROOT / "kernels"
    program = (
        "from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM\n"
        "import kernels, dlmgrid.kernels.philox.reference as ours\n"
        "assert hasattr(kernels, 'get_kernel'), kernels\n"
        "print(ours.__name__, kernels.__file__)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("dlmgrid.kernels.philox.reference")


def _tracked_files() -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so which files belong to the project is not known")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in listing.stdout.split("\0") if name and (ROOT / name).exists()]


def test_wheel_holds_exactly_the_files_of_the_tree(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    pytest.importorskip("build")
    export = tmp_path / "export"
    for name in _tracked_files():
        target = export / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    result = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(export)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"dlmgrid/{name}" for name in _tracked_files() if name.partition("/")[0] in FOLDERS}
    expected |= {"dlmgrid/__init__.py", "dlmgrid/py.typed"}
    assert held == expected


def test_no_machine_paths_or_caches_are_tracked() -> None:
    pattern = re.compile(r"(?<![\w.~-])/(?:home|root|Users|work|opt|mnt)/[\w.-]+")
    allowed = re.compile(r"/(?:home|mnt)/(?:ray|user|you)\b|/mnt/[\w-]+")  # container and example paths
    found = []
    for name in _tracked_files():
        path = ROOT / name
        if (
            path.is_symlink()
            or path.suffix in {".safetensors", ".parquet"}
            or path == Path(__file__).resolve()
        ):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            hits = [hit for hit in pattern.findall(line) if not allowed.fullmatch(hit)]
            found += [f"{name}:{number}: {hit}" for hit in hits]
    assert not found


def test_the_tree_stays_small_enough_to_upload() -> None:
    """A Ray working_dir is the whole tree, with the links as copies."""
    size = sum((ROOT / name).stat().st_size for name in _tracked_files() if not (ROOT / name).is_symlink())
    assert size < 25 * 2**20


def test_every_command_and_target_of_the_readme_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"^(?:\s*\$ )?dlmgrid ([a-z-]+)", text, re.MULTILINE))
    commands |= set(re.findall(r"`dlmgrid ([a-z-]+)", text))
    assert commands <= set(COMMANDS)
    assert set(COMMANDS) <= commands, "each command is explained in the README"
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test", "lint", "gpu-test"} <= targets <= known


def test_readme_links_point_to_files() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    assert [target for target in targets if not (ROOT / target).exists()] == []
