"""Train the reference model: ``python -m dlmgrid.jobs.train_reference --device cuda --steps N --out
FOLDER``.

Writes the text, trains a tokenizer and a block-diffusion model in SDAR's checkpoint format, evaluates it
on held-out problems and writes a model card. The same settings and seed give the same weights on one kind
of device. ``--minutes`` chooses the number of steps by measuring the first ones; give the number it
reports as ``--steps`` to repeat a run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from dlmgrid.jobs.reference_card import write_card
from dlmgrid.jobs.reference_evaluation import evaluate, load_trained
from dlmgrid.jobs.reference_model import ModelSettings, ReferenceModel, add_noise, diffusion_loss
from dlmgrid.jobs.reference_text import (
    MASK,
    PAD,
    TURN_END,
    LengthGroup,
    TextSettings,
    save_tokenizer,
    special_id,
    train_tokenizer,
    training_text,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Everything that fixes the weights, given a kind of device. ``learning_rate`` is the peak; it rises over
    ``warmup_steps`` and falls along a cosine to a hundredth. A batch holds about ``batch_tokens`` tokens."""

    seed: int = 1
    steps: int = 6000
    batch_tokens: int = 32_768
    learning_rate: float = 2e-3
    warmup_steps: int = 500
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    log_every: int = 200
    model: ModelSettings = field(default_factory=ModelSettings)
    text: TextSettings = field(default_factory=TextSettings)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run leaves: the model, its loss curve as (step, mean loss since the last point), time and
    steps."""

    model: ReferenceModel
    losses: list[tuple[int, float]]
    steps: int
    seconds: float


class Batches:
    """Batches of one length each, drawn in proportion to the lengths' share; every group is reshuffled
    when it is used up. The order depends on the seed only."""

    def __init__(
        self, groups: dict[int, LengthGroup], *, batch_tokens: int, seed: int, device: torch.device
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.token_ids = [torch.from_numpy(group.token_ids).to(device) for group in groups.values()]
        self.prompt_lengths = [torch.from_numpy(group.prompt_lengths).to(device) for group in groups.values()]
        self.sizes = [max(1, min(len(ids), batch_tokens // ids.shape[1])) for ids in self.token_ids]
        self.shares = torch.tensor([float(ids.numel()) for ids in self.token_ids])
        self.orders = [torch.empty(0, dtype=torch.long) for _ in self.token_ids]
        self.device = device

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [B, L] (int64) and prompt lengths [B]."""
        group = int(torch.multinomial(self.shares, 1, generator=self.generator))
        size = self.sizes[group]
        if len(self.orders[group]) < size:
            self.orders[group] = torch.randperm(len(self.token_ids[group]), generator=self.generator)
        rows, self.orders[group] = self.orders[group][:size], self.orders[group][size:]
        rows = rows.to(self.device)
        return self.token_ids[group][rows].long(), self.prompt_lengths[group][rows].long()


def learning_rate(settings: TrainSettings, step: int, steps: int) -> float:
    """The rate of ``step`` (from 0) in a run of ``steps``."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    return settings.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(
    settings: TrainSettings,
    groups: dict[int, LengthGroup],
    *,
    mask_token_id: int,
    device: torch.device,
    minutes: float | None = None,
) -> Trained:
    """Train from scratch. With ``minutes``, the number of steps is what the time allows at the measured
    speed."""
    torch.manual_seed(settings.seed)
    model = ReferenceModel(settings.model).to(device)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    batches = Batches(groups, batch_tokens=settings.batch_tokens, seed=settings.seed, device=device)
    noise = torch.Generator(device).manual_seed(settings.seed)
    steps = settings.steps
    losses: list[tuple[int, float]] = []
    window: list[torch.Tensor] = []
    started = time.perf_counter()
    measured_from = 0.0
    step = 0
    while step < steps:
        if minutes is not None and step in (20, 100):
            if device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            if step == 100:
                left = minutes * 60 - (now - started)
                steps = 100 + max(100, int(left / (now - measured_from) * 80) // 100 * 100)
                print(f"{(now - measured_from) / 80 * 1000:.1f} ms a step: --steps {steps}", flush=True)
            measured_from = now
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, steps)
        token_ids, prompt_lengths = batches.next()
        noised = add_noise(token_ids, prompt_lengths, settings.model.block_size, mask_token_id, noise)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = diffusion_loss(model, token_ids, prompt_lengths, noised)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        window.append(loss.detach())
        step += 1
        if step % settings.log_every == 0 or step == steps:
            losses.append((step, torch.stack(window).mean().item()))
            window.clear()
            print(
                f"step {step}/{steps} loss {losses[-1][1]:.4f} {time.perf_counter() - started:.0f} s",
                flush=True,
            )
            if not math.isfinite(losses[-1][1]):
                raise FloatingPointError(
                    f"the loss is {losses[-1][1]} at step {step}: lower the learning rate"
                )
    return Trained(model, losses, steps, time.perf_counter() - started)


def save_checkpoint(model: ReferenceModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors (bf16) and the tokenizer, in SDAR's
    format."""
    folder.mkdir(parents=True, exist_ok=True)
    stop, pad, mask = (special_id(tokenizer, token) for token in (TURN_END, PAD, MASK))
    config = {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        **asdict(model.settings),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "mask_token_id": mask,
        "bos_token_id": pad,
        "eos_token_id": stop,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
    }
    generation = {"bos_token_id": pad, "eos_token_id": [stop, pad], "pad_token_id": pad}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder, max_length=model.settings.max_position_embeddings)
    tensors = {
        name: tensor.detach().cpu().bfloat16().contiguous() for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_deterministic() -> None:
    """Refuse operations whose result depends on thread timing. Call before the first CUDA operation."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def run(
    settings: TrainSettings,
    out: Path,
    *,
    device: str,
    minutes: float | None = None,
    num_words: int = 500,
    num_functions: int = 400,
    gen_length: int = 96,
) -> dict[str, Any]:
    """Write the text, train, save, evaluate, write the card; returns what ``training.json`` holds."""
    make_deterministic()
    started = time.perf_counter()
    tokenizer = train_tokenizer(settings.text)
    groups = training_text(settings.text, tokenizer, settings.model.block_size)
    sizes = {str(blocks): len(group.token_ids) for blocks, group in groups.items()}
    print(f"text: {time.perf_counter() - started:.0f} s, examples by number of blocks {sizes}", flush=True)
    trained = train(
        settings,
        groups,
        mask_token_id=special_id(tokenizer, MASK),
        device=torch.device(device),
        minutes=minutes,
    )
    save_checkpoint(trained.model, tokenizer, out)
    record: dict[str, Any] = {
        "settings": asdict(settings),
        "steps": trained.steps,
        "minutes": round(trained.seconds / 60, 2),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
        "examples_by_blocks": sizes,
        "losses": [(step, round(loss, 4)) for step, loss in trained.losses],
        "evaluation": None,
    }
    write_card(out, record)
    if num_words or num_functions:
        model, tokenizer = load_trained(out, device)
        record["evaluation"] = evaluate(
            model, tokenizer, num_words=num_words, num_functions=num_functions, gen_length=gen_length
        )
        write_card(out, record)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, help="number of steps")
    length.add_argument("--minutes", type=float, help="time to train for; the steps are measured")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="processes that write the text")
    args = parser.parse_args()
    settings = TrainSettings(
        seed=args.seed,
        steps=args.steps or 1000,
        text=TextSettings(seed=args.seed, num_processes=args.processes),
    )
    record = run(settings, args.out, device=args.device, minutes=args.minutes)
    print(json.dumps(record["evaluation"], indent=2))


if __name__ == "__main__":
    main()
