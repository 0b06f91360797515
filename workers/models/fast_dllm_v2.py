"""Fast-dLLM-v2 1.5B and 7B: the Qwen2.5 decoder with block-causal attention and the token shift.

Row i - 1 predicts position i; blocks of 32 on the absolute grid, the prompt included, filled in sub-blocks of 8 from
left to right. The first token of a block is the argmax of the last row of the pass that stored the one before (always
greedy), so row 0 of a block predicts nothing. A sample ends as soon as a stop id has no mask before it. The mask id is
not in config.json.

Sources: ``generate`` of the published modeling.py (class Fast_dLLM_QwenForCausalLM) and NVlabs/Fast-dLLM
v2/run_chatbot.py (threshold 0.9, sub-blocks of 8). Two deviations: a prompt of exactly one block is prefilled (the
published test is >, and loses it); at T > 0 a commit is gated on the plain probability of its token, not on the
tempered and renormalised one. Sizes of 7B are Qwen2.5-7B's.
"""

from __future__ import annotations

from typing import Any

from dlmgrid.workers.models.config import ConfigFile, ModelConfig, decoder_config_json, read_decoder_config
from dlmgrid.workers.models.family import HF_TENSOR_NAMES, Family, KnownModel, PublishedDecoder

DEFAULT_BLOCK_LENGTH = 32
MASK_TOKEN_ID = 151665
SUB_BLOCK_LENGTH = 8


def read(file: ConfigFile) -> ModelConfig:
    """Settings of a Fast-dLLM-v2 checkpoint."""
    file.must_be("use_sliding_window", False)
    return read_decoder_config(
        file,
        "fast_dllm_v2",
        block_key="bd_size",
        block_length=DEFAULT_BLOCK_LENGTH,
        mask_token_id=MASK_TOKEN_ID,
        qkv_bias=True,
    )


def config_json(config: ModelConfig) -> dict[str, Any]:
    """config.json of a Fast-dLLM-v2 checkpoint; it names the mask id only where that is not the published one."""
    values = decoder_config_json(config, block_key="bd_size") | {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
    }
    if config.mask_token_id == MASK_TOKEN_ID:
        del values["mask_token_id"]
    return values


def _published(hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        family="fast_dllm_v2",
        hidden_size=hidden,
        num_hidden_layers=28,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        intermediate_size=inner,
        vocab_size=vocab,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        qk_norm=False,
        qkv_bias=True,
        block_length=DEFAULT_BLOCK_LENGTH,
        mask_token_id=MASK_TOKEN_ID,
        stop_token_ids=(151645, 151643),
        bos_token_id=151643,
        eos_token_id=151645,
        pad_token_id=151643,
        max_position_embeddings=32768,
        torch_dtype="bfloat16",
    )


def _threshold(source: str, value: float, sub_block_length: int = SUB_BLOCK_LENGTH) -> PublishedDecoder:
    return PublishedDecoder(
        source=source,
        decoder="threshold",
        threshold=value,
        comparison="sdar",
        confidence="plain",
        sub_block_length=sub_block_length,
    )


FAMILY = Family(
    name="fast_dllm_v2",
    model_types=("Fast_dLLM_Qwen",),
    read=read,
    config_json=config_json,
    tensor_names=HF_TENSOR_NAMES,
    shifted=True,
    seed="argmax",
    stop_rule="prefix",
    caches=("block", "sub_block"),
    exactness="exact; sub_block approximate",
    decoder=_threshold("run_chatbot.py: threshold 0.9, sub-blocks of 8", 0.9),
    variants={
        "batch_sample": _threshold("batch_sample: threshold 0.95", 0.95),
        "sequential": PublishedDecoder(
            source="generate with its default threshold of 1: the best position of a sub-block a step",
            decoder="static",
            confidence="plain",
            sub_block_length=SUB_BLOCK_LENGTH,
        ),
    },
    chat_template="qwen2",
    published=(
        KnownModel(
            name="Efficient-Large-Model/Fast_dLLM_v2_1.5B",
            config=_published(1536, 12, 2, 8960, 151936, True),
        ),
        KnownModel(
            name="Efficient-Large-Model/Fast_dLLM_v2_7B",
            config=_published(3584, 28, 4, 18944, 152064, False),
        ),
    ),
)
