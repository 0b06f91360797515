"""The reference model while it trains: SDAR's architecture in plain PyTorch, and the block-diffusion
objective.

B batch, L sequence length, H heads, K key/value heads, D head dimension, V vocabulary. Tensor names are
those of SDAR's checkpoints (JetAstra/SDAR), so the state dict is the checkpoint. Decoding goes through
``dlmgrid.workers.models`` instead; this module exists for training and for an evaluation that shares no
code with what it evaluates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """The fields of config.json that fix the shapes."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    block_size: int = 32
    max_position_embeddings: int = 2048


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rotary_tables(positions: Tensor, settings: ModelSettings) -> tuple[Tensor, Tensor]:
    """Cosines and sines [L, D] for half-split rotary embeddings."""
    exponents = torch.arange(0, settings.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = settings.rope_theta ** (-exponents / settings.head_dim)
    angles = positions.float()[:, None] * frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, H, L, D]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        width = settings.num_attention_heads * settings.head_dim
        kv_width = settings.num_key_value_heads * settings.head_dim
        self.q_proj = nn.Linear(settings.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(settings.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(settings.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, settings.hidden_size, bias=False)
        self.q_norm = RMSNorm(settings.head_dim, settings.rms_norm_eps)
        self.k_norm = RMSNorm(settings.head_dim, settings.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        B, L, _ = x.shape
        D = self.settings.head_dim
        groups = self.settings.num_attention_heads // self.settings.num_key_value_heads
        q = rotate(self.q_norm(self.q_proj(x).view(B, L, -1, D)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(B, L, -1, D)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(B, L, -1, D).transpose(1, 2)
        k = k.repeat_interleave(groups, dim=1).to(v.dtype)
        v = v.repeat_interleave(groups, dim=1)
        out = functional.scaled_dot_product_attention(q.to(v.dtype), k, v, attn_mask=mask)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(B, L, -1))
        return result


class MLP(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(settings.hidden_size, settings.intermediate_size, bias=False)
        self.up_proj = nn.Linear(settings.hidden_size, settings.intermediate_size, bias=False)
        self.down_proj = nn.Linear(settings.intermediate_size, settings.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self.self_attn = Attention(settings)
        self.post_attention_layernorm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self.mlp = MLP(settings)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Backbone(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(settings.vocab_size, settings.hidden_size)
        self.layers = nn.ModuleList([Layer(settings) for _ in range(settings.num_hidden_layers)])
        self.norm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)


class ReferenceModel(nn.Module):
    """A tied-embedding SDAR decoder. ``model.*`` are the checkpoint's tensors; there is no
    ``lm_head.weight``."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.model = Backbone(settings)
        scale = (2 * settings.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 * (scale if residual else 1.0))

    def hidden(self, token_ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Final normed states [B, L, hidden] for ids [B, L], positions [L], boolean mask [L, L] (True:
        attend)."""
        x = self.model.embed_tokens(token_ids)
        cos, sin = rotary_tables(positions, self.settings)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        result: Tensor = self.model.norm(x)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V]; row i predicts position i."""
        return functional.linear(hidden, self.model.embed_tokens.weight)


def block_causal_mask(length: int, block_length: int, device: torch.device) -> Tensor:
    """[L, L], True where the query's block is not before the key's (absolute grid)."""
    block = torch.arange(length, device=device) // block_length
    return block[:, None] >= block[None, :]


def training_mask(length: int, block_length: int, device: torch.device) -> Tensor:
    """[2L, 2L] over a clean copy, then a noised copy: clean sees clean block-causally, a noised block
    sees the clean blocks before it and itself (the vectorised objective of BD3-LM, arXiv:2503.09573,
    section 3)."""
    block = torch.arange(length, device=device) // block_length
    query, key = block[:, None], block[None, :]
    clean = torch.cat((query >= key, torch.zeros_like(query >= key)), dim=1)
    noised = torch.cat((query > key, query == key), dim=1)
    return torch.cat((clean, noised), dim=0)


@dataclass(frozen=True, slots=True)
class Noised:
    """A noised batch: ids [B, L], which positions are masked [B, L] and the weight of each one's loss [B,
    L]."""

    token_ids: Tensor
    masked: Tensor
    weights: Tensor


def add_noise(
    token_ids: Tensor,
    prompt_lengths: Tensor,
    block_length: int,
    mask_token_id: int,
    generator: torch.Generator,
) -> Noised:
    """Mask m of the n answer positions of every block, m uniform in 1..n, the m positions uniform.

    A masked position weighs n / m: summed over positions this is the any-order bound on the block's
    negative log likelihood, the discrete form of the 1/t weight. Prompt positions are never masked, also
    those that share a block with the answer.
    """
    B, L = token_ids.shape
    device = token_ids.device
    is_answer = torch.arange(L, device=device)[None, :] >= prompt_lengths[:, None]
    by_block = is_answer.view(B, -1, block_length)
    n = by_block.sum(-1, keepdim=True)
    keys = torch.rand(by_block.shape, device=device, generator=generator)
    rank = torch.where(by_block, keys, 2.0).argsort(-1).argsort(-1)
    uniform = torch.rand(n.shape, device=device, generator=generator)
    m = (1 + (uniform * n).long()).minimum(n)
    masked = rank < m
    weights = torch.where(masked, n / m.clamp(min=1), 0.0)
    masked = masked.view(B, L)
    return Noised(token_ids.masked_fill(masked, mask_token_id), masked, weights.view(B, L))


def diffusion_loss(
    model: ReferenceModel, token_ids: Tensor, prompt_lengths: Tensor, noised: Noised
) -> Tensor:
    """The bound on the negative log likelihood, in nats per answer token (scalar)."""
    L = token_ids.shape[1]
    device = token_ids.device
    mask = training_mask(L, model.settings.block_size, device)
    positions = torch.arange(L, device=device).repeat(2)
    hidden = model.hidden(torch.cat((token_ids, noised.token_ids), dim=1), positions, mask)[:, L:]
    logits = model.logits(hidden).float().flatten(0, 1)  # the loss over [B, V, L] has no deterministic kernel
    loss = functional.cross_entropy(logits, token_ids.flatten(), reduction="none")
    num_answer = (L - prompt_lengths).sum()
    return (loss * noised.weights.flatten()).sum() / num_answer
