"""The critical-difference diagram is well-formed, puts the best first, and joins what is not apart."""

from xml.etree import ElementTree

from coterie.report.ranking import rank_diagram
from coterie.report.svg import Chart

RANKS = {"first": 1.5, "second": 2.0, "third & co": 3.9, "<fourth>": 4.5, "fifth": 5.0}
SVG = "{http://www.w3.org/2000/svg}"


def drawn(difference: float) -> tuple[Chart, ElementTree.Element]:
    chart = rank_diagram("ranks", "Average ranks", RANKS, difference)
    return chart, ElementTree.fromstring(chart.file(paper=True))


def test_it_shows_every_method_with_its_rank_in_light_and_dark() -> None:
    chart, root = drawn(1.2)
    titles = [found.text for found in root.iter(f"{SVG}title")]
    assert titles[0] == "Average ranks"
    assert titles[1:] == [f"{name}, average rank {rank:.2f}" for name, rank in RANKS.items()]
    assert "prefers-color-scheme:dark" in chart.file()
    assert chart.values == {"ranks": RANKS, "difference": 1.2}
    assert 'fill="var(--paper)"' in chart.file(paper=True)


def test_the_best_is_leftmost_and_everything_is_inside() -> None:
    chart, root = drawn(1.2)
    starts = [float(group[1].attrib["x1"]) for group in root.iter(f"{SVG}g") if "tabindex" in group.attrib]
    assert starts == sorted(starts)
    for line in root.iter(f"{SVG}line"):
        assert all(0 <= float(line.attrib[key]) <= chart.width for key in ("x1", "x2"))
        assert all(0 <= float(line.attrib[key]) <= chart.height for key in ("y1", "y2"))


def test_bars_join_methods_that_are_not_apart() -> None:
    for difference, bars in ((1.2, 2), (0.1, 0), (9.0, 1)):
        _, root = drawn(difference)
        thick = [line for line in root.iter(f"{SVG}line") if "stroke-width:4" in line.attrib.get("style", "")]
        assert len(thick) == bars
