"""docs/SECURITY.md says who sees what as a rehearsal of every method finds it."""

import pytest
import seen

from coterie.methods.registry import METHODS

CORE = ("meritfed", "bilevel", "fedavg", "krum", "top-k")  # the others are slow


def test_every_method_has_a_row() -> None:
    assert list(seen.shown()) == [entry.name for entry in METHODS], "run python tests/secure/seen.py --write"


@pytest.mark.parametrize(
    "name",
    [pytest.param(e.name, marks=[] if e.name in CORE else pytest.mark.slow) for e in METHODS],
)
def test_a_row_is_what_a_rehearsal_finds(name: str) -> None:
    assert seen.shown()[name] == seen.row(name), "run python tests/secure/seen.py --write"
