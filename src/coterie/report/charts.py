"""Which charts a result deserves, and what it comes to in plain words."""

import statistics
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from coterie.measures import Measure
from coterie.measures import headline as most_important
from coterie.numerics import clusters
from coterie.report.results import MOST_NUMBERS, MOST_POINTS, Run, is_number, moved, thinned
from coterie.report.svg import LIGHT, Bar, Chart, Line, bars, graph, heat_map, lines, matrix_map, short
from coterie.report.svg import size as size_text
from coterie.report.terminal import ranges

ALONE = {"local-train": "training alone"}
AVERAGING = {"fedavg": "plain averaging", "local-svrg": "plain averaging", "sgd-full": "plain averaging"}
AXES = {"round": "rounds", "exchanges": "exchanges", "bytes": "bytes", "points": "points", "seconds": "seconds"}
"""What measures are drawn against, and how the buttons and files are called."""
AGAINST = AXES | {"exchanges": "rounds of communication", "bytes": "bytes moved", "points": "rows touched"}
MOST_BARS = 20
NAMED = 5  # clients that get a colour of their own where friends are not known
HEAVY = 0.9  # of the weight: whoever carries it is named
LARGEST_MATRIX = 200


class Group(NamedTuple):
    """Runs that differ in nothing but the seed: one curve, one row."""

    name: str
    runs: list[Run]
    colour: int
    is_baseline: bool

    def finals(self, measure: str) -> list[float]:
        """The last value of each run that has one."""
        values = [run.final.get(measure) for run in self.runs]
        return [float(v) for v in values if isinstance(v, int | float)]


def groups(runs: Sequence[Run]) -> list[Group]:
    """Main runs by configuration, then their baselines by name; a baseline that was also run itself is left out."""
    mains: dict[str, list[Run]] = {}
    for run in runs:
        mains.setdefault(repr(_settings(run)), []).append(run)
    names = _names([members[0] for members in mains.values()])
    found = [(name, members, False) for name, members in zip(names, mains.values(), strict=True)]
    beside: dict[str, list[Run]] = {}
    methods = {run.method for run in runs}
    for run in runs:
        for name, baseline in run.baselines.items():
            if name not in methods:
                beside.setdefault(name, []).append(baseline)
    found += [(name, members, True) for name, members in beside.items()]
    return [Group(name, members, i, base) for i, (name, members, base) in enumerate(found)]


def _settings(run: Run) -> dict[str, Any]:
    """What makes two runs the same but for the seed; what only says how they were computed does not."""
    silent = {"seed", "threads", "record", "evaluate", "checkpoint", "baselines", "log"}
    silent |= {"mode", "chunk", "memory", "compile"}
    return {
        f"{table}.{key}": value
        for table, values in run.config.items()
        for key, value in values.items()
        if key not in silent
    }


def _names(runs: list[Run]) -> list[str]:
    """Methods; where one occurs twice, with what tells its runs apart."""
    names = []
    for run in runs:
        same = [_settings(other) for other in runs if other.method == run.method and other is not run]
        own = _settings(run)
        apart = {key: own.get(key) for other in same for key in {*own, *other} if own.get(key) != other.get(key)}
        differing = ", ".join(f"{key.partition('.')[2]}={value}" for key, value in sorted(apart.items()))
        names.append(f"{run.method} ({differing})" if differing else run.method)
    return names


def measures_of(found: Sequence[Group]) -> tuple[Measure, ...]:
    """The declared measures of all runs, the most important first; the first run's order holds."""
    each = {measure.name: measure for group in found for run in group.runs for measure in run.measures}
    return tuple(each.values())


def headline_measure(found: Sequence[Group]) -> Measure | None:
    """The most important measure that all of them have, else one that the first has."""
    for part in (found, found[:1]):
        lasts = [run.final for group in part for run in group.runs]
        measure = most_important(measures_of(found), lasts)
        if measure is not None and all(group.finals(measure.name) for group in part):
            return measure
    return None


def measure_charts(found: Sequence[Group]) -> list[dict[str, Chart]]:
    """Every declared measure against each of `AXES`, all groups in one chart."""
    return [
        {x: measure_chart(measure, found, x) for x in AXES}
        for measure in measures_of(found)
        if any(curve(group, measure.name, "round") is not None for group in found)
    ]


def measure_chart(measure: Measure, found: Sequence[Group], x: str = "round") -> Chart:
    """One measure against one of `AXES`."""
    drawn = [line for group in found if (line := curve(group, measure.name, x)) is not None]
    drawn = _level(drawn) if x in ("exchanges", "bytes") else drawn
    title = f"{measure.label}{f', {measure.unit}' if measure.unit else ''} against {AGAINST[x]}"
    kind = "percent" if measure.share else "number"
    return lines(f"{measure.name}-{AXES[x]}", title, drawn, x=x, y=kind, log=measure.scale == "log")


def curve(group: Group, measure: str, x: str, most: int = MOST_POINTS) -> Line | None:
    """The mean over the group's runs at the rounds that all of them recorded, with a band from least to most.

    Args:
        group: runs that differ in nothing but the seed.
        measure: its name in the record.
        x: one of `AXES`.
        most: points of the line.
    """
    by_round = [{line["round"]: line for line in run.metrics if is_number(line.get(measure))} for run in group.runs]
    common = sorted(set.intersection(*map(set, by_round)))
    common = [common[i] for i in thinned(len(common), min(most, MOST_NUMBERS // 20))]
    if not common:
        return None
    values = [[float(found[t][measure]) for found in by_round] for t in common]
    across: list[float] = [float(t) for t in common]
    if x != "round":
        pairs = list(zip(group.runs, by_round, strict=True))
        across = [statistics.fmean(_spent(run, found[t], x) for run, found in pairs) for t in common]
    band = ([min(v) for v in values], [max(v) for v in values]) if len(group.runs) > 1 else None
    colour = group.colour % len(LIGHT)
    ys = [statistics.fmean(v) for v in values]
    across = [float(short(v, 6) or 0) for v in across]
    return Line(group.name, across, ys, group.name, colour, colour, band)


def _spent(run: Run, line: dict[str, Any], x: str) -> float:
    """What a run had cost at a recorded round: exchanges, bytes, points or seconds."""
    if x == "seconds":
        seconds = line.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else 0.0
    traffic = run.traffic(line)
    return float(moved(traffic) if x == "bytes" else traffic["points" if x == "points" else "rounds"])


def _level(drawn: list[Line]) -> list[Line]:
    """A line of what moves nothing is drawn across, at its last value."""
    most = max((line.x[-1] for line in drawn), default=0.0)

    def across(line: Line) -> Line:
        if line.x[-1] > 0 or not most:
            return line
        return line._replace(name=f"{line.name}, last value", x=[0.0, most], y=[line.y[-1]] * 2, band=None)

    return [across(line) for line in drawn]


def last_weights(run: Run) -> list[float] | None:
    """By client, where the method learns some."""
    return run.weights.rows[-1] if run.weights is not None and run.weights.rows else None


def weight_charts(run: Run, name: str = "weights") -> list[Chart]:
    """Who helped at the end, and how the weights came about: bars, lines, a heat map; or the matrix and its graph."""
    if run.weights is None:
        return []
    if run.weights.matrix is not None:
        return _matrix_charts(run, run.weights.matrix, name)
    weights, friends = run.weights.rows[-1], run.friends
    order = sorted(range(len(weights)), key=lambda k: -weights[k])
    shown = order[:MOST_BARS]
    drawn = [Bar(run.client(k), ((weights[k], _standing(k, friends, order)),), f"{weights[k]:.3f}") for k in shown]
    rest = f"The {MOST_BARS} heaviest of {len(weights)} clients." if len(weights) > MOST_BARS else ""
    legend = [("known friends", 0), ("strangers", 1)] if friends is not None else []
    columns = [[row[k] for row in run.weights.rows] for k in range(len(weights))]
    at = [float(t) for t in run.weights.rounds]
    over = []
    for k, column in enumerate(columns):
        colour = _standing(k, friends, order)
        if friends is None:
            key, dash = (run.client(k), colour or 0) if colour is not None else ("others", 0)
        else:
            key, dash = ("known friends", 0) if colour == 0 else ("strangers", 1)
        over.append(Line(run.client(k), at, column, key, colour, dash, thin=len(weights) > 30 or key == "strangers"))
    return [
        bars(f"{name}-final", "who helped: weights at the end", drawn, note=rest, legend=legend),
        lines(f"{name}-rounds", "weights over the rounds", over),
        heat_map(
            f"{name}-map",
            "weights over the rounds, client by client",
            columns,
            run.weights.rounds,
            names=[run.client(k) for k in range(len(weights))] if run.names else (),
            source=f"{name}-rounds",
            mark=friends,
            note="The stronger the colour, the more weight." + (" Above the line: known friends." if friends else ""),
        ),
        *_spread(run, name),
    ]


def _spread(run: Run, name: str) -> list[Chart]:
    """How concentrated the weights are, by the first measure of it that is declared."""
    for measure in run.measures:
        line = curve(Group(measure.label, [run], 0, False), measure.name, "round")
        if measure.rows == "weights" and line is not None:
            return [lines(f"{name}-spread", measure.label, [line], y="percent" if measure.share else "number")]
    return []


def _standing(k: int, friends: int | None, order: list[int]) -> int | None:
    """A client's colour: by what is known of it, else one of its own if it is among the heaviest."""
    if friends is not None:
        return 0 if k < friends else 1
    place = order.index(k)
    return place if place < NAMED else None


def _matrix_charts(run: Run, matrix: list[list[float]], name: str) -> list[Chart]:
    if len(matrix) > LARGEST_MATRIX:
        return []
    found = clusters_of(run)
    names = [run.client(k) for k in range(len(matrix))] if run.names else []
    note = "Row: a target; column: who helps it; per cent where there is room. Frames: the clusters that were found."
    drawn = "Lines lead from clients to whom they give more than an equal share; large circles: others rely on them."
    return [
        matrix_map(f"{name}-matrix", "who learns from whom", matrix, found, names=names, note=note),
        graph(f"{name}-graph", "who learns from whom, as a graph", matrix, found, names=names, note=drawn),
    ]


def clusters_of(run: Run) -> list[list[int]]:
    """As the summary has them, else found anew."""
    matrix = run.weights.matrix if run.weights is not None else None
    if matrix is None:
        return []
    written = (run.summary or {}).get("clusters")
    if isinstance(written, list) and sorted(k for c in written for k in c) == list(range(len(matrix))):
        return written
    return clusters(torch.tensor(matrix))


def traffic_chart(run: Run, name: str = "communication") -> Chart | None:
    """Bytes up and down by what they were moved for."""
    if not run.causes:
        return None
    order = sorted(run.causes.items(), key=lambda item: -moved(item[1]))
    drawn = [
        Bar(
            cause.rpartition(":")[2] or cause,
            ((float(entry["bytes_up"]), 0), (float(entry["bytes_down"]), 1)),
            size_text(moved(entry)),
            f"{size_text(entry['bytes_up'])} up, {size_text(entry['bytes_down'])} down; {cause}",
        )
        for cause, entry in order
        if moved(entry)
    ]
    legend = (("up, from clients", 0), ("down, to clients", 1))
    return bars(name, "bytes moved, by cause", drawn, legend=legend) if drawn else None


class Headline(NamedTuple):
    """What a result comes to: sentences, and figures with what they are."""

    sentences: list[str]
    figures: list[tuple[str, str]]


def headline(run: Run, found: Sequence[Group]) -> Headline:
    """One run: how good, how much better than alone, who helped, what it cost."""
    measure = headline_measure(found)
    sentences, figures = [], []
    if measure is not None:
        key, label = measure.name, measure.label
        value = run.final[key]
        sentences.append(f"{run.method} reaches {measure.text(value)} {label} after {run.final['round']} rounds.")
        figures.append((measure.text(value), label))
        against = [
            (gain, f"{gain_text(measure, gain)} {words} ({measure.text(other)})")
            for group in found
            if group.is_baseline
            for other in group.finals(key)[:1]
            for gain, words in [(value - other, ALONE.get(group.name) or AVERAGING.get(group.name) or group.name)]
        ]
        if against:
            sentences.append("That is " + _listed([text for _, text in against]) + ".")
        alone = next((g for g in found if g.name in ALONE and g.is_baseline and g.finals(key)), None)
        if alone is not None:
            figures.append((measure.gap(value - alone.finals(key)[0]), "against training alone"))
    sentences += _who(run)
    if "friends_weight" in run.final and is_number(run.final["friends_weight"]):
        figures.append((f"{100 * run.final['friends_weight']:.0f} %", "of the weight at known friends"))
    elif (weights := last_weights(run)) is not None:
        figures.append((f"{1 / sum(w * w for w in weights):.1f}", f"effective clients of {len(weights)}"))
    elif run.weights is not None and run.weights.matrix is not None:
        figures.append((str(len(clusters_of(run))), "clusters of clients"))
    traffic = run.traffic()
    cost = f"{size_text(moved(traffic))} were moved in {traffic['rounds']} rounds of communication"
    seconds = run.final.get("seconds")
    took = f", in {seconds:.0f} s of computation" if is_number(seconds) else ""
    sentences.append(f"{cost}{took}.")
    figures.append((size_text(moved(traffic)), f"moved in {traffic['rounds']} rounds of communication"))
    return Headline(sentences, figures)


def gain_text(measure: Measure, gain: float) -> str:
    """How one value stands to another, in words."""
    if abs(gain) < 5e-4:
        return "level with"
    amount = measure.gap(abs(gain), signed=False)
    if measure.better == "neither":
        return f"{amount} {'above' if gain > 0 else 'below'}"
    return f"{amount} {'better' if (gain > 0) == measure.higher else 'worse'} than"


def _members(run: Run, clients: list[int]) -> str:
    """Clients in a sentence: by their names, the first eight, or by ranges of numbers."""
    if not run.names:
        return ranges(clients)
    return ", ".join(map(run.client, clients[:8])) + (", …" if len(clients) > 8 else "")


def _who(run: Run) -> list[str]:
    weights = last_weights(run)
    if run.weights is not None and run.weights.matrix is not None:
        matrix, found = run.weights.matrix, clusters_of(run)
        inside = sum(matrix[i][k] for cluster in found for i in cluster for k in cluster) / len(matrix)
        who = "; ".join(f"{{{_members(run, cluster)}}}" for cluster in found[:8]) + ("; …" if len(found) > 8 else "")
        kept = f"{100 * inside:.1f} % of the weight stays inside the own cluster"
        return [f"{len(matrix)} clients fall into {len(found)} clusters: {who}; {kept}."]
    if weights is None:
        return []
    order = sorted(range(len(weights)), key=lambda k: -weights[k])
    sums = list(accumulate(weights[k] for k in order))
    heavy = order[: 1 + sum(part < HEAVY for part in sums)]
    total = sums[len(heavy) - 1]
    named = ", ".join(f"{_members(run, [k])} ({100 * weights[k]:.0f} %)" for k in heavy[:8])
    named += ", …" if len(heavy) > 8 else ""
    sentences = [f"{len(heavy)} of {len(weights)} clients carry {100 * total:.0f} % of the weight: {named}."]
    if run.friends is not None:
        share = sum(weights[: run.friends])
        sentences.append(f"The target's {run.friends} known friends hold {100 * share:.0f} % of it.")
    return sentences


def headline_of_several(found: Sequence[Group]) -> Headline:
    """Several runs: who is best by the mean over seeds, and by how much."""
    measure = headline_measure(found)
    ranked = [group for group in found if group.finals(measure.name)] if measure is not None else []
    if measure is None or not ranked:
        return Headline([f"{sum(len(g.runs) for g in found)} runs."], [])
    key, label = measure.name, measure.label
    ranked.sort(key=lambda g: statistics.fmean(g.finals(key)), reverse=measure.higher)
    best = ranked[0]
    seeds = len(best.runs)
    start = f"{best.name} has the best {label}: {spread_text(measure, best.finals(key))}"
    sentences = [f"{start}, mean over {seeds} seeds." if seeds > 1 else f"{start}, of one seed."]
    figures = [(spread_text(measure, best.finals(key)), f"{best.name}, best {label}")]
    own = statistics.fmean(best.finals(key))
    behind = [f"{gain_text(measure, own - statistics.fmean(group.finals(key)))} {group.name}" for group in ranked[1:4]]
    if behind:
        sentences.append(f"That is {_listed(behind)}.")
    costs = {g.name: statistics.fmean(moved(run.traffic()) for run in g.runs) for g in ranked}
    sentences.append(f"{best.name} moved {size_text(costs[best.name])} a run.")
    figures.append((size_text(costs[best.name]), "moved a run"))
    figures.append((str(sum(len(g.runs) for g in found if not g.is_baseline)), "runs"))
    return Headline(sentences, figures)


def spread_text(measure: Measure, values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    return measure.spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
