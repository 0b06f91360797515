"""``dlmgrid check OUT``: the exactness of a stored run, verified again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dlmgrid.cluster.check import Check, check_files, check_stored
from dlmgrid.cluster.recompute import check_recomputed, sample_name, sample_rows, write_checks

NUM_SHOWN = 20


def command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder of a run.")],
    sample: Annotated[int, typer.Option(min=0, help="Rows to decode again; 0 decodes none.")] = 8,
    seed: Annotated[int, typer.Option(help="Chooses the sample.")] = 0,
    device: Annotated[str, typer.Option(help="Where to decode the sample: cpu or cuda.")] = "cpu",
) -> int:
    """Verify exactness again, from the stored tokens, commits and digests, and by decoding a sample.

    Every file is held against the manifest, every row against its own columns, its text against its tokens (where
    the model's tokenizer is on this machine), and against its serialized run; then --sample rows are decoded again
    in a fresh process. Only the latter can see tokens, paths and digests that were all rewritten to agree, manifest
    included: --sample 0 cannot. Findings go to OUT/checks. Exits with 4 when anything differs, with 5 when rows are
    missing, with 1 when rows failed and so nothing could be compared.
    """
    console = Console(soft_wrap=True, highlight=False)
    stored = check_stored(out)
    files = check_files(out)
    file_faults = [*files.faults, *files.inputs_faults]
    for fault in file_faults:
        console.print(fault, style="red", markup=False)
    if files.faults:
        console.print("restore these files, or run the same grid again: what changed is decoded again")
    write_checks(out, "stored", stored.checks)
    console.print(f"stored rows: {len(stored.checks)}, {_levels(stored.checks)}")
    _show_faults(console, stored.checks)
    for reason, count in stored.unread.items():
        console.print(
            f"{count} texts are not held against their tokens: {reason}", style="yellow", markup=False
        )
    if stored.missing:
        cells = len({cell_key for cell_key, _, _ in stored.missing})
        console.print(
            f"[yellow]{len(stored.missing)} rows of {cells} cells are missing; run the grid again[/yellow]"
        )

    recomputed: list[Check] = []
    if files.inputs_faults:
        console.print("no rows are decoded again: their inputs are not those of the run", style="red")
        sample = 0
    rows = sample_rows(out, sample, seed) if sample else []
    if rows:
        from dlmgrid.workers.runtime import check_device

        check_device(device)
        recomputed = check_recomputed(out, rows, device)
        write_checks(out, sample_name(recomputed), recomputed)
        console.print(f"rows decoded again: {len(recomputed)}, {_levels(recomputed)}")
        _show_faults(console, recomputed)

    if file_faults or any(check.faults for check in (*stored.checks, *recomputed)):
        return 4
    if stored.missing or not stored.checks:
        return 5
    return 1 if not stored.num_compared and _explain_nothing_compared(console, stored.checks) else 0


def _explain_nothing_compared(console: Console, checks: Sequence[Check]) -> bool:
    """Say why no row was held against its serialized run; True when there was any to be."""
    num_open = sum(bool(check.notes) for check in checks)
    if num_open:
        why = f"{num_open} of {len(checks)} rows failed or have no serialized run"
        console.print(f"nothing was compared: {why}; run the grid again with --retry-failed", style="red")
    else:
        console.print("nothing was compared: the run holds draft-free rows only", style="yellow")
    return num_open > 0


def _levels(checks: Sequence[Check]) -> str:
    verdicts = [check.verdict for check in checks if check.verdict is not None]
    equal = Counter[str]()
    for verdict in verdicts:
        equal["tokens"] += verdict.exact_tokens
        equal["path"] += verdict.exact_path
        equal["bits"] += verdict.exact_bits
    counts = " ".join(f"{equal[level]}/{len(verdicts)} {level}" for level in ("tokens", "path", "bits"))
    return f"compared {len(verdicts)}: {counts} equal"


def _show_faults(console: Console, checks: Sequence[Check]) -> None:
    faulty = [check for check in checks if check.faults]
    for check in faulty[:NUM_SHOWN]:
        console.print(
            f"{check.cell_key} {check.item_id} repeat {check.repeat}: {'; '.join(check.faults)}",
            style="red",
            markup=False,
        )
    if len(faulty) > NUM_SHOWN:
        console.print(f"… and {len(faulty) - NUM_SHOWN} more rows; see OUT/checks", style="red")
    noted = Counter(note for check in checks for note in check.notes)
    for note, count in noted.most_common(NUM_SHOWN):
        console.print(f"{count} × {note}", style="yellow", markup=False)
