"""What contradicts what within one stored row: identity, path, digests, tokens, counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dlmgrid.cluster.report import cell_of
from dlmgrid.workers.cell import CANVAS_CACHES, MAY_OPEN_NOTHING, reference_key
from dlmgrid.workers.decoding.paths import logits_digest, path_digest, steps_of
from dlmgrid.workers.drafting.catalog import METHODS

Row = Mapping[str, Any]


def same(stored: object, found: object) -> bool:
    """Whether two values are equal; two floats, up to their last digits."""
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
        num_steps = max(len(row["step_digests"] or []), len(row["commit_steps"]))
        steps = steps_of(row["commit_positions"], row["commit_tokens"], row["commit_steps"], num_steps)
    except (TypeError, ValueError) as error:
        yield f"the path cannot be read: {error}"
        return
    if not all(steps) and row["decoder"] not in MAY_OPEN_NOTHING:
        yield f"step {steps.index(())} opens nothing, which decoder {row['decoder']} never does"
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
    elif row["stop_reason"] == "eos" and row["stop"] == "none":
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
    names = (
        "nfe_prefill", "nfe_denoise", "nfe_commit", "nfe_draft", "nfe_total", "rounds", "drafted_nodes", "budget",
    )  # fmt: skip
    absent = [name for name in (*names, "prompt_tokens") if row[name] is None or row[name] < 0]
    if absent:
        yield f"no count is stored in {', '.join(absent)}"
        return
    drafts_by_pass = row["method"] in METHODS and METHODS[row["method"]].drafts_by_pass
    parts = row["nfe_prefill"] + row["nfe_denoise"] + row["nfe_commit"] + row["nfe_draft"]
    if row["nfe_total"] != parts:
        yield f"nfe_total is {row['nfe_total']}, its parts sum to {parts}"
    # a recheck is a second pass of its round, over some of the nodes that were drafted; a pipelined one is so where a
    # walk reached a block's end
    if not 0 <= _num_rechecks(row) <= (row["rounds"] if row.get("fold_recheck") else 0):
        yield f"nfe_denoise is {row['nfe_denoise']} in {row['rounds']} rounds"
    if row["nfe_draft"] != (row["rounds"] if drafts_by_pass else 0):
        yield f"nfe_draft is {row['nfe_draft']} in {row['rounds']} rounds of method {row['method']}"
    if drafts_by_pass:
        yield from _draft_pass_faults(row)
    else:
        yield from (_canvas_pass_faults if row["cache"] in CANVAS_CACHES else _block_pass_faults)(row)
    accepted = row["accepted"] or []
    if len(accepted) != row["rounds"]:
        yield f"{row['rounds']} rounds have {len(accepted)} accepted counts"
        return
    # seeds but the prefill's come from rounds here, not from commit passes
    num_made = num_steps + (max(0, len(row["seed_positions"] or []) - 1) if drafts_by_pass else 0)
    if row["rounds"] + sum(accepted) != num_made:
        yield f"{row['rounds']} rounds that accept {sum(accepted)} cannot make {num_made} steps"
    mean = sum(accepted) / len(accepted) if accepted else 0.0
    if not same(row["accepted_per_round"], mean):
        yield f"accepted_per_round is {row['accepted_per_round']}, its rounds give {mean}"
    num_commits, likeliest = len(row["commit_positions"]), row["argmax_commits"]
    is_possible = likeliest is not None and 0 <= likeliest <= num_commits
    if not is_possible or (row["temperature"] == 0 and likeliest < num_commits):
        yield f"argmax_commits is {likeliest} of {num_commits} commits at T = {row['temperature']:g}"
    if row["method"] == "none" and (row["drafted_nodes"] or sum(accepted)):
        yield "a draft-free row has drafted nodes"
    elif not sum(accepted) <= row["drafted_nodes"] <= row["rounds"] * row["budget"]:
        yield (
            f"drafted_nodes is {row['drafted_nodes']}: {row['rounds']} rounds accepted {sum(accepted)} and may "
            f"draft {row['budget']} each"
        )


def _num_rechecks(row: Row) -> int:
    """Second passes of folded rounds."""
    return int(row["nfe_denoise"] - row["rounds"])


def _block_pass_faults(row: Row) -> Iterator[str]:
    """Forwards and rows of a block-causal model: a prefill of the prompt's whole blocks, and commit passes."""
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
        saves = bool(row.get("window"))  # a block that a draft completed takes no pass of its own
        may_stop_inside = (
            bool(seeds) and row["stop_reason"] == "eos"
        )  # such a run ends without the last commit pass
        fewest = 0 if saves else num_commits - may_stop_inside
        if not fewest <= row["nfe_commit"] <= num_commits:
            yield f"nfe_commit is {row['nfe_commit']}, a path of {num_blocks} blocks takes {num_commits}"
        num_stored = row["nfe_commit"] if seeds else num_blocks
        num_segments = row["rounds"] + row["drafted_nodes"] + num_stored + first
        counts_blocks = row["cache"] in ("block", "causal") and not saves
        num_rechecks = _num_rechecks(row)
        again, uneven = divmod(row["rows_computed"] - num_segments * length, length)
        is_checked = num_rechecks > 0 or bool(row.get("fold_pipelined"))
        most_again = row["drafted_nodes"] if is_checked else 0
        if counts_blocks and (uneven or not num_rechecks <= again <= most_again):
            yield (
                f"rows_computed is {row['rows_computed']}, rounds, drafted nodes, blocks and prompt give "
                f"{num_segments * length}"
            )


def _draft_pass_faults(row: Row) -> Iterator[str]:
    """Forwards and rows of linear self-speculation: a prefill, and in each round a draft block and the one or two
    blocks that its tokens lie in."""
    length = row["block_length"]
    if (row["nfe_prefill"], row["nfe_commit"]) != (1, 0):
        yield f"nfe_prefill is {row['nfe_prefill']} and nfe_commit {row['nfe_commit']}, linear_spec has 1 and none"
    blocks, uneven = divmod(row["rows_computed"], length)
    rounds = blocks - -(-row["prompt_tokens"] // length)
    if uneven or not 2 * row["rounds"] <= rounds <= 3 * row["rounds"]:
        yield f"rows_computed is {row['rows_computed']}, which {row['rounds']} rounds and the prompt cannot be"


def _canvas_pass_faults(row: Row) -> Iterator[str]:
    """Forwards and rows of a bidirectional model: nothing but denoising passes, over what its cache leaves."""
    for name in ("nfe_prefill", "nfe_commit"):
        if row[name]:
            yield f"{name} is {row[name]}, a bidirectional model has no such passes"
    if not row["commit_positions"]:
        return
    prompt, length = row["prompt_tokens"], row["block_length"]
    canvas = prompt + -(-row["gen_length"] // length) * length
    num_blocks = (max(row["commit_positions"]) - prompt) // length + 1
    branches = row["rounds"] + row["drafted_nodes"]
    after_refresh = branches - num_blocks  # the first pass of every block refreshes the cache
    last_start = prompt + (num_blocks - 1) * length
    least, most = {
        "none": (branches * canvas, branches * canvas),
        "dual": (num_blocks * canvas + after_refresh * length,) * 2,
        "prefix": (
            num_blocks * canvas + after_refresh * (canvas - last_start),
            num_blocks * canvas + after_refresh * (canvas - prompt),
        ),
    }[row["cache"]]
    if not least <= row["rows_computed"] <= most:
        yield (
            f"rows_computed is {row['rows_computed']}, rounds, drafted nodes and blocks of a canvas of {canvas} give "
            f"{least}" + (f" to {most}" if most > least else "")
        )
