"""Dream-v0-7B: the Qwen2.5 decoder without a mask, whose row i predicts position i + 1.

One canvas, by default one block as long as the generation, filled by a schedule in time; shorter blocks are filled
one after another. With a cache the pass that refreshes it commits a block's first position, since passes over the
block alone lack the row before it. Sources: DreamLM/Dream README and ``generation_utils.py``; NVlabs/Fast-dLLM
``dream/model/{modeling_dream,generation_utils,generation_utils_block}.py``. Tensor names are Qwen2's.

The mask token's logit is -inf here; the reference leaves it, so its model may choose the mask itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dlmgrid.workers.models.config import (
    ConfigFile,
    ModelConfig,
    canvas_block_length,
    decoder_config_json,
    read_decoder_config,
    with_turn_end,
)
from dlmgrid.workers.models.family import HF_TENSOR_NAMES, Family, KnownModel, PublishedDecoder

WHOLE_GENERATION = 0
"""The block length of a family whose block is the whole generation unless a grid says otherwise."""

DEFAULT_MASK_TOKEN_ID = 151666
TURN_END_TOKEN_ID = 151645
"""``<|im_end|>``, which config.json does not name."""


def read(file: ConfigFile) -> ModelConfig:
    """Settings of a Dream checkpoint. Raises InputError for what the forward pass does not implement."""
    for name in ("mlp_bias", "use_sliding_window"):
        file.must_be(name, False)
    length = canvas_block_length(file, WHOLE_GENERATION)
    config = read_decoder_config(
        file,
        "dream",
        block_length=length,
        mask_token_id=DEFAULT_MASK_TOKEN_ID,
        qkv_bias=True,
        max_positions=131072,
        checks_block_length=False,
    )
    stops = with_turn_end(config.stop_token_ids, TURN_END_TOKEN_ID, config.vocab_size)
    return replace(config, block_length=length, stop_token_ids=stops)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """config.json of a Dream checkpoint."""
    values = decoder_config_json(config)
    del values["block_size"], values["head_dim"]
    return values | {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "eos_token_id": config.eos_token_id,
        "use_sliding_window": False,
    }


_PUBLISHED = ModelConfig(
    family="dream",
    hidden_size=3584,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=18944,
    vocab_size=152064,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    qk_norm=False,
    qkv_bias=True,
    block_length=WHOLE_GENERATION,
    mask_token_id=DEFAULT_MASK_TOKEN_ID,
    stop_token_ids=(151643, TURN_END_TOKEN_ID),
    bos_token_id=151643,
    eos_token_id=151643,
    pad_token_id=151643,
    max_position_embeddings=131072,
    torch_dtype="bfloat16",
)

_GENERATE = "DreamLM/Dream generation_utils.py"

FAMILY = Family(
    name="dream",
    model_types=("Dream", "dream"),
    read=read,
    config_json=config_json,
    tensor_names=HF_TENSOR_NAMES,
    attention="bidirectional",
    grid="prompt",
    shifted=True,
    stop="full",
    confidence="maskgit_plus",
    caches=("none", "prefix", "dual"),
    exactness="exact; prefix and dual approximate",
    decoder=PublishedDecoder(
        source="DreamLM/Dream README, alg=entropy", decoder="dream", confidence="entropy", top_p=0.95
    ),
    variants={
        "origin": PublishedDecoder(source=f"{_GENERATE} alg=origin", decoder="dream", confidence="origin"),
        "maskgit_plus": PublishedDecoder(
            source=f"{_GENERATE} alg=maskgit_plus", decoder="dream", confidence="maskgit_plus"
        ),
        "topk_margin": PublishedDecoder(
            source=f"{_GENERATE} alg=topk_margin", decoder="dream", confidence="topk_margin"
        ),
        "fast_dllm": PublishedDecoder(
            source="NVlabs/Fast-dLLM dream/model/generation_utils_block.py, alg=confidence_threshold",
            decoder="threshold",
            threshold=0.9,
            comparison="fast_dllm",
            confidence="maskgit_plus",
        ),
    },
    chat_template="chatml",
    published=(
        KnownModel(
            name="Dream-org/Dream-v0-Instruct-7B",
            config=_PUBLISHED,
            note="its README gives 2048 positions of usable context",
        ),
    ),
)
