"""What leaves a client is no longer than the clip, noisy by the scale that was set, and worth what the library says."""

import csv
import io
import json
import math
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from rich.console import Console
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import norm

from coterie.errors import UsageError
from coterie.experiment.build import assemble, check_deployable, noise_name
from coterie.experiment.config import Config, load
from coterie.experiment.loop import run_rounds
from coterie.federation import Attack, Federation, LocalEngine, Memory, moved_from, staged, work
from coterie.federation.stages.compression import Compression
from coterie.federation.stages.faults import Faults
from coterie.federation.stages.privacy import (
    ORDERS,
    Mechanism,
    Privacy,
    PrivacyState,
    composed,
    epsilon,
    epsilon_sampled,
    library,
)
from coterie.numerics import Draw
from coterie.report.terminal import show_privacy

N = 6
DRAW = Draw.of(2)


@work
def reply(shard, shared, private, static, draw):
    """A vector and a scalar: (k, k, k) and k, of norm 2k."""
    k = shard.train.all().inputs[0, 0].double()
    return {"v": k.expand(3), "s": k}


@work(update=moved_from())
def stroll(shard, shared, private, static, draw):
    return shared + shard.train.all().inputs[0, 0]


@work
def counted(shard, shared, private, static, draw):
    return shard.train.count


@work
def wide(shard, shared, private, static, draw):
    return torch.zeros(20_000, dtype=torch.float64)


@work
def broken(shard, shared, private, static, draw):
    return shard.train.all().inputs[0] / 0.0


@work
def kept(shard, shared, private, static, draw):
    return private + 1.0, private + 1.0


@pytest.fixture
def hiding(tiny):
    def make(clip: float, noise: float = 0.0, n: int = N, run: str = "", **options: Any) -> Federation:
        fed = tiny(n, **options)
        return replace(fed, engine=staged(fed.engine, Privacy(Mechanism(clip, noise), run)))

    return make


def test_updates_are_clipped_over_all_their_tensors(hiding):
    rows, ids = hiding(4.0).gather(reply, draw=DRAW)
    norms = torch.stack([*rows["v"].T, rows["s"]]).norm(dim=0)
    torch.testing.assert_close(norms, (2.0 * ids).clamp(max=4.0).double())
    torch.testing.assert_close(rows["v"], rows["s"][:, None].expand(-1, 3))


def test_of_a_walk_the_way_is_clipped(hiding):
    start = torch.full((4,), 100.0, dtype=torch.float64)
    rows, ids = hiding(2.0).gather(stroll, start, draw=DRAW)
    torch.testing.assert_close((rows - start).norm(dim=1), (2.0 * ids).clamp(max=2.0).double())


def test_noise_has_the_scale_that_was_set_and_differs_by_client_and_phase(hiding):
    fed = hiding(clip=3.0, noise=0.5, n=4)
    rows = fed.gather(wide, draw=DRAW.phase("a")).rows
    d = rows.shape[1]
    assert bool((rows.std(1) - 1.5).abs().max() < 1.5 * 4 / math.sqrt(2 * d))
    assert bool(rows.mean(1).abs().max() < 1.5 * 4 / math.sqrt(d))
    other = fed.gather(wide, draw=DRAW.phase("b")).rows
    cosines = torch.corrcoef(torch.cat([rows, other])) - torch.eye(8, dtype=rows.dtype)
    assert float(cosines.abs().max()) < 5 / math.sqrt(d)
    again = hiding(clip=3.0, noise=0.5, n=4).gather(wide, draw=DRAW.phase("a")).rows
    assert torch.equal(rows, again)


def test_two_uploads_with_one_draw_have_independent_noise(hiding):
    """Equal noise would cancel in the difference of the two: composition would not hold."""
    fed = hiding(clip=3.0, noise=0.5, n=2)
    one, two = (fed.gather(wide, draw=DRAW).rows for _ in range(2))
    assert float((one - two).std()) == pytest.approx(1.5 * math.sqrt(2), rel=0.03)


def test_runs_that_differ_have_independent_noise(hiding):
    """A run and its baselines have one seed, and often one draw for one phase: their noise must not cancel."""
    one, two = (hiding(clip=3.0, noise=0.5, n=2, run=name).gather(wide, draw=DRAW).rows for name in ("one", "two"))
    assert float((one - two).std()) == pytest.approx(1.5 * math.sqrt(2), rel=0.03)
    plain = configured(**{"privacy.clip": 1.0})
    names = [noise_name(plain)]
    same = [
        {"run.rounds": 9},
        {"federation.mode": "sequential"},
        {"federation.chunk": 2},
        {"run.baselines": ["fedavg"]},
    ]
    names += [noise_name(configured(**{"privacy.clip": 1.0, **more})) for more in same]
    assert len(set(names)) == 1
    other = [{"method.step": 0.2}, {"privacy.noise": 2.0}, {"federation.active": 0.5}, {"run.method": "fedavg"}]
    names += [noise_name(configured(**{"privacy.clip": 1.0, **more})) for more in other]
    assert len(set(names)) == 5


def test_a_mean_of_n_clients_has_the_noise_of_all_of_them(hiding):
    """Deviation zC/√n: for somebody who sees nothing but sums, n participants are worth a multiplier of √n z."""
    mean = hiding(clip=3.0, noise=0.5, n=9).mean(wide, draw=DRAW)
    assert float(mean.std()) == pytest.approx(1.5 / 3, rel=4 / math.sqrt(2 * len(mean)))


@pytest.mark.chunk_free
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_do_not_change_a_bit(hiding, chunk):
    one, two = (hiding(1.0, 1.0, chunk=size).gather(reply, draw=DRAW).rows for size in (None, chunk))
    assert torch.equal(one["v"], two["v"])
    assert torch.equal(one["s"], two["s"])


def test_memory_stays_as_it_is_and_nonsense_stays_nonsense(hiding):
    fed = hiding(1.0, 1.0)
    _, after = fed.gather(kept, memory=Memory(torch.zeros(N)), draw=DRAW)
    assert after.payload.tolist() == [1.0] * N
    fed.book.drain()
    with pytest.raises(Exception, match="no client answered"):
        fed.gather(broken, draw=DRAW)
    assert {event["reason"] for event in fed.book.drain()} == {"not finite"}


def test_whole_numbers_cannot_be_hidden(hiding):
    with pytest.raises(UsageError, match=r"counted sends whole numbers .* which noise cannot hide; choose a method"):
        (fed := hiding(1.0, 1.0)).gather(counted, draw=DRAW)
    assert fed.ledger.total.bytes_up == 0


def test_uploads_are_counted_by_client_asked(hiding):
    fed = hiding(1.0)
    fed.gather(reply, draw=DRAW)
    replace(fed, ids=torch.tensor([1, 4])).mean(reply, draw=DRAW)
    fed.ask_target(wide, draw=DRAW)
    assert fed.engine.states["privacy"].uploads.tolist() == [1, 2, 1, 1, 2, 1]


def test_it_is_nearest_to_the_clients(tiny):
    fed = tiny(N)
    privacy, attack = Privacy(Mechanism(1.0)), Attack("scaled", 3)
    found = staged(fed.engine, Faults(crash=0.1), Compression("top-k", 0.5), attack, privacy)
    assert [stage.key for stage in found.stages] == ["privacy", "attack", "faults", "compression"]
    assert isinstance(found.engine, LocalEngine)
    again = staged(staged(fed.engine, attack), privacy)
    assert (again.engine, again.stages) == (fed.engine, (privacy, attack))
    with pytest.raises(ValueError, match="two stages of one key"):
        staged(again, privacy)
    rows = Federation.on(again).gather(stroll, torch.zeros(1, dtype=torch.float64), draw=DRAW).rows
    assert rows[3:].flatten().tolist() == [100.0, 100.0, 100.0], "an attacker does not clip what it scales"


# a run


def configured(**more: Any) -> Config:
    run = {
        "run.problem": "quadratic",
        "run.baselines": [],
        "run.threads": 1,
        "run.rounds": 5,
        "federation.mode": "vmap",
    }
    return load(sets={**run, **more})


def test_clipping_alone_needs_no_accountant_and_has_no_budget(tmp_path):
    result = run_rounds(assemble(configured(**{"privacy.clip": 0.5})), tmp_path)
    assert result.summary["outcome"] == "finished"
    assert result.summary["privacy"] == {
        "clip": 0.5,
        "noise": 0.0,
        "delta": 1e-5,
        "uploads": 5,
        "uploads_a_round": 1,
        "epsilon": None,
        "epsilon_sampled": None,
        "epsilon_sampled_reason": "every client takes part in every round",
        "not_covered": [
            "updates: privacy.noise = 0 clips them and adds no noise",
            "sizes: every client's number of rows is used as it is",
            "participation: who takes part, answers or fails is recorded",
            "the target: its rows are used without noise",
            "measures: losses and accuracies in the records are computed without noise",
        ],
    }
    assert [line["uploads"] for line in result.history] == [0, 1, 2, 3, 4, 5]
    loose = run_rounds(assemble(configured(**{"privacy.clip": 1e9})), None)
    plain = run_rounds(assemble(configured()), None)
    assert torch.equal(loose.view.model, plain.view.model)
    assert not torch.equal(result.view.model, plain.view.model)
    assert "privacy" not in plain.summary


def test_a_resumed_run_goes_on_counting(tmp_path):
    more = {"privacy.clip": 0.5, "federation.active": 0.5, "faults.crash": 0.3, "federation.compress": "random-k"}
    whole, broken_off = tmp_path / "a", tmp_path / "b"
    whole.mkdir()
    broken_off.mkdir()
    one = run_rounds(assemble(configured(**more)), whole)
    run_rounds(assemble(configured(**more, **{"run.rounds": 2})), broken_off)
    two = run_rounds(assemble(configured(**more)), broken_off, resume=True)
    assert torch.equal(one.view.model, two.view.model)
    assert one.summary["privacy"] == two.summary["privacy"]
    assert 0 < one.summary["privacy"]["uploads"] <= 5


def test_a_skipped_round_was_still_paid_for():
    result = run_rounds(assemble(configured(**{"privacy.clip": 0.5, "faults.nan": 1.0})), None)
    assert result.summary["events"]["skipped"] == 5
    assert result.summary["privacy"]["uploads"] == 5


def test_a_skipped_round_loses_no_error_and_counts_uploads_beside_compression():
    """The state of a skipped round has the form of all others."""
    more = {"privacy.clip": 0.5, "faults.nan": 0.5, "federation.count": 1, "federation.compress": "random-k"}
    result = run_rounds(assemble(configured(**more)), None)
    assert 0 < result.summary["events"]["skipped"] < 5
    assert int(result.state.stages["privacy"].uploads.sum()) == 5


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"privacy.noise": 1.0}, r"privacy.*set privacy\.clip"),
        ({"privacy.clip": -1.0}, r"privacy\.clip = -1\.0"),
        ({"privacy.clip": 1.0, "run.method": "top-k"}, "top-k/sparse-steps sends whole numbers"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_round(more, complaint):
    with pytest.raises(UsageError, match=complaint):
        assemble(configured(**more))


def test_statistics_of_columns_are_not_claimed_to_be_private_on_a_network():
    parts = assemble(configured(**{"privacy.clip": 1.0}))
    check_deployable(parts.config.with_run(engine="flower"), parts.method, parts.problem)
    with pytest.raises(UsageError, match="hides updates and not the statistics of columns"):
        check_deployable(parts.config.with_run(engine="flower", problem="files"), parts.method, parts.problem)


def test_without_the_library_noise_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UsageError, match=r"pip install 'coterie\[privacy\]'.*privacy\.noise=0"):
        assemble(configured(**{"privacy.clip": 1.0, "privacy.noise": 1.0}))


# who took part, and what else is not covered


def by_round(folder):
    with (folder / "weights.csv").open() as file:
        return [[float(value) for value in row[1:]] for row in list(csv.reader(file))[1:]]


def test_weights_show_who_took_part_so_no_amplification_is_claimed(tmp_path):
    """The weights of those that were not active keep their share: a reader of weights.csv names the active set."""
    more = {"privacy.clip": 1.0, "federation.active": 0.5, "method.mirror_step": 0.1}
    parts = assemble(configured(**more))
    run_rounds(parts, tmp_path)
    draw = Draw.of(parts.config.run.seed)
    for t, (before, after) in enumerate(pairwise(by_round(tmp_path))):
        changed = {k for k, (one, two) in enumerate(zip(before, after, strict=True)) if one != two}
        active = set(parts.fed.begin(t + 1, draw.round(t)).ids.tolist())
        assert changed == active or len(active) == 1
    spent = json.loads((tmp_path / "summary.json").read_text())["privacy"]
    assert spent["epsilon_sampled"] is None
    assert "weights.csv shows who took part" in spent["epsilon_sampled_reason"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"federation.count": 2}, "a fixed number of participants"),
        ({}, "every client takes part"),
        ({"federation.active": 0.5, "run.method": "fedavg", "faults.crash": 0.5}, "events.jsonl names participants"),
        ({"federation.active": 0.5, "run.method": "fedavg"}, "each participant brings its own noise"),
    ],
)
def test_the_sampled_epsilon_is_null_with_the_reason(more, reason):
    spent = run_rounds(assemble(configured(**{"privacy.clip": 1.0, **more})), None).summary["privacy"]
    assert spent["epsilon_sampled"] is None
    assert reason in spent["epsilon_sampled_reason"]


def test_noise_that_comes_with_the_client_amplifies_delta_only():
    """One round with probability q: density by density, δ'(ε) = q δ(ε), since no upload has no density in common."""
    q, z, eps = 0.3, 1.2, 0.7
    x = torch.linspace(-20.0, 20.0, 400_001, dtype=torch.float64)
    there, empty = (torch.distributions.Normal(mean, z).log_prob(x).exp() for mean in (1.0, 0.0))
    excess = (q * there - math.exp(eps) * q * empty).clamp(min=0.0)
    silent = max(0.0, (1 - q) * (1 - math.exp(eps)))
    assert float(torch.trapezoid(excess, x)) + silent == pytest.approx(q * exact_delta(z, eps), rel=1e-6)


def test_what_is_not_covered_is_listed_and_printed():
    pytest.importorskip("dp_accounting", reason=REASON)
    more = {"run.problem": "friends", "run.method": "ditto", "run.rounds": 2, "federation.target": 3}
    more |= {"problem.everyone": True, "method.local_steps": 1, "method.personal_steps": 1}
    config = configured(**more, **{"privacy.clip": 1.0, "privacy.noise": 1.0, "run.baselines": ["fedavg"]})
    summary = run_rounds(assemble(config), None).summary
    kinds = [text.partition(":")[0] for text in summary["privacy"]["not_covered"]]
    assert kinds == [
        "the seed",
        "sizes",
        "participation",
        "the target (client 3)",
        "measures",
        "client memory",
        "baselines (fedavg)",
    ]
    console = Console(record=True, width=120, file=io.StringIO())
    show_privacy(console, summary["privacy"])
    text = console.export_text()
    assert f"ε = {summary['privacy']['epsilon']:.3g} at δ = 1e-05" in text
    assert all(entry in text for entry in summary["privacy"]["not_covered"])


def test_a_method_without_personal_models_shows_no_memory():
    summary = run_rounds(assemble(configured(**{"privacy.clip": 1.0, "run.method": "fedavg"})), None).summary
    assert not any(text.startswith("client memory") for text in summary["privacy"]["not_covered"])


# the accountants, beside computations of their own

REASON = "needs coterie[privacy]"


def exact_delta(sigma: float, eps: float) -> float:
    """δ = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ) of a Gaussian mechanism with sensitivity 1 (Balle and Wang 2018)."""
    a, b = 0.5 / sigma - eps * sigma, -0.5 / sigma - eps * sigma
    return float(norm.cdf(a) - math.exp(eps + norm.logcdf(b)))


def exact_epsilon(sigma: float, delta: float) -> float:
    """The root of δ(ε) = δ."""
    if exact_delta(sigma, 0.0) <= delta:
        return 0.0
    return float(brentq(lambda eps: exact_delta(sigma, eps) - delta, 0.0, 0.5 / sigma**2 + 40.0 / sigma, xtol=1e-13))


def renyi_epsilon(noise: float, rounds: int, delta: float, q: float) -> float:
    """Mironov, Talwar and Zhang (2019), whole orders: R(α) = log Σ_k C(α, k) (1−q)^(α−k) q^k e^{k(k−1)/2z²} / (α − 1),
    and ε = min_α T R(α) + log(1 − 1/α) − log(δα)/(α − 1) (Canonne, Kamath and Steinke 2020)."""
    found = []
    for order in ORDERS:
        terms = [
            math.log(math.comb(order, k))
            + (order - k) * math.log1p(-q)
            + k * math.log(q)
            + k * (k - 1) / (2 * noise**2)
            for k in range(order + 1)
        ]
        divergence = rounds * logsumexp(terms) / (order - 1)
        found.append(divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    return max(0.0, float(min(found)))


@pytest.mark.parametrize(("z", "T"), [(1.0, 1), (4.0, 10), (10.0, 200), (0.5, 3), (30.0, 5)])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_epsilon_is_that_of_the_exact_gaussian_mechanism(z, T, delta):
    """T uploads with noise z are one mechanism of noise z/√T, whose ε is known in closed form up to a root."""
    pytest.importorskip("dp_accounting", reason=REASON)
    assert epsilon(z, T, delta) == pytest.approx(exact_epsilon(z / math.sqrt(T), delta), rel=1e-6)


def test_releases_of_different_noise_add_up_by_their_precisions():
    """The privacy loss of Gaussian mechanisms is Gaussian of mean μ = Σ T/2z² and variance 2μ: sums keep that form."""
    assert composed([(3.0, 4), (2.0, 1)]) == pytest.approx(1 / math.sqrt(4 / 9 + 1 / 4))
    assert composed([(3.0, 0)]) == composed([]) == math.inf
    assert composed([(3.0, 1), (0.0, 1)]) == 0.0
    assert composed([(0.0, 0), (2.0, 1)]) == 2.0


@pytest.mark.parametrize(
    ("noise", "rounds", "q"), [(1.1, 14_400, 250 / 60_000), (1.5, 40, 0.2), (2.0, 5, 0.5), (0.8, 100, 0.01)]
)
def test_the_sampled_epsilon_is_that_of_the_renyi_formula(noise, rounds, q):
    pytest.importorskip("dp_accounting", reason=REASON)
    formula = min(renyi_epsilon(noise, rounds, 1e-5, q), exact_epsilon(noise / math.sqrt(rounds), 1e-5))
    assert epsilon_sampled(noise, rounds, 1, 1e-5, q) == pytest.approx(formula, rel=1e-6)
    twice = min(
        renyi_epsilon(noise / math.sqrt(2), rounds, 1e-5, q), exact_epsilon(noise / math.sqrt(2 * rounds), 1e-5)
    )
    assert epsilon_sampled(noise, rounds, 2, 1e-5, q) == pytest.approx(twice, rel=1e-6)


def test_epsilon_grows_with_uploads_and_shrinks_with_noise_and_sampling():
    pytest.importorskip("dp_accounting", reason=REASON)
    assert [epsilon(1.0, 0, 1e-5), epsilon(0.0, 3, 1e-5)] == [0.0, math.inf]
    by_uploads = [epsilon(2.0, T, 1e-5) for T in (1, 2, 5, 50)]
    assert by_uploads == sorted(by_uploads)
    by_noise = [epsilon(z, 10, 1e-5) for z in (0.5, 1.0, 2.0, 8.0)]
    assert by_noise == sorted(by_noise, reverse=True)
    by_share = [epsilon_sampled(1.5, 40, 1, 1e-5, q) for q in (0.05, 0.2, 0.5, 1.0)]
    assert by_share == sorted(by_share)
    assert epsilon_sampled(1.5, 40, 2, 1e-5, 0.2) > epsilon_sampled(1.5, 40, 1, 1e-5, 0.2)


def test_the_sampled_epsilon_is_the_librarys():
    """The setting of the DP-SGD tutorials: 250 of 60,000 examples, z = 1.1, 60 epochs, ε ≈ 3.0 at δ = 10⁻⁵."""
    pytest.importorskip("dp_accounting", reason=REASON)
    dp = library()
    accountant = dp.rdp.RdpAccountant()
    accountant.compose(dp.PoissonSampledDpEvent(250 / 60_000, dp.GaussianDpEvent(1.1)), 14_400)
    ours = epsilon_sampled(1.1, 14_400, 1, 1e-5, 250 / 60_000)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=0.02)
    assert 2.5 < ours < 3.1


def test_the_record_shows_the_budget():
    pytest.importorskip("dp_accounting", reason=REASON)
    more = {"privacy.clip": 1.0, "privacy.noise": 2.0, "federation.active": 0.5}
    result = run_rounds(assemble(configured(**more)), None)
    spent = [line["epsilon"] for line in result.history]
    assert spent == sorted(spent)
    uploads = result.summary["privacy"]["uploads"]
    assert spent[-1] == result.summary["privacy"]["epsilon"] == epsilon(2.0, uploads, 1e-5)
    assert result.summary["privacy"]["epsilon_sampled"] is None


def test_the_most_uploads_of_a_round_are_kept_over_the_rounds():
    stage = Privacy(Mechanism(clip=1.0))
    states = [PrivacyState(torch.tensor(uploads)) for uploads in ([0, 0], [2, 1], [3, 2], [3, 2])]
    done = states[0]
    for before, after in pairwise(states):
        done = stage.finished(before._replace(at_once=done.at_once), after)
    assert done.at_once == 2
