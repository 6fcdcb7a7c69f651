"""Result folders, read for people: all that is in them is untrusted, and what is wrong is named by file and line."""

import json
import math
import tomllib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from coterie.errors import UsageError, cleaned, client_label
from coterie.measures import Measure, declared, stored
from coterie.plugins import label

T = TypeVar("T")

MOST_POINTS = 500
MOST_NUMBERS = 60_000  # of weights over the rounds: with more clients, fewer rounds are kept
TRAFFIC = ("rounds", "floats_up", "floats_down", "bytes_up", "bytes_down", "points")
ADVICE, ADVISING = "advice.json", "advise.json"  # what `coterie advise` found; how it was asked, until then
SEVERAL = {"compare.json": "runs", "tune.json": "trials"}  # folders of folders


class Weights(NamedTuple):
    """Weights by client along the rounds; of a matrix only the last one, by target."""

    rounds: list[int]
    rows: list[list[float]]
    matrix: list[list[float]] | None


@dataclass(frozen=True)
class Run:
    """One run as its folder tells it. `summary` is None while it goes on or was interrupted."""

    folder: Path
    config: dict[str, dict[str, Any]]
    toml: str
    metrics: list[dict[str, Any]]
    weights: Weights | None
    causes: dict[str, dict[str, int]]
    events: list[dict[str, Any]]
    summary: dict[str, Any] | None
    baselines: dict[str, "Run"] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    measures: tuple[Measure, ...] = ()
    names: tuple[str, ...] = ()
    seen: tuple[tuple[str, str, str, int, int], ...] = ()  # viewer, what, cause, numbers, clients

    def client(self, number: int) -> str:
        """A client by its name, where it has one."""
        return client_label(number, self.names)

    @property
    def method(self) -> str:
        """The method's name."""
        return label(str(self.config["run"].get("method", "?")))

    @property
    def problem(self) -> str:
        """The problem's name."""
        return label(str(self.config["run"].get("problem", "?")))

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.config["run"].get("seed", 0))

    @property
    def rounds(self) -> int:
        """How many rounds were asked for."""
        return int(self.config["run"].get("rounds", 0))

    @property
    def final(self) -> dict[str, Any]:
        """The last recorded measures."""
        return self.metrics[-1]

    @property
    def friends(self) -> int | None:
        """How many of the first clients are known friends."""
        found = (self.summary or {}).get("friends", self.config["problem"].get("friends"))
        return found if isinstance(found, int) else None

    @property
    def outcome(self) -> str:
        """How it ended, or that it has not."""
        return "not finished" if self.summary is None else str(self.summary.get("outcome", "?"))

    def traffic(self, line: dict[str, Any] | None = None) -> dict[str, int]:
        """What had been moved at a recorded round, by default the last."""
        found = (line or self.final).get("communication")
        return {key: int(found.get(key, 0)) if isinstance(found, dict) else 0 for key in TRAFFIC}


def moved(traffic: dict[str, int]) -> int:
    """Bytes in both directions."""
    return traffic["bytes_up"] + traffic["bytes_down"]


def places(folder: Path) -> list[Path]:
    """The result folders that a folder stands for: itself, or those of a comparison or a grid."""
    for marker, inside in SEVERAL.items():
        if (folder / marker).is_file():
            found = sorted(path.parent for path in (folder / inside).glob("*/config.toml"))
            if not found:
                raise UsageError(f"{folder / inside} holds no run yet.")
            return found
    return [folder]


def read_all(folders: list[Path]) -> tuple[list[Run], list[str]]:
    """The runs that can be read, and what is wrong with the others."""
    runs, complaints = [], []
    for folder in folders:
        try:
            inside = places(folder)
        except UsageError as error:
            complaints.append(str(error))
            continue
        for place in inside:
            try:
                runs.append(read(place))
            except UsageError as error:
                complaints.append(str(error))
    return runs, complaints


def read(folder: Path, *, with_baselines: bool = True) -> Run:
    """One result folder, finished or not."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}.")
    if is_advice(folder):
        raise UsageError(
            f"{folder} holds an advice, not a run: `coterie report {folder}` alone shows it; the run that learned "
            f"its weights is in {folder / 'training'}."
        )
    if not (folder / "config.toml").is_file():
        raise UsageError(f"{folder / 'config.toml'} is missing: {folder} is no result folder.")
    toml = _text(folder / "config.toml")
    config = _checked(folder / "config.toml", lambda: _config(toml))
    summary, notes = _parsed(folder / "summary.json", _summary, None), []
    if summary is None:
        notes.append("summary.json is missing: the run goes on, or was interrupted (coterie resume)")
    elif summary.get("outcome") != "finished":
        notes.append(f"{summary.get('outcome', '?')}: {summary.get('message', '')}")
    metrics, cut = _metrics(folder / "metrics.jsonl")
    if cut:
        notes.append("metrics.jsonl ends in half a line, which was left out")
    weights = _checked(folder / "weights.csv", lambda: _weights(folder / "weights.csv"))
    events = _lines(folder / "events.jsonl", _object)[0] if (folder / "events.jsonl").is_file() else []
    causes: dict[str, dict[str, int]] = _parsed(folder / "ledger.json", _causes, {})
    seen: tuple[tuple[str, str, str, int, int], ...] = _parsed(folder / "ledger.json", _seen, ())
    baselines: dict[str, Run] = {}
    for file in sorted((folder / "baselines").glob("*/config.toml")) if with_baselines else []:
        try:
            baselines[file.parent.name] = read(file.parent, with_baselines=False)
        except UsageError as error:
            notes.append(f"a baseline is left out: {error}")
    measures, names = _measures(folder, summary, metrics), _names(folder, summary)
    files = config, toml, metrics, weights, causes, events, summary
    return Run(folder, *files, baselines, tuple(notes), measures, names, seen)


def _names(folder: Path, summary: dict[str, Any] | None) -> tuple[str, ...]:
    """The clients' names, where the problem has some."""
    if summary is not None:
        return _checked(folder / "summary.json", lambda: _texts(summary.get("names", [])))
    return _parsed(folder / "clients.json", lambda text: _texts(_plain(text)), ())


def _texts(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise TypeError("the clients' names are no list of texts")
    return tuple(found)


def is_advice(folder: Path) -> bool:
    """Whether a folder is one of `coterie advise`, finished or not."""
    return (folder / ADVICE).is_file() or (folder / ADVISING).is_file()


def read_advice(folder: Path) -> dict[str, Any]:
    """A finished advice."""
    found = _parsed(folder / ADVICE, _object, None)
    if found is not None:
        return dict(cleaned(found))
    raise UsageError(
        f"the advice in {folder} is not finished. Look again when `coterie advise` has ended; if it was interrupted, "
        f"`coterie resume {folder}` finishes it."
    )


def _measures(folder: Path, summary: dict[str, Any] | None, metrics: list[dict[str, Any]]) -> tuple[Measure, ...]:
    """What the record holds, as it was declared; a run that goes on has its declarations in measures.json."""
    names = dict.fromkeys(key for line in metrics for key, value in line.items() if is_number(value))
    if summary is not None:
        own = _checked(folder / "summary.json", lambda: stored(summary["measures"]))
    else:
        own = _parsed(folder / "measures.json", lambda text: stored(_plain(text)), ())
    return declared(own, names)


def is_number(value: Any) -> bool:
    """Whether a value of a record is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path} is missing.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from None


def _checked(path: Path, reading: Callable[[], T]) -> T:
    """What a reader returns; what it stumbles over becomes an error that names the file."""
    try:
        return reading()
    except (OSError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}.") from None


def _parsed(path: Path, reading: Callable[[str], T], otherwise: T) -> T:
    """What a reader makes of a file's text; something else where there is no such file."""
    return _checked(path, lambda: reading(_text(path))) if path.is_file() else otherwise


def _config(text: str) -> dict[str, dict[str, Any]]:
    data = {name: table for name, table in tomllib.loads(text).items() if name != "version"}
    tables: dict[str, Any] = {name: {} for name in ("run", "method", "problem", "federation")} | data
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"[{name}] is no table")
    if not isinstance(tables["run"].get("method"), str):
        raise ValueError("it names no method")
    if not all(isinstance(tables["run"].get(key, 0), int) for key in ("seed", "rounds")):
        raise ValueError("seed and rounds must be whole numbers")
    return tables


def _plain(text: str) -> Any:
    """JSON as it is printed in the standard: no NaN, no infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(text: str) -> dict[str, Any]:
    data = _plain(text)
    if not isinstance(data, dict):
        raise TypeError("an object was expected")
    return data


def _summary(text: str) -> dict[str, Any]:
    data = _object(text)
    if not isinstance(data["final"], dict) or not isinstance(data["outcome"], str):
        raise TypeError("final and outcome are not as coterie writes them")
    return data


def _causes(text: str) -> dict[str, dict[str, int]]:
    found = _object(text)["by_cause"]
    return {str(cause): {key: int(entry.get(key, 0)) for key in TRAFFIC} for cause, entry in found.items()}


def _seen(text: str) -> tuple[tuple[str, str, str, int, int], ...]:
    """Who saw what, where the ledger says so."""
    return account_rows(_object(text).get("seen", {}))


def account_rows(found: dict[str, Any]) -> tuple[tuple[str, str, str, int, int], ...]:
    """The account of a ledger as rows: viewer, what, cause, numbers at a time, of how few clients.

    Args:
        found: what ledger.json has under "seen".
    """
    return tuple(
        (str(viewer), str(entry["what"]), str(entry["cause"]), int(entry["numbers"]), int(entry["clients"]))
        for viewer, entries in found.items()
        for entry in entries
    )


def _metrics(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Recorded rounds, and whether the last line was still being written."""
    metrics, cut = _lines(path, _recorded)
    if not metrics:
        raise UsageError(f"{path} holds no recorded round yet.")
    return metrics, cut


def _lines(path: Path, reading: Callable[[str], T]) -> tuple[list[T], bool]:
    """What a reader makes of each line of a file that grows, and whether the last one was still being written."""
    *lines, tail = _text(path).split("\n")
    where = (Path(f"{path}, line {number},") for number in range(1, len(lines) + 1))
    return [_checked(name, partial(reading, line)) for name, line in zip(where, lines, strict=True)], bool(tail)


def _recorded(line: str) -> dict[str, Any]:
    found = _object(line)
    if not isinstance(found["round"], int):
        raise TypeError("round is no whole number")
    return {key: _finite(value) for key, value in found.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _weights(path: Path) -> Weights | None:
    """Of a long file only so many rows are parsed as can be drawn."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as file:
        head = file.readline().rstrip("\n").split(",")
        if head == [""]:
            return None
        if head[0] != "round" or len(head) < 2:
            raise ValueError("its first line does not name round and clients")
        if head[1] == "target":
            return _last_matrix(file, len(head) - 2)
        lines = [line for line in file if line.endswith("\n")]
    if not lines:
        return None
    chosen = [lines[i] for i in thinned(len(lines), min(MOST_POINTS, max(50, MOST_NUMBERS // len(head))))]
    rows = [_row(line, len(head)) for line in chosen]
    return Weights([int(row[0]) for row in rows], [row[1:] for row in rows], None)


def _last_matrix(file: Iterator[str], clients: int) -> Weights | None:
    last = deque((line for line in file if line.endswith("\n")), maxlen=2 * clients)
    rows = [_row(line, clients + 2) for line in last]
    final = rows[-1][0] if rows else None
    whole = [row[2:] for row in rows if row[0] == final]
    if len(whole) < clients:  # the last one is being written
        whole = [row[2:] for row in rows if row[0] != final][-clients:]
    return Weights([], [], whole) if len(whole) == clients else None


def _row(line: str, width: int) -> list[float]:
    row = [float(value) for value in line.split(",")]
    if len(row) != width or not all(map(math.isfinite, row)):
        raise ValueError(f"a row is not {width} finite numbers: {line.strip()[:60]!r}")
    return row


def thinned(count: int, most: int = MOST_POINTS) -> list[int]:
    """At most so many indices, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]
