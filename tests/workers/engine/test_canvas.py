"""The canvas engine against transformers' stock classes, with and without caches, and against itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlmgrid.workers.cell import CANVAS_CACHES
from dlmgrid.workers.engine.canvas import CanvasEngine, load_canvas_engine
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.testing.tiny_canvas import CANVAS_FAMILIES, write_tiny_canvas

START, LENGTH, CANVAS = 45, 16, 109
"""A block that begins and ends inside key tiles."""


def known(config: ModelConfig, logits: Tensor) -> Tensor:
    return logits[:, [token for token in range(config.vocab_size) if token != config.mask_token_id]]


@pytest.fixture(params=CANVAS_FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ModelConfig, Path]:
    config = write_tiny_canvas(tmp_path / "model", request.param, scale=0.08, num_shards=2)
    return config, tmp_path / "model"


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_tokens(*shape: int, seed: int, masked: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < masked, -1, tokens).int()


def canvas_of(seed: int, length: int = CANVAS, start: int = START) -> Tensor:
    """A prompt, a block and what follows it masked."""
    return torch.cat([random_tokens(start, seed=seed), torch.full((length - start,), -1)]).int()


def run(
    engine: CanvasEngine,
    blocks: Tensor,
    slots: list[int],
    refresh: list[bool] | bool = False,
    start: int = START,
) -> Tensor:
    flags = [refresh] * len(slots) if isinstance(refresh, bool) else refresh
    starts = torch.full((len(slots),), start)
    return engine.forward(blocks, torch.tensor(slots), starts, torch.tensor(flags))


def branch_of(canvas: Tensor, block: Tensor, start: int = START) -> Tensor:
    whole = canvas.clone()
    whole[start : start + len(block)] = block
    return whole


def test_equals_the_stock_decoder_alone_and_packed(
    case: tuple[ModelConfig, Path], stock_canvas: Callable[..., Any]
) -> None:
    config, folder = case
    shift = int(config.family == "dream")
    stock = stock_canvas(config, folder)
    engine = load_canvas_engine(folder, cache="none", num_slots=2, max_length=CANVAS)
    canvases = [canvas_of(1), canvas_of(2, CANVAS - 20)]
    drafts = random_tokens(3, LENGTH, seed=3, masked=0.5)
    for slot, canvas in enumerate(canvases):
        engine.begin(slot, canvas.tolist())
    rows = slice(START - shift, START - shift + LENGTH)
    pack = [(0, 0), (1, 0), (0, 1), (1, 2), (0, 2)]
    expected = [
        known(config, stock.logits(branch_of(canvases[slot], drafts[draft]))[rows]) for slot, draft in pack
    ]
    packed = run(engine, drafts[[draft for _, draft in pack]], [slot for slot, _ in pack])
    for (slot, draft), hidden, logits in zip(pack, packed, expected, strict=True):
        assert (known(config, engine.logits(hidden)) - logits).abs().max() <= 1e-5
        alone = run(engine, drafts[draft : draft + 1], [slot])[0]
        assert torch.equal(alone, hidden)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_equals_the_stock_decoder_with_a_cache_frozen_at_the_block(
    case: tuple[ModelConfig, Path], cache: str, stock_canvas: Callable[..., Any]
) -> None:
    config, folder = case
    shift = int(config.family == "dream")
    stock = stock_canvas(config, folder)
    engine = load_canvas_engine(folder, cache=cache, num_slots=2, max_length=CANVAS)
    canvas = canvas_of(1)
    engine.begin(1, canvas.tolist())
    fresh = torch.full((1, LENGTH), -1, dtype=torch.int32)
    refreshed = known(config, engine.logits(run(engine, fresh, [1], True)[0]))
    whole = stock.refresh(canvas)[START - shift : START - shift + LENGTH]
    assert (refreshed - known(config, whole)).abs().max() <= 1e-5

    is_computed = torch.zeros(CANVAS, dtype=torch.bool)
    is_computed[START : START + LENGTH if cache == "dual" else None] = True
    drafts = random_tokens(3, LENGTH, seed=3, masked=0.5)
    packed = run(engine, drafts, [1] * 3)
    for draft, hidden in zip(drafts, packed, strict=True):
        branch = branch_of(canvas, draft)
        ours = known(config, engine.logits(hidden[shift:]))
        expected = known(config, stock.cached(branch, is_computed))[: LENGTH - shift]
        assert (ours - expected).abs().max() <= 1e-5
        assert bool(hidden[:shift].isnan().all())
        uncached = known(config, stock.logits(branch))[START : START + LENGTH - shift]
        assert (ours - uncached).abs().max() > 1e-4  # the cache is an approximation
        assert torch.equal(run(engine, draft[None], [1])[0][shift:], hidden[shift:])


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cache", CANVAS_CACHES)
def test_a_branch_keeps_its_bits_in_any_pack(cache: str, threads: int, tmp_path: Path) -> None:
    torch.set_num_threads(threads)
    write_tiny_canvas(tmp_path / "model", "llada")
    engine = load_canvas_engine(tmp_path / "model", cache=cache, num_slots=3, max_length=200)
    lengths, starts = (200, 61, 130), (150, 29, 64)
    block = torch.full((1, 32), -1, dtype=torch.int32)
    first = []
    for slot in range(3):
        engine.begin(slot, canvas_of(slot, lengths[slot], starts[slot]).tolist())
        first.append(run(engine, block, [slot], True, starts[slot])[0])
    drafts = random_tokens(7, 32, seed=5, masked=0.6)
    slots = [2, 0, 0, 1, 2, 2, 1]
    where = torch.tensor([starts[slot] for slot in slots])
    packed = engine.forward(drafts, torch.tensor(slots), where, torch.zeros(7, dtype=torch.bool))
    for branch, slot in enumerate(slots):
        alone = run(engine, drafts[branch : branch + 1], [slot], False, starts[slot])[0]
        assert torch.equal(alone, packed[branch])
    for slot in range(
        3
    ):  # a refresh is what the cached pass over the same state gives, alone or beside others
        assert torch.equal(run(engine, block, [slot], False, starts[slot])[0], first[slot])
    engine.begin(1, canvas_of(1, lengths[1], starts[1]).tolist())
    beside = torch.cat([drafts[:3], block])
    refresh = torch.tensor([False, False, False, True])
    mixed = engine.forward(beside, torch.tensor([2, 0, 0, 1]), torch.tensor([64, 150, 150, 29]), refresh)
    assert torch.equal(mixed[3], first[1])
    assert torch.equal(mixed[:3], packed[:3])


def test_fast_numerics_agree_closely(case: tuple[ModelConfig, Path]) -> None:
    _, folder = case
    drafts = random_tokens(2, LENGTH, seed=3, masked=0.5)
    found = []
    for numerics in ("exact", "fast"):
        engine = load_canvas_engine(folder, cache="dual", num_slots=1, max_length=CANVAS, numerics=numerics)
        engine.begin(0, canvas_of(1).tolist())
        run(engine, torch.full((1, LENGTH), -1, dtype=torch.int32), [0], True)
        found.append(run(engine, drafts, [0, 0])[:, 1:])
    assert (found[0] - found[1]).abs().max() <= 1e-4


def test_branches_that_cannot_be_run_are_refused(tmp_path: Path) -> None:
    write_tiny_canvas(tmp_path / "model", "llada")
    engine = load_canvas_engine(tmp_path / "model", cache="dual", num_slots=1, max_length=64)
    block = torch.full((1, 8), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match="a canvas of 500 tokens; the buffers hold 64"):
        engine.begin(0, [1] * 500)
    with pytest.raises(ValueError, match="token ids 1 to 900; want -1 to 260"):
        engine.begin(0, [1, 900])
    engine.begin(0, [1] * 20 + [-1] * 16)
    with pytest.raises(ValueError, match="made for block None, not 20; refresh it"):
        run(engine, block, [0], False, 20)
    run(engine, block, [0], True, 20)
    with pytest.raises(ValueError, match="made for block 20, not 28; refresh it"):
        run(engine, block, [0], False, 28)
    with pytest.raises(ValueError, match="block 30 to 38 of a canvas of 36"):
        run(engine, block, [0], True, 30)
    with pytest.raises(ValueError, match="slot 1; the engine has 1"):
        run(engine, block, [1], True, 20)
    with pytest.raises(ValueError, match="refreshed beside another branch"):
        run(engine, block.expand(2, -1), [0, 0], [True, False], 20)
    with pytest.raises(InputError, match="cache: 'paged' is not one of none, prefix, dual"):
        load_canvas_engine(tmp_path / "model", cache="paged", num_slots=1, max_length=64)
    with pytest.raises(InputError, match="prompt and generation need 5000 positions, the model has 2048"):
        load_canvas_engine(tmp_path / "model", cache="none", num_slots=1, max_length=5000)
