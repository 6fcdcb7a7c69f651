"""Every Python snippet and every `coterie …` line of the README and the docs runs.

The snippets of a page run in order, in one temporary directory and (Python) in one namespace, as a reader would type
them. `<!-- no-run: reason -->` before a snippet leaves it out. Every relative link leads to a file, and to a
heading of it.
"""

import os
import re
import shlex
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from coterie.cli import main

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(
    r"(?P<skip><!--\s*no-run:\s*(?P<reason>.*?)\s*-->\s*\n)?^(?P<indent>[ ]*)```(?P<kind>python|bash|console)[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


class Snippet(NamedTuple):
    """One fenced block, where it is, and why it is not run, if it is not."""

    page: Path
    line: int
    kind: str
    text: str
    reason: str | None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name}:{self.line}"


def snippets(page: Path) -> Iterator[Snippet]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        body = re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        yield Snippet(page, line, found["kind"], body, found["reason"])


def commands(text: str) -> Iterator[list[str]]:
    """The `coterie …` lines of a shell snippet, with or without a prompt, continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip().removeprefix("$ ")
        if line.startswith("coterie "):
            yield shlex.split(line, comments=True)[1:]


class Reader:
    """Somebody who types a page's snippets, in order."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page, self.folder = page, folder
        self.module = ModuleType(f"snippets_of_{page.stem.replace('-', '_')}")
        self.done: set[int] = set()

    def read_to(self, snippet: Snippet) -> None:
        """Run a snippet, after those before it."""
        for one in snippets(self.page):
            if one.line <= snippet.line and one.line not in self.done and one.reason is None:
                self.done.add(one.line)
                self.run(one)

    def run(self, snippet: Snippet) -> None:
        before = Path.cwd()
        sys.modules[self.module.__name__] = self.module
        os.chdir(self.folder)
        try:
            if snippet.kind == "python":
                code = "\n" * (snippet.line - 1) + snippet.text  # so that a traceback shows the page's line
                with torch.random.fork_rng():
                    exec(compile(code, str(snippet.page), "exec"), self.module.__dict__)
            else:
                for arguments in commands(snippet.text):
                    self.command(arguments, snippet)
        finally:
            os.chdir(before)
            del sys.modules[self.module.__name__]

    def command(self, arguments: list[str], snippet: Snippet) -> None:
        """By the entry point in this process: a start of Python for every line would take longer than all the rest."""
        said, code = StringIO(), 0
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
            patch.setattr(sys, "argv", ["coterie", *arguments])
            try:
                main()
            except SystemExit as end:
                code = end.code
        assert not code, f"{snippet.place}: coterie {shlex.join(arguments)}\n{said.getvalue()}"


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = [snippet for page in PAGES for snippet in snippets(page)]


LONG_PAGES = {"own-data.md"}  # its first commands are README's


def runs(snippet: Snippet) -> bool:
    """Whether there is something to run: Python, or a `coterie …` line; and no reason against it."""
    return snippet.reason is None and (snippet.kind == "python" or any(commands(snippet.text)))


def cases() -> list[Any]:
    """The pages that have something to run."""
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow] if page.name in LONG_PAGES else [])
        for page in PAGES
        if any(map(runs, snippets(page)))
    ]


def read_all(page: Path, folder: Path) -> None:
    reader = Reader(page, folder)
    for snippet in filter(runs, snippets(page)):
        reader.read_to(snippet)


@pytest.mark.parametrize("page", cases())
@pytest.mark.usefixtures("workers_here")
def test_snippets(page: Path, tmp_path: Path) -> None:
    """Page by page: a snippet needs those before it, which another process would have to run again."""
    read_all(page, tmp_path)


def test_the_readme_shows_the_library_and_the_command_line() -> None:
    readme = [snippet for snippet in SNIPPETS if snippet.page.name == "README.md" and snippet.reason is None]
    assert any(snippet.kind == "python" and "import coterie" in snippet.text for snippet in readme)
    assert any(list(commands(snippet.text)) for snippet in readme if snippet.kind != "python")


LINK = re.compile(r"\[[^\]\n]*\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"^[ ]*```.*?^[ ]*```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The anchor of a heading, as the site makes it."""
    plain = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^[ ]*```.*?^[ ]*```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def broken_links(page: Path) -> list[str]:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for link in LINK.finditer(text):
        path, _, anchor = link["target"].partition("#")
        if path.startswith(("http://", "https://")):
            continue
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link["target"])
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `code` – title\n[a](#a-code-title) [b](page.md#b) [c](none.md) `[d](none.md)` [e](https://x.org)\n"
    )
    assert broken_links(page) == ["page.md#b", "none.md"]


PAGE = """
```python
number = 1
```
1. In a list:
   ```console
   $ coterie list \\
       methods  # all of them
   make test
   something coterie list
   ```
<!-- no-run: needs a network -->
```bash
coterie data get mnist
```
```toml
x = 1
```
```python
assert number == 1
open("left.txt", "w").close()
```
```python
assert number == 2
```
```bash
coterie run --method nonsense
```
"""


def test_how_pages_are_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = list(snippets(page))
    assert [(s.kind, s.reason) for s in found] == [
        ("python", None),
        ("console", None),
        ("bash", "needs a network"),
        ("python", None),
        ("python", None),
        ("bash", None),
    ]
    assert found[0].line == 3
    assert list(commands(found[1].text)) == [["list", "methods"]]
    here, folder = Path.cwd(), tmp_path / "reader"
    folder.mkdir()
    reader = Reader(page, folder)
    reader.read_to(found[3])
    assert (folder / "left.txt").exists()
    with pytest.raises(AssertionError):
        reader.read_to(found[4])
    with pytest.raises(AssertionError, match=r"page.md:27: coterie run --method nonsense\s+error: unknown method"):
        reader.read_to(found[5])
    assert Path.cwd() == here


# promises and the tests that hold them

PROMISES = [ROOT / "docs" / name for name in ("SECURITY.md", "robustness.md")]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


class Promise(NamedTuple):
    """One row of a table: what is promised, its tests, and for each the number of its cases ("all …" is not one)."""

    page: str
    text: str
    tests: list[str]
    cases: list[str]


def promises(page: Path) -> list[Promise]:
    rows = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if tests := ["::".join(found) for found in NAMED.findall(line)]:
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            rows.append(Promise(page.name, cells[0], tests, cells[-1].split(" + ")))
    return rows


@pytest.mark.parametrize("page", PROMISES, ids=lambda page: page.name)
def test_every_promise_names_tests_that_exist_and_their_cases(page: Path) -> None:
    rows = promises(page)
    assert len(rows) > 10
    for row in rows:
        assert len(row.tests) == len(row.cases), row
        assert all(re.fullmatch(r"\d+( slow)?|all \w+", cases) for cases in row.cases), row
        for name in row.tests:
            file, _, function = name.partition("::")
            assert re.search(rf"^def {function}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), name


def test_promises_have_as_many_cases_as_their_pages_say(request: pytest.FixtureRequest) -> None:
    """Compares with what this run has collected, so it says nothing about files that were left out of it."""
    if request.config.option.keyword or any("::" in argument for argument in request.config.args):
        pytest.skip("a part of a file was chosen")
    collected = Counter(
        (item.nodeid.partition("[")[0], item.get_closest_marker("slow") is not None) for item in request.session.items
    )
    stated = [
        (row.page, (name, cases.endswith("slow")), int(cases.split()[0]))
        for page in PROMISES
        for row in promises(page)
        for name, cases in zip(row.tests, row.cases, strict=True)
        if not cases.startswith("all") and (name, cases.endswith("slow")) in collected
    ]
    assert stated == [(page, name, collected[name]) for page, name, _ in stated]


# paths and modules

PATH = re.compile(r"`((?:[\w-]+/)+(?:[\w-]+\.py)?|[\w-]+/[\w/-]+\.py)`")
BASES = (ROOT, ROOT / "src" / "coterie")
MODULE = re.compile(r"`(coterie(?:\.\w+)+)[`(]")


def missing_paths(text: str) -> list[str]:
    """Paths of Python files and of folders of the package that do not exist, from the root or from the package."""
    package = {path.name for path in (ROOT / "src" / "coterie").iterdir() if path.is_dir()}
    named = {path for path in PATH.findall(text) if path.endswith(".py") or path.split("/")[0] in package}
    return sorted(path for path in named if not any((base / path).exists() for base in BASES))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_modules_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert missing_paths(text) == []
    for name in sorted(set(MODULE.findall(text))):
        assert resolve_name(name) is not None


def test_every_file_of_the_architecture_exists() -> None:
    files = set(re.findall(r"`((?:[\w-]+/)*\w+\.py)`", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))
    assert len(files) > 40
    assert {file for file in files if not any((base / file).exists() for base in BASES)} == set()


def test_missing_paths_are_found() -> None:
    assert missing_paths(
        "`numerics/none.py` `numerics/simplex.py` `methods/none/` `runs/one/` `tests/test_docs.py`"
    ) == [
        "methods/none/",
        "numerics/none.py",
    ]
