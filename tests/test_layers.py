"""The shape of the source: imports go downwards only, nothing unpickles, and the registries are complete."""

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from inspect import isfunction, signature
from pathlib import Path
from typing import get_type_hints

import pytest

import coterie
from coterie.methods import Method
from coterie.methods.registry import METHODS

SOURCE = Path(coterie.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
ORDER = (
    "errors",
    "machine",
    "consent",
    "plugins",
    "glossary",
    "measures",
    "schedules",
    "stop",
    "settings",
    "storage",
    "numerics",
    "federation",
    "problems",
    "ensemble",
    "methods",
    "experiment",
    "testing",
    "report",
    "fitted",
    "advise",
    "reproduce",
    "engines",
    "flower",
    "study",
    "cli",
)
LEVEL = {name: level for level, name in enumerate(ORDER)}
LEVEL |= {
    "facade": LEVEL["cli"],
    "sklearn": LEVEL["cli"] + 1,
    "__init__": LEVEL["cli"] + 1,
    "__main__": LEVEL["cli"] + 1,
}
LEVEL |= {"__version__": -1}  # a constant of the package

# the names of works are looked up in the registry of methods, when a message asks for one
BY_NAME = {("federation/naming.py", "coterie.methods.registry.METHODS")}


def dotted(path: Path) -> str:
    return ".".join(["coterie", *path.relative_to(SOURCE).with_suffix("").parts])


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def layer(module: str) -> str:
    """The part of coterie that a dotted name belongs to."""
    _, _, rest = module.partition(".")
    return rest.split(".")[0] or "__init__"


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module that is imported, also inside functions, by its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parent, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_the_walk_sees_every_kind_of_import():
    text = "import a.b\nfrom c import d, e as f\ndef g():\n    from . import h\n    from ..i import j"
    assert list(imports(ast.parse(text), "p.q")) == ["a.b", "c.d", "c.e", "p.q.h", "p.i.j"]


@cache
def seen_in(path: Path) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], bool]:
    """What a file imports, which attributes of names it uses, and whether it allows pickles; read once."""
    tree = ast.parse(path.read_text())
    package = ".".join(["coterie", *path.relative_to(SOURCE).with_suffix("").parts[:-1]])
    nodes = list(ast.walk(tree))
    attributes = [
        (node.value.id, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    allowed = any(
        isinstance(node, ast.keyword)
        and node.arg == "allow_pickle"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
        for node in nodes
    )
    return tuple(imports(tree, package)), tuple(dict.fromkeys(attributes)), allowed


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_downwards_only(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    own = parts[0]
    assert own in LEVEL, f"{own} has no place among the layers {ORDER}"
    for module in seen_in(path)[0]:
        if module.split(".")[0] == "coterie":
            other = layer(module)
            if (name_of(path), module) in BY_NAME:
                continue
            assert other == own or LEVEL[other] < LEVEL[own], f"{own} must not know of {module}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_unpickles(path):
    modules, attributes, allows_pickles = seen_in(path)
    loaders = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    for module in modules:
        assert module.partition(".")[0] not in loaders, module
        assert module != "torch.load"
    for name, attribute in attributes:
        assert (name, attribute) != ("torch", "load")
        assert name != "pickle", f"pickle.{attribute}"
    assert not allows_pickles


def is_factory(value: object, module: str) -> bool:
    """Whether this is a public function of the module that makes a Method of settings given by name."""
    if not isfunction(value) or value.__module__ != module or value.__name__.startswith("_"):
        return False
    by_name = all(p.kind is p.KEYWORD_ONLY for p in signature(value).parameters.values())
    return by_name and get_type_hints(value).get("return") is Method


def factories(module: str) -> set[tuple[str, str]]:
    return {(module, name) for name, value in vars(import_module(module)).items() if is_factory(value, module)}


def test_every_method_is_registered():
    defined = {f for path in (SOURCE / "methods").rglob("[!_]*.py") for f in factories(dotted(path))}
    assert defined == {(entry.make.__module__, entry.make.__name__) for entry in METHODS}


def test_registered_names_are_unique_and_those_of_the_methods():
    names = [entry.name for entry in METHODS]
    assert len(set(names)) == len(names)
    assert names == [entry.make().name for entry in METHODS]


FLOWER = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}  # what Flower documents for apps


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_of_flower_only_what_it_documents_is_imported(path):
    used = {module for module in seen_in(path)[0] if module.split(".")[0] == "flwr"}
    assert {module for module in used if ".".join(module.split(".")[:2]) not in FLOWER} == set()
