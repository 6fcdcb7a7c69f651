"""Many files, one form: the target's file says which columns there are and of which kind; everybody else must agree.

Whatever is wrong with any file is found here, before anything is trained, and reported together.
"""

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
from coterie.problems.files.findings import Findings
from coterie.problems.files.reading import CSV, Block, Unreadable, numbers, words
from coterie.problems.files.store import RowBuffer

Kind = Literal["classification", "regression"]
MAPPED = 64 << 20  # more bytes of files than this are mapped, not held
MISSING = frozenset({"", "NA", "N/A", "n/a", "na", "NaN", "nan", "NULL", "null", "None", "?"})
FEWEST = 20  # rows of the target: below, neither weights nor a test mean anything
SAMPLE = 5  # blocks of the target's file that say what its columns are
CLASSES = 20  # a label of whole numbers with at most so many different ones is taken for classes
SAME_COLUMNS = "All files need the same columns; leave columns out everywhere with problem.drop=['name']."
WORDS = 200  # more categories in one column than this are an identifier


class Form(NamedTuple):
    """What every file holds: features in order, which of them are words, the label; or pictures of a shape."""

    label: str
    kind: Kind
    numeric: tuple[str, ...]
    worded: tuple[str, ...]
    image: tuple[int, ...] | None = None
    unit: float = 1.0

    @property
    def features(self) -> tuple[str, ...]:
        """All inputs."""
        return (*self.numeric, *self.worded)

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


@dataclass
class Holder:
    """One holder's file while it is read: its rows so far, and the words of each column of words with their codes."""

    name: str
    path: Path
    rows: int = 0
    words: list[dict[str, int]] = field(default_factory=list)


class Tables(NamedTuple):
    """All holders' rows, clients first, the target last.

    numbers [N, p] (NaN where missing; the label last in regression), codes [N, q] of each holder's own words (−1 where
    missing; the label last in classification), pictures [N, c, h, w] if there are some.
    """

    form: Form
    holders: tuple[Holder, ...]
    numbers: Tensor
    codes: Tensor
    pictures: Tensor | None
    mapped: bool

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


def read(partners: Sequence[Path], goal: Path, options: Options) -> Tables:
    """Everybody's rows, or all that is wrong with the files."""
    findings = Findings()
    paths = (*partners, goal)
    named = names_of(paths)
    form = _form(goal, named[-1], options, findings)
    if form is None:
        _glance(partners, named, options, findings)
        findings.settle(len(paths))
        raise AssertionError("a form that cannot be found is a finding")
    usable = [_agrees(path, name, form, goal.name, options, findings) for path, name in zip(paths, named, strict=True)]
    mapped = sum(_size(path) for path in paths) > MAPPED
    sinks = _Sinks(form, mapped, options)
    holders = [Holder(name, path) for path, name in zip(paths, named, strict=True)]
    for holder, fine in zip(holders, usable, strict=True):
        if fine:
            sinks.read(holder, findings)
    for holder, fine in zip(holders, usable, strict=True):
        if fine and not any(finding.file == holder.name for finding in findings.found):
            _check_rows(holder, form, findings, is_target=holder is holders[-1])
    findings.settle(len(paths))
    return Tables(form, tuple(holders), *sinks.tensors(), mapped)


def names_of(paths: Sequence[Path]) -> list[str]:
    """Short names that tell the files apart: the file's own, or with its folders where that is not enough."""
    depth = 1
    while len({_tail(path, depth) for path in paths}) < len(paths) and depth < 12:
        depth += 1
    return [_tail(path, depth) for path in paths]


def _tail(path: Path, depth: int) -> str:
    return "/".join(path.parts[-depth:])


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size * (4 if path.suffix == ".gz" else 1)


def _form(goal: Path, name: str, options: Options, findings: Findings) -> Form | None:
    """What the target's own file says; None, with findings, where it cannot be read."""
    try:
        if reading.form_of(goal) == "images":
            return Form("folder", "classification", (), (), reading.image_shape(goal, options.side), 255.0)
        columns = reading.columns_of(goal)
        if options.label not in columns:
            findings.add(
                name, f"there is no column {options.label!r} to predict; {_listed(columns)}", "Set problem.label."
            )
            return None
        unknown = [c for c in (*options.categorical, *options.drop) if c not in columns]
        if unknown:
            strange = ", ".join(map(repr, unknown))
            findings.add(name, f"problem.categorical or problem.drop name {strange}, which is no column of it")
            return None
        table = _sample(goal)
    except Unreadable as error:
        findings.add(name, str(error), error.remedy)
        return None
    pictures = [c for c, values in table.items() if isinstance(values, np.ndarray) and values.ndim > 1]
    kind = options.kind or _kind_of(table[options.label], options.missing)
    if pictures:
        array = table[pictures[0]]
        assert isinstance(array, np.ndarray)
        shape = array.shape[1:] if array.ndim == 4 else (1, *array.shape[1:])
        return Form(options.label, kind, (), (), tuple(shape), 255.0 if array.dtype == np.uint8 else 1.0)
    inputs = [c for c in columns if c != options.label and c not in options.drop]
    if not inputs:
        findings.add(name, "there is no column beside the label to predict from")
        return None
    worded = tuple(c for c in inputs if c in options.categorical or numbers(table[c], options.missing)[1] is not None)
    return Form(options.label, kind, tuple(c for c in inputs if c not in worded), worded)


def _sample(path: Path) -> Block:
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


def _kind_of(label: np.ndarray | list[str | None], missing: frozenset[str]) -> Kind:
    """Words, and few different whole numbers, are classes."""
    values, bad, _ = numbers(label, missing)
    if bad is not None:
        return "classification"
    known = np.unique(values[~np.isnan(values)])
    few = len(known) <= min(CLASSES, max(2, len(values) // 4))
    return "classification" if few and bool((known == known.round()).all()) else "regression"


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return f"it has {shown}{f' and {len(names) - most} more' if len(names) > most else ''}" if names else "it has none"


def _glance(paths: Sequence[Path], names: Sequence[str], options: Options, findings: Findings) -> None:
    """Where the target's file is unusable: what else can be said of the others."""
    for path, name in zip(paths, names, strict=False):
        try:
            if reading.form_of(path) != "images" and options.label not in reading.columns_of(path):
                findings.add(name, f"there is no column {options.label!r} to predict", "Set problem.label.")
        except Unreadable as error:
            findings.add(name, str(error), error.remedy)


def _agrees(path: Path, name: str, form: Form, target: str, options: Options, findings: Findings) -> bool:
    """Whether a file has the columns of the target's; what it lacks is a finding."""
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
    wanted = (*form.features, form.label)
    lacking = [c for c in wanted if c not in columns]
    surplus = [c for c in columns if c not in wanted and c not in options.drop]
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
        regression = form.kind == "regression"
        self.numeric = (*form.numeric, form.label) if regression else form.numeric
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
            for block in self._blocks(holder.path):
                self._append(holder, block, faults)
        except Unreadable as error:
            findings.add(holder.name, str(error), error.remedy)
        for column, (row, word, count) in faults.items():
            findings.add(holder.name, *_fault(column, row, word, count, self.form))

    def _blocks(self, path: Path) -> Iterator[Block]:
        form = self.form
        if form.image is None:
            yield from reading.blocks_of(path, self.numeric)
        elif form.label == "folder":
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
            values, bad, word = numbers(block[column], self.options.missing)
            if bad is not None:
                faults.setdefault(column, (holder.rows + bad + 1, word, 0))
            table[:, j] = values
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


def _check_rows(holder: Holder, form: Form, findings: Findings, *, is_target: bool) -> None:
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
    if is_target and form.kind == "classification" and len(holder.words[-1]) < 2:
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
