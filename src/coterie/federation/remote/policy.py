"""What a node lets a server do: which works, how small a batch, how many steps and orders, for how long.

A server that is curious or hostile can only send orders, so the node limits them. `NodePolicy` has safe defaults; the
operator of a node changes them in a small TOML file, whose keys are the fields. Which settings of works mean a batch,
a number of steps or a size is declared here once, by name, for all works.
"""

import json
import os
import signal
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from coterie.errors import CoterieError, UsageError
from coterie.federation.account import STATISTICS

ENVIRONMENT = "COTERIE_NODE_POLICY"  # names the TOML file of a node's operator
DAY = 86400.0

BATCHES = frozenset({"batch", "decode_batch", "mirror_batch"})
"""Settings that say how many rows a result is computed from: a whole number, or "all"."""
STEPS = frozenset(
    {
        *("steps", "personal_steps", "inner_steps", "decode_steps", "encode_steps", "solve_steps", "distil_steps"),
        *("terms", "stage_epochs", "head_steps", "weight_steps"),
    }
)
"""Settings that say how often something is repeated. They must not change the form of a result."""
SIZES = frozenset({"rows", "columns", "size", "width", "distil_rows", "k", "classes"})
"""Settings that say how large a result or something on the way to it is."""
RECORDS = frozenset({"svrg"})
"""Settings that are named tuples, which have some of the above as fields."""
WORKS = frozenset({"decode", "encode", "objective"})
"""Settings that name another work."""
POSITIONS = frozenset({"first", "round", "block"})
"""Settings that only say where in a run a work is asked for. They must not change the form of a result."""


class PolicyError(CoterieError):
    """An order that the policy of this node does not admit: the key, and the remedy."""


class OutOfTime(PolicyError):
    """An order that took longer than the policy admits, and was stopped."""


@dataclass(frozen=True)
class NodePolicy:
    """What a node lets a server do.

    Args:
        works: patterns (`fnmatch`) of the names of works that may be run, among those of admitted modules
        methods: patterns of the names of methods that a server may declare
        rounds: largest number of rounds of one run in which this node takes part
        least_batch: fewest rows that a result may be computed from
        steps: largest number of repetitions that an order may ask for, for each setting that counts them
        size: largest product of the sizes that an order may ask for
        orders: largest number of orders per run
        runs: largest number of different runs per day
        seconds: wall time per order; 0 for no limit
        message: largest order, in bytes
        secure: whether results leave this node in secure sums only, except for `reveal` single numbers
        reveal: the most numbers of one client that one order may show where secure is on
        partners: in secure sums, a client is hidden at least as in a sum of so many equals
        epsilon: the site's privacy budget over all runs; orders beyond it, or without noise, are refused. 0 for none
        delta: δ of that budget
    """

    works: tuple[str, ...] = ("*",)
    methods: tuple[str, ...] = ("*",)
    rounds: int = 10_000
    least_batch: int = 8
    steps: int = 10_000
    size: int = 1 << 26
    orders: int = 10_000
    runs: int = 24
    seconds: float = 600.0
    message: int = 1 << 28
    secure: bool = False
    reveal: int = 4
    partners: int = 2
    epsilon: float = 0.0
    delta: float = 1e-5

    @staticmethod
    def read(path: str | Path) -> "NodePolicy":
        """The policy in a TOML file; what the file does not name keeps its default."""
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"the node policy {path} cannot be read: {error}.") from None
        try:
            return NodePolicy.of(values)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @staticmethod
    def of(values: Mapping[str, Any]) -> "NodePolicy":
        """The policy with these values, checked."""
        known = {field.name: field.default for field in fields(NodePolicy)}
        if unknown := sorted(values.keys() - known.keys()):
            raise UsageError(f"{unknown[0]!r} is no key of a node policy; the keys are {', '.join(known)}.")
        return NodePolicy(**{key: _checked(key, value, known[key]) for key, value in values.items()})

    def admit(self, work: str, static: Mapping[str, Any], rows: int | None = None) -> None:
        """Raise `PolicyError` unless this work may run with these settings at clients with at least so many rows."""
        if not any(fnmatchcase(work, pattern) for pattern in self.works):
            raise PolicyError(f"the work {work} matches no pattern of works; add it to works in the node's policy")
        if rows is not None and rows < self.least_batch:
            raise PolicyError(
                f"a client here has {rows} rows, fewer than least_batch = {self.least_batch}; "
                "lower least_batch in the node's policy"
            )
        product = 1
        for key, value in _counts(static):
            if key in BATCHES:
                self._check_batch(key, value)
            elif key in STEPS:
                _check_whole(key, value)
                if value > self.steps:
                    raise PolicyError(
                        f"{key} = {value} exceeds steps = {self.steps}; "
                        f"ask for fewer, or raise steps in the node's policy"
                    )
            elif value is not None:
                _check_whole(key, value)
                product *= max(1, value)
        if product > self.size:
            raise PolicyError(f"sizes of {product} numbers exceed size = {self.size}; raise size in the node's policy")

    def admit_method(self, method: str, work: str | None) -> None:
        """Raise `PolicyError` unless orders of this method are admitted.

        Args:
            method: what the server declares; "" for none, with which a node that limits methods answers for statistics.
            work: the work that is asked for, where there is one.
        """
        if any(fnmatchcase(method, pattern) for pattern in self.methods):
            return
        if not method and work is not None and work.partition("/")[0] in STATISTICS:
            return
        declared = f"the method {method[:80]} matches" if method else "the order declares no method, which matches"
        raise PolicyError(f"{declared} no pattern of methods; add it to methods in the node's policy")

    def admit_open(self, work: str, numbers: int) -> None:
        """Raise `PolicyError` where a result of so many numbers of one client may not leave by itself."""
        if self.secure and numbers > self.reveal:
            raise PolicyError(
                f"{work} would show {numbers} numbers of one client, and this node is secure: it shows "
                f"reveal = {self.reveal}, and more in sums only; run with federation.secure = true"
            )

    def _check_batch(self, key: str, value: Any) -> None:
        if type(value) is str:  # all rows, of which there are enough
            return
        _check_whole(key, value)
        if value < self.least_batch:
            raise PolicyError(
                f"{key} = {value} is below least_batch = {self.least_batch}; "
                "ask for a larger batch, or lower least_batch in the node's policy"
            )


PERMISSIVE = NodePolicy(
    rounds=1 << 62,
    least_batch=1,
    steps=1 << 62,
    size=1 << 62,
    orders=1 << 62,
    runs=1 << 62,
    seconds=0.0,
    message=1 << 40,
)
"""No limits: for nodes of one's own, on problems that the server has too."""


def node_policy(path: str | Path | None = None, default: NodePolicy = NodePolicy()) -> NodePolicy:  # noqa: B008
    """The policy of a node: the file that the environment names, which is its operator's, or that at `path`, or the
    default."""
    chosen = os.environ.get(ENVIRONMENT) or path
    return NodePolicy.read(chosen) if chosen else default


def named_works(static: Mapping[str, Any]) -> list[Any]:
    """The names of further works among the settings of a work."""
    return [value for key, value in static.items() if key in WORKS]


def _counts(static: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that bound what a work costs or reveals, those within records too."""
    for key, value in static.items():
        if key in RECORDS:
            if not hasattr(value, "_asdict"):
                raise PolicyError(f"{key} must be a named tuple, whose fields can be checked")
            yield from _counts(value._asdict())
        elif key in BATCHES | STEPS | SIZES:
            yield key, value


def _check_whole(key: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise PolicyError(f"{key} must be a whole number, not {str(value)[:40]!r}")


def _checked(key: str, value: Any, default: Any) -> Any:
    """One value of a policy, in the type of its default."""
    if key in ("works", "methods"):
        if isinstance(value, list | tuple) and all(isinstance(pattern, str) for pattern in value):
            return tuple(value)
        raise UsageError(f'{key} must be a list of patterns, such as ["*"].')
    if isinstance(default, bool):
        if type(value) is not bool:
            raise UsageError(f"{key} must be true or false, not {value!r}.")
        return value
    if key == "partners" and (type(value) is not int or value < 2):
        raise UsageError(f"partners must be a whole number of at least 2, not {value!r}.")
    if key == "delta" and not (type(value) is float and 0.0 < value < 1.0):
        raise UsageError(f"delta must be a number between 0 and 1, not {value!r}.")
    numbers = (int, float) if isinstance(default, float) else (int,)
    if type(value) not in numbers or not value >= 0:
        raise UsageError(f"{key} must be a number that is not negative, not {value!r}.")
    return type(default)(value)


class Count(NamedTuple):
    """What a run has asked of a node: orders, when the last one came, rounds, and the last of these."""

    orders: int
    last: float
    rounds: int = 0
    round: int = 0


class Tally:
    """Orders and rounds by run, so that a node stops after so many; with a folder, a restart does not begin to count
    anew."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / "orders.json"
        self._runs: dict[str, Count] = {}
        if self._path is not None and self._path.is_file():
            self._runs = _read_tally(self._path)

    def add(self, run: str, policy: NodePolicy, now: float | None = None, round: int = 0) -> None:
        """Count one order of a run, or raise `PolicyError` where that is one too many.

        Args:
            run: the name of the run.
            policy: the policy of the node.
            now: the time; that of the clock by default.
            round: the round that the server declares; another one than before counts as a new one, 0 is none.
        """
        now = time.time() if now is None else now
        self._runs = {name: entry for name, entry in self._runs.items() if now - entry.last < DAY}
        known = self._runs.get(run, Count(0, now))
        if known.orders >= policy.orders:
            raise PolicyError(
                f"this run has sent orders = {policy.orders} orders, the largest number; "
                "raise orders in the node's policy"
            )
        if run not in self._runs and len(self._runs) >= policy.runs:
            raise PolicyError(
                f"runs = {policy.runs} different runs have sent orders within a day; raise runs in the node's policy"
            )
        new = round not in (0, known.round)
        if new and known.rounds >= policy.rounds:
            raise PolicyError(
                f"this node has taken part in rounds = {policy.rounds} rounds of this run, the largest number; "
                "ask for fewer rounds, or raise rounds in the node's policy"
            )
        self._runs[run] = Count(known.orders + 1, now, known.rounds + new, round or known.round)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = self._path.with_suffix(".new")
            draft.write_text(json.dumps(self._runs), encoding="utf-8")
            os.replace(draft, self._path)


def _read_tally(path: Path) -> dict[str, Count]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(run): Count(int(orders), float(last), *map(int, rounds))
            for run, (orders, last, *rounds) in found.items()
        }
    except (ValueError, TypeError, AttributeError):
        raise UsageError(f"{path} is damaged; remove it to count the orders of runs anew.") from None


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Stop what runs inside after so many seconds of wall time, by `OutOfTime`.

    A timer of the operating system interrupts the main thread between two operations of Python: a loop over steps
    ends, while a single operation of torch is finished first. Nodes of Flower and FLARE answer in the main thread of a
    process of their own. In another thread there is no such timer, and an order is refused.
    """
    if not seconds:
        yield
        return
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        raise PolicyError(
            "seconds can be kept in the main thread of a process only; answer orders there, or set seconds = 0"
        )
    running = True

    def ring(*_: Any) -> None:
        if running:
            raise OutOfTime(
                f"the order took longer than seconds = {seconds:g} and was stopped; "
                "ask for less, or raise seconds in the node's policy"
            )

    handler = signal.signal(signal.SIGALRM, ring)
    begun, (left, every) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        running = False
        rest = max(1e-6, left - (time.monotonic() - begun)) if left else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, rest, every)
