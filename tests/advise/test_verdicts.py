"""One rule says the word, the probability and the gain; nothing on a page contradicts another part of it."""

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.advise.decide import Judged
from coterie.advise.paired import NOTHING, Interval, Paired
from coterie.advise.sentences import MEANINGS, reason
from coterie.advise.units import near_factors
from coterie.advise.verdicts import FAR, MATTERS, VERDICTS, WEIGHTS, Signs, Verdict, probability, verdict

FINITE = st.floats(-1e6, 1e6, allow_nan=False)
SIGNS = st.builds(Signs, *[FINITE] * 6)


def test_there_are_five_words_and_each_is_explained() -> None:
    assert set(VERDICTS) == set(get_args(Verdict)) == set(MEANINGS)
    assert set(VERDICTS) == {"helps", "nothing", "left out", "differs", "copy"}
    assert set(WEIGHTS) == set(Signs._fields)


@given(SIGNS, st.floats(-1.0, 1.0), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_verdict_never_contradicts_its_gain_or_its_probability(
    signs: Signs, gain: float, copy: bool, differs: bool, admitted: bool
) -> None:
    chance = probability(signs, gain)
    word = verdict(copy=copy, differs=differs, admitted=admitted, chance=chance)
    assert 0.0 <= chance <= 1.0
    assert word in VERDICTS
    if word == "helps":
        assert chance >= 0.5
        assert gain > MATTERS
        assert admitted
    if word == "nothing":
        assert chance < 0.5
    if gain <= MATTERS:
        assert word != "helps"
    assert (word == "copy") == copy
    assert (word == "left out") == (not (copy or differs or admitted))


@given(SIGNS, st.sampled_from(Signs._fields), st.floats(0.1, 10.0))
@settings(max_examples=100, deadline=None)
def test_a_better_sign_never_lowers_the_probability(signs: Signs, name: str, more: float) -> None:
    better = signs._replace(**{name: getattr(signs, name) + (more if WEIGHTS[name] >= 0 else -more)})
    assert probability(better, 1.0) >= probability(signs, 1.0)


def judged(gain: float = 0.02, error: float = 0.01, z: float = -4.0) -> Judged:
    return Judged(z, True, Paired(Interval(gain, gain - error, gain + error), error, 0.9), 1.0, 0.3)


def test_signs_are_bounded() -> None:
    found = Signs.of(judged(5.0, 1e-9, -1e9), 200, 50)
    assert (found.pair, found.chance, found.weight) == (FAR, -FAR, 0.3)
    assert found.size == pytest.approx(1.3863, abs=1e-4)
    assert found.own == pytest.approx(-0.6931, abs=1e-4)
    assert Signs.of(judged()._replace(gain=NOTHING), 0, 100).pair == 0.0


def entry(word: Verdict, **given: Any) -> dict[str, Any]:
    return {"verdict": word, "differs": [], "share": 0.0, **given}


def test_reasons_say_what_was_found() -> None:
    unit = {"text": "column 'dose' seems to have another unit", "undone": True}
    assert "a copy" in reason(entry("copy"), "it did not answer")
    assert reason(entry("left out"), "it did not answer") == "it did not answer"
    assert "no better than chance" in reason(entry("left out"))
    assert reason(entry("differs", differs=[unit], fit={"before": 1.25, "after": 6.0})) == (
        "column 'dose' seems to have another unit; undone, its fit to your rows goes from 1.2 to 6.0 standard "
        "deviations above chance; it has no share of the model"
    )
    assert "40 % of the delivered model" in reason(entry("helps", share=0.4))
    assert "nothing" in reason(entry("nothing"))


@pytest.mark.parametrize(
    ("ratio", "offset", "known"),
    [(88.4, 0.0, "creatinine"), (1 / 18.0, 0.0, "glucose"), (0.55, -17.5, "°F"), (1.8, 32.0, "°F"), (3.7, 0.0, "")],
)
def test_known_units_are_named(ratio: float, offset: float, known: str) -> None:
    found = near_factors(ratio, offset)
    assert known in found
    assert bool(found) == bool(known)
