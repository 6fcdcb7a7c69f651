"""The card of a model, for people (model-card.md) and programs (model-card.json): what its folder says, and no more.

Everything in a folder may have come from elsewhere: texts are cleaned for JSON and escaped for Markdown.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from coterie import __version__
from coterie.errors import UsageError, cleaned
from coterie.report.results import ADVICE
from coterie.storage import write_atomically, write_json

NAMES = ("model-card.md", "model-card.json")
PLACEHOLDER = "not chosen yet: state the licence of the model, and of the data if it may be shared"
SPECIAL = re.compile(r"([\\`*_\[\]#|~]|:(?=//)|(?<=www)\.|^[-+])")  # links that some readers make by themselves too
LIMITS = (
    "The measures hold for rows like those of the target; other places, times and populations were not tested.",
    "Words that no training file had count as no category; missing values are filled in as in training.",
    "The model may repeat whatever was wrong or unfair in the labels that it learned from.",
)


def write_card(folder: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> list[Path]:
    """Write model-card.md and model-card.json beside a model; where they are.

    Args:
        folder: a result folder with preprocess.json, or the folder of an advice.
        now: the date on the card.
    """
    model = folder if (folder / "preprocess.json").is_file() else folder / "model"
    facts = card(model)
    facts["written"] = now().strftime("%Y-%m-%d")
    paths = [model / name for name in NAMES]
    try:
        write_atomically(paths[0], as_markdown(facts).encode())
        write_json(paths[1], facts)
    except OSError as error:
        raise UsageError(f"{model} cannot be written: {error.strerror or error}.") from None
    return paths


def card(model: Path) -> dict[str, Any]:
    """The facts of a model's folder as plain data.

    Args:
        model: a result folder with preprocess.json.
    """
    if not (model / "preprocess.json").is_file():
        raise UsageError(f"{model} has no preprocess.json; name the result folder of a run on files, or of an advice.")
    about, summary = _read(model / "preprocess.json"), _read(model / "summary.json")
    advice = _read(model.parent / ADVICE) if model.name == "model" else {}
    try:
        return _facts(about, summary, advice)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(f"{model} is damaged: {type(error).__name__}: {error}.") from None


def _read(path: Path) -> dict[str, Any]:
    """A JSON object with clean texts; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is damaged: it holds no table.")
    plain: dict[str, Any] = cleaned(found)
    return plain


def _facts(about: dict[str, Any], summary: dict[str, Any], advice: dict[str, Any]) -> dict[str, Any]:
    numeric, worded = about["numeric"], about["categorical"]
    partners = advice.get("partners", [])
    names = about.get("clients") or summary.get("names") or []
    weights = summary.get("weights") or []
    delivered = advice.get("delivered", {})
    shares = delivered.get("shares", {})
    rows = {one["name"]: one.get("rows") for one in partners if one.get("share") or "together" in shares}
    own_rows = advice.get("data", {}).get("target_rows")
    rows |= {} if own_rows is None else {"own rows": own_rows}
    name = f"stack of {len(about['stack']['members'])} models" if "stack" in about else about["model"]["name"]
    return {
        "model": {
            "name": name,
            "outputs": about["outputs"] if "stack" in about else about["model"]["outputs"],
            "inputs": about.get("inputs"),
            "method": summary.get("method"),
            "rounds": summary.get("rounds"),
            "seed": summary.get("seed", advice.get("seed")),
        },
        "data": {
            "label": about["label"],
            "kind": about["kind"],
            "classes": dict(zip(about["classes"], about["class_counts"], strict=False)),
            "rows": rows,
            "numbers": [column["name"] for column in numeric],
            "words": {column["name"]: len(column["words"]) for column in worded},
            "dates": about.get("dates", []),
            "often_missing": [column["name"] for column in numeric if column["indicator"]]
            + [column["name"] for column in worded if column["missing"]],
            "words_for_missing": about.get("missing", []),
        },
        "weights": shares or (dict(zip(names, weights, strict=False)) if len(names) == len(weights) else {}),
        "measures": {key: value for key, value in (summary.get("final") or {}).items() if _is_number(value)},
        "advice": None if not advice else _advice(advice, partners),
        "limits": [*LIMITS, *advice.get("notes", [])],
        "versions": summary.get("platform") or {},
        "written_by": f"coterie {__version__}",
        "licence": PLACEHOLDER,
    }


def _advice(advice: dict[str, Any], partners: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was chosen, and why."""
    alone = advice["alone"]
    kept = ("name", "rows", "verdict", "probability", "reason", "gain", "share")
    return {
        "answer": advice["headline"],
        "measure": advice["measure"],
        "measures": advice["measures"],
        "values": {"delivered": advice["delivered"]["values"], "alone": alone["values"][alone["choice"]]},
        "partners": [{key: one[key] for key in kept if key in one} for one in partners],
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain(text: Any) -> str:
    """Text of a file as Markdown shows it: nothing in it is markup, and it is one line.

    Example:
        >>> plain("<b>*a|b*")
        '&lt;b&gt;\\\\*a\\\\|b\\\\*'
    """
    return SPECIAL.sub(r"\\\1", escape(" ".join(str(text).split()), quote=False))


def as_markdown(facts: Mapping[str, Any]) -> str:
    """The card for people.

    Args:
        facts: as `card` gives them.
    """
    model, data, advice = facts["model"], facts["data"], facts["advice"]
    trained = f" trained by {plain(model['method'])}" if model["method"] else ""
    lines = [
        f"# Model card: {plain(data['label'])}",
        f"Predicts {plain(data['label'])} ({plain(data['kind'])}) by the model {plain(model['name'])}{trained}.",
    ]
    if advice is not None and advice["answer"]:
        lines += ["## What was chosen, and why", plain(advice["answer"])]
        head = ("partner", "rows", "verdict", "gain [95 %]", "reason")
        lines += [_table(head, map(_partner, advice["partners"]))]
    lines += ["## Data", *_data(data)]
    if facts["weights"]:
        lines += ["## Weights", _table(("holder", "weight"), ([k, f"{w:.3f}"] for k, w in facts["weights"].items()))]
    lines += ["## Measures", *_measures(facts["measures"], advice)]
    lines += ["## Limits", _list(facts["limits"])]
    versions = ", ".join(f"{plain(key)} {plain(value)}" for key, value in facts["versions"].items())
    lines += ["## Origin", f"Card written {plain(facts.get('written', ''))} by {plain(facts['written_by'])}."]
    lines += [f"Trained with {versions}."] if versions else []
    return "\n\n".join([*lines, "## Licence", plain(facts["licence"])]) + "\n"


def _partner(one: Mapping[str, Any]) -> list[Any]:
    return [one.get("name"), one.get("rows"), one.get("verdict"), _interval(one.get("gain")), one.get("reason")]


def _data(data: Mapping[str, Any]) -> list[str]:
    parts = []
    if data["rows"]:
        parts.append(_table(("holder", "rows"), ([name, n] for name, n in data["rows"].items())))
    if data["classes"]:
        parts.append(_table(("class", "training rows"), ([name, n] for name, n in data["classes"].items())))
    categories = [f"{name} ({n} words)" for name, n in data["words"].items()]
    listed = {
        "Numbers": data["numbers"],
        "Categories": categories,
        "Dates": data["dates"],
        "Missing in some rows": data["often_missing"],
        "Read as missing": data["words_for_missing"],
    }
    return [*parts, *(f"{key}: {', '.join(map(plain, names))}." for key, names in listed.items() if names)]


def _measures(final: Mapping[str, float], advice: Mapping[str, Any] | None) -> list[str]:
    parts = []
    if advice is not None:
        shown = {entry["name"]: entry["label"] for entry in advice["measures"]}
        rows = [[name, *(_figure(values.get(key)) for key in shown)] for name, values in advice["values"].items()]
        parts += ["On rows of the target that no model has seen, by cross-validation."]
        parts += [_table(("model", *map(plain, shown.values())), rows)]
    if final:
        parts += ["At the end of the training:"]
        parts += [_table(("measure", "value"), ([name, _figure(value)] for name, value in final.items()))]
    return parts or ["The folder holds no measures."]


def _figure(value: Any) -> str:
    return f"{value:.4g}" if _is_number(value) else ""


def _interval(gain: Any) -> str:
    """A number with its interval, as advice.json has it."""
    if not isinstance(gain, Mapping):
        return _figure(gain)
    return f"{_figure(gain.get('value'))} [{_figure(gain.get('low'))}, {_figure(gain.get('high'))}]"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head)]
    text = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*text, *(f"| {' | '.join(map(plain, row))} |" for row in rows)])


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {plain(item)}" for item in items)
