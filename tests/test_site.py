"""The documentation site builds without a warning or a foreign asset, and its reference pages are complete."""

import ast
import os
import re
import runpy
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from pathlib import Path

import pytest
import typer

from coterie.cli.app import app
from coterie.experiment.config import EngineTable, FaultsTable, FederationTable, PrivacyTable, RunTable
from coterie.methods.registry import METHODS
from coterie.problems.catalogue.registry import PROBLEMS
from coterie.settings import describe

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGES = (
    "coterie",
    *(f"coterie.{name}" for name in ("methods", "problems", "federation", "numerics", "flower", "testing")),
)
FOREIGN = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if find_spec(name) is None]


@pytest.mark.docs
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; pip install 'coterie[docs]'")
def test_the_site_builds_without_a_warning_or_a_foreign_asset(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        html = page.read_text(encoding="utf-8")
        assert FOREIGN.findall(html) == [], page.name
        if page.parent.name == "reference":
            assert "<blockquote>" not in html, f"{page.name}: an example is not a block of code"
    methods = (tmp_path / "site/reference/methods.html").read_text(encoding="utf-8")
    assert "<code>second_momentum</code>" in methods


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2])
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(pages)


def test_fields_of_named_tuples_are_attributes_on_the_site() -> None:
    fields = runpy.run_path(str(DOCS / "hooks.py"))["fields"]
    doc = "A pair.\n\n    Args:\n        a: the first."
    tuple_, other = ast.parse("class A(NamedTuple): ...\nclass B: ...").body
    assert fields(doc, tuple_) == doc.replace("Args:", "Attributes:")
    assert fields(doc, other) == doc


def test_every_setting_of_a_factory_has_its_line_on_the_reference_page() -> None:
    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    methods = {entry.identifier: entry.make for entry in METHODS}
    problems = {entry.name.replace("-", "_"): entry.make for entry in PROBLEMS}
    assert set(problems) == set(hooks["problems"]())
    made = [*(("method", *pair) for pair in methods.items()), *(("problem", *pair) for pair in problems.items())]
    for kind, name, factory in made:
        file = Path(unwrap(factory).__code__.co_filename)
        tree = ast.parse(file.read_text(encoding="utf-8"))
        (node,) = (part for part in tree.body if isinstance(part, ast.FunctionDef) and part.name == name)
        shown = hooks["documented"](ast.get_docstring(node) or "", node, file)
        assert shown == factory.__doc__, name
        rows = re.findall(r"^ {4}(\w+): \S.* \(.+\)\.$", shown, re.MULTILINE)
        assert rows == [setting.name for setting in describe(factory, kind)], name


def test_examples_of_docstrings_are_shown_as_code() -> None:
    examples = runpy.run_path(str(DOCS / "hooks.py"))["examples"]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "src").rglob("*.py")]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = [ast.get_docstring(node) or "" for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    with_code = [doc for doc in docs if ">>> " in doc]
    assert len(with_code) > 70
    for doc in with_code:
        before, _, code = examples(doc).partition("Examples:\n")
        assert (">>> " in before, ">>> " in code) == (False, True), doc
    assert examples("Text.\n\nExample:\n    `word` stays.") == "Text.\n\nExample:\n    `word` stays."


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_entry(package: str) -> None:
    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    pages = "\n".join(hooks["complete"](page.read_text(encoding="utf-8")) for page in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(rf"^::: {re.escape(package)}\.(\w+)$", pages, re.MULTILINE))
    if package == "coterie" and "\n::: coterie.advise.answer.advise\n" in pages:
        shown.add("advise")  # a package that can be called: its entry is that of the function
    public = set(import_module(package).__all__) - ({"methods"} if package == "coterie" else set())
    assert shown == public


def test_every_setting_is_on_its_page() -> None:
    tables = {
        "run": RunTable,
        "federation": FederationTable,
        "faults": FaultsTable,
        "privacy": PrivacyTable,
        "engine": EngineTable,
    }
    page = (DOCS / "settings.md").read_text(encoding="utf-8")
    for name, table in tables.items():
        section = page.partition(f"## `[{name}]`")[2].partition("\n## ")[0]
        rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
        listed = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
        assert sorted(listed) == sorted(table.model_fields), name


def test_commands_are_few_and_each_is_on_the_page_under_its_reader() -> None:
    root = typer.main.get_command(app)
    assert len(root.commands) <= 20
    commands = {
        (command.rich_help_panel, f"coterie {name} {inner}".rstrip())
        for name, command in root.commands.items()
        for inner in getattr(command, "commands", {"": None})
    }
    sections = re.split(r"^## ", (DOCS / "commands.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {
        (section.partition("\n")[0], command)
        for section in sections
        for command in re.findall(r"^\| `(coterie [^`]+)` \|", section, re.MULTILINE)
    }
    assert found == commands
    assert {panel for panel, _ in commands} == {"Decide", "Research", "Partners", "Data"}
