"""Training the reference model in small, and the checkpoint that is shipped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from dlmgrid.jobs import train_reference
from dlmgrid.jobs.reference_card import weights_sha256
from dlmgrid.jobs.reference_evaluation import decode_static, evaluate, load_trained, passes
from dlmgrid.jobs.reference_model import (
    ModelSettings,
    ReferenceModel,
    add_noise,
    diffusion_loss,
    training_mask,
)
from dlmgrid.jobs.reference_text import (
    MASK,
    SPECIAL_TOKENS,
    TURN_END,
    TextSettings,
    render_prompt,
    special_id,
    train_tokenizer,
    training_text,
)
from dlmgrid.jobs.train_reference import TrainSettings

SHIPPED = Path(train_reference.__file__).resolve().parents[1] / "workers/models/reference"
TINY_MODEL = ModelSettings(
    vocab_size=600,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
TINY = TrainSettings(
    steps=40,
    batch_tokens=1024,
    warmup_steps=5,
    log_every=10,
    learning_rate=1e-2,
    model=TINY_MODEL,
    text=TextSettings(num_examples=400, shard_size=200, vocab_size=600, tokenizer_examples=400),
)


@pytest.fixture(autouse=True)
def _restore_determinism() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def shipped() -> tuple[ReferenceModel, Tokenizer]:
    return load_trained(SHIPPED, "cpu")


def test_a_short_training_learns_repeats_bit_for_bit_and_writes_sdars_format(tmp_path: Path) -> None:
    record = train_reference.run(
        TINY, tmp_path / "a", device="cpu", num_words=2, num_functions=2, gen_length=32
    )
    again = train_reference.run(TINY, tmp_path / "b", device="cpu", num_words=0, num_functions=0)
    assert record["losses"][-1][1] < 0.8 * record["losses"][0][1]
    assert record["weights_sha256"] == again["weights_sha256"] == weights_sha256(tmp_path / "b")
    assert record["evaluation"]["words"]["items"] == 2
    tokenizers = [(tmp_path / name / "tokenizer.json").read_bytes() for name in "ab"]
    assert tokenizers[0] == tokenizers[1]
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["architectures"] == ["SDARForCausalLM"]
    assert _shapes(tmp_path / "a") == _sdar_shapes(config)


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    digests = set()
    for seed in (1, 2):
        settings = TrainSettings(**{**_fields(TINY), "seed": seed, "steps": 2})
        record = train_reference.run(
            settings, tmp_path / str(seed), device="cpu", num_words=0, num_functions=0
        )
        digests.add(record["weights_sha256"])
    assert len(digests) == 2


def _fields(settings: TrainSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in TrainSettings.__dataclass_fields__}


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _sdar_shapes(config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (q, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, q),
                "self_attn.q_norm": (head,),
                "self_attn.k_norm": (head,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    return shapes


def test_the_training_mask_hides_the_clean_copy_of_the_block_being_denoised() -> None:
    mask = training_mask(6, 2, torch.device("cpu"))
    clean, noised = mask[:6], mask[6:]
    assert clean[2].tolist() == [True] * 4 + [False] * 2 + [False] * 6
    assert noised[2].tolist() == [True] * 2 + [False] * 4 + [False] * 2 + [True] * 2 + [False] * 2


def test_noise_masks_the_answer_only_and_at_least_one_position_of_each_of_its_blocks() -> None:
    ids = torch.arange(4 * 24).view(4, 24) + 1000
    lengths = torch.tensor([1, 8, 11, 20])
    noised = add_noise(ids, lengths, 8, 7, torch.Generator().manual_seed(0))
    for row, length in enumerate(lengths.tolist()):
        assert not noised.masked[row, :length].any()
        for start in range(length // 8 * 8, 24, 8):
            masked = noised.masked[row, start : start + 8]
            n = start + 8 - max(start, length)
            m = int(masked.sum())
            assert 1 <= m <= n
            assert torch.allclose(noised.weights[row, start : start + 8][masked], torch.tensor(n / m))
    assert torch.equal(noised.token_ids == 7, noised.masked)
    assert torch.equal(noised.token_ids[~noised.masked], ids[~noised.masked])
    assert not noised.weights[~noised.masked].any()


def test_the_loss_of_a_block_ignores_the_answer_of_later_blocks() -> None:
    torch.manual_seed(0)
    model = ReferenceModel(TINY_MODEL)
    ids = torch.randint(10, 600, (1, 96))
    lengths = torch.tensor([40])
    noised = add_noise(ids, lengths, 32, 3, torch.Generator().manual_seed(0))
    noised.weights[:, 64:] = 0
    loss = diffusion_loss(model, ids, lengths, noised)
    changed = ids.clone()
    changed[:, 64:] = 11
    assert torch.allclose(diffusion_loss(model, changed, lengths, noised), loss)
    changed = ids.clone()
    changed[:, :32] = 11
    assert not torch.allclose(diffusion_loss(model, changed, lengths, noised), loss)


def test_text_does_not_depend_on_the_number_of_processes() -> None:
    tokenizer = train_tokenizer(TINY.text)
    one = training_text(TINY.text, tokenizer, 32)
    settings = TextSettings(
        num_examples=400, shard_size=200, vocab_size=600, tokenizer_examples=400, num_processes=2
    )
    two = training_text(settings, tokenizer, 32)
    assert list(one) == list(two)
    assert sum(len(group.token_ids) for group in one.values()) == 400
    for blocks, group in one.items():
        assert group.token_ids.shape[1] == 32 * blocks
        assert (group.token_ids == two[blocks].token_ids).all()
        assert (group.token_ids[:, -1] == tokenizer.token_to_id(TURN_END)).all()


def test_the_tokenizer_keeps_digits_apart_and_encodes_anything(
    shipped: tuple[ReferenceModel, Tokenizer],
) -> None:
    tokenizer = shipped[1]
    for token in tokenizer.get_vocab():
        assert sum(character.isdigit() for character in token) <= 1
    for text in ("12 * 34 = 408\n\n    x\t ", "naïve 数学 🙂\x00", "#### 7"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]


def test_programs_are_judged_by_their_exit_and_cut_off_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes("assert 1 + 1 == 2\n")
    assert not passes("assert 1 + 1 == 3\n")
    assert not passes("def broken(:\n")
    monkeypatch.setattr("dlmgrid.jobs.reference_evaluation.PROGRAM_SECONDS", 1)
    assert not passes("while True:\n    pass\n")


def test_the_shipped_checkpoint_is_the_one_its_card_describes() -> None:
    record = json.loads((SHIPPED / "training.json").read_text())
    card = (SHIPPED / "README.md").read_text()
    assert record["weights_sha256"] == weights_sha256(SHIPPED)
    assert record["weights_sha256"] in card
    config = json.loads((SHIPPED / "config.json").read_text())
    assert _shapes(SHIPPED) == _sdar_shapes(config)
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 12_000_000
    words, functions = record["evaluation"]["words"], record["evaluation"]["functions"]
    assert words["accuracy_t0"] >= 0.7
    for benchmark in (words, functions):
        assert 0.75 <= benchmark["stale_hit_rate_t0"] <= 0.95
        assert benchmark["changed_at_t1"] >= 0.3


def test_the_shipped_checkpoint_was_trained_with_the_settings_that_are_the_default() -> None:
    recorded = json.loads((SHIPPED / "training.json").read_text())["settings"]
    current = json.loads(json.dumps(asdict(TrainSettings())))
    recorded["steps"] = current["steps"]
    recorded["text"]["num_processes"] = current["text"]["num_processes"]
    assert recorded == current


def test_the_shipped_tokenizer_is_what_the_text_gives_today() -> None:
    trained = json.loads(train_tokenizer(TextSettings()).to_str())
    assert trained == json.loads((SHIPPED / "tokenizer.json").read_text())


def test_the_shipped_model_solves_held_out_items(shipped: tuple[ReferenceModel, Tokenizer]) -> None:
    result = evaluate(*shipped, num_words=6, num_functions=4, gen_length=64)
    assert result["words"]["accuracy_t0"] >= 4 / 6
    assert result["functions"]["accuracy_t0"] >= 2 / 4
    assert result["words"]["ended_t0"] == 1.0


def test_decoding_one_prompt_gives_what_decoding_it_among_others_does(
    shipped: tuple[ReferenceModel, Tokenizer],
) -> None:
    model, tokenizer = shipped
    prompts = [
        tokenizer.encode(render_prompt(turn)).ids
        for turn in ("Ada has 5 pens. Ada finds 7 more. How many pens does Ada have now?", "How many?")
    ]
    settings = {
        "mask_token_id": special_id(tokenizer, MASK),
        "stop_token_id": special_id(tokenizer, TURN_END),
    }
    together = decode_static(model, prompts, gen_length=64, temperature=0.0, **settings)
    alone = [decode_static(model, [prompt], gen_length=64, temperature=0.0, **settings) for prompt in prompts]
    assert together.token_ids == [run.token_ids[0] for run in alone]
    assert together.num_commits == sum(run.num_commits for run in alone)
    assert together.num_stale_hits == sum(run.num_stale_hits for run in alone)
    assert "12" in tokenizer.decode(alone[0].token_ids[0])
