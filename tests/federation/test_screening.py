"""Updates that are not finite or too large are left out, and the record says whose and why."""

import pytest
import torch

from coterie.errors import NoClients
from coterie.federation import Each, Failure, Screening, work
from coterie.numerics import Draw

DRAW = Draw.of(0)
THIS = __name__


@work
def spoiled(shard, shared, private, static, draw):
    """The number k, but what shared["spoil"] says at the clients in shared["who"]; beside it a scalar and an int."""
    own = shard.train.all().inputs[0]
    value = torch.where((own == shared["who"]).any(), shared["spoil"], own).expand(3)
    return value, own[0], own.long()


@work
def counted(shard, shared, private, static, draw):
    return shard.train.count


def spoil(value: float, *who: int) -> dict[str, torch.Tensor]:
    return {"spoil": torch.tensor(value), "who": torch.tensor(who or (-1,))}


@pytest.mark.parametrize("mode", ["vmap", "sequential"])
@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_left_out_and_named(tiny, mode, chunk, value):
    fed = tiny(5, mode=mode, chunk=chunk).begin(7, DRAW)
    (values, scalars, whole), ids = fed.gather(spoiled, spoil(value, 1, 4), draw=DRAW)
    assert ids.tolist() == scalars.tolist() == whole.flatten().tolist() == values[:, 0].tolist() == [0, 2, 3]
    event = {"round": 7, "phase": f"{THIS}:spoiled", "event": "rejected", "reason": "not finite"}
    assert fed.book.drain() == [{**event, "client": 1}, {**event, "client": 4}]
    assert fed.book.drain() == []


def test_weights_are_renormalised_over_the_rest(tiny):
    w = torch.tensor([0.1, 0.2, 0.3, 0.4])
    mean = tiny(4).mean(spoiled, spoil(float("nan"), 2), weights=w, draw=DRAW)[0]
    torch.testing.assert_close(mean, torch.full((3,), (0.2 * 1 + 0.4 * 3) / 0.7))


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("options", [{}, {"screening": Screening(norm=1e30)}, {"screening": Screening(copies=True)}])
@pytest.mark.parametrize("value", [3e38, -3e38, 1e30])
def test_an_update_whose_squared_length_overflows_is_rejected_and_named(tiny, value, options, chunk):
    fed = tiny(4, chunk=chunk, **options)
    assert fed.gather(spoiled, spoil(value, 2), draw=DRAW).ids.tolist()[-2:] == [1, 3]  # client 0 may count as idle
    (event,) = [event for event in fed.book.drain() if event["client"] == 2]
    assert (event["event"], event["reason"]) == ("rejected", "its squared length is not finite")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_squared_length_is_that_in_the_update_s_own_type(dtype):
    largest = torch.finfo(dtype).max ** 0.5
    rows = torch.tensor([[0.9 * largest, 0.0], [0.9 * largest, 0.9 * largest], [2.0 * largest, 0.0]], dtype=dtype)
    assert Screening().reasons(rows)[0].tolist() == [True, False, False]
    assert Screening().reasons(rows[:, 0])[0].tolist() == [True, True, False]  # single numbers, too


def test_reports_are_screened_where_the_norm_of_updates_is_limited():
    values, updates = torch.tensor([[1e30], [1.0]]), torch.zeros(2, 1)
    assert Screening(norm=1.0).reasons(values, updates)[0].tolist() == [False, True]


def test_a_phase_of_which_comparing_leaves_nobody_has_no_result(tiny, monkeypatch):
    monkeypatch.setattr(Screening, "idle", lambda self, call, replies: [Failure(k, "gone", "") for k in range(3)])
    with pytest.raises(NoClients):
        tiny(3, screening=Screening(copies=True, clip=1.0)).gather(spoiled, spoil(0.0), draw=DRAW)


@pytest.mark.parametrize("chunk", [None, 1])
def test_a_norm_above_the_limit_is_rejected(tiny, chunk):
    fed = tiny(4, chunk=chunk, screening=Screening(norm=6.0))
    # client k answers (k, k, k) and k: norm 2k, at the limit for client 3
    assert fed.gather(spoiled, spoil(0.0), draw=DRAW).ids.tolist() == [0, 1, 2, 3]
    assert fed.gather(spoiled, spoil(100.0, 0), draw=DRAW).ids.tolist() == [1, 2, 3]
    (event,) = fed.book.drain()
    assert (event["client"], event["event"], event["reason"]) == (0, "rejected", "norm 173 above the limit 6")


def test_not_finite_and_too_large_are_told_apart():
    fine, reasons = Screening(norm=1.0).reasons(torch.tensor([[0.5], [2.0], [torch.nan]]))
    assert fine.tolist() == [True, False, False]
    assert reasons == ["", "norm 2 above the limit 1", "not finite"]


def test_leaves_of_two_widths_have_one_norm():
    fine, _ = Screening(norm=5.0).reasons((torch.tensor([[3.0], [3.1]]), torch.tensor([4.0, 4.0], dtype=torch.float64)))
    assert fine.tolist() == [True, False]


def test_whole_numbers_are_not_screened(tiny):
    assert tiny(3, screening=Screening(norm=0.1)).gather(counted, draw=DRAW).rows.tolist() == [2, 2, 2]


@pytest.mark.parametrize("verb", ["mean", "gather"])
def test_if_all_are_rejected_nobody_answered(tiny, verb):
    fed = tiny(3)
    with pytest.raises(NoClients, match=f"no client answered {THIS}:spoiled"):
        getattr(fed, verb)(spoiled, spoil(float("nan"), 0, 1, 2), draw=DRAW)
    assert [event["client"] for event in fed.book.drain()] == [0, 1, 2]
    assert fed.ledger.total.rounds == 1


def test_if_only_clients_without_weight_remain_nobody_counts(tiny):
    with pytest.raises(NoClients, match="have no weight"):
        tiny(3).mean(spoiled, spoil(float("nan"), 0), weights=torch.tensor([1.0, 0.0, 0.0]), draw=DRAW)


@work
def echoed(shard, shared, private, static, draw):
    return shared.clone()


def left_out(fed) -> list[tuple[str, int, str]]:
    return [(event["event"], event["client"], event["reason"]) for event in fed.book.drain()]


def test_of_two_equal_updates_the_later_client_is_the_copy_whichever_is_longer(tiny):
    """Lengths within 1e-6 of each other count as equal, and are compared in their order."""
    rows = torch.tensor([[1.0, 2.0, 2.0], [3.0, 0.0, 4.0], [1.0, 2.0, 2.0], [0.0, 0.0, 9.0]], dtype=torch.float64)
    for longer in (1.0, 1.0 + 2e-7, 1.0 - 2e-7):
        rows[2] = longer * rows[0]
        fed = tiny(4, screening=Screening(copies=True))
        assert fed.gather(echoed, Each(rows), draw=DRAW).ids.tolist() == [0, 1, 3]
        assert left_out(fed) == [("duplicate update", 2, "of client 0")]


def test_a_size_of_one_is_believed_where_most_declare_none():
    assert Screening(trust=2.0).sizes(torch.tensor([0, 0, 9000])).tolist() == [0, 0, 1]
    assert Screening(trust=1.5).sizes(torch.tensor([1, 1, 9000])).tolist() == [1, 1, 1]
