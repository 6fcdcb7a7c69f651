"""The page: whole, small, safe from what stands in the files, and true to them."""

import itertools
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import make

from coterie.experiment.config import load
from coterie.experiment.run import run
from coterie.report.charts import groups, headline, headline_of_several
from coterie.report.page import content, document, write
from coterie.report.results import read, read_all
from coterie.report.svg import DARK, DASHES, LIGHT, as_json, axis, esc, heat, number, percent, size

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00\u2028"


class Tags(HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def tags(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(page)
    return parser.found


def test_the_page_stands_alone_and_says_what_matters(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", baselines=("local-train", "fedavg"))
    page = write(folder, [read(folder)]).read_text()
    for text in (
        "90.0 %",
        "40.0 points better than training alone",
        "known friends hold",
        "Run it again",
        "config.toml",
    ):
        assert text in page, text
    for tag, attributes in tags(page):
        assert tag not in ("iframe", "object", "embed", "base", "form")
        for name in ("src", "href"):
            assert not attributes.get(name) or str(attributes[name]).startswith("data:"), (tag, attributes)
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page
    assert "default-src &#x27;none&#x27;" in page


@pytest.mark.parametrize("matrix", [False, True])
def test_clients_are_shown_by_their_names(tmp_path: Path, matrix: bool) -> None:
    names = ("north.csv", HOSTILE, "east.csv", "west.csv", "south.csv", "yours")
    event = {"round": 2, "client": 2, "event": "failed", "reason": "lost"}
    folder = make(tmp_path / "a", matrix=matrix, names=names, friends=None, events=(event,))
    page = write(folder, [read(folder)]).read_text()
    assert not re.search(r"client \d", page)
    assert ">east.csv</td>" in page
    answer = page.partition('<section class="headline">')[2].partition("</p>")[0]
    assert ("{north.csv, " if matrix else "north.csv (50 %)") in answer
    for name in ("north.csv", "south.csv"):
        assert page.count(name) >= 3
    assert all("onerror" not in attributes for _, attributes in tags(page))
    plain = make(tmp_path / "b", matrix=matrix)
    without = write(plain, [read(plain)]).read_text()
    assert [tag for tag, _ in tags(page)].count("script") == [tag for tag, _ in tags(without)].count("script")


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    events = ({"round": 1, "client": 3, "event": HOSTILE, "reason": HOSTILE},)
    folder = make(tmp_path / "a<b>&c", method=HOSTILE, events=events, cause=f"m:{HOSTILE}", baselines=("x<y>",))
    page = document(content([read(folder)], [HOSTILE])[0], HOSTILE)
    found = tags(page)
    assert sum(tag == "script" and attributes.get("type") is None for tag, attributes in found) == 1  # our own
    assert not any(tag == "img" for tag, _ in found)
    assert not any(name.startswith("on") for _, attributes in found for name in attributes)
    for block in re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL):
        json.loads(block)
    write(folder, [read(folder)])
    for path in (folder / "plots").glob("*.svg"):
        ET.parse(path)


def test_json_inside_a_script_cannot_end_it() -> None:
    text = as_json({"a": HOSTILE})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"a": HOSTILE}
    with pytest.raises(ValueError):
        as_json(float("nan"))
    assert esc("a\x00<") == "a\ufffd&lt;"


def test_charts_are_files_too(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", baselines=("fedavg",))
    write(folder, [read(folder)])
    names = {path.stem for path in (folder / "plots").glob("*.svg")}
    assert {"weights-final", "weights-rounds", "weights-map", "communication", "test_accuracy-rounds"} <= names
    for path in (folder / "plots").glob("*.svg"):
        marks = [e for e in ET.parse(path).iter() if e.tag.rpartition("}")[2] in ("polyline", "rect", "image", "path")]
        assert marks, path


def test_the_matrix_has_a_map_and_a_graph(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", matrix=True, method="collaborate")
    page, charts = content([read(folder)])
    assert {"weights-matrix", "weights-graph"} <= {chart.name for chart in charts}
    assert "fall into 2 clusters: {0–2}; {3–5}; 100.0 % of the weight stays inside" in page
    drawn = next(chart for chart in charts if chart.name == "weights-graph").body
    pairs = {(int(a), int(b)) for a, b in re.findall(r'data-a="(\d+)" data-b="(\d+)"', drawn)}
    assert pairs == {(i, k) for i in range(6) for k in range(6) if i != k and (i < 3) == (k < 3)}


def test_a_large_run_stays_small(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", clients=150, rounds=1000, friends=None)
    page = write(folder, [read(folder)])
    assert page.stat().st_size < 3_000_000
    for block in re.findall(r'<script type="application/json">(.*?)</script>', page.read_text(), re.DOTALL):
        for one in json.loads(block).get("series", ()):
            assert len(one["v"]) <= 500


def test_a_run_in_progress_has_a_page(tmp_path: Path) -> None:
    """`coterie report` may be called at any time: the page shows what is recorded, and the run is not disturbed."""
    folder, pages = tmp_path / "run", []

    class Reader:
        def __init__(self, *_: Any) -> None: ...

        def started(self, parts: Any, done: int) -> None: ...

        def recorded(self, line: dict[str, Any], view: Any) -> None:
            runs, complaints = read_all([folder])
            pages.append(write(folder, runs, complaints).read_text())

        def ended(self, summary: dict[str, Any]) -> None: ...

    flags = {"run.problem": "quadratic", "run.method": "bilevel", "run.rounds": 3, "run.baselines": []}
    assert run(load(None, {}, flags), folder, Reader)["outcome"] == "finished"
    assert len(pages) == 4
    for page in pages:  # records reach the disk with the checkpoints
        assert "the run goes on, or was interrupted" in page or "holds no recorded round yet" in page
    assert "the run goes on" not in write(folder, read_all([folder])[0]).read_text()


def test_runs_that_differ_in_the_seed_are_one_curve(tmp_path: Path) -> None:
    runs = [
        read(make(tmp_path / f"{m}{s}", method=m, seed=s, best=b))
        for m, b in (("a", 0.9), ("b", 0.7))
        for s in (0, 1, 2)
    ]
    found = groups(runs)
    assert [(g.name, len(g.runs)) for g in found] == [("a", 3), ("b", 3)]
    told = headline_of_several(found)
    assert "a has the best test accuracy: 90.1 ± 0.1 %, mean over 3 seeds." in told.sentences[0]
    assert "20.0 points better than b" in told.sentences[1]
    page, charts = content(runs)
    chart = next(c for c in charts if c.name == "test_accuracy-rounds")
    assert chart.values["series"][0]["v"][-1] == pytest.approx(0.901)
    assert chart.body.count("<polygon") == 2
    assert "bands go from the least to the most" in page


def test_runs_of_one_method_are_told_apart_by_their_settings(tmp_path: Path) -> None:
    one, two = make(tmp_path / "a"), make(tmp_path / "b")
    (two / "config.toml").write_text((two / "config.toml").read_text().replace("step = 0.5", "step = 0.25"))
    assert [g.name for g in groups([read(one), read(two)])] == ["meritfed (step=0.5)", "meritfed (step=0.25)"]


def test_what_moves_nothing_is_drawn_across(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", baselines=("local-train",))
    chart = next(c for c in content([read(folder)])[1] if c.name == "test_accuracy-bytes")
    alone = next(s for s in chart.values["series"] if s["name"].startswith("local-train"))
    assert alone["x"] == [0.0, 60_000.0]
    assert alone["v"] == [0.5, 0.5]


def test_the_headline_of_a_run_without_baselines_or_weights(tmp_path: Path) -> None:
    run = read(make(tmp_path / "a", method="fedavg", with_weights=False, friends=None))
    assert headline(run, groups([run])).sentences == [
        "fedavg reaches 90.0 % test accuracy after 20 rounds.",
        "60 kB were moved in 20 rounds of communication, in 2 s of computation.",
    ]


def test_axes_have_round_ticks_and_hold_all_values() -> None:
    for values in ([0.0, 0.97], [3.0, 3.0], [-5.0, 12345.0], [1e-9, 2e-9], [0.0], []):
        made = axis(values, "number")
        assert 2 <= len(made.ticks) <= 8
        assert all(-1e-9 <= made.at(v) <= 1 + 1e-9 for v in values)
    log = axis([1e-7, 3.0], "number", log=True)
    assert log.at(1e-7) == 0.0
    assert log.ticks[0] == pytest.approx(1e-7)


def test_numbers_for_people() -> None:
    assert [number(v) for v in (0, 0.25, 1e-9, 123456789.0)] == ["0", "0.25", "1e-9", "1.2e8"]
    assert [number(v) for v in (1000.0, 9999.7, -1e4, 1e5, 1e12)] == ["1000", "10000", "-10000", "1e5", "1e12"]
    assert percent(0.5) == "50 %"
    assert [size(v) for v in (0, 999, 1500, 2.5e9)] == ["0 B", "999 B", "1.5 kB", "2.5 GB"]


def test_the_heat_map_is_a_picture_of_the_values() -> None:
    import base64
    import zlib

    data = base64.b64decode(heat([[0.0, 1.0], [0.25, 1.0]], 1.0).partition(",")[2])
    start = data.index(b"IDAT")
    length = int.from_bytes(data[start - 4 : start], "big")
    assert zlib.decompress(data[start + 4 : start + 4 + length]) == bytes([0, 0, 255, 0, 128, 255])


# linear RGB as seen with full colour blindness (Machado, Oliveira and Fernandes 2009), and OKLab (Ottosson 2020)
SEEN = {
    "all": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}
TO_LMS = np.array(
    [[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.68069955, 0.10739696], [0.08830246, 0.28171884, 0.6299787]]
)
TO_LAB = np.array(
    [[0.21045426, 0.79361779, -0.00407205], [1.9779985, -2.42859221, 0.45059371], [0.02590404, 0.78277177, -0.80867577]]
)


def linear(colour: str) -> Any:
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize(("colours", "paper"), [(LIGHT, "#ffffff"), (DARK, "#0d1117")], ids=["light", "dark"])
def test_lines_can_be_told_apart_and_seen(kind: str, colours: tuple[str, ...], paper: str) -> None:
    seen = [TO_LAB @ np.cbrt(TO_LMS @ np.clip(SEEN[kind] @ linear(c), 0, 1)) for c in colours]
    for a, b in itertools.combinations(seen, 2):
        assert np.linalg.norm(a - b) > 0.07
    light = [float(linear(c) @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in (*colours, paper)]
    for value in light[:-1]:
        assert max(value, light[-1]) / min(value, light[-1]) >= 3  # WCAG's bound for graphics
    assert len(set(DASHES)) == len(DASHES) >= len(colours)
