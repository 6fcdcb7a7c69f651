"""The examples in the docstrings of the federation run, and print what they say."""

import doctest
from importlib import import_module

import pytest

MODULES = (
    *("api", "local", "shards", "work"),
    *("stages.attacks", "stages.compression", "stages.faults", "stages.privacy"),
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name: str) -> None:
    found = doctest.testmod(import_module(f"coterie.federation.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
