"""What leaves a client is no longer than the clip, noisy by the scale that was set, and worth what the library says."""

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from coterie.errors import UsageError
from coterie.experiment.build import assemble, check_deployable
from coterie.experiment.config import Config, load
from coterie.experiment.loop import run_rounds
from coterie.federation import Attack, Attacked, Federation, LocalEngine, Memory, moved_from, work
from coterie.federation.faults import Faults, Faulty
from coterie.federation.privacy import Mechanism, Private, epsilon, epsilon_sampled, innermost, library
from coterie.federation.work import held
from coterie.numerics import Draw

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
    def make(clip: float, noise: float = 0.0, n: int = N, **options: Any) -> Federation:
        fed = tiny(n, **options)
        return replace(fed, engine=Private(fed.engine, Mechanism(clip, noise), torch.zeros(n, dtype=torch.int64)))

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
    again = fed.gather(wide, draw=DRAW.phase("a")).rows
    assert torch.equal(rows, again)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_do_not_change_a_bit(hiding, chunk):
    one, two = (hiding(1.0, 1.0, chunk=size).gather(reply, draw=DRAW).rows for size in (None, chunk))
    assert torch.equal(one["v"], two["v"])
    assert torch.equal(one["s"], two["s"])


def test_memory_stays_as_it_is_and_nonsense_stays_nonsense(hiding):
    fed = hiding(1.0, 1.0)
    _, after = fed.gather(kept, memory=Memory(torch.zeros(N)), draw=DRAW)
    assert held(after).tolist() == [1.0] * N
    fed.book.drain()
    with pytest.raises(Exception, match="no client answered"):
        fed.gather(broken, draw=DRAW)
    assert {event["reason"] for event in fed.book.drain()} == {"not finite"}


def test_whole_numbers_cannot_be_hidden(hiding):
    with pytest.raises(UsageError, match=r"counted sends whole numbers .* which noise cannot hide; choose a method"):
        hiding(1.0, 1.0).gather(counted, draw=DRAW)


def test_uploads_are_counted_by_client_asked(hiding):
    fed = hiding(1.0)
    fed.gather(reply, draw=DRAW)
    replace(fed, ids=torch.tensor([1, 4])).mean(reply, draw=DRAW)
    fed.ask_target(wide, draw=DRAW)
    assert fed.engine.uploads.tolist() == [1, 2, 1, 1, 2, 1]


def test_it_is_nearest_to_the_clients(tiny):
    fed = tiny(N)
    layers = Faulty(Attacked(fed.engine, Attack("scaled", 3)), Faults(crash=0.1))
    found = innermost(layers, lambda engine: Private(engine, Mechanism(1.0), torch.zeros(N, dtype=torch.int64)))
    assert [type(e) for e in (found, found.engine, found.engine.engine)] == [Faulty, Attacked, Private]
    assert isinstance(found.engine.engine.engine, LocalEngine)
    rows = Federation.on(found.engine).gather(stroll, torch.zeros(1, dtype=torch.float64), draw=DRAW).rows
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


def test_nodes_of_a_network_are_not_claimed_to_be_private():
    parts = assemble(configured(**{"privacy.clip": 1.0}))
    with pytest.raises(UsageError, match=r"would have to draw the noise themselves.*Leave it out"):
        check_deployable(parts.config.with_run(engine="flower"), parts.method, parts.problem)


def test_without_the_library_noise_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UsageError, match=r"pip install 'coterie\[privacy\]'.*privacy\.noise=0"):
        assemble(configured(**{"privacy.clip": 1.0, "privacy.noise": 1.0}))


# the accountant

REASON = "needs coterie[privacy]"


def test_epsilon_is_that_of_the_exact_gaussian_mechanism():
    """δ = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ) (Balle and Wang 2018), with σ = z/√T."""
    pytest.importorskip("dp_accounting", reason=REASON)

    def delta(sigma: float, eps: float) -> float:
        phi = torch.distributions.Normal(0.0, 1.0).cdf
        a, b = torch.tensor([0.5 / sigma - eps * sigma, -0.5 / sigma - eps * sigma], dtype=torch.float64)
        return float(phi(a) - math.exp(eps) * phi(b))

    for z, T in ((1.0, 1), (4.0, 10), (10.0, 200)):
        eps = epsilon(z, T, 1e-5)
        assert delta(z / math.sqrt(T), eps) == pytest.approx(1e-5, rel=1e-3)


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
    assert result.summary["privacy"]["epsilon_sampled"] == epsilon_sampled(2.0, 5, 1, 1e-5, 0.5)
