"""The Arrow schemas of every table, fixed and versioned; nothing is ever inferred.

A column marked *deterministic* has the same value in two runs of the same grid on the same kind of device;
"identical rows" means equal in those columns. A new version of a schema starts a new folder or rewrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dlmgrid.workers.cell import CELL_FIELDS
from dlmgrid.workers.errors import InputError

SCHEMA_VERSION = 2


def _column(name: str, kind: pa.DataType, *, deterministic: bool = True, nullable: bool = True) -> pa.Field:
    return pa.field(name, kind, nullable, {"deterministic": "yes" if deterministic else "no"})


def _key(name: str, kind: pa.DataType) -> pa.Field:
    return _column(name, kind, nullable=False)


def _measured(name: str, kind: pa.DataType) -> pa.Field:
    return _column(name, kind, deterministic=False)


def _schema(name: str, columns: Sequence[pa.Field]) -> pa.Schema:
    return pa.schema(columns, {"dlmgrid.table": name, "dlmgrid.schema_version": str(SCHEMA_VERSION)})


_INTS = pa.list_(pa.int32())

GENERATIONS = _schema(
    "generations",
    [
        _key("cell_key", pa.string()),
        _key("model", pa.string()),
        _key("family", pa.string()),
        _key("revision", pa.string()),
        _key("weight_fingerprint", pa.string()),
        _key("benchmark", pa.string()),
        _key("prompt_version", pa.string()),
        _key("chat_template", pa.string()),
        _key("num_fewshot", pa.int32()),
        _key("item_id", pa.string()),
        _key("repeat", pa.int32()),
        # settings of the cell
        _key("method", pa.string()),
        _key("drafter_fingerprint", pa.string()),
        _key("budget", pa.int32()),
        _key("temperature", pa.float64()),
        _key("temperature_text", pa.string()),
        _key("verification", pa.string()),
        _key("noise", pa.string()),
        _key("seed", pa.string()),
        _key("decoder", pa.string()),
        _key("commits_per_step", pa.int32()),
        _column("threshold", pa.float64()),
        _column("comparison", pa.string()),
        _column("factor", pa.float64()),
        _column("steps", pa.int32()),
        _key("confidence", pa.string()),
        _column("alg_temp", pa.float64()),
        _column("top_p", pa.float64()),
        _column("top_k", pa.int32()),
        _column("eos_policy", pa.string()),
        _key("sub_block_length", pa.int32()),
        _key("fused_commit", pa.bool_()),
        _key("window", pa.string()),
        _column("gamma", pa.float64()),
        _column("fold_tau", pa.float64()),
        _key("fold_tau_by_layer", pa.string()),
        _key("fold_gate", pa.string()),
        _key("fold_recheck", pa.bool_()),
        _key("fold_pipelined", pa.bool_()),
        _column("product_tau", pa.float64()),
        _key("cache", pa.string()),
        _key("block_length", pa.int32()),
        _key("gen_length", pa.int32()),
        _key("stop", pa.string()),
        _key("numerics", pa.string()),
        _key("kernels", pa.string()),
        _key("dtype", pa.string()),
        _key("max_in_flight", pa.int32()),
        _key("claim", pa.string()),
        _key("reference_key", pa.string()),
        # the generation
        _column("prompt_tokens", pa.int32()),
        _column("prompt_digest", pa.string()),
        _column("token_ids", _INTS),
        _column("text", pa.string()),
        _column("stop_reason", pa.string()),
        _column("generated_tokens", pa.int32()),
        # the path: step i commits commit_positions[k] for every k with commit_steps[k] == i
        _column("commit_positions", _INTS),
        _column("commit_tokens", _INTS),
        _column("commit_steps", _INTS),
        # first tokens of blocks that the pass before them gave; no step commits them
        _column("seed_positions", _INTS),
        _column("seed_tokens", _INTS),
        _column("path_digest", pa.string()),
        _column("step_digests", pa.list_(pa.string())),
        _column("commit_margins", pa.list_(pa.float32())),
        _column("logits_digest", pa.string()),
        # forwards
        _column("nfe_prefill", pa.int32()),
        _column("nfe_denoise", pa.int32()),
        _column("nfe_commit", pa.int32()),
        _column("nfe_draft", pa.int32()),
        _column("nfe_total", pa.int32()),
        _column("rounds", pa.int32()),
        _column("accepted_per_round", pa.float64()),
        _column("accepted", _INTS),
        # commits whose token is the most probable one where it was committed
        _column("argmax_commits", pa.int32()),
        _column("drafted_nodes", pa.int32()),
        _column("rows_computed", pa.int64()),
        _column("recompute_ratio", pa.float64()),
        # of the rows that could fold, by layer
        _column("recompute_ratios", pa.list_(pa.float64())),
        # time, seconds
        _measured("seconds_wall", pa.float64()),
        _measured("seconds_draft", pa.float64()),
        _measured("seconds_verify", pa.float64()),
        _measured("seconds_select", pa.float64()),
        _measured("seconds_compute", pa.float64()),
        _measured("seconds_correct", pa.float64()),
        _measured("seconds_move", pa.float64()),
        _measured("seconds_sample", pa.float64()),
        _measured("seconds_other", pa.float64()),
        _measured("profiled", pa.bool_()),
        _measured("tokens_per_second", pa.float64()),
        _measured("batch_size", pa.int32()),
        _measured("batch_position", pa.int32()),
        # verdicts against the serialized run; null where there is none
        _column("exact_tokens", pa.bool_()),
        _column("exact_path", pa.bool_()),
        _column("exact_bits", pa.bool_()),
        _column("first_divergence_step", pa.int32()),
        _column("first_divergence_position", pa.int32()),
        _column("top2_margin", pa.float64()),
        _column("error", pa.string()),
        # provenance
        _measured("run_id", pa.string()),
        _measured("actor", pa.string()),
        _measured("attempt", pa.int32()),
        _measured("device", pa.string()),
        _measured("runtime_fingerprint", pa.string()),
        _measured("product_version", pa.string()),
        _measured("torch_version", pa.string()),
        _measured("triton_version", pa.string()),
        _measured("transformers_version", pa.string()),
        _measured("finished_at", pa.timestamp("us", tz="UTC")),
    ],
)

SCORES = _schema(
    "scores",
    [
        _key("cell_key", pa.string()),
        _key("item_id", pa.string()),
        _key("repeat", pa.int32()),
        _key("benchmark", pa.string()),
        _key("scorer", pa.string()),
        _key("scorer_version", pa.string()),
        _key("metric", pa.string()),
        _column("value", pa.float64()),
        # scored | errored | timed_out | not_scored: a wrong answer is scored with value 0
        _key("status", pa.string()),
        _column("detail", pa.string()),
        _column("extracted", pa.string()),
        _key("text_digest", pa.string()),
        _measured("seconds", pa.float64()),
        _measured("scored_at", pa.timestamp("us", tz="UTC")),
    ],
)

CHECKS = _schema(
    "checks",
    [
        _key("cell_key", pa.string()),
        _key("item_id", pa.string()),
        _key("repeat", pa.int32()),
        _key("reference_key", pa.string()),
        # stored: from the columns of the two rows; recomputed: the row was decoded again
        _key("kind", pa.string()),
        _column("exact_tokens", pa.bool_()),
        _column("exact_path", pa.bool_()),
        _column("exact_bits", pa.bool_()),
        _column("first_divergence_step", pa.int32()),
        _column("first_divergence_position", pa.int32()),
        _column("top2_margin", pa.float64()),
        _column("detail", pa.string()),
        _measured("checked_at", pa.timestamp("us", tz="UTC")),
    ],
)

RUNS = _schema(
    "runs",
    [
        _key("run_id", pa.string()),
        _key("grid_digest", pa.string()),
        _column("grid", pa.string()),
        _measured("command", pa.string()),
        _measured("job_id", pa.string()),
        _measured("submission_id", pa.string()),
        _measured("status", pa.string()),
        _measured("exit_code", pa.int32()),
        _measured("num_units", pa.int32()),
        _measured("num_keys", pa.int64()),
        _measured("num_failed", pa.int64()),
        _measured("num_actors", pa.int32()),
        _measured("product_version", pa.string()),
        _measured("ray_version", pa.string()),
        _measured("environment", pa.string()),
        _measured("started_at", pa.timestamp("us", tz="UTC")),
        _measured("finished_at", pa.timestamp("us", tz="UTC")),
    ],
)

ATTEMPTS = _schema(
    "attempts",
    [
        _key("run_id", pa.string()),
        _key("unit_key", pa.string()),
        _key("attempt", pa.int32()),
        _measured("cell_key", pa.string()),
        _measured("num_keys", pa.int32()),
        _measured("actor", pa.string()),
        # done | input | transient | out_of_memory | died | quarantined
        _measured("outcome", pa.string()),
        _measured("cause", pa.string()),
        _measured("max_in_flight", pa.int32()),
        _measured("started_at", pa.timestamp("us", tz="UTC")),
        _measured("seconds", pa.float64()),
    ],
)

_FLOATS = pa.list_(pa.float32())

_SETTINGS = [GENERATIONS.field(name) for name in ("cell_key", *CELL_FIELDS)]

# One row per step of a draft-free run. A step sees ``state`` (tokens of the block, -1 where masked, m of them);
# the flat lists hold 32 values (token_ids, probabilities) or one value a masked position, in the order of positions.
TRAJECTORIES = _schema(
    "trajectories",
    [
        *_SETTINGS,
        _key("item_id", pa.string()),
        _key("repeat", pa.int32()),
        _key("prompt_tokens", pa.int32()),
        _key("num_steps", pa.int32()),
        _key("step", pa.int32()),
        _key("block_start", pa.int32()),
        _key("commit_count", pa.int32()),
        _key("state", _INTS),
        _key("token_ids", _INTS),
        _key("probabilities", _FLOATS),
        _key("entropy", _FLOATS),
        _key("tail_mass", _FLOATS),
        _key("log_tempered_mass", _FLOATS),
        # positions count from the start of the block
        _key("commit_positions", _INTS),
        _key("commit_tokens", _INTS),
    ],
)

# Columns of a trajectory file only where they were asked for: what a window of two blocks says of the fresh next block
# (L values or 32 L a step, none at the end of the canvas), and the hidden states of H numbers a masked position.
TRAJECTORY_WINDOW = (
    _key("stop_token_ids", _INTS),
    _key("next_token_ids", _INTS),
    _key("next_probabilities", _FLOATS),
    _key("next_entropy", _FLOATS),
    _key("next_tail_mass", _FLOATS),
    _key("next_log_tempered_mass", _FLOATS),
)
TRAJECTORY_HIDDEN = (_key("hidden", _FLOATS),)
TRAJECTORY_NEXT_HIDDEN = (_key("next_hidden", _FLOATS),)


def trajectory_schema(*, window: bool, hidden: bool) -> pa.Schema:
    """The schema of a trajectory file with the optional columns that were recorded."""
    columns = list(TRAJECTORIES)
    columns += TRAJECTORY_WINDOW if window else ()
    columns += TRAJECTORY_HIDDEN if hidden else ()
    columns += TRAJECTORY_NEXT_HIDDEN if window and hidden else ()
    return pa.schema(columns, TRAJECTORIES.metadata)


REPLAYS = _schema(
    "replays",
    [
        *_SETTINGS,
        _key("item_id", pa.string()),
        _key("repeat", pa.int32()),
        _key("recorded_cell_key", pa.string()),
        # of the draft trees, means over rounds: steps to the deepest node, nodes of the fullest depth
        _key("depth_per_round", pa.float64()),
        _key("width_per_round", pa.float64()),
        _key("prompt_tokens", pa.int32()),
        _key("nfe_prefill", pa.int32()),
        _key("nfe_denoise", pa.int32()),
        _key("nfe_commit", pa.int32()),
        _key("nfe_total", pa.int32()),
        # of the serialized run, all kinds
        _key("nfe_reference", pa.int32()),
        _key("rounds", pa.int32()),
        _key("accepted", _INTS),
        _key("accepted_per_round", pa.float64()),
        _key("drafted_nodes", pa.int32()),
        _key("rows_computed", pa.int64()),
        # decoded live as well: did every count agree; null where it was not
        _column("agrees_with_live", pa.bool_()),
        _measured("product_version", pa.string()),
    ],
)

DIAGNOSES = _schema(
    "diagnoses",
    [
        *_SETTINGS,
        _key("quantity", pa.string()),
        # null: over all blocks or depths; blocks count from 0 at the first generated one, depths from 1
        _column("block", pa.int32()),
        _column("depth", pa.int32()),
        _column("draft_budget", pa.int32()),
        _column("value", pa.float64()),
        # what the value is a mean over
        _key("count", pa.int64()),
        _measured("product_version", pa.string()),
    ],
)

TABLES = {
    "generations": GENERATIONS,
    "trajectories": TRAJECTORIES,
    "replays": REPLAYS,
    "diagnoses": DIAGNOSES,
    "scores": SCORES,
    "checks": CHECKS,
    "runs": RUNS,
    "attempts": ATTEMPTS,
}


def deterministic_columns(schema: pa.Schema) -> list[str]:
    """Names of the columns that two identical runs share."""
    return [field.name for field in schema if field.metadata[b"deterministic"] == b"yes"]


def to_table(schema: pa.Schema, rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Rows as a table of exactly this schema: a missing or unknown column is an error, never a null."""
    names = set(schema.names)
    for row in rows:
        if row.keys() != names:
            odd = sorted(row.keys() ^ names)
            raise ValueError(f"row and schema differ in columns {odd}")
    return pa.table({name: [row[name] for row in rows] for name in schema.names}, schema=schema)


def write_table(path: str, table: pa.Table) -> None:
    """Write one Parquet file. The caller owns atomicity (staging, fsync, rename)."""
    pq.write_table(table, path, compression="zstd", version="2.6")


def read_table(paths: Sequence[str], schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Read files of one schema version as one table, in the order given.

    Raises InputError naming the first file that cannot be read, is damaged, or is of another table or version.
    """
    wanted = (
        schema if columns is None else pa.schema([schema.field(name) for name in columns], schema.metadata)
    )
    tables = []
    for path in paths:
        try:
            tables.append(_read_file(path, schema, wanted))
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:  # ValueError: nulls, bad UTF-8
            cause = " ".join(str(error).split())[:200] or type(error).__name__
            raise InputError(
                f"{path} is not a whole Parquet file of {schema.metadata[b'dlmgrid.table'].decode()} ({cause}); "
                "restore it, or move it away and repeat the command that wrote it"
            ) from error
    return pa.concat_tables(tables) if tables else wanted.empty_table()


def _read_file(path: str, schema: pa.Schema, wanted: pa.Schema) -> pa.Table:
    with pq.ParquetFile(path) as file:
        check_schema(path, file, schema)
        return file.read(columns=wanted.names).cast(wanted)


def check_schema(path: str, file: pq.ParquetFile, schema: pa.Schema) -> None:
    """Raises InputError when a file's table or schema version is not that of ``schema``, or a column is missing."""
    found = file.schema_arrow.metadata or {}
    for key in (b"dlmgrid.table", b"dlmgrid.schema_version"):
        if found.get(key) != schema.metadata[key]:
            raise InputError(
                f"{path}: {key.decode()} is {found.get(key, b'missing').decode(errors='replace')}, this version reads "
                f"{schema.metadata[key].decode()}; use a new output folder"
            )
    missing = set(schema.names).difference(file.schema_arrow.names)
    if missing:
        raise InputError(
            f"{path}: it lacks the column {sorted(missing)[0]}, so another version wrote it; use a new output folder"
        )
