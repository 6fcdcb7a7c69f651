"""The table of what privacy costs: as stored, with noise that fits its budgets."""

import json
import math

import pytest
from benchmarks.private import DELTA, EPSILONS, PAGE, STORED, arm, multiplier, on_nodes, page

from coterie.errors import UsageError


def test_the_page_shows_what_is_stored() -> None:
    text, stored = PAGE.read_text(encoding="utf-8"), json.loads(STORED.read_text(encoding="utf-8"))
    assert page(text, stored) == text, "run python -m benchmarks.private --page"
    assert [row["name"] for row in stored["rows"]][-len(EPSILONS) :] == [f"ε = {target:g}" for target in EPSILONS]
    assert len(stored["seeds"]) >= 3


def test_the_noise_of_an_arm_costs_its_budget() -> None:
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    pytest.importorskip("dp_accounting", reason="needs coterie[privacy]")
    small = {
        "run.rounds": 2,
        "problem.clients": 4,
        "problem.friends": 2,
        "federation.secure": True,
        "method.solver": "lagged",
        "method.mirror_step": 1e-6,
    }
    noise = multiplier(3.0, 4)
    summary = on_nodes(arm("friends", 0, small, private=True, noise=noise))
    assert summary["outcome"] == "finished", summary["message"]
    assert summary["privacy"]["uploads"] == 4  # a sum and a number in each round
    assert summary["privacy"]["epsilon"] == pytest.approx(3.0, abs=1e-4)
    assert math.isclose(summary["privacy"]["delta"], DELTA)


def test_an_arm_that_cannot_be_secure_is_refused() -> None:
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    with pytest.raises(UsageError, match="meritfed can be secure with solver"):
        on_nodes(arm("friends", 0, {"federation.secure": True, "problem.clients": 4, "problem.friends": 2}))
