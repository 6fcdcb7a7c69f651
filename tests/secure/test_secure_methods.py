"""Methods in the form of sums and single numbers: they give what they give in the open, and the others are refused."""

import sys
from typing import Any

import pytest
import torch
from test_conformance import CASES

from coterie.errors import NoClients, UsageError
from coterie.experiment.build import assemble, build_problem_and_method
from coterie.experiment.config import FederationTable, resolve
from coterie.experiment.loop import run_rounds
from coterie.experiment.rehearsal import rehearsed
from coterie.federation.tree import named_leaves
from coterie.methods.registry import METHODS, method_entry

SETTING = {"meritfed": {"solver": "lagged", "mirror_step": 0.01}, "primal-dual": {"scalar": "client"}}
HIDDEN = [entry.name for entry in METHODS if entry.secure != "no"]
CORE = (
    "meritfed",
    "primal-dual",
    "bilevel",
    "fedavg",
    "fednest",
    "fedsep",
    "krum",
    "afl",
    "top-k",
)  # the others are slow


def quick(names: list[str], *, slow: tuple[str, ...] = ()) -> list[Any]:
    """One case per method; those outside of the core are slow."""
    marks = {name: [] if name in CORE and name not in slow else [pytest.mark.slow] for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


def config_of(method: str, **federation: Any) -> Any:
    case = next(case for case in CASES if case.method == method)
    config = case.config(dtype="float64", mode="vmap", rounds=2)
    tables = config.as_dict()
    tables.pop("version")
    tables["method"] = {**tables["method"], **SETTING.get(method, {})}
    tables["federation"] = {**tables["federation"], **federation}
    return resolve(tables)


def assert_near(one: Any, two: Any) -> None:
    """States that differ by fixed point at most."""
    for (name, a), (_, b) in zip(named_leaves(one), named_leaves(two), strict=True):
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            assert torch.allclose(a, b, rtol=1e-8, atol=1e-8), name


@pytest.mark.parametrize("name", quick([entry.name for entry in METHODS]))
def test_the_list_says_which_methods_can_be_secure(name: str) -> None:
    """Whether a reply that is no single number is gathered, by a rehearsal in which nothing is refused."""
    entry = method_entry(name)
    config = config_of(entry.name)
    problem, method = build_problem_and_method(config)
    table = FederationTable(secure=True, reveal=10**9, target=config.federation.target)
    prospect = rehearsed(method, problem, table)
    assert not prospect.cut
    shown = {row.what for row in prospect.seen.rows("server")} - {"sizes", "sums", "single numbers", "losses"}
    assert (entry.secure != "no") == (not shown), shown


@pytest.mark.parametrize("method", quick(HIDDEN))
def test_secure_is_plain_up_to_the_fixed_point(method: str) -> None:
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    plain = run_rounds(assemble(config_of(method)), None)
    secure = run_rounds(assemble(config_of(method, secure=True)), None)
    assert secure.summary["outcome"] == plain.summary["outcome"] == "finished"
    assert secure.events == plain.events
    assert_near(plain.state, secure.state)
    kinds = {row.what for row in secure.ledger.seen.rows("server")}
    assert "whole updates" not in kinds
    if any(cause.startswith("secure/") for cause in secure.ledger.by_cause):
        assert "sums" in kinds
        assert secure.ledger.total.bytes_up > plain.ledger.total.bytes_up
        assert secure.ledger.by_cause["secure/shares"].rounds == secure.ledger.by_cause["secure/reveal"].rounds > 0


def test_primal_dual_is_plain_with_some_of_the_clients() -> None:
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    tables = config_of("primal-dual", count=4).as_dict()
    tables.pop("version")
    tables["problem"]["clients"] = 6
    tables["method"] |= {"outer_step": 0.05, "local_steps": 3}
    secure = {**tables, "federation": {**tables["federation"], "secure": True}}
    one, two = (run_rounds(assemble(resolve(each)), None) for each in (tables, secure))
    assert len(one.view.weights) == 6
    assert float((one.view.weights - 1 / 6).abs().max()) > 1e-3
    assert_near(one.state, two.state)


@pytest.mark.parametrize("method", ["krum", "collaborate", "trimmed-mean", "afl"])
def test_a_method_that_needs_rows_of_updates_is_refused_before_anything_starts(method: str) -> None:
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    said = r"cannot be run so: .* shows \d+ numbers of each client .* list methods.* use bilevel, meritfed with"
    with pytest.raises(UsageError, match=said):
        assemble(config_of(method, secure=True, reveal=0))


@pytest.mark.parametrize(
    ("method", "settings", "instead"),
    [
        ("meritfed", {"solver": "mirror"}, 'meritfed can be secure with solver = "lagged" or "projected"'),
        ("primal-dual", {"scalar": "server"}, 'primal-dual can be secure with scalar = "client"'),
    ],
)
def test_a_method_that_could_be_secure_says_with_which_setting(
    method: str, settings: dict[str, Any], instead: str
) -> None:
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    tables = config_of(method, secure=True, reveal=0).as_dict()
    tables.pop("version")
    with pytest.raises(UsageError, match=instead):
        assemble(resolve({**tables, "method": {**tables["method"], **settings}}))


def friends(**changes: Any) -> Any:
    tables: dict[str, Any] = {
        "run": {"problem": "friends", "method": "meritfed", "rounds": 2, "dtype": "float64", "baselines": []},
        "problem": {"validation": 20, "test": 20, "clients": 8, "friends": 4},
        "method": {"mirror_steps": 2, "mirror_step": 5.0, "batch": 6},
        "federation": {"mode": "vmap"},
    }
    for key, value in changes.items():
        table, _, name = key.partition("_")
        tables[table][name] = value
    return resolve(tables)


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("active", [1.0, 0.7])
@pytest.mark.parametrize("mirror", ["md", "smd"])
def test_sums_and_projections_are_the_mirror_steps(local_steps: int, active: float, mirror: str) -> None:
    """The two-message form of MeritFed, without any mask, equals the plain one."""
    shared = {"method_local_steps": local_steps, "federation_active": active, "method_mirror": mirror}
    shared |= {"method_mirror_batch": 10}
    plain = run_rounds(assemble(friends(**shared)), None).state
    projected = run_rounds(assemble(friends(**shared, method_solver="projected")), None).state
    assert (plain.w - plain.w.mean()).abs().max() > 1e-3  # the weights moved
    assert (plain.w - projected.w).abs().max() <= 1e-12
    assert (plain.x - projected.x).abs().max() <= 1e-12


def test_meritfed_in_secret_learns_the_same_friends() -> None:
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    settings = {"method_solver": "projected", "method_mirror_steps": 1, "method_batch": "all"}
    settings |= {"problem_clients": 16, "problem_friends": 8}
    plain = run_rounds(assemble(friends(**settings)), None)
    secure = run_rounds(assemble(friends(**settings, federation_secure=True)), None)
    assert secure.summary["outcome"] == "finished", secure.summary["message"]
    assert_near(plain.state, secure.state)
    seen = {(row.what, row.cause): row.seen for row in secure.ledger.seen.rows("server")}
    assert seen["sums", "meritfed/direction"] == (4810, 16)
    assert seen["single numbers", "meritfed/projection"] == (1, 1)
    assert {what for what, _ in seen} == {"sums", "single numbers", "sizes"}


def test_the_lagged_form_asks_for_one_sum_per_round_and_finds_the_friends() -> None:
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    settings = {"method_solver": "lagged", "method_mirror_steps": 10, "method_mirror_step": 0.1, "run_rounds": 6}
    settings |= {"method_batch": "all"}
    plain = run_rounds(assemble(friends(**settings)), None)
    secure = run_rounds(assemble(friends(**settings, federation_secure=True)), None)
    assert plain.ledger.by_cause["meritfed/direction"].rounds == 6
    assert plain.ledger.by_cause["meritfed/projection"].rounds == 6
    assert secure.summary["outcome"] == "finished", secure.summary["message"]
    assert torch.allclose(plain.state.w, secure.state.w, atol=1e-7)
    assert float(secure.state.w[:4].sum()) > 0.55


def test_too_many_mirror_steps_would_show_the_gradients_and_are_refused() -> None:
    """With as many sums of the same gradients as clients, the server could solve for each of them."""
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    with pytest.raises(UsageError, match=r"5 sums of the same updates of 8 clients .* lower method.mirror_steps"):
        assemble(friends(method_solver="projected", method_mirror_steps=8, federation_secure=True))


def test_clients_that_fail_are_left_out_and_too_few_skip_the_round() -> None:
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    tables = friends(federation_secure=True).as_dict()
    tables.pop("version")
    tables["run"]["method"] = "fedavg"
    tables["method"] = {"local_steps": 2, "weights": "uniform"}
    tables["faults"] = {"crash": 0.15}
    tables["run"]["rounds"] = 6
    result = run_rounds(assemble(resolve(tables)), None)
    assert result.summary["outcome"] == "finished"
    assert {event["event"] for event in result.events} >= {"crashed"}
    few = next(row.seen.clients for row in result.ledger.seen.rows("server") if row.what == "sums")
    assert 6 <= few < 8
    tables["faults"] = {"crash": 0.9}
    result = run_rounds(assemble(resolve(tables)), None)
    assert result.summary["outcome"] == "failed"
    assert "a secure sum needs 6" in result.summary["message"]


def test_a_value_out_of_range_is_refused_and_named() -> None:
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    parts = assemble(friends(method_solver="lagged", federation_secure=True, federation_range=1e-6))
    result = run_rounds(parts, None)
    assert result.summary["outcome"] == "failed"
    assert any("exceeds federation.range = 1e-06" in event["reason"] for event in result.events)


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("clip", 3.0, "federation.clip looks at single updates"),
        ("norm", 3.0, "federation.norm looks at single updates"),
        ("compress", "top-k", "federation.compress looks at single updates"),
        ("count", 1, "secure sums over 1 client would show single updates"),
        ("partners", 9, "partners = 9 asks for more"),
        ("range", 1e18, "leaves -1 binary digits"),
        ("threshold", 0.5, "greater than 0.5"),
    ],
)
def test_settings_that_a_secure_run_cannot_keep_are_refused_with_a_remedy(setting: str, value: Any, said: str) -> None:
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    with pytest.raises((UsageError, NoClients), match=said):
        assemble(friends(method_solver="lagged", federation_secure=True, **{f"federation_{setting}": value}))


def test_without_the_package_a_secure_run_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UsageError, match=r"pip install 'coterie\[secure\]'"):
        assemble(friends(method_solver="projected", federation_secure=True))
