"""Who saw what: the account follows from the verbs, is kept with the ledger, and can be told before a run."""

import json
from typing import Any

import pytest
import torch

from coterie.experiment.build import assemble, build_problem_and_method
from coterie.experiment.config import FederationTable, resolve
from coterie.experiment.loop import run_rounds
from coterie.experiment.rehearsal import announcement, rehearsed
from coterie.federation import RESULT, Each, Ledger, work
from coterie.federation.account import Account
from coterie.numerics import Draw


@work("account-tests/pair", update=RESULT)
def pair(shard: Any, shared: Any, private: Any, static: Any, draw: Any) -> Any:
    return shard.train.all().columns[0][:2, 0]


@work("account-tests/loss-alone", update=RESULT)
def loss_alone(shard: Any, shared: Any, private: Any, static: Any, draw: Any) -> Any:
    rows = shard.train if shard.train is not None else shard.valid
    return rows.all().columns[0].sum()


def entries(ledger: Ledger, viewer: str) -> set[tuple[str, str, int, int]]:
    return {(row.what, row.cause, *row.seen) for row in ledger.seen.rows() if row.viewer == viewer}


SIZES = ("sizes", "declaration", 1, 1)


@pytest.mark.parametrize("verb", ["mean", "gather"])
def test_without_secure_sums_the_server_sees_every_update(tiny: Any, verb: str) -> None:
    fed = tiny()
    getattr(fed, verb)(pair, torch.zeros(7), draw=Draw.of(0))
    assert entries(fed.ledger, "server") == {SIZES, ("whole updates", "account-tests/pair", 2, 1)}
    assert entries(fed.ledger, "clients") == {("broadcasts", "account-tests/pair", 7, 1)}


def test_a_vector_of_one_number_is_an_update_and_a_scalar_is_not(tiny: Any) -> None:
    fed = tiny()
    fed.gather(loss_alone, draw=Draw.of(0))
    assert entries(fed.ledger, "server") == {SIZES, ("losses", "account-tests/loss-alone", 1, 1)}
    assert not entries(fed.ledger, "clients")


def test_rows_for_each_client_are_no_broadcast(tiny: Any) -> None:
    fed = tiny()
    fed.gather(pair, (Each(torch.zeros(4, 3)), torch.zeros(2)), draw=Draw.of(0))
    assert entries(fed.ledger, "clients") == {("broadcasts", "account-tests/pair", 2, 1)}


def test_a_target_at_a_client_shows_its_replies_and_one_at_the_server_nothing(tiny: Any) -> None:
    at_server, at_client = tiny(), tiny(target=1)
    for fed in (at_server, at_client):
        fed.ask_target(loss_alone, torch.zeros(5), draw=Draw.of(0))
    assert entries(at_server.ledger, "server") == {SIZES}
    assert entries(at_client.ledger, "server") == {SIZES, ("of the target", "account-tests/loss-alone", 1, 1)}
    assert entries(at_client.ledger, "target") == {("broadcasts", "account-tests/loss-alone", 5, 1)}


def test_the_account_is_kept_with_the_ledger() -> None:
    ledger = Ledger()
    ledger.seen.add("server", "shared/gradient", 9, what="sums", clients=5)
    ledger.seen.add("server", "shared/gradient", 7, what="sums", clients=3)
    again = Ledger.from_dict(json.loads(json.dumps(ledger.as_dict())))
    assert next(row for row in again.seen.rows() if row.what == "sums").seen == (9, 3)
    assert "seen" not in Ledger().as_dict()  # nothing was seen


def test_a_copy_is_independent() -> None:
    account = Account()
    copy = account.copy()
    copy.add("server", "shared/gradient", 3)
    assert len(list(account.rows())) == 1


def test_a_rehearsal_tells_what_the_run_will_show() -> None:
    tables = {"run": {"method": "bilevel", "problem": "quadratic", "rounds": 2, "baselines": []}}
    tables |= {"method": {"steps": 4, "batch": 4}, "federation": {"mode": "vmap"}}
    config = resolve(tables)
    problem, method = build_problem_and_method(config)
    prospect = rehearsed(method, problem, FederationTable())
    result = run_rounds(assemble(config, problem=problem), None)
    assert not prospect.cut
    assert prospect.seen.as_dict() == result.ledger.seen.as_dict()
    lines = announcement(prospect)
    assert "the server will see: single numbers of each client, 2 numbers (bilevel/merit)" in lines
