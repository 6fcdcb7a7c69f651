"""What a node has given away, over all runs: orders, rounds, clear numbers, sums, and its privacy budget.

One account per site. All of its processes share one file, and whatever an answer discloses is on the disk before the
answer leaves. SQLite keeps the file: one process writes at a time, each change is whole or not there at all, also after
`kill -9`, and it is flushed (fsync) before the change counts. Nothing is forgotten; only runs per day are counted by
the clock.
"""

import json
import math
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from coterie.errors import UsageError
from coterie.federation.remote.codec import digest
from coterie.federation.remote.messages import NoiseOrder, Order
from coterie.federation.remote.policy import NodePolicy, PolicyError
from coterie.federation.secure.exposure import check_leverage
from coterie.federation.tree import Size

FILE = "disclosures.sqlite"
DAY = 86400.0
PATIENCE = 60.0  # seconds to wait for another process of the site
TABLES = (
    "CREATE TABLE runs (run TEXT PRIMARY KEY, orders INTEGER, last REAL)",
    "CREATE TABLE rounds (run TEXT, round INTEGER, PRIMARY KEY (run, round))",
    "CREATE TABLE clear (client INTEGER, question TEXT, run TEXT, round INTEGER, numbers INTEGER, "
    "PRIMARY KEY (client, question))",
    "CREATE TABLE sums (question TEXT, scales TEXT, PRIMARY KEY (question, scales))",
    "CREATE TABLE budget (spent REAL)",
)


class Disclosures:
    """The account of one site.

    Args:
        folder: where the file is; None for an account that ends with the process.

    Example:
        >>> account = Disclosures(None)
        >>> account.count_order("run-1", 1, NodePolicy(orders=1))
        >>> account.count_order("run-1", 1, NodePolicy(orders=1))
        Traceback (most recent call last):
            ...
        coterie.federation.remote.policy.PolicyError: this run has sent orders = 1 orders, the largest number; ...
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._turn = Lock()
        self._here = self._opened() if self._path is None else None
        if self._path is not None and self._path.is_file():
            self._check()

    def count_order(self, run: str, round: int, policy: NodePolicy, now: float | None = None) -> None:
        """Count an order, or raise `PolicyError` where that is one too many.

        Args:
            run: the name of the run.
            round: the round that the server declares; 0 is none.
            policy: the policy of the node.
            now: the time; that of the clock by default.
        """
        now = time.time() if now is None else now
        with self._change() as db:
            known = db.execute("SELECT orders FROM runs WHERE run = ?", (run,)).fetchone()
            orders = known[0] if known else 0
            if orders >= policy.orders:
                raise PolicyError(
                    f"this run has sent orders = {policy.orders} orders, the largest number; "
                    "raise orders in the node's policy"
                )
            if known is None and _sum(db, "SELECT count(*) FROM runs WHERE last > ?", now - DAY) >= policy.runs:
                raise PolicyError(
                    f"runs = {policy.runs} different runs have sent orders within a day; "
                    "raise runs in the node's policy"
                )
            db.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", (run, orders + 1, now))
            if round:
                db.execute("INSERT OR IGNORE INTO rounds VALUES (?, ?)", (run, round))
            if _sum(db, "SELECT count(*) FROM rounds WHERE run = ?", run) > policy.rounds:
                raise PolicyError(
                    f"this node has taken part in rounds = {policy.rounds} rounds of this run, the largest number; "
                    "ask for fewer rounds, or raise rounds in the node's policy"
                )

    def spend(self, noise: NoiseOrder | None, policy: NodePolicy) -> float:
        """Count one upload, or raise `PolicyError` where the site's budget does not allow it; ε after it.

        T uploads with noise multiplier z are worth one Gaussian mechanism of multiplier z/√T; what is kept is Σ T/z².

        Args:
            noise: what the order asks for.
            policy: the policy of the node.
        """
        if not policy.epsilon:
            return math.inf
        if noise is None or not noise.multiplier:
            raise PolicyError(
                f"this site has a budget of epsilon = {policy.epsilon:g}, and the order asks for no noise; "
                "run with privacy.clip and privacy.noise"
            )
        with self._change() as db:
            after = _sum(db, "SELECT sum(spent) FROM budget") + 1.0 / noise.multiplier**2
            epsilon = _epsilon(1.0 / math.sqrt(after), policy.delta)
            if epsilon > policy.epsilon:
                raise PolicyError(
                    f"this upload would bring the site's privacy loss to {epsilon:.3g}, above its budget of "
                    f"epsilon = {policy.epsilon:g} at delta = {policy.delta:g}; ask for more noise or fewer rounds"
                )
            db.execute("UPDATE budget SET spent = ?", (after,))
        return epsilon

    @property
    def spent(self) -> float:
        """Σ T/z² over all uploads so far."""
        with self._change() as db:
            return float(_sum(db, "SELECT sum(spent) FROM budget"))

    def show_numbers(self, order: Order, numbers: int, policy: NodePolicy, model: Size) -> None:
        """Count numbers that leave by themselves, or raise `PolicyError`. The same answer again tells nothing new.

        Args:
            order: the order that they answer.
            numbers: how many of each client.
            policy: the policy of the node.
            model: how large the model is.
        """
        assert order.step is not None
        step = order.step
        versions = step.memory.before if step.memory else (0,) * len(order.clients)
        with self._change() as db:
            for client, version in zip(order.clients, versions, strict=True):
                question = f"{digest((step.work, step.static, step.draw, step.shared, version)):x}"
                if db.execute("SELECT 1 FROM clear WHERE client = ? AND question = ?", (client, question)).fetchone():
                    continue
                db.execute(
                    "INSERT INTO clear VALUES (?, ?, ?, ?, ?)", (client, question, order.run, order.round, numbers)
                )
                policy.admit_clear(step.work, *_clear(db, client, order), model.floats)

    def note_fault(self, order: Order) -> None:
        """Count that a client's numbers cannot be summed, which tells something of them, as one number of each client;
        where that is one too many, `check_faults` refuses the next order."""
        with self._change() as db:
            for client in order.clients:
                fault = client, f"fault {order.number} {secrets.token_hex(8)}", order.run, order.round, 1
                db.execute("INSERT INTO clear VALUES (?, ?, ?, ?, ?)", fault)

    def check_faults(self, order: Order, policy: NodePolicy, model: Size) -> None:
        """Raise `PolicyError` where a client has shown more single numbers than it may."""
        assert order.step is not None
        with self._change() as db:
            for client in order.clients:
                policy.admit_clear(order.step.work, *_clear(db, client, order), model.floats)

    def check_sum(self, question: int, scales: dict[int, float], partners: int) -> None:
        """Raise `Refusal` where a sum would, with those shown before, tell too much of one client."""
        with self._change() as db:
            check_leverage(_shown(db, question), scales, partners)

    def show_sum(self, question: int, scales: dict[int, float], partners: int) -> None:
        """Note a sum that is shown, after the same check."""
        with self._change() as db:
            check_leverage(_shown(db, question), scales, partners)
            entry = f"{question:x}", json.dumps(scales, sort_keys=True)
            db.execute("INSERT OR IGNORE INTO sums VALUES (?, ?)", entry)

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """A change that is whole, and on the disk when this ends; an error leaves the account as it was."""
        with self._turn:
            try:
                db = self._here or self._opened()
                try:
                    db.execute("BEGIN IMMEDIATE")
                    yield db
                    db.execute("COMMIT")
                finally:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                    if db is not self._here:
                        db.close()
            except sqlite3.Error as error:
                raise PolicyError(
                    f"what this node gives away cannot be noted ({error}), so nothing leaves it; "
                    "ask its operator to look at its disk"
                ) from None

    def _opened(self) -> sqlite3.Connection:
        """The file, made where it is not there."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        options: dict[str, Any] = {"timeout": PATIENCE, "isolation_level": None, "check_same_thread": False}
        db = sqlite3.connect(self._path or ":memory:", **options)
        db.execute("PRAGMA synchronous = EXTRA")  # a change is flushed, and its folder too, before it counts
        if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            db.execute("BEGIN IMMEDIATE")
            if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
                for table in TABLES:
                    db.execute(table)
                db.execute("INSERT INTO budget VALUES (0)")
            db.execute("COMMIT")
        return db

    def _check(self) -> None:
        try:
            db = self._opened()
            try:
                fault = str(db.execute("PRAGMA integrity_check").fetchone()[0])
            finally:
                db.close()
        except sqlite3.DatabaseError as error:
            fault = str(error)
        if fault != "ok":
            raise UsageError(
                f"{self._path} is damaged ({fault}); it says what this site has given away. Restore it from a copy; "
                "without it a server could ask for more than the policy admits."
            )


def _sum(db: sqlite3.Connection, query: str, *values: Any) -> Any:
    return db.execute(query, values).fetchone()[0] or 0


def _clear(db: sqlite3.Connection, client: int, order: Order) -> tuple[int, int]:
    """The single numbers that a client has shown: in this round, and in all."""
    mine = "SELECT sum(numbers) FROM clear WHERE client = ?"
    in_round = _sum(db, f"{mine} AND run = ? AND round = ?", client, order.run, order.round)
    return in_round, _sum(db, mine, client)


def _shown(db: sqlite3.Connection, question: int) -> list[dict[int, float]]:
    """The coefficients of the sums that answer this question."""
    found = db.execute("SELECT scales FROM sums WHERE question = ?", (f"{question:x}",)).fetchall()
    return [{int(k): float(a) for k, a in json.loads(scales).items()} for (scales,) in found]


def _epsilon(multiplier: float, delta: float) -> float:
    from coterie.federation.stages.privacy import epsilon

    try:
        return epsilon(multiplier, 1, delta)
    except UsageError as error:
        raise PolicyError(f"the budget of this site cannot be computed: {error}") from None
