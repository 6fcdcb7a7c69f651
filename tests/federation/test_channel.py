"""Compressed uploads as a property of the federation: any method, true bytes, errors kept, resumed bit by bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import resolve
from coterie.experiment.loop import run_rounds
from coterie.federation import Federation, LocalEngine, Memory, Screening
from coterie.federation.stages.base import Staged, staged
from coterie.federation.stages.compression import Compression, CompressionState
from coterie.federation.tree import tensors
from coterie.methods import fedavg, meritfed
from coterie.methods.shared.staged import with_stages
from coterie.methods.shared.works import gradient, local_sgd
from coterie.numerics import Draw
from coterie.numerics.sparse import top_k
from coterie.problems import Context
from coterie.problems.catalogue.quadratic import quadratic

D, N = 24, 5
KINDS = ("top-k", "random-k", "sketch")
every = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def problem():
    return quadratic(Context(0, torch.float64), clients=N, dimension=D, rows=30)


@pytest.fixture
def fed(problem):
    return Federation.on(LocalEngine(problem.task, problem.train, None, problem.target))


def behind(fed: Federation, compression: Compression, errors: dict[str, Memory] | None = None) -> Federation:
    """The same clients behind a line."""
    engine = staged(fed.engine, compression)
    assert isinstance(engine, Staged)
    return replace(fed, engine=engine.resumed({"compression": CompressionState(N, errors or {})}))


def errors_of(fed: Federation) -> dict[str, Memory]:
    return fed.engine.states["compression"].errors


def ask(fed: Federation, x: torch.Tensor, t: int = 0) -> torch.Tensor:
    return fed.gather(gradient, x, draw=Draw.of(0).round(t), batch="all").rows


@every
@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_what_is_sent_is_billed(problem, fed, kind, ratio):
    thin = behind(fed, Compression(kind, ratio))
    understood = ask(thin, problem.start)
    k = int(ratio * D * 8 / 12) if kind == "top-k" else int(ratio * D)
    total = thin.ledger.total
    assert total.bytes_up == N * k * (12 if kind == "top-k" else 8)
    assert total.floats_up == N * k * (2 if kind == "top-k" else 1)
    assert total.bytes_down == N * D * 8
    if kind == "sketch":
        assert float(understood.norm()) < float(ask(fed, problem.start).norm())
    else:
        assert (understood != 0.0).sum(1).tolist() == [k] * N


def test_top_k_of_a_gradient_is_what_the_server_sees(problem, fed):
    G = ask(fed, problem.start)
    understood = ask(behind(fed, Compression("top-k", 0.5)), problem.start)
    assert torch.equal(understood, top_k(G, 8).dense(D))


def test_of_a_walk_the_way_is_compressed_not_the_end(problem, fed):
    x = problem.start + 100.0
    walk = {"step": 0.001, "steps": 2, "batch": "all"}
    ends = fed.gather(local_sgd, x, draw=Draw.of(0), **walk).rows
    understood = behind(fed, Compression("top-k", 0.5)).gather(local_sgd, x, draw=Draw.of(0), **walk).rows
    torch.testing.assert_close(understood, x + top_k(ends - x, 8).dense(D))


@every
def test_errors_are_what_was_not_understood_and_come_later(problem, fed, kind):
    """Σ understood + error = Σ wanted."""
    thin = behind(fed, Compression(kind, 0.25))
    wanted = understood = torch.zeros(N, D, dtype=torch.float64)
    for t in range(6):
        x = problem.start + 0.1 * t
        wanted = wanted + ask(fed, x, t)
        understood = understood + ask(thin, x, t)
        (error,) = errors_of(thin).values()
        torch.testing.assert_close(understood + error.payload, wanted)
    assert list(errors_of(thin)) == ["shared/gradient/0"]
    assert bool(error.payload.any())


@pytest.mark.parametrize("kind", ["random-k", "sketch"])
def test_without_feedback_they_are_right_on_average(problem, fed, kind):
    thin = behind(fed, Compression(kind, 0.5, feedback=False))
    G = ask(fed, problem.start)
    mean = torch.stack([ask(thin, problem.start, t) for t in range(400)]).mean(0)
    assert float((mean - G).norm() / G.norm()) < 0.1
    assert errors_of(thin) == {}


def test_clients_share_the_drawn_entries_and_they_change(problem, fed):
    thin = behind(fed, Compression("random-k", 0.25, feedback=False))
    one, two = (ask(thin, problem.start, t) != 0.0 for t in (0, 1))
    assert bool((one == one[0]).all())
    assert not torch.equal(one, two)


def test_small_and_whole_numbers_are_sent_as_they_are():
    compression = Compression("top-k", 0.1)
    assert compression.count(torch.zeros(10)) == 0
    assert compression.count(torch.zeros(100)) == 5
    assert compression.count(torch.zeros(100, dtype=torch.float64)) == 6
    assert compression.count(torch.zeros(100, dtype=torch.int64)) == 0
    assert Compression("sketch", 0.1).count(torch.zeros(10, 10)) == 10


def test_a_client_that_sends_nonsense_keeps_its_error_and_is_rejected(problem, fed):
    thin = behind(fed, Compression("top-k", 0.25))
    ask(thin, problem.start)
    before = errors_of(thin)["shared/gradient/0"].payload.clone()
    columns = [c.clone() for c in problem.train.columns]
    columns[0][int(problem.train.offsets[2])] = torch.nan
    bad = replace(fed.engine, train=replace(problem.train, columns=tuple(columns)))
    thin = behind(replace(thin, engine=bad), Compression("top-k", 0.25), errors_of(thin))
    ids = thin.gather(gradient, problem.start, draw=Draw.of(0), batch="all").ids
    assert ids.tolist() == [0, 1, 3, 4]
    after = errors_of(thin)["shared/gradient/0"].payload
    assert torch.equal(after[2], before[2])
    assert not torch.equal(after[1], before[1])
    assert [event["client"] for event in thin.book.events] == [2]


def test_the_norm_limit_looks_at_what_was_understood(problem, fed):
    thin = replace(behind(fed, Compression("top-k", 0.25)), screening=Screening(norm=1e9))
    assert len(ask(thin, problem.start)) == N


def config(**changes: Any) -> Any:
    tables = {
        "run": {"method": "meritfed", "problem": "friends", "rounds": 6, "threads": 1, "baselines": []},
        "method": {"step": 1.0, "mirror_step": 0.01, "batch": 10},
        "problem": {"model": "logistic", "clients": 5, "friends": 2, "validation": 30, "test": 1600},
        "federation": {"mode": "vmap", "active": 0.7, "compress": "top-k", "ratio": 0.05},
    }
    for dotted, value in changes.items():
        table, key = dotted.split("__")
        tables[table][key] = value
    return resolve(tables)


def states(result: Any) -> list[torch.Tensor]:
    """All tensors of a state, the clients' errors too."""
    return [
        *tensors(result.state.inner),
        *(memory.payload for memory in result.state.stages["compression"].errors.values()),
    ]


@every
def test_a_resumed_run_is_bit_identical(kind, tmp_path: Path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    full = config(federation__compress=kind)
    one = run_rounds(assemble(full), whole)
    run_rounds(assemble(full.with_run(rounds=3)), broken)
    two = run_rounds(assemble(full), broken, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(states(one), states(two), strict=True))
    assert one.state.stages["compression"].errors.keys() == {"shared/gradient/0"}
    assert bool(one.state.stages["compression"].errors["shared/gradient/0"].payload.any())
    assert one.ledger.as_dict() == two.ledger.as_dict()
    for name in ("weights.csv", "model.safetensors", "ledger.json"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes(), name


@pytest.mark.chunk_free
@every
def test_chunks_and_modes_do_not_matter(kind):
    whole, *parts = (
        run_rounds(assemble(config(federation__compress=kind, federation__chunk=chunk)), None) for chunk in (100, 1, 2)
    )
    for part in parts:
        assert all(torch.equal(a, b) for a, b in zip(states(whole), states(part), strict=True))
        assert whole.ledger.as_dict() == part.ledger.as_dict()
    other = run_rounds(assemble(config(federation__compress=kind, federation__mode="sequential")), None)
    for a, b in zip(states(whole), states(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_errors_begin_when_an_upload_is_first_sent(problem, fed):
    """No round is tried out beforehand, so init asks no client for anything."""
    thin = behind(fed, Compression("top-k", 0.25))
    method = with_stages(meritfed(), thin.engine)
    state = method.init(problem, N)
    assert fed.ledger.total.rounds == 0
    assert state.stages["compression"] == CompressionState(N, {})
    assert torch.equal(state.inner.x, problem.start)
    after = method.round(thin, state, Draw.of(0)).stages["compression"]
    assert after.errors.keys() == {"shared/gradient/0"}
    assert bool(after.errors["shared/gradient/0"].payload.any())
    assert state.stages["compression"].errors == {}, "a round changes no state but its own"


def test_fedavg_arrives_where_it_arrives_uncompressed(problem, fed):
    """One entry in 24 is dropped each round; with feedback none is lost."""
    plain = fedavg(batch="all", step=0.05)
    ends = []
    thin = behind(fed, Compression("random-k", 0.97))
    for method, line in ((plain, fed), (with_stages(plain, thin.engine), thin)):
        state = method.init(problem, N)
        for t in range(100):
            state = method.round(line, state, Draw.of(0).round(t))
        ends.append(method.view(state).model)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-2, atol=1e-2)


def test_top_k_uploads_cost_meritfed_little():
    """A fifth of the upload, a few points of accuracy, and the friends are found all the same."""
    quick = {"federation__active": 1.0, "run__rounds": 60, "problem__clients": 10, "problem__friends": 4}
    quick |= {"problem__test": 400, "method__batch": "all", "federation__ratio": 0.2}
    plain, thin = (run_rounds(assemble(config(**quick, federation__compress=c)), None) for c in ("none", "top-k"))
    up = [result.ledger.by_cause["shared/gradient"].bytes_up for result in (plain, thin)]
    assert 0.19 * up[0] < up[1] <= 0.2 * up[0]
    accuracy = [result.summary["final"]["test_accuracy"] for result in (plain, thin)]
    assert accuracy[1] > accuracy[0] - 0.05
    friends = [result.summary["final"]["friends_weight"] for result in (plain, thin)]
    assert min(friends) > 0.4 + 0.15  # they began at 4 of 10
    assert abs(friends[0] - friends[1]) < 0.1


@every
def test_ratio_one_sends_everything(kind):
    rows = torch.randn(30, dtype=torch.float64)
    assert Compression(kind, 1.0).count(rows) == 0
    assert Compression(kind, 0.9).count(rows) > 0


@pytest.mark.parametrize("ratio", [0.0, 1.1, -0.1])
def test_a_ratio_that_is_no_share_is_refused(ratio):
    with pytest.raises(UsageError, match=r"federation.ratio"):
        config(federation__ratio=ratio)
