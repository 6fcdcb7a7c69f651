"""mean, gather, ask_target and sample, without a model: client k answers with the number k."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import NoClients, UsageError, WorkError
from coterie.federation import Each, Federation, Gathered, Participation, Static, work
from coterie.numerics import Draw

DRAW = Draw.of(0)
MODES = ["vmap", "sequential"]


@work
def own_number(shard, shared, private, static, draw):
    return (shard.train or shard.valid).all().inputs[0]


@work
def number_and_count(shard, shared, private, static, draw):
    own = shard.train.all().inputs[0, 0]
    return own, own.long(), own > 1.0


@work
def scaled(shard, shared, private, static, draw):
    return static.factor * shared * static["factor"] ** (len(static) - 1)


@work
def unknown_setting(shard, shared, private, static, draw):
    return shared * static.stp


@work
def own_row(shard, shared, private, static, draw):
    return shared["row"]


@work
def coin(shard, shared, private, static, draw):
    return draw.uniform(3)


@work
def turned(shard, shared, private, static, draw):
    return shared.T


def unmarked(shard, shared, private, static, draw):
    return shared


def active(fed: Federation, *ids: int) -> Federation:
    return replace(fed, ids=torch.tensor(ids, dtype=torch.int64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (1, 3), (2,)])
def test_the_mean_is_weighted_by_client_id_among_those_who_answer(tiny, mode, ids):
    w = torch.tensor([0.1, 0.2, 0.3, 0.4])
    found = active(tiny(4, mode=mode), *ids).mean(own_number, weights=w, draw=DRAW)
    expected = sum(w[k] * k for k in ids) / sum(w[k] for k in ids)
    torch.testing.assert_close(found, expected.reshape(1))


def test_without_weights_all_count_the_same(tiny):
    assert active(tiny(9), 0, 1, 8).mean(own_number, draw=DRAW).item() == 3.0


def test_whole_numbers_and_truth_values_have_a_weighted_mean_too(tiny):
    w = torch.tensor([0.1, 0.2, 0.3, 0.4])
    mean, count, share = tiny(4).mean(number_and_count, weights=w, draw=DRAW)
    torch.testing.assert_close(torch.stack([mean, count, share]), torch.tensor([2.0, 2.0, 0.7]))


def test_a_weight_for_each_client_is_required(tiny):
    with pytest.raises(ValueError, match="2 weights for 4 clients"):
        active(tiny(4), 0, 1).mean(own_number, weights=torch.ones(2), draw=DRAW)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_gathered_rows_ascend_by_id(tiny, mode, chunk):
    gathered = active(tiny(6, mode=mode, chunk=chunk), 1, 2, 5).gather(own_number, draw=DRAW)
    assert isinstance(gathered, Gathered)
    assert gathered.ids.tolist() == [1, 2, 5]
    assert gathered.rows.tolist() == [[1.0], [2.0], [5.0]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_gathered_rows_have_one_layout_for_all_chunks(tiny, mode, chunk):
    rows = tiny(4, mode=mode, chunk=chunk).gather(turned, torch.arange(6.0).reshape(2, 3), draw=DRAW).rows
    assert rows.stride() == (6, 2, 1)  # products with these rows have the same bits, then


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_each_row_reaches_its_client(tiny, mode, chunk):
    table = torch.arange(12.0).reshape(6, 2)
    fed = active(tiny(6, mode=mode, chunk=chunk), 0, 3, 4)
    rows, ids = fed.gather(own_row, {"row": Each(table), "other": torch.zeros(5)}, draw=DRAW)
    assert torch.equal(rows, table[ids])


def test_the_target_answers_from_its_own_rows(tiny):
    assert tiny(4).ask_target(own_number, draw=DRAW).item() == 100.0


def test_draws_belong_to_the_client_not_to_the_call(tiny):
    rows, _ = tiny(6).gather(coin, draw=DRAW)
    assert len(rows.unique(dim=0)) == 6
    again, ids = active(tiny(6, mode="sequential", chunk=1), 1, 4).gather(coin, draw=DRAW)
    assert torch.equal(again, rows[ids])
    assert not torch.equal(tiny(6).gather(coin, draw=DRAW.step(1)).rows, rows)


@given(seed=st.integers(0, 2**32), probability=st.floats(0.0, 1.0), count=st.integers(0, 12))
def test_participation_narrows(seed, probability, count):
    draw = Draw.of(seed)
    by_chance = Participation(probability).draw(10, draw).tolist()
    by_number = Participation(count=count).draw(10, draw).tolist()
    assert len(by_number) == min(count, 10)
    for ids in (by_chance, by_number):
        assert ids == sorted(set(ids))
        assert set(ids) <= set(range(10))


def test_sample_hits_its_probability_and_everybody_in_turn(tiny):
    fed = tiny(20)
    drawn = [fed.sample(probability=0.3, draw=DRAW.round(t)).ids for t in range(200)]
    assert sum(map(len, drawn)) / (200 * 20) == pytest.approx(0.3, abs=0.03)
    assert len(torch.cat(drawn).unique()) == 20
    counted = [fed.sample(count=5, draw=DRAW.round(t)).ids for t in range(200)]
    assert {len(ids) for ids in counted} == {5}
    assert torch.cat(counted).bincount().min() > 25


def test_a_round_begins_with_the_participation_of_the_federation(tiny):
    fed = tiny(20, participation=Participation(count=6))
    first, second = fed.begin(1, DRAW.round(1)), fed.begin(2, DRAW.round(2))
    assert len(first.ids) == len(second.ids) == 6
    assert first.ids.tolist() != second.ids.tolist()
    assert (first.round, second.round, first.n) == (1, 2, 20)
    assert tiny(20).begin(1, DRAW).ids.tolist() == list(range(20))


@pytest.mark.parametrize("verb", ["mean", "gather"])
@pytest.mark.parametrize("choice", [{"probability": 0.0}, {"count": 0}])
def test_nobody_active_is_an_error_that_costs_nothing(tiny, verb, choice):
    fed = tiny(4)
    with pytest.raises(NoClients, match=f"no client is active for {__name__}:own_number"):
        getattr(fed.sample(**choice, draw=DRAW), verb)(own_number, draw=DRAW)
    assert fed.ledger.total.rounds == 0


def test_no_weight_among_the_active_is_an_error(tiny):
    with pytest.raises(NoClients, match="have no weight"):
        active(tiny(4), 0, 1).mean(own_number, weights=torch.tensor([0.0, 0.0, 0.5, 0.5]), draw=DRAW)


def test_settings_are_read_as_attributes_and_as_items(tiny):
    assert tiny(4).mean(scaled, torch.ones(2), draw=DRAW, factor=3.0, other="x").tolist() == [9.0, 9.0]


def test_a_missing_setting_explains_itself(tiny):
    with pytest.raises(WorkError, match=r"unknown_setting fails at client 0: .*given no 'stp', only \['step'\]"):
        tiny(4).mean(unknown_setting, torch.ones(2), draw=DRAW, step=0.1)


@pytest.mark.parametrize("value", [torch.ones(1), len, {"a": [torch.ones(1)]}, DRAW])
def test_settings_are_plain_data(tiny, value):
    with pytest.raises(TypeError, match=r"factor is a .* send it as a shared value"):
        tiny(4).mean(scaled, torch.ones(2), draw=DRAW, factor=value)
    assert dict(Static(a=None, b=(1, 2.0, "x"), c={"d": True})) == {"a": None, "b": (1, 2.0, "x"), "c": {"d": True}}


def test_a_work_must_be_found_by_its_name(tiny):
    def inner(shard, shared, private, static, draw):
        return shared

    with pytest.raises(TypeError, match="defined inside a function"):
        work(inner)
    with pytest.raises(TypeError, match="<lambda> is defined inside a function"):
        work(lambda *_: torch.ones(1))


@pytest.mark.parametrize("verb", ["mean", "gather", "ask_target"])
def test_an_unmarked_function_is_not_run(tiny, verb):
    with pytest.raises(TypeError, match="mark it with @work"):
        getattr(tiny(4), verb)(unmarked, torch.ones(1), draw=DRAW)


def test_the_target_must_be_one_of_the_clients(tiny):
    with pytest.raises(UsageError, match=r"client 4, but there are clients 0 … 3 only"):
        tiny(4, target=4)
