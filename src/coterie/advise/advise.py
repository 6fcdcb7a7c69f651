"""With whom should the target train, and is it worth it? An answer with intervals, from your own files.

1. Models trained on the target's rows alone are asked at the partners: do their labels agree (agreement.py)?
2. Weights are learned by the chosen method without each fold of several random orders of the target's rows.
3. Alone, with those that agree, with all, or by learned weights: chosen by nested validation, trained to the end
   (strategies.py), and compared with training alone in the measures people decide by (scores.py).
4. A verdict on each partner with a probability (verdicts.py), what a training costs, and how sure the answer is.

The answer is plain data (`advice.json`); pages and tables are made of it elsewhere.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil, log, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from coterie import machine
from coterie.advise import strategies, verdicts
from coterie.advise.agreement import LEVEL, targets
from coterie.advise.contributions import Contributions, contributions
from coterie.advise.mixtures import PARTNER_ROWS, TARGET_ROWS, Arms, Connect, Mixtures
from coterie.advise.page import VERSION
from coterie.advise.scores import EXPLAINED, Score, chosen, few_events, scarce, scores_for
from coterie.advise.sentences import headline
from coterie.advise.splits import Splits
from coterie.advise.strategies import Chosen, Trial
from coterie.advise.trees import boosted
from coterie.advise.verdicts import Paired, Partner, paired
from coterie.errors import RunError, UsageError
from coterie.experiment.build import Parts, check_needs, federate, federate_remotely, run_name, using_threads
from coterie.experiment.config import (
    Config,
    EngineTable,
    FaultsTable,
    FederationTable,
    PrivacyTable,
    RunTable,
    default_baselines,
)
from coterie.experiment.loop import run_rounds
from coterie.experiment.records import prepare, save_model
from coterie.federation import Federation, Rows, Shard
from coterie.federation.ledger import Ledger
from coterie.federation.remote import Transport
from coterie.methods.registry import method_entry
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.files import PreparedFiles, load_files
from coterie.problems.files.problem import ME
from coterie.problems.weighting import Weighting
from coterie.report.results import ADVICE, PROGRESS
from coterie.storage import make_folder, write_atomically, write_json

SMALL = 1024  # shards up to so many rows are used whole in every step
TUNED_BATCH = 128
FOLDS = 5
LONGEST_RUN = 64  # letters by which nodes know a run
SURE, LIKELY = 0.95, 0.8
FINAL_ROWS = 1 << 16  # of a holder that train the model that is delivered
WORK = 1.6e9  # numbers times parameters that cross-fitting may touch, before it takes fewer orders
MODELS_PER_ORDER = 300
ONE_MACHINE = "advise trains on this machine"
SIMULATED = "advise trains without simulated faults"
UNCOMPRESSED = "advise sends updates as they are"
BRIEF = "the many short trainings of an advice keep no records"
UNUSED = {  # settings that change nothing in an advice, and why; [faults] and [engine] belong to them
    "run.engine": ONE_MACHINE,
    "run.threads": "advise uses one thread",
    "run.compile": "the trainings of an advice are too short for compilation",
    "run.record": BRIEF,
    "run.evaluate": BRIEF,
    "run.checkpoint": BRIEF,
    "run.log": BRIEF,
    "run.baselines": "advise always compares with training alone and with everybody",
    **dict.fromkeys(("federation.compress", "federation.ratio", "federation.feedback"), UNCOMPRESSED),
    **dict.fromkeys((f"federation.{key}" for key in ("timeout", "retries", "quorum", "patience")), ONE_MACHINE),
}
HARMLESS: dict[str, Any] = {
    "run.threads": 1,
    "run.baselines": [],
}  # besides the defaults
Say = Callable[[str], None]
Network = Callable[[Config, Weighting], Transport]


class Effort(NamedTuple):
    """How much is done: orders of the target's rows, shuffles of every partner's labels, resamples for the weights."""

    repeats: int = 3
    placebos: int = 199
    bootstraps: int = 5


class Found(NamedTuple):
    """Everything that was found out, before it is put into words."""

    score: Score
    labels: np.ndarray
    trial: Trial
    partners: tuple[Partner, ...]
    weights: np.ndarray
    trees: np.ndarray | None
    contributions: Contributions | None
    repeats: int
    training: Ledger
    screening: Ledger
    notes: tuple[str, ...]


def advise(
    config: Config,
    folder: Path | None = None,
    effort: Effort = Effort(),  # noqa: B008
    *,
    values: str | None = None,
    measure: str = "auto",
    say: Say = lambda text: None,
    force: bool = False,
) -> dict[str, Any]:
    """The advice as plain data; with a folder, advice.json and the model (MODEL_DIR of `coterie predict`) go there.

    Args:
        config: run, problem and method; the problem is `files`.
        folder: where advice.json, model/ and training/ go.
        effort: how much is done.
        values: "loo" or "shapley" for contributions beside the weights.
        measure: what to decide by: a name, or "auto" (scores.py).
        say: called with progress messages.
        force: empty an existing folder first.
    """
    with using_threads(1):
        data = prepare_files(config, effort.repeats)
    return advise_on(data, config, folder, effort, values=values, measure=measure, say=say, force=force)


@using_threads(1)  # its operations are small: on several threads they would wait for each other most of the time
def advise_on(
    data: PreparedFiles,
    config: Config,
    folder: Path | None = None,
    effort: Effort = Effort(),  # noqa: B008
    *,
    values: str | None = None,
    measure: str = "auto",
    say: Say = lambda text: None,
    force: bool = False,
    network: Network | None = None,
) -> dict[str, Any]:
    """The advice on rows that are prepared, where partners may be elsewhere.

    Args:
        data: the target's rows, and the partners' or their number.
        config: run, problem and method.
        folder: as for `advise`, like the arguments up to force.
        effort: how much is done.
        values: contributions.
        measure: what to decide by.
        say: called with progress messages.
        force: empty an existing folder first.
        network: reaches partners that are elsewhere. Weights are then learned once, from all rows: every training costs
            a hundred exchanges.
    """
    connect = None if network is None else partial(_connected, config, network)
    classes = len(data.preparation.classes) or None
    labels = data.rows(data.span(0, 0, data.target_rows)).all().labels.numpy()
    event = data.preparation.form.event
    score = chosen(measure, labels, classes, times=event is not None)
    if folder is not None:
        prepare(folder, force=force)
        write_atomically(folder / "config.toml", config.as_toml().encode())
        say = _logged(folder / PROGRESS, say)
    K, n = len(data.partners), data.target_rows
    say(f"{K} partners with {sum(h.rows for h in data.holders[:-1]):,} rows; {n:,} rows of your own")
    warnings = scarce(labels, data.preparation.classes) if classes else few_events(labels, event) if event else []
    for warning in warnings:
        say(f"warning: {warning}")
    found = _find_out(data, config, effort, score, labels, values, folder, say, connect)
    advice = _advice(data, config, effort, found, warnings)
    if folder is not None:
        say("training the model on everything")
        _deliver(data, found.trial, folder, advice["delivered"], connect)
        write_json(folder / ADVICE, advice)
    return advice


def _find_out(
    data: PreparedFiles,
    config: Config,
    effort: Effort,
    score: Score,
    labels: np.ndarray,
    values: str | None,
    folder: Path | None,
    say: Say,
    connect: Connect | None,
) -> Found:
    """Learn weights, train every strategy, compare."""
    K, n = len(data.partners), min(data.target_rows, TARGET_ROWS)
    draw = Draw.of(config.run.seed).phase("advise")
    repeats = _orders(data, n, effort.repeats)
    splits = Splits.of(data.orders[:repeats], n, FOLDS, data.context.dtype)
    mixtures = Mixtures(data, splits.masks, draw.phase("mixtures"), connect=connect)
    learner = _Learner(data, config, splits, effort.bootstraps, draw, connect)
    orders = f"{repeats} order{'s' if repeats > 1 else ''} of your rows, {FOLDS} folds each"
    say(f"learned weights: {orders if connect is None else 'once, over the network'}")
    learner.learn(None if folder is None else folder / "training")
    say(f"alone, with those that agree, with all, learned weights: {repeats} × {FOLDS} folds, nested")
    trial = strategies.trial(mixtures, splits, data.l2, learner.weights, effort.placebos, draw.phase("agreement"))
    say(f"each of the {K} partners alone with you")
    predicted, losses = strategies.with_each(mixtures, splits, trial.alone_l2)
    labels = labels[:n]
    lost = trial.row_losses[strategies.ALONE]
    still = verdicts.improvement(float(trial.fewer_losses.mean()), float(lost.mean()), FOLDS)
    own, gained = 1.0 - strategies.shares(mixtures).double().numpy(), still_to_gain(score, trial, labels)
    partners = verdicts.judged(
        [(holder.name, holder.rows) for holder in data.holders[:-1]],
        trial.agreement,
        [paired(lost - losses[k], FOLDS, still * (1.0 - own[k] ** 2)) for k in range(K)],
        [compared(score, predicted[k], trial, labels, own[k], gained) for k in range(K)],
        float(lost.mean()),
    )
    classes = len(data.preparation.classes) or None
    truth = mixtures.own.labels if classes else targets(mixtures.task, mixtures.own)[:, 0]
    trees = boosted(mixtures.own.inputs, truth, splits, classes, config.run.seed)
    contributed = None
    if values is not None:
        contributed = contributions(data, values, draw.phase("contributions"), l2=trial.alone_l2, say=say)
    return Found(
        score,
        labels,
        trial,
        partners,
        learner.spread(),
        trees,
        contributed,
        repeats,
        learner.ledger,
        mixtures.fed.ledger,
        (learner.failure,) if learner.failure else (),
    )


def gains(score: Score, better: np.ndarray, worse: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """By order and row [R, n]: how much the first predictions [R, n, outputs] are better than the second."""
    return np.stack([score.gains(*pair, labels) for pair in zip(better, worse, strict=True)])


def still_to_gain(score: Score, trial: Trial, labels: np.ndarray) -> float:
    """How much better training alone would be, in a measure, with the rows of the fold that is left out."""
    alone = trial.predictions[strategies.ALONE]
    fewer, more = (float(np.mean([score.value(p, labels) for p in many])) for many in (trial.fewer, alone))
    sign = -1.0 if score.measure.higher else 1.0
    return verdicts.improvement(sign * fewer, sign * more, FOLDS)


def compared(
    score: Score, predicted: np.ndarray, trial: Trial, labels: np.ndarray, own: float, gained: float
) -> Paired:
    """Held-out predictions [R, n, outputs] against training alone, in a measure.

    Training alone still gains from the rows of the fold that is left out. A model in which the target's rows have the
    share own gains own² of that: its error falls as 1/(n + m), which changes with n by the square of n/(n + m).
    """
    alone = trial.predictions[strategies.ALONE]
    less = gained * (1.0 - own**2)
    same = predicted is alone or np.array_equal(predicted, alone)
    return paired(gains(score, predicted, alone, labels), FOLDS, 0.0 if same else less)


def _connected(config: Config, network: Network, problem: Weighting, purpose: str) -> Federation:
    """A federation with partners that are elsewhere."""
    run = f"{purpose}{run_name(config)}"[:LONGEST_RUN]
    return federate_remotely(problem, config.federation, network(config, problem), run, config.modules())[0]


def _orders(data: PreparedFiles, n: int, asked: int) -> int:
    """How many orders of the rows can be afforded: all that are asked for, unless rows or parameters are many."""
    rows = n + int(data.stack.counts.clamp(max=PARTNER_ROWS).sum())
    return max(1, min(asked, int(WORK / (rows * data.model.size * MODELS_PER_ORDER))))


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
    settings = {key: value for key, value in config.problem.items() if key not in ("own", "test", "everyone")}
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


class _Learner:
    """Learns weights without each fold, from all rows, and on resamples of the rows that judge the weights."""

    def __init__(
        self,
        data: PreparedFiles,
        config: Config,
        splits: Splits,
        bootstraps: int,
        draw: Draw,
        connect: Connect | None,
    ) -> None:
        self.data, self.config, self.splits, self.connect = data, config, splits, connect
        self.bootstraps, self.draw = bootstraps, draw.phase("bootstrap")
        self.small = int(data.stack.counts.max()) <= SMALL
        problem = self._split(0, 0)
        fixed = {} if connect is not None else federate(problem, config.federation)[1]
        self.federation = config.federation.model_copy(update=fixed)
        self.settings = self._steady(dict(config.method))
        self.learned: dict[tuple[int, int], Tensor] = {}
        self.resampled: list[Tensor] = []
        self.failure = ""
        self.ledger = Ledger()

    def weights(self, r: int, f: int) -> Tensor | None:
        """What was learned without fold f of order r, or from all rows (−1, −1); None where learning failed."""
        return None if self.failure or self.connect is not None else self.learned[r, f]

    def spread(self) -> np.ndarray:
        """The weights of all trainings, [trainings, K + 1]."""
        every = [*self.learned.values(), *self.resampled]
        if self.failure or not every:
            return np.zeros((0, len(self.data.partners) + 1))
        return torch.stack(every).double().cpu().numpy()

    def learn(self, folder: Path | None) -> None:
        """All trainings; one that fails leaves learned weights out of the comparison, and the rest of the advice in."""
        seed, here = self.config.run.seed, self.connect is None
        try:
            for r in range(self.splits.repeats if here else 0):
                for f in range(self.splits.F):
                    self.learned[r, f] = self._train(self._split(r, f), seed + r)
            for b in range(self.bootstraps if here else 0):
                problem = _resampled(self._split(0, b % self.splits.F), self.draw.step(b))
                self.resampled.append(self._train(problem, seed + b))
            self.learned[-1, -1] = self._train(self._split(0, None), seed, folder)
        except RunError as error:
            self.failure = f"learned weights were left out: {error}"

    def _steady(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The method's settings with steps that the curvature allows, and whole batches of small shards."""
        if self.small and settings.get("batch") == TUNED_BATCH:
            settings["batch"] = "all"  # sampling small shards would only add noise
        model, most = self.data.model, steepest(self.data)
        if model.linear and isinstance(settings.get("step"), float) and settings["step"] * most > 1.0:
            settings["step"] = 1.0 / most
        return settings

    def _split(self, order: int, f: int | None) -> Weighting:
        """Fold f of an order is the test; of the others, own rows for training, the rest for the weights."""
        n, F, settings = self.data.target_rows, self.splits.F, self.config.problem
        first, last = (0, 0) if f is None else (-(-f * n // F), -(-(f + 1) * n // F))
        tested, others = last - first, n - last + first
        own = min(round(settings["own"] / max(1e-9, 1.0 - settings["test"]) * others), others - 2)
        return self.data.problem(
            self.data.span(order, last, own),
            self.data.span(order, last + own, others - own),
            self.data.span(order, first, tested) if tested else None,
        )

    def _train(self, problem: Weighting, seed: int, folder: Path | None = None) -> Tensor:
        """The weights of one training; one that does not finish is an error that says why."""
        config, name = self.config, self.config.run.method
        method = method_entry(name).make(**self.settings)
        check_needs(method, problem, "files")
        rounds = config.run.rounds
        run = config.run.model_copy(
            update={"seed": seed, "record": rounds, "checkpoint": rounds, "baselines": [], "threads": 1}
        )
        fed = federate(problem, self.federation)[0] if self.connect is None else self.connect(problem, "weights")
        parts = Parts(replace(config, run=run, method=self.settings, federation=self.federation), problem, method, fed)
        if folder is not None:
            prepare(folder, force=True)
            write_atomically(folder / "config.toml", parts.config.as_toml().encode())
        result = run_rounds(parts, folder)
        if result.summary["outcome"] != "finished":
            raise RunError(f"{name} {result.summary['outcome']}: {result.summary['message']}")
        self.ledger = result.ledger
        weights = result.view.weights
        if weights is None:
            raise UsageError(
                f"advise needs a method that learns weights, and {name} learns none; `coterie list methods` says "
                "which do."
            )
        return weights if len(weights) > len(self.data.partners) else torch.cat([weights, weights.new_zeros(1)])


def steepest(data: PreparedFiles) -> float:
    """The largest curvature that the loss of a linear model can have: the largest eigenvalue of its inputs' moments.

    Softmax has curvature at most one half, least squares one.
    """
    rows = data.rows(data.span(0, 0, min(data.target_rows, TARGET_ROWS))).all().inputs.flatten(1).double()
    largest = float(torch.linalg.matrix_norm(rows, 2)) ** 2 / len(rows) + 1.0
    return largest * (0.5 if data.preparation.classes else 1.0)


def _resampled(problem: Weighting, draw: Draw) -> Weighting:
    """The same with a bootstrap resample of the rows that judge the weights."""
    assert problem.target is not None
    assert problem.target.valid is not None
    valid = problem.target.valid
    drawn = valid.take(draw.integers(valid.capacity, valid.capacity))
    rows = Rows(drawn.columns, valid.offset, valid.count, valid.capacity)
    return replace(problem, target=Shard(problem.task, problem.target.train, rows))


def _deliver(data: PreparedFiles, trial: Trial, folder: Path, about: dict[str, Any], connect: Connect | None) -> None:
    """The model for use, and the one of training alone: on all rows, each with what `coterie predict` needs."""
    everything = torch.ones(1, min(data.target_rows, FINAL_ROWS), dtype=data.context.dtype)
    mixtures = Mixtures(data, everything, Draw.of(data.context.seed).phase("deliver"), FINAL_ROWS, connect)
    like = mixtures.start
    nothing = data.span(0, 0, 1)
    stored = data.problem(nothing, nothing, None).artifacts["preprocess.json"]
    alone = Chosen(strategies.ALONE, torch.eye(len(trial.final.weights))[-1], trial.alone_l2)
    for name, final in (("model", trial.final), ("alone", alone)):
        arm = Arms(final.weights[None].to(like), torch.zeros(1, dtype=torch.int64), torch.tensor([final.l2]).to(like))
        theta = mixtures.train(arm, exactly=True)[0]
        make_folder(folder / name)
        write_json(folder / name / "preprocess.json", stored)
        save_model(folder / name / "model.safetensors", data.model.state_dict(theta), {"strategy": final.name})
    write_json(folder / "model" / "delivered.json", about)


def _advice(data: PreparedFiles, config: Config, effort: Effort, found: Found, warnings: list[str]) -> dict[str, Any]:
    """Everything as plain data."""
    trial, score = found.trial, found.score
    weights = found.weights
    partners = []
    for k, partner in enumerate(found.partners):
        share = weights[:, k] if len(weights) else np.zeros(1)
        low, high = np.percentile(share, [2.5, 97.5])
        weight = {"value": float(share.mean()), "low": float(low), "high": float(high)}
        entry = {**partner.as_dict(), "weight": weight, "delivered_weight": float(trial.final.weights[k])}
        contributed = found.contributions
        partners.append(entry if contributed is None else {**entry, "contribution": contributed.values[k]})
    gained = still_to_gain(score, trial, found.labels)
    against = {
        name: compared(score, predicted, trial, found.labels, float(trial.own[name]), gained)
        for name, predicted in trial.predictions.items()
    }
    delivered = against["delivered"]
    worth = worth_it(trial.final.name, delivered)
    lost = trial.losses
    form = data.preparation.form
    scores = scores_for(len(data.preparation.classes) or None, times=form.event is not None)
    table = {name: _values(scores, predicted, found.labels) for name, predicted in trial.predictions.items()}
    training, screening = found.training.total, found.screening.total
    advice: dict[str, Any] = {
        "version": VERSION,
        "data": {
            "clients": config.problem.get("clients", ""),
            "target": data.holders[-1].name,
            "label": form.label,
            "kind": "survival" if form.event else form.kind,
            "classes": list(data.preparation.classes),
            "target_rows": data.target_rows,
            "partner_rows": sum(holder.rows for holder in data.holders[:-1]),
            "model": config.problem["model"],
            "parameters": data.model.size,
        },
        "worth_it": worth,
        "measure": {**score.measure.as_dict(), "explained": EXPLAINED[score.name]},
        "measures": [{**each.measure.as_dict(), "explained": EXPLAINED[each.name]} for each in scores],
        "partners": partners,
        "own_weight": float(weights[:, -1].mean()) if len(weights) else None,
        "strategies": {
            name: {
                "values": table[name],
                "loss": lost[name],
                "gain": against[name].interval._asdict(),
                "probability": against[name].probability,
                "picked": trial.picks.get(name),
            }
            for name in table
        },
        "delivered": {
            "strategy": trial.final.name,
            "partners": [p.name for p, w in zip(found.partners, trial.final.weights.tolist(), strict=False) if w > 0.0],
            "weights": dict(zip((*(p.name for p in found.partners), ME), trial.final.weights.tolist(), strict=True)),
            "l2": trial.final.l2,
            "values": table["delivered"],
            "gain": delivered.interval._asdict(),
            "probability": delivered.probability,
        },
        "trees": None if found.trees is None else {"values": _values(scores, found.trees, found.labels)},
        "cost": {
            "training": {"rounds": training.rounds, "bytes": training.bytes_up + training.bytes_down},
            "screening": {"rounds": screening.rounds, "bytes": screening.bytes_up + screening.bytes_down},
            "trainings": len(weights),
        },
        "certainty": {
            "target_rows": data.target_rows,
            "rows_needed": _rows_needed(delivered, data.target_rows),
            "bound": _bound_terms(data),
        },
        "contributions": None
        if found.contributions is None
        else found.contributions.as_dict(weights.mean(0).tolist() if len(weights) else None),
        "plan": {**effort._asdict(), "repeats": found.repeats, "folds": FOLDS, "level": LEVEL},
        "warnings": warnings,
        "notes": [*data.notes, *found.notes],
        "findings": [finding._asdict() for finding in data.findings],
        "seed": config.run.seed,
    }
    return {**advice, "headline": headline(advice)}


def _values(scores: tuple[Score, ...], predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Every measure of held-out predictions [R, n, outputs], averaged over orders."""
    return {each.name: float(np.mean([each.value(p, labels) for p in predicted])) for each in scores}


def worth_it(strategy: str, gain: Paired) -> str:
    """yes, probably, not shown, or no: whether training together beats training alone."""
    if strategy == strategies.ALONE or gain.interval.high <= 0.0:
        return "no"
    if gain.probability >= SURE:
        return "yes"
    return "probably" if gain.probability >= LIKELY else "not shown"


def _rows_needed(gain: Paired, n: int) -> int | None:
    """Rows of the target with which a gain as large as the one seen would be shown in four cases of five.

    t grows as √n. None where nothing was gained, so that no number of rows would show it.
    """
    if gain.t <= 0.05:
        return None
    wanted = float(norm.ppf(1 - LEVEL) + norm.ppf(0.8))
    return ceil(n * (wanted / gain.t) ** 2)


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
