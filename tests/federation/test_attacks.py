"""Byzantine clients do what their formula says, and nothing else changes; long updates are clipped."""

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.errors import NoClients
from coterie.federation import RESULT, Attack, Each, Federation, Memory, Screening, moved_from, staged, work
from coterie.federation.stages.attacks import RULES, quiet
from coterie.numerics import Draw

DRAW = Draw.of(3)
HONEST, N = 5, 9
USUAL = {
    "sign-flip": 1.0,
    "noise": 10.0,
    "scaled": 100.0,
    "alie": quiet(N, N - HONEST),
    "ipm": 2.0,
    "zero": 1.0,
    "copy": 1.0,
}
upload_attacks = pytest.mark.parametrize("name", RULES)


@work
def reply(shard, shared, private, static, draw):
    """A tree: a vector by the client's number and draw, a scalar of it, and two things that are not real."""
    k = shard.train.all().inputs[0, 0]
    value = k + draw.normal(4, dtype=torch.float64).reshape(2, 2) + shared
    return {"value": value, "loss": value.sum()}, (shard.train.count, k > 2.0)


@work(update=(moved_from(0), RESULT))
def stroll(shard, shared, private, static, draw):
    """From the first shared value, a way of its own; and how long it is."""
    x, _ = shared
    way = 1.0 + shard.train.all().inputs[0, 0] * draw.normal(3, dtype=torch.float64)
    return x + way, way.norm()


@work(update=moved_from())
def remember(shard, shared, private, static, draw):
    return shared + private, private + 1.0


@work
def nothing(shard, shared, private, static, draw):
    return (), private + 1.0


@pytest.fixture
def attacked(tiny):
    def make(name: Any, strength: float | None = None, *, honest: int = HONEST, **options: Any) -> Federation:
        fed = tiny(N, **options)
        return replace(fed, engine=staged(fed.engine, Attack(name, honest, strength)))

    return make


def expected(name: str, U: Tensor, s: float, index: int, draw: Draw = DRAW) -> Tensor:
    """What the formulas give for the updates of all clients, of which those from HONEST on attack."""
    mean, sigma = U[:HONEST].mean(0), (U[:HONEST] - U[:HONEST].mean(0)).square().mean(0).sqrt()
    rows = []
    for k in range(HONEST, len(U)):
        xi = draw.phase("attack").client(torch.tensor(k)).step(index).normal(U[k].numel(), dtype=U.dtype)
        rms = U[k].square().mean().sqrt()
        lies = {
            "sign-flip": -s * U[k],
            "noise": U[k] + s * rms * xi.reshape(U[k].shape),
            "scaled": s * U[k],
            "alie": mean - s * sigma,
            "ipm": -s * mean,
            "zero": torch.zeros_like(U[k]),
            "copy": U[0],
        }
        rows.append(lies[name])
    return torch.cat([U[:HONEST], torch.stack(rows)])


@upload_attacks
@pytest.mark.parametrize("strength", [None, 0.5])
def test_replies_are_altered_by_the_formula(tiny, attacked, name, strength):
    shared = torch.tensor(7.0, dtype=torch.float64)
    true, ids = tiny(N).gather(reply, shared, draw=DRAW)
    said, same = attacked(name, strength).gather(reply, shared, draw=DRAW)
    assert ids.tolist() == same.tolist()
    s = strength or USUAL[name]
    for i, key in enumerate(("value", "loss")):
        torch.testing.assert_close(said[0][key], expected(name, true[0][key], s, i), rtol=1e-12, atol=1e-12)
        assert torch.equal(said[0][key][:HONEST], true[0][key][:HONEST])
        assert not torch.equal(said[0][key][HONEST:], true[0][key][HONEST:])
    assert torch.equal(said[1][0], true[1][0])
    assert torch.equal(said[1][1], true[1][1])


@upload_attacks
@pytest.mark.parametrize("each", [False, True], ids=["one start", "a start each"])
def test_walks_are_attacked_from_where_they_set_out(tiny, attacked, name, each):
    starts = 1e3 + torch.arange(3.0 * N, dtype=torch.float64).reshape(N, 3)
    shared = (Each(starts) if each else starts[0], torch.zeros(2))
    origin = starts if each else starts[0]
    (true, lengths), _ = tiny(N).gather(stroll, shared, draw=DRAW)
    (said, told), _ = attacked(name).gather(stroll, shared, draw=DRAW)
    ways = expected(name, true - origin, USUAL[name], 0)
    torch.testing.assert_close(said, origin + ways, rtol=1e-9, atol=1e-9)
    assert torch.equal(said[:HONEST], true[:HONEST])
    torch.testing.assert_close(told, expected(name, lengths, USUAL[name], 1), rtol=1e-12, atol=1e-12)


@pytest.mark.chunk_free
@upload_attacks
@pytest.mark.parametrize("mode", ["vmap", "sequential"])
def test_chunks_do_not_change_a_bit(attacked, name, mode):
    shared, w = torch.tensor(7.0, dtype=torch.float64), Draw.of(1).uniform(N)
    whole = attacked(name, mode=mode)
    rows, mean = whole.gather(reply, shared, draw=DRAW).rows, whole.mean(reply, shared, weights=w, draw=DRAW)
    for chunk in (1, 2, 4, 7):
        fed = attacked(name, mode=mode, chunk=chunk, screening=Screening(clip=1e9))
        found = fed.gather(reply, shared, draw=DRAW).rows
        again = fed.mean(reply, shared, weights=w, draw=DRAW)
        for key in ("value", "loss"):
            assert torch.equal(found[0][key], rows[0][key]), f"chunk {chunk}"
            assert torch.equal(again[0][key], mean[0][key]), f"chunk {chunk}"


@upload_attacks
def test_the_ledger_does_not_notice(tiny, attacked, name):
    honest, other = tiny(N), attacked(name, chunk=2)
    for fed in (honest, other):
        fed.gather(reply, torch.zeros(()), draw=DRAW)
        fed.mean(stroll, (torch.zeros(3), torch.zeros(2)), draw=DRAW)
        fed.ask_target(reply_of_target, torch.zeros(4), draw=DRAW)
    assert honest.ledger.as_dict() == other.ledger.as_dict()
    assert honest.ledger.total.floats_up > 0


@work
def reply_of_target(shard, shared, private, static, draw):
    return shared + shard.valid.all().inputs[0, 0]


@upload_attacks
def test_memory_and_the_target_are_left_alone(tiny, attacked, name):
    memories = []
    for fed in (tiny(N), attacked(name)):
        memory = Memory.start(torch.ones(2), N)
        for t in range(3):
            _, memory = fed.mean(remember, torch.zeros(2), memory=memory, draw=DRAW.step(t))
        _, memory = fed.gather(nothing, memory=memory, draw=DRAW)
        memories.append(memory)
        assert float(fed.ask_target(reply_of_target, torch.zeros(()), draw=DRAW)) == 100.0
    one, two = (tiny(N).gather(remember, torch.zeros(2), memory=m, draw=DRAW)[0].rows for m in memories)
    assert torch.equal(one, two)
    assert float(one[0, 0]) == 5.0


@upload_attacks
def test_attackers_without_an_honest_client_know_their_own(attacked, name):
    fed = replace(attacked(name), ids=torch.tensor([6, 8]))
    (found, _), ids = fed.gather(reply, torch.zeros(()), draw=DRAW)
    assert ids.tolist() == [6, 8]
    assert bool(torch.isfinite(found["value"]).all())


def test_who_is_honest_does_not_depend_on_who_is_active(tiny, attacked):
    ids = torch.tensor([1, 4, 5, 8])
    true = replace(tiny(N), ids=ids).gather(reply, torch.zeros(()), draw=DRAW).rows[0]["value"]
    said = replace(attacked("sign-flip"), ids=ids).gather(reply, torch.zeros(()), draw=DRAW).rows[0]["value"]
    assert torch.equal(said, true * torch.tensor([1.0, 1.0, -1.0, -1.0]).reshape(4, 1, 1))


def test_the_silent_are_missed_and_named(tiny, attacked):
    fed = attacked("silent", chunk=2).begin(4, DRAW)
    true = tiny(N).gather(reply, torch.zeros(()), draw=DRAW).rows[0]["value"]
    (found, _), ids = fed.gather(reply, torch.zeros(()), draw=DRAW)
    assert ids.tolist() == list(range(HONEST))
    assert torch.equal(found["value"], true[:HONEST])
    events = fed.book.drain()
    assert [event["client"] for event in events] == list(range(HONEST, N))
    assert {(event["event"], event["round"]) for event in events} == {("silent", 4)}
    with pytest.raises(NoClients):
        replace(fed, ids=torch.tensor([7, 8])).mean(reply, torch.zeros(()), draw=DRAW)


def test_alies_reach_is_that_of_the_paper():
    """n = 50 workers, m = 24 corrupted: s = 2 supporters, Φ(z) = 24/26; n = 15, m = 6: Φ(z) = 7/9."""
    assert quiet(50, 24) == pytest.approx(NormalDist().inv_cdf(24 / 26))
    assert quiet(15, 6) == pytest.approx(NormalDist().inv_cdf(7 / 9))
    assert quiet(2, 1) == quiet(3, 1) == 0.0  # as many supporters are needed as there are honest clients, or half
    for n in range(1, 20):
        for m in range(1, n + 1):
            assert 0.0 <= quiet(n, m) < 3.0


# clipping: updates that are much longer than the others'


@work
def long_at_some(shard, shared, private, static, draw):
    """A vector of norm 5 and a loss of 0; at the clients in shared, as long as told."""
    k = shard.train.all().inputs[0, 0].long()
    size = shared[k]
    return size * torch.tensor([3.0, 4.0]), torch.zeros(()), k


@work(update=moved_from(0))
def long_walk(shard, shared, private, static, draw):
    x, sizes = shared
    return x + sizes[shard.train.all().inputs[0, 0].long()] * torch.tensor([3.0, 4.0])


SIZES = torch.tensor([1.0, 1.0, 2.0, 0.5, 1.0, 100.0, 3.1])


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_long_updates_are_shortened_to_so_many_medians(tiny, chunk):
    fed = tiny(7, chunk=chunk, screening=Screening(clip=3.0)).begin(2, DRAW)
    (values, _, numbers), ids = fed.gather(long_at_some, SIZES, draw=DRAW)
    assert ids.tolist() == numbers.tolist() == list(range(7))
    kept = torch.tensor([1.0, 1.0, 2.0, 0.5, 1.0, 3.0, 3.0])
    torch.testing.assert_close(values, kept[:, None] * torch.tensor([3.0, 4.0]))
    events = fed.book.drain()
    assert [(event["client"], event["event"]) for event in events] == [(5, "clipped"), (6, "clipped")]
    assert events[0]["reason"] == "norm 500 above 3 times the median 5"
    mean, _, _ = fed.mean(long_at_some, SIZES, draw=DRAW)
    torch.testing.assert_close(mean, kept.mean() * torch.tensor([3.0, 4.0]))


def test_a_walks_length_is_the_way_not_the_place(tiny):
    fed = tiny(7, screening=Screening(clip=3.0))
    x = torch.tensor([1e4, -1e4])
    found, _ = fed.gather(long_walk, (x, SIZES), draw=DRAW)
    torch.testing.assert_close((found - x)[5], torch.tensor([9.0, 12.0]), rtol=1e-3, atol=1e-2)
    limited = tiny(7, screening=Screening(norm=20.0)).gather(long_walk, (x, SIZES), draw=DRAW)
    assert limited.ids.tolist() == [0, 1, 2, 3, 4, 6]


def test_nothing_is_clipped_where_half_are_zero(tiny):
    sizes = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 50.0])
    fed = tiny(7, screening=Screening(clip=3.0))
    assert float(fed.gather(long_at_some, sizes, draw=DRAW).rows[0].norm()) == pytest.approx(5 * 2501**0.5)
    assert fed.book.drain() == []


def test_without_long_updates_clipping_changes_no_bit(tiny):
    shared = torch.tensor(7.0)
    plain, clipped = (tiny(N, chunk=2, screening=s) for s in (Screening(), Screening(clip=1e3)))
    assert torch.equal(
        plain.gather(reply, shared, draw=DRAW).rows[0]["value"],
        clipped.gather(reply, shared, draw=DRAW).rows[0]["value"],
    )
    assert torch.equal(
        plain.mean(reply, shared, draw=DRAW)[0]["value"], clipped.mean(reply, shared, draw=DRAW)[0]["value"]
    )
    assert plain.ledger.as_dict() == clipped.ledger.as_dict()


def test_what_is_not_finite_does_not_enter_the_median(tiny):
    sizes = torch.tensor([1.0, torch.inf, torch.nan, torch.inf, 1.0, 100.0, 1.0])
    fed = tiny(7, screening=Screening(clip=3.0))
    found = fed.gather(long_at_some, sizes, draw=DRAW)
    assert found.ids.tolist() == [0, 4, 5, 6]
    torch.testing.assert_close(found.rows[0][2], torch.tensor([9.0, 12.0]))


def test_memory_only_works_pass_the_clipping(tiny):
    fed = tiny(3, screening=Screening(clip=2.0))
    _, memory = fed.gather(nothing, memory=Memory.start(torch.zeros(2), 3), draw=DRAW)
    assert isinstance(memory, Memory)
