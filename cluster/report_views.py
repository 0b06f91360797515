"""A report as terminal tables, as one self-contained HTML page, as JSON and as CSV.

The terminal and the page show the same columns: one table for each draft-free cell and the cells compared with
it. A ratio is never shown without its verdict: rows that were not checked have none, rows that differ say so
beside it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

import jinja2
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dlmgrid.cluster.accuracy import Accuracy
from dlmgrid.cluster.decoder_text import varied_settings
from dlmgrid.cluster.report import METHOD_FIELDS, CellReport, Level, Report

# Named in every title or row already, or decided by model and benchmark.
_ALWAYS_SHOWN = ("model", "benchmark", "temperature", "method", "budget")

_UNBROKEN = ("method", "D", "claim")
"""Columns of the terminal that stay whole where others are folded."""

_STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "plain": ""}

LEGEND = (
    "NFE: target forwards per item (prefill, denoising, commit and draft passes). × fewer: draft-free NFE over this "
    "one's, × faster: tokens/s over draft-free tokens/s, both over the items that both have. accepted: drafted "
    "states accepted per verification round. tokens, path, bits: rows equal to the serialized run over rows "
    "checked. ± of a metric: its standard error. Δ: mean difference to the same generations draft-free, ± half of a "
    "95 % interval (Student's t over items; none where no value differs)."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry of a table; ``tone`` is good, bad, warn or plain."""

    text: str
    tone: str = "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportTable:
    """The cells of one comparison: a title, the headings and a row for each cell."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]


def tables_of(report: Report) -> list[ReportTable]:
    """The tables of a report, in the order of its cells. Columns that would be empty are left out."""
    varied = [
        name for name in varied_settings(cell.settings for cell in report.cells) if name not in _ALWAYS_SHOWN
    ]
    tables = []
    for _, group in groupby(report.cells, key=lambda cell: cell.reference_cell_key):
        cells = list(group)
        settings = cells[0].settings
        title = [f"{settings['model']} · {settings['benchmark']} · T = {settings['temperature']:g}"]
        title += [f"{name} {settings[name]}" for name in varied if name not in METHOD_FIELDS]
        tables.append(_table(" · ".join(title), cells, [name for name in varied if name in METHOD_FIELDS]))
    return tables


def _table(title: str, cells: Sequence[CellReport], varied: Sequence[str]) -> ReportTable:
    metrics = sorted({(accuracy.scorer, accuracy.metric) for cell in cells for accuracy in cell.accuracies})
    columns: dict[str, list[Entry]] = {
        "method": [Entry(text=cell.settings["method"]) for cell in cells],
        "D": [Entry(text=str(cell.settings["budget"])) for cell in cells],
    }
    for name in varied:
        heading, digits = ("drafter", 8) if name == "drafter_fingerprint" else (name, None)
        columns[heading] = [Entry(text=_plain(cell.settings[name])[:digits]) for cell in cells]
    columns |= {
        "rows": [_rows_entry(cell) for cell in cells],
        "NFE": [_number(cell.nfe_mean, ".1f") for cell in cells],
        "× fewer": [_ratio_entry(cell, cell.nfe_ratio) for cell in cells],
        "accepted": [_number(cell.accepted_per_round, ".2f") for cell in cells],
        "drafted": [_number(cell.drafted_nodes_mean, ".0f") for cell in cells],
        "tokens/s": [_number(cell.tokens_per_second, ".1f") for cell in cells],
        "× faster": [_ratio_entry(cell, cell.throughput_ratio) for cell in cells],
    }
    if any(cell.nfe_draft_mean for cell in cells):
        columns["draft NFE"] = [_number(cell.nfe_draft_mean, ".1f") for cell in cells]
    for scorer, metric in metrics:
        columns[f"{scorer} {metric}"] = [_accuracy_entry(cell, scorer, metric) for cell in cells]
        if any(_may_differ(cell) for cell in cells):
            columns[f"Δ {scorer} {metric}"] = [_change_entry(cell, scorer, metric) for cell in cells]
    columns["claim"] = [Entry(text=cell.claim) for cell in cells]
    for level in ("tokens", "path", "bits"):
        columns[level] = [_level_entry(cell, cell.exact[level]) for cell in cells]
    if any(cell.num_errors for cell in cells):
        columns["errors"] = [
            Entry(text=str(cell.num_errors), tone="bad" if cell.num_errors else "plain") for cell in cells
        ]
    return ReportTable(title=title, headings=tuple(columns), rows=tuple(zip(*columns.values(), strict=True)))


def _plain(value: object) -> str:
    return "–" if value in (None, "") else f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float | None, form: str) -> Entry:
    return Entry(text="–" if value is None else format(value, form))


def _rows_entry(cell: CellReport) -> Entry:
    if cell.num_missing:
        return Entry(text=f"{cell.num_rows}/{cell.num_rows + cell.num_missing}", tone="warn")
    return Entry(text=str(cell.num_rows))


def _ratio_entry(cell: CellReport, ratio: float | None) -> Entry:
    """A ratio with its verdict: withheld while nothing was checked, marked when a checked row differs."""
    if ratio is None:
        return Entry(text="–")
    if any(level.checked == 0 for level in cell.exact.values()):
        return Entry(text="unchecked", tone="warn")
    if cell.is_exact:
        return Entry(text=f"{ratio:.2f}")
    return Entry(text=f"{ratio:.2f} inexact", tone="bad" if cell.claim == "exact" else "warn")


def _level_entry(cell: CellReport, level: Level) -> Entry:
    if level.checked == 0:
        return Entry(text="unchecked", tone="warn")
    text = f"{level.equal}/{level.checked}"
    if level.equal < level.checked:
        return Entry(text=text, tone="bad" if cell.claim == "exact" else "warn")
    return Entry(text=text, tone="good" if level.checked == cell.num_rows else "warn")


def _accuracy_entry(cell: CellReport, scorer: str, metric: str) -> Entry:
    found = [item for item in cell.accuracies if (item.scorer, item.metric) == (scorer, metric)]
    return Entry(text="–") if not found else _accuracy_text(found[0])


def _may_differ(cell: CellReport) -> bool:
    """Whether the answers may be others than the draft-free ones: by claim, or since rows that were checked differ."""
    tokens = cell.exact["tokens"]
    return cell.claim == "approximate" or tokens.equal < tokens.checked


def _change_entry(cell: CellReport, scorer: str, metric: str) -> Entry:
    """The paired change of a metric, with its 95 % interval if values differ; red where the interval lies below 0."""
    found = [item for item in cell.accuracies if (item.scorer, item.metric) == (scorer, metric)]
    change = found[0].change if found else None
    if change is None:
        return Entry(text="–")
    margin = "" if change.margin is None else f" ±{change.margin:.3f}"
    text = f"{change.mean:+.3f}{margin} ({change.num_differing}/{change.num_paired} differ)"
    return Entry(text=text, tone="bad" if change.is_loss else "plain")


def _accuracy_text(accuracy: Accuracy) -> Entry:
    text = "–" if accuracy.mean is None else f"{accuracy.mean:.3f}"
    if accuracy.standard_error is not None:
        text += f" ±{accuracy.standard_error:.3f}"
    others = [
        f"{count} {status}" for status, count in sorted(accuracy.statuses.items()) if status != "scored"
    ]
    if others:
        return Entry(text=f"{text} ({', '.join(others)})", tone="warn")
    return Entry(text=text)


def terminal_view(report: Report) -> RenderableType:
    """The report for a rich console."""
    parts: list[RenderableType] = []
    for shown in tables_of(report):
        table = Table(title=shown.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for index, heading in enumerate(shown.headings):
            table.add_column(
                heading,
                justify="left" if index == 0 else "right",
                overflow="fold",
                no_wrap=heading in _UNBROKEN,
            )
        for row in shown.rows:
            table.add_row(*(Text(entry.text, style=_STYLES[entry.tone]) for entry in row))
        parts.append(table)
    if not report.cells:
        parts.append(Text("no rows yet", style="yellow"))
    for text, count in report.errors.items():
        parts.append(Text(f"{count} × {text}", style="red"))
    if report.incomplete:
        parts.append(Text(f"incomplete: {report.incomplete}", style="bold yellow"))
    if report.cells:
        parts.append(Text(LEGEND, style="dim"))
    return Group(*parts)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>dlmgrid report: {{ report.run_dir }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
.good { color: #18794e; } .bad { color: #cd2b31; font-weight: 600; } .warn { color: #ad5700; }
.note { border-left: .25rem solid #ad5700; padding-left: .7rem; }
footer { color: #777; margin-top: 2rem; }
</style>
</head>
<body>
<h1>{{ report.run_dir }}</h1>
{% if report.incomplete %}<p class="note">Incomplete: {{ report.incomplete }}</p>{% endif %}
{% if not tables %}<p class="note">No rows yet.</p>{% endif %}
{% for table in tables %}
<h2>{{ table.title }}</h2>
<div class="scroll"><table>
<thead><tr>{% for heading in table.headings %}<th>{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>{% for entry in row %}<td class="{{ entry.tone }}">{{ entry.text }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endfor %}
{% if report.errors %}<h2>Errors</h2><ul>
{% for text, count in report.errors.items() %}<li class="bad">{{ count }} × {{ text }}</li>{% endfor %}
</ul>{% endif %}
<footer>{{ legend }} dlmgrid {{ version }}.</footer>
</body>
</html>
"""


def html_page(report: Report, version: str) -> str:
    """The report as one page that loads nothing from elsewhere."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(_PAGE)
    return page.render(report=report, tables=tables_of(report), legend=LEGEND, version=version)


def json_text(report: Report) -> str:
    """Every figure of the report, unrounded."""
    return json.dumps(asdict(report), indent=2, sort_keys=True, allow_nan=False) + "\n"


def csv_text(report: Report) -> str:
    """One line a cell: its settings, its figures, then columns of each metric: mean, what it rests on, change."""
    lines = [_flat(cell) for cell in report.cells]
    headings = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, headings, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _flat(cell: CellReport) -> dict[str, object]:
    values = asdict(cell)
    line: dict[str, object] = {"cell_key": cell.cell_key, **cell.settings}
    line |= {name: values[name] for name in values if name not in ("settings", "exact", "accuracies")}
    for level, counts in cell.exact.items():
        line |= {f"exact_{level}": counts.equal, f"checked_{level}": counts.checked}
    for item in cell.accuracies:
        name, change = f"{item.scorer} {item.metric}", item.change
        line |= {
            name: item.mean, f"{name} standard_error": item.standard_error, f"{name} valued": item.num_valued,
            f"{name} without value": item.num_unvalued,
        }  # fmt: skip
        if change is not None:
            line |= {
                f"{name} change": change.mean, f"{name} change_margin": change.margin,
                f"{name} paired": change.num_paired, f"{name} differing": change.num_differing,
            }  # fmt: skip
    return line
