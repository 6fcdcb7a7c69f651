"""Clipping and noise at nodes: of the right size, from the system's entropy, in the open and in parts; and budgets."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import network
from test_secure_methods import config_of
from test_secure_nodes import NAMES, Rows, double, hosts

from coterie.experiment.build import assemble
from coterie.experiment.config import resolve
from coterie.experiment.loop import run_rounds
from coterie.federation import Federation
from coterie.federation.api import Book
from coterie.federation.remote import PERMISSIVE, InProcess, NodePolicy, RemoteEngine, Store, node_for
from coterie.federation.remote.disclosures import Disclosures
from coterie.federation.remote.messages import NoiseOrder
from coterie.federation.remote.node import Record
from coterie.federation.remote.noise import gaussian
from coterie.federation.secure import Secure
from coterie.numerics import Draw

needs_keys = pytest.mark.skipif(
    not pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'"), reason=""
)
WIDE = 4000


def federated(
    noise: NoiseOrder, secure: Secure | None = None, problem: Rows | None = None, **options: Any
) -> Federation:
    problem = problem or Rows(6, WIDE)
    book = Book()
    nodes = InProcess(hosts(problem, **options))
    engine = RemoteEngine(nodes, None, problem.train, own_sizes=True, names=NAMES, book=book, noise=noise)
    engine.connect()
    return Federation.on(engine, book=book, secure=secure)


def ask(fed: Federation, width: int = WIDE) -> torch.Tensor:
    rows: torch.Tensor = fed.gather(double, torch.zeros(width, dtype=torch.float64), draw=Draw.of(0)).rows
    return rows


def mean(fed: Federation) -> torch.Tensor:
    found: torch.Tensor = fed.mean(double, torch.zeros(WIDE, dtype=torch.float64), draw=Draw.of(0))
    return found


def near(deviation: float, count: int) -> Any:
    """Within 5 standard errors."""
    return pytest.approx(deviation, rel=5 / math.sqrt(2 * count))


def test_numbers_from_entropy_are_gaussian() -> None:
    drawn = gaussian(20_001)
    assert len(drawn) == 20_001
    assert abs(drawn.mean()) < 5 / math.sqrt(20_001)
    assert drawn.std() == near(1.0, 20_001)
    assert np.mean(np.abs(drawn) < 1.959964) == pytest.approx(0.95, abs=0.01)


def test_noise_at_the_site_is_new_every_time_and_not_of_the_seed() -> None:
    clipped = ask(federated(NoiseOrder(3.0, 0.0)))
    assert clipped.norm(dim=1).tolist() == pytest.approx([0.0, *[3.0] * 5])
    one, two = (ask(federated(NoiseOrder(3.0, 0.5))) for _ in range(2))  # the same draw twice
    for noisy in (one, two):
        assert float((noisy - clipped).std()) == near(1.5, 6 * WIDE)
    assert float((one - two).std()) == near(1.5 * math.sqrt(2), 6 * WIDE)


def test_the_parts_of_the_noise_add_up_in_a_secure_sum() -> None:
    """Each of 6 clients adds deviation zC/√4, since 4 must stay: the sum has zC·√(6/4), never less than zC."""
    plain = mean(federated(NoiseOrder(3.0, 0.0), Secure()))
    noisy = mean(federated(NoiseOrder(3.0, 0.5), Secure()))
    assert 6 * float((noisy - plain).std()) == near(1.5 * math.sqrt(6 / 4), WIDE)


def test_a_site_beyond_its_budget_refuses_also_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="needs coterie[privacy]")
    from coterie.federation.stages.privacy import epsilon

    allowed = epsilon(2.0, 3, 1e-5)  # three uploads
    policy = NodePolicy(least_batch=1, seconds=0.0, epsilon=allowed + 1e-9)
    problem = Rows(1, 5)

    def fed(noise: NoiseOrder) -> Federation:
        book = Book()
        node = node_for(problem, (0,), policy=policy, names=NAMES, store=Store(tmp_path))
        engine = RemoteEngine(
            InProcess({0: node}), None, problem.train, own_sizes=True, names=NAMES, book=book, noise=noise
        )
        engine.connect()
        return Federation.on(engine, book=book)

    first = fed(NoiseOrder(1.0, 2.0))
    ask(first, 5)
    with pytest.raises(Exception, match="no client answered"):
        ask(fed(NoiseOrder(1.0, 0.0)), 5)
    again = fed(NoiseOrder(1.0, 2.0))  # the same site, restarted
    ask(again, 5)
    ask(again, 5)
    with pytest.raises(Exception, match="no client answered"):
        ask(again, 5)
    (event,) = again.book.drain()
    assert event["event"] == "refused"
    assert "above its budget of epsilon" in event["reason"]


def test_without_a_budget_noise_is_not_demanded() -> None:
    assert PERMISSIVE.epsilon == 0.0
    assert ask(federated(NoiseOrder(1.0, 0.0), problem=Rows(2, 5)), 5).shape == (2, 5)


@needs_keys
@pytest.mark.parametrize("secure", [False, True])
def test_a_run_on_nodes_counts_what_it_spends(secure: bool) -> None:
    pytest.importorskip("dp_accounting", reason="needs coterie[privacy]")
    from coterie.federation.stages.privacy import epsilon

    tables = config_of("fedavg", secure=secure, clip="none").as_dict()
    tables.pop("version")
    tables["privacy"] = {"clip": 1.0, "noise": 2.0}
    tables["run"] |= {"engine": "flower", "baselines": []}
    result = run_rounds(assemble(resolve(tables), network()), None)
    assert result.summary["outcome"] == "finished", result.summary["message"]
    assert result.summary["privacy"]["uploads"] == 2
    assert result.summary["privacy"]["epsilon"] == pytest.approx(epsilon(2.0, 2, 1e-5))
    assert not any("the seed" in line for line in result.summary["privacy"]["not_covered"])


def exact_epsilon(multiplier: float, releases: int, delta: float) -> float:
    """ε of T releases of the Gaussian mechanism, by the closed form of Balle and Wang (2018) and scipy alone: with
    σ = z/√T, δ(ε) = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ), which falls with ε."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    sigma = multiplier / math.sqrt(releases)

    def excess(epsilon: float) -> float:
        above = norm.cdf(0.5 / sigma - epsilon * sigma)
        return float(above - math.exp(epsilon + norm.logcdf(-0.5 / sigma - epsilon * sigma)) - delta)

    return float(brentq(excess, 0.0, 200.0, xtol=1e-12))


def sites(journals: dict[int, list[Record]], folder: Path) -> Any:
    """A network of nodes that count their own budget, and write down every order."""

    def make(config: Any, problem: Any) -> InProcess:
        policy = NodePolicy(least_batch=1, seconds=0.0, epsilon=1e6, delta=1e-5)
        here = {}
        for k in range(problem.clients):
            journals[k] = []
            store, note = Store(folder / str(k)), journals[k].append
            here[k] = node_for(problem, (k,), policy=policy, store=store, shares_memory=True, journal=note)
        return InProcess(here)

    return make


@needs_keys
@pytest.mark.parametrize("secure", [False, True])
def test_epsilon_is_that_of_an_independent_computation_for_what_the_nodes_released(
    secure: bool, tmp_path: Path
) -> None:
    """Releases are the orders of works in the journals of the nodes: in the lagged form of MeritFed two per round, and
    curvatures in the first."""
    pytest.importorskip("dp_accounting", reason="needs coterie[privacy]")
    tables = config_of("meritfed", secure=secure, clip="none", active=0.8, partners=2, threshold=0.51).as_dict()
    tables.pop("version")
    tables["method"] |= {"mirror_step": 1e-6, "tie": 0.9}
    tables["privacy"] = {"clip": 1.0, "noise": 3.0, "delta": 1e-5}
    tables["run"] |= {"engine": "flower", "baselines": [], "rounds": 4}
    journals: dict[int, list[Record]] = {}
    result = run_rounds(assemble(resolve(tables), sites(journals, tmp_path)), None)
    assert result.summary["outcome"] == "finished", result.summary["message"]
    released = {k: sum("/" in line.cause and line.outcome == "done" for line in kept) for k, kept in journals.items()}
    most = max(released.values())
    assert min(released.values()) < most  # not everybody takes part in every round
    assert result.summary["privacy"]["uploads"] == most
    assert result.summary["privacy"]["epsilon"] == pytest.approx(exact_epsilon(3.0, most, 1e-5), abs=1e-6)
    for k, count in released.items():  # and each site has spent its own
        assert Disclosures(tmp_path / str(k)).spent == pytest.approx(count / 3.0**2)
    composed = composed_epsilon(3.0, most, 1e-5)
    assert exact_epsilon(3.0, most, 1e-5) == pytest.approx(composed, rel=5e-3)


def composed_epsilon(multiplier: float, releases: int, delta: float) -> float:
    """The same by dp-accounting's privacy loss distributions, release by release."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(multiplier), releases)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("releases", [1, 7, 60])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0, 8.0])
def test_the_noise_for_a_budget_is_found_and_kept(epsilon: float, releases: int) -> None:
    """As the accuracy table finds it: σ(ε, δ) √T."""
    dp = pytest.importorskip("dp_accounting", reason="needs coterie[privacy]")
    noise = dp.get_sigma_gaussian(epsilon, 1e-5) * math.sqrt(releases)
    assert exact_epsilon(noise, releases, 1e-5) == pytest.approx(epsilon, abs=1e-5)
