"""LLaDA-8B: a LLaMA decoder without a mask, whose blocks are a schedule over one canvas.

Row i predicts position i; blocks start at the end of the prompt. Settings have OLMo's keys and tensors their own
names (``ff_proj`` is the gate, ``ff_out`` of a block the down projection and of the model the head); renamed, they are
``LlamaForCausalLM``. Sources: ML-GSAI/LLaDA ``generate.py``, ``GUIDELINES.md`` and the files of
GSAI-ML/LLaDA-8B-Instruct; NVlabs/Fast-dLLM ``llada/generate.py`` for caches, thresholds and the factor rule.

The mask token's logit is -inf here; the reference leaves it, so its model may choose the mask itself.
"""

from __future__ import annotations

from typing import Any

from dlmgrid.workers.models.config import (
    MAX_LAYERS,
    ConfigFile,
    ModelConfig,
    canvas_block_length,
    with_turn_end,
)
from dlmgrid.workers.models.family import Family, KnownModel, PublishedDecoder

DEFAULT_BLOCK_LENGTH = 32
DEFAULT_MASK_TOKEN_ID = 126336
TURN_END_TOKEN_ID = 126348
"""``<|eot_id|>``, which config.json does not name."""

_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "block_type": ("llama",),
    "activation_type": ("silu", "swiglu"),
    "layer_norm_type": ("rms",),
    "include_bias": (False,),
    "include_qkv_bias": (False,),
    "attention_layer_norm": (False,),
    "alibi": (False,),
    "rope": (True,),
    "clip_qkv": (None,),
    "scale_logits": (False,),
    "quantization_config": (None,),
}

_BLOCK = "model.transformer.blocks.{layer}."

TENSOR_NAMES = {
    "embedding": "model.transformer.wte.weight",
    "input_norm": _BLOCK + "attn_norm.weight",
    "q": _BLOCK + "q_proj.weight",
    "k": _BLOCK + "k_proj.weight",
    "v": _BLOCK + "v_proj.weight",
    "output": _BLOCK + "attn_out.weight",
    "post_norm": _BLOCK + "ff_norm.weight",
    "gate": _BLOCK + "ff_proj.weight",
    "up": _BLOCK + "up_proj.weight",
    "down": _BLOCK + "ff_out.weight",
    "final_norm": "model.transformer.ln_f.weight",
    "head": "model.transformer.ff_out.weight",
}


def read(file: ConfigFile) -> ModelConfig:
    """Settings of a LLaDA checkpoint. Raises InputError for what the forward pass does not implement."""
    for name, allowed in _IMPLEMENTED.items():
        file.must_be(name, *allowed)
    hidden_size = file.integer("d_model")
    num_heads, num_kv_heads = file.heads("n_heads", "n_kv_heads")
    vocab_size = file.integer("embedding_size", file.integer("vocab_size"))
    return ModelConfig(
        family="llada",
        hidden_size=hidden_size,
        num_hidden_layers=file.integer("n_layers", at_most=MAX_LAYERS),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=file.head_dim(hidden_size // num_heads),
        intermediate_size=file.integer("mlp_hidden_size"),
        vocab_size=vocab_size,
        rope_theta=file.real("rope_theta", None),
        rms_norm_eps=file.real("rms_norm_eps", 1e-5),
        tie_word_embeddings=bool(file.values.get("weight_tying", False)),
        qk_norm=False,
        block_length=canvas_block_length(file, DEFAULT_BLOCK_LENGTH),
        mask_token_id=file.integer("mask_token_id", DEFAULT_MASK_TOKEN_ID, at_least=0),
        stop_token_ids=with_turn_end(file.stop_token_ids(), TURN_END_TOKEN_ID, vocab_size),
        bos_token_id=file.optional_id("bos_token_id"),
        eos_token_id=file.first_id("eos_token_id"),
        pad_token_id=file.optional_id("pad_token_id"),
        max_position_embeddings=file.integer("max_sequence_length"),
        torch_dtype=file.torch_dtype(),
    )


def config_json(config: ModelConfig) -> dict[str, Any]:
    """config.json of a LLaDA checkpoint."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "mlp_hidden_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "embedding_size": config.vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "rope": True,
        "include_bias": False,
        "include_qkv_bias": False,
        "attention_layer_norm": False,
        "weight_tying": config.tie_word_embeddings,
        "mask_token_id": config.mask_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": config.torch_dtype,
    }


_PUBLISHED = ModelConfig(
    family="llada",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=126464,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    qk_norm=False,
    block_length=DEFAULT_BLOCK_LENGTH,
    mask_token_id=DEFAULT_MASK_TOKEN_ID,
    stop_token_ids=(126081, TURN_END_TOKEN_ID),
    bos_token_id=None,
    eos_token_id=126081,
    pad_token_id=126081,
    max_position_embeddings=4096,
    torch_dtype="bfloat16",
)

_GENERATE = "ML-GSAI/LLaDA generate.py"
_FAST_DLLM = "NVlabs/Fast-dLLM llada/generate.py"

FAMILY = Family(
    name="llada",
    model_types=("llada",),
    read=read,
    config_json=config_json,
    tensor_names=TENSOR_NAMES,
    tying_key="weight_tying",
    attention="bidirectional",
    grid="prompt",
    stop="full",
    confidence="plain",
    caches=("none", "prefix", "dual"),
    exactness="exact; prefix and dual approximate",
    decoder=PublishedDecoder(source=f"{_GENERATE} low_confidence", decoder="llada", confidence="plain"),
    variants={
        "random": PublishedDecoder(
            source=f"{_GENERATE} remasking=random", decoder="llada", confidence="random"
        ),
        "logits_eos_inf": PublishedDecoder(
            source=f"{_GENERATE} logits_eos_inf",
            decoder="llada",
            confidence="plain",
            eos_policy="logits_eos_inf",
        ),
        "confidence_eos_eot_inf": PublishedDecoder(
            source=f"{_GENERATE} confidence_eos_eot_inf, as its paper means it",
            decoder="llada",
            confidence="plain",
            eos_policy="confidence_eos_eot_inf",
        ),
        "fast_dllm": PublishedDecoder(
            source=f"{_FAST_DLLM} threshold",
            decoder="threshold",
            threshold=0.9,
            comparison="fast_dllm",
            confidence="plain",
        ),
        "fast_dllm_factor": PublishedDecoder(
            source=f"{_FAST_DLLM} factor", decoder="factor", factor=1.0, confidence="plain"
        ),
    },
    chat_template="llada",
    published=(KnownModel(name="GSAI-ML/LLaDA-8B-Instruct", config=_PUBLISHED),),
)
