"""The study of drafting methods: replayed rows as one line for each method, budget and temperature, and its goals.

A line pools benchmarks, items and repeats of one experiment: rows that differ in any other setting of their cell
have lines of their own, with the settings named that tell them apart. Goals compare lines of one experiment only.
Every number is the mean over benchmarks of a benchmark's own: forwards of a generation, forwards of the serialized run
over these, drafted states accepted a round, drafted states of a generation. A saving of one method over another is
1 - forwards / forwards. What SPOT (arXiv 2610.22543) reports is put as goals beside what was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from dlmgrid.cluster.decoder_text import NAMED, decoder_text
from dlmgrid.workers.cell import CELL_FIELDS
from dlmgrid.workers.drafting.order_checkpoint import find_order_checkpoint, read_order_checkpoint
from dlmgrid.workers.drafting.spiffy_graph import load_graph
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.tables import REPLAYS, read_table

_COUNTS = ("nfe_total", "nfe_reference", "rounds", "accepted", "drafted_nodes")
COLUMNS = ("cell_key", *CELL_FIELDS, "item_id", "repeat", *_COUNTS)

OF_BENCHMARK = ("prompt_version", "num_fewshot", "gen_length", "steps")
"""Settings that a benchmark may have its own of. A line pools them, unless some benchmark has several."""

OF_METHOD = (
    "gamma", "fold_tau", "fold_tau_by_layer", "fold_gate", "fold_recheck", "fold_pipelined", "product_tau",
)  # fmt: skip
"""Settings of a drafter beside its name, file and budget."""

_SHOWN_APART = ("model", "temperature", "method", "drafter_fingerprint", "budget", *OF_METHOD, *NAMED)

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """What is decoded and how, beside the method: the axis along which methods are compared.

    ``rule`` is the decoder with its settings, ``settings`` names the others in which the lines of a model differ.
    """

    model: str
    temperature: float
    rule: str
    settings: str = ""

    @property
    def decoder(self) -> str:
        return " ".join(filter(None, (self.rule, self.settings)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A method at a budget. ``drafter`` is the method with the name of its learned or calibrated part, ``variant``
    names the method's settings where lines differ in them. ``generations`` are (benchmark, item, repeat);
    ``nfe_by_benchmark`` are mean forwards of a generation; the rest are means of these and of their like over
    benchmarks."""

    passes: Passes
    drafter: str
    variant: str
    budget: int
    num_items: int
    generations: frozenset[tuple[str, str, int]]
    nfe_by_benchmark: Mapping[str, float]
    ratio: float
    accepted_per_round: float
    drafted_nodes: float

    @property
    def method(self) -> str:
        return " ".join(filter(None, (self.drafter, self.variant)))

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
    """The rows of replays, each generation of a cell once.

    Raises InputError for a folder without any, and for two replays of one generation that differ.
    """
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for folder in folders:
        files = sorted((folder / "replays").glob("*.parquet"))
        if not files:
            raise InputError(
                f"{folder} holds no replays; make them with dlmgrid replay TRAJ GRID --out {folder}"
            )
        for row in read_table([str(file) for file in files], REPLAYS, COLUMNS).to_pylist():
            before = rows.setdefault((row["cell_key"], row["item_id"], row["repeat"]), row)
            if before != row:
                raise InputError(
                    f"{folder}: item {row['item_id']!r} of cell {row['cell_key']} has other counts than in another "
                    "of these replays; replay both again, or give one of them"
                )
    return list(rows.values())


def num_disagreeing(folders: Iterable[Path]) -> int:
    """How many rows of replays were decoded live and have other counts there."""
    files = [str(file) for folder in folders for file in sorted((folder / "replays").glob("*.parquet"))]
    return sum(
        row["agrees_with_live"] is False
        for row in read_table(files, REPLAYS, ["agrees_with_live"]).to_pylist()
    )


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
    """One line for each model, temperature, decoder, method and budget, in this order, and for each value of every
    other setting in which the rows differ.

    Methods of several drafters are told apart by ``names``, else by the first digits of their fingerprint.
    """
    clashing = [name for name in OF_BENCHMARK if _differs(rows, name, "benchmark")]
    pooled = ("benchmark", *(name for name in OF_BENCHMARK if name not in clashing))
    identity = [name for name in CELL_FIELDS if name not in pooled]
    groups: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        key = tuple(row[name] for name in identity)
        groups.setdefault(key, {}).setdefault(row["benchmark"], []).append(row)
    shown = [name for name in identity if name not in _SHOWN_APART and _differs(rows, name, "model")]
    variants = [name for name in OF_METHOD if _differs(rows, name, "method")]
    models = _model_names(rows)
    drafters = _unclashing(names)
    lines = []
    for of_benchmark in groups.values():
        parts = list(of_benchmark.values())
        first = parts[0][0]
        lines.append(
            Line(
                passes=Passes(
                    model=models[first["model"]],
                    temperature=first["temperature"],
                    rule=decoder_text(first),
                    settings=_settings(first, shown),
                ),
                drafter=_drafter(first, drafters),
                variant=_settings(first, variants),
                budget=first["budget"],
                num_items=sum(len({row["item_id"] for row in part}) for part in parts),
                generations=frozenset(
                    (row["benchmark"], row["item_id"], row["repeat"]) for part in parts for row in part
                ),
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
    """The goals that ``lines`` say something of, at T = 0: each group of lines of one model and equal settings over
    the same generations by itself, named where there are several."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        if line.passes.temperature == 0:
            key = (line.passes.model, line.passes.settings, line.generations)
            groups.setdefault(key, []).append(line)
    found: list[Goal] = []
    for (model, settings, generations), group in groups.items():
        words = (model, settings, f"{len(generations)} generations")
        prefix = f"{', '.join(filter(None, words))}: " if len(groups) > 1 else ""
        found += [replace(goal, text=prefix + goal.text) for goal in _goals_of_group(group)]
    return found


def _goals_of_group(lines: Sequence[Line]) -> list[Goal]:
    found: list[Goal] = []
    at = {(line.passes.rule, line.method, line.budget): line for line in lines}
    assert len(at) == len(lines), "lines of one group have names of their own"
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
    """Against the ``plain`` draft-free runs of the same replays, by benchmark."""
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
        line = at[decoder, name, 20]
        spot = next(
            (
                other
                for (rule, _, budget), other in at.items()
                if (rule, budget) == (decoder, 20)
                and other.drafter == line.drafter.replace("spot_gamma", "spot", 1)
            ),
            None,
        )
        if spot is not None:
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


def _differs(rows: Iterable[Row], name: str, within: str) -> bool:
    """Whether rows of one value of the column ``within`` differ in the column ``name``."""
    first: dict[Any, Any] = {}
    return any(first.setdefault(row[within], row[name]) != row[name] for row in rows)


def _model_names(rows: Iterable[Row]) -> dict[str, str]:
    """Models by their last name, or as the grid names them where last names clash."""
    models = {row["model"] for row in rows}
    count = Counter(Path(model).name for model in models)
    return {model: model if count[Path(model).name] > 1 else Path(model).name for model in models}


def _unclashing(names: Mapping[str, str]) -> dict[str, str]:
    """``names`` by fingerprint, with its first digits where one name is of several drafters."""
    count = Counter(names.values())
    return {
        fingerprint: f"{name} {fingerprint[:6]}" if count[name] > 1 else name
        for fingerprint, name in names.items()
    }


def _settings(row: Row, names: Iterable[str]) -> str:
    """``name value`` of those that are set; a number in full, so that what differs reads differently."""
    return ", ".join(f"{name} {row[name]}" for name in names if row[name] not in (None, ""))


def _drafter(row: Row, names: Mapping[str, str]) -> str:
    fingerprint = row["drafter_fingerprint"]
    return " ".join(filter(None, (row["method"], names.get(fingerprint, fingerprint[:6]))))


def _total(rows: Sequence[Row], column: str) -> int:
    return sum(row[column] for row in rows)
