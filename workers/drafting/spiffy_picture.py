"""A draft graph as a picture: an SVG with the root on the left and one column a depth."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from dlmgrid.workers.drafting.spiffy_graph import ROOT, DraftGraph
from dlmgrid.workers.partial_files import write_whole

_COLUMN, _ROW, _WIDTH, _HEIGHT, _MARGIN = 240, 44, 190, 32, 24


def save_picture(graph: DraftGraph, path: Path) -> None:
    """Write the picture of ``graph``. A node shows its pairs (position rank : token rank) and the share of calibration
    roots whose path goes through it; every edge of the graph is drawn, the first parent's in a full line."""
    write_whole(path, draw(graph))


def draw(graph: DraftGraph) -> str:
    """The SVG text of ``graph``."""
    places = _places(graph)
    edges = [
        _edge(places[parent], places[index], is_first=parent == node.parents[0])
        for index, node in enumerate(graph.nodes)
        for parent in node.parents
    ]
    boxes = [_box(places[ROOT], "root", f"{graph.num_roots} roots")]
    for index, node in enumerate(graph.nodes):
        pairs = " ".join(f"{position}:{token}" for position, token in node.pairs)
        boxes.append(_box(places[index], f"{index + 1}. {pairs}", f"{node.count / graph.num_roots:.1%}"))
    width = max(x for x, _ in places.values()) + _WIDTH + _MARGIN
    height = max(y for _, y in places.values()) + _HEIGHT + _MARGIN
    title = f"{graph.selection}, {len(graph.nodes)} nodes, {graph.key.decoder}, T = {graph.key.temperature:g}"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
            'font-size="11">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *edges,
            *boxes,
            "</svg>\n",
        )
    )


def _places(graph: DraftGraph) -> dict[int, tuple[int, int]]:
    """The upper left corner of every node's box in pixels, by its index."""
    depths: dict[int, int] = {ROOT: 0}
    filled: dict[int, int] = {}
    places = {ROOT: (_MARGIN, _MARGIN)}
    for index, node in enumerate(graph.nodes):
        depth = depths[index] = depths[node.parents[0]] + 1
        row = filled[depth] = filled.get(depth, -1) + 1
        places[index] = (_MARGIN + depth * _COLUMN, _MARGIN + row * _ROW)
    return places


def _edge(start: tuple[int, int], end: tuple[int, int], *, is_first: bool) -> str:
    x1, y1, x2, y2 = start[0] + _WIDTH, start[1] + _HEIGHT // 2, end[0], end[1] + _HEIGHT // 2
    dashes = "" if is_first else ' stroke-dasharray="3 3"'
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#666"{dashes}/>'


def _box(place: tuple[int, int], text: str, share: str) -> str:
    x, y = place
    return (
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" fill="#eef3fb" stroke="#345"/>'
        f'<text x="{x + 6}" y="{y + 13}">{escape(text)}</text>'
        f'<text x="{x + 6}" y="{y + 26}" fill="#567">{escape(share)}</text>'
    )
