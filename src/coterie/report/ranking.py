"""The critical-difference diagram: average ranks on a line, and bars over methods that are not significantly apart."""

from collections.abc import Mapping

from coterie.numerics.ranking import alike
from coterie.report.svg import LETTER, Chart, esc

WIDTH = 640.0
ROW, BAR, AXIS = 17.0, 9.0, 46.0


def rank_diagram(name: str, title: str, ranked: Mapping[str, float], difference: float) -> Chart:
    """Average ranks, the best on the left; a thick bar joins methods whose ranks differ by less than the difference.

    Args:
        name: of the chart.
        title: what it shows.
        ranked: average ranks, the best first.
        difference: the critical difference.
    """
    count, names = len(ranked), list(ranked)
    half = (count + 1) // 2
    left, right = (
        20 + LETTER * max((len(label) for label in part), default=0) for part in (names[:half], names[half:])
    )
    low, high = 1.0, max(2.0, float(count))

    def at(rank: float) -> float:
        return left + (WIDTH - left - right) * (rank - low) / (high - low)

    groups = alike(ranked, difference)
    first = AXIS + 10 + BAR * len(groups) + 8
    parts = [_line("axis", at(low), AXIS, at(high), AXIS)]
    for tick in range(1, int(high) + 1):
        parts += [_line("axis", at(tick), AXIS - 5, at(tick), AXIS), _text(at(tick), AXIS - 9, tick, "middle", "soft")]
    if difference < high - low:
        parts += [_line("line s1", at(low), 12, at(low + difference), 12)]
        parts += [_text(at(low + difference) + 6, 16, f"critical difference {difference:.2f}", "", "soft")]
    for i, group in enumerate(groups):
        y = AXIS + 10 + BAR * i
        parts.append(_line("line s0", at(ranked[group[0]]) - 3, y, at(ranked[group[-1]]) + 3, y, width=4))
    for i, label in enumerate(names):
        on_left = i < half
        y = first + ROW * (i if on_left else count - 1 - i)
        edge, x = (left - 6, at(ranked[label])) if on_left else (WIDTH - right + 6, at(ranked[label]))
        shown = f"{label}, average rank {ranked[label]:.2f}"
        parts.append(f'<g tabindex="0" role="img" aria-label="{esc(shown)}"><title>{esc(shown)}</title>')
        parts += [_line("faint", x, AXIS, x, y), _line("faint", x, y, edge, y)]
        parts.append(_text(edge - 4 if on_left else edge + 4, y + 4, label, "end" if on_left else "", "") + "</g>")
    values = {"ranks": dict(ranked), "difference": difference}
    return Chart(name, title, "".join(parts), first + ROW * half + 6, values, width=WIDTH)


def _line(look: str, x1: float, y1: float, x2: float, y2: float, width: float | None = None) -> str:
    thick = "" if width is None else f' style="stroke-width:{width:g}"'
    return f'<line class="{look}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{thick}/>'


def _text(x: float, y: float, text: object, anchor: str, look: str) -> str:
    kind = (f' class="{look}"' if look else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}">{esc(text)}</text>'
