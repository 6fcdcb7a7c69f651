"""Figures of a study: measures against what was spent, one panel per problem, one line per method."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.measures import named
from coterie.report.charts import AGAINST, Group, curve
from coterie.report.results import read
from coterie.report.svg import LIGHT, Chart, Line, lines
from coterie.reproduce.reading import finished_run
from coterie.reproduce.study import Table, cells, slug

MOST = 60  # points of a stored line


def gathered(table: Table, out: Path) -> list[dict[str, Any]]:
    """The curves of a table as plain data, as far as their runs are there.

    Args:
        table: the table.
        out: the folder of its runs.
    """
    panels: dict[str, dict[str, tuple[Path, ...]]] = {}
    seen: set[tuple[Path, ...]] = set()
    for cell in cells(table):
        folders = tuple(out / table.folder(settings) for settings in cell.runs)
        found = tuple(folder for folder in folders if finished_run(folder) is not None)
        if not found or folders in seen:
            continue  # several columns may read the same runs
        seen.add(folders)
        by_row = "run.method" in cell.row.settings
        line, panel = (cell.row.name, cell.column.name) if by_row else (cell.column.name, cell.row.name)
        panels.setdefault(panel, {})[line] = found
    return [
        {"measure": wanted.measure, "against": wanted.against, "panel": panel, "lines": drawn_lines}
        for wanted in table.curves
        for panel, members in panels.items()
        if (drawn_lines := _lines(members, wanted.measure, wanted.against))
    ]


def _lines(members: Mapping[str, tuple[Path, ...]], measure: str, against: str) -> list[dict[str, Any]]:
    found = []
    for name, folders in members.items():
        group = Group(name, [read(folder, with_baselines=False) for folder in folders], 0, False)
        line = curve(group, measure, against, MOST)
        if line is not None:
            band = {} if line.band is None else {"least": _short(line.band[0]), "most": _short(line.band[1])}
            found.append({"name": name, "x": list(line.x), "y": _short(line.y), **band})
    return found


def _short(values: Any) -> list[float | None]:
    return [None if value is None else float(f"{value:.6g}") for value in values]


def drawn(result: Mapping[str, Any]) -> list[Chart]:
    """The figures of a stored result.

    Args:
        result: what `reproduce` wrote.
    """
    charts, several = [], len({figure["panel"] for figure in result.get("curves", [])}) > 1
    for figure in result.get("curves", []):
        measure, against = named(figure["measure"]), figure["against"]
        kept = []
        for i, line in enumerate(figure["lines"]):
            band = (line["least"], line["most"]) if "least" in line else None
            colour = i % len(LIGHT)
            kept.append(Line(line["name"], line["x"], line["y"], line["name"], colour, i // len(LIGHT), band))
        panel = f", {result['corner']} {figure['panel']}" if several else ""
        title = f"{measure.label} against {AGAINST[against]}{panel}"
        kind = "percent" if measure.share else "number"
        name = slug(f"{measure.name}-{against}-{figure['panel']}").lower()
        charts.append(lines(name, title, kept, x=against, y=kind, log=measure.scale == "log"))
    return charts
