"""More seeds, rows or columns for a stored result: what was chosen for it is used again, and its values stay."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coterie.errors import UsageError
from coterie.reproduce.study import Study, Table

Result = Mapping[str, Any]
ABOUT_RUNS = ("seeds", "date", "seconds", "platform")


def check_fits(study: Study, scale: str, stored: Result) -> None:
    """Refuse a stored result of another study, scale or budget.

    Args:
        study: the study at hand.
        scale: its scale.
        stored: what `reproduce` wrote before.
    """
    table = study.at(scale)
    expected = {"name": study.name, "scale": scale, "budget": None if table.budget is None else str(table.budget)}
    for key, value in expected.items():
        if stored.get(key) != value:
            raise UsageError(
                f"the stored result has {key} {stored.get(key)!r}, but this is {value!r}; "
                f"add to a result of {study.name} at scale {scale}, or leave --add-to out."
            )


def with_chosen(table: Table, stored: Result) -> Table:
    """The table with the settings that were chosen for the stored result, whose grids need not be run again."""
    return replace(table, tuned=dict(stored.get("chosen", {})))


def added(stored: Result, new: Result, order: Sequence[str] = ()) -> dict[str, Any]:
    """The stored result with the values of a new one; where both have a seed's value, the new one counts.

    Curves that are stored stay as they are, the means of the earlier seeds; lines that they lack are added. Cells that
    are marked as absent have no value in any run, such as the weights of a method without weights.

    Args:
        stored: the earlier result.
        new: the later one, of the same study and scale.
        order: names of the study's rows and columns as they are to stand; others come after them.

    Example:
        >>> cell = lambda *values: [{"name": "2", "cells": [{"values": list(values)}]}]
        >>> one, two = {"seeds": [0, 1], "rows": cell(0.7, 0.8)}, {"seeds": [2], "rows": cell(0.9)}
        >>> both = added(one | {"columns": [{"name": "a"}]}, two | {"columns": [{"name": "a"}]})
        >>> both["seeds"], both["rows"][0]["cells"]
        ([0, 1, 2], [{'values': [0.7, 0.8, 0.9]}])
    """
    seeds = sorted({*stored["seeds"], *new["seeds"]})
    before, after = _cells(stored), _cells(new)
    columns = _united([stored["columns"], new["columns"]], order)
    rows = _united([stored["rows"], new["rows"]], order)

    def cell(key: tuple[str, str]) -> dict[str, Any]:
        both = [found[key] for found in (before, after) if key in found]
        values = {seed: value for found in both for seed, value in found["by_seed"].items()}
        names = ("paper",) if values else ("absent", "paper")
        return cell_of(values, seeds) | {name: found[name] for found in both for name in names if name in found}

    made: list[dict[str, Any]] = [{"name": row, "cells": [cell((row, column)) for column in columns]} for row in rows]
    lacking = [
        f"{row['name']}, {column}"
        for row in made
        for column, one in zip(columns, row["cells"], strict=True)
        if len(one["values"]) < len(seeds) and "absent" not in one
    ]
    before_this = {key: stored[key] for key in ABOUT_RUNS if key in stored}
    before_this["seeds"] = stored.get("new_seeds", stored["seeds"])  # not those that it was itself added to
    earlier = [*stored.get("earlier", []), before_this]
    return {
        **new,
        "seeds": seeds,
        "columns": [*columns.values()],
        "rows": made,
        **({"chosen": {**stored.get("chosen", {}), **new.get("chosen", {})}} if "chosen" in new else {}),
        "earlier": [{**one, "seeds": list(one["seeds"])} for one in earlier],
        "new_seeds": list(new["seeds"]),
        "missing": lacking,
        "runs": len(rows) * len(columns),
        **({"curves": _curves(stored, new)} if "curves" in new else {}),
    }


def cell_of(values: Mapping[int, float], seeds: Sequence[int]) -> dict[str, Any]:
    """A cell's values in the order of the seeds, with the seeds themselves where some are missing.

    Args:
        values: by seed.
        seeds: all seeds of the result.
    """
    there = [seed for seed in seeds if seed in values]
    partly = {} if len(there) in (0, len(seeds)) else {"seeds": there}
    return {"values": [values[seed] for seed in there], **partly}


def _cells(result: Result) -> dict[tuple[str, str], dict[str, Any]]:
    """Cells by row and column, with their values by seed. Values whose seeds are not known are left out."""
    found = {}
    for row in result["rows"]:
        for column, cell in zip(result["columns"], row["cells"], strict=True):
            values = cell.get("values") or []
            seeds = cell.get("seeds", result["seeds"])
            by_seed = dict(zip(seeds, values, strict=True)) if len(seeds) == len(values) else {}
            found[row["name"], column["name"]] = {**cell, "by_seed": by_seed}
    return found


def _united(parts: list[list[dict[str, Any]]], order: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Rows or columns of both results by name: in an order, and what it lacks as the larger result has them."""
    more, fewer = sorted(parts, key=len, reverse=True)
    found = {one["name"]: one for one in (*more, *fewer)}
    return {name: found[name] for name in dict.fromkeys((*order, *found)) if name in found}


def _curves(stored: Result, new: Result) -> list[dict[str, Any]]:
    place = ("measure", "against", "panel")
    figures = {tuple(f[k] for k in place): {**f, "lines": list(f["lines"])} for f in stored.get("curves", [])}
    for figure in new["curves"]:
        known = figures.setdefault(tuple(figure[k] for k in place), {**figure, "lines": []})
        names = {line["name"] for line in known["lines"]}
        known["lines"] += [line for line in figure["lines"] if line["name"] not in names]
    return [*figures.values()]
