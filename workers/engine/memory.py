"""What an engine takes, worked out before anything is allocated. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.config import KEY_TILE, ModelConfig

_BYTES_OF = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes by use. ``cache_bytes`` are the static key and value buffers of all slots."""

    weight_bytes: int
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes


def padded_length(max_length: int) -> int:
    """``max_length`` rounded up to whole key tiles: the positions that a slot's buffer has room for."""
    return -(-max_length // KEY_TILE) * KEY_TILE


def plan_memory(config: ModelConfig, *, num_slots: int, max_length: int, dtype: str) -> MemoryPlan:
    """Bytes that weights and buffers take for ``num_slots`` samples of up to ``max_length`` tokens."""
    if dtype not in _BYTES_OF:
        raise InputError(f"dtype: {dtype!r} is not one of {', '.join(_BYTES_OF)}")
    width = config.num_key_value_heads * config.head_dim * _BYTES_OF[dtype]
    tied_copy = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    return MemoryPlan(
        weight_bytes=(config.num_parameters + tied_copy) * _BYTES_OF[dtype],
        cache_bytes=2 * config.num_hidden_layers * num_slots * padded_length(max_length) * width,
    )


def check_memory(plan: MemoryPlan, budget_bytes: int, *, num_slots: int, max_length: int) -> None:
    """Raise InputError, naming the settings to lower, where the plan does not fit ``budget_bytes``."""
    if plan.weight_bytes > budget_bytes:
        raise InputError(
            f"model: its weights take {plan.weight_bytes / 1e9:.2f} GB, {budget_bytes / 1e9:.2f} GB are "
            "free; use dtype bfloat16, a smaller model or a larger device"
        )
    if plan.total_bytes > budget_bytes:
        per_slot = plan.cache_bytes // num_slots
        fitting = (budget_bytes - plan.weight_bytes) // per_slot
        raise InputError(
            f"max_in_flight: key/value buffers of {num_slots} samples x {max_length} tokens take "
            f"{plan.cache_bytes / 1e9:.2f} GB beside {plan.weight_bytes / 1e9:.2f} GB of weights, "
            f"{budget_bytes / 1e9:.2f} GB are free; "
            + (f"lower max_in_flight to {fitting}" if fitting else "lower gen_length or shorten the prompts")
        )


def available_memory() -> int | None:
    """Bytes of host memory that can be taken now, or None where the system does not say (not Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
