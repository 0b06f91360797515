"""The study of drafting methods: replayed rows as one line for each method, budget and temperature, and its goals.

Every number is the mean over benchmarks of a benchmark's own: forwards of a generation, forwards of the serialized run
over these, drafted states accepted a round, drafted states of a generation. A saving of one method over another is
1 - forwards / forwards. What SPOT (arXiv 2610.22543) reports is put as goals beside what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from dlmgrid.workers.drafting.order_checkpoint import find_order_checkpoint, read_order_checkpoint
from dlmgrid.workers.drafting.spiffy_graph import load_graph
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.tables import REPLAYS, read_table

COLUMNS = (
    "model", "benchmark", "method", "drafter_fingerprint", "budget", "temperature", "verification", "decoder",
    "commits_per_step", "threshold", "window", "fused_commit", "gamma", "item_id", "nfe_total", "nfe_reference",
    "rounds", "accepted", "drafted_nodes",
)  # fmt: skip

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """What is decoded and how, beside the method: the axis along which methods are compared."""

    model: str
    temperature: float
    decoder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A method at a budget. ``nfe_by_benchmark`` are mean forwards of a generation; the rest are means of these and
    of their like over benchmarks."""

    passes: Passes
    method: str
    budget: int
    num_items: int
    nfe_by_benchmark: Mapping[str, float]
    ratio: float
    accepted_per_round: float
    drafted_nodes: float

    @property
    def nfe(self) -> float:
        return fmean(self.nfe_by_benchmark.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A goal in words, what was measured, and what it must be; ``at_least`` tells the direction."""

    text: str
    measured: float
    wanted: float
    at_least: bool = True

    @property
    def is_met(self) -> bool:
        return self.measured >= self.wanted if self.at_least else self.measured <= self.wanted


def read_replays(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """The rows of replays. Raises InputError for a folder without any."""
    rows: list[dict[str, Any]] = []
    for folder in folders:
        files = sorted((folder / "replays").glob("*.parquet"))
        if not files:
            raise InputError(
                f"{folder} holds no replays; make them with dlmgrid replay TRAJ GRID --out {folder}"
            )
        rows += read_table([str(file) for file in files], REPLAYS, COLUMNS).to_pylist()
    return rows


def drafter_names(files: Iterable[str]) -> dict[str, str]:
    """By fingerprint, what tells a drafter from others of its method: a graph's selection, or an order model's name.

    Raises InputError for a file that is neither.
    """
    names = {}
    for file in files:
        if file.endswith(".json"):
            graph = load_graph(Path(file))
            names[graph.fingerprint] = graph.selection
        else:
            names[read_order_checkpoint(find_order_checkpoint(file)).fingerprint] = Path(file).stem
    return names


def study_lines(rows: Sequence[Row], names: Mapping[str, str]) -> list[Line]:
    """One line for each model, temperature, decoder, method and budget, in this order.

    Methods of several drafters are told apart by ``names``, else by the first digits of their fingerprint.
    """
    groups: dict[tuple[Passes, str, int], dict[str, list[Row]]] = {}
    for row in rows:
        key = (_passes(row), _method(row, names), row["budget"])
        groups.setdefault(key, {}).setdefault(row["benchmark"], []).append(row)
    lines = []
    for (passes, method, budget), of_benchmark in groups.items():
        parts = list(of_benchmark.values())
        lines.append(
            Line(
                passes=passes,
                method=method,
                budget=budget,
                num_items=sum(len({row["item_id"] for row in part}) for part in parts),
                nfe_by_benchmark={
                    name: fmean(row["nfe_total"] for row in part) for name, part in of_benchmark.items()
                },
                ratio=fmean(_total(part, "nfe_reference") / _total(part, "nfe_total") for part in parts),
                accepted_per_round=fmean(
                    sum(sum(row["accepted"]) for row in part) / _total(part, "rounds") for part in parts
                ),
                drafted_nodes=fmean(_total(part, "drafted_nodes") / len(part) for part in parts),
            )
        )
    return sorted(
        lines,
        key=lambda line: (
            line.passes.model, line.passes.temperature, line.passes.decoder, line.method != "none", line.method,
            line.budget,
        ),
    )  # fmt: skip


def goals_of(lines: Sequence[Line]) -> list[Goal]:
    """The goals that ``lines`` say something of, at T = 0."""
    found: list[Goal] = []
    at = _by_name([line for line in lines if line.passes.temperature == 0])
    decoders = sorted({decoder for decoder, _, _ in at})
    static = "static" if "static" in decoders else None
    if static is not None:
        for budget in (6, 8, 12, 20):
            found += _goals_over_methods(at, static, budget)
        for budget, cut in ((8, 2.45), (20, 2.8)):
            for method in _methods(at, static, budget, "spot"):
                found.append(
                    Goal(text=f"{method} D = {budget}: draft-free / NFE", measured=at[static, method, budget].ratio,
                         wanted=cut)
                )  # fmt: skip
        found += _gamma_goals(at, static)
    plain = at.get(("static", "none", 0))
    if plain is not None:
        found += _boundary_goals(at, plain)
    for decoder in decoders:
        if decoder.startswith("threshold"):
            for (name, method, budget), line in at.items():
                if name == decoder and method.startswith("spot_sets"):
                    text = f"{method} D = {budget}, {decoder}: forwards saved over the threshold decoder"
                    found.append(Goal(text=text, measured=1 - 1 / line.ratio, wanted=0.30))
    return found


ByName = Mapping[tuple[str, str, int], Line]


def _goals_over_methods(at: ByName, decoder: str, budget: int) -> list[Goal]:
    """SPOT against the best Spiffy selection, the chain and the confidence tree at one budget."""
    found = []
    graphs = [at[decoder, name, budget] for name in _methods(at, decoder, budget, "spiffy")]
    for method in _methods(at, decoder, budget, "spot"):
        spot = at[decoder, method, budget]
        where = f"{method} D = {budget}: NFE saved over"
        if graphs:
            best = min(graphs, key=lambda line: line.nfe)
            wanted = 0.10 if budget == 6 else 0.12
            found.append(Goal(text=f"{where} {best.method}", measured=1 - spot.nfe / best.nfe, wanted=wanted))
            least = {
                name: 1 - spot.nfe_by_benchmark[name] / best.nfe_by_benchmark[name]
                for name in spot.nfe_by_benchmark.keys() & best.nfe_by_benchmark.keys()
            }
            worst = min(least, key=lambda name: (least[name], name))
            found.append(Goal(text=f"{where} {best.method}, {worst}", measured=least[worst], wanted=0.10))
        for other, wanted_at in (
            ("ssd", {8: 0.20, 20: 0.30}),
            ("confidence_tree", dict.fromkeys((6, 8, 12, 20), 0.18)),
        ):
            if budget in wanted_at and (decoder, other, budget) in at:
                saved = 1 - spot.nfe / at[decoder, other, budget].nfe
                found.append(Goal(text=f"{where} {other}", measured=saved, wanted=wanted_at[budget]))
    return found


def _boundary_goals(at: ByName, plain: Line) -> list[Goal]:
    """Against ``plain`` draft-free runs: a replay's own ratio is over the serialized run with fused passes."""
    found = []
    decoder = "static fused window full"
    for budget, cut in ((8, 2.7), (20, 3.1)):
        for method in _methods(at, decoder, budget, "spot"):
            nfe = at[decoder, method, budget].nfe_by_benchmark
            ratio = fmean(plain.nfe_by_benchmark[name] / nfe[name] for name in nfe)
            text = f"{method} D = {budget}, fused and drafted boundary: plain draft-free / NFE"
            found.append(Goal(text=text, measured=ratio, wanted=cut))
    return found


def _gamma_goals(at: ByName, decoder: str) -> list[Goal]:
    found = []
    for name in _methods(at, decoder, 20, "spot_gamma"):
        spot = at.get((decoder, name.replace("spot_gamma", "spot", 1), 20))
        if spot is not None:
            line = at[decoder, name, 20]
            found += [
                Goal(
                    text=f"{name} D = 20: NFE above spot",
                    measured=line.nfe - spot.nfe,
                    wanted=4,
                    at_least=False,
                ),
                Goal(
                    text=f"{name} D = 20: drafted nodes saved over spot",
                    measured=1 - line.drafted_nodes / spot.drafted_nodes,
                    wanted=0.40,
                ),
            ]
    return found


def _methods(at: ByName, decoder: str, budget: int, method: str) -> list[str]:
    """The names of a method's drafters that have a line there."""
    return sorted(
        name for found, name, of in at if (found, of) == (decoder, budget) and name.split(" ")[0] == method
    )


def _by_name(lines: Sequence[Line]) -> dict[tuple[str, str, int], Line]:
    models = sorted({line.passes.model for line in lines})
    if len(models) > 1:
        raise InputError(f"the replays are of several models ({', '.join(models)}); give those of one")
    return {(line.passes.decoder, line.method, line.budget): line for line in lines}


def _passes(row: Row) -> Passes:
    parts = [row["decoder"]]
    if row["threshold"] is not None:
        parts.append(f"{row['threshold']:g}")
    if row["commits_per_step"] != 1:
        parts.append(str(row["commits_per_step"]))
    if row["verification"] != "coupled":
        parts.append(row["verification"])
    if row["fused_commit"]:
        parts.append("fused")
    if row["window"]:
        parts.append(f"window {row['window']}")
    return Passes(model=Path(row["model"]).name, temperature=row["temperature"], decoder=" ".join(parts))


def _method(row: Row, names: Mapping[str, str]) -> str:
    fingerprint = row["drafter_fingerprint"]
    return " ".join(filter(None, (row["method"], names.get(fingerprint, fingerprint[:6]))))


def _total(rows: Sequence[Row], column: str) -> int:
    return sum(row[column] for row in rows)
