"""Charts as SVG: lines, bars, heat maps, graphs. The same drawing goes into the page and into plots/.

A chart carries the values that its drawing was made of, for the page's script: it reads them at the pointer or by arrow
keys. Colours are classes, so that one style sheet gives light and dark; dashes tell lines apart without colours.
"""

import base64
import html
import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.filesize import pick_unit_and_suffix

from coterie.errors import client_label

WIDTH = 460
LEFT, RIGHT, TOP, PLOT_H = 52, 18, 12, 190
PLOT_W = WIDTH - LEFT - RIGHT
LETTER = 7.0  # room for a letter at 11 px, and a little more, because phones enlarge them

# blue, orange, teal, violet, amber, ink: apart for all common kinds of colour blindness (a test simulates them)
LIGHT = ("#0969da", "#bc4c00", "#10998a", "#5b2a9d", "#bd8b00", "#24292f")
DARK = ("#58a6ff", "#e5702a", "#56d4bc", "#8957e5", "#f2cc60", "#e6edf3")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2 1 2 1 2", "1 2")
UNITS = ["B", "kB", "MB", "GB"]
HEAT = (47, 129, 247)  # on white and on black

CHART_STYLE = """
text { font: 11px system-ui, sans-serif; fill: var(--ink) } .soft { fill: var(--soft) } .strong { font-weight: 600 }
.grid { stroke: var(--line); stroke-opacity: .3 } .axis { stroke: var(--line) } .line { fill: none; stroke-width: 1.8 }
.thin { stroke-width: 1.1 } .faint { stroke: var(--line); stroke-opacity: .55; stroke-width: 1; fill: none }
.band { fill-opacity: .14; stroke: none } .heat { image-rendering: pixelated }
.frame { fill: none; stroke: var(--line) } .block { fill: none; stroke: var(--c1); stroke-width: 2 }
.on { fill: #fff } .inside { fill: var(--paper) } .node { stroke: var(--paper) }
.edge { stroke: var(--line); fill: none } .bar-text { dominant-baseline: middle }
"""


def palette(colours: Sequence[str], ink: str, soft: str, line: str, paper: str) -> str:
    """CSS variables of a theme."""
    named = "".join(f"--c{i}:{colour};" for i, colour in enumerate(colours))
    return f"{named}--ink:{ink};--soft:{soft};--line:{line};--paper:{paper};"


LIGHT_THEME = palette(LIGHT, "#24292f", "#57606a", "#8c959f", "#ffffff")
DARK_THEME = palette(DARK, "#e6edf3", "#9da7b3", "#8c959f", "#0d1117")
COLOUR_CLASSES = "".join(f".s{i}{{stroke:var(--c{i})}}.f{i}{{fill:var(--c{i})}}" for i in range(len(LIGHT)))
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def esc(text: object) -> str:
    """Any text as HTML and XML text or attribute; characters that XML forbids become a mark."""
    return html.escape(_CONTROL.sub("\ufffd", str(text)), quote=True)


def as_json(data: Any) -> str:
    """JSON that may stand inside of a script element, whatever the strings in it hold."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


@dataclass(frozen=True)
class Chart:
    """A drawing, what it says, and its values for the page's script."""

    name: str
    title: str
    body: str
    height: float
    values: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    width: float = WIDTH

    def inline(self) -> str:
        """The svg element for the page."""
        box = f'viewBox="0 0 {self.width:g} {self.height:g}"'
        return f'<svg {box} role="group" aria-label="{esc(self.title)}">{self.body}</svg>'

    def file(self, *, paper: bool = False) -> str:
        """An SVG file of its own, in light or dark as its reader likes it.

        Args:
            paper: whether it has a background, for pages whose own colours do not follow the reader.
        """
        style = (
            f"svg{{{LIGHT_THEME}}}@media(prefers-color-scheme:dark){{svg{{{DARK_THEME}}}}}{CHART_STYLE}{COLOUR_CLASSES}"
        )
        box = f'viewBox="0 0 {self.width:g} {self.height + 22:g}" width="{self.width:g}" height="{self.height + 22:g}"'
        ground = '<rect width="100%" height="100%" fill="var(--paper)"/>' if paper else ""
        head = f'{ground}<text class="strong" x="{LEFT}" y="15">{esc(self.title)}</text>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img"><title>{esc(self.title)}</title>'
            f'<style>{style}</style>{head}<g transform="translate(0 22)">{self.body}</g></svg>\n'
        )


class Line(NamedTuple):
    """One line: its points, the legend entry that shows and hides it, its colour and, if any, a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    key: str
    colour: int | None = 0  # None is faint
    dash: int = 0
    band: tuple[Sequence[float | None], Sequence[float | None]] | None = None
    thin: bool = False


class Axis(NamedTuple):
    """From a value to a place between 0 and 1, with ticks."""

    low: float
    high: float
    log: bool
    ticks: list[float]
    text: Callable[[float], str]

    def at(self, value: float) -> float:
        """0 … 1."""
        if self.log:
            return (math.log10(max(value, self.low)) - math.log10(self.low)) / math.log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def number(value: float) -> str:
    """For people, short."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 1e3 else f"{value:.4g}"
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def percent(value: float) -> str:
    """A share of one."""
    return f"{100 * value:.4g} %"


def size(value: float) -> str:
    """Bytes."""
    unit, suffix = pick_unit_and_suffix(int(abs(value)), UNITS, 1000)
    return f"{value / unit:.3g} {suffix}"


ACROSS = {
    "bytes": "bytes moved",
    "exchanges": "rounds of communication",
    "points": "rows touched",
}  # axes whose name says too little

FORMATS: dict[str, Callable[[float], str]] = {"number": number, "percent": percent, "bytes": size}


def axis(values: Sequence[float], kind: str, *, log: bool = False, zero: bool = False, most: int = 5) -> Axis:
    """An axis with round ticks around the values."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if log:
        first, last = math.floor(math.log10(low)), max(math.ceil(math.log10(high)), math.floor(math.log10(low)) + 1)
        every = max(1, math.ceil((last - first) / most))
        return Axis(10.0**first, 10.0**last, True, [10.0**p for p in range(first, last + 1, every)], number)
    low = min(low, 0.0) if zero else low
    if high - low <= 1e-12 * max(1.0, abs(high)):
        low, high = low - (0.0 if zero else 0.5), high + (1.0 if zero else 0.5)
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(first * step, last * step, False, [i * step for i in range(first, last + 1)], FORMATS[kind])


def lines(
    name: str,
    title: str,
    drawn: Sequence[Line],
    *,
    x: str = "round",
    y: str = "number",
    note: str = "",
    log: bool = False,
    log_x: bool = False,
) -> Chart:
    """Lines. x and y are what is on the axes: round, exchanges, bytes or seconds; number or percent."""
    known = [v for line in drawn for part in (line.y, *(line.band or ())) for v in part if v is not None]
    reached = [v for line in drawn for v in line.x]
    across = axis(reached, "bytes" if x == "bytes" else "number", log=log_x, zero=True)
    if not log_x:
        last = max(reached, default=0.0) or across.high
        across = across._replace(high=last, ticks=[t for t in across.ticks if t <= last * 1.001])
    up = axis(known, y, log=log and bool(known) and min(known) > 0)

    def place(point: tuple[float, float | None]) -> str | None:
        if point[1] is None:
            return None
        return f"{LEFT + PLOT_W * across.at(point[0]):.1f},{TOP + PLOT_H * (1 - up.at(point[1])):.1f}"

    parts = _grid(across, up, x)
    for line in drawn:
        if line.band is not None:
            parts.append(_band(line, place))
    for line in sorted(drawn, key=lambda line: line.colour is not None):
        look = "faint" if line.colour is None else f"line s{line.colour}{' thin' if line.thin else ''}"
        dash = f' stroke-dasharray="{DASHES[line.dash]}"' if line.dash else ""
        for run in _runs([place(point) for point in zip(line.x, line.y, strict=True)]):
            parts.append(f'<polyline class="{look}" data-key="{esc(line.key)}"{dash} points="{" ".join(run)}"/>')
    keys = {line.key: line for line in drawn}
    legend, height = _legend(list(keys.items()), TOP + PLOT_H + 46)
    box = (LEFT, TOP, PLOT_W, PLOT_H)
    ends = [across.low, across.high, up.low, up.high, int(up.log)]
    values = {"kind": "lines", "x": x, "y": y, "box": box, "ends": ends, **_series(drawn)}
    return Chart(name, title, "".join([*parts, _rect("pad", *box), *legend]), height, values, note)


def _series(drawn: Sequence[Line]) -> dict[str, Any]:
    """Values for the script; x once where all lines share it."""
    shared = all(line.x == drawn[0].x for line in drawn)
    rows = [
        {"name": line.name, "key": line.key, "v": [short(v) for v in line.y]} | ({} if shared else {"x": list(line.x)})
        for line in drawn
    ]
    return {"series": rows, "at": list(drawn[0].x) if shared and drawn else []}


def short(value: float | None, digits: int = 4) -> float | int | None:
    """Four digits are more than a chart shows."""
    if value is None:
        return None
    cut = float(f"{value:.{digits}g}")
    return int(cut) if cut == int(cut) and abs(cut) < 1e15 else cut


def _text(x: float, y: float, text: object, *, anchor: str = "", look: str = "soft") -> str:
    """A line of text; it starts at x unless the anchor is "middle" or "end"."""
    kind = (f' class="{look}"' if look else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}">{esc(text)}</text>'


def _across(look: str, x1: float, x2: float, y: float, more: str = "") -> str:
    """A horizontal line."""
    return f'<line class="{look}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}"{more}/>'


def _rect(look: str, x: float, y: float, width: float, height: float) -> str:
    """A rectangle; the one of the class "pad" is not seen, and feels the pointer."""
    fill = ' fill="transparent"' if look == "pad" else ""
    return f'<rect class="{look}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{fill}/>'


def _grid(across: Axis, up: Axis, x: str) -> list[str]:
    right, bottom = LEFT + PLOT_W, TOP + PLOT_H
    parts = []
    for tick in up.ticks:
        at = TOP + PLOT_H * (1 - up.at(tick))
        parts += [_across("grid", LEFT, right, at), _text(LEFT - 6, at + 4, up.text(tick), anchor="end")]
    for tick in across.ticks:
        parts.append(_text(LEFT + PLOT_W * across.at(tick), bottom + 15, across.text(tick), anchor="middle"))
    label = _text(right, bottom + 29, ACROSS.get(x, x), anchor="end")
    return [*parts, label, _across("axis", LEFT, right, bottom)]


def _runs(points: list[str | None]) -> list[list[str]]:
    """Pieces without gaps; a single point becomes a short dash."""
    runs: list[list[str]] = [[]]
    for point in points:
        if point is not None:
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run if len(run) > 1 else [run[0], run[0]] for run in runs if run]


def _band(line: Line, place: Callable[[tuple[float, float | None]], str | None]) -> str:
    low, high = line.band or ((), ())
    there = [place(p) for p in zip(line.x, high, strict=True)]
    back = [place(p) for p in zip(reversed(line.x), reversed(low), strict=True)]
    points = " ".join(p for p in (*there, *back) if p is not None)
    return f'<polygon class="band f{line.colour or 0}" data-key="{esc(line.key)}" points="{points}"/>'


def _legend(keys: list[tuple[str, Line]], top: float) -> tuple[list[str], float]:
    """Entries in rows, each a button in the page; and where they end."""
    parts, at, row = [], float(LEFT), 0
    for key, line in keys:
        width = 30 + LETTER * len(key)
        if at > LEFT and at + width > WIDTH - RIGHT + 8:
            at, row = float(LEFT), row + 1
        y = top + 18 * row
        look = "faint" if line.colour is None else f"line s{line.colour}"
        dash = f' stroke-dasharray="{DASHES[line.dash]}"' if line.dash else ""
        parts.append(
            f'<g class="key" data-toggle="{esc(key)}">'
            f'<rect x="{at - 4:.1f}" y="{y - 12:.1f}" width="{width:.1f}" height="17" rx="3" fill="transparent"/>'
            f"{_across(look, at, at + 18, y - 4, dash)}{_text(at + 23, y, key, look='')}</g>"
        )
        at += width + 8
    return parts, top + 18 * row + 8


class Bar(NamedTuple):
    """One bar: parts after one another, each with its colour."""

    name: str
    parts: tuple[tuple[float, int | None], ...]
    label: str
    hint: str = ""


def bars(
    name: str, title: str, drawn: Sequence[Bar], *, note: str = "", legend: Sequence[tuple[str, int | None]] = ()
) -> Chart:
    """Horizontal bars with their names before and their values behind them."""
    left = min(170.0, 14 + LETTER * max((len(_cut(bar.name)) for bar in drawn), default=0))
    width = WIDTH - left - 16 - LETTER * max((len(bar.label) for bar in drawn), default=0)
    top = max((sum(v for v, _ in bar.parts) for bar in drawn), default=0.0) or 1.0
    step = 17 if len(drawn) > 12 else 21
    parts = []
    for i, bar in enumerate(drawn):
        y, at = 6 + step * i, left
        hint, middle = esc(f"{bar.name}: {bar.hint or bar.label}"), y + step / 2 - 1
        parts.append(f'<g tabindex="0" role="img" aria-label="{hint}"><title>{hint}</title>')
        parts.append(_text(left - 6, middle, _cut(bar.name), anchor="end", look="bar-text"))
        for value, colour in bar.parts:
            long = width * value / top
            fill = 'fill="var(--line)"' if colour is None else f'class="f{colour}"'
            parts.append(f'<rect {fill} x="{at:.1f}" y="{y}" width="{max(long, 0.5):.1f}" height="{step - 6}" rx="2"/>')
            at += long
        parts.append(f"{_text(at + 6, middle, bar.label, look='bar-text soft')}</g>")
    height, at = 6 + step * len(drawn) + 6, left
    for label, colour in legend:
        fill = 'fill="var(--line)"' if colour is None else f'class="f{colour}"'
        parts.append(f'<rect {fill} x="{at:.1f}" y="{height + 2}" width="12" height="10" rx="2"/>')
        parts.append(_text(at + 17, height + 11, label, look=""))
        at += 34 + LETTER * len(label)
    return Chart(name, title, "".join(parts), height + (20 if legend else 0), {}, note)


def _cut(text: str, most: int = 25) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def heat(rows: Sequence[Sequence[float]], top: float) -> str:
    """A picture with a pixel a cell: the more, the darker (by the square root), as a data address."""
    height, width = len(rows), len(rows[0])
    shades = b"".join(
        b"\0" + bytes(min(255, round(255 * math.sqrt(max(0.0, v) / top))) if top > 0 else 0 for v in row)
        for row in rows
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
    data += chunk(b"PLTE", bytes(HEAT) * 256) + chunk(b"tRNS", bytes(range(256)))
    data += chunk(b"IDAT", zlib.compress(shades, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def heat_map(
    name: str,
    title: str,
    rows: Sequence[Sequence[float]],
    at: Sequence[int],
    *,
    source: str,
    names: Sequence[str] = (),
    mark: int | None = None,
    note: str = "",
) -> Chart:
    """Clients by rounds; the values are those of the chart `source`. mark is drawn below so many: the known friends.

    Args:
        name: of the chart.
        title: above it.
        rows: the weights of each client over the rounds.
        at: the rounds.
        source: the name of the chart that holds the values.
        names: the clients' names, where they have names; else their numbers are shown.
        mark: the number of known friends.
        note: below it.
    """
    n = len(rows)
    tall = float(min(340, max(150, 13 * n)))
    cell = tall / n
    left, labels = _beside(n, names, LEFT)
    wide = WIDTH - left - RIGHT
    parts = [_image(rows, left, TOP, wide, tall)]
    every = max(1, math.ceil(13 / cell))
    for k in range(0, n, every):
        parts.append(_text(left - 6, TOP + (k + 0.5) * cell + 4, labels[k], anchor="end"))
    if mark is not None and 0 < mark < n:
        parts.append(_across("block", left, left + wide, TOP + mark * cell))
    for i in (0, len(at) // 2, len(at) - 1):
        parts.append(_text(left + wide * (i + 0.5) / len(at), TOP + tall + 15, at[i], anchor="middle"))
    parts.append(_text(4, TOP + tall + 15, "client"))
    parts += _scale(TOP + tall + 24, max(map(max, rows)))
    values = {"kind": "map", "box": [left, TOP, wide, tall], "columns": list(at), "across": "round"}
    values |= {**_down(range(n), names), "from": source}
    return Chart(name, title, "".join([*parts, _rect("pad", left, TOP, wide, tall)]), TOP + tall + 44, values, note)


def _beside(count: int, names: Sequence[str], least: int) -> tuple[int, list[str]]:
    """What stands beside the rows of a map, and the room for it: numbers, or as much of the names as fits."""
    longest = min(14, max(map(len, names), default=0))
    return max(least, 12 + round(LETTER * longest)), _labels(count, names, 14)


def _labels(count: int, names: Sequence[str], most: int) -> list[str]:
    """Numbers, or as much of the names as so many letters show."""
    return [_cut(name, most) for name in names] or [str(k) for k in range(count)]


def _down(order: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """What a map calls its rows where values are read."""
    return {"down": "" if names else "client", "rows": [names[k] for k in order] if names else list(order)}


def _image(rows: Sequence[Sequence[float]], x: float, y: float, width: float, height: float) -> str:
    place = f'x="{x}" y="{y}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none"'
    frame = _rect("frame", x, y, width, height)
    return f'<image class="heat" {place} href="{heat(rows, max(map(max, rows)))}"/>{frame}'


def _scale(y: float, top: float) -> list[str]:
    """What the shades mean."""
    shades = [[top * i / 63 for i in range(64)]]
    place = f'x="{LEFT + 14}" y="{y:.1f}" width="120" height="9" preserveAspectRatio="none"'
    return [
        f'<image class="heat" {place} href="{heat(shades, top)}"/>',
        _text(LEFT + 10, y + 9, "0", anchor="end"),
        _text(LEFT + 139, y + 9, number(top)),
    ]


def matrix_map(
    name: str,
    title: str,
    weights: Sequence[Sequence[float]],
    clusters: Sequence[Sequence[int]],
    *,
    names: Sequence[str] = (),
    note: str = "",
) -> Chart:
    """Who learns from whom, rows and columns by clusters, a frame around each."""
    order = [k for cluster in clusters for k in cluster]
    n, top = len(order), 34
    left, beside = _beside(n, names, 58)
    side = WIDTH - 18.0 - left
    cell = side / n
    above = _labels(n, names, max(2, int(cell / LETTER)))
    rows = [[weights[i][k] for k in order] for i in order]
    parts = [_image(rows, left, top, side, side)]
    every = max(1, math.ceil(15 / cell))
    for i in range(0, n, every):
        at = (i + 0.5) * cell
        parts.append(_text(left + at, top - 6, above[order[i]], anchor="middle"))
        parts.append(_text(left - 5, top + at + 4, beside[order[i]], anchor="end"))
    parts += [_text(left, top - 20, "client that helps →"), _text(2, top - 6, "target")]
    most = max(map(max, rows))
    if cell >= 22:
        for i, row in enumerate(rows):
            for k, value in enumerate(row):
                if value >= 0.02:
                    look = "on" if math.sqrt(value / most) > 0.6 else ""
                    x, y = left + (k + 0.5) * cell, top + (i + 0.5) * cell + 3.5
                    parts.append(_text(x, y, f"{100 * value:.0f}", anchor="middle", look=look))
    start = 0
    for cluster in clusters:
        at, width = start * cell, len(cluster) * cell
        parts.append(_rect("block", left + at, top + at, width, width))
        start += len(cluster)
    values = {"kind": "map", "box": [left, top, side, side], "columns": order, "across": "learns from client"}
    if names:
        values |= {"columns": [names[k] for k in order], "across": "learns from"}
    values |= {**_down(order, names), "v": [[short(v, 3) for v in row] for row in rows]}
    return Chart(name, title, "".join([*parts, _rect("pad", left, top, side, side)]), top + side + 10, values, note)


def graph(
    name: str,
    title: str,
    weights: Sequence[Sequence[float]],
    clusters: Sequence[Sequence[int]],
    *,
    names: Sequence[str] = (),
    note: str = "",
    most: int = 300,
) -> Chart:
    """Clients as circles, clusters together; a line from each client to whom it gives more than an equal share."""
    n, height = len(weights), 400.0
    inside = [name[:2] for name in names] or [str(k) for k in range(n)]  # whole names where one looks closer
    spots, scale = _layout(clusters, WIDTH - 40.0, height - 40.0)
    links = [(weights[i][k], i, k) for i in range(n) for k in range(n) if i != k and weights[i][k] >= 1.0 / n]
    links = sorted(links, reverse=True)[:most]
    top = links[0][0] if links else 1.0
    parts = []
    for value, i, k in reversed(links):
        (x1, y1), (x2, y2) = spots[i], spots[k]
        middle = f"{(x1 + x2) / 2 + 0.12 * (y2 - y1):.1f} {(y1 + y2) / 2 - 0.12 * (x2 - x1):.1f}"
        look = f'stroke-width="{0.6 + 2.6 * value / top:.1f}" stroke-opacity="{0.25 + 0.5 * value / top:.2f}"'
        way = f"M{x1:.1f} {y1:.1f}Q{middle} {x2:.1f} {y2:.1f}"
        text = f"<title>{esc(f'{client_label(i, names)} gives {client_label(k, names)} {value:.3g}')}</title>"
        parts.append(f'<path class="edge" data-a="{i}" data-b="{k}" {look} d="{way}">{text}</path>')
    given = [sum(weights[i][k] for i in range(n) if i != k) for k in range(n)]
    for c, cluster in enumerate(clusters):
        for k in cluster:
            x, y = spots[k]
            radius = scale * (7.0 + 4.0 * math.sqrt(given[k] / (max(given) or 1.0)))
            text = esc(f"{client_label(k, names)}: others give it {given[k]:.2f} in all, it keeps {weights[k][k]:.2f}")
            circle = f'<circle class="node f{c % (len(LIGHT) - 1)}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
            label = _text(x, y + 3.5, inside[k], anchor="middle", look="inside")
            parts.append(f'<g class="spot" data-node="{k}" tabindex="0" role="img" aria-label="{text}">')
            parts.append(f"<title>{text}</title>{circle}{label if scale > 0.7 else ''}</g>")
    return Chart(name, title, "".join(parts), height, {"kind": "graph"}, note)


def _layout(
    clusters: Sequence[Sequence[int]], width: float, height: float
) -> tuple[dict[int, tuple[float, float]], float]:
    """Every cluster a circle, all circles on a circle, then shrunk into the box; and by how much circles shrink too."""
    radii = [0.0 if len(cluster) == 1 else 30 * len(cluster) / (2 * math.pi) for cluster in clusters]
    around = sum(2 * r + 40 for r in radii)
    far = 0.0 if len(clusters) == 1 else around / (2 * math.pi) if len(clusters) > 2 else around / 4
    spots: dict[int, tuple[float, float]] = {}
    turn = 0.0
    for cluster, r in zip(clusters, radii, strict=True):
        own = 2 * math.pi * (2 * r + 40) / around
        x, y = far * math.cos(turn + own / 2), far * math.sin(turn + own / 2)
        if len(clusters) == 2:
            x, y = (-far if turn == 0.0 else far), 0.0
        turn += own
        for j, k in enumerate(cluster):
            angle = 2 * math.pi * j / len(cluster) - math.pi / 2
            spots[k] = (x + r * math.cos(angle), y + r * math.sin(angle))
    xs, ys = [x for x, _ in spots.values()], [y for _, y in spots.values()]
    wide, tall = max(xs) - min(xs) or 1.0, max(ys) - min(ys) or 1.0
    scale = min(width / wide, height / tall, 1.6)
    left, top = 20 + (width - scale * wide) / 2, 20 + (height - scale * tall) / 2
    placed = {k: (left + scale * (x - min(xs)), top + scale * (y - min(ys))) for k, (x, y) in spots.items()}
    return placed, min(1.0, scale)
