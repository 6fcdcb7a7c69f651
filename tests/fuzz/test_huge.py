"""Huge replies end no run with a traceback: they are rejected by name, or the run says that it failed or diverged."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "methods"))

from huge import EVERY, HOSTILE, OUTCOMES, SIZES, run
from test_conformance import FIRST

from coterie.federation.screening import NOT_FINITE

BEYOND = [size for size in SIZES if size != "1e18"]  # in float32


ASKING = [case for case in FIRST if case.method != "local-train"]  # it asks no client


@pytest.mark.parametrize("number", range(len(ASKING)), ids=lambda number: ASKING[number].method)
def test_one_client_with_huge_replies_is_rejected_by_name_and_the_others_go_on(number: int) -> None:
    result = run(ASKING[number], BEYOND[number % len(BEYOND)], "one", "float32")
    assert result.summary["outcome"] == "finished", result.summary["message"]
    assert bool(torch.isfinite(result.view.model).all())
    rejected = [event for event in result.events if event["event"] == "rejected" and event["reason"] in NOT_FINITE]
    assert {event["client"] for event in rejected} == set(HOSTILE["one"])
    assert {event.get("client") for event in result.events} <= {None, *HOSTILE["one"]}


@pytest.mark.slow
def test_no_method_ends_with_a_traceback() -> None:
    for case, size, hostile, dtype in EVERY:
        summary = run(case, size, hostile, dtype).summary
        assert summary["outcome"] in OUTCOMES
        assert summary["outcome"] == "finished" or summary["message"]
