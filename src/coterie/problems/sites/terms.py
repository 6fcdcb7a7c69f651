"""The terms of a study: what its coordinator tells its sites of the columns, before anybody's rows are looked at.

They come from the coordinator's own file: names and types of the columns, the words of columns of words, the label and
its classes, and how large the numbers of each column usually are (quartiles, rounded), so that a site finds another
unit or another coding in its own file by itself. Sites keep the terms that they were invited with; a job cannot change
them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, get_args

import torch

from coterie.errors import UsageError
from coterie.federation import Shard, Static
from coterie.numerics import Draw
from coterie.problems.files.faults import Consent, examined
from coterie.problems.files.findings import Findings
from coterie.problems.files.prepare import Impute, Quantiles, Scaling, column_quantiles
from coterie.problems.files.tables import MISSING, Form, Holder, Kind, Options, Tables, read_alone, target_form

DIGITS = 3  # of the quartiles that are told
LEAST_ROWS = 20


@dataclass(frozen=True)
class Usual:
    """How large the numbers of a column are in the coordinator's file: counts and rounded quartiles.

    Args:
        zeros: how many are 0.
        others: how many are not.
        least: the least magnitude of the others.
        logs: 25, 50, 75 and 90 % quantiles of log₁₀ of the others' magnitudes.
        quartiles: 25, 50 and 75 % quantiles of all.
    """

    zeros: float
    others: float
    least: float
    logs: tuple[float, ...]
    quartiles: tuple[float, ...]


@dataclass(frozen=True)
class Terms:
    """What a site must know to check its own file and to take part.

    Args:
        label: the column to predict.
        kind: classification or regression.
        numeric: columns of numbers, those made of dates among them.
        worded: columns of words.
        dates: columns of ISO dates.
        words: for each column of words, and last for the label's classes, the words of the coordinator's file.
        usual: by column of numbers, how large its numbers usually are.
        missing: further words that stand for no value.
        least_rows: rows that a site needs to take part.
        scaling: as in problem `files`.
        impute: as in problem `files`.
    """

    label: str
    kind: Kind
    numeric: tuple[str, ...]
    worded: tuple[str, ...]
    dates: tuple[str, ...] = ()
    words: tuple[tuple[str, ...], ...] = ()
    usual: Mapping[str, Usual] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    least_rows: int = LEAST_ROWS
    scaling: Scaling = "common"
    impute: Impute = "mean"

    @property
    def form(self) -> Form:
        """The columns as readers take them."""
        return Form(self.label, self.kind, self.numeric, self.worded, dates=self.dates)

    @property
    def classes(self) -> tuple[str, ...]:
        """The label's classes in the coordinator's file; none in regression."""
        return self.words[-1] if self.kind == "classification" else ()

    @property
    def digest(self) -> str:
        """Names these terms; any change gives another name."""
        text = json.dumps(self.as_dict(), sort_keys=True, ensure_ascii=False)
        return blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def quantiles(self) -> Quantiles | None:
        """The summary of the columns of numbers, as checks take it."""
        columns = self.form.numbers()
        if not columns or any(name not in self.usual for name in columns):
            return None
        rows = [self.usual[name] for name in columns]
        zeros, others, least = torch.tensor([[row.zeros, row.others, row.least] for row in rows], dtype=torch.float64).T
        logs = torch.tensor([row.logs for row in rows], dtype=torch.float64)
        low, middle, high = torch.tensor([row.quartiles for row in rows], dtype=torch.float64).T
        return Quantiles(zeros, others, least, logs, low, middle, high)

    def options(self, missing: tuple[str, ...] = (), keep: tuple[str, ...] = ()) -> Options:
        """How files are read; a site may add words of its own that stand for no value."""
        words = MISSING | frozenset((*self.missing, *missing))
        return Options(self.label, self.kind, categorical=self.worded, missing=words, keep=keep)

    def stand_in(self) -> Holder:
        """The coordinator as a holder without rows: its name and its words."""
        return Holder("the study", Path("study"), 0, [dict.fromkeys(words, 0) for words in self.words])

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for study.toml and invitations."""
        data = asdict(self)
        return json.loads(json.dumps(data))

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Terms":
        """The inverse of as_dict, checked: invitations come from elsewhere."""
        known = {f.name for f in fields(Terms)}
        try:
            values = {key: value for key, value in data.items() if key in known}
            for key in ("numeric", "worded", "dates", "missing"):
                values[key] = _texts(values.get(key, ()), key)
            values["words"] = tuple(_texts(words, "words") for words in values.get("words", ()))
            values["usual"] = {str(name): _usual(entry) for name, entry in values.get("usual", {}).items()}
            terms = Terms(**values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"the terms of the study cannot be read ({error}); ask the coordinator again.") from None
        if terms.kind not in ("classification", "regression") or len(terms.words) != len(terms.form.codes()):
            raise UsageError("the terms of the study are incomplete; ask the coordinator for another invitation.")
        known_words = terms.scaling in get_args(Scaling) and terms.impute in get_args(Impute)
        if type(terms.least_rows) is not int or type(terms.label) is not str or not known_words:
            raise UsageError("the terms of the study have values of a wrong type; ask the coordinator again.")
        return terms


def _texts(values: Any, key: str) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{key} must be a list of texts")
    return tuple(values)


def _usual(entry: Mapping[str, Any]) -> Usual:
    zeros, others, least = (float(entry[key]) for key in ("zeros", "others", "least"))
    logs, quartiles = (tuple(map(float, entry[key])) for key in ("logs", "quartiles"))
    if len(logs) != 4 or len(quartiles) != 3:
        raise ValueError("usual must have four logs and three quartiles")
    return Usual(zeros, others, least, logs, quartiles)


def terms_of(
    path: Path,
    label: str,
    *,
    kind: Kind | None = None,
    categorical: tuple[str, ...] = (),
    drop: tuple[str, ...] = (),
    missing: tuple[str, ...] = (),
    keep: tuple[str, ...] = (),
    least_rows: int = LEAST_ROWS,
    scaling: Scaling = "common",
    impute: Impute = "mean",
) -> tuple[Terms, list[str]]:
    """The terms that the coordinator's file leads to, and notes on what was done with its columns.

    Args:
        path: the coordinator's file.
        label: the column to predict.
        kind: classification or regression; by default the labels decide.
        categorical: columns of numbers that are categories.
        drop: columns to leave out.
        missing: further words that stand for no value.
        keep: columns that are used as they are, whatever they look like.
        least_rows: rows that a site needs to take part.
        scaling: as in problem `files`.
        impute: as in problem `files`.

    Example:
        >>> terms, notes = terms_of(Path("mine.csv"), "diagnosis")  # doctest: +SKIP
    """
    options = Options(label, kind, categorical, drop, MISSING | frozenset(missing), keep=keep)
    findings, treated = Findings(), Findings()
    form, _ = target_form(path, path.name, options, findings, treated)
    findings.settle(1)
    assert form is not None
    if form.image is not None:
        raise UsageError(f"{path.name} holds pictures; a study is for tables. Use problem files for pictures.")
    bare = Terms(label, form.kind, form.numeric, form.worded, form.dates, missing=missing, least_rows=least_rows)
    tables = own_tables(path, bare, keep)
    holder = tables.holders[0]
    found = column_quantiles(Shard(None, tables.stack.client(0), None), None, None, Static(), Draw.of(0))
    terms = Terms(
        **{
            **{f.name: getattr(bare, f.name) for f in fields(Terms)},
            "words": tuple(tuple(sorted(words)) for words in holder.words),
            "usual": _told(Quantiles(*found), form),
            "scaling": scaling,
            "impute": impute,
        }
    )
    return terms, [one.what for one in treated.found]


def own_tables(path: Path, terms: Terms, keep: tuple[str, ...] = ()) -> Tables:
    """The coordinator's own rows in the form of the terms, checked as the target's file of problem `files` is."""
    findings = Findings()
    tables = read_alone(path, terms.form, terms.options(keep=keep), findings, is_target=True)
    findings.settle(1)
    assert tables is not None
    return examined(tables, Consent(keep=keep), private=True)[0]


def _told(found: Quantiles, form: Form) -> dict[str, Usual]:
    return {
        name: Usual(
            float(found.zeros[j]),
            float(found.nonzero[j]),
            rounded(float(found.least[j])),
            tuple(round(float(value), 2) for value in found.logs[j]),
            tuple(rounded(float(part[j])) for part in (found.low, found.middle, found.high)),
        )
        for j, name in enumerate(form.numbers())
    }


def rounded(value: float) -> float:
    """A number to a few digits."""
    return round(value, DIGITS - 1 - math.floor(math.log10(abs(value)))) if value else 0.0
