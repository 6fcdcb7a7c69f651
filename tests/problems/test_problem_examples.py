"""The examples in the docstrings of the problems run, and every problem has one."""

import sys
from doctest import DocTestFinder, DocTestRunner

import pytest

from coterie.problems.catalogue.registry import PROBLEMS, ProblemEntry

NEED_DATA = ("heart-disease", "femnist", "shakespeare")  # their examples are commands, for files that are not here


@pytest.mark.parametrize("entry", PROBLEMS, ids=lambda entry: entry.name)
def test_the_example_of_a_problem_runs(entry: ProblemEntry) -> None:
    module = sys.modules[entry.make.__module__]
    if entry.name in NEED_DATA:
        assert f"`coterie run --problem {entry.name}" in (entry.make.__doc__ or "").partition("Example:")[2]
        pytest.skip("needs data that are not part of the repository")
    (example,) = DocTestFinder(recurse=False).find(entry.make, globs=dict(vars(module)))
    result = DocTestRunner().run(example)
    assert result.attempted > 2
    assert result.failed == 0
