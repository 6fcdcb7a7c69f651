"""The field's English: habits that the README and the pages of docs dropped, and that a regular expression can find.

Code (fenced, indented or in backticks), HTML comments and generated tables are left out.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

CODE = re.compile(
    r"<!-- result: .*?<!-- end of result -->|<!--.*?-->|^[ ]*```.*?^[ ]*```|^(?: {4}|\t|:::)[^\n]*|``.+?``|`[^`]+`",
    re.DOTALL | re.MULTILINE,
)
NOUNS = "round|client|second|core|epoch|step|phase|target|row|feature|class|method|parameter|partner|site|process"
BANNED = {
    rf"\b(?:an?|one) [\w-]+ an? (?:{NOUNS})\b": "per",
    rf"\b(?:rounds|steps|numbers?|floats|rows|clients|shards?|models?|lines?|files?|bytes) an? (?:{NOUNS})\b": "per",
    r"\b(?:gone|goes|go|went) on\b": "resumed, continues",
    r"\bbears\b|\bbearable\b": "tolerates",
    r"\b(?:of|over|from|by|to) those (?:who|that) (?:answer|are there|come)\w*": "replies, participants",
    r"\bwho takes part\b|\btakes? part\b": "participates, participants",
    r"\bis said\b|\bwas said\b|\bwere said\b|\bare said\b|\bis told\b|\bare told\b": "is reported",
    r"\bwalk(?:s|ed|ing)?\b": "local steps",
    r"\bthe way it went\b": "the update",
    r"\bwhat is (?:sent|uploaded)\b": "payload",
    r"\bcame out at\b": "was measured as; put the diary on the page of measurements",
    r"\bone's own\b|\bsomebody's\b": "your own",
}


def prose(text: str) -> str:
    """A page without its code, with the line breaks kept so that lines can be named."""
    return CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def habits(text: str) -> list[str]:
    """Line, words and remedy of every banned habit."""
    plain = prose(text)
    joined = plain.replace("\n", " ")
    return [
        f"line {plain.count(chr(10), 0, found.start()) + 1}: {found[0]!r}; better: {remedy}"
        for pattern, remedy in BANNED.items()
        for found in re.finditer(pattern, joined, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_none_of_the_dropped_habits(page: Path) -> None:
    assert habits(page.read_text(encoding="utf-8")) == []


def test_habits_are_found_in_prose_and_not_in_code() -> None:
    assert habits("It sends a row a client.\nA run is gone\non with.") == [
        "line 1: 'a row a client'; better: per",
        "line 2: 'gone on'; better: resumed, continues",
    ]
    assert habits("Use `sgd_walk`.\n\n    a row a client\n\n```text\nbears\n```\n<!-- takes part -->\n") == []
