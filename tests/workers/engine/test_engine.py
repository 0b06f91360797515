"""The engine against transformers' stock classes, and against itself: one row, one value."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dlmgrid.workers.engine.engine import Engine, load_engine
from dlmgrid.workers.engine.memory import check_memory, padded_length, plan_memory
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.checkpoint import ModelConfig, stream_tensors
from dlmgrid.workers.models.synthetic import tiny_config, write_random_checkpoint

GEOMETRIES = {
    "qk-norm-untied": tiny_config(),
    "qk-norm-tied": tiny_config(tie_word_embeddings=True, block_length=4),
    "plain-tied": tiny_config(tie_word_embeddings=True, qk_norm=False, block_length=16),
    "plain-untied-one-kv-head": tiny_config(
        qk_norm=False, num_key_value_heads=1, head_dim=24, block_length=8
    ),
    "qk-norm-all-heads": tiny_config(num_key_value_heads=4, head_dim=80, block_length=64),
}
LENGTH = 320


@pytest.fixture(params=GEOMETRIES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ModelConfig, Path]:
    config = GEOMETRIES[request.param]
    write_random_checkpoint(tmp_path / "model", config, num_shards=2 if config.qk_norm else 1)
    return config, tmp_path / "model"


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(
    engine: Engine, blocks: Tensor, slots: list[int], starts: list[int], store: list[bool] | bool
) -> Tensor:
    flags = [store] * len(slots) if isinstance(store, bool) else store
    return engine.forward(
        blocks.int(),
        torch.tensor(slots).int(),
        torch.tensor(starts).int(),
        torch.tensor(flags, dtype=torch.bool),
    )


def random_tokens(config: ModelConfig, *shape: int, seed: int = 0, masked: float = 0.0) -> Tensor:
    """Random ids; each is masked (-1) with probability ``masked``."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < masked, -1, tokens)


def prefill(engine: Engine, tokens: Tensor, slot: int) -> Tensor:
    blocks = tokens.view(-1, engine.block_length)
    starts = [engine.block_length * i for i in range(len(blocks))]
    return run(engine, blocks, [slot] * len(blocks), starts, True)


def oracle(config: ModelConfig, folder: Path, tokens: Tensor) -> Tensor:
    """Logits [S, V] of transformers' stock decoder under an explicit block-causal mask."""
    import transformers

    kind = "Qwen3" if config.qk_norm else "Llama"
    settings = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_word_embeddings,
        max_position_embeddings=config.max_position_embeddings,
        attn_implementation="eager",
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
    tensors = dict(stream_tensors(folder))
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    blocks = torch.arange(len(tokens)) // config.block_length
    mask = torch.zeros(1, 1, len(tokens), len(tokens))
    mask.masked_fill_(blocks[:, None] < blocks[None, :], -torch.inf)
    ids = torch.where(tokens < 0, config.mask_token_id, tokens)[None]
    with torch.inference_mode():
        logits: Tensor = model(ids, attention_mask=mask, use_cache=False).logits[0]
    return logits


def known_columns(config: ModelConfig, logits: Tensor) -> Tensor:
    keep = [token for token in range(config.vocab_size) if token != config.mask_token_id]
    return logits[:, keep]


def test_equals_the_stock_decoder_alone_packed_and_with_a_cached_prefix(
    case: tuple[ModelConfig, Path],
) -> None:
    config, folder = case
    length = config.block_length
    engine = load_engine(folder, num_slots=3, max_length=LENGTH)
    prompt = random_tokens(config, 128, seed=1)
    drafts = random_tokens(config, 3, length, seed=2, masked=0.5)
    whole = [torch.cat([prompt, draft]) for draft in drafts]
    expected = [known_columns(config, oracle(config, folder, tokens)) for tokens in whole]

    hidden = prefill(engine, prompt, 1)
    assert not hidden.is_inference()  # callers may work on it in place
    logits = known_columns(config, engine.logits(hidden.flatten(0, 1)))
    assert (logits - expected[0][:128]).abs().max() <= 1e-5
    for segment in range(3):  # alone, with a cached prefix
        alone = run(engine, drafts[segment : segment + 1], [1], [128], False)[0]
        assert (known_columns(config, engine.logits(alone)) - expected[segment][128:]).abs().max() <= 1e-5
    packed = run(engine, drafts, [1, 1, 1], [128] * 3, False)  # branches of one sample
    for segment in range(3):
        logits = known_columns(config, engine.logits(packed[segment]))
        assert (logits - expected[segment][128:]).abs().max() <= 1e-5
    engine.reset(1)
    together = torch.cat([prompt.view(-1, length), drafts[:1]])  # prefix and block in one pass
    starts = [length * i for i in range(len(together))]
    in_pass = run(engine, together, [1] * len(together), starts, [True] * (len(together) - 1) + [False])
    assert (known_columns(config, engine.logits(in_pass[-1])) - expected[0][128:]).abs().max() <= 1e-5
    assert length == together.shape[1]


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize(("length", "threads"), [(4, 1), (8, 1), (16, 1), (32, 1), (64, 1), (4, 2), (32, 2)])
def test_a_segment_keeps_its_bits_in_any_pack_order_and_cache_state(
    length: int, threads: int, tmp_path: Path
) -> None:
    torch.set_num_threads(threads)
    num = 33 if threads == 1 else 9
    config = tiny_config(block_length=length, num_key_value_heads=2, head_dim=24)
    write_random_checkpoint(tmp_path / "model", config)
    engine = load_engine(tmp_path / "model", num_slots=6, max_length=LENGTH)
    starts, prompts = [], []
    for slot in range(5):
        num_tokens = length * ((37 * slot + 10) // length)
        prompts.append(random_tokens(config, num_tokens, seed=slot))
        starts.append(num_tokens)
        if num_tokens:
            prefill(engine, prompts[-1], slot)
    slots = [(3 * i) % 5 for i in range(num)]
    blocks = random_tokens(config, num, length, seed=9, masked=0.6)
    at = [starts[slot] for slot in slots]
    alone = torch.cat(
        [run(engine, blocks[i : i + 1], slots[i : i + 1], at[i : i + 1], False) for i in range(num)]
    )
    logits = torch.stack([engine.logits(rows) for rows in alone])
    for pack in (2, 3, 5, 8, num):
        packed = run(engine, blocks[:pack], slots[:pack], at[:pack], False)
        assert torch.equal(packed, alone[:pack]), f"pack of {pack}"
        assert torch.equal(engine.logits(packed.flatten(0, 1)), logits[:pack].flatten(0, 1)), (
            f"logits of {pack}"
        )
    backwards = list(range(num - 1, -1, -1))
    reverse = run(engine, blocks[backwards], [slots[i] for i in backwards], [at[i] for i in backwards], False)
    assert torch.equal(reverse, alone[backwards])
    for count in (1, 3, 7, 33):
        assert torch.equal(engine.logits(alone.flatten(0, 1)[:count]), logits.flatten(0, 1)[:count])

    # the same prompt block by block, in one pass, and in one pass with the block that follows it
    slot, prompt = 4, prompts[4]
    engine.reset(5)
    pieces = prompt.view(-1, length)
    one_by_one = [run(engine, pieces[i : i + 1], [5], [length * i], True) for i in range(len(pieces))]
    follow = run(engine, blocks[:1], [5], [len(prompt)], False)
    engine.reset(5)
    assert torch.equal(prefill(engine, prompt, 5), torch.cat(one_by_one))
    assert torch.equal(run(engine, blocks[:1], [5], [len(prompt)], False), follow)
    assert torch.equal(run(engine, blocks[:1], [slot], [len(prompt)], False), follow)
    engine.reset(5)
    both = torch.cat([pieces, blocks[:1]])
    in_pass = run(
        engine, both, [5] * len(both), [length * i for i in range(len(both))], [True] * len(pieces) + [False]
    )
    assert torch.equal(in_pass[-1:], follow)
    assert torch.equal(in_pass[:-1], torch.cat(one_by_one))


@pytest.mark.usefixtures("restored_threads")
def test_bits_do_not_depend_on_threads(tmp_path: Path) -> None:
    config = tiny_config(hidden_size=1152, num_hidden_layers=1, block_length=32)
    write_random_checkpoint(tmp_path / "model", config)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        engine = load_engine(tmp_path / "model", num_slots=1, max_length=128)
        prefill(engine, random_tokens(config, 96), 0)
        found.append(
            engine.logits(run(engine, random_tokens(config, 1, 32, masked=1.0), [0], [96], False)[0])
        )
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_pass_that_does_not_store_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    config = tiny_config()
    write_random_checkpoint(tmp_path / "model", config)
    engine = load_engine(tmp_path / "model", num_slots=2, max_length=LENGTH)
    prefill(engine, random_tokens(config, 96), 0)
    block = random_tokens(config, 1, 32, seed=5, masked=0.5)
    before = run(engine, block, [0], [96], False)
    run(engine, random_tokens(config, 4, 32, seed=6), [0] * 4, [96, 96, 32, 0], False)
    assert engine.cached_length(0) == 96
    assert torch.equal(run(engine, block, [0], [96], False), before)
    run(
        engine, random_tokens(config, 1, 32, seed=7), [0], [32], True
    )  # stored again: what follows is dropped
    assert engine.cached_length(0) == 64
    assert not torch.equal(run(engine, block, [0], [64], False), before)


def test_logits_are_minus_infinity_for_the_mask_token_and_the_padding(tmp_path: Path) -> None:
    config = tiny_config()
    write_random_checkpoint(tmp_path / "model", config)
    engine = load_engine(tmp_path / "model", num_slots=1, max_length=64)
    logits = engine.logits(torch.randn(7, config.hidden_size))
    assert logits.shape == (7, 320)
    assert engine.vocab_padded == 320
    assert not logits.requires_grad
    logits.mul_(1.0)  # a plain tensor: callers may work on it in place
    absent = logits == -torch.inf
    assert absent[:, config.vocab_size :].all()
    assert absent[:, config.mask_token_id].all()
    assert int(absent.sum()) == 7 * (320 - config.vocab_size + 1)


def test_a_literal_mask_id_in_the_prompt_is_a_token(tmp_path: Path) -> None:
    config = tiny_config()
    write_random_checkpoint(tmp_path / "model", config)
    engine = load_engine(tmp_path / "model", num_slots=1, max_length=64)
    block = random_tokens(config, 1, 32)
    masked, literal = block.clone(), block.clone()
    masked[0, 3], literal[0, 3] = -1, config.mask_token_id
    assert torch.equal(run(engine, masked, [0], [0], False), run(engine, literal, [0], [0], False))


@pytest.mark.parametrize(
    ("slots", "starts", "store", "message"),
    [
        ([2], [0], False, "slot 2"),
        ([0], [16], False, "off the grid"),
        ([0], [128], False, "beyond 128"),
        ([0], [32], False, "reads 32 positions of slot 0, 0 are stored"),
        ([0], [32], True, "only 0 positions before it"),
        ([0, 0], [0, 0], True, "same block of a slot"),
    ],
)
def test_segments_that_cannot_be_run_are_refused(
    slots: list[int], starts: list[int], store: bool, message: str, tmp_path: Path
) -> None:
    config = tiny_config()
    write_random_checkpoint(tmp_path / "model", config)
    engine = load_engine(tmp_path / "model", num_slots=2, max_length=100)
    with pytest.raises(ValueError, match=message):
        run(engine, random_tokens(config, len(slots), 32), slots, starts, store)
    assert engine.cached_length(0) == 0


def test_token_ids_outside_the_vocabulary_and_wrong_blocks_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    write_random_checkpoint(tmp_path / "model", config)
    engine = load_engine(tmp_path / "model", num_slots=1, max_length=64)
    for token in (-2, config.vocab_size):
        with pytest.raises(ValueError, match="token ids"):
            run(engine, torch.full((1, 32), token), [0], [0], True)
        assert engine.cached_length(0) == 0
    with pytest.raises(ValueError, match=r"want \[N, 32\]"):
        run(engine, torch.zeros(1, 16), [0], [0], False)


def test_bf16_agrees_with_fp32_to_its_precision_and_keeps_bits(tmp_path: Path) -> None:
    config = tiny_config()
    write_random_checkpoint(tmp_path / "model", config)
    wide = load_engine(tmp_path / "model", num_slots=1, max_length=128)
    narrow = load_engine(tmp_path / "model", num_slots=1, max_length=128, dtype="bfloat16")
    prompt, blocks = random_tokens(config, 64), random_tokens(config, 3, 32, seed=3, masked=0.5)
    found = []
    for engine in (wide, narrow):
        prefill(engine, prompt, 0)
        found.append(run(engine, blocks, [0] * 3, [64] * 3, False))
    assert found[1].dtype == torch.bfloat16
    torch.testing.assert_close(found[1].float(), found[0], rtol=0.05, atol=0.05)
    assert torch.equal(run(narrow, blocks[1:2], [0], [64], False), found[1][1:2])
    assert narrow.logits(found[1][0]).dtype == torch.float32


def test_fast_numerics_agree_in_value(tmp_path: Path) -> None:
    config = tiny_config()
    write_random_checkpoint(tmp_path / "model", config)
    blocks = random_tokens(config, 3, 32, masked=0.5)
    rows = []
    for numerics in ("exact", "fast"):
        engine = load_engine(tmp_path / "model", num_slots=1, max_length=64, numerics=numerics)
        rows.append(engine.logits(run(engine, blocks, [0] * 3, [0] * 3, False).flatten(0, 1))[:, :256])
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-4)


def test_the_self_test_refuses_a_device_whose_bits_depend_on_the_pack(tmp_path: Path) -> None:
    config = tiny_config()
    write_random_checkpoint(tmp_path / "model", config)
    engine = load_engine(tmp_path / "model", num_slots=1, max_length=64)
    engine.self_test()
    honest = engine._linear

    def batch_dependent(x: Tensor, weight: Tensor, **options: torch.dtype) -> Tensor:
        return honest(x, weight, **options) * (1.0 if len(x) <= 32 else 1.0 + 2**-20)

    engine._linear = batch_dependent
    with pytest.raises(
        InputError, match=r"numerics: exact does not hold here \(linear qkv.*use numerics: fast"
    ):
        engine.self_test()


def test_buffers_that_do_not_fit_name_the_setting_to_lower(tmp_path: Path) -> None:
    config = tiny_config()
    write_random_checkpoint(tmp_path / "model", config)
    plan = plan_memory(config, num_slots=8, max_length=1000, dtype="float32")
    assert padded_length(1000) == 1024
    assert plan.cache_bytes == 2 * 2 * 8 * 1024 * 2 * 16 * 4
    room_for_three = plan.weight_bytes + 3 * plan.cache_bytes // 8 + 100
    with pytest.raises(InputError, match="lower max_in_flight to 3"):
        load_engine(
            tmp_path / "model",
            num_slots=8,
            max_length=1000,
            memory_budget_bytes=room_for_three,
            self_test=False,
        )
    with pytest.raises(InputError, match="lower gen_length"):
        check_memory(plan, plan.weight_bytes + 10, num_slots=8, max_length=1000)
    with pytest.raises(InputError, match="its weights take"):
        check_memory(plan, plan.weight_bytes - 1, num_slots=8, max_length=1000)
    load_engine(tmp_path / "model", num_slots=3, max_length=1000, memory_budget_bytes=room_for_three)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"numerics": "precise"}, "numerics: 'precise' is not one of exact, fast"),
        ({"dtype": "float16"}, "dtype: 'float16' is not one of"),
        ({"num_slots": 0}, "max_in_flight: 0"),
        ({"max_length": 5000}, "gen_length: .* 5000 positions, the model has 2048"),
        ({"block_length": 24}, "block length 24 cannot be run"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", tiny_config())
    with pytest.raises(InputError, match=message):
        load_engine(tmp_path / "model", **({"num_slots": 1, "max_length": 64} | settings))


def shared_folder() -> Path:
    named = os.environ.get("DLMGRID_SHARED")
    return Path(named) if named else Path(__file__).resolve().parents[3].parent / "shared"


def test_a_real_model_answers_a_question(tmp_path: Path) -> None:
    source = shared_folder() / "models" / "smollm2-135m-bd32"
    if not source.is_dir():
        pytest.skip("smollm2-135m-bd32 is not here; set DLMGRID_SHARED to the folder that holds models/")
    unpack = [sys.executable, str(source / "unpack.py"), str(tmp_path / "model"), "--dtype", "float32"]
    subprocess.run(unpack, check=True, capture_output=True)
    from dlmgrid.workers.items import Item
    from dlmgrid.workers.tokenization import load_tokenizer

    engine = load_engine(tmp_path / "model", num_slots=1, max_length=128)
    encoder = load_tokenizer(tmp_path / "model", "chatml")
    question = (
        "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
        "How many clips did Natalia sell altogether in April and May?"
    )
    ids = encoder.encode(Item(item_id="1", messages=[{"role": "user", "content": question}]))
    start = len(ids) // 32 * 32
    prefill(engine, torch.tensor(ids[:start]), 0)
    tail = ids[start:]
    block = torch.full((32,), -1)
    block[: len(tail)] = torch.tensor(tail)
    while (block < 0).any():  # one token a step, the most confident first
        probabilities = engine.logits(run(engine, block[None], [0], [start], False)[0]).softmax(-1)
        confidence, tokens = probabilities.max(-1)
        position = int(torch.where(block < 0, confidence, -1.0).argmax())
        block[position] = tokens[position]
    assert encoder.decode(block[len(tail) :].tolist()).startswith("Natalia sold 48/2 = 24 clips in May")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    config = tiny_config()
    write_random_checkpoint(tmp_path / "model", config)
    path = tmp_path / "model" / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"tensor model.layers.1.mlp.up_proj.weight: holds NaN or infinity"):
        load_engine(tmp_path / "model", num_slots=1, max_length=64, self_test=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_a_gpu_agrees_with_the_cpu(numerics: str, tmp_path: Path) -> None:
    config = tiny_config()
    write_random_checkpoint(tmp_path / "model", config)
    prompt, blocks = random_tokens(config, 96), random_tokens(config, 3, 32, seed=3, masked=0.5)
    found = {}
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        engine = load_engine(
            tmp_path / "model", num_slots=2, max_length=128, device=device, dtype=dtype, numerics=numerics
        )
        prefill(engine, prompt.to(device), 1)
        hidden = run(engine, blocks.to(device), [1] * 3, [96] * 3, False)
        found[device, dtype] = engine.logits(hidden.flatten(0, 1))[:, :256].cpu()
    expected = found["cpu", "float32"]
    torch.testing.assert_close(found["cuda", "float32"], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["cuda", "bfloat16"], expected, rtol=0.1, atol=0.1)
