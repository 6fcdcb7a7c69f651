"""The page in a real Chromium: nothing is logged, nothing is fetched, every chart has marks, and the controls work."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Page, browser
from made import make

from coterie.report.page import write
from coterie.report.results import read

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

MARKS = """[...document.querySelectorAll("figure")].filter((f) => {
  const svg = f.querySelector("svg");
  const drawn = svg.querySelectorAll("polyline, path, image, rect:not(.pad):not(.frame), circle");
  return drawn.length === 0;
}).map((f) => f.id)"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("reports")
    event = {"round": 2, "client": 1, "event": "failed", "reason": "</script><script>throw 1</script>"}
    one = make(base / "one", baselines=("local-train", "fedavg"), events=(event,))
    matrix = make(base / "matrix", matrix=True, method="collaborate")
    several = [make(base / f"{m}-{s}", method=m, seed=s) for m in ("a<b", "c") for s in (0, 1)]
    return {
        "one": write(one, [read(one)]),
        "matrix": write(matrix, [read(matrix)]),
        "several": write(base / "all", [read(folder) for folder in several]),
    }


@pytest.mark.parametrize("name", ["one", "matrix", "several"])
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)])
def test_quiet_offline_and_complete(page: Page, reports: dict[str, Path], name: str, width: int, dark: bool) -> None:
    page.errors.clear()
    page.requests.clear()
    page.open(reports[name].as_uri(), width=width, dark=dark)
    assert page.run("document.querySelectorAll('figure').length") >= 4
    assert page.run(MARKS) == []
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("data:", reports[name].as_uri()))] == []
    assert page.run("document.documentElement.scrollWidth") <= width
    paper = "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
    assert page.run("getComputedStyle(document.documentElement).backgroundColor") == paper


def test_controls(page: Page, reports: dict[str, Path]) -> None:
    page.errors.clear()
    page.open(reports["one"].as_uri())
    page.run("localStorage.removeItem('coterie-theme')")
    page.open(reports["one"].as_uri())
    colours = []
    for _ in range(3):
        page.run("document.getElementById('theme').click()")
        colours.append(page.run("getComputedStyle(document.documentElement).backgroundColor"))
    assert colours == ["rgb(255, 255, 255)", "rgb(13, 17, 23)", "rgb(255, 255, 255)"]

    key = "document.querySelector('#test_accuracy-rounds .key[data-toggle=fedavg]')"
    line = "document.querySelector('#test_accuracy-rounds polyline[data-key=fedavg]')"
    assert page.run(f"getComputedStyle({line}).display") != "none"
    page.run(f"{key}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'Enter', bubbles: true}}))")
    assert page.run(f"getComputedStyle({line}).display") == "none"
    assert page.run(f"{key}.getAttribute('aria-pressed')") == "false"
    page.run(f"{key}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    assert page.run(f"getComputedStyle({line}).display") != "none"

    shown = "getComputedStyle(document.getElementById('test_accuracy-{}')).display"
    assert page.run(shown.format("bytes")) == "none"
    page.run("document.querySelector('[data-show=bytes]').click()")
    assert page.run(shown.format("bytes")) != "none"
    assert page.run(shown.format("rounds")) == "none"
    page.run("document.querySelector('[data-show=round]').click()")
    assert page.errors == []


POINT = """(() => {
  const pad = document.querySelector("#%s .pad"), box = pad.getBoundingClientRect();
  const at = { clientX: box.left + %s * box.width, clientY: box.top + %s * box.height, bubbles: true };
  pad.dispatchEvent(new PointerEvent("pointermove", at));
  return document.getElementById("tip").textContent;
})()"""


def test_values_at_the_pointer_and_by_keys(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["one"].as_uri())
    assert page.run(POINT % ("test_accuracy-rounds", 0.999, 0.1)).split("\n")[:2] == ["round 20", "meritfed: 90 %"]
    assert page.run(POINT % ("weights-map", 0.001, 0.99)).split("\n")[0] == "client 5, round 0"
    keys = "document.querySelector('#test_accuracy-rounds .pad')"
    page.run(f"{keys}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'End', bubbles: true}}))")
    assert page.run(f"{keys}.getAttribute('aria-valuetext')").startswith("round 20\nmeritfed: 90 %")
    page.open(reports["matrix"].as_uri())
    assert "client 5, learns from client 5" in page.run(POINT % ("weights-matrix", 0.99, 0.99))
    page.run("document.querySelector('.spot[data-node=\"0\"]').dispatchEvent(new MouseEvent('mouseenter'))")
    assert page.run("document.querySelectorAll('.edge.lit').length") == 2
    assert page.errors == []
