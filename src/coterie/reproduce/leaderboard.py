"""`coterie leaderboard`: methods × problems × seeds under one protocol, with ranks over the problems.

Every run may move the same number of bytes (`run.budget`); the round that reaches it is the last. Every method is tuned
on every problem by a grid of four settings (reproduce/entrants.py) on a seed of its own: by the accuracy on selection
rows where there is one target, by the clients' mean accuracy on their validation rows where every client is one. Both
kinds of rows are no test rows. Each problem is a study of its own, `leaderboard-PROBLEM`, so that `coterie reproduce`
and its check know it.

Methods are ranked by the mean accuracy over seeds, problem by problem, if they have a value on all problems of their
kind. Average ranks are compared by Nemenyi's critical difference (Demšar 2006).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from coterie.errors import UsageError, unknown
from coterie.experiment.processes import Watch
from coterie.experiment.records import at_work_in
from coterie.numerics.ranking import alike, average_ranks, critical_difference, friedman_p
from coterie.problems.data.sets import locate
from coterie.report.ranking import rank_diagram
from coterie.report.svg import Chart
from coterie.reproduce.entrants import ALONE, ENTRANTS, NEEDS_NORM, SECURE
from coterie.reproduce.pages import DASH, markdown
from coterie.reproduce.running import reproduce
from coterie.reproduce.study import Budget, Column, Row, Settings, Study, Table, Tuning, flat
from coterie.storage import make_folder, write_atomically, write_json

Kind = Literal["target", "everyone"]
PREFIX = "leaderboard-"
TUNING_SEED = 1000
SELECTION = 100
FEWER = 200  # test rows: digits has no more where groups need selection rows too
KINDS: dict[Kind, str] = {"target": "a model for one target", "everyone": "a model for every client"}


class Contest(NamedTuple):
    """A problem of the leaderboard.

    Args:
        name: its name.
        kind: whether one target is served, or every client.
        what: in words.
        settings: of all its runs.
        megabytes: what a run may move: about 20 rounds of FedAvg at the small scale, 100 at the other.
        data: the data set that must be there, if any.
        norm: whether its model has batch norm.
    """

    name: str
    kind: Kind
    what: str
    settings: Settings
    megabytes: int
    data: str = ""
    norm: bool = False


def _groups(data: str, megabytes: int, **more: Any) -> list[Contest]:
    words = {1: "class shares", 2: "class shares and labels", 3: "class shares and rotation"}
    words[4] = "class shares, labels and rotation"
    found = []
    for kind in KINDS:
        for setting, differ in words.items():
            own = {"data": data, "setting": setting, "everyone": kind == "everyone", **more}
            rows = {"selection": SELECTION, "test": FEWER} if kind == "target" else {}
            settings = flat(run={"problem": "groups"}, problem={**own, **rows})
            name = f"groups-{setting}" + ("" if kind == "target" else "-everyone")
            where = "" if data == "digits" else data
            found.append(
                Contest(name, kind, f"two groups that differ in {differ}", settings, megabytes, where, norm=True)
            )
    return found


def _friends(**problem: Any) -> dict[str, Any]:
    return flat(run={"problem": "friends"}, problem=problem)


def _dirichlet(data: str, megabytes: int, **more: Any) -> list[Contest]:
    where = "" if data == "digits" else data
    return [
        Contest(
            f"dirichlet-{alpha:g}",
            "everyone",
            f"classes in Dirichlet proportions, α = {alpha:g}",
            flat(run={"problem": "dirichlet"}, problem={"data": data, "alpha": alpha, **more}),
            megabytes,
            where,
        )
        for alpha in (0.1, 0.5)
    ]


ATTACKED = _friends(selection=SELECTION, attack="sign-flip", attackers=0.4)
HEART = flat(run={"problem": "heart-disease"}, problem={"model": "mlp"})


def _same_data(digits: int, heart: int) -> list[Contest]:
    """The problems that have the same data at every scale."""
    return [
        Contest("friends", "target", "5 of 15 clients are friends", _friends(selection=SELECTION), digits),
        Contest("byzantine", "target", "friends, and 6 of 10 strangers send the opposite", ATTACKED, digits),
        Contest(
            "friends-everyone", "everyone", "5 clients of one kind, 10 of another", _friends(everyone=True), digits
        ),
        Contest("heart-disease", "everyone", "four hospitals", HEART, heart, "heart-disease"),
    ]


def _noisy(data: str, megabytes: int) -> Contest:
    settings = flat(run={"problem": "noisy-clients"}, problem={"data": data, "selection": SELECTION})
    where = "" if data == "digits" else data
    return Contest("noisy-clients", "target", "7 of 10 clients have random labels", settings, megabytes, where)


def _mixture(data: str, megabytes: int) -> Contest:
    settings = flat(run={"problem": "mixture"}, problem={"data": data, "selection": SELECTION})
    where = "" if data == "digits" else data
    return Contest(
        "mixture",
        "target",
        "friends have other classes too, strangers none of the target's",
        settings,
        megabytes,
        where,
    )


SCALES: dict[str, tuple[Contest, ...]] = {
    "small": (
        *_same_data(12, 1),
        *_groups("digits", 2),
        _mixture("digits", 9),
        _noisy("digits", 8),
        *_dirichlet("fashion-mnist", 160, model="mlp"),
    ),
    "paper": (
        *_same_data(58, 4),
        *_groups("fashion-mnist", 5),
        _mixture("cifar10", 2000),
        _noisy("fashion-mnist", 500),
        *_dirichlet("fashion-mnist", 1000, model="lenet5"),
    ),
}
ABOUT = {
    "small": "Digits; Fashion-MNIST and the four hospitals where their data are there.",
    "paper": "The problems at full size.",
}
ROUNDS = {"small": 40, "paper": 400}  # at most; who moves nothing takes all of them
SEEDS = (0, 1, 2)


def _columns(kind: Kind) -> tuple[Column, ...]:
    cost = (
        Column("exchanges", {}, "rounds", ".0f"),
        Column("MB", {}, "megabytes", ".1f"),
        Column("seconds", {}, "seconds", ".1f"),
    )
    if kind == "target":
        return (
            Column("test accuracy", {}, "best:test_accuracy"),
            Column("weight of friends", {}, "final:friends_weight", ".2f"),
            *cost,
        )
    return (
        Column("test accuracy", {}, "final:personal_accuracy"),
        Column("worst client", {}, "final:personal_accuracy_worst"),
        Column("weight in group", {}, "final:group_weight", ".2f"),
        Column("better off", {}, f"better:{ALONE}", ".2f"),
        *cost,
    )


def _table(contest: Contest, scale: str) -> Table:
    entrants = {
        name: entrant for name, entrant in ENTRANTS[contest.kind].items() if contest.norm or name not in NEEDS_NORM
    }
    read = "best:selection_accuracy" if contest.kind == "target" else "personal:validation_accuracy"
    record = 5 if scale == "small" else 20
    return Table(
        f"{contest.what[0].upper()}{contest.what[1:]}.",
        tuple(Row(name, entrant.settings) for name, entrant in entrants.items()),
        _columns(contest.kind),
        {**flat(run={"rounds": ROUNDS[scale], "record": record, "checkpoint": 10_000}), **MODE, **contest.settings},
        SEEDS,
        corner="method",
        name=_folder,
        budget=Budget("megabytes", contest.megabytes),
        tuning=Tuning({name: entrant.grid for name, entrant in entrants.items()}, {"run.seed": TUNING_SEED}, read),
    )


MODE = {"federation.mode": "vmap", "federation.guard": False}


def _folder(settings: Settings) -> str:
    sums = "-sums" if settings.get("method.solver") == "lagged" else ""
    return f"{settings['run.method']}{sums}-{settings['run.seed']}"


def _study(name: str) -> Study:
    scales = {scale: contest for scale, found in SCALES.items() for contest in found if contest.name == name}
    what = next(iter(scales.values())).what
    return Study(
        f"{PREFIX}{name}",
        "../leaderboard",
        f"leaderboard: {what}",
        {scale: _table(contest, scale) for scale, contest in scales.items()},
    )


NAMES = tuple(contest.name for contest in SCALES["small"])
STUDIES = tuple(map(_study, NAMES))


def contests(scale: str, wanted: Sequence[str] = ()) -> tuple[list[Contest], list[str]]:
    """The problems of a scale, and the complaints about those that are left out because their data are missing.

    A problem that is asked for by name must have its data.

    Args:
        scale: small or paper.
        wanted: names; all where there are none.
    """
    if scale not in SCALES:
        raise unknown("scale of the leaderboard", scale, SCALES)
    for name in wanted:
        if name not in NAMES:
            raise unknown("problem of the leaderboard", name, NAMES)
    found, missing = [], []
    for contest in SCALES[scale]:
        if wanted and contest.name not in wanted:
            continue
        try:
            if contest.data:
                locate(contest.data)
            found.append(contest)
        except UsageError as error:
            if wanted:
                raise
            missing.append(f"{contest.name} is left out: {error}")
    return found, missing


def check_methods(methods: Sequence[str]) -> None:
    """Every method must be known to the leaderboard."""
    names = list(dict.fromkeys(name for entrants in ENTRANTS.values() for name in entrants))
    for method in methods:
        if method not in names:
            raise unknown("method of the leaderboard", method, names)


def leaderboard(
    scale: str,
    chosen: Sequence[Contest],
    out: Path,
    *,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    at_once: int | None = None,
    dry: bool = False,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Run what has not been run, problem by problem; write tables, ranks and diagrams; dry reads what is there.

    Args:
        scale: small or paper.
        chosen: the problems.
        out: the folder: one below it per problem, and leaderboard-SCALE.json, .md and .svg.
        methods: only these; all where there are none.
        seeds: instead of those of the scale.
        at_once: runs at a time; by default one per core.
        dry: run nothing.
        watch: hears how the runs come along.
    """
    check_methods(methods)
    again = f"the same command with --out {out}"
    results = []
    make_folder(out)
    with nullcontext() if dry else at_work_in(out, again):
        for contest in chosen:
            study = next(study for study in STUDIES if study.name == f"{PREFIX}{contest.name}")
            table = study.at(scale)
            rows = [row.name for row in table.rows if not methods or row.name in methods]
            if rows:
                part = table.only(rows, [], seeds)
                options: dict[str, Any] = {"at_once": at_once, "dry": dry, "watch": watch, "again": again}
                results.append(reproduce(study, part, scale, out / contest.name, **options))
        result = summary(scale, results)
        write_json(out / f"leaderboard-{scale}.json", result)
        write_atomically(out / f"leaderboard-{scale}.md", page(scale, results).encode())
        for chart in diagrams(result):
            write_atomically(out / f"{chart.name}.svg", chart.file(paper=True).encode())
    return result


def kind_of(result: Mapping[str, Any]) -> Kind:
    """Whether a stored table is of one target or of every client."""
    return next(c.kind for c in SCALES["small"] if f"{PREFIX}{c.name}" == result["name"])


def accuracies(results: Sequence[Mapping[str, Any]], column: int = 0) -> dict[str, dict[str, float]]:
    """By method and problem, the mean over the seeds, where all seeds of the problem are there.

    Args:
        results: stored tables.
        column: which column; the first is the accuracy.
    """
    found: dict[str, dict[str, float]] = {}
    for result in results:
        for row in result["rows"]:
            values = row["cells"][column]["values"]
            if len(values) == len(result["seeds"]):
                found.setdefault(row["name"], {})[result["name"].removeprefix(PREFIX)] = fmean(values)
    return found


def ranking(results: Sequence[Mapping[str, Any]], column: int = 0) -> dict[str, Any]:
    """Average ranks over problems of one kind, of the methods that have a value on all of them.

    Args:
        results: stored tables of one kind.
        column: which column to rank by.
    """
    found = accuracies(results, column)
    problems = sorted({problem for by_problem in found.values() for problem in by_problem})
    whole = {name: [v[p] for p in problems] for name, v in found.items() if len(v) == len(problems)}
    ranked = average_ranks(whole) if problems and whole else {}
    enough = len(ranked) > 1 and len(problems) > 1
    difference = critical_difference(len(ranked), len(problems)) if enough else None
    return {
        "problems": problems,
        "ranks": ranked,
        "means": {name: fmean(whole[name]) for name in ranked},
        "difference": difference,
        "p": friedman_p(whole) if enough else None,
        "alike": [list(group) for group in alike(ranked, difference)] if difference is not None else [],
        "unranked": sorted(set(found) - set(ranked)),
    }


def by_kind(results: Sequence[Mapping[str, Any]]) -> dict[Kind, list[Mapping[str, Any]]]:
    """The tables of both kinds; those without a value are left out."""
    filled = [r for r in results if any(row["cells"][0]["values"] for row in r["rows"])]
    found: dict[Kind, list[Mapping[str, Any]]] = {}
    for kind in KINDS:
        of_kind = [result for result in filled if kind_of(result) == kind]
        if of_kind:
            found[kind] = of_kind
    return found


class Situation(NamedTuple):
    """A line of the decision table: whose problems count, which methods may be taken, and by what they are ranked."""

    words: str
    kind: Kind
    problems: tuple[str, ...]
    secure: bool = False
    column: int = 0


ONE = ("friends", "groups-1", "groups-2", "groups-3", "groups-4", "mixture", "noisy-clients")
GROUPED = ("friends-everyone", *(f"groups-{i}-everyone" for i in range(1, 5)))
OWN_CLASSES = ("dirichlet-0.1", "dirichlet-0.5")
SITUATIONS = (
    Situation("one target; some clients are strangers", "target", ONE),
    Situation("the same, and the server may see sums only", "target", ONE, secure=True),
    Situation("one target; clients attack", "target", ("byzantine",)),
    Situation("everyone wants a model; there are groups", "everyone", GROUPED),
    Situation("everyone wants a model; classes are unequal", "everyone", OWN_CLASSES),
    Situation("everyone wants a model; four hospitals", "everyone", ("heart-disease",)),
    Situation("everyone, and the server may see sums only", "everyone", (*GROUPED, *OWN_CLASSES), secure=True),
    Situation("everyone, and the worst client counts", "everyone", (*GROUPED, *OWN_CLASSES), column=1),
)


def decisions(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every situation: the method of the best average rank on those of its problems that have results, the second,
    and that of the best mean accuracy, with means.

    Args:
        results: stored tables.
    """
    lines = []
    for situation in SITUATIONS:
        wanted = {f"{PREFIX}{name}" for name in situation.problems}
        those = [result for result in results if result["name"] in wanted]
        found = ranking(those, situation.column)
        able = {name: r for name, r in found["ranks"].items() if not situation.secure or name in SECURE}
        if not able:
            continue
        best = min(able, key=able.__getitem__)
        second = min((n for n in able if n != best), key=able.__getitem__, default=None)
        highest = max(able, key=found["means"].__getitem__)
        names = (best, second, highest, "fedavg", ALONE)
        means = {name: found["means"].get(name) for name in names if name is not None}
        counted = f"{len(found['problems'])} of {len(wanted)}"
        line = {"situation": situation.words, "problems": counted, "take": best, "second": second}
        lines.append({**line, "highest": highest, "means": means})
    return lines


def summary(scale: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Ranks of both kinds and the decision table, as plain data."""
    return {
        "scale": scale,
        "rankings": {kind: ranking(of_kind) for kind, of_kind in by_kind(results).items()},
        "decisions": decisions(results),
    }


def diagrams(result: Mapping[str, Any]) -> list[Chart]:
    """One critical-difference diagram per kind that has ranks."""
    drawn = []
    for kind, found in result["rankings"].items():
        if found["difference"] is not None:
            title = f"Average ranks on {len(found['problems'])} problems, {KINDS[kind]}"
            drawn.append(rank_diagram(f"leaderboard-{kind}", title, found["ranks"], found["difference"]))
    return drawn


def page(scale: str, results: Sequence[Mapping[str, Any]], images: str = "") -> str:
    """All of it in Markdown: the decision table, ranks, and one table per problem.

    Args:
        scale: its name.
        results: stored tables.
        images: the folder of the diagrams, as the page names it.
    """
    result = summary(scale, results)
    parts = [ABOUT[scale], "", "### What to take", "", *_decision_lines(result["decisions"])]
    for kind, found in result["rankings"].items():
        parts += ["", f"### Ranks: {KINDS[kind]}", "", *_rank_lines(kind, found, images)]
        for of_kind in by_kind(results)[kind]:
            name = of_kind["name"].removeprefix(PREFIX)
            parts += ["", f"#### {name}", "", markdown(of_kind).rstrip()]
    return "\n".join(parts) + "\n"


def _decision_lines(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    if not lines:
        return ["There are no results yet."]
    rows = ["| situation | problems | take | accuracy | second | highest mean | fedavg | alone |", "|---" * 8 + "|"]
    for line in lines:
        means = line["means"]
        others = [
            DASH if name is None else f"{name} {_share(means[name])}" for name in (line["second"], line["highest"])
        ]
        cells = [line["situation"], line["problems"], f"**{line['take']}**", _share(means[line["take"]]), *others]
        rows.append("| " + " | ".join([*cells, _share(means.get("fedavg")), _share(means.get(ALONE))]) + " |")
    return rows


def _rank_lines(kind: Kind, found: Mapping[str, Any], images: str) -> list[str]:
    rows = ["| method | average rank | mean accuracy |", "|---" * 3 + "|"]
    rows += [f"| {name} | {rank:.2f} | {_share(found['means'][name])} |" for name, rank in found["ranks"].items()]
    if found["difference"] is not None:
        close = "; ".join(", ".join(group) for group in found["alike"]) or "none"
        p = "" if found["p"] is None else f" Friedman's test: p = {found['p']:.2g}."
        rows += [
            "",
            f"{len(found['problems'])} problems. Two average ranks differ significantly (5 %) if they are "
            f"{found['difference']:.2f} apart.{p} Not significantly apart: {close}.",
            "",
            f"![Average ranks with bars over methods that are not significantly apart]({images}leaderboard-{kind}.svg)",
        ]
    if found["unranked"]:
        rows += ["", f"Without a rank, because a problem lacks them: {', '.join(found['unranked'])}."]
    return rows


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f}"
