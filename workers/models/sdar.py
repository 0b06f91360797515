"""SDAR-1.7B/4B/8B-Chat: the Qwen3 decoder with block-causal attention, and its relatives without q/k norms.

Row i predicts position i; blocks lie on the absolute grid of the block length (4 to 64), the prompt included. Special
ids are those of JetAstra/SDAR, training/model/SDAR-8B-Chat; block length and mask id may be missing from
config.json. Parameters of 4B and 8B equal the published index; those of 1.7B are the geometry's with an untied
head, its config.json decides at loading. -b8 to -b64 variants of a name differ in block length only.

Decode rules: JetAstra/SDAR ``generate.py`` and README (published numbers: greedy, one token a step),
Labman42/JetEngine, evaluation/opencompass of JetAstra/SDAR, InternLM/lmdeploy, sgl-project/sglang ``srt/dllm``.
"""

from __future__ import annotations

from typing import Any

from dlmgrid.workers.models.config import ConfigFile, ModelConfig, decoder_config_json, read_decoder_config
from dlmgrid.workers.models.family import HF_TENSOR_NAMES, Family, KnownModel, PublishedDecoder

DEFAULT_BLOCK_LENGTH = 4
DEFAULT_MASK_TOKEN_ID = 151669


def read(file: ConfigFile) -> ModelConfig:
    """Settings of an SDAR checkpoint; whether heads are normalised is what its tensors say."""
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        file.must_be(name, False)
    return read_decoder_config(
        file,
        "sdar",
        block_length=DEFAULT_BLOCK_LENGTH,
        mask_token_id=DEFAULT_MASK_TOKEN_ID,
        qk_norm=file.has_tensor(".self_attn.q_norm.weight"),
    )


def config_json(config: ModelConfig) -> dict[str, Any]:
    """config.json of an SDAR checkpoint."""
    return decoder_config_json(config) | {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}


def _published(hidden: int, layers: int, heads: int, inner: int) -> ModelConfig:
    return ModelConfig(
        family="sdar",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=inner,
        vocab_size=151936,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        qk_norm=True,
        block_length=DEFAULT_BLOCK_LENGTH,
        mask_token_id=DEFAULT_MASK_TOKEN_ID,
        stop_token_ids=(151643, 151645),
        bos_token_id=151643,
        eos_token_id=151643,
        pad_token_id=151643,
        max_position_embeddings=32768,
        torch_dtype="bfloat16",
    )


FAMILY = Family(
    name="sdar",
    model_types=("sdar",),
    read=read,
    config_json=config_json,
    tensor_names=HF_TENSOR_NAMES,
    decoder=PublishedDecoder(source="README: greedy, as many steps as tokens", decoder="static"),
    variants={
        "generate": PublishedDecoder(
            source="generate.py low_confidence_dynamic",
            decoder="threshold",
            threshold=0.85,
            comparison="sdar",
        ),
        "sequential": PublishedDecoder(source="generate.py sequential", decoder="sequential"),
        "opencompass": PublishedDecoder(
            source="opencompass bd3", decoder="threshold", threshold=0.95, comparison="sdar"
        ),
        "lmdeploy": PublishedDecoder(
            source="lmdeploy low_confidence_dynamic",
            decoder="threshold",
            threshold=0.9,
            comparison="fast_dllm",
        ),
        "entropy_bounded": PublishedDecoder(
            source="JetEngine entropy_bounded, eb_threshold 0.35",
            decoder="entropy_bounded",
            threshold=0.35,
            confidence="certainty",
        ),
        "sglang": PublishedDecoder(
            source="sglang LowConfidence",
            decoder="threshold",
            threshold=0.95,
            comparison="sdar",
            confidence="plain",
        ),
    },
    chat_template="chatml",
    published=(
        KnownModel(
            name="JetLM/SDAR-1.7B-Chat",
            config=_published(2048, 28, 16, 6144),
            note="head tied or not as its config.json says",
        ),
        KnownModel(name="JetLM/SDAR-4B-Chat", config=_published(2560, 36, 32, 9728)),
        KnownModel(name="JetLM/SDAR-8B-Chat", config=_published(4096, 36, 32, 12288)),
    ),
)
