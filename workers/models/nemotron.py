"""Nemotron-Labs-Diffusion 3B, 8B and 14B: the Ministral3 decoder with a token-causal prefix.

Committed tokens see what is before them; the active block sees them all and itself. In diffusion mode row i predicts
position i. Blocks of 32 start at the prompt's end; the first token of each is drawn from the last row of the causal
pass that stored what is before it. The decoder ``causal`` is the model's autoregressive mode: row i - 1 predicts
position i, one token a pass. Rotary frequencies follow YaRN, and queries grow by 1 + beta * ln(1 + floor(p / length)).

Sources: the published modeling_nemotron_labs_diffusion.py (``generate``, ``ar_generate``); the card's decode settings
(block length 32, threshold 0.9). The file's rotary settings are read, never assumed. Stop ids of 3B are unverified.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.config import (
    ConfigFile,
    ModelConfig,
    QueryScaling,
    YarnScaling,
    decoder_config_json,
    read_decoder_config,
)
from dlmgrid.workers.models.family import HF_TENSOR_NAMES, Family, KnownModel, PublishedDecoder

DEFAULT_BLOCK_LENGTH = 32
MASK_TOKEN_ID = 100
QUERY_BETA = 0.1

TENSOR_NAMES = {
    role: name.replace("model.", "encoder.", 1) for role, name in HF_TENSOR_NAMES.items() if role != "head"
} | {"head": "diffusion_head.weight"}


def read(file: ConfigFile) -> ModelConfig:
    """Settings of a Nemotron-Labs-Diffusion checkpoint."""
    for name in ("attention_bias", "mlp_bias"):
        file.must_be(name, False)
    file.must_be("dlm_paradigm", "bidirectional")
    if file.values.get("sliding_window"):
        raise InputError(
            f"{file.path}: sliding_window is {file.values['sliding_window']!r}, expected null for the family nemotron"
        )
    parameters = file.rope_parameters()
    config = read_decoder_config(
        file,
        "nemotron",
        block_length=DEFAULT_BLOCK_LENGTH,
        mask_token_id=MASK_TOKEN_ID,
        rope_theta=file.real("rope_theta", None, parameters),
        max_positions=262144,
    )
    if parameters["rope_type"] == "default":
        return config
    if parameters["rope_type"] != "yarn":
        raise InputError(
            f"{file.path}: rotary scaling {parameters['rope_type']!r} is not implemented, expected 'yarn'"
        )
    original = int(file.real("original_max_position_embeddings", None, parameters))
    factor = file.real("factor", None, parameters)
    beta = parameters.get("llama_4_scaling_beta", QUERY_BETA)
    return replace(
        config,
        yarn=YarnScaling(
            factor=factor,
            original_length=original,
            beta_fast=file.real("beta_fast", 32.0, parameters),
            beta_slow=file.real("beta_slow", 1.0, parameters),
            attention_factor=_attention_factor(file, parameters, factor),
        ),
        query_scaling=QueryScaling(beta=float(beta), original_length=original) if beta else None,
    )


def _attention_factor(file: ConfigFile, parameters: dict[str, Any], factor: float) -> float:
    """What cosines and sines are multiplied by: given, or the quotient of the two ``mscale`` terms."""
    if parameters.get("attention_factor") is not None:
        return file.real("attention_factor", None, parameters)

    def term(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return term(file.real("mscale", None, parameters)) / term(
            file.real("mscale_all_dim", None, parameters)
        )
    return term(1.0)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """config.json of a Nemotron-Labs-Diffusion checkpoint."""
    values = decoder_config_json(config) | {
        "architectures": ["NemotronLabsDiffusionModel"],
        "model_type": "nemotron_labs_diffusion",
        "dlm_paradigm": "bidirectional",
    }
    if config.yarn is not None:
        values["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": values.pop("rope_theta"),
            "factor": config.yarn.factor,
            "original_max_position_embeddings": config.yarn.original_length,
            "beta_fast": config.yarn.beta_fast,
            "beta_slow": config.yarn.beta_slow,
            "attention_factor": config.yarn.attention_factor,
            "llama_4_scaling_beta": config.query_scaling.beta if config.query_scaling else 0.0,
        }
    return values


def _published(hidden: int, layers: int, inner: int, theta: float, stop: int) -> ModelConfig:
    return ModelConfig(
        family="nemotron",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=inner,
        vocab_size=131072,
        rope_theta=theta,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        qk_norm=False,
        block_length=DEFAULT_BLOCK_LENGTH,
        mask_token_id=MASK_TOKEN_ID,
        stop_token_ids=(stop,),
        bos_token_id=1,
        eos_token_id=stop,
        pad_token_id=None,
        max_position_embeddings=262144,
        torch_dtype="bfloat16",
        yarn=YarnScaling(factor=16.0, original_length=16384),
        query_scaling=QueryScaling(beta=QUERY_BETA, original_length=16384),
    )


FAMILY = Family(
    name="nemotron",
    model_types=("nemotron_labs_diffusion",),
    read=read,
    config_json=config_json,
    tensor_names=TENSOR_NAMES,
    attention="token_causal",
    grid="prompt",
    seed="drawn",
    stop_rule="prefix_commit",
    caches=("causal",),
    decoder=PublishedDecoder(
        source="card: threshold 0.9",
        decoder="threshold",
        threshold=0.9,
        comparison="fast_dllm",
        confidence="plain",
    ),
    variants={
        "even_split": PublishedDecoder(
            source="generate without a threshold: one token a step", decoder="static", confidence="plain"
        ),
        "causal": PublishedDecoder(source="ar_generate: autoregressive", decoder="causal"),
    },
    chat_template="",
    published=(
        KnownModel(
            name="nvidia/Nemotron-Labs-Diffusion-3B",
            config=_published(3072, 26, 9216, 1e6, 2),
            note="rotary settings and stop id as its files say",
        ),
        KnownModel(name="nvidia/Nemotron-Labs-Diffusion-8B", config=_published(4096, 34, 14336, 1e6, 11)),
        KnownModel(name="nvidia/Nemotron-Labs-Diffusion-14B", config=_published(5120, 40, 16384, 1e9, 11)),
    ),
)
