"""Tables as blocks of columns: CSV by Python's csv and numpy, NPZ by numpy, Parquet and Arrow by pyarrow if it is
there, image folders by pillow. A block is {column: numbers (NaN where missing) or words (None where missing)}.

The CSV reader never holds more than a block, and takes numpy's own parser for columns that should be numbers.
"""

import csv
import gzip
import io
import itertools
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

import numpy as np

from coterie.problems.files.sizes import (
    RATIO,
    check_archive,
    check_arrow,
    check_parquet,
    limit_of,
)
from coterie.problems.files.sizes import (
    Unreadable as Unreadable,
)

BLOCK = 20_000
CSV = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz")
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
DELIMITERS = ",;\t|"
NUL = "\0"
ARROW_FILE = b"ARROW1"  # how an Arrow file begins that is no stream

COMMA = re.compile(r"[+-]?(?:\d+(?:,\d*)?|,\d+|\d{1,3}(?:\.\d{3})+,\d+)(?:[eE][+-]?\d+)?")
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+")  # also a number with three decimals: nobody can tell
DATE = re.compile(r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?")
DATE_PARTS = ("year", "month", "weekday")

Values = np.ndarray | list[str | None]
Block = dict[str, Values]


@dataclass(frozen=True, eq=False)
class Frame:
    """A table that a program holds (`frames.py` makes it): its columns as a file's would be read.

    Args:
        name: whose table it is.
        block: all its rows.
        categories: columns that its program declares to be categories.
        labels: by the word that a class is read as, the value as the program has it; empty where nobody asked.
    """

    name: str
    block: Block
    categories: tuple[str, ...] = ()
    labels: Mapping[str, Any] | None = None


Source = Path | Frame


def form_of(path: Source) -> str:
    """frame, csv, npz, parquet, arrow or images, by name and content."""
    if isinstance(path, Frame):
        return "frame"
    name = path.name.lower()
    if path.is_dir():
        if any(path.glob("*.arrow")):
            return "arrow"
        if any(path.glob("*.parquet")):
            return "parquet"
        return "images"
    for form, endings in (("csv", CSV), ("npz", (".npz",)), ("parquet", (".parquet",)), ("arrow", (".arrow",))):
        if name.endswith(endings):
            return form
    raise Unreadable(
        f"the ending {path.suffix or '(none)'} is not known",
        "Give CSV (.csv, .tsv, .csv.gz), .npz, .parquet, .arrow, image folders, or a folder saved by Hugging Face "
        "datasets.",
    )


def extra(module: str, package: str, what: str) -> Any:
    """An optional package, or how to get it."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise Unreadable(f"{what} needs the package {package}", f"pip install {package}") from None


def columns_of(path: Source) -> list[str]:
    """The names of a table's columns, without reading its rows."""
    if isinstance(path, Frame):
        return list(path.block)
    form = form_of(path)
    if form == "csv":
        with _text(path) as file:
            return _header(path, file)[0]
    if form == "npz":
        return list(_npz(path))
    schema = _arrow_schema(path)
    return list(schema.names)


def with_semicolons(path: Source) -> bool:
    """Whether a table is a CSV file with semicolons: those are written where the comma is the decimal sign."""
    if isinstance(path, Frame) or form_of(path) != "csv":
        return False
    with _text(path) as file:
        return _header(path, file)[1] == ";"


def blocks_of(path: Source, numeric: Sequence[str] = ()) -> Iterator[Block]:
    """The rows of a table, a block at a time. numeric names columns that should be numbers: tried the fast way."""
    before = 0
    for block in _blocks(path, numeric):
        _check_text(block, before)
        before += len(next(iter(block.values()), ()))
        yield block


def _check_text(block: Block, before: int) -> None:
    """NUL is no text: a column of numpy's words loses it, and a word with it would be two different ones."""
    for name, values in block.items():
        if isinstance(values, list):
            row = next((i for i, value in enumerate(values) if value is not None and NUL in value), None)
            if row is not None:
                raise _holds_nul(f"column {name!r} in row {before + row + 1:,}")


def _holds_nul(where: str) -> Unreadable:
    remedy = "Save the table as plain UTF-8 text; NUL is found in damaged files and in UTF-16."
    return Unreadable(f"{where} holds a NUL character", remedy)


def _blocks(path: Source, numeric: Sequence[str]) -> Iterator[Block]:
    if isinstance(path, Frame):
        yield path.block
        return
    form = form_of(path)
    if form == "csv":
        yield from _csv_blocks(path, frozenset(numeric))
    elif form == "npz":
        yield {name: _from_array(values) for name, values in _npz(path).items()}
    else:
        yield from _arrow_blocks(path, form)


class _Unpacked(gzip.GzipFile):
    """A gzipped file that refuses to become far larger than a table would: a few bytes must not fill the memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._left = limit_of(path)

    def read1(self, size: int = -1) -> bytes:
        """The next bytes, as a text reader asks for them."""
        data = super().read1(size)
        self._left -= len(data)
        if self._left < 0:
            raise Unreadable(
                f"unpacks to more than {RATIO} times its size",
                "If it is really a table, unpack it yourself: gunzip FILE.",
            )
        return data


def _text(path: Path) -> IO[str]:
    try:
        if path.name.lower().endswith(".gz"):
            return io.TextIOWrapper(_Unpacked(path), encoding="utf-8-sig", newline="")
        return path.open("rt", encoding="utf-8-sig", newline="")
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror or error}") from None


def _header(path: Path, file: IO[str]) -> tuple[list[str], str]:
    """The column names, and the delimiter: the one of , ; tab | that the first line holds most of."""
    try:
        first = file.readline()
    except UnicodeDecodeError as error:
        raise _not_utf8(error, 1) from None
    except (OSError, EOFError) as error:
        raise Unreadable(f"cannot be read: {error}") from None
    if NUL in first:
        raise _holds_nul("the line of column names")
    if not first.strip():
        raise Unreadable("the file is empty", "A table has a line of column names, then one line per row.")
    delimiter = max(DELIMITERS, key=first.count)
    try:
        names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter))]
    except csv.Error as error:
        raise Unreadable(f"line 1 is no line of a table: {error}") from None
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise Unreadable(f"column names occur twice: {', '.join(map(repr, double))}", "Give every column its own name.")
    return names, delimiter


def _not_utf8(error: UnicodeDecodeError, line: int) -> Unreadable:
    byte = error.object[error.start]
    return Unreadable(
        f"not UTF-8: byte 0x{byte:02x} in or after line {line:,}",
        "Save the file as UTF-8, for example by: iconv -f latin1 -t utf-8 old.csv > new.csv",
    )


def _csv_blocks(path: Path, numeric: frozenset[str]) -> Iterator[Block]:
    with _text(path) as file:
        names, delimiter = _header(path, file)
        line, quoted = 2, False
        source: Iterator[Any] = file
        while True:
            try:
                rows = list(itertools.islice(source, BLOCK))
                if not quoted and any('"' in row for row in rows):  # from here on a row may be more than a line
                    quoted = True
                    source = csv.reader(itertools.chain(rows, file), delimiter=delimiter)
                    rows = list(itertools.islice(source, BLOCK))
            except UnicodeDecodeError as error:
                raise _not_utf8(error, line) from None
            except (csv.Error, OSError, EOFError) as error:
                raise Unreadable(f"broken at or after line {line:,}: {error}") from None
            if not rows:
                return
            lines = None if quoted else rows
            if not quoted:
                rows = [row.rstrip("\r\n").split(delimiter) if row.strip() else [] for row in rows]
            yield _columns(rows, lines, names, delimiter, numeric, line)
            line += len(rows)


def _columns(
    rows: list[list[str]], lines: list[str] | None, names: list[str], delimiter: str, numeric: frozenset[str], line: int
) -> Block:
    """Numbers by numpy's own parser, if it takes them all: it knows no missing values and no quotes."""
    width = len(names)
    for i, row in enumerate(rows):
        if len(row) != width and row:
            raise Unreadable(
                f"line {line + i:,} has {len(row)} fields, the header {width}",
                "Every line needs as many fields as the header; text that holds the delimiter needs quotes.",
            )
    fast = [j for j, name in enumerate(names) if name in numeric]
    table = None
    if lines is not None and fast:
        try:
            table = np.loadtxt(lines, delimiter=delimiter, dtype=np.float64, comments=None, usecols=fast, ndmin=2)
        except ValueError:  # some field is empty or a word: read one by one below
            table = None
    filled = [row for row in rows if row]
    block: Block = {}
    for j, name in enumerate(names):
        if table is not None and j in fast and len(table) == len(filled):
            block[name] = table[:, fast.index(j)]
        else:
            block[name] = [row[j] for row in filled]
    return block


def numbers(values: Values, missing: frozenset[str], commas: bool = False) -> tuple[np.ndarray, int | None, str]:
    """As float64, NaN where missing; and the first place and word that is no finite number, if there is one.

    Numbers with decimal commas are understood where all are written so; 1,234 only if `commas` says that a comma is the
    decimal sign. A number among `missing` is missing.
    """
    if isinstance(values, list):
        try:
            array = np.array(values, dtype=np.float64)
        except (ValueError, TypeError):
            array, first, word = _one_by_one(with_points(values, missing, commas) or values, missing)
            return _without(array, missing), first, word
    else:
        array = values
    bad = np.isinf(array)
    first = int(bad.argmax()) if bad.any() else None
    return _without(array, missing), first, "" if first is None else str(values[first])


def _without(array: np.ndarray, missing: frozenset[str]) -> np.ndarray:
    """NaN for the numbers that stand for a missing value."""
    codes = _missing_numbers(missing)
    return array if not codes else np.where(np.isin(array, codes), np.nan, array)


@cache
def _missing_numbers(missing: frozenset[str]) -> tuple[float, ...]:
    return tuple(value for word in missing if (value := _number(word)) is not None)


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return None if np.isnan(value) else value


def filled(values: Iterable[str | None], missing: frozenset[str]) -> list[str]:
    """The words that are not missing, without spaces around them."""
    return [word for value in values if value is not None and (word := value.strip()) not in missing]


def with_points(values: Values, missing: frozenset[str], commas: bool = False) -> list[str | None] | None:
    """The same numbers with decimal points, if all of them can only be numbers with decimal commas; else None.

    Args:
        values: the words of a column.
        missing: words that stand for no value.
        commas: whether 1,234 is known to be a little more than one, and not a thousand.

    Example:
        >>> with_points(["1,5", "NA", "1.000,25"], frozenset({"NA"}))
        ['1.5', 'NA', '1000.25']
    """
    if isinstance(values, np.ndarray) or not any(value is not None and "," in value for value in values):
        return None
    known = filled(values, missing)
    odd = [word for word in known if "," in word]
    if not odd or not all(map(COMMA.fullmatch, known)) or (not commas and all(map(THOUSANDS.fullmatch, odd))):
        return None
    return [
        value if value is None or value.strip() in missing else value.replace(".", "").replace(",", ".")
        for value in values
    ]


def perhaps_thousands(values: Values, missing: frozenset[str]) -> bool:
    """Whether a column's words could be numbers, but 1,234 may be a thousand or a little more than one."""
    if isinstance(values, np.ndarray):
        return False
    known = filled(values, missing)
    odd = [word for word in known if "," in word]
    return bool(odd) and all(THOUSANDS.fullmatch(word) or _number(word) is not None for word in known)


def are_dates(values: Values, missing: frozenset[str]) -> bool:
    """Whether a column holds ISO dates (2024-05-31, also with a time) and nothing else."""
    if isinstance(values, np.ndarray):
        return False
    known = set(filled(values, missing))
    return bool(known) and all(_date(word) is not None for word in known)


def _date(word: str) -> date | None:
    try:
        return date.fromisoformat(word[:10]) if DATE.fullmatch(word) else None
    except ValueError:
        return None


def date_columns(name: str) -> tuple[str, ...]:
    """The columns of numbers that a column of dates becomes."""
    return tuple(f"{name} ({part})" for part in DATE_PARTS)


def with_dates(block: Block, dates: Sequence[str], missing: frozenset[str], before: int = 0) -> Block:
    """The same block with each column of dates as year, month (1–12) and weekday (1–7, Monday first).

    Args:
        block: columns by name.
        dates: which of them hold ISO dates.
        missing: words that stand for no value.
        before: rows before this block, for errors.
    """
    for name in dates:
        parts: dict[str | None, tuple[float, ...]] = {}
        values = words(block[name], missing)
        for row, word in enumerate(values):
            if word in parts:
                continue
            day = None if word is None else _date(word)
            if word is not None and day is None:
                raise Unreadable(
                    f"column {name!r} holds {word!r} in row {before + row + 1:,}, where ISO dates are needed",
                    "Write 2024-05-31, or leave the column out with problem.drop.",
                )
            parts[word] = (np.nan,) * 3 if day is None else (day.year, day.month, day.isoweekday())
        table = np.array([parts[word] for word in values], dtype=np.float64).reshape(-1, 3)
        block = {**block, **{column: table[:, i] for i, column in enumerate(date_columns(name))}}
    return block


def _one_by_one(values: list[str | None], missing: frozenset[str]) -> tuple[np.ndarray, int | None, str]:
    array, first, word = np.full(len(values), np.nan), None, ""
    for i, value in enumerate(values):
        if value is None or value.strip() in missing:
            continue
        try:
            array[i] = float(value)
        except ValueError:
            array[i] = np.inf
        if first is None and np.isinf(array[i]):
            first, word = i, value.strip()
    return array, first, word


def words(values: Values, missing: frozenset[str]) -> list[str | None]:
    """As words, None where missing; 1 and 1.0 are the same word."""
    if isinstance(values, np.ndarray):
        known, place = np.unique(values, return_inverse=True)
        names = [None if np.isnan(value) else _plain(f"{value:.15g}", missing) for value in known.tolist()]
        return [names[i] for i in place.tolist()]
    plain = {value: _plain(value, missing) for value in set(values)}
    return [plain[value] for value in values]


def _plain(word: str | None, missing: frozenset[str]) -> str | None:
    word = None if word is None else word.strip()
    if word is None or word in missing:
        return None
    try:
        word = f"{float(word):.15g}" if word[0] in "+-.0123456789" else word
    except ValueError:
        return word
    return None if word in missing else word


def _npz(path: Path) -> dict[str, np.ndarray]:
    try:
        check_archive(path)
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, MemoryError, BadZipFile) as error:
        raise Unreadable(f"no readable NPZ: {error}", "Write it with numpy.savez(file, x=…, label=…).") from None
    if not arrays:
        raise Unreadable("the file is empty", "Write it with numpy.savez(file, x=…, label=…).")
    return flat(arrays)


def flat(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays as columns: one with two dimensions is as many as it has columns; pictures stay whole.

    Args:
        arrays: by name, with one entry per row each.
    """
    lengths = {len(array) if array.ndim else 0 for array in arrays.values()}
    if len(lengths) > 1:
        sizes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise Unreadable(f"its arrays differ in length: {sizes}", "Every array needs one entry per row.")
    columns: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if array.ndim == 2:
            columns |= {f"{name}{j}": array[:, j] for j in range(array.shape[1])}
        else:
            columns[name] = array
    return columns


def _from_array(array: np.ndarray) -> Values:
    if array.dtype.kind in "biuf":
        return array.astype(np.float64) if array.ndim == 1 else array
    return [str(value) for value in array.tolist()]


def _arrow_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted([*path.glob("*.arrow"), *path.glob("*.parquet")])
    return [one for one in found if not one.name.startswith("cache-")]  # what datasets keeps of its maps


def _arrow_schema(path: Path) -> Any:
    for batch in _record_batches(path, form_of(path)):
        return batch.schema
    raise Unreadable("the file is empty")


def _record_batches(path: Path, form: str) -> Iterator[Any]:
    arrow = extra("pyarrow", "pyarrow", f"reading {form}")
    try:
        for file in _arrow_files(path):
            if file.suffix == ".parquet":
                parquet = extra("pyarrow.parquet", "pyarrow", "reading Parquet").ParquetFile(file)
                check_parquet(file, parquet.metadata)
                yield from parquet.iter_batches(BLOCK)
                continue
            with arrow.memory_map(str(file)) as source:
                for batch in _ipc_batches(arrow.ipc, file, source):
                    batch.validate(full=True)  # offsets and indices of a damaged file point anywhere
                    yield batch
    except (arrow.ArrowException, OSError, struct.error, IndexError, UnicodeDecodeError) as error:
        raise Unreadable(f"no readable {form}: {str(error).splitlines()[0]}") from None


def _ipc_batches(ipc: Any, file: Path, source: Any) -> Iterator[Any]:
    """The batches of an Arrow file, whose sizes are looked at first: a file of messages, or a stream of them."""
    is_file = source.read(len(ARROW_FILE)) == ARROW_FILE
    source.seek(8 if is_file else 0)
    opened = (ipc.open_file if is_file else ipc.open_stream)(source)
    source.seek(8 if is_file else 0)
    batches = check_arrow(file, ipc.MessageReader.open_stream(source), len(opened.schema.names))
    if is_file:
        if opened.num_record_batches > batches:
            raise Unreadable(f"{file.name} lists {opened.num_record_batches:,} batches and has {batches:,}")
        yield from map(opened.get_batch, range(batches))
        return
    source.seek(0)
    yield from ipc.open_stream(source)


def _arrow_blocks(path: Path, form: str) -> Iterator[Block]:
    types = extra("pyarrow.types", "pyarrow", f"reading {form}")
    arrow = extra("pyarrow", "pyarrow", f"reading {form}")
    for batch in _record_batches(path, form):
        block: Block = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            kind = column.type
            if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
                block[name] = column.cast(arrow.float64()).to_numpy(zero_copy_only=False)
            elif types.is_nested(kind) or types.is_binary(kind):
                raise Unreadable(
                    f"column {name!r} is of type {kind}, neither numbers nor words", f"Set problem.drop=['{name}']."
                )
            else:
                values = column.cast(arrow.string()) if not types.is_dictionary(kind) else column.dictionary_decode()
                block[name] = [None if v is None else str(v) for v in values.to_pylist()]
        yield block


def image_files(folder: Path) -> list[tuple[Path, str]]:
    """The pictures of one client with their classes: the sub-folders that they lie in."""
    found = [
        (file, below.name)
        for below in sorted(path for path in folder.iterdir() if path.is_dir())
        for file in sorted(below.iterdir())
        if file.suffix.lower() in IMAGES
    ]
    if not found:
        raise Unreadable(
            "the folder holds no table and no pictures in sub-folders",
            "A folder of pictures has one sub-folder per class, such as north/healthy/001.png.",
        )
    return found


def image_blocks(folder: Path, side: int | None) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Pictures as uint8 [n, channels, height, width] and their classes, a block at a time."""
    pillow = extra("PIL.Image", "pillow", "reading pictures")
    files = image_files(folder)
    for start in range(0, len(files), 256):
        some = files[start : start + 256]
        yield np.stack([_picture(pillow, file, side) for file, _ in some]), [label for _, label in some]


def _picture(pillow: Any, file: Path, side: int | None) -> np.ndarray:
    try:
        with pillow.open(file) as image:
            image = image.convert("L" if image.mode in ("1", "L", "I", "I;16", "LA") else "RGB")
            if side is not None:
                image = image.resize((side, side))
            array = np.asarray(image, dtype=np.uint8)
    except (OSError, ValueError, pillow.DecompressionBombError) as error:
        raise Unreadable(f"{file.name} is no readable picture: {error}") from None
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def image_shape(folder: Path, side: int | None) -> tuple[int, ...]:
    """The shape of a folder's first picture."""
    pillow = extra("PIL.Image", "pillow", "reading pictures")
    return _picture(pillow, image_files(folder)[0][0], side).shape
