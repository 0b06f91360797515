"""One short line for each row of ``make bench``."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def row_line(table: str, row: Row) -> str:
    """The line of a row of ``table``; a goal stands as measured / goal."""
    return _LINES[table](row)


def _pass(row: Row) -> str:
    block, ahead = row["head"]["block"], row["head"]["ahead"]
    line = (
        f"{row['shape']:13} {row['numerics']:5} prefix {row['prefix']:5} D {row['budget']:2}: "
        f"{block['device_ms']:7.3f} ms, {ahead['device_ms']:7.3f} with {ahead['rows']} rows ahead "
        f"({ahead['wall_ms']:7.3f} wall); floor {row['over_floor']['block']:5.2f} {row['over_floor']['ahead']:5.2f} x"
    )
    if "floor_goal" in row:
        line += f" / {row['floor_goal']}"
    line += f"; vendor + rest {row['over_vendor']['block']:.2f} {row['over_vendor']['ahead']:.2f} x"
    return line + (f" / {row['vendor_goal']}" if "vendor_goal" in row else "")


def _exact(row: Row) -> str:
    return (
        f"{row['shape']:13} prefix {row['prefix']:5} D {row['budget']:2}: exact over fast "
        f"{row['over_fast']['block']:.3f} {row['over_fast']['ahead']:.3f} / 1.15"
    )


def _parts(row: Row) -> str:
    parts = ", ".join(f"{name} {ms:.3f}" for name, ms in row["parts_ms"].items())
    return f"{row['shape']:13} D {row['budget']:2}: {parts} ms"


def _stock(row: Row) -> str:
    line = (
        f"{row['model']:13} D {row['budget']:2}: transformers {row['transformers']['median_ms']:7.2f} ms, "
        f"{row['numerics']} {row['engine']['wall_ms']:7.3f} ms, {row['speed_up']:5.1f} x"
    )
    return line + (f" / {row['goal']:g}" if "goal" in row else "")


def _decode(row: Row) -> str:
    if "not_run" in row:
        return f"{row['method']:16} not run: {row['not_run']}"
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in row["host_ms_a_round"].items())
    line = (
        f"{row['method']:16} D {row['budget']:2}: {row['tokens_per_second']:7.1f} tokens/s, "
        f"{row['over_draft_free']:.2f} x" + (f" / {row['goal']:.2f}" if "goal" in row else "")
    )
    return f"{line}; forwards {row['forward_ratio']:.2f} x less; {_same(row)}; a round: {parts} ms"


def _folds(row: Row) -> str:
    if "not_run" in row:
        return f"{row['method']:16} not run: {row['not_run']}"
    return (
        f"{row['method']:16} D {row['budget']:2} tau {row['tau']:<5g}: {row['tokens_per_second']:7.1f} tokens/s, "
        f"{row['over_unfolded']:.2f} x unfolded, {row['over_draft_free']:.2f} x draft-free; computed "
        f"{row['recompute_ratio']:.3f}; {_same(row)}"
    )


def _batch(row: Row) -> str:
    return (
        f"in flight {row['in_flight']:3}: {row['tokens_per_second']:8.1f} tokens/s, {row['over_batch_1']:5.2f} x / 8; "
        f"{row['of_compute_bound']:.3f} / 0.6 of {row['compute_bound_rate']:.0f}; {_same(row)}"
    )


def _drafting(row: Row) -> str:
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in row["round_ms"].items())
    goal = f" / {row['goal']}" if "goal" in row else ""
    share = f"{row['shape']:13} D {row['budget']} x {row['in_flight']}: {row['share']:.3f}{goal} of a round"
    return f"{share} ({parts} ms), trees grow on the {row['growth']}"


def _folding(row: Row) -> str:
    bits = "same bits" if row["same_bits"] else "OTHER BITS"
    return (
        f"{row['shape']:13} D {row['budget']:3} rho {row['recompute_ratio']:.2f}: "
        f"{row['folded']['median_ms']:8.2f} ms, {row['over_floor']:.2f} x floor / 1.4, "
        f"{row['over_unfolded']:.2f} x unfolded ({row['unfolded']['median_ms']:.2f} ms); tau 0 {bits}"
    )


def _same(row: Row) -> str:
    return f"tokens/path/bits {row['same_tokens']}/{row['same_path']}/{row['same_bits']} of {row['items']}"


_LINES = {
    "passes": _pass, "exact": _exact, "parts": _parts, "stock": _stock, "decode": _decode, "folds": _folds,
    "batch": _batch, "drafting": _drafting, "folding": _folding,
}  # fmt: skip
