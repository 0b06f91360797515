"""LLaDA2.0-mini: block-causal attention over a mixture of experts (the Ling-mini decoder).

Row i predicts position i; blocks of 32 on the absolute grid, the prompt included. Query, key and value are one
tensor, their rows one after another; heads are normalised; the first half of a head's dimensions turns. Layers after
the first route every token to 8 of 256 experts and pass it through a shared one. Experts are stored one tensor each,
or stacked ("merged", inclusionAI/dFactory).

Sources: inclusionAI/dFactory configs/model_configs/llada2_mini/config.json and models/llada2_moe; decode rules:
``generate`` of the published class (port in ZHZisZZ/dllm, pipelines/llada2/sampler.py), inclusionAI/dInfer,
sgl-project/sglang ``srt/dllm``. The editing of LLaDA2.1 is not part of 2.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.config import (
    ConfigFile,
    ExpertConfig,
    ModelConfig,
    decoder_config_json,
    read_decoder_config,
)
from dlmgrid.workers.models.family import Family, KnownModel, PublishedDecoder

DEFAULT_BLOCK_LENGTH = 32
MASK_TOKEN_ID = 156895
STOP_TOKEN_ID = 156892

_LAYER = "model.layers.{layer}."

TENSOR_NAMES = {
    "embedding": "model.word_embeddings.weight",
    "input_norm": _LAYER + "input_layernorm.weight",
    "qkv": _LAYER + "attention.query_key_value.weight",
    "output": _LAYER + "attention.dense.weight",
    "q_norm": _LAYER + "attention.query_layernorm.weight",
    "k_norm": _LAYER + "attention.key_layernorm.weight",
    "post_norm": _LAYER + "post_attention_layernorm.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
    "router": _LAYER + "mlp.gate.weight",
    "router_bias": _LAYER + "mlp.gate.expert_bias",
    "expert_gate": _LAYER + "mlp.experts.{expert}.gate_proj.weight",
    "expert_up": _LAYER + "mlp.experts.{expert}.up_proj.weight",
    "expert_down": _LAYER + "mlp.experts.{expert}.down_proj.weight",
    "merged_gate": _LAYER + "mlp.experts.gate_proj.weight",
    "merged_up": _LAYER + "mlp.experts.up_proj.weight",
    "merged_down": _LAYER + "mlp.experts.down_proj.weight",
    "shared_gate": _LAYER + "mlp.shared_experts.gate_proj.weight",
    "shared_up": _LAYER + "mlp.shared_experts.up_proj.weight",
    "shared_down": _LAYER + "mlp.shared_experts.down_proj.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}


def read(file: ConfigFile) -> ModelConfig:
    """Settings of a LLaDA2.0 checkpoint."""
    for name in ("use_bias", "use_qkv_bias", "use_sliding_window"):
        file.must_be(name, False)
    file.must_be("score_function", "sigmoid")
    file.must_be("norm_topk_prob", True)
    config = read_decoder_config(
        file,
        "llada2",
        block_length=DEFAULT_BLOCK_LENGTH,
        mask_token_id=MASK_TOKEN_ID,
        qk_norm=True,
        max_positions=16384,
    )
    num_experts, num_groups = file.integer("num_experts"), file.integer("n_group", 1)
    num_chosen, num_kept = file.integer("num_experts_per_tok"), file.integer("topk_group", num_groups)
    if num_experts % num_groups or num_experts // num_groups < 2 or num_kept > num_groups:
        raise InputError(
            f"{file.path}: {num_experts} experts cannot be split into n_group {num_groups}, of which topk_group "
            f"{num_kept} are kept (want equal groups of at least 2 experts)"
        )
    if num_chosen > num_kept * (num_experts // num_groups):
        raise InputError(
            f"{file.path}: num_experts_per_tok {num_chosen} is more than the kept groups hold "
            f"({num_kept * (num_experts // num_groups)} experts)"
        )
    expert_size = file.integer("moe_intermediate_size")
    return replace(
        config,
        rotary_dim=_rotary_dim(file, config.head_dim),
        experts=ExpertConfig(
            num_experts=num_experts,
            num_chosen=num_chosen,
            num_groups=num_groups,
            num_kept_groups=num_kept,
            expert_size=expert_size,
            shared_size=expert_size * file.integer("num_shared_experts", 1),
            routed_scale=file.real("routed_scaling_factor", 1.0),
            first_layer=file.integer("first_k_dense_replace", 0, at_least=0),
            is_merged=file.has_tensor(".mlp.experts.gate_proj.weight"),
        ),
    )


def _rotary_dim(file: ConfigFile, head_dim: int) -> int:
    """Dimensions of a head that turn: ``rotary_dim``, else ``partial_rotary_factor`` of the head."""
    share = file.real("partial_rotary_factor", 1.0)
    width = file.integer("rotary_dim", int(head_dim * share))
    if width % 2 or width > head_dim:
        raise InputError(
            f"{file.path}: rotary_dim is {width}, expected an even number up to head_dim {head_dim}"
        )
    return width


def config_json(config: ModelConfig) -> dict[str, Any]:
    """config.json of a LLaDA2.0 checkpoint."""
    experts = config.experts
    assert experts is not None
    return decoder_config_json(config) | {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "use_bias": False,
        "use_qkv_bias": False,
        "rotary_dim": config.rotary_dim,
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "n_group": experts.num_groups,
        "topk_group": experts.num_kept_groups,
        "moe_intermediate_size": experts.expert_size,
        "num_shared_experts": experts.shared_size // experts.expert_size,
        "routed_scaling_factor": experts.routed_scale,
        "first_k_dense_replace": experts.first_layer,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
    }


MINI = ModelConfig(
    family="llada2",
    hidden_size=2048,
    num_hidden_layers=20,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=5120,
    vocab_size=157184,
    rope_theta=600000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    qk_norm=True,
    block_length=DEFAULT_BLOCK_LENGTH,
    mask_token_id=MASK_TOKEN_ID,
    stop_token_ids=(STOP_TOKEN_ID,),
    bos_token_id=None,
    eos_token_id=STOP_TOKEN_ID,
    pad_token_id=STOP_TOKEN_ID,
    max_position_embeddings=16384,
    torch_dtype="bfloat16",
    rotary_dim=64,
    experts=ExpertConfig(
        num_experts=256,
        num_chosen=8,
        num_groups=8,
        num_kept_groups=4,
        expert_size=512,
        shared_size=512,
        routed_scale=2.5,
        first_layer=1,
    ),
)

FAMILY = Family(
    name="llada2",
    model_types=("llada2_moe", "llada2_moe_veomni"),
    read=read,
    config_json=config_json,
    tensor_names=TENSOR_NAMES,
    decoder=PublishedDecoder(
        source="generate: threshold 0.95", decoder="threshold", threshold=0.95, comparison="sdar"
    ),
    variants={
        "dinfer": PublishedDecoder(
            source="dInfer threshold decoding", decoder="threshold", threshold=0.9, comparison="dinfer"
        ),
        "sglang": PublishedDecoder(
            source="sglang LowConfidence",
            decoder="threshold",
            threshold=0.95,
            comparison="sdar",
            confidence="plain",
        ),
    },
    chat_template="llada2",
    published=(KnownModel(name="inclusionAI/LLaDA2.0-mini", config=MINI),),
)
