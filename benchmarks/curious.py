"""What a curious coordinator can reconstruct by attacks that try, under a node's policy: python -m benchmarks.curious.

Four sites of 40 rows train a linear classifier of 21 parameters. For each attack, 400 orders are sent to new sites.

    rows       by least squares, from answers at one model for batches that the coordinator knows
    one row    by models so steep that they tell on which side of a plane rows lie, until one row alone is beyond it:
               from answers of a site, from its single numbers, and from secure sums over all sites
    gradient   of one site, by its answers, else by differences of secure sums with other partners, and single numbers
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.engines.own import ClientData
from coterie.errors import RunError
from coterie.federation import Federation, Stack, Work
from coterie.federation.api import Book
from coterie.federation.remote import InProcess, NodePolicy, RemoteEngine, Store
from coterie.federation.remote.messages import NoiseOrder
from coterie.federation.secure import Secure
from coterie.methods.shared.works import gradient
from coterie.methods.weights.meritfed import projection
from coterie.numerics import Draw

ROWS, WIDTH, ASKED, ALL = 40, 6, 400, [0, 1, 2, 3]
D, BIAS = 3 * WIDTH + 3, 3 * WIDTH
START, UNIT = torch.zeros(D, dtype=torch.float64), torch.eye(D, dtype=torch.float64)
POLICIES: dict[str, dict[str, Any]] = {
    "trusted (the defaults)": {},
    "trusted, `least_batch = 40`": {"least_batch": ROWS},
    "secure": {"secure": True},
    "secure, `reveal = 0`": {"secure": True, "reveal": 0},
    "secure, `reveal = 0`, `magnitude = 10`": {"secure": True, "reveal": 0, "magnitude": 10.0},
    "noise, `epsilon = 3`": {"epsilon": 3.0},
}


class Coordinator:
    """New sites under a policy, and what they answer; None where they refuse."""

    def __init__(self, policy: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.rows, self.size = torch.randn(4 * ROWS, WIDTH, dtype=torch.float64), policy.get("magnitude", 1e6)
        labels = (self.rows[:, 0] + torch.randn(4 * ROWS)).sign().long() + 1
        net, limits = torch.nn.Linear(WIDTH, 3), NodePolicy(seconds=0.0, **policy)
        options: dict[str, Any] = {"modules": (), "store": Store(), "shares_memory": False, "policy": limits}
        data = enumerate(zip(self.rows.split(ROWS), labels.split(ROWS), strict=True))
        nodes = {k: ClientData(rows, net, "cross_entropy", dtype="float64").node(k, **options) for k, rows in data}
        counts = torch.full((4,), ROWS)
        form = Stack((self.rows, labels), counts.cumsum(0) - counts, counts)
        noise = NoiseOrder(1.0, 30.0) if limits.epsilon else None  # little enough for all answers of an attack
        self.engine = RemoteEngine(InProcess(nodes), nodes[0].engine.task, form, noise=noise)
        self.engine.connect()
        self.key = 0

    def ask(self, work: Work, sent: Any, sites: list[int], *, summed: bool = False, **static: Any) -> Tensor | None:
        """The mean over these sites, in a secure sum or in the open; each order has its own round and draw."""
        self.key += 1
        fed = Federation.on(self.engine, book=Book(), secure=Secure() if summed else None)
        fed, draw = replace(fed, ids=torch.tensor(sites), round=self.key), Draw.of(self.key)
        try:
            return fed.mean(work, sent, draw=draw, **static)  # type: ignore[no-any-return]
        except RunError:
            return None

    def numbers(self, way: str, x: Tensor, at: list[int]) -> Tensor | None:
        """Numbers of the gradient of site 0, or of the mean over all sites."""
        if way == "single numbers":
            found = [self.ask(projection, (x, UNIT[i]), [0], batch="all", steps=1) for i in at]
            return None if any(one is None for one in found) else torch.stack(found)  # type: ignore[arg-type]
        answer = self.ask(gradient, x, ALL if way == "sums" else [0], summed=way == "sums", batch="all")
        return None if answer is None else answer[at]


def found(guess: Tensor, rows: Tensor) -> int:
    """How many rows were found to 1 %."""
    return int((torch.cdist(rows, guess).min(1).values < 0.01 * rows.norm(dim=1)).sum())


def unmixed(c: Coordinator) -> int:
    """Rows of site 0: the gradients of its rows solve a linear system, and each is a multiple of its row."""
    asked = [(c.ask(gradient, START, [0], batch=8), Draw.of(c.key)) for _ in range(ASKED)]
    known = [(answer, draw.client(0).batches(ROWS, 8, 1)[0]) for answer, draw in asked if answer is not None]
    if len(known) < ROWS:
        return 0
    shares = torch.stack([torch.bincount(rows, minlength=ROWS) / 8.0 for _, rows in known]).double()
    each = torch.linalg.lstsq(shares, torch.stack([answer for answer, _ in known])).solution
    return found(each[:, :WIDTH] / each[:, [BIAS]], c.rows[:ROWS])


def steep(c: Coordinator, way: str) -> bool:
    """Whether the row that is farthest in one direction is found."""
    rows = c.rows if way == "sums" else c.rows[:ROWS]
    low, high, beyond, beside = 0.0, 4.0, START.clone(), START.clone()
    beside[BIAS] = -c.size
    nobody = c.numbers(way, beside, [BIAS])
    for _ in range(12):
        middle = (low + high) / 2
        beyond[0], beyond[BIAS] = c.size / 4, -c.size / 4 * middle
        some = c.numbers(way, beyond, [BIAS])
        if some is None or nobody is None:
            return False
        count = float(some - nobody) * len(rows)
        if abs(count - 1.0) < 0.1:
            row, none = (c.numbers(way, x, list(range(WIDTH))) for x in (beyond, beside))
            return row is not None and none is not None and found((row - none)[None] * len(rows), rows) > 0
        low, high = (middle, high) if count > 1.0 else (low, middle)
    return False


def error(c: Coordinator, truth: Tensor) -> float:
    """How far the best guess of site 0's gradient is from it, of its length; 1 is what guessing 0 gives."""
    answers = [a for _ in range(ASKED) if (a := c.numbers("answers", START, list(range(D)))) is not None]
    guess = torch.stack(answers).mean(0) if answers else START.clone()
    for i in range(0 if answers else ASKED // 2):  # at first all rows, then batches, whose differences average out
        sums = [c.ask(gradient, START, who, summed=True, batch=8 if i else "all") for who in (ALL, ALL[1:])]
        if sums[0] is not None and sums[1] is not None:
            guess = guess + (4 * sums[0] - 3 * sums[1] - guess) / max(1, i)
            if i == 0:  # exact
                break
    for i in range(0 if answers else D):
        guess[i] = guess[i] if (one := c.numbers("single numbers", START, [i])) is None else one
    return min(1.0, float((guess - truth).norm() / truth.norm()))


def main() -> None:
    """Print the table."""
    print("| policy | rows read, of 40 | one row, by steep models | error of a site's gradient |\n|---|--:|---|--:|")
    truth = Coordinator({}).numbers("answers", START, list(range(D)))
    assert truth is not None
    for name, policy in POLICIES.items():
        ways = [way for way in ("answers", "single numbers", "sums") if steep(Coordinator(policy), way)]
        rows, off = unmixed(Coordinator(policy)), error(Coordinator(policy), truth)
        print(f"| {name} | {rows} | {', '.join(ways) or 'no'} | {off:.0%} |", flush=True)


if __name__ == "__main__":
    main()
