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
from dlmgrid.workers.models.fingerprint import weight_fingerprint
from dlmgrid.workers.tokenization import load_tokenizer

GIB = 2**30


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
    table = Table("model", "family", "block", "cache", box=box.SIMPLE_HEAD)
    for heading in ("parameters", "bf16 weights", "KV per 1k tokens"):
        table.add_column(heading, justify="right")
    table.add_column("note")
    table.add_row(REFERENCE, "sdar", "", "block (exact)", "", "", "", "ships with the project")
    for model in known_models():
        table.add_row(
            model.name,
            model.family,
            str(model.block_length),
            model.cache,
            f"{model.parameters / 1e9:.2f} B",
            f"{model.weight_bytes / GIB:.1f} GiB",
            f"{1024 * model.cache_bytes_per_token / 2**20:.0f} MiB",
            model.note,
        )
    table_console().print(table)


def _check(path: str) -> None:
    folder = resolve_checkpoint(path)
    config = check_checkpoint(folder)
    encoder = load_tokenizer(folder)
    encoder.check_template()
    template = "the checkpoint's own, renders a message"
    if encoder.template is None:
        template = "none: chat benchmarks need `chat_template: chatml` for this model in the grid"
    console = Console(soft_wrap=True, highlight=False)
    heads = f"{config.num_attention_heads} heads over {config.num_key_value_heads}"
    stops = ", ".join(map(str, config.stop_token_ids))
    for label, text in (
        ("checkpoint", str(folder)),
        ("family", config.family),
        ("parameters", f"{config.num_parameters:,}"),
        ("layers", f"{config.num_hidden_layers} of width {config.hidden_size}, {heads}"),
        ("vocabulary", f"{config.vocab_size}, mask token {config.mask_token_id}, stop tokens {stops}"),
        ("block length", str(config.block_length)),
        ("positions", str(config.max_position_embeddings)),
        ("chat template", template),
        ("weights", weight_fingerprint(folder)),
    ):
        console.print(f"{label + ':':<15}{text}", markup=False)
    console.print("ok: every tensor, id and token is as the configuration says, and the tokenizer loads")
