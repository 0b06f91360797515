"""``dlmgrid models`` and ``dlmgrid models check PATH``: the known models, and what a checkpoint folder holds."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dlmgrid.jobs.console import table_console
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.catalog import REFERENCE, known_models, resolve_checkpoint
from dlmgrid.workers.models.checkpoint import check_checkpoint
from dlmgrid.workers.models.families import get_family
from dlmgrid.workers.models.fingerprint import weight_fingerprint
from dlmgrid.workers.tokenization import load_tokenizer

GIB = 2**30
READ_AT_MOST = GIB
"""Weights that ``check`` reads for their fingerprint; larger ones would take it longer than the seconds it may."""

SHOWN_SAMPLES, SHOWN_TOKENS = 8, 2048


def command(
    action: Annotated[str | None, typer.Argument(help="`check`, or nothing to list the models.")] = None,
    path: Annotated[str | None, typer.Argument(help="Folder, hub id, or `reference`.")] = None,
) -> None:
    """List the known models, or check a checkpoint: configuration, tensors, special ids, tokenizer."""
    if action is None:
        _list_models()
    elif action != "check":
        raise InputError(
            f"models: unknown action {action!r}; use `dlmgrid models` or `dlmgrid models check PATH`"
        )
    elif path is None:
        raise InputError("models check: which checkpoint? give a folder, a hub id, or `reference`")
    else:
        _check(path)


def _list_models() -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("model", "family", "block", "cache"):
        table.add_column(heading, no_wrap=True)
    table.add_column("exactness")
    for heading in ("parameters", "bf16 weights", "KV per 1k tokens", "memory needed"):
        table.add_column(heading, justify="right")
    table.add_row(f"{REFERENCE} (ships with the project)", "sdar", "", "block", "exact", "", "", "", "")
    for model in known_models():
        family = get_family(model.family)
        cache = model.cache_bytes_per_token * SHOWN_SAMPLES * SHOWN_TOKENS
        table.add_row(
            model.name + ("*" if model.note else ""),
            model.family,
            str(model.block_length or "whole"),
            ", ".join(family.caches),
            family.exactness,
            f"{model.parameters / 1e9:.2f} B",
            f"{model.weight_bytes / GIB:.1f} GiB",
            f"{1024 * model.cache_bytes_per_token / 2**20:.0f} MiB",
            f"{(model.weight_bytes + cache) / GIB:.1f} GiB",
        )
    console = table_console()
    console.print(table)
    console.print(
        f"memory needed: bf16 weights and the key/value cache of {SHOWN_SAMPLES} samples of {SHOWN_TOKENS} tokens; the "
        "first cache is the default. Decode rules are the reference implementation's unless a grid names another: "
        "`dlmgrid models check PATH` lists them."
    )
    for model in known_models():
        if model.note:
            console.print(f"* {model.name}: {model.note}")


def _check(path: str) -> None:
    folder = resolve_checkpoint(path)
    config = check_checkpoint(folder)
    encoder = load_tokenizer(folder)
    encoder.check_template()
    template = "the checkpoint's own, renders a message"
    if encoder.template is None:
        shipped = encoder.shipped_template or "NAME"
        template = f"none: chat benchmarks need `chat_template: {shipped}` for this model in the grid"
    console = Console(soft_wrap=True, highlight=False)
    heads = f"{config.num_attention_heads} heads over {config.num_key_value_heads}"
    stops = ", ".join(map(str, config.stop_token_ids))
    family = get_family(config.family)
    for label, text in (
        ("checkpoint", str(folder)),
        ("family", config.family),
        ("parameters", f"{config.num_parameters:,}"),
        ("layers", f"{config.num_hidden_layers} of width {config.hidden_size}, {heads}"),
        ("vocabulary", f"{config.vocab_size}, mask token {config.mask_token_id}, stop tokens {stops}"),
        ("block length", str(config.block_length or "the whole generation")),
        ("cache", f"{', '.join(family.caches)} ({family.exactness})"),
        ("decoder", family.decoder.source),
        ("variants", "; ".join(f"{name} ({rule.source})" for name, rule in family.variants.items())),
        ("positions", str(config.max_position_embeddings)),
        ("chat template", template),
        (
            "weights",
            weight_fingerprint(folder, read_at_most=READ_AT_MOST) or "not read yet: the first run does",
        ),
    ):
        console.print(f"{label + ':':<15}{text}", markup=False)
    console.print(
        "ok: every tensor, id and token is as the configuration says, and the tokenizer loads; values are not read"
    )
