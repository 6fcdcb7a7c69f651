"""The answer of an advice in words, made of advice.json alone; page and terminal say the same."""

from typing import Any

from coterie.measures import Measure

MEANINGS = {
    "helps": "its models make yours better on your rows",
    "nothing": "it adds nothing that can be seen on your rows",
    "left out": "its models are no better than chance on your rows, or it sent none",
    "differs": "something at it differs from you: a unit, a code, the classes, or labels in a region",
    "copy": "its models know your rows: it has a copy of them",
}
OWN = {"linear": "a linear model", "trees": "boosted trees", "stack": "a linear model and boosted trees together"}
NATURAL = (
    "Between natural sites (other hospitals, other regions) no statistic of few rows ranks partners well. The gain of "
    "the delivered model is what is known there; a single partner's probability is hardly more than a guess."
)


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
    """The answer with its number."""
    measure, delivered = measure_of(advice), advice["delivered"]
    alone = value_text(measure, advice["alone"]["values"][advice["alone"]["choice"]][measure.name])
    if delivered["what"] == "alone":
        why = (
            "with the partners' models your rows were not predicted clearly better"
            if delivered["vetoed"]
            else "no partner's models tell more about your rows than yours do"
        )
        return f"No: use your own model ({measure.label} {alone}); {why}."
    who = named([p["name"] for p in advice["partners"] if p["share"] > 0] or ["the partners"], len(advice["partners"]))
    gain = delivered["gain"]
    low, high = gain_text(measure, gain["low"]), gain_text(measure, gain["high"])
    figures = (
        f"{measure.label} {value_text(measure, delivered['values'][measure.name])} against {alone} alone "
        f"(gain {gain_text(measure, gain['value'])}, 95 % interval {low} to {high})"
    )
    if advice["worth_it"] == "yes":
        return f"Yes: train with {who}. {figures[0].upper()}{figures[1:]}."
    if advice["worth_it"] == "no":
        return f"No clear reason to train with {who}: {figures}."
    return f"Not yet clear. With {who}: {figures}; chance is not ruled out."


def next_step(advice: dict[str, Any]) -> str:
    """What to do now, in one sentence."""
    differ = [p for p in advice["partners"] if p["differs"]]
    if differ:
        what = differ[0]["differs"][0]["text"]
        return f"Clear up with {differ[0]['name']}: {what}" + ("" if what.endswith("?") else ".")
    rows = advice["data"]["target_rows"]
    if advice["worth_it"] == "yes":
        return "Use the model in model/, and ask again when you have twice as many rows of your own."
    if advice["worth_it"] == "not yet":
        return (
            f"Use the model in model/ all the same (it is delivered only where it is not worse), or collect more than "
            f"your {rows:,} rows and ask again."
        )
    return "Use your own model, which is in model/; ask again with other partners or with more rows of your own."


def reason(entry: dict[str, Any], why: str = "") -> str:
    """Why a partner has its verdict, in plain words.

    Args:
        entry: the partner's, of advice.json.
        why: why it sent no message.
    """
    if entry["verdict"] == "copy":
        return "its models know your rows: they are a copy, from which nothing can be learned"
    if why:
        return why
    found = "; ".join(d["text"] for d in entry["differs"])
    if found:
        before, after = (f"{entry['fit'][key]:.1f}" for key in ("before", "after"))
        undone = any(d["undone"] for d in entry["differs"])
        then = (
            f"; undone, its fit to your rows goes from {before} to {after} standard deviations above chance"
            if undone
            else ""
        )
        return f"{found}{then}" + ("" if entry["share"] else "; it has no share of the model")
    if entry["verdict"] == "left out":
        return "its models are no better than chance on your rows"
    if entry["verdict"] == "helps":
        share = f", and {100 * entry['share']:.0f} % of the delivered model is its" if entry["share"] else ""
        return f"with it beside you, your rows are predicted better{share}"
    return "it adds nothing that can be seen on your rows"


def own_text(advice: dict[str, Any]) -> str:
    """What the model alone is, and what needs no partner."""
    measure, alone = measure_of(advice), advice["alone"]
    kind, values = alone["choice"], alone["values"]
    best = value_text(measure, values[kind][measure.name])
    text = f"Alone, your best model is {OWN.get(kind, kind)}: {measure.label} {best}, on rows that it has not seen."
    gain = advice["delivered"]["gain_over_own_stack"]
    if advice["delivered"]["what"] == "alone":
        return text
    return f"{text} Over your own models stacked, which need no partner, the gain is {interval_text(measure, gain)}."


def curve_text(advice: dict[str, Any]) -> str:
    """What more rows of one's own would change."""
    points, measure = advice["curve"], measure_of(advice)
    if not points:
        return ""
    ends = [[gain_text(measure, p["gain"] + s * p["error"]) for s in (-1, 1)] for p in points]
    parts = [f"{p['rows']:,} rows: {low} to {high}" for p, (low, high) in zip(points, ends, strict=True)]
    return f"Roughly, the gain to expect with more rows of your own (one standard error): {'; '.join(parts)}."


def method_text(advice: dict[str, Any]) -> list[str]:
    """How it was found out."""
    plan, measure = advice["plan"], advice["measure"]
    return [
        f"{measure['label']} is {measure['explained']}. Your rows were dealt to {plan['folds']} folds, "
        f"{plan['dealings']} times; every figure is of rows that the models had not seen.",
        "Each partner sends one message: a linear model and boosted trees, fitted on its own rows. It takes part "
        "if one of them predicts your labels better than permuted ones (exact test, false discoveries at 5 %). Its "
        "models are recalibrated on your rows and weighed with yours by maximum likelihood. The weights, too, are "
        "judged on rows that they have not seen.",
        "Your own model is delivered where the weighed one is worse by more than a standard error.",
        NATURAL,
    ]
