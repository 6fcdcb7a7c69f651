"""`help` of the public factories of methods: a summary, the cost, every setting, and an example that runs."""

import doctest
import re

import pytest

import coterie.methods
from coterie.methods.registry import METHODS
from coterie.settings import describe

FACTORIES = [*(entry.identifier for entry in METHODS), "two_layer", "by_objective"]
COST = re.compile(r"^Cost: .*\brounds? per call of round\b.*\.$", re.MULTILINE)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_has_a_summary_a_cost_and_an_example_that_runs(name: str) -> None:
    text = getattr(coterie.methods, name).__doc__
    summary, blank, *_ = text.split("\n")
    assert re.fullmatch(r"[A-Z].{20,}\.", summary), summary
    assert not blank.strip()
    assert len(COST.findall(re.sub(r"^ {4}", "", text, flags=re.MULTILINE))) == 1
    found = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert any(example.want for example in found.examples), "no example shows a result"
    notes: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(found, out=notes.append)
    assert not runner.failures, "".join(notes)


@pytest.mark.parametrize("entry", METHODS, ids=lambda entry: entry.name)
def test_every_setting_is_explained_once(entry: coterie.methods.registry.MethodEntry) -> None:
    settings = describe(entry.make)
    assert [setting.name for setting in settings if not setting.meaning] == []
    for name, values, _, meaning in settings:
        assert f"    {name}: {meaning} ({values})." in entry.make.__doc__
    lines = (entry.make.__doc__ or "").split("\n")
    assert lines.index("Args:") < lines.index("Example:")
