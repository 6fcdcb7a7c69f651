"""The examples in the docstrings of the problems run, and every problem has one."""

import sys
from doctest import DocTestFinder, DocTestRunner

import pytest

from coterie.problems.catalogue.registry import PROBLEMS, ProblemEntry


@pytest.mark.parametrize("entry", PROBLEMS, ids=lambda entry: entry.name)
def test_the_example_of_a_problem_runs(entry: ProblemEntry) -> None:
    module = sys.modules[entry.make.__module__]
    (example,) = DocTestFinder(recurse=False).find(entry.make, globs=dict(vars(module)))
    result = DocTestRunner().run(example)
    assert result.attempted > 2
    assert result.failed == 0
