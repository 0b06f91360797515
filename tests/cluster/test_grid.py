"""The grid file: what it accepts, and the one line it gives for what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlmgrid.cluster.grid import parse_grid, read_grid
from dlmgrid.workers.errors import InputError

GOOD = """
name: demo
models: [reference, {path: weights/8b, revision: abc, dtype: bfloat16, block_length: 32, chat_template: chatml}]
benchmarks: [words, {name: gsm8k, limit: 8, num_fewshot: 0, gen_length: 128}]
temperatures: [0, 0.7]
methods: [none, ssd, {name: confidence_tree, budgets: [8]}]
budgets: [6, 12]
"""


def change(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_short_and_long_forms_mean_the_same() -> None:
    grid = parse_grid(GOOD, "grid.yaml")
    assert [model.path for model in grid.models] == ["reference", "weights/8b"]
    assert grid.benchmarks[1].limit == 8
    assert [method.budgets for method in grid.methods] == [None, None, [8]]
    assert [decoder.name for decoder in grid.decoder] == ["published"]
    assert grid.resources.num_gpus == 0
    long = parse_grid(GOOD.replace("[words,", "[{name: words},"), "grid.yaml")
    assert long == grid


def test_the_digest_ignores_resources_only() -> None:
    plain = parse_grid(GOOD, "g")
    assert parse_grid(GOOD + "resources: {num_actors: 3}", "g").digest == plain.digest
    assert parse_grid(GOOD + "seed: 1", "g").digest != plain.digest


def test_decoders_are_an_axis() -> None:
    grid = parse_grid(GOOD + "decoder: [static, {name: threshold, threshold: 0.9}]", "g")
    assert [(decoder.name, decoder.threshold) for decoder in grid.decoder] == [
        ("static", None),
        ("threshold", 0.9),
    ]


def test_decoders_take_their_own_settings() -> None:
    grid = parse_grid(
        GOOD
        + "decoder: [{name: factor, factor: 1.0, fused_commit: true}, "
        + "{name: threshold, threshold: 0.9, comparison: fast_dllm}]",
        "g",
    )
    found = [(d.name, d.factor, d.threshold, d.comparison, d.fused_commit) for d in grid.decoder]
    assert found == [("factor", 1.0, None, None, True), ("threshold", None, 0.9, "fast_dllm", False)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "g: the grid is empty"),
        ("[1, 2]", "g: the grid is empty or not a mapping"),
        ("name: [", "g: not valid YAML"),
        (GOOD + "name: twice", "g: not valid YAML: key 'name' is given twice"),
        (GOOD + "temperature: 1", "g: unknown key 'temperature'; did you mean 'temperatures'?"),
        (change("limit: 8", "limits: 8"), r"g: benchmarks\[1\]: unknown key 'limits'; did you mean 'limit'?"),
        (GOOD + "resources: {actors: 1}", "g: resources: unknown key 'actors'; did you mean 'num_actors'?"),
        (change("name: demo", ""), "g: name: missing; add it"),
        (change("[0, 0.7]", "[]"), "g: temperatures: the list is empty; name at least one"),
        (change("[none, ssd, {name: confidence_tree, budgets: [8]}]", "[]"), "g: methods: the list is empty"),
        (change("[6, 12]", "[6, -1]"), r"g: budgets\[1\]: budget -1 is impossible; .* is 0 to 4096"),
        (change("[8]", "[4097]"), r"g: methods\[2\].budgets\[0\]: budget 4097 is impossible"),
        (change("[6, 12]", "[6, many]"), r"g: budgets\[1\]: should be a valid integer .*\(found 'many'\)"),
        (change("[6, 12]", "[true]"), r"g: budgets\[0\]: should be a valid integer"),
        (change("[6, 12]", "6"), r"g: budgets: should be a valid list \(found 6\)"),
        (change("budgets: [6, 12]", ""), "g: method 'ssd' needs budgets; add budgets:"),
        (change("[0, 0.7]", "[-0.1]"), r"g: temperatures\[0\]: should be greater than or equal to 0 \(found -0.1\)"),
        (change("[0, 0.7]", "[1.0e-39]"), r"g: temperatures\[0\]: temperature must be 0, or between 0.0001 and 10000"),
        (change("[0, 0.7]", "[1.0e+300]"), r"g: temperatures\[0\]: temperature must be 0, or between 0.0001 and 10000"),
        (change("[0, 0.7]", "[.nan]"), r"g: temperatures\[0\]: should be a finite number"),
        (change("bfloat16", "fp8"), r"g: models\[1\].dtype: 'fp8' is not one of 'float32' or 'bfloat16'"),
        (GOOD + "decoder: {name: threshold}", r"g: decoder\[0\]: threshold must lie strictly between 0 and 1"),
        (GOOD + "decoder: {name: threshold, threshold: 1.0}", "strictly between 0 and 1 .found 1.0."),
        (GOOD + "decoder: {name: static, threshold: 0.9}", "threshold belongs to the decoders"),
        (GOOD + "decoder: {name: entropy_bounded, threshold: 1, commits_per_step: 2}", "belongs to the decoders"),
        (GOOD + "decoder: {name: factor}", r"g: decoder\[0\]: the factor decoder needs a factor; add factor: 1.0"),
        (GOOD + "decoder: {name: factor, factor: 0}", r"g: decoder\[0\].factor: should be greater than 0 \(found 0\)"),
        (GOOD + "decoder: {name: factor, factor: 1, threshold: 0.9}", "threshold belongs to the decoders"),
        (GOOD + "decoder: {name: factor, factor: 1, commits_per_step: 2}", "belongs to the decoders static"),
        (GOOD + "decoder: {name: entropy_bounded}", r"bound of the entropies in nats, must be above 0 \(found None\)"),
        (GOOD + "decoder: {name: entropy_bounded, threshold: .nan}", r"must be above 0 \(found nan\)"),
        (GOOD + "decoder: {name: entropy_bounded, threshold: .inf}", r"must be above 0 \(found inf\)"),
        (GOOD + "decoder: {name: entropy_bounded, threshold: 1, confidence: plain}", "compares entropies; remove conf"),
        (GOOD + "decoder: {name: static, factor: 1}", "factor belongs to the factor decoder"),
        (GOOD + "decoder: {name: static, comparison: sdar}", "comparison belongs to the threshold decoder"),
        (GOOD + "decoder: {name: threshold, threshold: 0.9, comparison: ge}", "'ge' is not one of 'sdar', 'fast_dllm'"),
        (GOOD + "decoder: {name: threshold, threshold: 0.9, comparison: jetengine}",
         r"g: decoder\[0\].comparison: jetengine opens the leftmost positions .*; use sdar"),
        (GOOD + "decoder: {name: static, fused_commit: 1}", r"g: decoder\[0\].fused_commit: should be a valid boolean"),
        (GOOD + "verification: exact", "g: verification: 'exact' is not one of 'coupled', 'uncoupled'"),
        (GOOD + "kernels: metal", "g: kernels: 'metal' is not one of 'torch' or 'triton'"),
        (GOOD + "resources: {device: cuda}", "g: numerics: exact on a GPU needs kernels: triton"),
        (change("budgets: [8]}", "budgets: [8], fold: {tau: -0.1}}"),
         r"fold.tau: should be a number of at least 0, or a list of one for each layer \(found -0.1\)"),
        (change("budgets: [8]}", "budgets: [8], fold: {gate: parent}}"), r"g: methods\[2\].fold.tau: missing"),
        (change("budgets: [8]}", "budgets: [8], fold: {tau: 0.1, gates: parent}}"), "did you mean 'gate'"),
        (change("budgets: [8]}", "budgets: [8], fold: {tau: 0.1, recheck: later}}"),
         r"g: methods\[2\].fold.recheck: should be true, false or pipelined \(found .later.\)"),
        (change("budgets: [8]}", "budgets: [8], fold: {tau: 0.1}}") + "decoder: {name: static, window: full}",
         "g: fold and window do not go together"),
        (change("budgets: [8]}", "budgets: [8], product_tau: 0.5, fold: {tau: 0.1}}"),
         r"g: methods\[2\]: fold and product_tau do not go together; remove one"),
        (GOOD.replace("none", "{name: none, fold: {tau: 0.1}}"), "method none drafts nothing that could fold"),
        (GOOD + "resources: {drafts: device}", "g: resources: drafts: device needs kernels: triton"),
        (GOOD + "resources: {drafts: gpu}", "resources.drafts: .*'host' or 'device'"),
        (GOOD + "resources: {unit_seconds: 1.0e-9}", "resources.unit_seconds: .*greater than or equal to 1"),
        (GOOD + "resources: {wait_seconds: .inf}", "resources.wait_seconds: .*finite"),
        (GOOD + "resources: {gpus_per_actor: 1}", "g: resources: gpus_per_actor needs device: cuda"),
        (GOOD + "resources: {device: cuda, gpus_per_actor: 0}", "needs gpus_per_actor above 0"),
        (GOOD + "repeats: 0", "g: repeats: should be greater than or equal to 1"),
        ("[a]: 2", "g: not valid YAML: a key must be plain text"),
        ("? {a: b}\n: 1", "g: not valid YAML: a key must be plain text"),
        ("[" * 5000, "g: not valid YAML: nested too deeply"),
        (GOOD + "limit: " + "9" * 5000, r"g: not valid YAML: '9+\.\.\.' cannot be read as int .* line 8"),
        (GOOD + "limit: 0x" + "f" * 5000, r"g: not valid YAML: the number '0xf+\.\.\.' is too large"),
        (GOOD + 'limit: !!int "x"', "g: not valid YAML: 'x' cannot be read as int"),
        (GOOD + 'limit: !!int ""', "g: not valid YAML: '' cannot be read as int"),
        (GOOD + 'limit: !!float "x"', "g: not valid YAML: 'x' cannot be read as float"),
        (change("[0, 0.7]", "[1e-6]"), r"g: temperatures\[0\]: YAML reads 1e-6 as text; write 1.0e-6$"),
        (GOOD + "gen_length: 1e3", r"g: gen_length: YAML reads 1e3 as text; write 1000$"),
        (change("[none, ssd,", "[3, ssd,"), r"g: methods\[0\]: should be a mapping of keys to values, or a name"),
        (GOOD + "resources: 3", r"g: resources: should be a mapping of keys to values .found 3.$"),
        (GOOD + "resources: {num_actors: 1000000}", "g: resources.num_actors: should be less than or equal to 4096"),
        (GOOD + "stop: " + "x" * 5000, r"g: stop: 'x+\.\.\.x+' is not one of 'eos' or 'full'$"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_grid(text, "g")
    assert "\n" not in str(caught.value)


def test_a_method_may_fold_with_one_threshold_or_one_a_layer() -> None:
    one = (
        parse_grid(change("budgets: [8]}", "budgets: [8], fold: {tau: 0.1, recheck: true}}"), "g")
        .methods[2]
        .fold
    )
    assert one is not None
    assert (one.values, one.gate, one.recheck) == ([0.1], "parent", True)
    later = (
        parse_grid(change("budgets: [8]}", "budgets: [8], fold: {tau: 0.1, recheck: pipelined}}"), "g")
        .methods[2]
        .fold
    )
    assert later is not None
    assert later.recheck == "pipelined"
    many = (
        parse_grid(change("budgets: [8]}", "budgets: [8], fold: {tau: [0, 0.2], gate: source}}"), "g")
        .methods[2]
        .fold
    )
    assert many is not None
    assert (many.values, many.gate) == ([0.0, 0.2], "source")


def test_exact_numerics_on_a_gpu_take_the_triton_kernels() -> None:
    grid = parse_grid(GOOD + "kernels: triton\nresources: {device: cuda}", "g")
    assert (grid.kernels, grid.numerics, grid.resources.device) == ("triton", "exact", "cuda")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "host"),
        ("kernels: triton", "host"),
        ("kernels: triton\nresources: {device: cuda}", "device"),
        ("kernels: triton\nresources: {device: cuda, drafts: host}", "host"),
        ("numerics: fast\nresources: {device: cuda}", "host"),
        ("kernels: triton\nresources: {drafts: device}", "device"),
    ],
)
def test_trees_grow_on_the_gpu_where_the_kernels_are_there(text: str, place: str) -> None:
    assert parse_grid(GOOD + text, "g").draft_place == place


@pytest.mark.parametrize(("text", "value"), [("1.0e-3", 1e-3), ("1.0e+2", 100.0), ("2.5e+0", 2.5)])
def test_the_way_of_writing_that_an_error_names_is_read(text: str, value: float) -> None:
    assert parse_grid(change("[0, 0.7]", f"[{text}]"), "g").temperatures == [value]


def test_a_date_is_a_name_and_merge_keys_fill_in_what_an_entry_leaves_out() -> None:
    assert parse_grid(change("name: demo", "name: 2020-99-99"), "g").name == "2020-99-99"
    merged = change(
        "[words, {name: gsm8k, limit: 8, num_fewshot: 0, gen_length: 128}]",
        "[&short {name: words, limit: 8, gen_length: 64}, {<<: *short, name: gsm8k, limit: 4}]",
    )
    entries = parse_grid(merged, "g").benchmarks
    assert [(entry.name, entry.limit, entry.gen_length) for entry in entries] == [
        ("words", 8, 64),
        ("gsm8k", 4, 64),
    ]
    with pytest.raises(InputError, match="key 'limit' is given twice"):
        parse_grid(merged.replace("limit: 4}", "limit: 4, limit: 5}"), "g")


def test_a_missing_grid_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such grid file"):
        read_grid(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        read_grid(tmp_path)
