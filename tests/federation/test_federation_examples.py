"""The examples in the docstrings of the federation run, and print what they say."""

import doctest
from importlib import import_module

import pytest

MODULES = (
    *(f"federation.{name}" for name in ("verbs", "local", "shards", "work")),
    *(f"federation.stages.{name}" for name in ("attacks", "compression", "faults", "privacy")),
    "methods.shared.forfeiting",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name: str) -> None:
    found = doctest.testmod(import_module(f"coterie.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
