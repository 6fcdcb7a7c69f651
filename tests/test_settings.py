"""Settings explain themselves: in `help()`, on the command line and in the reference, from one glossary."""

import pydoc
from typing import Annotated, Any

import pytest

import coterie
from coterie.glossary import METHOD_SETTINGS, PROBLEM_SETTINGS
from coterie.methods.registry import METHODS
from coterie.problems.catalogue.registry import PROBLEMS
from coterie.settings import Count, Positive, describe, documented, overview

REGISTERED = [(entry, "method") for entry in METHODS] + [(entry, "problem") for entry in PROBLEMS]


@pytest.mark.parametrize(("entry", "glossary"), REGISTERED, ids=lambda value: getattr(value, "name", ""))
def test_every_setting_has_a_meaning(entry: Any, glossary: str) -> None:
    assert overview(entry.make)
    for setting in describe(entry.make, glossary):
        assert len(setting.meaning) > 5, setting.name
        assert "FieldInfo" not in setting.values, setting.name


@pytest.mark.parametrize(("terms", "kind"), [(METHOD_SETTINGS, "method"), (PROBLEM_SETTINGS, "problem")])
def test_every_term_of_the_glossary_is_a_setting(terms: dict[str, str], kind: str) -> None:
    used = {setting.name for entry, of in REGISTERED if of == kind for setting in describe(entry.make, kind)}
    assert set(terms) <= used
    assert list(terms) == sorted(terms)


def test_help_reads_well() -> None:
    shown = pydoc.plain(pydoc.render_doc(coterie.methods.meritfed))
    assert "FieldInfo" not in shown
    assert "Annotated" not in shown
    assert "step: number > 0 = 0.1" in shown
    assert "cut: after this many rounds" in shown
    assert all(setting.name in shown for setting in describe(coterie.methods.meritfed))


def test_a_docstring_goes_before_the_glossary() -> None:
    def make(*, step: Positive = 0.1, sizes: list[Count] | None = None, own: Annotated[int, "text"] = 1) -> None:
        """One line.

        More of it.

        Args:
            own: its own meaning,
                on two lines.
            sizes: numbers.

        Example:
            >>> make()
        """

    settings = {setting.name: setting for setting in describe(make)}
    assert settings["step"].meaning == METHOD_SETTINGS["step"]
    assert settings["own"].meaning == "its own meaning, on two lines"
    assert settings["sizes"].values == "list, each: whole number ≥ 1 or not set"
    assert overview(make) == "One line.\n\nMore of it."
    text = documented(make).__doc__ or ""
    assert f"    step: {METHOD_SETTINGS['step']} (number > 0)." in text
    assert text.endswith("Example:\n    >>> make()")
    assert describe(make)[0].meaning == METHOD_SETTINGS["step"]  # not what `documented` wrote
