"""Every method that a real federation can run, on small problems, with what it gives locally."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from coterie.errors import UsageError
from coterie.experiment.build import ONLY_SIMULATED, assemble, make_problem
from coterie.experiment.config import Config, load
from coterie.experiment.loop import Result, run_rounds
from coterie.methods.registry import METHODS

WEIGHTING: dict[str, object] = {"problem__everyone": True}
NESTED: dict[str, object] = {"run__problem": "nested-quadratic", "run__method": "fednest"}
MINIMAX: dict[str, object] = {"run__problem": "minimax-quadratic", "run__method": "fedavg-s"}
SUBMODELS: dict[str, object] = {"run__problem": "submodels", "run__method": "heterofl"}
ELSEWHERE = {"krum", "multi-krum", "exact-gd"}  # they need more clients, or settings of their own
ELSEWHERE |= {"fedper", "fedrep", "fedbn"}  # and these models of several layers
EVERY_KIND = (WEIGHTING, NESTED, MINIMAX, SUBMODELS)


def on_problem(settings: dict[str, object], engine: str = "flower") -> tuple[Config, dict[str, Result]]:
    """What every method that a real federation can run on a problem of this size gives locally."""
    config = configuration(engine, run__rounds=1, **settings)
    problem = make_problem(config)
    special = {"submodels"} & problem.offers
    results = {}
    for entry in METHODS:
        method = entry.make()
        if method.needs & ONLY_SIMULATED or not special <= method.needs or not method.fits(problem.offers):
            continue
        with suppress(UsageError):  # krum and its like need more clients
            result = locally(config.for_baseline(entry.name))
            if result.summary["outcome"] == "finished":
                results[entry.name] = result
    return config, results


def deployable() -> set[str]:
    return {entry.name for entry in METHODS if not entry.make().needs & ONLY_SIMULATED}


def configuration(engine: str = "flower", **flags: Any) -> Config:
    """Three clients with few rows each."""
    given = {
        "run.problem": "friends",
        "run.method": "meritfed",
        "run.rounds": 2,
        "run.threads": 1,
        "run.engine": engine,
        "run.baselines": [],
        "problem.model": "logistic",
        "problem.clients": 3,
        "problem.friends": 1,
        "problem.test": 1500,
        "federation.mode": "sequential",
        "federation.timeout": 300.0,
        "federation.patience": 300.0,
    }
    given |= {key.replace("__", "."): value for key, value in flags.items()}
    if given["run.problem"] != "friends":  # the sizes above are its settings
        given = {
            key: value for key, value in given.items() if not key.startswith("problem.") or key == "problem.clients"
        }
    return load(flags=given)


def locally(config: Config) -> Result:
    return run_rounds(assemble(config.with_run(engine="local")), None)


def saved_model(config: Config, result: Result) -> torch.Tensor:
    """The model of a result in the order in which it is saved."""
    named = make_problem(config).named(result.view)
    return torch.cat([named[name].reshape(-1) for name in sorted(named)])


def assert_as_locally(folder: Path, config: Config, local: dict[str, Result]) -> None:
    """The models and ledgers of a run and of its baselines."""
    for name, result in local.items():
        place = folder if name == config.run.method else folder / "baselines" / name
        ledger = json.loads((place / "ledger.json").read_text())
        assert {**ledger, "wire": 0} == {**result.ledger.as_dict(), "wire": 0}, name
        theta = torch.cat([t.reshape(-1) for t in load_file(place / "model.safetensors").values()])
        here = saved_model(config, result)
        torch.testing.assert_close(theta, here, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
