"""Several charts of the report in one picture."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from coterie.report.svg import LEFT, LETTER, Chart, esc

GAP, HEAD = 20.0, 22.0
READABLE = 0.7  # smaller panels are drawn without their texts


class Panel(NamedTuple):
    """A chart, where it stands, and how large."""

    chart: Chart
    x: float
    y: float
    scale: float = 1.0

    @property
    def right(self) -> float:
        return self.x + max(self.scale * self.chart.width, LEFT * self.scale + LETTER * len(self.chart.title))

    @property
    def bottom(self) -> float:
        return self.y + HEAD + self.scale * self.chart.height

    def drawn(self) -> str:
        title = f'<text class="strong" x="{LEFT * self.scale:g}" y="15">{esc(self.chart.title)}</text>'
        inside = self.chart.body if self.scale > READABLE else re.sub(r"<text.*?</text>", "", self.chart.body)
        body = f'<g transform="translate(0 {HEAD:g}) scale({self.scale:g})">{inside}</g>'
        return f'<g transform="translate({self.x:g} {self.y:g})">{title}{body}</g>'


def picture(name: str, title: str, panels: Sequence[Panel]) -> Chart:
    """All panels as one chart."""
    body = "".join(panel.drawn() for panel in panels)
    height, width = (max(sides) for sides in zip(*((p.bottom, p.right) for p in panels), strict=True))
    return Chart(name, title, body, height, width=width)
