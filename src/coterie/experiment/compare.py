"""Methods × seeds on one problem, at equal rounds, bytes or exchanges: means, ranks, paired tests over the seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from coterie.errors import UsageError, unknown
from coterie.experiment.build import check_needs, make_problem
from coterie.experiment.config import Config, load, resolve
from coterie.experiment.measuring import recorded_names
from coterie.experiment.processes import Job, Watch, check_unchanged, run_all
from coterie.experiment.records import at_work_on, read_plan
from coterie.measures import Measure, of_summary
from coterie.methods.registry import method_entry
from coterie.numerics.paired import flip_test, holm, least_p, ranks, t_test
from coterie.plugins import label, labels
from coterie.storage import write_atomically, write_json

WITH_BUDGET = 5  # times as many rounds at most, so that cheap methods can use the budget up
LEVEL = 0.05
PLAN = "compare.json"

Settings = Mapping[str, Mapping[str, Any]]


class Case(NamedTuple):
    """One run of a comparison; `method` is the short name of its method, which is unique in the comparison."""

    method: str
    seed: int
    config: Config

    @property
    def name(self) -> str:
        """Its folder's name."""
        return f"{self.method}-{self.seed}"


def plan(
    base: Config,
    methods: Sequence[str],
    seeds: Sequence[int],
    settings: Settings | None = None,
    measure: str | None = None,
) -> list[Case]:
    """All runs, seed by seed; whatever is wrong with them is found here.

    Args:
        base: the configuration that all of them share.
        methods: their names.
        seeds: each method runs once for each.
        settings: by method, over the defaults.
        measure: the measure to compare by, which every method must have.
    """
    if not methods or not seeds:
        raise UsageError("a comparison needs methods and seeds; for example --methods meritfed,fedavg --seeds 0,1,2.")
    for what, given in (("method", methods), ("seed", seeds)):
        twice = [value for value in given if list(given).count(value) > 1]
        if twice:
            raise UsageError(f"the {what} {twice[0]} is named twice.")
    own = {name: dict((settings or {}).get(name, {})) for name in methods}
    configs = {name: _configured(base, name, own[name], everyone=False) for name in methods}
    if any(config.problem.get("everyone") is True for config in configs.values()):  # then for all, or nothing compares
        configs = {name: _configured(base, name, own[name], everyone=True) for name in methods}
    problem = make_problem(configs[methods[0]].with_run(seed=seeds[0]))
    for config in configs.values():
        method = method_entry(config.run.method).make(**config.method)
        check_needs(method, problem, config.run.problem)
        if measure is not None:
            names = recorded_names(problem, method.view(method.init(problem, problem.clients)))
            if measure not in names:
                raise unknown(f"measure of {label(config.run.method)}", measure, names)
    shown = labels(methods)
    if len(set(shown.values())) < len(shown):
        raise UsageError(f"two of the methods {', '.join(methods)} have the same name; rename the file of one.")
    return [Case(shown[name], seed, configs[name].with_run(seed=seed)) for seed in seeds for name in methods]


def _configured(base: Config, method: str, settings: Mapping[str, Any], *, everyone: bool) -> Config:
    tables = base.as_dict()
    tables.pop("version")
    tables["method"] = dict(settings)
    tables["run"] |= {"method": method, "baselines": [], "threads": 1}
    if everyone:
        tables["problem"] |= {"everyone": True}
    elif tables["problem"].get("everyone") is False:  # what base has by default is not what was asked for
        tables["problem"].pop("everyone")
    return resolve(tables)


def compare(
    cases: Sequence[Case],
    folder: Path,
    *,
    jobs: int | None = None,
    force: bool = False,
    watch: Watch | None = None,
    measure: str | None = None,
) -> dict[str, Any]:
    """Run what has not been run, write compare.json and return it; a comparison in the folder is resumed.

    measure is the one to compare by; by default the most important that all runs have.
    """
    runs = [Job(case.config, folder / "runs" / case.name) for case in cases]
    plan = {"methods": _unique(c.method for c in cases), "seeds": _unique(c.seed for c in cases), "jobs": jobs}
    with at_work_on(folder, PLAN, force=force):
        check_unchanged(runs)
        for job in runs:
            job.write()
        write_json(folder / PLAN, {**plan, "outcome": "not finished", "measure": measure})
        write_atomically(folder / "config.toml", cases[0].config.as_toml().encode())
        summaries = run_all(runs, at_once=jobs, watch=watch)
        result = {**plan, **summarise(list(zip(cases, summaries, strict=True)), measure)}
        write_json(folder / PLAN, result)
    return result


def resume(folder: Path, *, watch: Watch | None = None) -> dict[str, Any]:
    """Run what is left of an interrupted comparison, as it was begun."""
    methods, seeds, measure, jobs = read_plan(folder / PLAN, "methods", "seeds", "measure", "jobs")
    cases = [
        Case(method, seed, load(folder / "runs" / f"{method}-{seed}.toml")) for seed in seeds for method in methods
    ]
    return compare(cases, folder, measure=measure, jobs=jobs, watch=watch)


def _unique(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def summarise(done: Sequence[tuple[Case, Mapping[str, Any]]], measure: str | None = None) -> dict[str, Any]:
    """The table, one row per method, by a measure or the most important that all finished runs have.

    The first method is the reference.
    """
    fine = [(case, summary) for case, summary in done if summary["outcome"] == "finished"]
    config = done[0][0].config
    limits = {key: getattr(config.run, key) for key in ("rounds", "budget", "exchanges")}
    settings = {"problem": label(config.run.problem), **limits}
    runs = [
        {"method": case.method, "seed": case.seed, "folder": f"runs/{case.name}"}
        | {key: summary.get(key) for key in ("outcome", "message", "rounds", "final", "communication", "seconds")}
        for case, summary in done
    ]
    outcome = "finished" if len(fine) == len(done) else "some runs did not finish"
    chosen = chosen_measure([summary for _, summary in fine], measure)
    if chosen is None:
        return {**settings, "outcome": outcome, "measure": None, "rows": [], "tests": None, "runs": runs}
    values: dict[str, dict[int, float]] = {case.method: {} for case, _ in done}
    for case, summary in fine:
        values[case.method][case.seed] = float(summary["final"][chosen.name])
    placed = _mean_ranks(values, higher_is_better=chosen.higher)
    rows = []
    for method, by_seed in values.items():
        mine = [summary for case, summary in fine if case.method == method]
        rows.append(
            {
                "method": method,
                "mean": fmean(by_seed.values()) if by_seed else None,
                "std": stdev(by_seed.values()) if len(by_seed) > 1 else None,
                "values": {str(seed): value for seed, value in by_seed.items()},
                "rank": placed.get(method),
                "rounds": _mean(s["rounds"] for s in mine),
                "bytes": _mean(s["communication"]["bytes_up"] + s["communication"]["bytes_down"] for s in mine),
                "seconds": _mean(s["seconds"] for s in mine),
                "unfinished": sum(case.method == method for case, _ in done) - len(mine),
            }
        )
    return {
        **settings,
        "outcome": outcome,
        "measure": chosen.name,
        "declared": chosen.as_dict(),
        "higher_is_better": chosen.higher,
        "rows": rows,
        "tests": paired_tests(values),
        "runs": runs,
    }


def chosen_measure(summaries: Sequence[Mapping[str, Any]], wanted: str | None) -> Measure | None:
    """The measure to compare by: the wanted one, or the most important that all have; None where there is none.

    Args:
        summaries: of the runs that finished.
        wanted: the name of a measure, or None.
    """
    known = {m.name: m for summary in summaries for m in of_summary(summary)}
    common = [m for m in known.values() if all(_value(summary, m.name) is not None for summary in summaries)]
    if wanted is None:
        return next((m for m in common if m.rows != "weights"), None)
    if summaries and wanted not in known:
        raise unknown("measure", wanted, known)
    if summaries and wanted not in {m.name for m in common}:
        raise UsageError(
            f"not every run has a finite {wanted}; compare by one that all have: {', '.join(m.name for m in common)}."
        )
    return known.get(wanted)


def _value(summary: Mapping[str, Any], measure: str) -> float | None:
    value = summary["final"].get(measure)
    return value if isinstance(value, int | float) else None


def _mean(values: Any) -> float | None:
    listed = list(values)
    return fmean(listed) if listed else None


def _mean_ranks(values: Mapping[str, Mapping[int, float]], *, higher_is_better: bool) -> dict[str, float]:
    """Ranks within each seed that every method finished, averaged."""
    methods = [m for m, by_seed in values.items() if by_seed]
    common = sorted(set.intersection(*(set(values[m]) for m in methods))) if methods else []
    table = [ranks([values[m][s] for m in methods], higher_is_better=higher_is_better) for s in common]
    return {m: fmean(row[i] for row in table) for i, m in enumerate(methods)} if table else {}


def paired_tests(values: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    """Each other method against the first, on the seeds that both finished, and what so many seeds can show."""
    reference, *others = values
    rows: list[dict[str, Any]] = []
    for method in others:
        common = sorted(values[reference].keys() & values[method].keys())
        differences = [values[reference][s] - values[method][s] for s in common]
        mean = fmean(differences) if differences else None
        pair = {"p_t": t_test(differences), "p_exact": flip_test(differences)}
        rows.append({"method": method, "pairs": len(common), "difference": mean, **pair})
    for row, p in zip(rows, holm([row["p_t"] for row in rows]), strict=True):
        row["p_holm"] = p
    pairs = max((row["pairs"] for row in rows), default=0)
    return {"reference": reference, "comparisons": rows, "least_p": least_p(pairs), "note": _what_can_be_shown(pairs)}


def _what_can_be_shown(pairs: int) -> str:
    if pairs < 2:
        return "With one seed nothing is shown but that seed: give more with --seeds."
    exact = f"With {pairs} seeds the exact test cannot fall below p = {least_p(pairs):.3g}"
    if least_p(pairs) > LEVEL:
        need = next(n for n in range(2, 20) if least_p(n) <= LEVEL)
        return (
            f"{exact}, so it cannot show a difference at the 5 % level however large that is ({need} seeds can). "
            "The t-test can, if one takes the differences for normally distributed, which so few seeds cannot check."
        )
    return f"{exact}. The t-test takes the differences for normally distributed; the exact test does not."
