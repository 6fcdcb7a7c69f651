"""Tables that a program holds: data frames (pandas, polars, pyarrow) and mappings of arrays, read as files are.

A column becomes what it would be if the table were written as CSV and read again, without a file: words and numbers
alike, missing where the program has None, NaN, NaT or NA. No package of data frames is imported; a frame is known by
its columns, and a column by what numpy makes of it.

`load_files` is told by names which tables to read. Inside `with holding(tables)` these names are those of the tables.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import date
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.errors import UsageError
from coterie.problems.files.findings import Findings
from coterie.problems.files.reading import Block, Frame, Source, Unreadable, Values, flat, words
from coterie.problems.files.tables import MISSING, expand, names_of

MINE = "mine"
ABSENT = ("NAType", "NaTType")  # pandas' own objects for no value, which compare equal to nothing
TAKEN = "a data frame (pandas, polars, pyarrow), a mapping of arrays by column, or the path of a file"


class Held(NamedTuple):
    """Tables of a program, and the names by which a configuration calls them."""

    partners: tuple[Source, ...]
    goal: Source
    names: tuple[str, ...]

    @property
    def clients(self) -> str:
        """What stands for problem.clients."""
        return ", ".join(self.names[:-1])

    @property
    def target(self) -> str:
        """What stands for problem.target."""
        return self.names[-1]

    def labels(self) -> dict[str, Any]:
        """By the word that a class is read as, its value as the programs have it, the target's first."""
        known: dict[str, Any] = {}
        for source in (self.goal, *self.partners):
            if isinstance(source, Frame):
                known = {**(source.labels or {}), **known}
        return known


_held: ContextVar[Held | None] = ContextVar("tables that a program holds", default=None)


@contextmanager
def holding(tables: Held) -> Iterator[None]:
    """While this lasts, `load_files` finds these tables by their names.

    Args:
        tables: the partners' and the target's.
    """
    before = _held.set(tables)
    try:
        yield
    finally:
        _held.reset(before)


def given(clients: str, target: str) -> Held | None:
    """The tables that a program holds under these names, if it does.

    Args:
        clients: as the configuration has it.
        target: as the configuration has it.
    """
    held = _held.get()
    return held if held is not None and (held.clients, held.target) == (clients, target) else None


def collected(mine: Any, partners: Any, label: str, drop: tuple[str, ...] = ()) -> Held:
    """Everybody's tables; whatever cannot be read as one is reported at once, by the name of its holder.

    Args:
        mine: the target's table.
        partners: by name, a table each; or a pattern of files.
        label: the column to predict.
        drop: columns that are not looked at.
    """
    if isinstance(partners, str | Path):
        goal = str(mine) if isinstance(mine, str | Path) else "."
        found, _ = expand(str(partners), goal)
        partners = dict(zip(names_of(found), found, strict=True))
    if not isinstance(partners, Mapping) or not partners:
        what = "empty" if isinstance(partners, Mapping) else f"a {type(partners).__name__}"
        raise UsageError(
            f"partners is {what}; give a dict of tables by name, for example "
            'partners={"north": north, "east": "east.csv"}, or a pattern of files, such as "sites/*.csv".'
        )
    names = tuple(str(name).strip() for name in partners)
    if MINE in names or "" in names or len(set(names)) < len(names):
        raise UsageError(
            f"partners are called {', '.join(map(repr, names))}; every partner needs a name of its own, and {MINE!r} "
            "stands for your own rows."
        )
    findings = Findings()
    sources: list[Source] = []
    for name, table in ((MINE, mine), *zip(names, partners.values(), strict=True)):
        try:
            sources.append(source(table, name, label, drop))
        except Unreadable as error:
            findings.add(name, str(error), error.remedy)
    findings.settle(1 + len(names))
    return Held(tuple(sources[1:]), sources[0], (*names, MINE))


def source(table: Any, name: str, label: str | None = None, drop: tuple[str, ...] = ()) -> Source:
    """A table of any form as what the reader takes.

    Args:
        table: a data frame, a mapping of arrays by column, or the path of a file.
        name: whose table it is.
        label: the column whose values are kept as the program has them.
        drop: columns that are not looked at.

    Example:
        >>> source({"age": [31, 40], "sex": ["f", None]}, "north").block
        {'age': array([31., 40.]), 'sex': ['f', None]}
    """
    if isinstance(table, str | Path):
        if not Path(table).exists():
            raise Unreadable(f"there is no file {table}")
        return Path(table)
    columns = _columns(table)
    arrays = flat({column: _array(values, column) for column, values in columns.items() if column not in drop})
    rows = max((len(array) for array in arrays.values()), default=0)
    block: Block = {column: _values(array, column) for column, array in arrays.items()}
    block |= {column: [None] * rows for column in columns if column in drop}
    categories = tuple(
        column for column, values in columns.items() if column in block and _is_category(values) and column != label
    )
    return Frame(name, block, categories, None if label not in arrays else _spelled(arrays[label], block[label]))


def _columns(table: Any) -> dict[str, Any]:
    """The columns of a table by name."""
    if hasattr(table, "collect") and not hasattr(table, "to_dict"):
        raise Unreadable(f"a {type(table).__name__} holds no rows yet", "Call its method collect() first.")
    if isinstance(table, Mapping):
        names, column = list(table), table.__getitem__
    elif getattr(getattr(table, "dtype", None), "names", None):
        names, column = list(table.dtype.names), table.__getitem__
    elif hasattr(table, "column_names"):
        names, column = list(table.column_names), table.__getitem__
    elif hasattr(table, "columns") and hasattr(table, "__getitem__"):
        names, column = list(table.columns), table.__getitem__
    else:
        raise Unreadable(f"a {type(table).__name__} is no table", f"Give {TAKEN}.")
    called = [str(name).strip() for name in names]
    double = sorted({name for name in called if called.count(name) > 1})
    if double:
        raise Unreadable(f"column names occur twice: {', '.join(map(repr, double))}", "Give every column its own name.")
    if not called:
        raise Unreadable("the table has no columns", f"Give {TAKEN}.")
    get: Callable[[Any], Any] = column
    return {name: get(key) for name, key in zip(called, names, strict=True)}


def _array(values: Any, column: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths, say: looked at one by one
        array = np.empty(len(values), dtype=object)
        array[:] = values
    if array.ndim == 0:
        raise Unreadable(f"column {column!r} is one {type(values).__name__}, not one value per row", f"Give {TAKEN}.")
    return array


def _values(array: np.ndarray, column: str) -> Values:
    """A column as a file's would be read: numbers, or words with None where missing."""
    kind = array.dtype.kind
    if array.ndim > 1 and kind in "biuf":
        return array  # pictures
    if array.ndim > 1 or kind in "cmSV":
        raise Unreadable(
            f"column {column!r} is of type {array.dtype}, neither numbers nor words", _remedy(column, kind)
        )
    if kind in "iuf":
        return array.astype(np.float64)
    if kind == "M":
        return [None if np.isnat(day) else str(day) for day in array.astype("datetime64[s]")]
    return [_word(value, column, row) for row, value in enumerate(array.tolist())]


def _remedy(column: str, kind: str) -> str:
    instead = "Turn it into a number, for example of days, or leave" if kind == "m" else "Leave"
    return f"{instead} it out with problem.drop=['{column}']."


def _word(value: Any, column: str, row: int) -> str | None:
    """One value as CSV would have it; None where it is missing."""
    if value is None or type(value).__name__ in ABSENT or (isinstance(value, float) and np.isnan(value)):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_ | date | Number) and not isinstance(value, complex):
        return str(value)
    raise Unreadable(
        f"column {column!r} holds a {type(value).__name__} in row {row + 1:,}, neither a number nor a word",
        _remedy(column, "O"),
    )


def _is_category(values: Any) -> bool:
    return str(getattr(values, "dtype", "")).partition("(")[0].lower() in ("category", "categorical", "enum")


def _spelled(array: np.ndarray, read: Values) -> dict[str, Any]:
    """By the word that each value is read as, the value itself."""
    known: dict[str, Any] = {}
    for word, value in zip(words(read, MISSING), array, strict=True):
        if word is not None:
            known.setdefault(word, value)
    return known
