"""What the verbs bill equals a count by hand."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.federation import Each, Ledger, Memory, work
from coterie.federation.ledger import Entry
from coterie.numerics import Draw

DRAW = Draw.of(0)
WIDTH = {torch.float32: 4, torch.float64: 8}


@work
def echo(shard, shared, private, static, draw):
    """Sends back what it was sent."""
    return shared


@work
def summary(shard, shared, private, static, draw):
    """A vector of 5, a whole number and a truth value."""
    x = shared.sum() * torch.ones(5)
    rows = shard.train or shard.valid
    return x, {"count": rows.count, "large": x[0] > 1.0}


@work
def private_echo(shard, shared, private, static, draw):
    return shared, private + 1.0


@work
def poison(shard, shared, private, static, draw):
    return torch.where(shard.train.all().inputs[0, 0] == 1.0, float("nan"), shared)


ECHO = f"{__name__}:echo"


@pytest.mark.parametrize("verb", ["mean", "gather"])
@pytest.mark.parametrize("dtype", WIDTH)
def test_a_broadcast_and_its_answers(tiny, verb, dtype):
    fed = tiny(4)
    getattr(fed, verb)(echo, torch.zeros(3, 5, dtype=dtype), draw=DRAW)
    moved = 4 * 15
    assert fed.ledger.by_cause == {ECHO: Entry(1, moved, moved, moved * WIDTH[dtype], moved * WIDTH[dtype])}


def test_every_tensor_of_a_result_is_billed_by_its_own_width(tiny):
    fed = tiny(4)
    fed.gather(summary, torch.zeros(2), draw=DRAW)
    assert fed.ledger.total == Entry(1, 4 * (5 + 1 + 1), 4 * 2, 4 * (5 * 4 + 8 + 1), 4 * 2 * 4)


def test_plain_data_among_the_shared_values_is_free(tiny):
    fed = tiny(4)
    fed.mean(summary, torch.zeros(2), draw=DRAW, step=0.1, name="plain")
    assert fed.ledger.total.floats_down == 4 * 2


def test_each_client_is_billed_its_own_row(tiny):
    fed = tiny(4)
    fed.gather(echo, (torch.zeros(5), {"own": Each(torch.zeros(4, 3, 2, dtype=torch.float64))}), draw=DRAW)
    down, weight = 4 * (5 + 6), 4 * (5 * 4 + 6 * 8)
    assert fed.ledger.total == Entry(1, down, down, weight, weight)


def test_only_active_clients_are_billed(tiny):
    fed = tiny(7).sample(count=3, draw=DRAW)
    fed.mean(echo, (torch.zeros(5), Each(torch.zeros(7, 2))), draw=DRAW)
    assert fed.ledger.total == Entry(1, 3 * 7, 3 * 7, 3 * 28, 3 * 28)


def test_the_target_at_the_server_costs_nothing(tiny):
    fed = tiny(4)
    fed.ask_target(echo, torch.zeros(5), draw=DRAW)
    assert fed.ledger.total == Entry()


def test_the_target_at_a_client_costs_a_round_in_both_directions(tiny):
    fed = tiny(4, target=2)
    fed.ask_target(summary, torch.zeros(3), draw=DRAW)
    assert fed.ledger.total == Entry(1, 7, 3, 5 * 4 + 8 + 1, 3 * 4)


@pytest.mark.parametrize("mode", ["vmap", "sequential"])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_one_verb_is_one_round_however_it_is_run(tiny, mode, chunk):
    fed = tiny(5, mode=mode, chunk=chunk)
    for _ in range(2):
        fed.mean(echo, torch.zeros(3), draw=DRAW)
    fed.gather(summary, torch.zeros(3), draw=DRAW)
    assert fed.ledger.by_cause[ECHO] == Entry(2, 2 * 15, 2 * 15, 2 * 60, 2 * 60)
    assert fed.ledger.total == Entry(3, 2 * 15 + 35, 3 * 15, 2 * 60 + 5 * 29, 3 * 60)


def test_memory_stays_where_it_is_and_costs_nothing(tiny):
    fed = tiny(4)
    memory = Memory.start(torch.zeros(1000), 4)
    fed.mean(private_echo, torch.zeros(3), memory=memory, draw=DRAW)
    assert fed.ledger.total == Entry(1, 12, 12, 48, 48)


def test_what_is_rejected_was_sent_all_the_same(tiny):
    fed = tiny(4)
    assert len(fed.gather(poison, torch.zeros(3), draw=DRAW).ids) == 3
    assert fed.ledger.total.floats_up == 4 * 3


def test_views_of_one_federation_share_the_ledger(tiny):
    fed = tiny(4)
    replace(fed, ids=fed.ids[:1]).mean(echo, torch.zeros(3), draw=DRAW)
    fed.begin(1, DRAW).mean(echo, torch.zeros(3), draw=DRAW)
    assert fed.ledger.total.floats_up == 3 + 12


entries = st.builds(Entry, *[st.integers(0, 2**62)] * 5)


@given(st.dictionaries(st.text(max_size=8), entries, max_size=4))
def test_a_ledger_survives_json(by_cause):
    ledger = Ledger(by_cause)
    again = Ledger.from_dict(json.loads(json.dumps(ledger.as_dict())))
    assert again.by_cause == by_cause
    columns = zip(Entry(), *by_cause.values(), strict=True)
    assert again.total == ledger.total == Entry(*map(sum, columns))
