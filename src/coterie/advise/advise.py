"""From files, or messages of sites, to an answer: with whom should I train, and is it worth it?

The answer is plain data (`advice.json`); pages and tables are made of it elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from coterie import machine
from coterie.advise.copies import OwnLines
from coterie.advise.decide import FOLDS, Decision, Judged, decide
from coterie.advise.differs import Difference, confirmed, differences
from coterie.advise.paired import NOTHING, Interval
from coterie.advise.scores import EXPLAINED, Score, chosen, few_events, scarce, scores_for
from coterie.advise.sentences import headline, next_step, reason
from coterie.advise.verdicts import Signs, probability, verdict
from coterie.ensemble.estimators import Estimator, fit_estimator
from coterie.ensemble.goal import Goal
from coterie.ensemble.message import BadMessage, Message, message, received, summary_of
from coterie.ensemble.models import LEAST_LEAF
from coterie.ensemble.stack import Stack, write_stack
from coterie.errors import UsageError
from coterie.experiment.build import using_threads
from coterie.experiment.config import Config, PrivacyTable, load
from coterie.experiment.records import at_work_on, read_plan
from coterie.federation import Federation, LocalEngine
from coterie.federation import Stack as Parts
from coterie.numerics import Draw
from coterie.problems.files.faults import as_note
from coterie.problems.files.prepare import Preparation, model_rows, of_own_rows
from coterie.problems.files.problem import checked_tables
from coterie.problems.files.tables import Tables, notes_on
from coterie.report.results import ADVICE, ADVISING
from coterie.storage import make_folder, write_atomically, write_json

VERSION = 3  # of advice.json
USED = (
    *("clients", "target", "label", "event", "kind", "categorical"),
    *("drop", "missing", "keep", "units", "align_labels", "repair"),
)
USED_OF_RUN = {"run.problem", "run.seed", "run.portable", "run.threads", "run.baselines"}
UNUSABLE = "its models hold numbers that cannot be used"
Say = Callable[[str], None]


class Partner(NamedTuple):
    """A partner before the decision: its message, or why there is none."""

    name: str
    rows: int
    message: Message | None
    why: str = ""
    more: tuple[Any, ...] = ()


class Advised(NamedTuple):
    """advice.json, the delivered model, and how rows become its inputs."""

    advice: dict[str, Any]
    model: Stack
    prepared: Preparation


class Mine(NamedTuple):
    """My rows as they stand, and what they are."""

    inputs: np.ndarray
    labels: np.ndarray
    prepared: Preparation
    goal: Goal
    name: str


def advise(
    config: Config,
    folder: Path | None = None,
    *,
    measure: str = "auto",
    cautious: bool = False,
    models: Sequence[Estimator] = (),
    say: Say = lambda text: None,
    force: bool = False,
) -> Advised:
    """The advice as plain data, and the model; with a folder, advice.json, model/ and alone/ go there.

    Args:
        config: of problem `files`.
        folder: where the advice goes.
        measure: what to decide by: a name, or "auto" (scores.py).
        cautious: deliver partners' models only where they are better by a standard error.
        models: further estimators that everybody fits.
        say: called with progress messages.
        force: empty an existing folder first.
    """
    settings = _settings(config)
    machine.require(config.run.portable)
    tables, _ = checked_tables(**settings, partial=True)
    if tables.form.image is not None:
        raise UsageError(
            "advise decides on tables; for pictures, learn weights with `coterie run --problem files` or coterie.fit."
        )
    mine = mine_of(tables, settings.get("missing") or ())
    say(
        f"{len(tables.holders) - 1} partners with {sum(h.rows for h in tables.holders[:-1]):,} rows; "
        f"{len(mine.labels):,} rows of your own"
    )
    with using_threads(1), threadpool_limits(1):
        partners = messages_here(tables, mine, models, say)
        notes = [*map(as_note, tables.findings), *notes_on(tables)]
        return advise_on(
            mine,
            partners,
            config,
            folder,
            measure=measure,
            cautious=cautious,
            models=models,
            notes=notes,
            say=say,
            force=force,
        )


def advise_on(
    mine: Mine,
    partners: Sequence[Partner],
    config: Config,
    folder: Path | None = None,
    *,
    measure: str = "auto",
    cautious: bool = False,
    models: Sequence[Estimator] = (),
    notes: Sequence[str] = (),
    say: Say = lambda text: None,
    force: bool = False,
) -> Advised:
    """The advice on messages that have come, from files or from sites.

    Args:
        mine: my rows.
        partners: with their messages.
        config: its seed is that of folds and trees.
        folder: where the advice goes.
        measure: what to decide by.
        cautious: as for `advise`.
        models: as for `advise`.
        notes: what should be known of the files.
        say: called with progress messages.
        force: empty an existing folder first.
    """
    goal, prepared = mine.goal, mine.prepared
    classes, times = len(prepared.classes) or None, bool(goal.edges)
    score = chosen(measure, mine.labels.astype(int) if classes else mine.labels, classes, times=times)
    if folder is None:
        found, advice = _decided(mine, partners, config, score, cautious, models, notes, say)
        return Advised(advice, found.delivered, prepared.as_it_stands())
    with at_work_on(folder, ADVISING, force=force):  # what was begun and not finished is begun again
        write_atomically(folder / "config.toml", config.as_toml().encode())
        write_json(folder / ADVISING, {"measure": measure, "cautious": cautious})
        found, advice = _decided(mine, partners, config, score, cautious, models, notes, say)
        _write(folder, mine, found, advice, stored=not models)
        (folder / ADVISING).unlink()
    return Advised(advice, found.delivered, prepared.as_it_stands())


def resumed(folder: Path, say: Say) -> dict[str, Any]:
    """The advice of a folder whose command was stopped, from the configuration there.

    Args:
        folder: where it was begun.
        say: called with progress messages.
    """
    measure, cautious = read_plan(folder / ADVISING, "measure", "cautious")
    config = load(folder / "config.toml", {}, {})
    return advise(config, folder, measure=str(measure), cautious=cautious is True, say=say).advice


def _decided(
    mine: Mine,
    partners: Sequence[Partner],
    config: Config,
    score: Score,
    cautious: bool,
    models: Sequence[Estimator],
    notes: Sequence[str],
    say: Say,
) -> tuple[Decision, dict[str, Any]]:
    """The decision, and advice.json."""
    warnings = _warnings(mine)
    for warning in warnings:
        say(f"warning: {warning}")
    say("weighing the partners' models on your rows")
    with np.errstate(all="ignore"), threadpool_limits(1):  # waiting threads take longer than the work
        found = _examined(mine, partners)
        decision = decide(
            mine.goal,
            score,
            mine.inputs,
            mine.labels,
            [(one.partner.name, one.models) for one in found if one.takes_part],
            seed=config.run.seed,
            cautious=cautious,
            more=[partial(fit_estimator, estimator, goal=mine.goal) for estimator in models],
        )
    return decision, _advice(mine, config, score, decision, found, notes, warnings)


class _Found(NamedTuple):
    """What was found of a partner before the weights: its models for my columns, whether it is a copy, what differs."""

    partner: Partner
    models: tuple[Any, ...] = ()
    copy: bool = False
    differs: tuple[Difference, ...] = ()
    fit: tuple[float, float] = (0.0, 0.0)  # before and after what differs was undone

    @property
    def takes_part(self) -> bool:
        return bool(self.models) and not self.copy


def mine_of(tables: Tables, missing: Sequence[str] = ()) -> Mine:
    """The target's rows as they stand.

    Args:
        tables: everybody's rows, the target's last.
        missing: further words that mean a missing value, now and in rows to be predicted.
    """
    prepared = of_own_rows(tables)._replace(missing=tuple(missing))
    inputs, labels = model_rows(tables, prepared.as_it_stands(), len(tables.holders) - 1)
    times = prepared.form.event is not None
    y = labels.astype(np.float64)
    if times and not (y > 0).any():
        raise UsageError(
            f"the event {prepared.form.event!r} never happens in {tables.holders[-1].name}, so that nothing can be "
            "learned about when it does. Give rows in which it happened, or set problem.event to another column."
        )
    goal = Goal.of(y, len(prepared.classes) or None, times=times)
    return Mine(inputs.astype(np.float64), y, prepared, goal, tables.holders[-1].name)


def messages_here(tables: Tables, mine: Mine, models: Sequence[Estimator], say: Say) -> list[Partner]:
    """The messages of partners whose rows are here, each made of its own rows only.

    Args:
        tables: everybody's rows.
        mine: my rows, which say what the columns and classes are.
        models: further estimators that everybody fits.
        say: called with progress messages.
    """
    raw, found = mine.prepared.as_it_stands(), []
    for k, holder in enumerate(tables.holders[:-1]):
        inputs, labels = model_rows(tables, raw, k)
        if not len(labels):
            found.append(Partner(holder.name, 0, None, "none of its rows has a class of yours"))
            continue
        say(f"{holder.name}: its models, from {len(labels):,} rows")
        columns = torch.from_numpy(inputs), torch.from_numpy(labels)
        count = torch.tensor([len(labels)])
        fed = Federation.on(LocalEngine(None, Parts(columns, torch.zeros_like(count), count), None, None, "sequential"))
        sent = ask(fed, mine).get(0)
        x, y = inputs.astype(np.float64), labels.astype(np.float64)
        more = tuple(fit_estimator(one, x, y, mine.goal) for one in models)
        found.append(Partner(holder.name, len(labels), sent, "" if sent else UNUSABLE, more))
    return found


def ask(fed: Federation, mine: Mine) -> dict[int, Message]:
    """One exchange: by client, its message; a message that is not what was asked for counts as none.

    Args:
        fed: holders with their rows as they stand.
        mine: my rows, which say what is asked for.
    """
    goal, columns = mine.goal, mine.inputs.shape[1]
    edges = torch.tensor(goal.edges, dtype=torch.float64)
    replies = fed.gather(message, edges, draw=Draw.of(0), classes=goal.classes, leaf=LEAST_LEAF)
    found = {}
    for i, k in enumerate(replies.ids.tolist()):
        with suppress(BadMessage):
            found[k] = received(tuple(part[i] for part in replies.rows), goal, columns)
    return found


def _examined(mine: Mine, partners: Sequence[Partner]) -> list[_Found]:
    """Copies, what differs, and the models that take part."""
    numeric = [column.name for column in mine.prepared.numeric]
    own, found = summary_of(mine.inputs, mine.labels), list[_Found]()
    lines = OwnLines.of(mine.goal, mine.inputs, mine.labels)
    for partner in partners:
        sent = partner.message
        if sent is None:
            found.append(_Found(partner))
            continue
        if lines.are(mine.goal, sent.linear, mine.inputs):
            found.append(_Found(partner, copy=True))
            continue
        words = mine.prepared.classes, mine.prepared.form.label
        seen = differences(mine.goal, own, mine.inputs, mine.labels, sent, numeric, *words)
        differs, models, fit = confirmed(mine.goal, sent, seen, numeric, mine.inputs, mine.labels)
        found.append(_Found(partner, (*models, *partner.more), differs=tuple(differs), fit=fit))
    return found


def _warnings(mine: Mine) -> list[str]:
    prepared = mine.prepared
    if prepared.classes:
        return scarce(mine.labels.astype(int), prepared.classes)
    return few_events(mine.labels, str(prepared.form.event)) if prepared.form.event is not None else []


def _advice(
    mine: Mine,
    config: Config,
    score: Score,
    decision: Decision,
    found: Sequence[_Found],
    notes: Sequence[str],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """Everything as plain data."""
    prepared, judged = mine.prepared, iter(decision.judged)
    entries = [_entry(one, next(judged) if one.takes_part else None, mine, decision) for one in found]
    labels = mine.labels.astype(int) if prepared.classes else mine.labels
    measures = scores_for(len(prepared.classes) or None, times=bool(mine.goal.edges))
    values = {
        name: {one.name: float(np.mean([one.value(p, labels[decision.rows]) for p in predicted])) for one in measures}
        for name, predicted in decision.predictions.items()
    }
    shares = decision.delivered.shares()
    advice = {
        "version": VERSION,
        "worth_it": decision.answer,
        "seed": config.run.seed,
        "measure": {**_described(score), "explained": EXPLAINED[score.name]},
        "measures": [{**_described(one), "explained": EXPLAINED[one.name]} for one in measures],
        "data": {
            "target": mine.name,
            "target_rows": len(mine.labels),
            "partner_rows": sum(one.partner.rows for one in found),
            "columns": mine.inputs.shape[1],
            "label": prepared.form.label,
            "kind": "survival" if mine.goal.edges else prepared.form.kind,
            "classes": len(prepared.classes),
        },
        "partners": entries,
        "delivered": {
            "what": "alone" if set(shares) == {""} else "with partners",
            "shares": {name or "you": share for name, share in shares.items()},
            "members": [
                {"holder": m.holder or "you", "kind": m.kind, "weight": m.weight} for m in decision.delivered.members
            ],
            "values": values["delivered"],
            "gain": decision.gain.interval._asdict(),
            "probability": decision.gain.probability,
            "gain_over_own_stack": decision.gain_over_own_stack.interval._asdict(),
            "vetoed": decision.vetoed,
        },
        "alone": {"choice": decision.own_choice, "values": {n: v for n, v in values.items() if n != "delivered"}},
        "curve": [point._asdict() for point in decision.curve],
        "plan": {"dealings": decision.dealings, "folds": FOLDS},
        "cost": {"exchanges": 1, "bytes": sum(size_of(one.partner.message) for one in found)},
        "notes": list(notes),
        "warnings": list(warnings),
    }
    return {"headline": headline(advice), "next": next_step(advice), **advice}


def _described(score: Score) -> dict[str, Any]:
    one = score.measure
    return {key: getattr(one, key) for key in ("name", "label", "better", "scale", "rows", "unit")}


def _entry(one: _Found, judged: Judged | None, mine: Mine, decision: Decision) -> dict[str, Any]:
    """One partner of advice.json: the word, the probability and the gain come from one rule."""
    gain: Interval = NOTHING.interval if judged is None else judged.gain.interval
    chance = 0.0
    if judged is not None and judged.admitted:
        chance = probability(Signs.of(judged, one.partner.rows, len(mine.labels)), gain.value)
    word = verdict(copy=one.copy, differs=bool(one.differs), admitted=bool(judged and judged.admitted), chance=chance)
    entry = {
        "name": one.partner.name,
        "rows": one.partner.rows,
        "verdict": word,
        "probability": chance,
        "gain": gain._asdict(),
        "share": decision.delivered.shares().get(one.partner.name, 0.0),
        "z": None if judged is None else judged.z,
        "differs": [{**d._asdict(), "classes": list(d.classes), "undone": d.can_be_undone} for d in one.differs],
        "fit": {"before": one.fit[0], "after": one.fit[1]},
    }
    return {**entry, "reason": reason(entry, one.partner.why)}


def size_of(sent: Message | None) -> int:
    """Bytes of a message."""
    if sent is None:
        return 0
    return sum(array.nbytes for array in (*sent.linear, *sent.trees, *sent.summary)) + 16


def _write(folder: Path, mine: Mine, decision: Decision, advice: Mapping[str, Any], *, stored: bool) -> None:
    """The models and advice.json, the latter last."""
    about = mine.prepared.as_dict()
    if stored:
        for name, stack in (("model", decision.delivered), ("alone", decision.alone)):
            make_folder(folder / name)
            for file, data in write_stack(stack, about).items():
                write_atomically(folder / name / file, data)
    write_json(folder / ADVICE, dict(advice))


def _settings(config: Config) -> dict[str, Any]:
    """How files are read; settings that an advice would not use are refused."""
    if config.run.problem != "files":
        raise UsageError(f"advise works on problem files, not {config.run.problem}; set run.problem='files'.")
    if config.privacy != PrivacyTable():
        raise UsageError(
            "advise weighs models on your rows as they are: [privacy] would cover none of it. Leave it out."
        )
    usual, known = load(None, {}, {"run.problem": "files"}).settings(), {f"problem.{key}" for key in USED} | USED_OF_RUN
    given = config.settings().items()
    strange = [f"{key} = {value!r}" for key, value in given if key not in known and value != usual.get(key, value)]
    if strange:
        raise UsageError(
            f"advise does not use these settings: {'; '.join(strange)}: it fits linear models and trees, once, on this "
            "machine. Leave them out; `coterie run` uses them."
        )
    return {key: config.problem[key] for key in USED if key in config.problem}
