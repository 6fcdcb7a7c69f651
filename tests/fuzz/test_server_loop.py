"""The real server loop against a hostile majority: nothing but the documented outcomes, and the honest are used."""

import resource
from collections import Counter
from collections.abc import Collection

import pytest
from hostile import HONEST, SCENES, Driven, drive

KINDS = {"rejected", "refused", "client error", "lost", "timeout", "memory lost", "rejoined", "skipped", "warning"}


def check(driven: Driven, scene: Collection[str]) -> None:
    """The run ended as documented, every event is of a known kind and short, and no honest client is missing."""
    summary = driven.result.summary
    # a target is believed: what it says in form decides, also that it is not finite
    assert summary["outcome"] in (("finished", "diverged") if "target" in scene else ("finished",)), summary
    for event in driven.result.events:
        assert event["event"] in KINDS
        assert len(event["reason"]) <= 400
        assert event["reason"].isprintable()
        # a hostile node may claim to be an honest client, and is refused; nothing else names one, unless a hostile
        # target has led the model to where an honest result is not finite
        led_astray = "target" in scene and event["reason"] == "not finite"
        assert event.get("client") not in HONEST or event["event"] == "refused" or led_astray
    skipped = [event for event in driven.result.events if event["event"] == "skipped"]
    assert all("the target, client 2" in event["reason"] for event in skipped)


@pytest.mark.parametrize("method", SCENES)
def test_the_loop_survives_hostile_frames(method: str) -> None:
    driven = drive(method, rounds=4, seed=1)
    check(driven, SCENES[method])
    assert sum(driven.frames.values()) > 300


@pytest.mark.slow
def test_the_loop_survives_a_hundred_thousand_hostile_frames() -> None:
    frames, outcomes = 0, Counter[str]()
    for seed in range(1000):
        for method in SCENES:
            driven = drive(method, rounds=25, seed=seed)
            check(driven, SCENES[method])
            frames += sum(driven.frames.values())
            outcomes[driven.result.summary["outcome"]] += 1
        if frames >= 100_000:
            break
    assert frames >= 100_000
    print(f"{frames} frames, {dict(outcomes)}, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB at most")
