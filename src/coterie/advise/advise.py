"""With whom should the target train, and is it worth it? An answer with intervals, from your own files.

1. Screening (screening.py): one held-out comparison per partner, with placebos and Holm's correction.
2. Learned weights, training alone and plain averaging, for every fold of several random orders of the target's rows:
   the fold is the test, of the rest some rows train and the others judge the weights; alone, the target trains on all
   of the rest. The weights are learned again on bootstrap resamples of the judging rows, so that their spread is seen.
3. A paired test of learned weights against alone and against averaging, over the target's rows.
4. What a training costs, how sure the answer is, and how many rows would make it sure.

The answer is plain data (`advice.json`); pages and tables are made of it elsewhere.
"""

from collections.abc import Callable
from dataclasses import replace
from math import ceil, log, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from coterie import machine
from coterie.advise import screening
from coterie.advise.contributions import Contributions, contributions
from coterie.advise.page import figure_text, signed
from coterie.advise.screening import LEVEL, NEGLIGIBLE, Paired, Screened, ScreeningPlan
from coterie.errors import RunError, UsageError
from coterie.experiment.build import Parts, check_needs, federate
from coterie.experiment.config import (
    Config,
    EngineTable,
    FaultsTable,
    FederationTable,
    PrivacyTable,
    RunTable,
    default_baselines,
)
from coterie.experiment.loop import Result, run_rounds
from coterie.experiment.records import prepare
from coterie.federation import Rows, Shard
from coterie.federation.ledger import Ledger
from coterie.methods.registry import method_entry
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.files import PreparedFiles, load_files
from coterie.problems.tasks.supervised import Supervised
from coterie.problems.weighting import Weighting
from coterie.report.results import ADVICE, PROGRESS
from coterie.storage import write_atomically, write_json

ALONE, AVERAGE = "local-train", "fedavg"
SMALL = 1024  # shards up to so many rows are used whole in every step
TUNED_BATCH = 128
ANSWERS = {"yes": "Yes, train together", "no": "Stay alone", "not shown": "Undecided"}
HELPFUL = {  # one partner, and several
    "yes": ("helps", "help"),
    "no": ("comes closest to helping", "come closest to helping"),
    "not shown": ("is worth trying", "are worth trying"),
}
ONE_MACHINE = "advise trains on this machine"
SIMULATED = "advise trains without simulated faults"
UNCOMPRESSED = "advise sends updates as they are"
BRIEF = "the many short trainings of an advice keep no records"
UNUSED = {  # settings that change nothing in an advice, and why; [faults] and [engine] belong to them
    "run.engine": ONE_MACHINE,
    "run.threads": "advise uses one thread",
    "run.compile": "the trainings of an advice are too short for compilation",
    "run.record": BRIEF,
    "run.checkpoint": BRIEF,
    "run.log": BRIEF,
    "run.baselines": "advise always compares with training alone and with plain averaging",
    **dict.fromkeys(("federation.compress", "federation.ratio", "federation.feedback"), UNCOMPRESSED),
    **dict.fromkeys((f"federation.{key}" for key in ("timeout", "retries", "quorum", "patience")), ONE_MACHINE),
}
HARMLESS: dict[str, Any] = {
    "run.threads": 1,
    "run.baselines": [],
}  # besides the defaults
Say = Callable[[str], None]


class Effort(NamedTuple):
    """How much is done: orders of the target's rows, bootstrap resamples, and the screening's plan."""

    repeats: int = 2
    bootstraps: int = 5
    plan: ScreeningPlan = ScreeningPlan()


class StrategyResult(NamedTuple):
    """Held-out errors [n] and right answers [n] of one strategy, by row, averaged over repeats, and one ledger."""

    errors: np.ndarray
    right: np.ndarray | None
    ledger: Ledger


def advise(
    config: Config,
    folder: Path | None = None,
    effort: Effort = Effort(),  # noqa: B008
    *,
    values: str | None = None,
    say: Say = lambda text: None,
    force: bool = False,
) -> dict[str, Any]:
    """The advice as plain data; with a folder, advice.json and the model (MODEL_DIR of `coterie predict`) go there.

    values is None, "loo" or "shapley": contributions beside the weights. say is called with progress messages.
    """
    data = prepare_files(config, effort.repeats)
    if folder is not None:
        prepare(folder, force=force)
        write_atomically(folder / "config.toml", config.as_toml().encode())
        say = _logged(folder / PROGRESS, say)
    K, n = len(data.partners), data.target_rows
    say(f"{K} partners with {sum(h.rows for h in data.holders[:-1]):,} rows; {n:,} rows of your own")
    draw = Draw.of(config.run.seed).phase("advise")
    say(f"screening: {K} × {1 + effort.plan.placebos} models per fold, {effort.plan.folds} folds, trained together")
    screened = screening.screen(data, effort.plan, draw.phase("screening"))
    trials, weights = _strategies(data, config, effort, draw, say)
    found = None if values is None else contributions(data, values, effort.plan, draw.phase("contributions"), say=say)
    learned = trials[config.run.method]
    gains = {name: trials[name].errors - learned.errors for name in (ALONE, AVERAGE)}
    comparisons = {name: screening.paired(gain, effort.plan.folds) for name, gain in gains.items()}
    advice = _advice(data, config, effort, screened, trials, weights, comparisons, found)
    if folder is not None:
        say("training the model on everything")
        _final(data, config, folder / "model")
        write_json(folder / ADVICE, advice)
    return advice


def _logged(path: Path, say: Say) -> Say:
    """The same messages, also kept in a file, so that others see how far the advice has come."""
    said: list[str] = []

    def both(text: str) -> None:
        said.append(text)
        write_atomically(path, "".join(f"{line}\n" for line in said).encode())
        say(text)

    return both


def prepare_files(config: Config, orders: int) -> PreparedFiles:
    """The files of a configuration, read and prepared, with so many random orders of the target's rows."""
    if config.run.problem != "files":
        raise UsageError(f"advise works on problem files, not {config.run.problem}; set run.problem='files'.")
    _check_used(config)
    if config.privacy != PrivacyTable():
        raise UsageError(
            "advise trains many models on the rows as they are and reports on each client: [privacy] would cover none "
            "of it. Leave it out, and train with `coterie run` if the model should be private."
        )
    machine.require(config.run.portable)
    settings = {key: value for key, value in config.problem.items() if key not in ("own", "test")}
    device = machine.checked_device(config.run.device, config.run.dtype)
    context = Context(config.run.seed, getattr(torch, config.run.dtype), device)
    return load_files(context, **settings, orders=orders)


def _check_used(config: Config) -> None:
    """Refuse settings that would change nothing here."""
    defaults = {"run": RunTable(), "federation": FederationTable(), "faults": FaultsTable(), "engine": EngineTable()}
    usual = {f"{name}.{key}": value for name, table in defaults.items() for key, value in table.model_dump().items()}
    usual["run.baselines"] = default_baselines(config.run)
    given = config.settings()
    reasons = {**UNUSED, **{key: SIMULATED for key in usual if key.startswith("faults.")}}
    reasons |= {key: ONE_MACHINE for key in usual if key.startswith("engine.")}
    strange = [key for key in reasons if given[key] not in (usual[key], HARMLESS.get(key, usual[key]))]
    if strange:
        each = "; ".join(f"{key} = {given[key]!r}: {reasons[key]}" for key in strange)
        raise UsageError(f"advise does not use these settings: {each}. Leave them out; `coterie run` uses them.")


def _strategies(
    data: PreparedFiles, config: Config, effort: Effort, draw: Draw, say: Say
) -> tuple[dict[str, StrategyResult], np.ndarray]:
    """Every strategy on every fold of every order; the learned weights of all runs, [runs, K + 1]."""
    folds, n = effort.plan.folds, data.target_rows
    learned = config.run.method
    errors = {name: np.zeros((effort.repeats, n)) for name in (learned, ALONE, AVERAGE)}
    right = {name: np.zeros((effort.repeats, n)) for name in errors}
    ledgers: dict[str, Ledger] = {}
    weights: list[Tensor] = []
    trainer = _Trainer(data, config)
    for r in range(effort.repeats):
        say(f"learned weights, alone, averaging: order {r + 1} of {effort.repeats}, {folds} folds")
        row = _original(data, r)
        for f in range(folds):
            first, last = -(-f * n // folds), -(-(f + 1) * n // folds)
            problem = trainer.split(r, first, last - first)
            test = data.rows(data.span(r, first, last - first)).all()
            for name in errors:
                result = trainer.train(name, problem, config.run.seed + r)
                ledgers.setdefault(name, result.ledger)
                theta = result.view.model
                with torch.no_grad():
                    mine = row[first:last]
                    errors[name][r, mine] = screening.squared_errors(trainer.task, theta, test).double().cpu().numpy()
                    if trainer.task.classes is not None:
                        outputs = trainer.task.model(theta, test.inputs)
                        right[name][r, mine] = (outputs.argmax(1) == test.labels).cpu().numpy()
                if name == learned and result.view.weights is not None:
                    weights.append(result.view.weights)
    for b in range(effort.bootstraps):
        first = -(-(b % folds) * n // folds)
        problem = trainer.split(0, first, n // folds)
        result = trainer.train(learned, _resampled(problem, draw.phase("bootstrap").step(b)), config.run.seed + b)
        if result.view.weights is not None:
            weights.append(result.view.weights)
    classes = trainer.task.classes is not None
    trials = {
        name: StrategyResult(errors[name].mean(0), right[name].mean(0) if classes else None, ledgers[name])
        for name in errors
    }
    return trials, torch.stack(weights).double().cpu().numpy() if weights else np.zeros((0, len(data.partners) + 1))


def _original(data: PreparedFiles, order: int) -> np.ndarray:
    """For each position of an order, the number of that row in a numbering common to all orders."""
    return data.orders[order].numpy()


class _Trainer:
    """Trains any of the strategies on any split; mode and chunk are chosen once."""

    def __init__(self, data: PreparedFiles, config: Config) -> None:
        self.data, self.config = data, config
        self.small = int(data.stack.counts.max()) <= SMALL
        n = data.target_rows
        problem = self.split(0, 0, n // 5)
        assert isinstance(problem.task, Supervised)
        self.task = problem.task
        _, chosen = federate(problem, config.federation)
        self.federation = config.federation.model_copy(update=chosen)

    def split(self, order: int, first: int, tested: int) -> Weighting:
        """Test rows from a position of an order's circle; of the others, own for training, the rest for the weights."""
        n, settings = self.data.target_rows, self.config.problem
        others = n - tested
        own = round(settings["own"] / max(1e-9, 1.0 - settings["test"]) * others)
        own = min(own, others - 2)
        after = first + tested
        return self.data.problem(
            self.data.span(order, after, own),
            self.data.span(order, after + own, others - own),
            self.data.span(order, first, tested) if tested else None,
        )

    def train(self, name: str, problem: Weighting, seed: int, folder: Path | None = None) -> Result:
        """One training; a run that does not finish is an error that says why."""
        config = self.config if name == self.config.run.method else self.config.for_baseline(name)
        settings = dict(config.method)
        if self.small and settings.get("batch") == TUNED_BATCH:
            settings["batch"] = "all"  # sampling small shards would only add noise
        method = method_entry(name).make(**settings)
        check_needs(method, problem, "files")
        rounds = config.run.rounds
        run = config.run.model_copy(
            update={"method": name, "seed": seed, "record": rounds, "checkpoint": rounds, "baselines": [], "threads": 1}
        )
        fed, _ = federate(problem, self.federation)
        changed = replace(config, run=run, method=settings, federation=self.federation)
        parts = Parts(changed, problem, method, fed)
        if folder is not None:
            prepare(folder, force=True)
            write_atomically(folder / "config.toml", parts.config.as_toml().encode())
        result = run_rounds(parts, folder)
        if result.summary["outcome"] != "finished":
            raise RunError(f"{name} {result.summary['outcome']}: {result.summary['message']}")
        return result


def _resampled(problem: Weighting, draw: Draw) -> Weighting:
    """The same with a bootstrap resample of the rows that judge the weights."""
    assert problem.target is not None
    assert problem.target.valid is not None
    valid = problem.target.valid
    drawn = valid.take(draw.integers(valid.capacity, valid.capacity))
    rows = Rows(drawn.columns, valid.offset, valid.count, valid.capacity)
    return replace(problem, target=Shard(problem.task, problem.target.train, rows))


def _final(data: PreparedFiles, config: Config, folder: Path) -> None:
    """The model for use: learned weights, no row kept for a test."""
    trainer = _Trainer(data, config)
    trainer.train(config.run.method, trainer.split(0, 0, 0), config.run.seed, folder)


def _advice(
    data: PreparedFiles,
    config: Config,
    effort: Effort,
    screened: Screened,
    trials: dict[str, StrategyResult],
    weights: np.ndarray,
    comparisons: dict[str, Paired],
    found: Contributions | None,
) -> dict[str, Any]:
    """Everything as plain data."""
    learned = config.run.method
    unit = "Brier score" if data.preparation.classes else "squared error (in standard deviations of the label)"
    partners = []
    for k, partner in enumerate(screened.partners):
        share = weights[:, k] if len(weights) else np.zeros(1)
        low, high = np.percentile(share, [2.5, 97.5])
        weight = {"value": float(share.mean()), "low": float(low), "high": float(high)}
        entry = {**screening.as_dict(partner), "weight": weight}
        partners.append(entry if found is None else {**entry, "contribution": found.values[k]})
    against_alone = comparisons[ALONE]
    error = float(trials[ALONE].errors.mean())
    worth = _worth(against_alone, error)
    cost = trials[learned].ledger.total
    spent = screened.ledger.total
    needed = _rows_needed(against_alone, data.target_rows)
    return {
        "version": 1,
        "data": {
            "clients": config.problem["clients"],
            "target": config.problem["target"],
            "label": config.problem["label"],
            "kind": data.preparation.form.kind,
            "classes": list(data.preparation.classes),
            "target_rows": data.target_rows,
            "partner_rows": sum(holder.rows for holder in data.holders[:-1]),
            "model": config.problem["model"],
            "parameters": data.model.size,
        },
        "worth_it": worth,
        "headline": _headline(worth, screened, float(trials[learned].errors.mean()), error, against_alone, needed),
        "measure": unit,
        "partners": partners,
        "own_weight": float(weights[:, -1].mean()) if len(weights) else None,
        "strategies": {
            _called(name, learned): {
                "method": name,
                "error": float(trial.errors.mean()),
                "accuracy": None if trial.right is None else float(trial.right.mean()),
                "rounds": trial.ledger.total.rounds,
                "bytes": trial.ledger.total.bytes_up + trial.ledger.total.bytes_down,
            }
            for name, trial in trials.items()
        },
        "comparison": {
            _called(name, learned): {
                "gain": one.interval._asdict(),
                "relative": one.interval.value / max(1e-12, float(trials[name].errors.mean())),
                "t": one.t,
                "p_better": one.p_upper,
                "p_worse": one.p_lower,
                "effect_size": one.effect,
            }
            for name, one in comparisons.items()
        },
        "cost": {
            "training": {"rounds": cost.rounds, "bytes": cost.bytes_up + cost.bytes_down},
            "screening": {"rounds": spent.rounds, "bytes": spent.bytes_up + spent.bytes_down},
            "trainings": 3 * effort.repeats * effort.plan.folds + effort.bootstraps,
        },
        "certainty": {"target_rows": data.target_rows, "rows_needed": needed, "bound": _bound_terms(data)},
        "contributions": None if found is None else found.as_dict(weights.mean(0).tolist() if len(weights) else None),
        "plan": {**effort.plan._asdict(), "repeats": effort.repeats, "bootstraps": effort.bootstraps, "level": LEVEL},
        "notes": list(data.notes),
        "findings": [finding._asdict() for finding in data.findings],
        "seed": config.run.seed,
    }


def _called(name: str, learned: str) -> str:
    return {learned: "learned", ALONE: "alone", AVERAGE: "average"}[name]


def _worth(one: Paired, error: float) -> str:
    """yes, no, or not shown: whether learned weights beat training alone."""
    if one.p_upper <= LEVEL:
        return "yes"
    if one.p_lower <= LEVEL or one.interval.high < NEGLIGIBLE * error:
        return "no"
    return "not shown"


def _headline(worth: str, screened: Screened, together: float, alone: float, one: Paired, needed: int | None) -> str:
    """The answer with its number and interval, then who helps and who harms."""
    total = len(screened.partners)
    by = {v: [p.name for p in screened.partners if p.verdict == v] for v in ("helps", "harms")}
    answer = ANSWERS["not shown" if worth == "yes" and not by["helps"] else worth]
    value, low, high = one.interval
    gain = f"a gain of {figure_text(value)}" if value >= 0 else f"a loss of {figure_text(-value)}"
    errors = f"{figure_text(together)} with learned weights and {figure_text(alone)} alone"
    interval = f"95 % interval of the gain: {signed(low)} to {signed(high)}"
    sentences = [f"{answer}: the error on your rows is {errors}, {gain} ({interval})."]
    if worth == "not shown":
        more = "" if needed is None else f"; about {needed:,} rows of your own would probably decide it"
        sentences.append(f"This may be chance{more}.")
    if by["helps"]:
        what = HELPFUL[worth][len(by["helps"]) > 1]
        sentences.append(f"{_named(by['helps'], total)} {what}.")
    else:
        reason = ", so this gain may have other reasons" if worth == "yes" else ""
        sentences.append(f"None of the {total} partners helps on its own{reason}.")
    if by["harms"]:
        sentences.append(f"{_named(by['harms'], total)} harm{'s' if len(by['harms']) == 1 else ''} if averaged in.")
    return " ".join(sentences)


def _named(names: list[str], total: int) -> str:
    if len(names) == total and total > 2:
        return f"All {total} partners"
    if len(names) > 6:
        return f"{len(names)} of {total} partners"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _rows_needed(one: Paired, n: int) -> int | None:
    """Rows of the target with which a gain as large as the one seen would be shown in four cases of five.

    t grows as √n. None where nothing was gained, so that no number of rows would show it.
    """
    if one.t <= 0.05:
        return None
    wanted = float(norm.ppf(1 - LEVEL) + norm.ppf(0.8))
    return ceil(n * (wanted / one.t) ** 2)


def _bound_terms(data: PreparedFiles) -> list[dict[str, float]]:
    """The two terms of Theorem 1 of 'Adaptively weighted nodes' without their constants, for more rows of the target.

    √((ν + log 1/δ)/n_valid) and ((ν + K + log 1/δ) K b²/n_train)^¼ with δ = 0.05 and b = 1; the number of parameters
    stands for the dimension ν. Where the first is the larger, more validation rows help most; else more partner rows.
    """
    nu, K, tail = data.model.size, len(data.partners), log(1 / LEVEL)
    train = min(holder.rows for holder in data.holders[:-1])
    second = ((nu + K + tail) * K / train) ** 0.25
    terms = []
    for factor in (1, 2, 5, 10):
        rows = data.target_rows * factor
        terms.append({"target_rows": rows, "validation_term": sqrt((nu + tail) / rows), "training_term": second})
    return terms
