"""Values above the least one: F(w) − F*, where F* is the least F that any row found for the same problem."""

from collections.abc import Mapping
from typing import Any

from coterie.errors import UsageError

MARK = "F − F*"  # how names of such columns begin


def above_the_least(result: dict[str, Any]) -> dict[str, Any]:
    """F − F* instead of F in the columns that are named so, seed by seed; "least" are the values of F*.

    Rows that lack seeds stay as they are.

    Args:
        result: what was collected, with values of F.

    Example:
        >>> rows = [{"name": "a", "cells": [{"values": [2.0, 1.0]}]}, {"name": "b", "cells": [{"values": [1.5, 3.0]}]}]
        >>> found = above_the_least({"seeds": [0, 1], "columns": [{"name": "F − F*"}], "rows": rows})
        >>> found["least"], [row["cells"][0]["values"] for row in found["rows"]]
        ([1.5, 1.0], [[0.5, 0.0], [0.0, 2.0]])
    """
    count = len(result["seeds"])
    places = [i for i, column in enumerate(result["columns"]) if column["name"].startswith(MARK)]
    whole = [cell for row in result["rows"] for i in places if len((cell := row["cells"][i])["values"]) == count]
    if not whole:
        return result
    least = [min(by_seed) for by_seed in zip(*(cell["values"] for cell in whole), strict=True)]
    for cell in whole:
        cell["values"] = [value - best for value, best in zip(cell["values"], least, strict=True)]
    return {**result, "least": least}


def as_recorded(result: Mapping[str, Any], column: str, seed: int, value: float) -> float:
    """A stored value as its run recorded it: F instead of F − F*.

    Args:
        result: a stored result.
        column: the name of its column.
        seed: which of the result's seeds, by position.
        value: the stored value.

    Example:
        >>> as_recorded({"least": [1.5, 1.0]}, "F − F*, K = 1", 1, 0.25)
        1.25
    """
    return value + result["least"][seed] if "least" in result and column.startswith(MARK) else value


def check_addable(stored: Mapping[str, Any]) -> None:
    """Refuse to add to values above a least one, which further rows and seeds would change.

    Args:
        stored: a stored result.
    """
    if "least" in stored:
        raise UsageError(
            f"the values of {stored['name']} are above the least one of all rows, which others would change; "
            "leave --add-to out and run the whole table."
        )
