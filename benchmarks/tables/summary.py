"""What the records of a grid show: verdicts against truth, intervals against test rows, models against references."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from math import hypot
from typing import Any, NamedTuple

from benchmarks.tables.adapter import HARMS, HELPS, VERDICTS
from benchmarks.tables.scenario import CELLS

Record = Mapping[str, Any]
MATTERS = 0.005
AT = 150  # own rows that recall is wanted for
USELESS = ("permuted", "noise30", "noise50")
KINDS = ("friend", "unit", "noise10", "shift", "prevalence", "noise30", "noise50", "permuted", "flipped")
REFERENCES = ("coterie alone", "alone", "friends", "helpers", "all", "boosting alone")


class Share(NamedTuple):
    """So many of so many."""

    hits: int
    total: int

    @property
    def value(self) -> float:
        """The share; NaN of nothing."""
        return self.hits / self.total if self.total else float("nan")

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.hits}/{self.total})" if self.total else "–"


def share(flags: Iterable[bool]) -> Share:
    """How many are true."""
    counted = list(flags)
    return Share(sum(counted), len(counted))


def mean(values: Iterable[float]) -> float:
    """NaN of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else float("nan")


def partners(records: Iterable[Record], *truths: str, rows: int | None = None) -> list[Mapping[str, Any]]:
    """All partners of these kinds that got a verdict; with rows, those that have so many."""
    return [
        one
        for record in records
        for one in record["partners"]
        if one["truth"] in truths and one["verdict"] and rows in (None, one["rows"])
    ]


def said(chosen: Iterable[Mapping[str, Any]], verdict: str) -> Share:
    """How many got a verdict."""
    return share(one["verdict"] == verdict for one in chosen)


def precision(records: Sequence[Record]) -> Share:
    """Of the friends and the useless ones that are said to help, how many are friends; cells with both kinds only."""
    both = [one for one in records if one["cell"] not in ("friends", "useless")]
    helpers = [one for one in partners(both, "friend", *USELESS) if one["verdict"] == HELPS]
    return share(one["truth"] == "friend" for one in helpers)


def coverage(records: Iterable[Record], *, with_test_error: bool = False) -> Share:
    """How many intervals of the first comparison hold what the test rows say.

    Args:
        records: the runs.
        with_test_error: widen each half of the interval by the error of the test rows themselves.
    """
    flags = []
    for record in records:
        for one in record.get("intervals", ())[:1]:
            value, low, high = one["gain"]
            extra = 1.96 * one["test_error"] if with_test_error else 0.0
            below, above = hypot(value - low, extra), hypot(high - value, extra)
            flags.append(value - below <= one["true"] <= value + above)
    return share(flags)


def main_measure(record: Record) -> str:
    """What models are compared by: AUC of classes, R² of numbers."""
    return "auc" if record["kind"] == "classification" else "r2"


def ahead(record: Record, *others: str) -> float:
    """The delivered model's lead over the best of some references, in the main measure; NaN where there is none."""
    scores, measure = record.get("scores") or {}, main_measure(record)
    known = [scores[name][measure] for name in others if name in scores]
    return scores["delivered"][measure] - max(known) if known else float("nan")


def leads(records: Iterable[Record], *others: str) -> list[float]:
    """The leads that are known."""
    return [lead for record in records if (lead := ahead(record, *others)) == lead]


def stability(records: Iterable[Record]) -> Share:
    """Of all partners with advices of two seeds on the same files, how many got the same verdict."""
    same: dict[tuple[Any, ...], dict[int, dict[str, str]]] = defaultdict(dict)
    for one in records:
        verdicts = {partner["file"]: partner["verdict"] for partner in one["partners"]}
        same[one["table"], one["cell"], one["own"], one["split"]][one["seed"]] = verdicts
    flags: list[bool] = []
    for by_seed in same.values():
        for a, b in combinations(by_seed.values(), 2):
            flags.extend(a[file] == b[file] for file in a if a[file] and b.get(file))
    return share(flags)


def calibration(records: Iterable[Record]) -> list[tuple[str, Share]]:
    """By the stated probability of help, how many partners raise the own model's main measure when pooled by hand."""
    bounds = (0.0, 0.05, 0.2, 0.5, 0.8, 0.95, 1.0001)
    found: dict[int, list[bool]] = defaultdict(list)
    for record in records:
        for one in record["partners"]:
            probability, gains = one.get("probability"), record.get("partner_gains", {})
            if probability is not None and one["file"] in gains:
                place = max(k for k, bound in enumerate(bounds) if probability >= bound)
                found[place].append(gains[one["file"]][main_measure(record)] > 0)
    return [(f"{bounds[k]:g} – {min(1.0, bounds[k + 1]):g}", share(found[k])) for k in sorted(found)]


def answered(records: Iterable[Record]) -> tuple[Share, Share]:
    """Of the answers "yes", how many are right; of the runs with a gain that matters, how many are answered by "yes".

    Right is a delivered model that is better on the test rows than coterie's own alone; a gain of 0.005 of AUC or R²
    matters.
    """
    known = [(one["answer"] == "yes", lead) for one in records if (lead := ahead(one, "coterie alone")) == lead]
    return share(lead > 0 for yes, lead in known if yes), share(yes for yes, lead in known if lead >= MATTERS)


def calibrated(records: Sequence[Record]) -> str:
    """The calibration as a table; nothing where no probability is stated."""
    found = calibration(records)
    return markdown(["stated", "raises AUC or R² when pooled by hand"], found) if found else ""


def must_show(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """What is measured, what is wanted, and what was found."""
    at = [one for one in records if one["own"] == AT]
    fault = [one["unit_fault"] for one in records if one.get("unit_fault")]
    classes = [one for one in records if one["kind"] == "classification"]
    numbers = [one for one in records if one["kind"] == "regression"]
    right, found = answered(records)
    return [
        (f"friends that are said to help, {AT} own rows", "≥ 0.9", str(said(partners(at, "friend"), HELPS))),
        ("… of 80 rows", "", str(said(partners(at, "friend", rows=80), HELPS))),
        ("precision against permuted and noise ≥ 30 %", "≥ 0.95", str(precision(records))),
        ("permuted and noise ≥ 30 % that are said to help", "", str(said(partners(records, *USELESS), HELPS))),
        ("friends that are said to harm", "≤ 0.05", str(said(partners(records, "friend"), HARMS))),
        ("flipped labels that are said to harm", "", str(said(partners(records, "flipped"), HARMS))),
        ("unit errors that are found", "1", str(share(one["found"] for one in fault))),
        ("… with nothing else questioned", "", str(share(not one["others"] for one in fault))),
        ("intervals that hold the test rows' difference", "0.93 – 0.97", str(coverage(records))),
        ("… allowing for the test rows' own error", "0.93 – 0.97", str(coverage(records, with_test_error=True))),
        (
            "AUC of the delivered model − coterie's alone, mean (worst cell)",
            "≥ −0.005",
            _lead(classes, "coterie alone"),
        ),
        ("… − scikit-learn's alone, mean (worst cell)", "≥ −0.005", _lead(classes, "alone")),
        ("… − best of alone and pooled helpers, mean (worst cell)", "≥ −0.01", _lead(classes, "alone", "helpers")),
        ("R² of the delivered model − coterie's alone, mean (worst cell)", "", _lead(numbers, "coterie alone")),
        ("… − scikit-learn's alone, mean (worst cell)", "", _lead(numbers, "alone")),
        ("… − best of alone and pooled helpers, mean (worst cell)", "", _lead(numbers, "alone", "helpers")),
        ("worth it: answers “yes” with a gain on the test rows", "", str(right)),
        (f"worth it: gains of {MATTERS} or more that are answered “yes”", "", str(found)),
        ("the same verdict with another seed", "", str(stability(records))),
        ("processor seconds of one advice, mean", "", f"{mean(one['seconds'] for one in records):.1f}"),
        ("runs that ended with an error", "0", str(share(bool(one["error"]) for one in records))),
    ]


def _lead(records: Sequence[Record], *others: str) -> str:
    """The mean lead over the best of some references, and the worst mean of one table, cell and number of own rows."""
    worst = min((mean(found) for _, one in _cells(records) if (found := leads(one, *others))), default=float("nan"))
    return f"{signed(mean(leads(records, *others)))} ({signed(worst)})"


def signed(value: float) -> str:
    """With its sign; a dash where there is nothing."""
    return "–" if value != value else f"{value:+.4f}"


def _cells(records: Iterable[Record]) -> list[tuple[tuple[str, str, int], list[Record]]]:
    found: dict[tuple[str, str, int], list[Record]] = defaultdict(list)
    for one in records:
        found[one["table"], one["cell"], one["own"]].append(one)
    return sorted(found.items())


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _by(records: Sequence[Record], key: str) -> list[tuple[str, list[Record]]]:
    names = sorted({one[key] for one in records}, key=lambda name: (str(type(name)), name))
    return [(str(name), [one for one in records if one[key] == name]) for name in names]


def by_table(records: Sequence[Record]) -> str:
    """Verdicts and models, table by table."""
    rows = []
    for name, group in [*_by(records, "table"), ("all", list(records))]:
        at = [one for one in group if one["own"] == AT]
        rows.append(
            [
                *(name, len(group), said(partners(at, "friend"), HELPS), said(partners(at, "friend", rows=80), HELPS)),
                *(precision(group), said(partners(group, *USELESS), HELPS), said(partners(group, "friend"), HARMS)),
                *(coverage(group), f"{mean(one['seconds'] for one in group):.1f}"),
            ]
        )
    header = ["table", "runs", f"friends help, {AT} rows", "of 80 rows", "precision", "useless said to help"]
    return markdown([*header, "friends said to harm", "coverage", "seconds"], rows)


def by_verdict(records: Sequence[Record]) -> str:
    """Verdicts by truth, and how many would have raised the main measure if pooled by hand."""
    rows = []
    for kind in KINDS:
        chosen = partners(records, kind)
        counted = Counter(one["verdict"] for one in chosen)
        gains = [
            record["partner_gains"][one["file"]][main_measure(record)]
            for record in records
            for one in record["partners"]
            if one["truth"] == kind and "partner_gains" in record
        ]
        if chosen:
            rows.append([kind, len(chosen), *(counted.get(v, 0) for v in _used(records)), share(g > 0 for g in gains)])
    return markdown(["truth", "partners", *_used(records), "pooled by hand it raises AUC or R²"], rows)


def _used(records: Sequence[Record]) -> list[str]:
    found = {one["verdict"] for record in records for one in record["partners"] if one["verdict"]}
    return [v for v in VERDICTS if v in found] + sorted(found - set(VERDICTS))


def by_cell(records: Sequence[Record]) -> str:
    """The delivered model's lead over each reference in the mean (worst table), AUC of classes and R² of numbers."""
    rows = []
    for kind in ("classification", "regression"):
        for cell in CELLS:
            for own in sorted({one["own"] for one in records}):
                group = [one for one in records if (one["kind"], one["cell"], one["own"]) == (kind, cell, own)]
                if group:
                    rows.append([kind, cell, own, len(group), *(_lead(group, name) for name in REFERENCES)])
    return markdown(["kind", "cell", "own rows", "runs", *(f"− {name}" for name in REFERENCES)], rows)


def by_model(records: Sequence[Record]) -> str:
    """AUC or R² of every model, table by table and cell by cell, and the answers."""
    rows = []
    names = ("delivered", *REFERENCES)
    for (table, cell, own), group in _cells(records):
        scored = [one for one in group if "scores" in one]
        measure = main_measure(group[0])
        values = [mean(one["scores"][name][measure] for one in scored if name in one["scores"]) for name in names]
        answers = Counter(one["answer"] or "error" for one in group)
        kinds = Counter(one["delivered"] for one in scored)
        rows.append(
            [table, cell, own, len(group), *(f"{value:.3f}" for value in values), _counts(answers), _counts(kinds)]
        )
    return markdown(["table", "cell", "own", "runs", *names, "worth it?", "what is delivered"], rows)


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counted.most_common())


def errors(records: Iterable[Record]) -> str:
    """Runs without a model, and why."""
    lines = []
    for one in records:
        if one["error"]:
            first = one["error"].splitlines()
            where = f"{one['table']}, {one['cell']}, {one['own']} own rows, split {one['split']}"
            lines.append(f"- {where}: {' '.join(first)[:300]}")
    return "\n".join(lines)


def text(records: Sequence[Record]) -> str:
    """All tables as Markdown."""
    parts: list[tuple[str, Callable[[], str]]] = [
        ("Must show", lambda: markdown(["what", "wanted", "found"], must_show(records))),
        ("By table", lambda: by_table(records)),
        ("Verdicts by truth", lambda: by_verdict(records)),
        ("The delivered model's lead, mean (worst table)", lambda: by_cell(records)),
        ("AUC or R² of every model", lambda: by_model(records)),
        ("Stated probability that a partner helps", lambda: calibrated(records)),
        ("Runs that ended with an error", lambda: errors(records)),
    ]
    return "\n\n".join(f"## {title}\n\n{made}" for title, make in parts if (made := make()))
