"""Rounds of any method as compiled programs.

A round is a pure function of state, draw and active set, so it can be recorded as a whole (numerics/tracing.py): the
clients' works under vmap with their batches and draws, the reductions, the server's arithmetic. What the round puts
into the ledger depends on shapes alone; it is noted once and added each time. A compiled round says whether what it
assumed holds (all replies finite, no copies among them); where it does not, the round is run as it is written.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor

from coterie.federation import Federation, LocalEngine, Memory
from coterie.federation.api import Book
from coterie.federation.ledger import Ledger
from coterie.federation.recorded import RecordedEngine
from coterie.federation.tree import tree_flatten, tree_unflatten
from coterie.methods.base import Method
from coterie.numerics import Draw
from coterie.numerics.compiled import agrees
from coterie.numerics.programs import Builder, Graph, Program, record
from coterie.numerics.tracing import Counter, Untraceable, recorded

Leaf = Tensor | int | None


@dataclass(frozen=True)
class Form:
    """What a state looks like: its structure, the places of tensors and of counters among the leaves, and the rest.

    Two states of one form differ in numbers only.
    """

    structure: Any
    kinds: tuple[Any, ...]

    @staticmethod
    def of(state: Any) -> "tuple[Form, list[Any]]":
        """The form of a state and its leaves; memories are opened."""
        leaves, structure = tree_flatten(state)
        opened, kinds = [], []
        for leaf in leaves:
            if isinstance(leaf, Memory):
                rows, inner = tree_flatten(leaf.payload)
                opened += rows
                kinds.append(("memory", inner, tuple(map(_kind, rows))))
            else:
                opened.append(leaf)
                kinds.append(_kind(leaf))
        return Form(structure, tuple(kinds)), opened

    @cached_property
    def _tuples(self) -> Any:
        """The pattern of states that are leaves in nested tuples, which need no walk by pytree; None for all others."""
        marks = [object() for _ in range(self.structure.num_leaves)]
        leaves: list[Any] = []
        pattern = _opened(tree_unflatten(marks, self.structure), leaves, iter(self.kinds))
        plain = all(kind[0] != "memory" for kind in self.kinds)
        return pattern if plain and leaves == marks else None

    def leaves(self, state: Any) -> list[Any] | None:
        """The leaves of a state of this form; None where it has another."""
        leaves: list[Any] = []
        if self._tuples is not None and _opened(state, leaves) == self._tuples:
            return leaves
        form, leaves = Form.of(state)
        return leaves if form == self else None

    def state(self, leaves: Sequence[Any]) -> Any:
        """The state with these leaves."""
        if self._tuples is not None:
            return _filled(self._tuples, iter(leaves))
        supply = iter(leaves)
        found = []
        for kind in self.kinds:
            if kind[0] == "memory":
                found.append(Memory(tree_unflatten([next(supply) for _ in kind[2]], kind[1])))
            else:
                found.append(next(supply))
        return tree_unflatten(found, self.structure)


def _opened(tree: Any, leaves: list[Any], kinds: Iterator[tuple[Any, ...]] | None = None) -> tuple[Any, ...]:
    """The pattern of nested tuples with the kinds of leaves, these or their own; the leaves are added to a list."""
    if isinstance(tree, tuple):
        return (type(tree), *[_opened(part, leaves, kinds) for part in tree])
    leaves.append(tree)
    return _kind(tree) if kinds is None else next(kinds)


def _filled(pattern: tuple[Any, ...], leaves: Iterator[Any]) -> Any:
    """Nested tuples of a pattern with these leaves."""
    kind, *parts = pattern
    if isinstance(kind, str):
        return next(leaves)
    found = [_filled(part, leaves) for part in parts]
    return kind._make(found) if hasattr(kind, "_make") else kind(found)


def _kind(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Tensor):
        return "tensor", tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, int | Counter) and not isinstance(leaf, bool):
        return ("counter",)
    return "value", leaf


class RecordedRound:
    """A method's round for states of one form and as many active clients: its graph, and what else it does.

    Args:
        method: the method.
        fed: the federation at the beginning of a round.
        state: the state before it.
        draw: the round's randomness.
    """

    def __init__(self, method: Method, fed: Federation, state: Any, draw: Draw) -> None:
        engine = fed.engine
        if type(engine) is not LocalEngine:
            raise Untraceable("updates pass through stages or a network")
        if fed.secure is not None or fed.screening.clip is not None or fed.screening.norm is not None:
            raise Untraceable("updates are clipped, screened by length or summed securely")
        self.form, leaves = Form.of(state)
        self.clients, self.everyone = len(fed.ids), len(fed.ids) == fed.n
        self._ledger = Ledger()
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        traced = replace(fed, engine=RecordedEngine.of(engine, fed.ids))
        after: list[Any] = []

        def round(*inputs: Tensor) -> list[Tensor]:
            book = Book()
            supply, (key, *ids) = iter(inputs), inputs[len(given) :]
            filled = [next(supply) if isinstance(leaf, Tensor) else _symbol(leaf, i) for i, leaf in enumerate(leaves)]
            view = replace(traced, book=book, ids=ids[0] if ids else fed.ids)
            with recorded() as assumptions:
                new = method.round(view, self.form.state(filled), Draw(key, label=draw.label))
            if book.events:
                raise Untraceable("the round reports events")
            self._ledger = book.ledger
            after[:] = Form.of(new)
            values = [leaf for leaf in after[1] if isinstance(leaf, Tensor)]
            self._kept = [_place(value, inputs) for value in values]
            holds = torch.ones((), dtype=torch.bool)
            for condition in assumptions.conditions:
                holds = holds & condition.reshape(())
            return [*(v for v, place in zip(values, self._kept, strict=True) if place is None), holds]

        self.graph: Graph = record(round, [t.contiguous() for t in self._inputs(leaves, fed, draw)])
        self._leaves: list[Any] = [None if isinstance(leaf, Tensor) else leaf for leaf in after[1]]
        moved = any(isinstance(leaf, Counter) and leaf.of != i for i, leaf in enumerate(self._leaves))
        if after[0] != self.form or moved:
            raise Untraceable("the state changes its form from round to round")

    def _inputs(self, leaves: Sequence[Any], fed: Federation, draw: Draw) -> list[Tensor]:
        return [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), draw.key, *([] if self.everyone else [fed.ids])]

    def leaves(self, fed: Federation, state: Any) -> list[Any] | None:
        """The leaves of a state before a round of this form; None for any other round."""
        return self.form.leaves(state) if len(fed.ids) == self.clients else None

    def run(self, program: Program, fed: Federation, leaves: Sequence[Any], draw: Draw) -> Any:
        """The state after the round, by the program; None where it must be run as it is written.

        Args:
            program: the compiled graph.
            fed: the federation at the beginning of the round.
            leaves: those of the state before.
            draw: the round's randomness.
        """
        inputs = self._inputs(leaves, fed, draw)
        *fresh, holds = program(inputs)
        if not bool(holds):
            return None
        fed.ledger.merge(self._ledger)
        supply = iter(fresh)
        tensors = iter([next(supply) if place is None else inputs[place] for place in self._kept])
        found = [
            next(tensors) if isinstance(before, Tensor) else leaf.at(before) if isinstance(leaf, Counter) else leaf
            for leaf, before in zip(self._leaves, leaves, strict=True)
        ]
        return self.form.state(found)


def _symbol(leaf: Any, place: int) -> Any:
    return Counter(of=place) if isinstance(leaf, int) and not isinstance(leaf, bool) else leaf


def _place(value: Tensor, inputs: Sequence[Tensor]) -> int | None:
    """Which input a value is, where it is one: a program need not copy it."""
    return next((i for i, given in enumerate(inputs) if given is value), None)


class CompiledRounds:
    """Rounds of a method, by a program as soon as there is one.

    Args:
        method: the method.
        threads: how many threads the program may use.
        note: receives what the user should know of stored programs.
    """

    def __init__(self, method: Method, threads: int, note: Callable[[str], None] = lambda text: None) -> None:
        self.method, self._threads, self._note = method, threads, note
        self._round: RecordedRound | None = None
        self._builder: Builder | None = None
        self._program: Program | None = None

    def begin(self, fed: Federation, state: Any, draw: Draw) -> Graph:
        """Record the round and start to compile it; `Untraceable` where that is impossible."""
        self._round = RecordedRound(self.method, fed, state, draw)
        self._builder = Builder(self._round.graph, self._threads, self._note)
        return self._round.graph

    @property
    def busy(self) -> bool:
        """Whether the compiler is at work."""
        return self._builder is not None and self._builder.busy

    def finish(self, fed: Federation, state: Any, draw: Draw) -> float:
        """Take the program into use, once it gives what the round as it is written gives.

        Returns its time relative to that of the round as it is written, here and now.
        """
        assert self._builder is not None
        assert self._round is not None
        program, self._builder = self._builder.program(), None
        leaves = self._round.leaves(fed, state)
        if leaves is None:
            raise Untraceable("the state or the number of clients has changed meanwhile")

        def plain() -> Any:
            return self.method.round(replace(fed, book=Book()), state, draw)

        def compiled() -> Any:
            assert self._round is not None
            return self._round.run(program, replace(fed, book=Book()), leaves, draw)

        if (fast := compiled()) is None:
            raise Untraceable("its assumptions do not hold: replies are not finite, or equal")
        _check_equal(fast, plain(), state)
        clock = process_time if self._threads == 1 else perf_counter  # several threads save time on the wall alone
        took = {plain: float("inf"), compiled: float("inf")}
        for _ in range(3):
            for side in took:
                began = clock()
                side()
                took[side] = min(took[side], clock() - began)
        self._program = program
        return took[compiled] / max(took[plain], 1e-9)

    def close(self) -> None:
        """End a compilation that is under way."""
        if self._builder is not None:
            self._builder.close()
            self._builder = None

    def round(self, fed: Federation, state: Any, draw: Draw) -> Any:
        """One round, by the program where there is one that fits."""
        if self._program is not None and self._round is not None:
            leaves = self._round.leaves(fed, state)
            if leaves is not None:
                after = self._round.run(self._program, fed, leaves, draw)
                if after is not None:
                    return after
        return self.method.round(fed, state, draw)


def _check_equal(fast: Any, plain: Any, before: Any) -> None:
    """A compiled round must change a state as the round as it is written does, up to rounding."""
    for a, b, at in zip(*(Form.of(state)[1] for state in (fast, plain, before)), strict=True):
        if not (agrees(a, b, at) if isinstance(b, Tensor) else a == b):
            raise Untraceable("the compiled round gives other numbers")


__all__ = ["CompiledRounds", "RecordedRound"]
