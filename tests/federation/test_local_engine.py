"""The local engine: both modes give the same numbers, and no bit depends on chunks or on who else takes part."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from coterie.errors import UsageError, WorkError
from coterie.federation import RESULT, Call, Federation, LocalEngine, Static, faster_mode, local, pack, reduce, work
from coterie.federation.reduce import BlockedSum
from coterie.federation.work import Each, Memory, info_of
from coterie.methods.shared.works import gradient, local_sgd
from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.catalogue.quadratic import quadratic
from coterie.problems.models import FlatModel, build
from coterie.problems.tasks.supervised import Supervised

DRAW = Draw.of(3)
MODES = ["vmap", "sequential"]
IMAGE = (1, 6, 6)
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-10}


def network(name: str, shape: tuple[int, ...] = IMAGE) -> nn.Module:
    if name in ("logistic", "mlp"):
        return build(name, shape, 3, seed=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "tokens":
            return nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(4 * shape[0], 3))
        return nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)),
        )


def federation(shards: Sequence[Any], net: nn.Module, dtype: torch.dtype = torch.float32, **options: Any) -> Federation:
    model = FlatModel(net).to(dtype=dtype, device="cpu")
    task = replace(Supervised.of(model, "cross_entropy", l2=0.01, classes=3), block=options.pop("block", 4096))
    train = pack(shards).to(dtype=dtype, device="cpu")
    return Federation.on(LocalEngine(task, train, options.pop("valid", None), None, **options))


@work(update=RESULT, whole_pass=True)
def whole_gradient(shard, shared, private, static, draw):
    return shard.task.full_gradient(shared, shard.train)


def start(fed: Federation) -> Tensor:
    """Somewhere that is not special, such as biases at 0."""
    theta = fed.engine.task.model.start
    return theta + 0.1 * Draw.of(1).normal(len(theta), dtype=theta.dtype)


def by_autograd(net: nn.Module, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of one client's loss, by the module itself in the ordinary way."""
    module = FlatModel(net).to(dtype=theta.dtype, device="cpu").module(theta)
    loss = nn.functional.cross_entropy(module(x), y) + 0.005 * sum(p.square().sum() for p in module.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


@work
def curvature(shard, shared, private, static, draw):
    """∇²L(θ) v over all rows, and the loss."""
    theta, v = shared
    return shard.task.full_hvp(theta, v, shard.train), shard.task.full_loss(theta, shard.train)


@work
def products(shard, shared, private, static, draw):
    """∇²L(θ) v for every row v of V, two at a time."""
    theta, V = shared
    return torch.func.vmap(lambda v: shard.task.full_hvp(theta, v, shard.train), chunk_size=2)(V)


@work
def goal(shard, shared, private, static, draw):
    return shard.task.full_gradient(shared, shard.valid)


WORKS = {
    "gradient": (gradient, {"batch": "all"}),
    "walk": (local_sgd, {"batch": 4, "steps": 3, "step": 0.1}),
    "walk on all rows": (local_sgd, {"batch": "all", "steps": 2, "step": 0.1}),
}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("sizes", [(6,) * 5, (6, 3, 9, 5, 2)], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", ["logistic", "mlp", "conv"])
def test_both_modes_give_the_same_numbers(shards, name, sizes, dtype):
    data = shards(sizes, IMAGE, dtype)
    together, alone = (federation(data, network(name), dtype, mode=mode) for mode in MODES)
    theta = start(together)
    for function, settings in WORKS.values():
        rows, expected = (fed.gather(function, theta, draw=DRAW, **settings).rows for fed in (together, alone))
        torch.testing.assert_close(rows, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    pair = (theta, theta.flip(0))
    found, expected = (fed.mean(curvature, pair, draw=DRAW) for fed in (together, alone))
    torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_works_may_map_over_what_is_shared(shards):
    fed, alone = (federation(shards((4, 6, 3), IMAGE), network("logistic"), mode=mode) for mode in MODES)
    theta = start(fed)
    V = torch.eye(len(theta))[:5]
    found, expected = (one.gather(products, (theta, V), draw=DRAW).rows for one in (fed, alone))
    assert found.shape == (3, 5, len(theta))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def sizes_of(k: int, equal: bool) -> list[int]:
    return [4 if equal else 2 + (3 * i) % 5 for i in range(k)]


@pytest.mark.chunk_free
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "shape", "k", "equal"),
    [
        *(("logistic", (28, 28), 7, equal) for equal in (True, False)),
        pytest.param("mlp", (28, 28), 7, True, marks=pytest.mark.slow),
        ("mlp", (28, 28), 7, False),
        *(("mlp", IMAGE, 40, equal) for equal in (True, False)),
        pytest.param("conv", IMAGE, 7, True, marks=pytest.mark.slow),
        ("conv", IMAGE, 7, False),
    ],
)
def test_no_bit_depends_on_the_chunk(shards, name, shape, k, equal, dtype, mode):
    data = shards(sizes_of(k, equal), shape, dtype)
    weights = Draw.of(5).uniform(k, dtype=torch.float64)
    whole = federation(data, network(name, shape), dtype, mode=mode)
    theta = start(whole)
    works = list(WORKS.values())[: 2 if k < 40 else 1]
    expected = [
        (whole.gather(f, theta, draw=DRAW, **s).rows, whole.mean(f, theta, weights=weights, draw=DRAW, **s))
        for f, s in works
    ]
    for chunk in (1, 3, 5, k):
        fed = replace(whole, engine=replace(whole.engine, chunk=chunk))
        for (f, s), (rows, mean) in zip(works, expected, strict=True):
            gathered = fed.gather(f, theta, draw=DRAW, **s).rows
            assert torch.equal(gathered, rows), f"chunk {chunk}"
            assert gathered.stride() == rows.stride(), f"chunk {chunk}"
            assert torch.equal(fed.mean(f, theta, weights=weights, draw=DRAW, **s), mean), f"chunk {chunk}"


@pytest.mark.chunk_free
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_no_bit_depends_on_who_else_is_active(shards, name, mode):
    fed = federation(shards((5,) * 9, IMAGE), network(name), mode=mode)
    theta = start(fed)
    for function, settings in WORKS.values():
        everybody, _ = fed.gather(function, theta, draw=DRAW, **settings)
        for ids in ([2], [0, 8], [1, 2, 5, 7]):
            some, answered = replace(fed, ids=torch.tensor(ids)).gather(function, theta, draw=DRAW, **settings)
            assert answered.tolist() == ids
            assert torch.equal(some, everybody[ids])


@hypothesis.settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_a_sum_has_the_same_bits_for_all_chunks_and_layouts(chunks, turned, weighted):
    k = sum(chunks)
    rows = Draw.of(k).normal(k, 5, dtype=torch.float64)
    weights = Draw.of(k + 1).uniform(k, dtype=torch.float64) if weighted else None
    whole, parts = BlockedSum(), BlockedSum()
    whole.add(rows, weights)
    other = rows.T.contiguous().T if turned else rows
    for some, w in zip(other.split(chunks), chunks if weights is None else weights.split(chunks), strict=True):
        parts.add(some, w if weighted else None)
    total = whole.total()
    assert torch.equal(parts.total(), total)
    torch.testing.assert_close(total, rows.sum(0) if weights is None else weights @ rows)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [4096, 4, 1])
@pytest.mark.parametrize("sizes", [(6, 6, 6), (9, 1, 5)], ids=["equal", "unequal"])
def test_the_full_gradient_is_the_mean_over_the_true_rows(shards, sizes, block, mode):
    data, net = shards(sizes, IMAGE, torch.float64), network("mlp")
    fed = federation(data, net, torch.float64, mode=mode, block=block)
    theta = start(fed)
    expected = torch.stack([by_autograd(net, theta, x, y) for x, y in data])
    rows = fed.gather(gradient, theta, draw=DRAW, batch="all").rows
    torch.testing.assert_close(rows, expected, rtol=1e-10, atol=1e-12)
    v = torch.ones_like(theta)
    products, losses = fed.gather(curvature, (theta, v), draw=DRAW).rows
    unblocked = federation(data, net, torch.float64, mode="sequential")
    torch.testing.assert_close((products, losses), unblocked.gather(curvature, (theta, v), draw=DRAW).rows)


@pytest.mark.parametrize("block", [4096, 4])
def test_models_that_mix_rows_never_see_padding(shards, block):
    data, net = shards((6, 9, 4), IMAGE, torch.float64), network("conv")
    fed = federation(data, net, torch.float64, mode="vmap", block=block)
    theta = start(fed)
    rows = fed.gather(gradient, theta, draw=DRAW, batch="all").rows
    expected = torch.stack([by_autograd(net, theta, x, y) for x, y in data])
    torch.testing.assert_close(rows, expected, rtol=1e-10, atol=1e-12)


def test_nor_the_padding_of_unequal_validation_shards(shards):
    train, valid = shards((5, 5, 5), IMAGE, torch.float64), shards((6, 9, 4), IMAGE, torch.float64, seed=1)
    net = network("conv")
    fed = federation(train, net, torch.float64, mode="vmap", valid=pack(valid))
    theta = start(fed)
    expected = torch.stack([by_autograd(net, theta, x, y) for x, y in valid])
    torch.testing.assert_close(fed.gather(goal, theta, draw=DRAW).rows, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_validation_rows_reach_their_client(shards, mode):
    train, valid = shards((5, 3, 4), IMAGE, torch.float64), shards((2, 6, 4), IMAGE, torch.float64, seed=1)
    net = network("mlp")
    fed = federation(train, net, torch.float64, mode=mode, valid=pack(valid), chunk=2)
    theta = start(fed)
    expected = torch.stack([by_autograd(net, theta, x, y) for x, y in valid])
    torch.testing.assert_close(fed.gather(goal, theta, draw=DRAW).rows, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", CLOSE)
def test_inputs_may_be_tokens(mode, dtype):
    sizes, generator, net = (5, 2, 7), torch.Generator().manual_seed(0), network("tokens", (6,))
    data = [
        (torch.randint(11, (n, 6), generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes
    ]
    fed = federation(data, net, dtype, mode=mode)
    theta = start(fed)
    rows = fed.gather(gradient, theta, draw=DRAW, batch="all").rows
    assert rows.dtype == dtype
    expected = torch.stack([by_autograd(net, theta, x, y) for x, y in data])
    torch.testing.assert_close(rows, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_a_single_client_is_a_federation(shards, name, mode):
    data, net = shards((6,), IMAGE, torch.float64), network(name)
    fed = federation(data, net, torch.float64, mode=mode)
    theta = start(fed)
    expected = by_autograd(net, theta, *data[0])
    rows, ids = fed.gather(gradient, theta, draw=DRAW, batch="all")
    assert (rows.shape, ids.tolist()) == ((1, len(theta)), [0])
    torch.testing.assert_close(rows[0], expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fed.mean(gradient, theta, draw=DRAW, batch="all"), expected, rtol=1e-10, atol=1e-12)


def test_a_work_may_ask_for_a_mode(shards, monkeypatch):
    fed = federation(shards((4, 4), IMAGE), network("mlp"), mode="vmap")
    alone = replace(fed, engine=replace(fed.engine, mode="sequential"))
    theta = start(fed)
    expected = alone.gather(gradient, theta, draw=DRAW, batch="all").rows
    monkeypatch.setattr(gradient, "__coterie__", replace(info_of(gradient), mode="sequential"))
    assert torch.equal(fed.gather(gradient, theta, draw=DRAW, batch="all").rows, expected)


def test_a_pass_over_many_rows_goes_client_by_client(shards, monkeypatch):
    fed = federation(shards((4, 4), IMAGE), network("logistic"), mode="vmap")
    once = whole_gradient
    few = fed.mean(once, start(fed), draw=DRAW)
    monkeypatch.setattr(local, "MANY", 4 * (36 * 4 + 8))  # just what a client's rows take
    monkeypatch.setattr(LocalEngine, "_at_once", None)
    torch.testing.assert_close(fed.mean(once, start(fed), draw=DRAW), few)
    with pytest.raises(WorkError, match="'NoneType' object is not callable"):
        fed.mean(gradient, start(fed), draw=DRAW, batch="all")
    monkeypatch.setattr(local, "MANY", 4 * (36 * 4 + 8) + 1)
    with pytest.raises(WorkError, match="'NoneType' object is not callable"):
        fed.mean(once, start(fed), draw=DRAW)


def test_the_faster_mode_is_one_of_the_two(shards):
    fed = federation(shards((4, 4), IMAGE), network("logistic"))
    call = Call(gradient, start(fed), None, Static(batch=2), DRAW)
    assert faster_mode(fed.engine, call, margin=0.0) == "sequential"  # as if that cost no time
    assert faster_mode(fed.engine, call, margin=1e9) == "vmap"


def test_a_missing_target_is_explained(shards):
    fed = federation(shards((4, 4), IMAGE), network("logistic"))
    with pytest.raises(UsageError, match="asks the target, but the problem has none; give validation data"):
        fed.ask_target(gradient, start(fed), draw=DRAW, batch="all")


def test_a_chunk_has_at_least_one_client(shards):
    with pytest.raises(UsageError, match=r"federation\.chunk must be at least 1, not 0"):
        federation(shards((4, 4), IMAGE), network("logistic"), chunk=0)


def test_clients_that_lie_side_by_side_are_seen_without_a_copy(shards):
    train = pack(shards((3,) * 5, IMAGE))
    views = train.views(torch.tensor([1, 2, 3]))
    assert [tuple(v.shape) for v in views] == [(3, 3, *IMAGE), (3, 3)]
    assert views[0].data_ptr() == train.columns[0][3:].data_ptr()
    assert torch.equal(views[1][2], train.client(3).all().labels)
    assert train.views(torch.tensor([1, 3])) == ()
    assert train.views(torch.tensor([1, 1])) == ()
    assert pack(shards((3, 4), IMAGE)).views(torch.tensor([0, 1])) == ()


def test_what_is_shared_is_copied_once_a_point(shards):
    fed = federation(shards((3,) * 4, IMAGE), network("logistic"), chunk=2)
    engine, theta = fed.engine, start(fed)
    copies = engine._copies.of(theta, 2)
    assert torch.equal(copies, torch.stack([theta, theta]))
    before = fed.mean(gradient, theta, draw=DRAW, batch="all")
    assert engine._copies.of(theta, 2) is copies  # also over chunks
    assert engine._copies.of(theta, 3) is not copies
    assert engine._copies.of(theta.clone(), 2) is not copies
    theta += 1.0  # in place: another point
    assert torch.equal(engine._copies.of(theta, 2)[1], theta)
    assert not torch.equal(fed.mean(gradient, theta, draw=DRAW, batch="all"), before)
    copies = engine._copies.of(theta, 2)
    copies.zero_()  # by a work that does what it must not
    assert torch.equal(engine._copies.of(theta, 2)[1], theta)
    engine._copies._memo.budget = copies.nbytes + theta.nbytes
    engine._copies.of(theta.clone(), 2)
    assert engine._copies.of(theta, 2) is not engine._copies.of(theta.clone(), 2)
    assert len(engine._copies._memo) == 1


@pytest.mark.parametrize("weighted", [False, True])
def test_large_rows_are_summed_in_turn_whatever_the_chunks(monkeypatch, weighted):
    monkeypatch.setattr(reduce, "LARGE", 3)
    rows = Draw.of(1).normal(40, 5, dtype=torch.float64)
    weights = Draw.of(2).uniform(40, dtype=torch.float64) if weighted else None
    before, totals = rows.clone(), []
    for chunk in (1, 7, 40):
        total = BlockedSum()
        for start in range(0, 40, chunk):
            some = slice(start, start + chunk)
            total.add(rows[some], None if weights is None else weights[some])
        totals.append(total.total())
    assert all(torch.equal(one, totals[0]) for one in totals)
    assert torch.equal(rows, before)
    torch.testing.assert_close(totals[0], rows.sum(0) if weights is None else weights @ rows)


def test_large_results_are_handed_on_at_once(shards, monkeypatch):
    fed = federation(shards((4,) * 5, IMAGE), network("logistic"), mode="sequential")
    theta = start(fed)
    call = Call(gradient, theta, None, Static(batch="all"), DRAW)
    (whole,) = fed.engine.execute(call, fed.ids)
    monkeypatch.setattr(local, "LARGE", 2 * theta.nbytes)
    parts = list(fed.engine.execute(call, fed.ids))
    assert [part.ids.tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert torch.equal(torch.cat([part.values for part in parts]), whole.values)


@pytest.mark.parametrize("what", ["shared", "each", "private", "rows"])
@pytest.mark.parametrize("mode", ["sequential", "vmap"])
def test_a_work_that_writes_into_what_it_is_given_is_refused_and_changes_nothing(mode, what):
    problem = quadratic(Context(), clients=3, friends=1, dimension=3, rows=6)
    engine = LocalEngine(problem.task, problem.train, problem.valid, problem.target, mode=mode)
    kept = [problem.start, torch.zeros(3, 3), torch.zeros(3, 3)]
    before = [tensor.clone() for tensor in kept]
    given = {"start": kept[0], "each": Each(kept[1])}
    call = Call(writes_in_place, given, Memory(kept[2]), Static(into=what), Draw.of(0))
    for _ in range(2):  # copies that were written to are not used again
        with pytest.raises(WorkError, match=r"writes in place into what it is given \(client 0\)"):
            list(engine.execute(call, torch.arange(3)))
    plain = call._replace(static=Static(into="nothing"))
    (replies,) = engine.execute(plain, torch.arange(3))
    assert torch.equal(replies.values, before[0].expand(3, 3))
    assert all(map(torch.equal, kept, before))


def test_a_work_at_the_target_that_writes_in_place_is_refused_and_changes_nothing():
    problem = quadratic(Context(), clients=3, friends=1, dimension=3, rows=6)
    engine = LocalEngine(problem.task, problem.train, problem.valid, problem.target)
    before = problem.start.clone()
    for into in ("shared", "rows"):
        call = Call(writes_in_place, {"start": problem.start}, None, Static(into=into), Draw.of(0))
        with pytest.raises(WorkError, match=r"writes in place into what it is given \(the target\)"):
            engine.execute_at_target(call)
    assert torch.equal(problem.start, before)


@work("tests/writes-in-place", update=RESULT)
def writes_in_place(shard, shared, private, static, draw):
    found = shared["start"].clone()
    rows = (shard.train or shard.valid).all().columns[0]
    into = {"shared": shared["start"], "each": shared.get("each"), "private": private, "rows": rows}
    if static.into != "nothing":
        into[static.into].add_(1.0)
    return found, private
