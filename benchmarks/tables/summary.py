"""The tables of a folder of runs as Markdown: gains, probabilities of partners, faults and copies."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Record = Mapping[str, Any]
BASE, OWN = "best alone", "own stack"
MINE = "alone"  # the own model of the advice itself
MODELS = ("veto", "cautious", MINE, "before", OWN, "add-one", "pooled")
KINDS = ("mix", "friends", "useless", "natural")
MATTERS, LARGE = 0.005, 0.01  # of AUC, R² or C
LOW, HIGH = 0.2, 0.8  # probabilities that sound sure
RESAMPLES = 2000


def gains(records: Iterable[Record], name: str, over: str = BASE) -> list[tuple[str, float]]:
    """(table, gain of a model over another in the measure) of all federations that have both."""
    scores = [(one["table"], one["scores"]) for one in records]
    return [(table, found[name] - found[over]) for table, found in scores if name in found and over in found]


def mean_error(found: Sequence[tuple[str, float]], *, by_table: bool = False) -> str:
    """The mean with its bootstrap standard error over federations, or over tables with all their federations."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for number, (table, value) in enumerate(found):
        groups[table if by_table else number].append(value)
    if not groups:
        return "–"
    sums = np.array([(sum(values), len(values)) for values in groups.values()])
    drawn = sums[np.random.default_rng(0).integers(0, len(sums), (RESAMPLES, len(sums)))].sum(1)
    return f"{sums[:, 0].sum() / sums[:, 1].sum():+.3f} ({(drawn[:, 0] / drawn[:, 1]).std():.3f})"


def share(flags: Iterable[Any]) -> str:
    """A share with its counts."""
    listed = [bool(flag) for flag in flags]
    return f"{np.mean(listed):.3f} ({sum(listed)}/{len(listed)})" if listed else "–"


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; nothing without rows."""
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) if len(lines) > len(("header", "rule")) else ""


def gained(records: Sequence[Record], over: str = BASE) -> str:
    """By model: the gain over a reference, by kind, the worst, and how often it loses."""
    rows = []
    for name in MODELS:
        if (found := gains(records, name, over)) and name != over:
            values = [value for _, value in found]
            kinds = [mean_error(gains([one for one in records if one["kind"] == kind], name, over)) for kind in KINDS]
            lost, errors = share(value < -MATTERS for value in values), mean_error(found, by_table=True)
            rows.append([name, mean_error(found), errors, *kinds, f"{min(values):+.3f}", lost])
    return markdown(["model", "all (s.e.)", "all (s.e. over tables)", *KINDS, "worst", f"below −{MATTERS}"], rows)


def by(records: Sequence[Record], key: str) -> str:
    """The gain of every model over the best alone by table or by own rows."""
    rows = []
    for value in dict.fromkeys(one[key] for one in records):
        group = [one for one in records if one[key] == value]
        level = np.mean([one["scores"].get(BASE, np.nan) for one in group])
        rows.append([value, len(group), f"{level:.3f}", *(mean_error(gains(group, name)) for name in MODELS)])
    return markdown([key, "federations", BASE, *MODELS], rows)


def losses(records: Iterable[Record]) -> str:
    """Federations whose delivered model is below the best alone, and the standard error of that on the test rows."""
    lost = [(one["scores"]["veto"] - one["scores"][BASE], one) for one in records if "test_error" in one]
    named = sorted((gap, _where(one), one["test_error"]) for gap, one in lost if gap < -MATTERS)
    return "\n".join(f"- {where}: {gap:+.3f} ± {error:.3f}" for gap, where, error in named)


def probabilities(records: Sequence[Record]) -> str:
    """The probability that a partner helps, and what the model with it alone beside me gains on the test rows."""
    rows = []
    for name in ("all", *KINDS):
        told = [
            (one["probability"] or 0.0, one["adds"])
            for record in records
            for one in record["partners"]
            if name in ("all", record["kind"]) and one.get("adds") is not None and one.get("verdict")
        ]
        if told:
            p, adds = np.array(told).T
            true = adds > MATTERS
            rates = [share((p > 1 / 2) == true), share(true[p > HIGH]), share(~true[p < LOW])]
            found, costs = share(p[adds > LARGE] > 1 / 2), share(adds < -LARGE)
            constant = true.mean() * (1 - true.mean())
            rows.append([name, len(p), f"{((p - true) ** 2).mean():.3f}", f"{constant:.3f}", *rates, found, costs])
    rates = ["p > .5 right", f"p > {HIGH} right", f"p < {LOW} right", f"gains > {LARGE} found", f"costs > {LARGE}"]
    return markdown(["kind", "partners", "Brier", "of a constant", *rates], rows)


def verdicts(records: Iterable[Record]) -> str:
    """What is said of partners by the truth about them, and what they add in the mean."""
    told: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        for one in record["partners"]:
            told["natural" if record["kind"] == "natural" else one["truth"]].append(one)
    words = sorted({str(one.get("verdict")) for group in told.values() for one in group})
    rows = []
    for truth, group in sorted(told.items()):
        counts = [sum(str(one.get("verdict")) == word for one in group) for word in words]
        added = [one["adds"] for one in group if one.get("adds") is not None]
        rows.append([truth, len(group), *counts, f"{np.mean(added):+.4f}" if added else "–"])
    return markdown(["truth", "partners", *words, "adds"], rows)


def stated(records: Iterable[Record]) -> str:
    """The gain that is stated beside the one that the test rows show."""
    said = [(one["stated"], one["scores"]["veto"] - one["scores"][BASE]) for one in records if "test_error" in one]
    pairs = np.array([pair for pair in said if pair[0] is not None]).reshape(-1, 2)
    if not len(pairs):
        return ""
    text = f"stated {pairs[:, 0].mean():+.3f}, found {pairs[:, 1].mean():+.3f}"
    return f"{text}, mean distance {abs(pairs[:, 0] - pairs[:, 1]).mean():.3f} ({len(pairs)} federations)"


def findings(records: Iterable[Record], kind: str, flag: str) -> str:
    """How often planted faults are named, or copies found, by what was planted; the last rows are false alarms."""
    found: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        for one in record["partners"] if record["kind"] == kind else ():
            planted = bool(one["fault"]) or "copy" in one["truth"]
            found[one["truth"]].append(one.get(flag if planted else "named" if kind == "faults" else flag, False))
    return markdown([kind, "found"], [[truth, share(flags)] for truth, flags in sorted(found.items())])


def with_before(records: Sequence[Record], before: Iterable[Record]) -> list[Record]:
    """The records with the score of another version of coterie on the same federation."""
    other = {_where(one): {"before": one["scores"]["veto"]} for one in before if "veto" in one["scores"]}
    return [{**one, "scores": {**one["scores"], **other.get(_where(one), {})}} for one in records]


def _where(one: Record) -> str:
    return f"{one['table']}, {one['kind']}, {one['own']} own rows, seed {one['seed']}"


def text(records: Sequence[Record], before: Sequence[Record] = ()) -> str:
    """All tables as Markdown; those with times apart from classes and numbers."""
    proven = [one for one in with_before(records, before) if one["kind"] in KINDS]
    plain, times = ([one for one in proven if (one["task"] == "times") == flag] for flag in (False, True))
    parts = [
        (f"Gain over {BASE}: {len(plain)} federations of classes and numbers", gained(plain)),
        (f"Gain over the {OWN}", gained(plain, OWN)),
        ("Gain over the advice's own model", gained(plain, MINE)),
        ("By own rows", by(plain, "own")),
        ("By table", by(plain, "table")),
        ("Natural sites by table", by([one for one in plain if one["kind"] == "natural"], "table")),
        (f"Gain over {BASE}: {len(times)} federations with times", gained(times)),
        ("Times by table", by(times, "table")),
        (f"Below {BASE}", losses(proven)),
        ("Probabilities of partners", probabilities(plain)),
        ("Probabilities of partners, times", probabilities(times)),
        ("Verdicts by truth", verdicts(records)),
        ("Gain stated", stated(proven)),
        ("Faults", findings(records, "faults", "fault_named")),
        ("Copies", findings(records, "copies", "copy")),
        ("Processor seconds of one advice", f"{np.mean([one['seconds'] for one in records]):.1f}"),
        ("Errors", "\n".join(f"- {_where(one)}: {one['error']}" for one in records if one["error"])),
    ]
    return "\n\n".join(f"## {title}\n\n{made}" for title, made in parts if made)
