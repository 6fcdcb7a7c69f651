"""The answer of an advice in words, made of advice.json alone; page and terminal say the same."""

from typing import Any

from coterie.measures import Measure
from coterie.report.terminal import size_text

STRATEGIES = {  # as rows of a table, and as an instruction
    "alone": "alone",
    "helpers": "with those that agree",
    "wider": "with those that agree in part",
    "all": "with all partners",
    "learned": "with learned weights",
    "delivered": "as validation chooses",
}
WITH_TREES = "alone, boosted trees"
MEANINGS = {
    "helps": "its labels carry something for your rows and agree with them as those of your own kind would",
    "may help": "its labels carry something, but agree only in part, or training with it looks worse than alone",
    "no use": "its labels carry nothing for your rows that could be seen, or your own rows are enough",
    "harms": "training with it is worse than training alone, or its labels say the opposite of yours",
    "cannot tell": "the rows are too few to tell",
}
CLEARLY = 0.02  # of a measure between 0 and 1, by which trees alone must be better before the page says so


def measure_of(advice: dict[str, Any]) -> Measure:
    """The measure to decide by."""
    return _measure(advice["measure"])


def _measure(entry: dict[str, Any]) -> Measure:
    return Measure(**{key: entry[key] for key in ("name", "label", "better", "scale", "rows", "unit")})


def measures_of(advice: dict[str, Any]) -> list[tuple[Measure, str]]:
    """All measures, each with its explanation."""
    return [(_measure(entry), str(entry["explained"])) for entry in advice["measures"]]


def value_text(measure: Measure, value: float) -> str:
    """A value for people.

    Example:
        >>> value_text(Measure("auc", "AUC", "higher"), 0.8312)
        '0.831'
    """
    return f"{100 * value:.1f} %" if measure.share else f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"


def gain_text(measure: Measure, value: float) -> str:
    """A difference for people, with its sign.

    Example:
        >>> gain_text(Measure("accuracy", "accuracy", "higher", "share"), -0.0312)
        '−3.1 points'
    """
    text = f"{100 * value:+.1f} points" if measure.share else f"{value:+.3f}" if abs(value) < 1000 else f"{value:+.3g}"
    return text.replace("-", "−", 1)


def interval_text(measure: Measure, gain: dict[str, float]) -> str:
    """A gain with its interval, the unit said once."""
    low, high = (gain_text(measure, gain[key]).removesuffix(" points") for key in ("low", "high"))
    return f"{gain_text(measure, gain['value']).removesuffix(' points')} [{low}, {high}]"


def sure_text(probability: float) -> str:
    """A probability in per cent, never 0 or 100.

    Example:
        >>> sure_text(0.999), sure_text(0.96)
        ('99 %', '96 %')
    """
    return f"{min(99, max(1, round(100 * probability)))} %"


def named(names: list[str], total: int) -> str:
    """Partners' names, or how many they are."""
    if len(names) == total and total > 2:
        return f"all {total} partners"
    if len(names) > 6:
        return f"{len(names)} of {total} partners"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def headline(advice: dict[str, Any]) -> str:
    """The answer with its number, then who is of no use and who harms."""
    measure, delivered = measure_of(advice), advice["delivered"]
    total = len(advice["partners"])
    alone = advice["strategies"]["alone"]["values"][measure.name]
    value, gain = delivered["values"][measure.name], delivered["gain"]
    low, high = gain_text(measure, gain["low"]), gain_text(measure, gain["high"])
    if delivered["strategy"] == "alone":
        first = f"Stay alone ({measure.label} {value_text(measure, alone)}): no combination of partners did better."
    else:
        who = named(delivered["partners"], total)
        how = " by learned weights" if delivered["strategy"] == "learned" else ""
        figures = (
            f"{measure.label} {value_text(measure, value)} against {value_text(measure, alone)} alone "
            f"(gain {gain_text(measure, gain['value'])}, 95 % interval {low} to {high}); "
            f"{sure_text(delivered['probability'])} sure that it is better"
        )
        first = {
            "yes": f"Train with {who}{how}: {figures}.",
            "probably": f"Probably train with {who}{how}: {figures}.",
            "not shown": f"Undecided. Training with {who}{how}: {figures}.",
            "no": f"Stay alone. Training with {who}{how}: {figures}.",
        }[advice["worth_it"]]
    needed = advice["certainty"]["rows_needed"]
    sentences = [first]
    if advice["worth_it"] in ("not shown", "probably") and needed:
        sentences.append(f"About {needed:,} rows of your own would probably decide it.")
    by = {verdict: [p["name"] for p in advice["partners"] if p["verdict"] == verdict] for verdict in MEANINGS}
    helping = [name for name in by["helps"] if name not in delivered["partners"]]
    if helping and delivered["strategy"] != "alone":
        sentences.append(f"{_first(named(helping, total))} would help as well.")
    if by["harms"]:
        sentences.append(f"{_first(named(by['harms'], total))} {'harms' if len(by['harms']) == 1 else 'harm'}.")
    return " ".join(sentences)


def _first(text: str) -> str:
    """A capital letter for words of ours, and names as they are."""
    return text.replace("all ", "All ", 1) if text.startswith("all ") else text


def choice_text(advice: dict[str, Any]) -> list[str]:
    """What is delivered and why."""
    delivered = advice["delivered"]
    picked = advice["strategies"][delivered["strategy"]]["picked"]
    trials = advice["plan"]["repeats"] * advice["plan"]["folds"]
    words = STRATEGIES[delivered["strategy"]]
    return [
        f"The model in model/ is trained {words}, chosen by the error on rows that models had not seen; partners that "
        "agree are preferred unless something else is better by a standard error. Nested validation chose the same in "
        f"{picked} of {trials} folds; the row “{STRATEGIES['delivered']}” judges the choosing itself, so it is what "
        "you can expect."
    ]


def trees_text(advice: dict[str, Any]) -> list[str]:
    """Gradient boosting on the target's rows alone, and what follows if it is better."""
    if advice["trees"] is None:
        return []
    measure = measure_of(advice)
    theirs = advice["trees"]["values"][measure.name]
    ours = advice["delivered"]["values"][measure.name]
    ahead = (theirs - ours) * (1.0 if measure.higher else -1.0)
    text = (
        f"Without anybody, scikit-learn's gradient-boosted trees on your rows alone reach {measure.label} "
        f"{value_text(measure, theirs)}."
    )
    scale = 1.0 if measure.higher else max(abs(ours), 1e-12)
    if ahead > CLEARLY * scale:
        return [
            f"{text} That is better than this advice's model: your label does not depend on the columns in a straight "
            "line. Try --set problem.model=mlp, or use trees and stay alone."
        ]
    return [text]


def certainty_text(advice: dict[str, Any]) -> list[str]:
    """How sure, and what would help."""
    sure, probability = advice["certainty"], advice["delivered"]["probability"]
    rows, needed = sure["target_rows"], sure["rows_needed"]
    if advice["delivered"]["strategy"] == "alone":
        return [f"On your {rows:,} rows no strategy with partners did better than training alone."]
    if advice["worth_it"] == "yes":
        return [
            f"With your {rows:,} rows the gain over training alone is beyond chance ({sure_text(probability)} sure)."
        ]
    if needed is None:
        return [f"On your {rows:,} rows training alone did at least as well; more rows are unlikely to change that."]
    return [
        f"With your {rows:,} rows the gain may be chance ({sure_text(probability)} sure that it is not). If it is "
        f"real, about {needed:,} labelled rows of your own would show it in four cases of five."
    ]


def bound_text(advice: dict[str, Any]) -> str:
    """The theory's two terms."""
    now = advice["certainty"]["bound"][0]
    larger = now["validation_term"] >= now["training_term"]
    return (
        "The bound of Theorem 1 of 'Adaptively weighted nodes', without its constants, has a term for your rows, "
        f"{now['validation_term']:.2f}, and one for the partners' rows, {now['training_term']:.2f}: more rows "
        f"{'of your own' if larger else 'at the partners'} would tighten it most."
    )


def next_text(advice: dict[str, Any]) -> list[str]:
    """What to do now."""
    steps = []
    if advice["delivered"]["strategy"] != "alone" and advice["worth_it"] in ("yes", "probably"):
        steps.append(f"Agree on a training with {named(advice['delivered']['partners'], len(advice['partners']))}.")
    unclear = [p["name"] for p in advice["partners"] if p["verdict"] == "cannot tell"]
    if unclear:
        steps.append(f"Ask {named(unclear, len(advice['partners']))} for more rows, or collect more of your own.")
    harmful = [p["name"] for p in advice["partners"] if p["verdict"] == "harms"]
    if harmful:
        steps.append(
            f"Look at the labels and columns of {named(harmful, len(advice['partners']))}: what harms is often a fault "
            "in the data."
        )
    steps.append("Use the model: coterie predict FOLDER/model new.csv.")
    return steps


def contributions_text(advice: dict[str, Any]) -> list[str]:
    """What the numbers mean, what they cost, and whether the weights agree."""
    found = advice["contributions"]
    what = (
        "How much lower the loss is with the partner than without it, all others present."
        if found["kind"] == "loo"
        else "How much the partner lowers the loss, on average over the orders in which partners may join."
    )
    agreement = found["agreement_with_weights"]
    rank = "" if agreement is None else f" Their rank correlation with the learned weights is {agreement:+.2f}."
    cost = f"{found['trainings']} trainings (at most {found['most']}), {size_text(found['bytes'])} moved."
    return [f"{what} {cost}{rank}"]


def method_text(advice: dict[str, Any]) -> list[str]:
    """How it was found out."""
    plan, measure = advice["plan"], advice["measure"]
    orders = f"{plan['repeats']} random order{'s' if plan['repeats'] > 1 else ''}"
    return [
        f"{measure['label']} is {measure['explained']}. Your rows were split into {plan['folds']} parts in {orders}; "
        "every model is judged on rows that it has not seen.",
        "Agreement: models trained on your rows alone predict a partner's labels. 1 means that its labels follow from "
        "its columns as yours do, 0 that they have nothing to do with what your rows teach, −1 that they say the "
        f"opposite. Its labels carry something if they fit better than the same labels shuffled ({plan['placebos']} "
        f"times; corrected for the number of partners, {plan['level']:.0%} level).",
        "Gain: how much better you predict your rows with this partner alone beside you than without anybody. The "
        "probability that a partner helps weighs its agreement and its gain.",
        "Alone, with those that agree, with all, or by learned weights, and how strongly the model is held back from "
        "fitting noise: chosen without the rows that judge (nested validation). Weights are learned on every fold and "
        f"on {plan['bootstraps']} resample{'s' if plan['bootstraps'] != 1 else ''}.",
    ]
