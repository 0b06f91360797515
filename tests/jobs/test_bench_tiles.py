"""The program that the pinned table of tiles is made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from dlmgrid.jobs import bench_tiles
from dlmgrid.kernels.gemm.tiles import GATED_TILES, PLAIN_TILES

PRODUCTS = {"small": {"qkv": (64, 64), "gate_up": (128, 64)}}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_tiles, "PRODUCTS", PRODUCTS)
    monkeypatch.setattr(bench_tiles, "CACHE_BYTES", 1)
    monkeypatch.setattr(bench_tiles, "PLAIN_TILES", PLAIN_TILES[2:4])
    monkeypatch.setattr(bench_tiles, "GATED_TILES", GATED_TILES[2:4])
    monkeypatch.setattr(
        bench_tiles, "choose_descriptor_tile", lambda *size: (GATED_TILES if size[-1] else PLAIN_TILES)[2]
    )


def test_times_every_tile_and_holds_them_to_one_result(
    triton_device: torch.device, small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del small
    out = tmp_path / "new" / "tiles.json"
    options = ["--device", triton_device.type, "--rows", "5", "--repeats", "1", "--out", str(out)]
    assert bench_tiles.main(options) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["product"], row["same_bits"], row["tiles"]) for row in rows] == [
        ("qkv", 2, 2),
        ("gate_up", 2, 2),
    ]
    assert set(rows[0]["tiles_us"]) == {"32x64/128/4w8s", "32x64/128/4w4s"}
    assert all(time > 0 for row in rows for time in row["tiles_us"].values())
    assert "vendor_with_silu_us" in rows[1]
    printed = capsys.readouterr().out
    assert "same bits 2 of 2" in printed
    assert f"written to {out}" in printed


def test_an_entry_is_proposed_where_a_tile_beats_the_chosen_one() -> None:
    tiles = [bench_tiles.tile_name(tile) for tile in PLAIN_TILES[:2]]
    row = {
        "outputs": 6144, "inputs": 4096, "gated": False, "rows": 192, "chosen": tiles[1], "fastest": tiles[0],
        "tiles_us": {tiles[0]: 20.0, tiles[1]: 30.0},
    }  # fmt: skip
    (entry,) = bench_tiles.proposals([row])
    key, value = entry.split(": ", 1)
    assert key == "(6144, 4096, False, 192)"
    assert value == "DescriptorTile((64,), 32, 128, 4, 8, swapped=False),"
    row["tiles_us"] = {tiles[0]: 29.9, tiles[1]: 30.0}
    assert list(bench_tiles.proposals([row])) == []


def test_tiles_have_names_of_their_own_and_waste_little() -> None:
    for tiles in (PLAIN_TILES, GATED_TILES):
        assert len({bench_tiles.tile_name(tile) for tile in tiles}) == len(tiles)
    for gated in (False, True):
        for rows in (1, 32, 192, 1344):
            found = bench_tiles.tiles_for(rows, gated)
            assert found
            assert all(tile.rows <= max(64, 2 * rows) for tile in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "'0' is no whole number of 1 to 8192"),
        (["--shapes", "SDAR-9B"], "invalid choice: 'SDAR-9B'"),
        (["--device", "cpu"], "kernels: triton needs a CUDA device"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    try:
        code = bench_tiles.main(options)
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
