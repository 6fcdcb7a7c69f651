"""A result as a table in Markdown, with its caption."""

import re
from collections.abc import Iterable, Mapping
from statistics import fmean, stdev
from typing import Any

DASH = "–"


def cell_text(cell: Mapping[str, Any], form: str, *, each: bool = False, seeds: int | None = None) -> str:
    """Mean ± standard deviation of the seeds, or each; where some of the seeds are missing, how many there are.

    Results taken over from elsewhere have mean and std alone.
    """
    values = cell.get("values") or []
    if each and values:
        return " / ".join(_written(v, form) for v in values)
    mean = cell.get("mean", fmean(values) if values else None)
    spread = cell.get("std", stdev(values) if len(values) > 1 else None)
    if mean is None:
        return DASH
    partly = f" ({len(values)} of {seeds})" if seeds is not None and 0 < len(values) < seeds else ""
    return _written(mean, form) + ("" if spread is None else f" ± {_written(spread, form)}") + partly


def _written(value: float, form: str) -> str:
    """With short exponents: 1.5e-2, and 4.5 for 4.5e+00."""
    return re.sub(r"e([+-])0*(\d*)$", lambda e: f"e{e[1].strip('+')}{e[2]}" if e[2] else "", f"{value:{form}}")


def markdown(result: Mapping[str, Any]) -> str:
    """The table, the paper's values below ours, and what it is: scale, seeds, date."""
    heads, forms = [c["name"] for c in result["columns"]], [c["form"] for c in result["columns"]]
    each = result.get("show") == "each"
    lines = [_line([result.get("corner", ""), *heads]), "|---" * (len(heads) + 1) + "|"]
    for row in result["rows"]:
        seeds = len(result["seeds"])
        texts = [cell_text(c, form, each=each, seeds=seeds) for c, form in zip(row["cells"], forms, strict=True)]
        lines.append(_line([row["name"], *texts]))
        if any("paper" in cell for cell in row["cells"]):
            both = zip(row["cells"], forms, strict=True)
            printed = [_written(cell["paper"], form) if "paper" in cell else "" for cell, form in both]
            lines.append(_line([f"{row['name']}, paper", *printed]))
    return "\n".join([*lines, "", caption(result)]) + "\n"


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def caption(result: Mapping[str, Any]) -> str:
    """Scale, seeds, date, and what was run."""
    seeds = ", ".join(map(str, result["seeds"]))
    many = "seeds" if len(result["seeds"]) > 1 else "seed"
    spread = result.get("spread", "standard deviation")
    kind = "each seed" if result.get("show") == "each" else f"mean ± {spread}" if spread else "mean"
    text = f"scale {result['scale']}; {many} {seeds}" + (f" ({kind})" if len(result["seeds"]) > 1 else "")
    text = f"{text}; {_dates(result)}. {result['about']}".strip()
    if "budget" in result:
        text += f" Everybody spends {result['budget']}."
    if "grid" in result:
        text += f" Grids of {result['grid']}: {_chosen(result['chosen'])}."
    if result.get("missing"):
        what = "cells lack some of the seeds" if "earlier" in result else "runs have not been made"
        text += f" {len(result['missing'])} of {result['runs']} {what}."
    return text


def _dates(result: Mapping[str, Any]) -> str:
    """When it was run; where seeds were added later, which ones when."""
    parts = [*result.get("earlier", []), {"date": result["date"], "seeds": result.get("new_seeds", [])}]
    if len({part["date"] for part in parts}) == 1:
        return str(result["date"])
    return ", ".join(f"{part['date']} (seeds {', '.join(map(str, part['seeds']))})" for part in parts)


def _chosen(found: Mapping[str, Mapping[str, Any]]) -> str:
    """What was chosen for each method, in words."""
    return "; ".join(
        f"{name} " + ", ".join(f"{key.partition('.')[2]} {value}" for key, value in settings.items())
        for name, settings in found.items()
    )
