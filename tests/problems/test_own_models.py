"""Models as people have them: several inputs, dropout, batch norm, attention, tied weights; and refused ones."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import coterie
from coterie.errors import UsageError, WorkError
from coterie.experiment.build import assemble_locally
from coterie.experiment.config import Config, FederationTable, RunTable
from coterie.experiment.loop import run_rounds
from coterie.federation import Federation
from coterie.federation.remote import PERMISSIVE, InProcess, RemoteEngine, Store, node_for
from coterie.methods.shared.works import gradient, local_sgd
from coterie.numerics import Draw
from coterie.problems.base import View
from coterie.problems.models import FlatModel
from coterie.problems.models.layers import BatchStatisticsNorm2d, PatchConv2d
from coterie.problems.models.masks import Masks

SIZES = (7, 5, 7)
WIDE = {"dtype": "float64"}


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = Draw.of(seed).normal(n, 6)
    return x, (x[:, :3].sum(1) > 0).long()


def problem(model: nn.Module, shards: Any = None, target: Any = None, **more: Any) -> coterie.Weighting:
    torch.manual_seed(0)
    given = [rows(n, k) for k, n in enumerate(SIZES)] if shards is None else shards
    goal = rows(6, 9) if target is None else target
    return coterie.Weighting.on(given, goal, model=model, loss="cross_entropy", **{**WIDE, **more})


def dropping(p: float = 0.4) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(p), nn.Linear(5, 2))


def theta_of(fit: coterie.Fit) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in fit.model.parameters()])


# dropout


@pytest.mark.parametrize("batch", [3, "all"])
def test_masks_are_the_same_however_clients_are_computed(batch: Any) -> None:
    made = problem(dropping())
    method = coterie.methods.fedavg(step=0.3, local_steps=2, batch=batch)
    ways = [("vmap", 3), ("vmap", 1), ("vmap", 2), ("sequential", 1)]
    found = [theta_of(coterie.fit(made, method, 3, mode=mode, chunk=chunk)) for mode, chunk in ways]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-12)
    without = theta_of(coterie.fit(problem(dropping(0.0)), method, 3, mode="vmap"))
    assert not torch.allclose(found[0], without, rtol=1e-3)


def at_home_and_away(made: coterie.Weighting) -> tuple[Federation, Federation]:
    local = Federation.on(coterie.federation.LocalEngine(made.task, made.train, None, made.target, mode="sequential"))
    nodes = {f"n{k}": node_for(made, (k,), store=Store(None), policy=PERMISSIVE) for k in range(3)}
    engine = RemoteEngine(InProcess(nodes), made.task, made.train, None, run="r", target=made.target)
    engine.connect()
    return local, Federation.on(engine, book=engine.book)


def test_nodes_draw_the_same_masks() -> None:
    made = problem(dropping())
    settings = {"draw": Draw.of(3).round(1).phase("steps"), "step": 0.1, "steps": 2, "batch": 3}
    here, there = (fed.gather(local_sgd, made.start, **settings).rows for fed in at_home_and_away(made))
    assert torch.equal(here, there)


def test_a_gradient_with_dropout_in_closed_form() -> None:
    x, y = Draw.of(1).normal(4, 5, dtype=torch.float64), Draw.of(2).normal(4, dtype=torch.float64)
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 1, bias=False))
    made = coterie.Weighting.on([(x, y)], model=net, loss="squared", **WIDE)
    task, keys = made.task, Draw.of(5).client(torch.arange(4)).key
    masks = Masks(keys).kept((4, 5), 0.5)
    assert 0 < int(masks.sum()) < 20
    dropped = x * masks / 0.5
    batch = coterie.federation.Batch((x, y), None, keys)
    expected = dropped.T @ (dropped @ made.start - y) / 4
    torch.testing.assert_close(task.gradient(made.start, batch), expected)
    plain = x.T @ (x @ made.start - y) / 4
    torch.testing.assert_close(task.gradient(made.start, batch._replace(keys=None)), plain)


def test_masks_differ_by_round_phase_client_step_row_and_layer() -> None:
    made = problem(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2)), [rows(6)] * 2)
    fed = Federation.on(coterie.federation.LocalEngine(made.task, made.train, None, None, mode="vmap"))
    draw = Draw.of(0)

    def at(where: Draw) -> Tensor:
        found: Tensor = fed.gather(gradient, made.start, draw=where, batch="all").rows
        return found

    first = at(draw.round(1).phase("a"))
    assert not torch.equal(first[0], first[1])  # the clients have equal rows
    assert torch.equal(first, at(draw.round(1).phase("a")))
    for other in (draw.round(2).phase("a"), draw.round(1).phase("b")):
        assert not torch.equal(first, at(other))
    rows_ = made.train.client(0)
    keyed = [
        coterie.federation.Rows(rows_.columns, rows_.offset, rows_.count, 6, key=torch.tensor(7)).step(i)
        for i in (0, 1)
    ]
    assert not torch.equal(keyed[0].all().keys, keyed[1].all().keys)
    assert len(set(keyed[0].take(torch.zeros(4, dtype=torch.int64)).keys.tolist())) == 4
    masks = Masks(torch.arange(3))
    assert not torch.equal(masks.kept((3, 50), 0.5), masks.kept((3, 50), 0.5))


def test_share_of_dropped_units_and_scale() -> None:
    x = torch.ones(100, 4, 6, 6)
    with Masks(torch.arange(100)):
        plain, channels, alpha = F.dropout(x, 0.3), F.dropout2d(x, 0.3), F.alpha_dropout(x, 0.3, training=True)
    assert float((plain == 0).double().mean()) == pytest.approx(0.3, abs=0.02)
    assert float(plain.max()) == pytest.approx(1 / 0.7)
    assert bool(((channels == 0).flatten(2).double().mean(2) % 1 == 0).all())
    assert len(alpha.unique()) == 2
    noise = Draw.of(0).normal(200, 500)
    with Masks(torch.arange(200)):
        kept = F.alpha_dropout(noise, 0.4, training=True)
    assert float(kept.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(kept.std()) == pytest.approx(1.0, abs=0.02)


def test_dropout_is_off_in_evaluation() -> None:
    made = problem(dropping(), test=rows(8, 5))
    fit = coterie.fit(made, coterie.methods.fedavg(step=0.3), 2, mode="vmap")
    x, y = rows(8, 5)
    loss = F.cross_entropy(fit.model(x.double()), y).detach()
    assert float(loss) == pytest.approx(fit.summary["final"]["test_loss"], rel=1e-6)
    assert not fit.model.training


def test_a_resumed_run_draws_the_same_masks(tmp_path: Path) -> None:
    def parts() -> Any:
        run = RunTable(method="fedavg", problem="own data", rounds=4, dtype="float64", baselines=[])
        table = FederationTable(mode="vmap")
        method = coterie.methods.fedavg(step=0.3, local_steps=2, batch=3)
        return assemble_locally(Config(run, dict(method.settings), {}, table), problem(dropping()), method)

    class Interrupting:
        def started(self, parts: Any, done: int) -> None: ...
        def ended(self, summary: Any) -> None: ...
        def recorded(self, line: Any, view: Any) -> None:
            if line["round"] == 2:
                raise KeyboardInterrupt

    whole = run_rounds(parts(), None).view.model
    with pytest.raises(KeyboardInterrupt):
        run_rounds(parts(), tmp_path, Interrupting())
    assert torch.equal(run_rounds(parts(), tmp_path, resume=True).view.model, whole)


def test_dropout_in_a_nested_problem() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5))

    def inner(x: Any, y: Tensor, batch: Any) -> Tensor:
        return (x(batch.inputs) @ y - batch.labels).square().mean() + 0.1 * y.square().sum()

    def outer(x: Any, y: Tensor, batch: Any) -> Tensor:
        return (x(batch.inputs) @ y - batch.labels).square().mean()

    shards = [(x, y.double()) for x, y in (rows(8, 1), rows(8, 2))]
    made = coterie.Nested(inner, outer).on(shards, shards, x=net, y=torch.zeros(4), dtype=torch.float64)
    assert made.task.dropout
    method = coterie.methods.fednest(local_steps=2, batch=4, terms=3, lipschitz=50.0)
    by_mode = [coterie.fit(made, method, 2, mode=mode).variables for mode in ("vmap", "sequential")]
    for name, value in by_mode[0].items():
        torch.testing.assert_close(by_mode[1][name], value, rtol=1e-9, atol=1e-12)


# attention


class Attending(nn.Module):
    """Embeds numbers, attends to those that are no padding, and averages."""

    def __init__(self, dropout: float = 0.0, *, own: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.attend = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True) if own else None
        self.last = nn.Linear(8, 2)
        self.drop = dropout

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.attend is not None:
            x = self.attend(x, x, x, key_padding_mask=mask == 0, need_weights=False)[0]
        else:
            p = self.drop if self.training else 0.0
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=(mask != 0)[:, None, :], dropout_p=p)
        return self.last((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def sentences(n: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    draw = Draw.of(seed)
    ids, length = draw.phase("ids").integers(19, n, 5) + 1, draw.phase("length").integers(4, n) + 2
    mask = (torch.arange(5) < length[:, None]).double()
    return (ids * mask.long(), mask), (ids[:, 0] > 9).long()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_has_second_derivatives_and_its_mask_counts(own: bool, dropout: float) -> None:
    torch.manual_seed(0)
    shards = [sentences(n, k) for k, n in enumerate(SIZES)]
    made = problem(Attending(dropout, own=own), shards, sentences(6, 9))
    assert made.task.model.attention
    assert made.task.dropout == (dropout > 0)
    batch = made.train.client(0).all()
    if dropout:
        batch = batch._replace(keys=torch.arange(7))
    v, h = Draw.of(2).normal(len(made.start), dtype=torch.float64), 1e-5
    slope = (made.task.gradient(made.start + h * v, batch) - made.task.gradient(made.start - h * v, batch)) / (2 * h)
    torch.testing.assert_close(made.task.hvp(made.start, v, batch), slope, rtol=1e-6, atol=1e-8)
    (ids, mask), _ = sentences(7, 0)
    other = torch.where(mask > 0, ids, 7)  # what is masked must not matter
    inputs = made.task.inputs(batch)
    torch.testing.assert_close(made.task.model(made.start, (other, mask)), made.task.model(made.start, inputs))
    method = coterie.methods.bilevel(steps=2, local_steps=2, batch=3)
    fits = [coterie.fit(made, method, 1, mode=mode) for mode in ("vmap", "sequential")]
    torch.testing.assert_close(theta_of(fits[0]), theta_of(fits[1]), rtol=1e-8, atol=1e-10)


# several inputs


class Sum(nn.Module):
    """A linear map of the sum of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 2)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.map(first + second)


def test_inputs_by_position_or_by_name() -> None:
    torch.manual_seed(0)
    net = Sum()
    x, y = rows(6)
    both = [
        (x, 2 * x, y),
        ((x, 2 * x), y),
        ({"second": 2 * x, "first": x}, y),
        {"labels": y, "second": 2 * x, "first": x},
    ]
    starts = []
    for shard in both:
        made = problem(net, [shard, shard], shard, test=shard)
        fit = coterie.fit(made, coterie.methods.meritfed(mirror_steps=1), 2, mode="vmap")
        starts.append(theta_of(fit))
    method, line = coterie.methods.meritfed(mirror_steps=1), (3 * x, y)
    plain = coterie.fit(problem(net.map, [line] * 2, line), method, 2, mode="vmap")
    for found in starts:
        torch.testing.assert_close(found, theta_of(plain))


@pytest.mark.parametrize(
    ("shards", "target", "complaint"),
    [
        (
            [{"first": torch.ones(3, 6), "second": torch.ones(3, 6)}],
            None,
            "client 0 is a dict of first, second",
        ),
        ([{"first": torch.ones(3, 6), "labels": torch.ones(3).long()}], None, "does not take inputs .* given as first"),
        ([(torch.ones(3, 6), torch.ones(3).long())], None, "the model does not take inputs of shape"),
        ([(torch.ones(3, 6), torch.ones(3, 6), torch.ones(3).long())], rows(3), "rows of the target have 2 columns"),
    ],
)
def test_inputs_that_do_not_fit(shards: Any, target: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        problem(Sum(), shards, shards[0] if target is None else target)


# batch norm, buffers and tied weights


def normed() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 2, 2),
        nn.BatchNorm2d(2),
        nn.Flatten(),
        nn.Linear(18, 2),
    )


def images(n: int, seed: int) -> tuple[Tensor, Tensor]:
    x = 2.0 + (1 + seed) * Draw.of(seed).normal(n, 1, 6, 6, dtype=torch.float64)
    return x, (x.mean((1, 2, 3)) > 2).long()


def test_single_rows_are_predicted_as_the_whole_batch_would_be(tmp_path: Path) -> None:
    shards = [images(n, k) for k, n in enumerate(SIZES)]
    made = problem(normed(), shards, images(6, 1))
    fit = coterie.fit(made, coterie.methods.fedavg(step=0.1, local_steps=2), 3)
    model, everything = fit.model.eval(), torch.cat([x for x, _ in shards])
    batch = copy.deepcopy(model).train()
    with torch.no_grad():
        whole, single = batch(everything), torch.cat([model(row[None]) for row in everything])
    torch.testing.assert_close(single, whole, rtol=1e-9, atol=1e-10)
    fresh = normed().double()
    fresh.load_state_dict(load_file(fit.save(tmp_path / "out") / "model.safetensors"))
    torch.testing.assert_close(fresh.eval()(everything[:1]), single[:1])
    assert fit.ledger.as_dict()["by_cause"]["models/batch-norm-moments"]["rounds"] in (2, 4)  # the best one, too


def test_statistics_follow_the_learned_weights_and_personal_models_their_own_rows() -> None:
    shards = [images(6, 0), images(6, 3)]
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 2))
    fit = coterie.fit(problem(net, shards, images(6, 0)), coterie.methods.meritfed(step=0.1, mirror_step=5.0), 2)
    assert fit.weights is not None
    assert float(fit.weights[0]) != 0.5
    mean = sum(w * x.flatten(1).mean(0) for w, (x, _) in zip(fit.weights, shards, strict=True))
    torch.testing.assert_close(fit.model[1].running_mean, mean, rtol=1e-6, atol=1e-9)
    made = problem(net, shards, images(6, 0), validation=shards)
    own = coterie.fit(made, coterie.methods.collaborate(), 1)
    for model, (x, _) in zip(own.models, shards, strict=True):
        torch.testing.assert_close(model[1].running_mean, x.flatten(1).mean(0))
        torch.testing.assert_close(model[1].running_var, x.flatten(1).var(0, unbiased=False))


def test_nodes_tell_the_same_statistics() -> None:
    made = problem(normed(), [images(n, k) for k, n in enumerate(SIZES)], images(6, 1))
    views = [made.finished(fed, View(made.start)) for fed in at_home_and_away(made)]
    assert len(views[0].buffers) == 6
    for name, value in views[0].buffers.items():
        assert torch.equal(value, views[1].buffers[name])


class Tied(nn.Module):
    """One matrix under two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)
        self.out = nn.Linear(6, 6)
        self.out.weight = self.into.weight
        self.last = nn.Linear(6, 2)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.out(torch.tanh(self.into(x) * self.scale)))


def test_tied_weights_and_buffers_load_strictly(tmp_path: Path) -> None:
    fit = coterie.fit(problem(Tied()), coterie.methods.fedavg(step=0.2), 2)
    assert len(fit._result.view.model) == 36 + 6 + 6 + 14
    fresh = Tied().double()
    fresh.load_state_dict(load_file(fit.save(tmp_path / "out") / "model.safetensors"))
    assert fresh.out.weight is fresh.into.weight
    torch.testing.assert_close(fresh(rows(2)[0].double()), fit.model(rows(2)[0].double()))
    model = fit.model
    assert model.out.weight is model.into.weight


def test_half_precision_is_converted_and_said() -> None:
    made = problem(nn.Linear(6, 2).to(torch.bfloat16))
    assert made.start.dtype == torch.float64
    assert "bfloat16" in made.notes[0]
    with pytest.raises(UsageError, match="8 bits of bfloat16"):
        problem(nn.Linear(6, 2), dtype="bfloat16")


# models that are refused, and errors in works


class Counting(nn.Module):
    """Keeps something in forward, in a way that is chosen."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.map, self.kind, self.calls, self.last = nn.Linear(6, 2), kind, 0, None
        self.register_buffer("mean", torch.zeros(2))
        self.drawn = nn.LSTM(6, 6, 2, batch_first=True, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.map(x)
        if self.kind == "number":
            self.calls += 1
        if self.kind == "tensor":
            self.last = out
        if self.kind == "buffer":
            self.mean.mul_(0.9).add_(0.1 * out.detach().mean(0))
        if self.kind == "random":
            return out + torch.rand_like(out)
        if self.kind == "lstm":
            return out + self.drawn(x[:, None])[0][:, 0, :2]
        return out


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("number", "keeps state in forward: attribute 'calls' of Counting"),
        ("tensor", "keeps state in forward: attribute 'last' of Counting"),
        ("buffer", "keeps state in forward: buffer 'mean' of Counting.*make forward a function"),
        ("random", "draws random numbers of its own.*use nn.Dropout"),
        ("lstm", "draws random numbers of its own.*nn.LSTM"),
    ],
)
def test_a_model_that_is_no_function_is_refused(kind: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        problem(Counting(kind))
    problem(Counting("nothing"))


class Branching(nn.Module):
    """What vmap cannot run: a branch on values."""

    def __init__(self, worst: float = 1e9) -> None:
        super().__init__()
        self.map, self.worst = nn.Linear(6, 2), worst

    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().max()) > self.worst:
            raise ValueError("too large")
        return self.map(x)


def test_auto_falls_back_to_one_client_after_the_other_once_and_says_so() -> None:
    fit = coterie.fit(problem(Branching()), coterie.methods.bilevel(steps=2, local_steps=2, batch=3), 3)
    assert fit.summary["events"] == {"warning": 1}
    assert "one after the other" in fit._result.events[0]["reason"]
    with pytest.raises(UsageError, match=r"federation.mode = vmap is impossible: vmap cannot run.*set sequential"):
        coterie.fit(problem(Branching()), coterie.methods.fedavg(), 1, mode="vmap")


def test_errors_in_works_name_work_phase_and_client() -> None:
    shards = [rows(5, 0), rows(5, 1), rows(5, 2)]
    shards[2][0][3] = 50.0
    made = problem(Branching(20.0), shards)
    with pytest.raises(
        WorkError, match=r"shared/gradient \(phase gradient\) in round 1 fails at client 2: ValueError: too l"
    ):
        coterie.fit(made, coterie.methods.meritfed(), 1)


def test_models_stay_as_they_were_given() -> None:
    net = dropping()
    before = copy.deepcopy(net.state_dict())
    problem(net)
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not FlatModel(nn.Linear(2, 1)).dropout


def patches() -> nn.Module:
    return nn.Sequential(PatchConv2d(1, 4, 4), BatchStatisticsNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))


def torchs() -> nn.Module:
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    return nn.Sequential(nn.Conv2d(1, 4, 4, stride=4), norm, nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize("first", [nn.LeakyReLU(2.0, inplace=True), nn.Dropout(0.5, inplace=True), nn.ReLU6(True)])
def test_a_first_layer_that_works_in_place_leaves_the_rows_as_they_were(first: nn.Module) -> None:
    def trained(layer: nn.Module, mode: str) -> Tensor:
        torch.manual_seed(1)
        made = problem(nn.Sequential(layer, nn.Linear(6, 2)), [rows(6, k) for k in range(3)])
        before = [column.clone() for column in (*made.train.columns, *made.target.valid.columns)]
        fit = coterie.fit(made, coterie.methods.meritfed(batch="all"), 3, mode=mode)
        assert all(map(torch.equal, before, (*made.train.columns, *made.target.valid.columns)))
        return fit._result.view.model

    apart = copy.deepcopy(first)
    apart.inplace = False
    for mode in ("vmap", "sequential"):
        assert torch.equal(trained(first, mode), trained(apart, mode))


class Wrapped(nn.Module):
    """The same network, whose derivatives nobody has written by hand."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("mode", ["auto", "vmap", "sequential"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("net", [patches, torchs])
def test_batch_norm_of_one_value_is_the_same_error_in_every_mode(net: Any, wrapped: bool, mode: str) -> None:
    shards = [(torch.randn(6, 1, 4, 4), torch.arange(6) % 2) for _ in range(3)]
    made = problem(Wrapped(net()) if wrapped else net(), shards, shards[0])
    for method in (coterie.methods.fedavg(batch=1), coterie.methods.bilevel(batch=1, step=0.1, outer_step=0.1)):
        with pytest.raises(WorkError, match=r"fails at client 0: ValueError: .*[Ee]xpected more than 1 value per chan"):
            coterie.fit(made, method, 1, mode=mode)
