"""What a node lets a server do: which works, how small a batch, how many steps and orders, for how long.

A server that is curious or hostile can only send orders, so the node limits them. `NodePolicy` has safe defaults; the
operator of a node changes them in a small TOML file, whose keys are the fields. Which settings of works mean a batch,
a number of steps or a size is declared here once, by name, for all works.
"""

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
from typing import Any

from torch import Tensor

from coterie.errors import CoterieError, UsageError
from coterie.federation.account import STATISTICS
from coterie.federation.tree import Tree, tree_leaves
from coterie.federation.work import Each

ENVIRONMENT = "COTERIE_NODE_POLICY"  # names the TOML file of a node's operator

BATCHES = frozenset({"batch", "decode_batch", "mirror_batch"})
"""Settings that say how many rows a batch has: a whole number, or "all". A node does not rely on them: it counts the
rows that a work takes, whatever the setting is called."""
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
        least_batch: fewest rows of a client that a work may take at a time
        steps: largest number of repetitions that an order may ask for, for each setting that counts them
        size: largest product of the sizes that an order may ask for
        orders: largest number of orders per run
        runs: largest number of different runs per day
        seconds: wall time per order; 0 for no limit
        message: largest order, in bytes
        magnitude: largest absolute value among the parameters that an order sends; 0 for no limit
        secure: whether results leave this node in secure sums only, except for `reveal` single numbers
        reveal: the most single numbers of one client per round where secure is on
        reveal_total: the most of them over all runs; 0 for fewer than the model has parameters
        partners: in secure sums, a client is hidden at least as in a sum of so many equals
        target: whether what no sum and no noise hides may leave where secure or epsilon is on: exact replies of the
            target, and what clients remember
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
    magnitude: float = 0.0
    secure: bool = False
    reveal: int = 4
    reveal_total: int = 0
    partners: int = 2
    target: bool = False
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
            if key in STEPS:
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

    def admit_batch(self, work: str, rows: int, different: int | None) -> None:
        """Raise `PolicyError` where a work takes too few rows of a client at a time.

        Args:
            work: the name of the work.
            rows: how many rows it takes.
            different: how many of them differ, where that is known. Batches are drawn with replacement, and a server
                may choose among draws: half of least_batch must differ.
        """
        if rows < self.least_batch or (different is not None and 2 * different < self.least_batch):
            what = f"{rows} rows" if rows < self.least_batch else f"{different} different rows"
            raise PolicyError(
                f"{work} would take {what} of a client, too few for least_batch = {self.least_batch}; "
                "ask for a larger batch, or lower least_batch in the node's policy"
            )

    def admit_parameters(self, work: str, sent: Tree) -> None:
        """Raise `PolicyError` where an order sends parameters beyond `magnitude`; statistics are no parameters."""
        if not self.magnitude or work.partition("/")[0] in STATISTICS:
            return
        for leaf in tree_leaves(sent):
            tensor = leaf.rows if isinstance(leaf, Each) else leaf
            if isinstance(tensor, Tensor) and not bool((tensor.abs() <= self.magnitude).all()):
                raise PolicyError(
                    f"the order sends a parameter beyond magnitude = {self.magnitude:g}; "
                    "take smaller steps, or raise magnitude in the node's policy"
                )

    def admit_exact(self, what: str) -> None:
        """Raise `PolicyError` where something may not leave because neither sums nor noise hide it."""
        if (self.secure or self.epsilon) and not self.target:
            kind = "secure" if self.secure else "private (epsilon)"
            raise PolicyError(
                f"this node is {kind}, and {what} leaves it as it is; choose a setting that does not ask for it, or "
                "set target = true in the node's policy"
            )

    def admit_clear(self, work: str, in_round: int, in_all: int, model: int) -> None:
        """Raise `PolicyError` where a client would show too many single numbers.

        Args:
            work: the work whose result it is.
            in_round: how many numbers of the client the round would have shown.
            in_all: how many all runs would have shown.
            model: how many parameters the model has; 0 where that is not known.
        """
        if in_round > self.reveal:
            raise PolicyError(
                f"{work} would show {in_round} numbers of one client in one round, and this node is secure: it shows "
                f"reveal = {self.reveal}, and more in sums only; run with federation.secure = true"
            )
        most = self.reveal_total or max(0, model - 1)
        if in_all > most:
            limit = f"reveal_total = {most}" if self.reveal_total else f"{most}, fewer than the model has parameters"
            raise PolicyError(
                f"{work} would bring the single numbers that this node has shown of one client to {in_all}; it shows "
                f"{limit}; set reveal_total in the node's policy to admit more"
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


def is_sampled(static: Mapping[str, Any]) -> bool:
    """Whether a result depends on which rows are drawn: whether any batch is not "all"."""
    values = dict(static)
    for key in RECORDS & static.keys():
        values |= static[key]._asdict() if hasattr(static[key], "_asdict") else {}
    return any(type(values[key]) is not str for key in BATCHES & values.keys())


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
        elif key in STEPS | SIZES:
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
