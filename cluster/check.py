"""Exactness checked again, from what a run has stored: no model, no trust in the verdict columns.

Every row is held against its own columns (identity, path, digests, counts) and, when it is an accelerated one,
against its serialized run: same ``reference_key``, same item. The verdict is made anew and must equal the
stored one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from dlmgrid.cluster.report import cell_of
from dlmgrid.workers.cell import IMPORTED, reference_key
from dlmgrid.workers.decoding.paths import Verdict, compare, logits_digest, path_digest, steps_of
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.run_folder import inputs_fault, open_run, shard_fault, shard_path, unlisted
from dlmgrid.workers.shard import RejectedShardError, read_shard
from dlmgrid.workers.tables import GENERATIONS, read_table

Row = Mapping[str, Any]

_VERDICT_COLUMNS = (
    "exact_tokens",
    "exact_path",
    "exact_bits",
    "first_divergence_step",
    "first_divergence_position",
    "top2_margin",
)
_LEVELS = ("exact_tokens", "exact_path", "exact_bits")
# What two rows with the same tokens of the same prompt must share, whatever the drafter.
_SHARED_COLUMNS = ("text", "stop_reason", "generated_tokens")
# What decoding a row again must give again, beside the three levels.
_DECODED_AGAIN = (
    *_SHARED_COLUMNS, "prompt_tokens", "nfe_prefill", "nfe_commit", "nfe_total", "rounds", "drafted_nodes",
)  # fmt: skip
# What a row that could not be generated has none of.
GENERATION_COLUMNS = (
    "token_ids", "text", "stop_reason", "generated_tokens", "commit_positions", "commit_tokens", "commit_steps",
    "seed_positions", "seed_tokens",
    "path_digest", "step_digests", "logits_digest", "nfe_prefill", "nfe_denoise", "nfe_commit", "nfe_total",
    "rounds", "accepted", "drafted_nodes", "rows_computed", *_VERDICT_COLUMNS,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What one row was found to be. ``faults`` are findings that must not be; ``notes`` only explain.

    ``kind`` is ``stored`` (from the columns) or ``recomputed`` (decoded again). ``verdict`` is None where there
    is nothing to compare with.
    """

    cell_key: str
    item_id: str
    repeat: int
    reference_key: str
    kind: str
    verdict: Verdict | None
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_row(self, checked_at: datetime) -> dict[str, Any]:
        """The check as a row of ``tables.CHECKS``."""
        found = self.verdict
        return {
            "cell_key": self.cell_key,
            "item_id": self.item_id,
            "repeat": self.repeat,
            "reference_key": self.reference_key,
            "kind": self.kind,
            **{name: getattr(found, name) if found else None for name in _VERDICT_COLUMNS},
            "detail": "; ".join((*self.faults, *self.notes)) or None,
            "checked_at": checked_at,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChecks:
    """The checks of a whole run from its columns, with the keys (cell, item, repeat) that no row stands for."""

    checks: list[Check]
    missing: list[tuple[str, str, int]]

    @property
    def faulty(self) -> list[Check]:
        return [check for check in self.checks if check.faults]

    @property
    def num_compared(self) -> int:
        return sum(check.verdict is not None for check in self.checks)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChecks:
    """What the files of a run and its manifest disagree on, in words, and the committed files that are sound."""

    faults: list[str]
    inputs_faults: list[str]
    sound: list[str]


def now() -> datetime:
    return datetime.now(UTC)


def check_stored(run_dir: Path) -> StoredChecks:
    """Check every committed row of a run, in the files that are what the manifest says.

    Rows are read shard by shard, so memory does not grow with the run. Raises InputError for a folder that is
    not a run's.
    """
    index = _Index(check_files(run_dir).sound)
    checks = []
    missing = set(index.missing)
    for path in index.shards:
        for row in rows_of(path):
            try:
                reference = cell_of(row).reference()
            except InputError as error:
                checks.append(_stored_check(row, faults=(str(error),)))
                continue
            checks.append(_check_row(row, index))
            if row["claim"] == IMPORTED:
                continue
            serialized = (reference.cell_key, row["item_id"], row["repeat"])
            if not index.holds(serialized):
                missing.add(serialized)
    return StoredChecks(checks=checks, missing=sorted(missing))


def check_files(run_dir: Path) -> FileChecks:
    """Hold the committed files and the inputs against the manifest: there, unchanged, and of the keys it lists.

    Raises InputError for a folder that is not a run's, and for a manifest that cannot be read.
    """
    manifest = open_run(run_dir)
    faults: list[str] = []
    sound: list[str] = []
    for unit_key, shard in sorted(manifest.shards.items()):
        path = shard_path(run_dir, unit_key)
        fault = shard_fault(run_dir, shard)
        if not fault:
            sound.append(str(path))
            try:
                fault = "" if read_shard(path, sync=False) == shard else "is not what the manifest says of it"
            except RejectedShardError as error:
                fault = f"is no file of one unit: {error}"
                sound = sound if _is_readable(path) else sound[:-1]
        if fault:
            faults.append(f"generations/{path.name} {fault}")
    faults += [f"generations/{path.name} is not in the manifest" for path in unlisted(run_dir, manifest)]
    inputs_faults = [
        f"inputs/{file.name} {fault}"
        for file in manifest.inputs.values()
        if (fault := inputs_fault(run_dir, file))
    ]
    if manifest.shards and not manifest.inputs:
        inputs_faults.append(
            "the manifest names no inputs: the folder was written by an older version; run the same grid again, "
            "which records them"
        )
    return FileChecks(faults=faults, inputs_faults=inputs_faults, sound=sound)


def _is_readable(path: Path) -> bool:
    try:
        rows_of(str(path))
    except InputError:
        return False
    return True


@lru_cache(maxsize=8)
def rows_of(path: str) -> list[dict[str, Any]]:
    """The rows of one shard. The last few shards are kept, since neighbours share their reference rows."""
    rows: list[dict[str, Any]] = read_table([path], GENERATIONS).to_pylist()
    return rows


class _Index:
    """Where each key is stored and where its reference row is, from the key columns alone."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._copies: Counter[tuple[str, str, int]] = Counter()
        self._references: dict[tuple[str, str], tuple[str, int]] = {}
        by_reference: dict[str, str] = {}
        keys_of_inputs: dict[tuple[str, ...], set[tuple[str, int]]] = defaultdict(set)
        inputs_of_cell: dict[str, tuple[str, ...]] = {}
        columns = [
            "cell_key", "item_id", "repeat", "reference_key", "method", "fused_commit", "model", "benchmark",
            "prompt_version",
        ]  # fmt: skip
        for path in paths:
            by_reference[path] = ""
            for number, row in enumerate(read_table([path], GENERATIONS, columns).to_pylist()):
                self._copies[row["cell_key"], row["item_id"], row["repeat"]] += 1
                if row["method"] == "none" and not row["fused_commit"]:
                    self._references.setdefault((row["reference_key"], row["item_id"]), (path, number))
                by_reference[path] = by_reference[path] or row["reference_key"]
                inputs: tuple[str, ...] = (row["model"], row["benchmark"], row["prompt_version"])
                if row["method"] == IMPORTED:  # each imported file is complete in itself
                    inputs += (row["cell_key"],)
                inputs_of_cell[row["cell_key"]] = inputs
                keys_of_inputs[inputs].add((row["item_id"], row["repeat"]))
        self.shards = sorted(by_reference, key=lambda path: (by_reference[path], path))
        self.missing = [
            (cell_key, item_id, repeat)
            for cell_key, inputs in inputs_of_cell.items()
            for item_id, repeat in sorted(keys_of_inputs[inputs])
            if (cell_key, item_id, repeat) not in self._copies
        ]

    def copies(self, row: Row) -> int:
        return self._copies[row["cell_key"], row["item_id"], row["repeat"]]

    def holds(self, key: tuple[str, str, int]) -> bool:
        return key in self._copies

    def reference(self, row: Row) -> Row | None:
        place = self._references.get((row["reference_key"], row["item_id"]))
        return None if place is None else rows_of(place[0])[place[1]]


def _check_row(row: Row, index: _Index) -> Check:
    faults = list(own_faults(row))
    notes: list[str] = []
    verdict: Verdict | None = None
    if index.copies(row) > 1:
        faults.append(f"stored {index.copies(row)} times")
    if row["claim"] == IMPORTED:
        notes.append("unchecked: the text was made elsewhere")
        if any(row[name] is not None for name in _LEVELS):
            faults.append("a verdict is stored for an imported text")
    elif row["token_ids"] is None:
        notes.append("failed: " + (row["error"] or "no tokens and no error"))
        if row["error"] is None:
            faults.append("a row without tokens gives no error")
        held = [name for name in GENERATION_COLUMNS if row[name] is not None]
        if held:
            faults.append(f"a row without tokens holds {', '.join(held)}")
    elif not cell_of(row).is_reference:
        reference = index.reference(row)
        if reference is None or reference["token_ids"] is None:
            why = "failed" if reference is not None else "is missing, failed or is of another runtime"
            notes.append(f"unchecked: its serialized run {why}")
            if any(row[name] is not None for name in _LEVELS):
                faults.append("a verdict is stored although there is no serialized run to compare with")
        else:
            verdict, more = _compare(row, reference)
            faults += more
            if row["error"] is not None:
                faults.append(f"an error is stored although it can be compared: {row['error']}")
    elif any(row[name] is False for name in _LEVELS):
        faults.append("the serialized run differs from its second run")
    elif row["error"] is None and any(row[name] is None for name in _LEVELS):
        faults.append("the serialized run has no verdict against its second run")
    elif row["error"] is not None and any(row[name] is not None for name in _LEVELS):
        faults.append(f"an error is stored beside a verdict: {row['error']}")
    elif row["error"] is not None:
        notes.append(f"unchecked: {row['error']}")
    return _stored_check(row, verdict=verdict, faults=tuple(faults), notes=tuple(notes))


def _stored_check(
    row: Row, *, verdict: Verdict | None = None, faults: tuple[str, ...] = (), notes: tuple[str, ...] = ()
) -> Check:
    return Check(
        cell_key=row["cell_key"],
        item_id=row["item_id"],
        repeat=row["repeat"],
        reference_key=row["reference_key"],
        kind="stored",
        verdict=verdict,
        faults=faults,
        notes=notes,
    )


def _compare(row: Row, reference: Row) -> tuple[Verdict | None, list[str]]:
    try:
        verdict = compare(row, reference)
    except (TypeError, ValueError) as error:
        return None, [f"cannot be compared: {error}"]
    faults = [
        f"{name} is stored as {row[name]}, found {getattr(verdict, name)}"
        for name in _VERDICT_COLUMNS
        if not _same(row[name], getattr(verdict, name))
    ]
    if row["claim"] == "exact":
        faults += [f"{name} is false" for name in _LEVELS if not getattr(verdict, name)]
    shared = ["prompt_tokens", "prompt_digest"]
    if verdict.exact_tokens:
        shared += _SHARED_COLUMNS
    faults += [
        f"{name} differs from that of its serialized run" for name in shared if row[name] != reference[name]
    ]
    return verdict, faults


def _same(stored: object, found: object) -> bool:
    if isinstance(stored, float) and isinstance(found, float):
        return math.isclose(stored, found, rel_tol=1e-6, abs_tol=1e-9)
    return stored == found


def own_faults(row: Row) -> Iterator[str]:
    """What contradicts what within one row: identity, path, digests, tokens, counts."""
    cell = cell_of(row)
    if cell.cell_key != row["cell_key"]:
        yield f"cell_key is {row['cell_key']}, its settings give {cell.cell_key}"
    if cell.claim != row["claim"]:
        yield f"claim is {row['claim']}, its settings give {cell.claim}"
    expected = reference_key(cell, row["repeat"], row["runtime_fingerprint"] or "")
    if expected != row["reference_key"]:
        yield f"reference_key is {row['reference_key']}, its settings give {expected}"
    if row["temperature_text"] != format(cell.temperature, "g"):
        yield f"temperature_text is {row['temperature_text']}, the temperature {cell.temperature:g}"
    if row["token_ids"] is None:
        return
    try:
        steps = steps_of(row["commit_positions"], row["commit_tokens"], row["commit_steps"])
    except (TypeError, ValueError) as error:
        yield f"the path cannot be read: {error}"
        return
    if path_digest(steps) != row["path_digest"]:
        yield f"path_digest is {row['path_digest']}, its commits give {path_digest(steps)}"
    if row["step_digests"] is None or len(row["step_digests"]) != len(steps):
        yield f"{len(steps)} steps have {len(row['step_digests'] or [])} digests of logits"
    elif logits_digest(row["step_digests"]) != row["logits_digest"]:
        yield f"logits_digest is {row['logits_digest']}, its steps give {logits_digest(row['step_digests'])}"
    seeds = zip(row.get("seed_positions") or [], row.get("seed_tokens") or [], strict=True)
    yield from _token_faults(row, [commit for step in steps for commit in step] + list(seeds))
    yield from _count_faults(row, len(steps))


def _token_faults(row: Row, commits: Sequence[tuple[int, int]]) -> Iterator[str]:
    start, tokens = row["prompt_tokens"], row["token_ids"]
    by_position = dict(commits)
    if len(by_position) < len(commits):
        yield "a position is committed twice"
    if any(position < start for position in by_position):
        yield "a prompt position is committed"
    if row["generated_tokens"] != len(tokens):
        yield f"generated_tokens is {row['generated_tokens']}, there are {len(tokens)} tokens"
    if row["text"] is None:
        yield "a row with tokens has no text"
    if row["stop_reason"] not in ("eos", "length"):
        yield f"stop_reason is {row['stop_reason']}, not eos or length"
    elif row["stop_reason"] == "length" and len(tokens) != row["gen_length"]:
        yield f"stop_reason is length after {len(tokens)} of {row['gen_length']} tokens"
    elif row["stop_reason"] == "eos" and row["stop"] != "eos":
        yield f"stop_reason is eos, although the cell stops at {row['stop']}"
    if len(tokens) > row["gen_length"]:
        yield f"{len(tokens)} tokens exceed gen_length {row['gen_length']}"
    for offset, token in enumerate(tokens):
        if by_position.get(start + offset) != token:
            yield (
                f"token {offset} is {token}, the path commits {by_position.get(start + offset)} at position "
                f"{start + offset}"
            )
            return


def _count_faults(row: Row, num_steps: int) -> Iterator[str]:
    names = ("nfe_prefill", "nfe_denoise", "nfe_commit", "nfe_total", "rounds", "drafted_nodes", "budget")
    absent = [name for name in (*names, "prompt_tokens") if row[name] is None or row[name] < 0]
    if absent:
        yield f"no count is stored in {', '.join(absent)}"
        return
    parts = row["nfe_prefill"] + row["nfe_denoise"] + row["nfe_commit"]
    if row["nfe_total"] != parts:
        yield f"nfe_total is {row['nfe_total']}, its parts sum to {parts}"
    # a recheck is a second pass of its round, over some of the nodes that were drafted
    num_rechecks = row["nfe_denoise"] - row["rounds"]
    if not 0 <= num_rechecks <= (row["rounds"] if row.get("fold_recheck") else 0):
        yield f"nfe_denoise is {row['nfe_denoise']} in {row['rounds']} rounds"
    length, seeds = row["block_length"], row.get("seed_positions") or []
    from_prompt = (
        row["cache"] == "causal"
    )  # blocks lie from the prompt's end on, and the prompt fills blocks of its own
    prefills = 1 if from_prompt else int(row["prompt_tokens"] >= length)
    if row["nfe_prefill"] != prefills:
        yield f"nfe_prefill is {row['nfe_prefill']}, a prompt of {row['prompt_tokens']} tokens takes {prefills}"
    if row["commit_positions"]:
        lead = -row["prompt_tokens"] % length if from_prompt else 0
        first, last = (row["prompt_tokens"] + lead) // length, max(row["commit_positions"]) + lead
        num_blocks = last // length - first + 1
        num_commits = 1 if row.get("fused_commit") else num_blocks  # fused: only the last block's own pass
        may_stop_inside = (
            bool(seeds) and row["stop_reason"] == "eos"
        )  # such a run ends without the last commit pass
        if row["nfe_commit"] != num_commits - (may_stop_inside and row["nfe_commit"] < num_commits):
            yield f"nfe_commit is {row['nfe_commit']}, a path of {num_blocks} blocks takes {num_commits}"
        num_stored = row["nfe_commit"] if seeds else num_blocks
        num_segments = row["rounds"] + row["drafted_nodes"] + num_stored + first
        again, uneven = divmod(row["rows_computed"] - num_segments * length, length)
        most_again = row["drafted_nodes"] if num_rechecks > 0 else 0
        if row["cache"] in ("block", "causal") and (uneven or not num_rechecks <= again <= most_again):
            yield (
                f"rows_computed is {row['rows_computed']}, rounds, drafted nodes, blocks and prompt give "
                f"{num_segments * length}"
            )
    accepted = row["accepted"] or []
    if len(accepted) != row["rounds"]:
        yield f"{row['rounds']} rounds have {len(accepted)} accepted counts"
        return
    if row["rounds"] + sum(accepted) != num_steps:
        yield f"{row['rounds']} rounds that accept {sum(accepted)} cannot make {num_steps} steps"
    mean = sum(accepted) / len(accepted) if accepted else 0.0
    if not _same(row["accepted_per_round"], mean):
        yield f"accepted_per_round is {row['accepted_per_round']}, its rounds give {mean}"
    if row["method"] == "none" and (row["drafted_nodes"] or sum(accepted)):
        yield "a draft-free row has drafted nodes"
    elif not sum(accepted) <= row["drafted_nodes"] <= row["rounds"] * row["budget"]:
        yield (
            f"drafted_nodes is {row['drafted_nodes']}: {row['rounds']} rounds accepted {sum(accepted)} and may "
            f"draft {row['budget']} each"
        )


def compare_again(row: Row, again: Row) -> Check:
    """The check of a stored row against the same row decoded again.

    On the same runtime every level must be equal under exact numerics. On another runtime (device, kernels,
    torch or triton) a difference is a note: no claim reaches across runtimes.
    """
    faults: list[str] = []
    notes: list[str] = []
    verdict: Verdict | None = None
    if row["prompt_digest"] != again["prompt_digest"]:
        faults.append("the prompt has changed since this row was decoded")
    elif again["token_ids"] is None:
        faults.append(f"decoding it again failed: {again['error']}")
    else:
        verdict = compare(again, row)
        differs = [name for name in _LEVELS if not getattr(verdict, name)]
        differs += [name for name in _DECODED_AGAIN if row[name] != again[name]]
        text = f"decoded again, it differs in {', '.join(differs)}"
        if differs and row["runtime_fingerprint"] != again["runtime_fingerprint"]:
            notes.append(f"{text} (on another runtime: {again['runtime_fingerprint']})")
        elif differs and row["numerics"] != "exact":
            notes.append(f"{text} (numerics: {row['numerics']})")
        elif differs:
            faults.append(text)
    return Check(
        cell_key=row["cell_key"],
        item_id=row["item_id"],
        repeat=row["repeat"],
        reference_key=row["reference_key"],
        kind="recomputed",
        verdict=verdict,
        faults=tuple(faults),
        notes=tuple(notes),
    )
