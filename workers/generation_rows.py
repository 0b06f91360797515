"""Rows of the ``generations`` table from decoded samples, and their verdicts."""

from __future__ import annotations

import hashlib
from typing import Any

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.decoder import Generation
from dlmgrid.workers.decoding.paths import Verdict, logits_digest, path_digest
from dlmgrid.workers.rows import Provenance, blank_row
from dlmgrid.workers.units import Key

VERDICT_COLUMNS = (
    "exact_tokens", "exact_path", "exact_bits",
    "first_divergence_step", "first_divergence_position", "top2_margin",
)  # fmt: skip


def token_digest(token_ids: tuple[int, ...]) -> str:
    """16 hexadecimal digits over a prompt's token ids."""
    text = ",".join(map(str, token_ids))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def generation_row(
    cell: Cell, key: Key, provenance: Provenance, generation: Generation, text: str, *, profiled: bool
) -> dict[str, Any]:
    """The row of a decoded sample, its verdict still open."""
    row = blank_row(cell, key, provenance)
    commits = [
        (position, token, step, margin)
        for step, (made, margins) in enumerate(zip(generation.steps, generation.margins, strict=True))
        for (position, token), margin in zip(made, margins, strict=True)
    ]
    seconds = generation.seconds
    nfe_total = generation.nfe_prefill + generation.nfe_denoise + generation.nfe_commit
    nfe_total += generation.nfe_draft
    num_tokens = len(generation.token_ids)
    row.update(
        prompt_tokens=len(generation.prompt.token_ids),
        prompt_digest=token_digest(generation.prompt.token_ids),
        token_ids=generation.token_ids,
        text=text,
        stop_reason=generation.stop_reason,
        generated_tokens=num_tokens,
        commit_positions=[commit[0] for commit in commits],
        commit_tokens=[commit[1] for commit in commits],
        commit_steps=[commit[2] for commit in commits],
        commit_margins=[commit[3] for commit in commits],
        seed_positions=[position for position, _ in generation.seeds],
        seed_tokens=[token for _, token in generation.seeds],
        path_digest=path_digest(generation.steps),
        step_digests=generation.digests,
        logits_digest=logits_digest(generation.digests),
        nfe_prefill=generation.nfe_prefill,
        nfe_denoise=generation.nfe_denoise,
        nfe_commit=generation.nfe_commit,
        nfe_draft=generation.nfe_draft,
        nfe_total=nfe_total,
        rounds=len(generation.accepted),
        accepted=generation.accepted,
        accepted_per_round=sum(generation.accepted) / max(1, len(generation.accepted)),
        argmax_commits=generation.argmax_commits,
        drafted_nodes=generation.drafted_nodes,
        rows_computed=generation.rows_computed,
        profiled=profiled,
        batch_size=generation.batch_size,
        batch_position=generation.batch_position,
    )
    if generation.fold_rows:
        ratios = [count / generation.fold_rows for count in generation.fold_recomputed]
        row.update(recompute_ratios=ratios, recompute_ratio=sum(ratios) / len(ratios))
    if profiled and cell.fold_tau is not None:
        row.update(
            seconds_select=seconds.select,
            seconds_move=seconds.move,
            seconds_compute=seconds.compute,
            seconds_correct=seconds.correct,
        )
    if profiled:
        row.update(
            seconds_draft=seconds.draft,
            seconds_verify=seconds.verify,
            seconds_sample=seconds.sample,
            seconds_other=seconds.other,
        )
    else:
        row.update(seconds_wall=seconds.wall, tokens_per_second=num_tokens / seconds.wall)
    return row


def set_verdict(row: dict[str, Any], verdict: Verdict) -> None:
    """Put a verdict into its columns of a row."""
    row.update({name: getattr(verdict, name) for name in VERDICT_COLUMNS})
