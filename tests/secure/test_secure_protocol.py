"""The protocol of one sum: it is right, it survives clients that leave at every step, and it shows nothing else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coterie.federation.secure import Refusal, Secure
from coterie.federation.secure.encoding import encoded
from coterie.federation.secure.party import STAGES, Party
from coterie.federation.secure.primitives import PRIME, SHARE, factors
from coterie.federation.secure.summing import Summation, Task, TooFew, answer

pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")

SECURE = Secure()


class Clients:
    """Parties with numbers, of whom some leave before a question."""

    def __init__(self, values: np.ndarray, gone: dict[str, set[int]] | None = None, phase: int = 1) -> None:
        self.values, self.gone, self.n = values, gone or {}, len(values)
        self.task = Task("run", phase, 5, dict.fromkeys(range(self.n), 1.0))
        self.parties = {k: Party(k, "run", phase, SECURE) for k in range(self.n)}
        self.change: Callable[[str, int, Any], Any] = lambda stage, k, message: message

    def ask(self, stage: str, messages: dict[int, Any]) -> dict[int, Any]:
        left = set().union(*(self.gone.get(s, set()) for s in STAGES[: STAGES.index(stage) + 1]))
        return {
            k: answer(self.parties[k], stage, self.change(stage, k, m), self.task, self.words(k))
            for k, m in messages.items()
            if k not in left
        }

    def words(self, k: int) -> Any:
        return encoded(self.values[k], SECURE, self.n)

    def summation(self) -> Summation:
        return Summation(self.ask, SECURE, self.task)


def values(n: int = 6, d: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d))


def test_the_sum_is_right_to_the_last_digit_of_fixed_point() -> None:
    x = values()
    total = Clients(x).summation().run()
    assert total.survivors == tuple(range(6))
    assert np.abs(total.numbers - x.sum(0)).max() <= 6 * 2.0 ** -(SECURE.bits(6) + 1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("who", [{0}, {5}, {1, 4}])
def test_clients_leave_at_every_step_and_the_sum_of_the_others_is_right(stage: str, who: set[int]) -> None:
    x = values()
    total = Clients(x, {stage: who}).summation().run()
    stayed = sorted(set(range(6)) - (who if stage != "reveal" else set()))
    assert total.survivors == tuple(stayed)  # who leaves at the end is in the sum
    assert total.numbers == pytest.approx(x[stayed].sum(0), abs=1e-9)


def test_one_leaves_before_each_step() -> None:
    x = values(9)
    total = Clients(x, {"shares": {0}, "masked": {8}, "reveal": {4}}).summation().run()
    assert total.numbers == pytest.approx(x[1:8].sum(0), abs=1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_with_too_few_the_sum_fails_and_nothing_is_shown(stage: str) -> None:
    summation = Clients(values(), {stage: {0, 1, 2}}).summation()
    with pytest.raises(TooFew, match=rf"3 of 6 clients answered \({stage}\), and a secure sum needs 4"):
        summation.run()
    shown = summation.seen.get("reveal", {})
    assert stage == "reveal" or not shown
    assert len(shown) < 4  # fewer shares than are needed tell nothing


def test_clients_that_were_told_different_things_have_masks_that_do_not_cancel() -> None:
    x = values()
    clients = Clients(x)
    honest = clients.task

    def ask(stage: str, messages: dict[int, Any]) -> dict[int, Any]:
        answers = {}
        for k, message in messages.items():
            clients.task = honest._replace(scales={**honest.scales, 3: 0.0}) if k == 2 else honest
            answers[k] = answer(clients.parties[k], stage, message, clients.task, clients.words(k))
        return answers

    total = Summation(ask, SECURE, honest).run()
    assert np.abs(total.numbers - x.sum(0)).min() > 1.0
    everyone = range(6)
    assert honest.about(everyone) != honest._replace(scales={**honest.scales, 3: 0.5}).about(everyone)


def bits(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8))


def test_what_the_server_holds_is_independent_of_an_update_given_the_sum() -> None:
    """Two worlds with one sum: in the second, clients 0 and 1 hold other numbers. Masked words look alike: fair bits,
    independent of the numbers below, in both."""
    one = values(4, 2000)
    two = one.copy()
    two[0] += 1e4
    two[1] -= 1e4
    for x in (one, two):
        summation = Clients(x).summation()
        total = summation.run()
        assert total.numbers == pytest.approx(one.sum(0), abs=1e-9)
        for k, masked in summation.seen["masked"].items():
            ones = bits(masked).mean()
            assert abs(ones - 0.5) < 5 * 0.5 / np.sqrt(2000 * 64)  # 5 standard deviations
            same = (bits(masked) == bits(encoded(x[k], SECURE, 4))).mean()
            assert abs(same - 0.5) < 5 * 0.5 / np.sqrt(2000 * 64)
    chi = np.bincount(summation.seen["masked"][0].view(np.uint8), minlength=256)
    expected = 2000 * 8 / 256
    assert ((chi - expected) ** 2 / expected).sum() < 255 + 6 * np.sqrt(2 * 255)


def test_no_mask_is_used_twice() -> None:
    """The same numbers in two sums: the difference of two uploads of a client is as random as one of them."""
    x = values(4, 2000)
    first, second = Clients(x, phase=1).summation(), Clients(x, phase=2).summation()
    first.run()
    second.run()
    for stage in ("keys", "shares"):
        for k in range(4):
            assert first.seen[stage][k] != second.seen[stage][k]
    for k in range(4):
        difference = first.seen["masked"][k] - second.seen["masked"][k]
        assert abs(bits(difference).mean() - 0.5) < 5 * 0.5 / np.sqrt(2000 * 64)


def test_a_sum_of_one_client_is_refused() -> None:
    party = Party(0, "run", 1, SECURE)
    with pytest.raises(Refusal, match="a sum of 1 would show single updates"):
        party.shares({0: party.keys()}, 1)


def test_a_list_without_the_own_key_or_with_one_key_twice_is_refused() -> None:
    for twice in (False, True):
        party, other, false = (Party(k, "run", 1, SECURE) for k in (0, 1, 0))
        own = party.keys()
        keys = {0: own, 1: own, 2: other.keys()} if twice else {0: false.keys(), 1: other.keys()}
        said = "two clients have the same keys" if twice else "the list of keys does not hold this client's own"
        with pytest.raises(Refusal, match=said):
            party.shares(keys, 2)


@pytest.mark.parametrize("needed", [1, 2, 5])
def test_a_threshold_of_a_half_or_of_more_than_all_is_refused(needed: int) -> None:
    parties = [Party(k, "run", 1, SECURE) for k in range(4)]
    keys = {k: party.keys() for k, party in enumerate(parties)}
    with pytest.raises(Refusal, match="above a half"):
        parties[0].shares(keys, needed)


def test_a_replayed_share_is_refused_and_named() -> None:
    old = Clients(values(), phase=1).summation()
    old.run()
    clients = Clients(values(), phase=2)

    def replay(stage: str, k: int, message: Any) -> Any:
        return {**message, 3: old.seen["shares"][3][0]} if (stage, k) == ("masked", 0) else message

    clients.change = replay
    with pytest.raises(Refusal, match="the share of client 3 was altered, or is of another sum"):
        clients.summation().run()


def test_every_question_is_answered_once() -> None:
    clients = Clients(values())
    clients.summation().run()
    again: dict[str, Any] = {"keys": b"", "shares": ({}, 4), "masked": {}, "reveal": (1, 2, 3, 4)}
    for stage, message in again.items():
        with pytest.raises(Refusal, match=f"'{stage}' was asked out of turn"):
            answer(clients.parties[0], stage, message, clients.task, clients.words(0))


def test_survivors_must_be_enough_and_of_the_sum() -> None:
    for survivors, said in (((0, 1), "are needed"), ((1, 2, 3, 4), "does not fit"), ((0, 1, 2, 9), "does not fit")):
        clients = Clients(values())

        def stop(stage: str, k: int, message: Any, survivors: Any = survivors) -> Any:
            return survivors if stage == "reveal" else message

        clients.change = stop
        with pytest.raises(Refusal, match=said):
            clients.summation().run()


@pytest.mark.parametrize("false", ["all", "one"])
def test_a_wrong_share_is_noticed_where_a_key_is_rebuilt(false: str) -> None:
    """Also one share alone, of the client that left, by which the rebuilt key is another one of the right length."""
    clients = Clients(values(), {"masked": {5}})
    summation = clients.summation()
    inner = summation.ask

    def ask(stage: str, messages: dict[int, Any]) -> dict[int, Any]:
        answers = inner(stage, messages)
        if stage == "reveal" and false == "all":
            answers[0] = {k: bytes(66) for k in answers[0]}
        elif stage == "reveal":
            one_more = pow(factors([1, 2, 3, 4])[0], -1, PRIME)  # the key of client 5 and 2^9
            share = int.from_bytes(answers[0][5], "little") + (one_more << 9)
            answers[0] = {**answers[0], 5: (share % PRIME).to_bytes(SHARE, "little")}
        return answers

    summation.ask = ask
    with pytest.raises(TooFew, match="do not fit together"):
        summation.run()
