"""Many files, one form: the target's file says which columns there are and of which kind; everybody else must agree.

Whatever is wrong with any file is found here, before anything is trained, and reported together.
"""

import filecmp
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Stack
from coterie.problems.files import reading
from coterie.problems.files.findings import Finding, Findings
from coterie.problems.files.reading import CSV, Block, Source, Unreadable, Values, date_columns, numbers, words
from coterie.problems.files.store import RowBuffer

Kind = Literal["classification", "regression"]
MAPPED = 64 << 20  # more bytes of files than this are mapped, not held
MISSING = frozenset({"", "NA", "N/A", "n/a", "na", "NaN", "nan", "NULL", "null", "None", "?"})
FEWEST = 20  # rows of the target: below, neither weights nor a test mean anything
SAMPLE = 5  # blocks of the target's file that say what its columns are
CLASSES = 20  # a label of whole numbers with at most so many different ones is taken for classes
SAME_COLUMNS = "All files need the same columns; leave columns out everywhere with problem.drop=['name']."
WORDS = 200  # more categories in one column than this are an identifier
UNIQUE = 0.9  # of the words of the target's file different from each other: an identifier
UNIQUE_THERE = 0.95  # the same for a partner's file
FEWEST_THERE = 30  # rows of a partner's file for that
HAPPENED = {
    **dict.fromkeys(("1", "1.0", "yes", "y", "true"), True),
    **dict.fromkeys(("0", "0.0", "no", "n", "false"), False),
}
ID_NAME = re.compile(r"(?:.*[_\s.-])?(?:id|uuid|guid|index)|unnamed: ?\d+", re.IGNORECASE)


class Form(NamedTuple):
    """What every file holds: features in order, which of them are words, the label; or pictures of a shape.

    Where the label is a time, `event` is the column that tells whether something happened then; kind is regression.
    """

    label: str
    kind: Kind
    numeric: tuple[str, ...]
    worded: tuple[str, ...]
    image: tuple[int, ...] | None = None
    unit: float = 1.0
    dates: tuple[str, ...] = ()
    event: str | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """All columns that files must have as inputs: dates as they stand there."""
        made = {name for column in self.dates for name in date_columns(column)}
        return (*(name for name in self.numeric if name not in made), *self.dates, *self.worded)

    def numbers(self) -> tuple[str, ...]:
        """The columns of numbers, the label last where it is one."""
        return (*self.numeric, self.label) if self.kind == "regression" else self.numeric

    def codes(self) -> tuple[str, ...]:
        """The columns of words, the label last where it is a class."""
        return (*self.worded, self.label) if self.kind == "classification" else self.worded


class Options(NamedTuple):
    """How to read: the label, its kind, which columns are words, which are left out, what stands for missing."""

    label: str
    kind: Kind | None = None
    categorical: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    missing: frozenset[str] = MISSING
    side: int | None = None
    cache: str | None = None
    keep: tuple[str, ...] = ()
    private: bool = False
    event: str | None = None
    partial: bool = False


@dataclass
class Holder:
    """One holder's file while it is read: its rows so far, and the words of each column of words with their codes.

    `commas` are its columns that are written with decimal commas; those of a file with semicolons are known for sure.
    """

    name: str
    path: Source
    rows: int = 0
    words: list[dict[str, int]] = field(default_factory=list)
    commas: dict[str, None] = field(default_factory=dict)
    semicolons: bool = False


class Tables(NamedTuple):
    """All holders' rows, clients first, the target last.

    numbers [N, p] (NaN where missing; the label last in regression; times have a minus where the row was censored),
    codes [N, q] of each holder's own words (−1 where missing; the label last in classification), pictures [N, c, h, w]
    if there are some. `findings` are faults that were dealt with.
    """

    form: Form
    holders: tuple[Holder, ...]
    numbers: Tensor
    codes: Tensor
    pictures: Tensor | None
    mapped: bool
    findings: tuple[Finding, ...] = ()

    @property
    def stack(self) -> Stack:
        """The rows as the engine takes them, the target's last."""
        counts = torch.tensor([holder.rows for holder in self.holders])
        return Stack((self.numbers, self.codes), counts.cumsum(0) - counts, counts)


def expand(clients: str, target: str) -> tuple[list[Path], Path]:
    """The clients' files in order of their names, without the target's, and that."""
    goal = Path(target)
    if not goal.exists():
        raise UsageError(f"problem.target: there is no file {target}.")
    found = [Path(path) for path in sorted(glob(clients, recursive=True))]
    partners = [path for path in found if path.resolve() != goal.resolve() and not path.name.startswith(".")]
    inner = next((path for path in partners if path.is_dir() and _holds_tables(path)), None)
    if inner is not None:
        raise UsageError(f"problem.clients names the folder {inner}; write a pattern, such as '{inner}/*.csv'.")
    if not partners:
        raise UsageError(f"problem.clients: no file matches {clients!r}; write a pattern, such as 'sites/*.csv'.")
    return partners, goal


def _holds_tables(folder: Path) -> bool:
    return any(file.name.lower().endswith((*CSV, ".npz")) for file in folder.iterdir())


def read(partners: Sequence[Source], goal: Source, options: Options, names: Sequence[str] | None = None) -> Tables:
    """Everybody's rows, or all that is wrong with the files.

    Args:
        partners: their files, or tables that a program holds.
        goal: the target's.
        options: how to read.
        names: of the partners and, last, of the target; by default those of the files.
    """
    findings, treated = Findings(), Findings()
    kept = _not_copied(partners, goal, options, treated, names)
    if names is not None:
        names = [*(names[k] for k in kept), names[-1]]
    partners = [partners[k] for k in kept]
    paths = (*partners, goal)
    named = names_of(paths) if names is None else names
    form, ids = target_form(goal, named[-1], options, findings, treated)
    options = options._replace(drop=(*options.drop, *ids))
    if form is None:
        _glance(partners, named, options, findings)
        findings.settle(len(paths))
        raise AssertionError("a form that cannot be found is a finding")
    target = goal.name if names is None else named[-1]
    usable = [
        _agrees(path, name, form, target, options, findings, treated) for path, name in zip(paths, named, strict=True)
    ]
    files = [path for path in paths if isinstance(path, Path)]
    mapped = len(files) == len(paths) and sum(map(_size, files)) > MAPPED  # what a program holds is never written
    sinks = _Sinks(form, mapped, options)
    holders = [Holder(name, path) for path, name in zip(paths, named, strict=True)]
    for holder, fine in zip(holders, usable, strict=True):
        if fine:
            sinks.read(holder, findings)
    for holder, fine in zip(holders, usable, strict=True):
        if fine and not any(finding.file == holder.name for finding in findings.found):
            _check_rows(holder, form, findings, options, is_target=holder is holders[-1])
    findings.settle(len(paths))
    for holder in holders[-1:] if options.private else holders:
        if holder.commas:
            treated.add(holder.name, f"decimal commas in {_named('column', list(holder.commas))}: read as numbers")
    return Tables(form, tuple(holders), *sinks.tensors(), mapped, tuple(treated.found))


def read_alone(
    path: Path, form: Form, options: Options, findings: Findings, *, is_target: bool = False
) -> Tables | None:
    """The rows of one file in a form that is known already, where the other holders' files are elsewhere; None, with
    findings, where the file does not have the form. Columns that the form lacks are not looked at.

    Args:
        path: the file.
        form: the columns that are agreed.
        options: how to read it.
        findings: takes what is wrong with it.
        is_target: whether it is the file of the target, which needs more.
    """
    holder = Holder(path.name, path)
    try:
        surplus = [c for c in reading.columns_of(path) if c not in (*form.features, form.label)]
    except Unreadable as error:
        findings.add(holder.name, str(error), error.remedy)
        return None
    if not _agrees(path, holder.name, form, "the study", options._replace(drop=tuple(surplus)), findings):
        return None
    mapped = _size(path) > MAPPED
    sinks = _Sinks(form, mapped, options)
    sinks.read(holder, findings)
    if not findings.found:
        _check_rows(holder, form, findings, options, is_target=is_target)
    return None if findings.found else Tables(form, (holder,), *sinks.tensors(), mapped)


def _not_copied(
    partners: Sequence[Source], goal: Source, options: Options, treated: Findings, names: Sequence[str] | None
) -> list[int]:
    """Which partners' files are no copies of the target's own: nothing can be learned from those."""
    if options.private or not isinstance(goal, Path) or not goal.is_file():
        return list(range(len(partners)))
    files = {k: path for k, path in enumerate(partners) if isinstance(path, Path) and path.is_file()}
    copies = {k: path for k, path in files.items() if filecmp.cmp(path, goal, shallow=False)}
    if len(copies) == len(partners):
        raise UsageError(
            f"every file of problem.clients is a copy of {goal.name}; there is nobody to learn from. "
            "Name the partners' own files."
        )
    for k, path in copies.items():
        name = path.name if names is None else names[k]
        treated.add(name, f"a copy of {goal.name}: left out", "Ask the partner for rows of its own.")
    return [k for k in range(len(partners)) if k not in copies]


def names_of(paths: Sequence[Source]) -> list[str]:
    """Short names that tell the files apart: the file's own, or with its folders where that is not enough."""
    depth = 1
    while len({_tail(path, depth) for path in paths}) < len(paths) and depth < 12:
        depth += 1
    return [_tail(path, depth) for path in paths]


def _tail(path: Source, depth: int) -> str:
    if not isinstance(path, Path):
        return path.name
    return "/".join(path.parts[-depth:])


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size * (4 if path.suffix == ".gz" else 1)


def target_form(
    goal: Source, name: str, options: Options, findings: Findings, treated: Findings
) -> tuple[Form | None, list[str]]:
    """What the target's own file says, and its columns that only name rows; None, with findings, if it is unusable."""
    try:
        if isinstance(goal, Path) and reading.form_of(goal) == "images":
            return Form("folder", "classification", (), (), reading.image_shape(goal, options.side), 255.0), []
        columns = reading.columns_of(goal)
        if options.label not in columns:
            findings.add(
                name, f"there is no column {options.label!r} to predict; {_listed(columns)}", "Set problem.label."
            )
            return None, []
        if options.event is not None and (options.event not in columns or options.event == options.label):
            findings.add(
                name,
                f"there is no column {options.event!r} beside the label that tells whether the event happened; "
                f"{_listed(columns)}",
                "Set problem.event.",
            )
            return None, []
        unknown = [c for c in (*options.categorical, *options.drop, *options.keep) if c not in columns]
        if unknown:
            strange = ", ".join(map(repr, unknown))
            findings.add(name, f"problem.categorical, drop or keep name {strange}, which is no column of it")
            return None, []
        table, commas = _sample(goal), reading.with_semicolons(goal)
    except Unreadable as error:
        findings.add(name, str(error), error.remedy)
        return None, []
    pictures = [c for c, values in table.items() if isinstance(values, np.ndarray) and values.ndim > 1]
    kind: Kind = (
        "regression" if options.event else options.kind or _kind_of(table[options.label], options.missing, commas)
    )
    if pictures:
        array = table[pictures[0]]
        assert isinstance(array, np.ndarray)
        shape = array.shape[1:] if array.ndim == 4 else (1, *array.shape[1:])
        return Form(options.label, kind, (), (), tuple(shape), 255.0 if array.dtype == np.uint8 else 1.0), []
    inputs = [c for c in columns if c not in (options.label, options.event) and c not in options.drop]
    if not inputs:
        findings.add(name, "there is no column beside the label to predict from")
        return None, []
    if commas:
        table = {c: reading.with_points(values, options.missing, commas) or values for c, values in table.items()}
    return _typed({c: table[c] for c in inputs}, kind, name, options, findings, treated)


def _typed(
    table: Block, kind: Kind, name: str, options: Options, findings: Findings, treated: Findings
) -> tuple[Form | None, list[str]]:
    """Which columns of a table are numbers, words, dates and identifiers."""
    missing, kept = options.missing, {*options.categorical, *options.keep}
    worded = [c for c in table if c in options.categorical or numbers(table[c], missing)[1] is not None]
    doubtful = [c for c in worded if c not in kept and reading.perhaps_thousands(table[c], missing)]
    for column in doubtful:
        findings.add(
            name,
            f"column {column!r} holds numbers with commas that may stand for thousands or for decimals",
            f"Write 1234 or 1.234, or name words in problem.categorical=['{column}'].",
        )
    dates = [c for c in worded if c not in kept and reading.are_dates(table[c], missing)]
    ids = [c for c in table if c not in kept and c not in dates and _identifies(c, table[c], c in worded, missing)]
    numeric = [c for c in table if c not in worded and c not in ids]
    numeric += [part for c in dates for part in date_columns(c)]
    worded = [c for c in worded if c not in dates and c not in ids]
    if not numeric and not worded:
        findings.add(
            name,
            f"{_named('column', ids)} only number{'s' if len(ids) == 1 else ''} the rows; nothing else can predict",
            f"Give a column that describes the rows, or set problem.keep={ids}.",
        )
    if doubtful or not (numeric or worded):
        return None, []
    if ids:
        treated.add(
            name,
            f"{_named('column', ids)} different in (almost) every row, taken for identifiers: left out everywhere",
            f"problem.keep={ids} uses {'it' if len(ids) == 1 else 'them'} all the same.",
        )
    if dates:
        treated.add(
            name,
            f"ISO dates in {_named('column', dates)}: year, month and weekday are the inputs",
            f"problem.drop={dates} leaves dates out.",
        )
    form = Form(options.label, kind, tuple(numeric), tuple(worded), dates=tuple(dates), event=options.event)
    return form, ids


def _identifies(column: str, values: Values, is_worded: bool, missing: frozenset[str]) -> bool:
    """Near-unique words; whole numbers that never repeat and only grow (or fall), or are called an id."""
    if is_worded:
        known = [word for word in words(values, missing) if word is not None]
        return len(known) >= FEWEST and len(set(known)) >= UNIQUE * len(known)
    array = numbers(values, missing)[0]
    array = array[~np.isnan(array)]
    if len(array) < FEWEST or len(np.unique(array)) < len(array) or (array != array.round()).any():
        return False
    steps = np.diff(array)
    return bool((steps > 0).all() or (steps < 0).all() or ID_NAME.fullmatch(column) is not None)


def _sample(path: Source) -> Block:
    """The first rows of a table, all of a small one: enough to tell numbers from words."""
    parts = list(islice(reading.blocks_of(path), SAMPLE))
    if not parts:
        raise Unreadable("the table has column names but no rows")
    if len(parts) == 1:
        return parts[0]
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(parts: list[np.ndarray | list[str | None]]) -> np.ndarray | list[str | None]:
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate([np.asarray(part) for part in parts])
    return [value for part in parts for value in (words(part, MISSING) if isinstance(part, np.ndarray) else part)]


def _kind_of(label: np.ndarray | list[str | None], missing: frozenset[str], commas: bool) -> Kind:
    """Words, and few different whole numbers, are classes."""
    values, bad, _ = numbers(label, missing, commas)
    if bad is not None:
        return "classification"
    known = np.unique(values[~np.isnan(values)])
    few = len(known) <= min(CLASSES, max(2, len(values) // 4))
    return "classification" if few and bool((known == known.round()).all()) else "regression"


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return f"it has {shown}{f' and {len(names) - most} more' if len(names) > most else ''}" if names else "it has none"


def _glance(paths: Sequence[Source], names: Sequence[str], options: Options, findings: Findings) -> None:
    """Where the target's file is unusable: what else can be said of the others."""
    for path, name in zip(paths, names, strict=False):
        try:
            if reading.form_of(path) != "images" and options.label not in reading.columns_of(path):
                findings.add(name, f"there is no column {options.label!r} to predict", "Set problem.label.")
        except Unreadable as error:
            findings.add(name, str(error), error.remedy)


def _agrees(
    path: Source,
    name: str,
    form: Form,
    target: str,
    options: Options,
    findings: Findings,
    treated: Findings | None = None,
) -> bool:
    """Whether a file has the columns of the target's; what it lacks is a finding, or a note if files may be partial."""
    try:
        if (reading.form_of(path) == "images") != (form.image is not None and form.label == "folder"):
            pictures = "pictures in sub-folders"
            this, other = ("a table", pictures) if form.image is not None else (pictures, "a table")
            findings.add(name, f"this is taken for {this}, but {target} holds {other}; all must be of one kind")
            return False
        if form.image is not None:
            return True
        columns = reading.columns_of(path)
    except Unreadable as error:
        findings.add(name, str(error), error.remedy)
        return False
    wanted = (*form.features, form.label, *([form.event] if form.event else []))
    lacking = [c for c in wanted if c not in columns]
    surplus = [c for c in columns if c not in wanted and c not in options.drop]
    if options.partial and treated is not None and not {form.label, form.event} & set(lacking):
        if lacking:
            treated.add(name, f"lacks the {_named('column', lacking)}: its models do without")
        if surplus:
            treated.add(name, f"has the {_named('column', surplus)} besides, which {target} lacks: not used")
        return len(lacking) < len(form.features)
    if lacking:
        kind = "label column" if form.label in lacking else "column"
        findings.add(name, f"lacks the {_named(kind, lacking)} of {target}", SAME_COLUMNS)
    if surplus:
        findings.add(name, f"has the {_named('column', surplus)}, which {target} lacks", SAME_COLUMNS)
    return not lacking and not surplus


def _named(kind: str, names: Sequence[str]) -> str:
    return f"{kind}{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


class _Sinks:
    """Where the rows of all holders go, in one common form."""

    def __init__(self, form: Form, mapped: bool, options: Options) -> None:
        self.form, self.options = form, options
        self.numeric = form.numbers()
        place = {"mapped": mapped, "folder": options.cache}
        self.numbers = RowBuffer((len(self.numeric),), "float64", **place)  # type: ignore[arg-type]
        self.codes = RowBuffer((len(form.codes()),), "int32", **place)  # type: ignore[arg-type]
        self.pictures = None
        if form.image is not None:
            kind = "uint8" if form.unit == 255.0 else "float32"
            self.pictures = RowBuffer(form.image, kind, **place)  # type: ignore[arg-type]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """All rows of all holders."""
        return self.numbers.tensor(), self.codes.tensor(), self.pictures.tensor() if self.pictures else None

    def read(self, holder: Holder, findings: Findings) -> None:
        """One holder's rows, block after block; what is wrong with them is a finding."""
        holder.words = [{} for _ in self.form.codes()]
        faults: dict[str, tuple[int, str, int]] = {}
        try:
            holder.semicolons = reading.with_semicolons(holder.path)
            for block in self._blocks(holder.path):
                self._append(holder, block, faults)
        except Unreadable as error:
            findings.add(holder.name, str(error), error.remedy)
        for column, (row, word, count) in faults.items():
            findings.add(holder.name, *_fault(column, row, word, count, self.form))

    def _blocks(self, path: Source) -> Iterator[Block]:
        form = self.form
        if form.image is None:
            before = 0
            for block in reading.blocks_of(path, self.numeric):
                if self.options.partial:
                    absent = [c for c in form.features if c not in block]
                    block = {**block, **{c: [None] * len(block[form.label]) for c in absent}}
                yield reading.with_dates(block, form.dates, self.options.missing, before)
                before += len(block[form.label])
        elif form.label == "folder" and isinstance(path, Path):
            for pictures, labels in reading.image_blocks(path, self.options.side):
                yield {"pictures": pictures, "folder": list(labels)}
        else:
            for block in reading.blocks_of(path):
                arrays = [v for v in block.values() if isinstance(v, np.ndarray) and v.ndim > 1]
                if not arrays or form.label not in block:
                    raise Unreadable(f"holds no pictures, or no array {form.label!r}")
                yield {"pictures": arrays[0], form.label: block[form.label]}

    def _append(self, holder: Holder, block: Block, faults: dict[str, tuple[int, str, int]]) -> None:
        form = self.form
        rows = len(block[form.label])
        table = np.empty((rows, len(self.numeric)))
        for j, column in enumerate(self.numeric):
            values, bad, word = numbers(block[column], self.options.missing, holder.semicolons)
            if bad is not None:
                faults.setdefault(column, (holder.rows + bad + 1, word, 0))
            elif reading.with_points(block[column], self.options.missing, holder.semicolons) is not None:
                holder.commas[column] = None
            table[:, j] = values
            if column == form.label and form.event is not None:
                table[:, j] = _signed(values, block[form.event], form, self.options.missing, holder.rows)
            if column == form.label and bad is None and np.isnan(values).any():
                _missing(faults, form.label, np.isnan(values), holder.rows)
        codes = np.empty((rows, len(form.codes())), dtype=np.int32)
        for j, column in enumerate(form.codes()):
            known, column_words = holder.words[j], words(block[column], self.options.missing)
            codes[:, j] = [-1 if word is None else known.setdefault(word, len(known)) for word in column_words]
            if column == form.label and (codes[:, j] < 0).any():
                _missing(faults, form.label, codes[:, j] < 0, holder.rows)
        if self.pictures is not None:
            array = block["pictures"]
            assert isinstance(array, np.ndarray)
            assert form.image is not None
            array = array[:, None] if array.ndim == len(form.image) else array
            if array.shape[1:] != form.image:
                raise Unreadable(
                    f"its pictures are {_shape(array.shape[1:])}, those of the target {_shape(form.image)}",
                    "Bring all to one size; problem.side=32 resizes picture files.",
                )
            self.pictures.append(array)
        self.numbers.append(table)
        self.codes.append(codes)
        holder.rows += rows


def _signed(times: np.ndarray, events: Values, form: Form, missing: frozenset[str], before: int) -> np.ndarray:
    """Times, with a minus where the event did not happen."""
    if (times < 0).any():
        row = int((times < 0).argmax())
        raise Unreadable(
            f"the time {form.label!r} is {times[row]:g} in row {before + row + 1:,}; times are 0 or more",
            "Correct it, or delete the row.",
        )
    happened = np.empty(len(times), dtype=bool)
    for row, word in enumerate(words(events, missing)):
        known = None if word is None else HAPPENED.get(word.strip().lower())
        if known is None:
            shown = "nothing" if word is None else repr(word)
            raise Unreadable(
                f"the event {form.event!r} holds {shown} in row {before + row + 1:,}",
                "Write 1 or yes where the event happened, and 0 or no where the row was censored.",
            )
        happened[row] = known
    return np.where(happened, times, -times)


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def _missing(faults: dict[str, tuple[int, str, int]], label: str, absent: np.ndarray, before: int) -> None:
    first, word, count = faults.get(label, (before + int(absent.argmax()) + 1, "", 0))
    faults[label] = (first, word, count + int(absent.sum()))


def _fault(column: str, row: int, word: str, count: int, form: Form) -> tuple[str, str]:
    if count:
        return (
            f"the label {column!r} is missing in {count} row{'s' if count > 1 else ''}, first in row {row:,}",
            "Fill in the labels, or delete those rows.",
        )
    hint = " (a decimal comma?)" if word.replace(",", "").lstrip("+-").isdigit() and "," in word else ""
    return (
        f"column {column!r} holds {word!r} in row {row:,}{hint}, where the target's file has numbers",
        "Name columns of words in problem.categorical=['name'], and words that stand for no value in "
        "problem.missing=['unknown'].",
    )


def _check_rows(holder: Holder, form: Form, findings: Findings, options: Options, *, is_target: bool) -> None:
    """What can only be said when all rows of a file are known."""
    if holder.rows == 0:
        findings.add(holder.name, "the table has column names but no rows", "Leave the file out, or give it rows.")
        return
    if is_target and holder.rows < FEWEST:
        findings.add(
            holder.name,
            f"the target has {holder.rows} rows; at least {FEWEST} are needed",
            "The target's rows choose the weights and judge the result: an error measured on n rows is uncertain by "
            f"about 1/√n, here ±{100 * holder.rows**-0.5:.0f} %. Give more labelled rows of your own.",
        )
    elif is_target and form.kind == "classification" and len(holder.words[-1]) < 2:
        only = next(iter(holder.words[-1]))
        findings.add(
            holder.name,
            f"all rows have the class {only!r}; there is nothing to tell apart",
            "The target needs rows of at least two classes.",
        )
    for column, known in zip(form.worded, holder.words, strict=False):
        if len(known) > WORDS:
            findings.add(
                holder.name,
                f"column {column!r} has {len(known):,} different words, more than {WORDS}: an identifier?",
                f"Leave it out with problem.drop=['{column}'].",
            )
        elif _names_rows(holder, column, len(known), options) and not is_target:
            findings.add(
                holder.name,
                f"column {column!r} has {len(known):,} different words in {holder.rows:,} rows: an identifier?",
                f"Leave it out with problem.drop=['{column}'], or use it all the same with problem.keep=['{column}'].",
            )


def _names_rows(holder: Holder, column: str, different: int, options: Options) -> bool:
    if options.private or column in options.keep or column in options.categorical:
        return False
    return holder.rows >= FEWEST_THERE and different >= UNIQUE_THERE * holder.rows


def notes_on(tables: Tables) -> list[str]:
    """What is not wrong but should be known: who has one class only, classes that the target or the others lack."""
    *clients, target = tables.holders
    if tables.form.kind != "classification":
        return []
    own = set(target.words[-1])
    notes = [
        f"{holder.name} has rows of one class only ({next(iter(holder.words[-1]))!r})"
        for holder in clients
        if len(holder.words[-1]) == 1
    ]
    for holder in clients:
        strange = sorted(set(holder.words[-1]) - own)
        if strange:
            notes.append(f"{holder.name} has classes that {target.name} never has: {', '.join(map(repr, strange[:5]))}")
    others = set().union(*(holder.words[-1] for holder in clients))
    unseen = sorted(own - others)
    if unseen:
        notes.append(f"only {target.name} has the class {', '.join(map(repr, unseen[:5]))}")
    for j, column in enumerate(tables.form.worded):
        seen = set().union(*(holder.words[j] for holder in clients))
        unseen = sorted(set(target.words[j]) - seen)
        if unseen:
            notes.append(f"only {target.name} has the words {', '.join(map(repr, unseen[:5]))} in column {column!r}")
    return notes
