"""collaborate: what it reduces to, its mirror steps by hand, blocks in closed form, traffic, absence and bad input."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import federation, play
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

import coterie
from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.federation import Each, Static
from coterie.methods import collaborate, ditto, fedavg, local_train, pfedme
from coterie.methods.baselines.pfedme import envelope_steps
from coterie.methods.shared.ties import saturating
from coterie.methods.shared.works import local_sgd
from coterie.methods.weights.collaborate import CollaborateState, scale_free_step
from coterie.numerics import Draw, clusters
from coterie.problems import Context, Weighting, weighting
from coterie.problems.catalogue.groups import groups
from coterie.problems.models import FlatModel
from coterie.report.terminal import matrix_map, matrix_report, ranges

WIDE = torch.float64


def mean_estimation(
    sizes: tuple[int, ...], *, rows: int = 40, dimension: int = 6, far: float = 3.0, seed: int = 0, scale: float = 1.0
) -> tuple[Weighting, Tensor]:
    """Clients of a group draw from N(μ_g, I) and want μ_g: L_i(x) = ½ mean ‖x − ξ‖². The problem and μ_g by client."""
    draw = Draw.of(seed)
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    centres = far * draw.phase("centre").client(torch.arange(len(sizes))).sphere(dimension, dtype=WIDE)[group]
    ids = torch.arange(len(group))

    def sample(phase: str) -> list[tuple[Tensor, Tensor]]:
        x = centres[:, None] + draw.phase(phase).client(ids).normal(rows, dimension, dtype=WIDE)
        return [(torch.ones(rows, 1, dtype=WIDE), x[k]) for k in ids.tolist()]

    net = nn.Linear(1, dimension, bias=False)
    nn.init.zeros_(net.weight)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return scale * 0.5 * (outputs - labels).square().sum(1)

    shards, valid = sample("train"), sample("valid")
    problem = weighting(shards, None, FlatModel(net), loss, valid=valid, groups=group.tolist(), dtype=WIDE)
    return problem, centres


@pytest.fixture(scope="module")
def small() -> Weighting:
    return mean_estimation((2, 3), rows=8, dimension=3)[0]


def test_alone_it_is_local_training(small: Weighting) -> None:
    walk = {"step": 0.1, "local_steps": 3, "batch": 4}
    ours = play(collaborate(**walk, start="own", mirror="off"), small, 3)
    method = local_train(**walk, everyone=True)
    assert torch.equal(ours.X, method.view(play(method, small, 3)).model)
    assert torch.equal(ours.W, torch.eye(5, dtype=WIDE))


def test_with_equal_weights_it_is_one_averaged_model_for_all(small: Weighting) -> None:
    walk = {"step": 0.1, "local_steps": 3, "batch": 4}
    ours = play(collaborate(**walk, mirror="off"), small, 4)
    theirs = play(fedavg(**walk, weights="uniform"), small, 4)
    torch.testing.assert_close(ours.X, theirs.x.expand(5, -1))
    torch.testing.assert_close(ours.W, torch.full((5, 5), 0.2, dtype=WIDE))


def test_known_groups_average_within_each(small: Weighting) -> None:
    ours = play(collaborate(local_steps=2, batch="all", start="groups", mirror="off"), small, 3)
    assert torch.equal(ours.X[0], ours.X[1])
    assert not torch.allclose(ours.X[1], ours.X[2])
    torch.testing.assert_close(ours.X[2:], ours.X[2].expand(3, -1))


def validation_loss(problem: Weighting, i: int, x: Tensor) -> Tensor:
    assert problem.valid is not None
    return problem.task.full_loss(x, problem.valid.client(i))


@pytest.mark.parametrize("mirror", ["joint", "trial"])
def test_two_rounds_by_hand(small: Weighting, mirror: Any) -> None:
    """Target after target, with derivatives of φ_i by autograd; c/√Σ max|·|² is the step."""
    method = collaborate(step=0.2, local_steps=2, batch="all", mirror=mirror, mirror_step=0.7, mirror_steps=2)
    X, W, reach = small.start.repeat(5, 1), torch.full((5, 5), 0.2, dtype=WIDE), torch.zeros(5, dtype=WIDE)
    for t in range(2):
        draw = Draw.of(1).round(t).phase("walk")
        U, _ = federation(small).gather(local_sgd, Each(X), draw=draw, step=0.2, steps=2, batch="all")
        rows = []
        for i in range(5):
            w = W[i]
            for _ in range(1 if mirror == "joint" else 2):
                at = X[i] if mirror == "joint" else w @ U
                v = torch.func.grad(lambda x, i=i: validation_loss(small, i, x))(at)
                slope = U @ v - w @ U @ v
                reach[i] += slope.abs().max() ** 2
                w = w * torch.exp(-0.7 / reach[i].sqrt() * slope)
                w = w / w.sum()
            rows.append(w)
        W = torch.stack(rows)
        X = W @ U
    ours = play(method, small, 2)
    torch.testing.assert_close(ours.W, W)
    torch.testing.assert_close(ours.X, X)
    torch.testing.assert_close(ours.reach, reach)


@pytest.mark.parametrize("mirror", ["joint", "trial"])
def test_the_logistic_link_sums_slopes_by_target(small: Weighting, mirror: Any) -> None:
    method = collaborate(step=0.2, local_steps=2, batch="all", mirror=mirror, link="logistic")
    X, W, S = small.start.repeat(5, 1), torch.full((5, 5), 0.2, dtype=WIDE), torch.zeros(5, 5, dtype=WIDE)
    for t in range(3):
        draw = Draw.of(1).round(t).phase("walk")
        U, _ = federation(small).gather(local_sgd, Each(X), draw=draw, step=0.2, steps=2, batch="all")
        for i in range(5):
            at = X[i] if mirror == "joint" else W[i] @ U
            S[i] += (U - U.mean(0)) @ torch.func.grad(lambda x, i=i: validation_loss(small, i, x))(at)
        W = torch.stack([saturating(row) for row in S])
        X = W @ U
    ours = play(method, small, 3)
    torch.testing.assert_close(ours.sums[0], S)
    torch.testing.assert_close(ours.W, W)
    torch.testing.assert_close(ours.X, X)
    present = replace(federation(small), ids=torch.tensor([0, 2, 3]))
    after = method.round(present, ours, Draw.of(3).round(5))
    assert torch.equal(after.sums[0][[1, 4]], ours.sums[0][[1, 4]])
    assert torch.equal(after.W[0, [1, 4]], ours.W[0, [1, 4]])
    torch.testing.assert_close(after.W.sum(1), torch.ones(5, dtype=WIDE))


def test_the_slope_is_the_derivative_of_the_loss_of_the_mixture(small: Weighting) -> None:
    U = Draw.of(2).normal(5, len(small.start), dtype=WIDE)
    w, h = torch.tensor([0.1, 0.3, 0.2, 0.15, 0.25], dtype=WIDE), 1e-5
    v = torch.func.grad(lambda x: validation_loss(small, 3, x))(w @ U)
    slope = (U - U.mean(0)) @ v
    for k in range(1, 5):  # along the simplex, from client 0 to client k
        e = torch.zeros(5, dtype=WIDE)
        e[0], e[k] = -h, h
        change = validation_loss(small, 3, (w + e) @ U) - validation_loss(small, 3, (w - e) @ U)
        torch.testing.assert_close(change / (2 * h), slope[k] - slope[0], rtol=1e-6, atol=1e-8)


def test_the_first_step_changes_no_weight_by_more_than_its_factor() -> None:
    w = torch.full((3, 4), 0.25)
    slope = torch.tensor([[1e-9, 0.0, 2e-9, 0.0], [1e9, -1e9, 0.0, 5.0], [0.0, 0.0, 0.0, 0.0]])
    after, reach = scale_free_step(w, slope, torch.zeros(3), 0.5)
    assert float((after / w).max()) <= 2.718282**1.0
    assert float((after / w).min()) >= 2.718282**-1.0
    assert float((after[:2] - w[:2]).abs().max(1).values.min()) > 0.01
    assert torch.equal(after[2], w[2])
    assert float(reach[2]) == 0.0


def test_the_units_of_the_loss_do_not_matter() -> None:
    one, thousand = (mean_estimation((2, 3), rows=8, scale=s)[0] for s in (1.0, 1000.0))
    knobs: dict[str, Any] = {"local_steps": 2, "batch": "all"}
    a = play(collaborate(step=0.1, **knobs), one, 5)
    b = play(collaborate(step=0.0001, **knobs), thousand, 5)
    torch.testing.assert_close(a.W, b.W, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(a.X, b.X, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mirror", ["joint", "trial"])
@pytest.mark.slow
def test_mean_estimation_finds_the_blocks_and_their_means(mirror: Any) -> None:
    """A model of group g comes as near to μ_g as the group's rows together allow: σ²d/(n G), not σ²d/n."""
    sizes, rows, d = (4, 6, 8), 40, 6
    ratios = []
    for seed in range(2):
        problem, centres = mean_estimation(sizes, rows=rows, dimension=d, seed=seed)
        s = play(collaborate(step=0.1, local_steps=5, batch="all", mirror=mirror), problem, 40)
        assert problem.groups is not None
        inside = (s.W * (problem.groups[:, None] == problem.groups)).sum(1)
        assert float(inside.min()) > 0.85  # not 1: strangers also help to fit the noise of a target's validation rows
        assert float(inside.mean()) > 0.95
        assert clusters(s.W) == [list(range(4)), list(range(4, 10)), list(range(10, 18))]
        alone = play(collaborate(step=0.1, local_steps=5, batch="all", mirror="off", start="own"), problem, 40)
        ideal = play(collaborate(step=0.1, local_steps=5, batch="all", mirror="off", start="groups"), problem, 40)
        error, by_self, by_group = (float((r.X - centres).square().sum(1).mean()) for r in (s, alone, ideal))
        assert by_self == pytest.approx(d / rows, rel=0.3)
        ratios.append((error - by_group) / (by_self - by_group))
    assert sum(ratios) / len(ratios) < 0.4  # of the way from the ideal to being alone


def test_traffic() -> None:
    """joint: d down, 2d up a client and round. trial: d both ways in each of 1 + M exchanges. off: as FedAvg."""
    problem = mean_estimation((2, 3), dimension=7)[0]
    expected = {("joint", 3): (1, 7, 14), ("trial", 3): (4, 28, 28), ("trial", 1): (2, 14, 14), ("off", 3): (1, 7, 7)}
    for (mirror, steps), (rounds, down, up) in expected.items():
        fed = federation(problem)
        play(collaborate(mirror=mirror, mirror_steps=steps), problem, 2, fed=fed)
        total = fed.ledger.total
        assert (total.rounds, total.floats_down, total.floats_up) == (2 * rounds, 2 * 5 * down, 2 * 5 * up), mirror


@pytest.mark.parametrize("mirror", ["joint", "trial"])
def test_who_is_absent_keeps_row_and_model(small: Weighting, mirror: Any) -> None:
    method = collaborate(batch=4, mirror=mirror)
    before = play(method, small, 2)
    fed = federation(small)
    draw = Draw.of(3).round(5)
    after = method.round(replace(fed, ids=torch.tensor([0, 2, 3])), before, draw)
    for k in (1, 4):
        assert torch.equal(after.X[k], before.X[k])
        assert torch.equal(after.W[k], before.W[k])
    for k in (0, 2, 3):
        assert not torch.equal(after.X[k], before.X[k])
        assert torch.equal(after.W[k, [1, 4]], before.W[k, [1, 4]])  # weight moves among those who are here
        assert not torch.equal(after.W[k, [0, 2, 3]], before.W[k, [0, 2, 3]])
    torch.testing.assert_close(after.W.sum(1), torch.ones(5, dtype=WIDE))


def test_a_target_whose_friends_are_all_absent_goes_on_alone(small: Weighting) -> None:
    W = torch.eye(5, dtype=WIDE)
    W[0] = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    state = CollaborateState(small.start.repeat(5, 1), W, torch.zeros(5, dtype=WIDE))
    present = replace(federation(small), ids=torch.tensor([0, 2]))
    method = collaborate(batch=4)
    after = method.round(present, state, Draw.of(0).round(0))
    alone = play(collaborate(batch=4, mirror="off", start="own"), small, 0)
    walked = method.round(present, alone._replace(W=torch.eye(5, dtype=WIDE)), Draw.of(0).round(0))
    assert torch.equal(after.X[0], walked.X[0])
    assert torch.equal(after.W, W)


def test_a_target_that_cannot_answer_stays_where_it_is() -> None:
    """Client 1's validation rows overflow: its row stays, the others learn, and the event names it."""
    net = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(net.weight)
    x = Draw.of(0).client(torch.arange(4)).normal(10, 2)
    shards = [(x[k], x[k] @ torch.tensor([1.0, -1.0]) * (1 if k < 2 else -1)) for k in range(4)]
    valid = [(1e25 * a, 1e25 * b) if k == 1 else (a, b) for k, (a, b) in enumerate(shards)]
    problem = weighting(shards, None, FlatModel(net), "squared", valid=valid)
    fed = federation(problem)
    after = play(collaborate(batch="all", mirror="trial", step=0.2), problem, 3, fed=fed)
    assert torch.equal(after.W[1], torch.full((4,), 0.25))
    assert float(after.W[0, :2].sum()) > 0.7
    assert {event["client"] for event in fed.book.drain()} == {1}


def test_one_client_trains_alone() -> None:
    problem = mean_estimation((1,), rows=10)[0]
    s = play(collaborate(batch=5), problem, 4)
    alone = play(collaborate(batch=5, mirror="off", start="own"), problem, 4)
    assert torch.equal(s.W, torch.ones(1, 1, dtype=WIDE))
    assert torch.equal(s.X, alone.X)


def test_without_gradients_nothing_moves() -> None:
    rows = (torch.ones(6, 1), torch.zeros(6, 2))
    net = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(net.weight)
    problem = weighting([rows] * 3, None, FlatModel(net), "squared", valid=[rows] * 3)
    for mirror in ("joint", "trial"):
        s = play(collaborate(batch="all", mirror=mirror), problem, 3)
        assert torch.equal(s.X, torch.zeros(3, 2))
        torch.testing.assert_close(s.W, torch.full((3, 3), 1 / 3))


def own_shards(n: int = 4, flip: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Two classes in the plane; the last ones have them the wrong way round."""
    x = Draw.of(3).client(torch.arange(n)).normal(60, 2)
    return [(x[k], ((x[k].sum(1) > 0) ^ (k >= n - flip)).long()) for k in range(n)]


def local(shards: Any, **more: Any) -> coterie.Weighting:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(2, 2)
    return coterie.Weighting.on(shards, model=net, loss="cross_entropy", **more)


def test_bad_input_is_explained() -> None:
    shards = own_shards()
    with pytest.raises(UsageError, match=r"collaborate needs validation rows of every client .*validation=\[…\]"):
        coterie.fit(local(shards), coterie.methods.collaborate(), rounds=1)
    with pytest.raises(UsageError, match="3 validation sets for 4 clients; give one per client"):
        local(shards, validation=shards[:3])
    with pytest.raises(UsageError, match="validation set of client 2 is empty"):
        local(shards, validation=[*shards[:2], (torch.zeros(0, 2), torch.zeros(0).long()), shards[3]])
    with pytest.raises(UsageError, match="validation set of client 1 is a NoneType"):
        local(shards, validation=[shards[0], None, *shards[2:]])
    with pytest.raises(UsageError, match="2 test sets for 4 clients; give one per client"):
        local(shards, validation=shards, tests=shards[:2])
    with pytest.raises(UsageError, match=r"the rows of validation have shape \(3,\), those of the clients \(2,\)"):
        local(shards, validation=[(torch.zeros(5, 3), torch.zeros(5).long())] * 4)
    with pytest.raises(UsageError, match="validation has labels from 0 to 7"):
        local(shards, validation=[*shards[:3], (torch.zeros(2, 2), torch.tensor([0, 7]))])
    with pytest.raises(UsageError, match="local-train for everyone takes plain steps"):
        local_train(everyone=True, refresh=0.1)
    with pytest.raises(UsageError, match="mirror = 'both'"):
        collaborate(mirror="both")


def test_from_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = [(x[:30], y[:30]) for x, y in own_shards()]
    valid = [(x[30:45], y[30:45]) for x, y in own_shards()]
    tests = [(x[45:], y[45:]) for x, y in own_shards()]
    problem = local(train, validation=valid, tests=tests)
    fit = coterie.fit(problem, coterie.methods.collaborate(step=0.5), rounds=30, mode="vmap")
    assert fit.weights is not None
    assert fit.weights.shape == (4, 4)
    assert fit.clusters == [[0, 1], [2, 3]]
    assert fit.summary["final"]["personal_accuracy"] > 0.9
    for k, model in enumerate(fit.models):
        x, y = tests[k]
        assert float((model(x).argmax(1) == y).double().mean()) > 0.8
    with pytest.raises(UsageError, match=r"fit\.models\[k\]"):
        _ = fit.model
    fit.report()
    said = capsys.readouterr().out
    assert "0–1" in said
    assert "mean personal accuracy" in said
    fit.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert sorted(saved) == sorted(f"client_{k}.{name}" for k in range(4) for name in ("bias", "weight"))
    torch.testing.assert_close(saved["client_3.weight"], fit.models[3].weight.detach())
    one = coterie.fit(problem, coterie.methods.fedavg(), rounds=1, mode="vmap")
    with pytest.raises(UsageError, match=r"one model for all; it is fit\.model"):
        _ = one.models
    with pytest.raises(UsageError, match="no matrix of weights"):
        _ = one.clusters


def run(method: str, rounds: int, folder: Path | None = None, **sets: Any) -> Any:
    flags = {"run.method": method, "run.problem": "groups", "run.rounds": rounds, "run.baselines": []}
    known = {f"{key.replace('__', '.')}": value for key, value in sets.items()}
    return run_rounds(assemble(load(sets={**known, "federation.mode": "vmap"}, flags=flags)), folder)


def test_the_record_of_a_matrix(tmp_path: Path) -> None:
    result = run("collaborate", 2, tmp_path, problem__clients=4, problem__train=20, problem__model="logistic")
    with (tmp_path / "weights.csv").open() as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["round", "target", "client_0", "client_1", "client_2", "client_3"]
    assert [line[:2] for line in lines[1:]] == [[str(t), str(i)] for t in range(3) for i in range(4)]
    last = torch.tensor([[float(w) for w in line[2:]] for line in lines[-4:]])
    torch.testing.assert_close(last, result.view.weights)
    summary = json.loads((tmp_path / "summary.json").read_text())
    torch.testing.assert_close(torch.tensor(summary["weights"]), result.view.weights)
    assert summary["clusters"] == clusters(result.view.weights)
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    measures = {"personal_accuracy", "personal_accuracy_worst", "personal_loss", "group_weight", "group_weight_least"}
    assert measures <= line.keys()
    assert {"validation_accuracy", "validation_loss", "effective_clients"} <= line.keys()
    assert line["group_weight"] == pytest.approx(
        float(sum(last[i][[j for j in range(4) if (i == 0) == (j == 0)]].sum() for i in range(4))) / 4, abs=1e-5
    )


def test_personal_measures_are_those_of_each_model_on_its_groups_test_rows() -> None:
    problem = groups(Context(1), setting=4, clients=6, train=30, everyone=True)
    X = problem.start + 0.1 * Draw.of(0).client(torch.arange(6)).normal(len(problem.start))
    state = CollaborateState(X, torch.eye(6), torch.zeros(6))
    measured = problem.measure(collaborate().view(state))
    assert problem.tests is not None
    each = [problem.task.measure(X[k], problem.tests.client(k), "test") for k in range(6)]
    assert measured["personal_accuracy"] == pytest.approx(sum(m["test_accuracy"] for m in each) / 6, abs=1e-6)
    assert measured["personal_accuracy_worst"] == pytest.approx(min(m["test_accuracy"] for m in each), abs=1e-6)
    assert measured["personal_loss"] == pytest.approx(sum(m["test_loss"] for m in each) / 6, abs=1e-5)
    both = [problem.tests.client(k).all().inputs for k in (0, 5)]
    assert torch.equal(both[0], problem.test.all().inputs)
    assert not torch.equal(*both)


def test_methods_ask_the_problem_for_everyone_and_follow_it() -> None:
    flags = {"run.method": "collaborate", "run.problem": "groups"}
    assert load(flags=flags).problem["everyone"] is True
    assert load(flags={**flags, "run.method": "meritfed"}).problem["everyone"] is False
    config = load(flags={**flags, "run.problem": "friends"})
    assert config.for_baseline("local-train").method["everyone"] is True
    assert "everyone" not in config.for_baseline("fedavg").method
    for method in ("ditto", "pfedme", "local-train"):
        asked = load(sets={"problem.everyone": True}, flags={**flags, "run.method": method})
        assert asked.method["everyone"] is True
        asking = load(sets={"method.everyone": True}, flags={**flags, "run.method": method})
        assert asking.problem["everyone"] is True
    refused = load(sets={"problem.everyone": False}, flags=flags)
    with pytest.raises(UsageError, match=r"needs validation rows of every client \(problem.everyone=true"):
        assemble(refused)


def test_no_client_trains_on_a_row_that_somebody_validates_with() -> None:
    problem = groups(Context(4), everyone=True)
    assert problem.valid is not None
    trained = {row.numpy().tobytes() for row in problem.train.columns[0]}
    assert not trained & {row.numpy().tobytes() for row in problem.valid.columns[0]}
    assert not torch.equal(problem.valid.client(0).all().inputs, problem.valid.client(1).all().inputs)


@pytest.mark.parametrize("make", [ditto, pfedme], ids=["ditto", "pfedme"])
def test_personal_baselines_keep_their_models_and_move_no_more_than_fedavg(small: Weighting, make: Any) -> None:
    method = make(everyone=True, batch=4, local_steps=2)
    fed = federation(small)
    s = play(method, small, 2, fed=fed)
    total = fed.ledger.total
    d = len(small.start)
    assert (total.rounds, total.floats_down, total.floats_up) == (2, 2 * 5 * d, 2 * 5 * d)
    models = method.view(s).model
    assert models.shape == (5, d)
    assert len({tuple(row.tolist()) for row in models}) == 5


def test_personal_baselines_by_hand(small: Weighting) -> None:
    """Client k's v and θ, from its own rows and draws, in the second round (so that x and v have parted)."""
    one = ditto(everyone=True, batch=4, step=0.1, local_steps=2, personal_steps=3, penalty=0.5)
    two = pfedme(everyone=True, batch=4, local_steps=2)
    a, b = play(one, small, 1), play(two, small, 1)
    draw = Draw.of(1).round(1)
    after = [m.view(m.round(federation(small), s, draw)).model for m, s in ((one, a), (two, b))]
    for k in range(5):
        rows, own = small.train.client(k), draw.phase("walk").client(k)
        v = one.view(a).model[k]
        for index in own.phase("personal").batches(rows.count, 4, 3):
            v = v - 0.1 * (small.task.gradient(v, rows.take(index)) + 0.5 * (v - a.x))
        torch.testing.assert_close(after[0][k], v)
        theta = envelope_steps(small.task, rows, b.x, Static(**{**two.settings, "steps": 2}), own)[1]
        torch.testing.assert_close(after[1][k], theta)


def test_a_person_can_read_the_map() -> None:
    w = torch.full((12, 12), 0.01)
    for block in (slice(0, 4), slice(4, 12)):
        w[block, block] = 1.0
    w = w / w.sum(1, keepdim=True)
    text = matrix_map(w.tolist(), clusters(w)).plain.splitlines()
    assert text[1] == "target 0 1 2 3 │4 5 6 7 8 9 0 1 "
    assert text[2] == "     0 ▓▓▓▓▓▓▓▓│················  0.98"
    assert text[6] == "       ────────┼────────────────"
    assert text[7] == "     4 ········│▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒  1.00"
    assert max(map(len, text)) <= 80
    assert ranges([0, 1, 2, 4, 7, 8]) == "0–2, 4, 7–8"
    wide = torch.full((60, 60), 1 / 60)
    out = Console(file=io.StringIO(), width=80)
    out.print(matrix_report(wide.tolist(), clusters(wide)))
    assert "█" not in out.file.getvalue()  # type: ignore[attr-defined]
    assert "0–59" in out.file.getvalue()  # type: ignore[attr-defined]
    out = Console(file=io.StringIO(), width=80)
    out.print(matrix_report(torch.eye(60).tolist(), clusters(torch.eye(60))))
    assert "and 40 more" in out.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.chunk_free
def test_many_clients_in_chunks_are_the_same() -> None:
    """K = 100 with the small network; chunks bound the memory and change no bit."""
    settings = {"problem__clients": 100, "problem__train": 10, "problem__validation": 10, "problem__test": 20}
    whole, chunks = (run("collaborate", 1, **settings, federation__chunk=chunk) for chunk in (100, 9))
    assert whole.view.model.shape[0] == 100
    assert whole.view.weights.shape == (100, 100)
    assert torch.equal(whole.view.weights, chunks.view.weights)
    assert torch.equal(whole.view.model, chunks.view.model)


@pytest.mark.slow
def test_it_finds_the_groups_of_digits_and_beats_one_model_for_all_and_everyone_alone() -> None:
    """Setting 4, half the rounds of the benchmark (docs/collaborate.md)."""
    settings = {"problem__setting": 4, "problem__everyone": True, "run__record": 40}
    ours = run("collaborate", 40, **settings)
    assert ours.summary["clusters"] == [[0, 1, 2, 3, 4], [*range(5, 15)]]
    assert ours.summary["final"]["group_weight_least"] > 0.9
    accuracy = ours.summary["final"]["personal_accuracy"]
    for method in ("fedavg", "local-train"):
        assert accuracy > run(method, 40, **settings).summary["final"]["personal_accuracy"] + 0.03
