"""What every registered method must keep, on small problems that it fits. Registering a method puts it in here."""

from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from coterie.experiment.build import Parts, assemble, make_problem
from coterie.experiment.config import Config, resolve
from coterie.experiment.loop import Result, run_rounds
from coterie.methods.registry import METHODS, MethodEntry, method_entry
from coterie.problems import Context
from coterie.problems.catalogue.registry import PROBLEMS, problem_entry
from coterie.testing import methods as checks
from coterie.testing.comparing import assert_near, assert_on_simplex, assert_same, recorded, values
from coterie.testing.methods import SMALL as SIZES

__all__ = ["assert_near", "assert_on_simplex", "assert_same", "recorded", "values"]  # for other tests

SMALL = {name: SIZES[name] for name in ("quadratic", "friends")}

FEW = {"local_steps": 2}
DISTILLERS = ("feddf", "ds-fl", "fed-et")
DISTIL = {**FEW, "distil_steps": 2, "distil_rows": 8}
QUICK: dict[str, dict[str, Any]] = {
    "pfedme": {"local_steps": 2, "inner_steps": 3},
    "bilevel": {"step": 0.05, "system_step": 5e-4, "local_steps": 2, "steps": 4, "refresh": 0.02},
    **dict.fromkeys(("heterofl", "federated-dropout", "fedrolex", "homogeneous", "zerofl", "flash"), FEW),
    **dict.fromkeys(DISTILLERS, DISTIL),
    "fedsep-submodel": {**FEW, "decode_steps": 2},
    "feddst": {**FEW, "readjust": 2},
    **{key: {**FEW, "personal": ["*bias"]} for key in ("fedper", "fedrep", "fedbn")},  # small problems have one layer
    "fedala": {**FEW, "first_steps": 2, "weight_steps": 2},
    "fedcollab": {**FEW, "divergence_rounds": 2, "divergence_steps": 2},
    **dict.fromkeys(("fedfomo", "fedamp", "apple", "pfedgraph", "cobo", "dpfl", "fedawa", "feddisco", "fedce"), FEW),
    "fedlaw": {**FEW, "weight_steps": 3},
}
"""Settings that save time, or that a method needs on small problems."""
BRIEF = {
    **dict.fromkeys(("local_steps", "personal_steps", "head_steps", "inner_rounds", "stage_epochs"), 2),
    **dict.fromkeys(("terms", "inner_steps", "mirror_steps", "decode_steps", "encode_steps", "solve_steps"), 3),
}
"""More such settings, for every method whose default is larger; the stored digests are older."""
STEPS = {"step": 0.1, "outer_step": 0.05}
CHOSEN: dict[str, dict[str, Any]] = {
    "primal-dual": {"local_steps": 2},
    **dict.fromkeys(("saba", "ma-soba", "stocbio", "fedbio", "fedbioacc", "simfbo"), STEPS),  # SOBA estimates its own
}
"""And for methods that else choose more steps, or estimate the length of steps, in the first round."""

MISFITS = {("exact-gd", "friends"): "the Hessian of logistic regression without a penalty is singular"}


def size(problem: str) -> dict[str, Any]:
    """Settings that make a problem small: those above, or else few clients."""
    few = {"clients": 5} if "clients" in signature(problem_entry(problem).make).parameters else {}
    return SIZES.get(problem, few)


WEIGHTS = frozenset({"gradient", "hvp", "target"})
OFFERS: dict[str, frozenset[str]] = {
    "quadratic": WEIGHTS | {"friends", "optimal-weights"},
    "friends": WEIGHTS | {"friends", "groups", "everyone", "classes"},
    "nested-quadratic": frozenset({"nested"}),
    "minimax-quadratic": frozenset({"nested", "minimax"}),
    "submodels": frozenset({"gradient", "hvp", "submodels", "public", "classes"}),
}
"""What the problems above offer, written down so that collecting tests builds none of them; a test compares."""


def offers(problem: str) -> frozenset[str]:
    """What a problem offers at its small size."""
    return OFFERS.get(problem, frozenset())


@pytest.mark.parametrize("problem", OFFERS)
def test_the_table_of_offers_is_that_of_the_problems(problem: str) -> None:
    assert problem_entry(problem).make(Context(), **size(problem)).offers == OFFERS[problem]


def problems_for(entry: MethodEntry) -> list[str]:
    """The small problems that a method fits, or else the first registered one."""
    method = entry.make()
    small = [name for name in SMALL if method.fits(offers(name)) and (entry.name, name) not in MISFITS]
    return small or [p.name for p in PROBLEMS if p.name not in SMALL and method.fits(offers(p.name))][:1]


@cache
def built(problem: str, dtype: str) -> Any:
    """A small problem, built once: runs share it, as those of one experiment do."""
    run = {"method": METHODS[0].name, "problem": problem, "dtype": dtype, "threads": 1, "baselines": []}
    return make_problem(resolve({"run": run, "problem": size(problem)}))


@dataclass(frozen=True)
class Case:
    """A method on a problem; a brief one is for what holds whatever the settings are."""

    method: str
    problem: str
    brief: bool = False
    rounds: int = 3

    def config(
        self, *, rounds: int | None = None, dtype: str = "float64", full: bool = False, **federation: Any
    ) -> Config:
        return resolve(
            {
                "run": {
                    "method": self.method,
                    "problem": self.problem,
                    "rounds": rounds or self.rounds,
                    "dtype": dtype,
                    "threads": 1,
                    "baselines": [],
                },
                "method": {
                    **(self._shortened if self.brief else {}),
                    **QUICK.get(self.method, {}),
                    **(checks.full_batches(method_entry(self.method).make) if full else {}),
                },
                "problem": size(self.problem),
                "federation": {"mode": "vmap", **federation},
            }
        )

    @property
    def _shortened(self) -> dict[str, Any]:
        known = signature(method_entry(self.method).make).parameters
        defaults = {key: known[key].default for key in BRIEF if key in known}
        shorter = {key: BRIEF[key] for key, value in defaults.items() if isinstance(value, int) and value > BRIEF[key]}
        return {**shorter, **CHOSEN.get(self.method, {})}

    @property
    def dtypes(self) -> tuple[checks.Dtype, ...]:
        return checks.BOTH

    def parts(self, **settings: Any) -> Parts:
        config = self.config(**settings)
        return assemble(config, None, built(self.problem, config.run.dtype))

    def run(self, **settings: Any) -> Result:
        return run_rounds(self.parts(**settings), None)


CASES = [Case(entry.name, problem, brief=True) for entry in METHODS for problem in problems_for(entry)]
FIRST = [Case(entry.name, problem, brief=True) for entry in METHODS for problem in problems_for(entry)[:1]]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method}-{case.problem}")
first = pytest.mark.parametrize("case", FIRST, ids=lambda case: case.method)

SAMPLE = {
    *("meritfed", "bilevel", "primal-dual", "afl", "collaborate", "fednest", "fednest-weights"),
    *("fedavg", "ditto", "local-svrg", "krum", "top-k", "fedsep", "fedsep-submodel", "ds-fl"),
}
"""One or two methods of each family. Sweeps over all methods that cost much take these; `make test-all` takes all."""


def sampled(cases: list[Case]) -> list[Any]:
    """Cases for `parametrize`, slow ones where neither the method nor the problem adds a new kind."""
    quick = [case.method in SAMPLE and case in FIRST for case in cases]
    return [case if now else pytest.param(case, marks=pytest.mark.slow) for case, now in zip(cases, quick, strict=True)]


some = pytest.mark.parametrize("case", sampled(FIRST), ids=lambda case: case.method)


def test_every_method_is_named_as_registered_and_has_a_problem() -> None:
    names = [entry.name for entry in METHODS]
    assert len(set(names)) == len(names)
    assert [entry.make().name for entry in METHODS] == names
    assert [entry.name for entry in METHODS if not problems_for(entry)] == []


@pytest.mark.parametrize("entry", METHODS, ids=lambda entry: entry.name)
def test_settings_are_checked_and_kept(entry: MethodEntry) -> None:
    checks.settings_are_checked_and_kept(entry.make)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=[] if dtype == "float32" or case in FIRST else [pytest.mark.slow])
        for case in CASES
        for dtype in checks.BOTH
    ],
    ids=lambda value: f"{value.method}-{value.problem}" if isinstance(value, Case) else value,
)
def test_a_round_keeps_structure_shapes_and_type(case: Case, dtype: checks.Dtype) -> None:
    checks.a_round_keeps_structure_shapes_and_type(case, dtype)


@first
def test_a_checkpoint_gives_the_state_back_bit_by_bit(case: Case, tmp_path: Path) -> None:
    checks.a_checkpoint_gives_the_state_back(replace(case, rounds=2), tmp_path)


@pytest.mark.parametrize("case", sampled(CASES), ids=lambda case: f"{case.method}-{case.problem}")
def test_an_interrupted_run_goes_on_bit_by_bit(case: Case, tmp_path: Path) -> None:
    checks.an_interrupted_run_goes_on_bit_by_bit(case, tmp_path)


@pytest.mark.parametrize("case", sampled(CASES), ids=lambda case: f"{case.method}-{case.problem}")
def test_engines_agree_in_values_and_ledger(case: Case) -> None:
    # Adam divides by the size of a gradient: where that is nearly 0, single precision would compare rounding errors
    checks.modes_agree_in_values_and_ledger(case, "float64" if case.method in DISTILLERS else "float32")


@pytest.mark.chunk_free
@some
@pytest.mark.parametrize("mode", ["vmap", "sequential"])
def test_chunks_do_not_change_a_bit(case: Case, mode: str) -> None:
    checks.chunks_do_not_change_a_bit(case, mode)


@some
def test_permuting_clients_permutes_their_weights(case: Case) -> None:
    reason = checks.permuting_clients_permutes_their_weights(case)
    if reason is not None:
        pytest.skip(reason)


def test_full_batches_leave_no_draw_to_the_first_methods() -> None:
    """So that the permutation test above cannot come to skip everything."""
    for method in ("fedavg", "local-train", "meritfed"):
        parts = assemble(Case(method, "quadratic").config(full=True))
        one, two = (run_rounds(parts._replace(config=parts.config.with_run(seed=s)), None) for s in (0, 1))
        assert_same(one.state, two.state)


@some
@pytest.mark.parametrize(
    "participation",
    [pytest.param({"active": 0.5}, marks=pytest.mark.slow), {"count": 2}],  # other tests here have some active, too
    ids=["half", "two"],
)
def test_some_clients_are_enough(case: Case, participation: dict[str, Any]) -> None:
    checks.some_clients_are_enough(case, participation)


@some
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_weights_stay_on_the_simplex(case: Case, dtype: checks.Dtype) -> None:
    result = checks.weights_stay_on_the_simplex(case, dtype)
    if result.view.weights is None:
        assert not method_entry(case.method).learns_weights or "nested" in offers(case.problem)


@first
def test_a_round_is_pure(case: Case) -> None:
    checks.a_round_is_pure(replace(case, rounds=1))
