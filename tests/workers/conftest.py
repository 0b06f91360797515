"""Oracles of bidirectional models: transformers' stock decoders under the checkpoints' own names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlmgrid.workers.models.checkpoint import stream_tensors
from dlmgrid.workers.models.config import ModelConfig

LLAMA_NAMES = {
    "transformer.ff_out.": "lm_head.",
    "transformer.wte.": "embed_tokens.",
    "transformer.ln_f.": "norm.",
    "transformer.blocks.": "layers.",
    ".attn_norm.": ".input_layernorm.",
    ".ff_norm.": ".post_attention_layernorm.",
    ".q_proj.": ".self_attn.q_proj.",
    ".k_proj.": ".self_attn.k_proj.",
    ".v_proj.": ".self_attn.v_proj.",
    ".attn_out.": ".self_attn.o_proj.",
    ".ff_proj.": ".mlp.gate_proj.",
    ".up_proj.": ".mlp.up_proj.",
    ".ff_out.": ".mlp.down_proj.",
}


class StockCanvas:
    """A stock decoder in which every position sees every other (an explicit 4-D mask of zeros).

    Logits have -inf for the mask token. ``num_passes`` counts forwards.
    """

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        import transformers

        self.config = config
        kind = {"llada": "Llama", "dream": "Qwen2"}[config.family]
        settings = getattr(transformers, f"{kind}Config")(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=False,
            max_position_embeddings=config.max_position_embeddings,
            attn_implementation="eager",
        )
        self.model: Any = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
        tensors = {}
        for name, tensor in stream_tensors(folder):
            if config.family == "llada":
                for ours, theirs in LLAMA_NAMES.items():
                    name = name.replace("model." + ours if theirs == "lm_head." else ours, theirs)
            tensors[name] = tensor
        self.model.load_state_dict(tensors)
        self.cache: Any = None
        self.num_passes = 0

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [S, V] of a whole canvas int [S], -1 where masked."""
        return self._run(tokens, torch.ones(len(tokens), dtype=torch.bool), None)

    def refresh(self, tokens: Tensor) -> Tensor:
        """The same, and keep every position's keys and values."""
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        return self._run(tokens, torch.ones(len(tokens), dtype=torch.bool), self.cache)

    def cached(self, tokens: Tensor, is_computed: Tensor) -> Tensor:
        """Logits of the rows bool [S] alone, the other positions read as the last refresh left them.

        The order of cached keys does not matter: they are stored turned, and nothing is masked.
        """
        from transformers import DynamicCache

        past = DynamicCache(config=self.model.config)
        for layer in range(self.config.num_hidden_layers):
            keys, values = self.cache.layers[layer].keys, self.cache.layers[layer].values
            past.update(keys[:, :, ~is_computed], values[:, :, ~is_computed], layer)
        return self._run(tokens, is_computed, past)

    def _run(self, tokens: Tensor, is_computed: Tensor, past: Any) -> Tensor:
        self.num_passes += 1
        rows = is_computed.nonzero().flatten()
        ids = torch.where(tokens < 0, self.config.mask_token_id, tokens)[rows][None].long()
        mask = torch.zeros(1, 1, len(rows), len(tokens))
        extra: dict[str, Any] = {"use_cache": past is not None}
        if past is not None:  # how this release of transformers is given one
            known = inspect.signature(self.model.forward).parameters
            extra["cache" if "cache" in known else "past_key_values"] = past
        with torch.no_grad():
            logits: Tensor = self.model(ids, attention_mask=mask, position_ids=rows[None], **extra).logits[0]
        logits[:, self.config.mask_token_id] = -torch.inf
        return logits


@pytest.fixture
def stock_canvas() -> Callable[[ModelConfig, Path], StockCanvas]:
    """Loads a checkpoint of a bidirectional family into transformers' stock class."""
    return StockCanvas
