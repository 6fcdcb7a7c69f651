"""A transport of which most nodes are hostile: replies changed in structure, in bytes, in number and order.

It drives the real server loop (`drive`). The nodes of `HONEST` clients answer as they should; each other node answers
every order with several frames, most of them mutated.
"""

import random
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from coterie.experiment.build import assemble
from coterie.experiment.config import Config, resolve
from coterie.experiment.loop import Result, run_rounds
from coterie.federation import Each
from coterie.federation.remote import PERMISSIVE, Address, InProcess, Message, Names, Node, Store, Trouble, node_for
from coterie.federation.remote.codec import MAGIC, CodecError, decode, encode
from coterie.federation.remote.messages import PROTOCOL, Declaration, Done, Order, Reply
from coterie.numerics.sparse import Sparse

CLIENTS, HONEST = 6, (0, 3)
NAMES = Names()
SCENES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "krum": {},
    "top-k": {},
    "ditto": {},
    "primal-dual": {},
    "meritfed": {"target": 2},
}
"""Methods with what is special about them: means, rows, named tuples, memory and recalls, several results, a target."""


class Driven(NamedTuple):
    """What came of a run: its result, and how many frames of each kind were sent."""

    result: Result
    frames: Counter[str]


def drive(method: str, rounds: int, seed: int, copies: int = 20, *, keys: bool = True) -> Driven:
    """Run a method with a hostile majority. Each hostile node answers every order with so many frames.

    With `keys` the transport knows which client a node is; without, a hostile node may claim to be an honest one first.
    """
    made: list[Hostile] = []

    def network(config: Config, problem: Any) -> Hostile:
        at = config.federation.target
        here: dict[Address, Node] = {
            k: node_for(
                problem,
                (k,),
                target=problem.target if at == k else None,
                store=Store(),
                shares_memory=True,
                policy=PERMISSIVE,
            )
            for k in range(CLIENTS)
        }
        made.append(Hostile(here, random.Random(f"{method} {seed}"), copies, keys))
        return made[0]

    federation = {"mode": "sequential", "patience": 0.01, "timeout": 1e-6, "norm": 1e6, **SCENES[method]}
    run = {
        "method": method,
        "problem": "quadratic",
        "rounds": rounds,
        "threads": 1,
        "baselines": [],
        "engine": "flower",
    }
    problem = {"clients": CLIENTS, "friends": 2, "dimension": 4, "rows": 12}
    config = resolve({"run": {**run, "seed": seed, "baselines": []}, "problem": problem, "federation": federation})
    return Driven(run_rounds(assemble(config, network), None), made[0].frames)


class Hostile(InProcess):
    """Nodes in this process; what the hostile ones reply is changed on the way."""

    def __init__(self, nodes: Mapping[Address, Node], dice: random.Random, copies: int, keys: bool) -> None:
        super().__init__(nodes)
        self.dice, self.copies, self.keys, self.frames = dice, copies, keys, Counter[str]()
        self.seen: list[bytes] = [encode(Reply(0, None))]

    def nodes(self) -> Mapping[Address, int | None]:
        """Everybody, by its key or without one."""
        return {k: self.here[k].clients[0] if self.keys else None for k in self.here}

    def exchange(
        self, orders: Mapping[Address, Message], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        answers: list[tuple[Address, bytes | Trouble]] = []
        for node, data in super().exchange(orders, needed, timeout):
            assert isinstance(data, bytes)
            if node in HONEST:
                answers.append((node, data))
                continue
            self.seen = [*self.seen[-20:], data]
            answers += [(node, self.frame(data)) for _ in range(self.copies)]
            if self.dice.random() < 0.5:
                answers.append((node, data))
        self.dice.shuffle(answers)
        return answers

    def frame(self, data: bytes) -> bytes:
        """A mutated frame."""
        kind = self.dice.choice(("structure", "structure", "structure", "bytes", "zeros", "replay", "noise"))
        self.frames[kind] += 1
        if kind == "structure":
            return self.restructured(data)
        if kind == "bytes":
            return self.corrupted(data)
        if kind == "zeros":
            return self.bomb(decode(data, NAMES).number)
        if kind == "replay":
            return self.dice.choice(self.seen)
        return self.dice.randbytes(self.dice.randrange(60))

    def restructured(self, data: bytes) -> bytes:
        """The reply with one to three parts of its tree replaced."""
        tree = decode(data, NAMES)
        for _ in range(self.dice.randint(1, 3)):
            tree = self.replaced(tree)
        try:
            return encode(tree)
        except (CodecError, UnicodeEncodeError):
            return data[:-1]

    def replaced(self, tree: Any) -> Any:
        """A tree with something else somewhere."""
        inside = isinstance(tree, tuple | list | dict) and len(tree) and self.dice.random() < 0.85
        if not inside:
            return self.other(tree)
        if isinstance(tree, dict):
            key = self.dice.choice(list(tree))
            return {**tree, key: self.replaced(tree[key])}
        values = list(tree)
        i = self.dice.randrange(len(values))
        values[i] = self.replaced(values[i])
        if hasattr(tree, "_fields"):
            return type(tree)._make(values)
        return type(tree)(values if self.dice.random() < 0.8 else values * 2)

    def other(self, value: Any) -> Any:
        """Something where a value was."""
        dice = self.dice
        if isinstance(value, torch.Tensor) and dice.random() < 0.6:
            return dice.choice(
                (
                    lambda: value[None],
                    lambda: value.double() if value.dtype != torch.float64 else value.float(),
                    lambda: value.half(),
                    lambda: value.flatten()[: dice.randrange(3)],
                    lambda: torch.full_like(value, float("nan")) if value.is_floating_point() else value,
                    lambda: value.new_zeros(dice.choice(((), (0,), (1, 0), (7,), (1, 1, 1, 1, 1, 1)))),
                    lambda: Each(value) if value.dim() else None,
                )
            )()
        return dice.choice(
            (
                *(None, True, False, 0, 1, -1, 5, 2**40, 2**63 - 1, -(2**63), 0.5, float("nan"), float("-inf")),
                *("", "lost", "client error", "forgotten", "x" * 5000, "\x1b[2J\r\n\x00", "float32"),
                *((), [], {}, {"a": 1}, (0,), (0, 1, 2), ((),), (("float32", (4,)),)),
                *(torch.ones(()), torch.ones(1, 4), torch.zeros(0), torch.ones(2, dtype=torch.bool)),
                Declaration((dice.randrange(-1, 8),), (dice.choice((0, 12, 2**41)),), (("float32", (4,)),), True, True),
                Declaration((0,), (12,), ((torch.ones(2), ()),), torch.ones(2), False),  # type: ignore[arg-type]
                Trouble(dice.choice(("lost", "forgotten", "refused", "\x07")), "why", (dice.randrange(9),)),
                Done(torch.ones(1, 4), ()),
                Reply(3, Done(None, (True,))),
                Order(PROTOCOL, 1, "run", "r", (0,), None, ((),)),
                Sparse(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32)),
            )
        )

    def corrupted(self, data: bytes) -> bytes:
        """The reply with some bytes changed, cut out, doubled or missing."""
        raw = bytearray(data)
        for _ in range(self.dice.randint(1, 4)):
            at = self.dice.randrange(len(raw) + 1)
            kind = self.dice.randrange(4)
            if kind == 0 and raw:
                raw[at % len(raw)] = self.dice.randrange(256)
            elif kind == 1:
                del raw[at : at + self.dice.randint(1, 9)]
            elif kind == 2:
                raw[at:at] = self.dice.choice((b"[", b'"', b"-1", b"1e9", b'["T"]', b"null", b"9" * 30, b"true"))
            else:
                del raw[at:]
        return bytes(raw)

    def bomb(self, number: int) -> bytes:
        """Few bytes that would be many."""
        entry = self.dice.choice(('["float32",[1,60000000],0]', '["int8",[268435456],0]', '["float64",[1,4,1,0],0]'))
        count = self.dice.choice((1, 3, 2000))
        parts = ",".join(['["T"]'] * count)
        done = f'["n","coterie.federation.remote.messages:Done",["t",{parts}],["t"]]'
        tree = f'["n","coterie.federation.remote.messages:Reply",{number},{done}]'
        text = f'{{"tree":{tree},"tensors":[{",".join([entry] * count)}]}}'.encode()
        return MAGIC + len(text).to_bytes(4, "little") + text
