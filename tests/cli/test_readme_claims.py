"""What README prints of its own commands is what they print."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
README = Path(__file__).parents[2] / "README.md"
PERCENT = r"(\d+\.\d) %"


def quoted() -> str:
    """The sentence that README quotes from the page."""
    lines = [line[1:].strip() for line in README.read_text(encoding="utf-8").splitlines() if line.startswith(">")]
    return " ".join(lines)


@pytest.mark.slow
def test_the_advice_of_readme_is_what_its_commands_find(
    coterie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answer and names word for word; figures to two points, since processors round differently."""
    monkeypatch.chdir(tmp_path)
    assert coterie("data", "example", "digits", "--data", "digits", "--own", 100).code == 0
    where = ("--clients", "digits/sites/*.csv", "--target", "digits/mine.csv", "--label", "digit")
    done = coterie("advise", *where, "--out", "advice", "--json")
    assert done.code == 0, done.err
    said, found = quoted(), done.json["headline"]
    assert said.partition(". ")[0] == found.partition(". ")[0] == "Yes: train with east.csv, north.csv and south.csv"
    for wanted, value in zip(re.findall(PERCENT, said), re.findall(PERCENT, found), strict=True):
        assert float(value) == pytest.approx(float(wanted), abs=2.0)
    assert done.json["worth_it"] == "yes"
    assert done.json["delivered"]["gain"]["value"] > 0.05
