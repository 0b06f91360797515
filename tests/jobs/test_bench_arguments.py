"""Options of the benches: what cannot be is one line and exit code 2 before anything is measured, an older file of
results stays as it is until there are new ones, and every option says what it is."""

from __future__ import annotations

import argparse
import errno
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dlmgrid.jobs import bench, bench_drafting, bench_families, bench_folding
from dlmgrid.jobs.bench_arguments import MOST_DRAFTS, check_results, real_number, whole_number
from dlmgrid.jobs.bench_shapes import shape_config
from dlmgrid.workers.drafting.order_checkpoint import REFERENCE, find_order_checkpoint, save_token_model
from dlmgrid.workers.drafting.spiffy_graph import DraftGraph, GraphKey, GraphNode, save_graph
from dlmgrid.workers.drafting.token_model import TokenModel, TokenShape
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.synthetic import tiny_config, tiny_family_config, write_random_checkpoint

BENCHES = (bench, bench_folding, bench_drafting, bench_families)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny checkpoint, in which nothing can be measured."""

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("options that cannot be were measured with")

    for module, name in (
        (bench, "measure_ceilings"), (bench_folding, "measure_ceilings"), (bench_folding, "load_engine"),
        (bench_drafting, "growth_rows"), (bench_families, "bench_model"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, measured)
    monkeypatch.setenv("DLMGRID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.chdir(tmp_path)
    write_random_checkpoint(tmp_path / "model", tiny_config())
    return tmp_path


def refusal(module: ModuleType, words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a bench refuses options in."""
    try:
        code = module.main(words)
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


def usual(module: ModuleType, folder: Path) -> list[str]:
    """Options that a bench takes, results in ``folder``."""
    out = ["--out", str(folder / "out.json")]
    model = ["--checkpoint", str(folder / "model")]
    return {
        bench: [
            "--device",
            "cpu",
            "--shapes",
            "tiny",
            "--prefixes",
            "64",
            "--chat-template",
            "chatml",
            *model,
            *out,
        ],
        bench_folding: ["--device", "cpu", "--shapes", "tiny", "--items", "1", *model, *out],
        bench_drafting: ["--device", "cpu"],
        bench_families: ["--device", "cpu", "--folder", str(folder), *out],
    }[module]


OUT_OF_BOUNDS = [
    (bench, "--budgets", "-1"), (bench, "--budgets", "two"), (bench, "--budgets", str(MOST_DRAFTS + 1)),
    (bench, "--stock-budgets", "-1"), (bench, "--part-budgets", "1.5"), (bench, "--decode-budgets", "0"),
    (bench, "--ratios", "1.5"), (bench, "--ratios", "nan"), (bench, "--taus", "-0.1"), (bench, "--taus", "inf"),
    (bench, "--repeats", "0"), (bench, "--items", "0"), (bench, "--items", "2001"), (bench, "--gen-length", "0"),
    (bench, "--in-flight", "0"), (bench, "--prefixes", "-32"), (bench, "--prefixes", "33"),
    (bench, "--prefixes", "40960"), (bench, "--gen-length", "4096"), (bench, "--device", "tpu"),
    (bench, "--checkpoint", "none"), (bench, "--chat-template", "none"), (bench, "--drafters", "spiffy=none.json"),
    (bench, "--drafters", "spot=pyproject.toml"), (bench, "--drafters", "spot_gamma=reference,gamma=much"),
    (bench, "--drafters", "spot_gamma=reference,gamma=2"), (bench, "--drafters", "spot_sets=a.safetensors"),
    (bench, "--shapes", "none"),
    (bench_folding, "--budgets", "0"), (bench_folding, "--budgets", str(MOST_DRAFTS + 1)),
    (bench_folding, "--ratios", "-0.5"), (bench_folding, "--taus", "nan"), (bench_folding, "--tau", "-1"),
    (bench_folding, "--repeats", "0"), (bench_folding, "--items", "-1"), (bench_folding, "--gen-length", "0"),
    (bench_folding, "--gen-length", "4096"), (bench_folding, "--prefix", "33"), (bench_folding, "--prefix", "-32"),
    (bench_folding, "--prefix", "40960"), (bench_folding, "--device", "tpu"), (bench_folding, "--checkpoint", "none"),
    (bench_folding, "--graph", "none.json"), (bench_folding, "--graph", "model/config.json"),
    (bench_folding, "--order", "none.safetensors"), (bench_folding, "--order", "model/model.safetensors"),
    (bench_folding, "--prompts", "none.json"),
    (bench_drafting, "--budgets", "0"), (bench_drafting, "--budgets", "64"), (bench_drafting, "--in-flight", "0"),
    (bench_drafting, "--temperatures", "-1"), (bench_drafting, "--temperatures", "inf"),
    (bench_drafting, "--repeats", "0"), (bench_drafting, "--device", "tpu"),
    (bench_families, "--budget", "0"), (bench_families, "--gen-length", "0"), (bench_families, "--device", "cuda:x"),
    (bench_families, "--folder", "none"), (bench_families, "--models", "owner/none"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "option", "value"), OUT_OF_BOUNDS)
def test_a_value_that_cannot_be_is_refused(
    module: ModuleType, option: str, value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(module, [*usual(module, folder), option, value], capsys)
    assert value.rpartition("=")[2] in line
    assert not (folder / "out.json").exists()


@NO_GPU
@pytest.mark.parametrize("module", BENCHES)
def test_a_device_that_is_missing_is_refused(
    module: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "CUDA devices here" in refusal(module, [*usual(module, folder), "--device", "cuda"], capsys)


@pytest.mark.parametrize("module", [bench_folding, bench_families])
def test_triton_on_a_cpu_is_refused(
    module: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    line = refusal(module, [*usual(module, folder), "--kernels", "triton"], capsys)
    assert "triton" in line


@pytest.mark.parametrize("module", [bench, bench_folding])
def test_a_checkpoint_that_sees_its_whole_canvas_is_refused(
    module: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random_checkpoint(folder / "canvas", tiny_family_config("llada", block_length=8))
    line = refusal(module, [*usual(module, folder), "--checkpoint", str(folder / "canvas")], capsys)
    assert "whole canvas" in line
    damaged = folder / "model" / "config.json"
    damaged.write_text("{")
    assert str(damaged) in refusal(module, usual(module, folder), capsys)


@pytest.mark.parametrize(
    ("module", "option"),
    [(bench, "--drafters=spot={}"), (bench_folding, "--order={}")],
    ids=["bench", "folding"],
)
def test_an_order_model_of_other_weights_is_refused(
    module: ModuleType, option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = TokenModel(TokenShape(vocab_size=300, width=16, num_layers=1, table_width=8))
    save_token_model(folder / "order.safetensors", model, target="f" * 24, card={})
    line = refusal(module, [*usual(module, folder), option.format(folder / "order.safetensors")], capsys)
    assert "other weights" in line
    with pytest.raises(AssertionError, match="were measured"):
        module.main([*usual(module, folder), option.format(REFERENCE)])


def test_a_graph_of_fewer_nodes_than_a_budget_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = GraphKey(
        weight_fingerprint="", decoder="static", commits_per_step=1, threshold=None, temperature=0.0,
        noise="commit_count", block_length=4,
    )  # fmt: skip
    node = GraphNode(pairs=((0, 0),), parents=(-1,), count=1)
    graph = DraftGraph(
        key=key, selection="marginal_gain", budget=12, num_roots=1, calibration={}, nodes=(node,)
    )
    save_graph(graph, folder / "graph.json")
    words = [*usual(bench, folder), f"--drafters=spiffy={folder / 'graph.json'}", "--tables=decode"]
    line = refusal(bench, [*words, "--decode-budgets", "8", "20"], capsys)
    assert "was calibrated for 12 nodes, --decode-budgets asks for 20" in line
    with pytest.raises(AssertionError, match="were measured"):
        bench.main([*words, "--decode-budgets", "8", "12"])


@pytest.mark.parametrize(
    "text",
    ["", "no JSON", "{}", "[]", "1", "[[1, 2], []]", "[[1], 2]", "[[1, 2.0]]", "[[true]]", '[["1"]]', "[[-1]]",
     "[[1, 300]]", "[[[1]]]", "\x00"],
)  # fmt: skip
def test_prompts_that_are_no_token_ids_of_the_checkpoint_are_refused(
    text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "prompts.json").write_text(text)
    line = refusal(
        bench_folding, [*usual(bench_folding, folder), "--prompts", str(folder / "prompts.json")], capsys
    )
    assert "--prompts" in line and "--save-prompts" in line


def test_prompts_of_the_checkpoint_are_read(folder: Path) -> None:
    (folder / "prompts.json").write_text("[[1, 2], [299], [3]]")
    found = bench_folding.read_prompts(folder / "prompts.json", 2, 300)
    assert [prompt.token_ids for prompt in found] == [(1, 2), (299,)]


def test_prompts_are_saved_whole_or_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "made" / "prompts.json"
    words = ["--device", "cpu", "--checkpoint", REFERENCE, "--save-prompts", str(file)]
    assert "--items" in refusal(bench_folding, words, capsys)
    words += ["--items", "2"]
    assert "unknown benchmark" in refusal(bench_folding, [*words, "--benchmark", "none"], capsys)
    assert not file.exists()
    assert bench_folding.main(words) == 0
    assert [bool(ids) for ids in json.loads(file.read_text())] == [True, True]
    assert "is a folder" in refusal(bench_folding, [*words, "--save-prompts", str(file.parent)], capsys)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (bench_folding, []), (bench_folding, ["--shapes"]), (bench_folding, ["--items", "0"]),
        (bench_folding, ["--shapes", "tiny", "--order", REFERENCE]),
        (bench, ["--tables", "parts"]), (bench, ["--tables", "folding", "--part-budgets", "0"]),
        (bench, ["--tables", "drafting", "--shapes", "SDAR-4B"]),
    ],
)  # fmt: skip
def test_what_measures_nothing_is_refused_and_leaves_the_older_file(
    module: ModuleType, words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out.json"
    out.write_text("older")
    refusal(module, ["--device", "cpu", "--out", str(out), *words], capsys)
    assert out.read_text() == "older"


@pytest.mark.parametrize("module", [bench, bench_folding, bench_families])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    module: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").write_text("text")
    outs = [folder, folder / "file" / "out.json", folder / ("n" * 250)]
    outs += [path for path in (Path("/proc/out.json"), Path("/dev/null")) if path.parent.is_dir()]
    for out in outs:
        assert "--out" in refusal(module, [*usual(module, folder), "--out", str(out)], capsys)


def test_the_folder_of_the_results_is_made_and_an_older_file_stays(tmp_path: Path) -> None:
    check_results(tmp_path / "made" / "out.json")
    assert list((tmp_path / "made").iterdir()) == []
    (tmp_path / "older.json").write_text("older")
    check_results(tmp_path / "older.json")
    assert (tmp_path / "older.json").read_text() == "older"
    with pytest.raises(InputError, match="is a folder"):
        check_results(tmp_path / "made")


@pytest.mark.parametrize("module", [bench, bench_folding, bench_families])
def test_an_older_file_stays_where_measuring_ends_in_an_error(module: ModuleType, folder: Path) -> None:
    (folder / "out.json").write_text("older")
    with pytest.raises(AssertionError, match="were measured"):
        module.main(usual(module, folder))
    assert (folder / "out.json").read_text() == "older"


def test_tables_that_all_fail_leave_the_older_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such class")

    ceilings = bench.Ceilings(bytes_per_second=1e9, flops_per_second=1e9)
    monkeypatch.setattr(bench, "measure_ceilings", lambda *_: ceilings)
    monkeypatch.setattr(bench, "stock_model", broken)
    (folder / "out.json").write_text("older")
    assert bench.main([*usual(bench, folder), "--tables", "stock"]) == 1
    assert (folder / "out.json").read_text() == "older"
    assert "nothing was measured" in capsys.readouterr().out


def test_what_the_machine_refuses_while_measuring_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise InputError("numerics: exact does not hold here")

    monkeypatch.setattr(bench_folding, "measure_ceilings", refuses)
    line = refusal(bench_folding, usual(bench_folding, folder), capsys)
    assert line == "error: numerics: exact does not hold here\n"


def test_results_are_written_whole_or_the_older_ones_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Path, _: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(bench_families, "bench_model", lambda *_: {})
    monkeypatch.setattr(bench_families, "print_rows", lambda *_, **__: None)
    (folder / "out.json").write_text("older")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert bench_families.main(usual(bench_families, folder)) == 5
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1 and "No space left" in printed
    assert (folder / "out.json").read_text() == "older"
    assert bench_families.main(usual(bench_families, folder)) == 0
    assert json.loads((folder / "out.json").read_text())["device"].startswith("cpu")
    assert not list(folder.glob("*.part"))


def test_prompts_of_which_no_pass_has_drafts_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_folding, "load_engine", lambda *_, **__: None)
    monkeypatch.setattr(bench_folding, "drafted_passes", lambda *_: [])
    words = [*usual(bench_folding, folder), "--shapes"]
    assert "no pass had drafts" in refusal(bench_folding, words, capsys)
    assert not (folder / "out.json").exists()


@pytest.mark.parametrize("module", BENCHES)
def test_every_option_says_what_it_is(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    parser: argparse.ArgumentParser = module.make_parser()
    assert [action.dest for action in parser._actions if not action.help] == []
    with pytest.raises(SystemExit) as end:
        module.main(["--help"])
    assert end.value.code == 0
    assert "--device" in capsys.readouterr().out


def test_kernels_and_dtype_follow_the_device() -> None:
    options = bench_folding.make_parser().parse_args(["--device", "cpu"])
    assert options.kernels is None and options.dtype is None
    assert (
        bench_folding.default_kernels("cpu") == "torch"
        and bench_folding.default_dtype("cuda:1") == "bfloat16"
    )


@pytest.mark.parametrize(
    ("read", "taken", "refused"),
    [
        (whole_number(1), ["1", "900"], ["0", "-1", "1.0", "", "1e3"]),
        (whole_number(0, 2), ["0", "2"], ["3", "-1"]),
        (real_number(), ["0", "1e9"], ["-1e-9", "nan", "inf", "x"]),
        (real_number(1), ["0", "1", ".5"], ["1.01", "-0.1"]),
    ],
)
def test_bounds_are_part_of_what_is_taken(
    read: Callable[[str], float], taken: list[str], refused: list[str]
) -> None:
    assert [read(text) for text in taken] == [float(text) for text in taken]
    for text in refused:
        with pytest.raises(argparse.ArgumentTypeError, match="is no"):
            read(text)


def test_the_order_model_that_ships_is_for_any_target(folder: Path) -> None:
    bench_folding.check_target(find_order_checkpoint(REFERENCE), folder / "model")
    assert shape_config("tiny").block_length == 32


def test_benches_need_no_package_of_the_cluster_or_of_scoring() -> None:
    names = "bench, bench_folding, bench_drafting, bench_families"
    code = (
        "import sys\n"
        "for name in ('ray', 'lm_eval', 'evalplus', 'typer'):\n"
        "    sys.modules[name] = None\n"
        f"from dlmgrid.jobs import {names}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
