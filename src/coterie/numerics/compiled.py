"""Functions compiled into one program each, `vmap` included: for rounds that cannot be recorded as a whole.

`torch.func.vmap` runs a function operation by operation; for small models most of the time goes into starting
operations and writing intermediate values. A fused function is opaque to the surrounding vmap: when it is reached, it
is vectorised as a whole. Its `Workshop` decides whether it runs as it is written or by programs, one per shape
(`programs.py`).

A fused function is not differentiable, and sums may differ from the plain ones in the last bits.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from coterie.numerics.control import Opaque
from coterie.numerics.programs import Builder, Program, record
from coterie.numerics.tracing import Untraceable, recording

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative; rounding alone stays far below
ROUNDING = 16.0  # a change of a number is not known better than to so many units of its last place
SMALL = 1 << 24  # bytes


def agrees(fast: Tensor, plain: Tensor, before: Tensor) -> bool:
    """Whether a compiled value has changed as the plain one: as a whole, and row by row where it has rows.

    Args:
        fast: the compiled value.
        plain: the same as it is written.
        before: what both have changed; where a value is no change, zeros.

    Example:
        >>> before, after = torch.ones(3), torch.full((3,), 1.001)
        >>> agrees(before, after, before), agrees(after, after, before)
        (False, True)
    """
    if not plain.is_floating_point():
        return torch.equal(fast, plain)
    known = ROUNDING * torch.finfo(plain.dtype).eps * (_lengths(before) + _lengths(plain))
    allowed = TOLERANCE.get(plain.dtype, 1e-4) * _lengths(plain.double() - before.double()) + known
    return bool((_lengths(fast.double() - plain.double()) <= allowed).all())


def _lengths(value: Tensor) -> Tensor:
    return value.double().flatten(1).norm(dim=1) if value.dim() > 1 else value.double().norm()


class _Order(NamedTuple):
    """A compilation under way: what is compiled, with operands to try it on."""

    plain: Callable[..., Tensor]
    operands: tuple[Tensor, ...]
    builder: Builder


class Workshop:
    """Where the fused functions of one task are compiled.

    In the state `collecting` functions run as they are written, and a compilation is begun for every shape that they
    meet; `finish` takes the programs into use.

    Args:
        threads: how many threads a program may use.
        note: receives what the user should know of stored programs.
    """

    def __init__(self, threads: int = 1, note: Callable[[str], None] = lambda text: None) -> None:
        self.threads, self.collecting, self.using = threads, False, False
        self._note = note
        self._orders: dict[Hashable, _Order] = {}
        self._programs: dict[Hashable, Program] = {}
        self._named: dict[Hashable, Fused] = {}

    def fused(self, name: Hashable, plain: Callable[..., Tensor]) -> "Fused":
        """The fused function of a name, the same for the same name; such a function may call others.

        Args:
            name: of the function, with everything that it closes over.
            plain: the function.
        """
        if name not in self._named:
            self._named[name] = Fused(plain, self)
        return self._named[name]

    @property
    def busy(self) -> bool:
        """Whether something is being compiled."""
        return any(order.builder.busy for order in self._orders.values())

    def run(self, function: "Fused", operands: tuple[Tensor, ...]) -> Tensor:
        """A function's value, by its program where there is one."""
        key = id(function), tuple((t.shape, t.dtype) for t in operands)
        if self.using and (program := self._programs.get(key)) is not None:
            return program(operands)[0]
        if not self.collecting:
            return function.plain(*operands)
        if key not in self._orders:
            given = tuple(t.detach().contiguous() for t in operands)
            given = tuple(t.clone() if t.nbytes <= SMALL else t for t in given)  # rows do not change
            graph = record(lambda *t: [function.plain(*t)], given)
            self._orders[key] = _Order(function.plain, given, Builder(graph, self.threads, self._note))
        self.collecting = False  # what is called inside is part of this program
        try:
            return function.plain(*operands)
        finally:
            self.collecting = True

    def finish(self) -> None:
        """Wait for all compilations and take those into use that give the plain values; `Untraceable` if one does not.

        Nothing is in use before all are.
        """
        self.collecting = False
        if not self._orders:
            raise Untraceable("no derivative was asked for")
        for key, (plain, operands, builder) in self._orders.items():
            program = builder.program()
            fast, slow = program(operands)[0], plain(*operands)
            if not agrees(fast, slow, torch.zeros_like(slow)):
                raise Untraceable("a compiled derivative gives another value")
            self._programs[key] = program
        self._orders.clear()
        self.using = True

    def close(self) -> None:
        """End what is under way, and use nothing."""
        self.collecting = self.using = False
        for order in self._orders.values():
            order.builder.close()
        self._orders.clear()


class Fused(Opaque):
    """A function of tensors that its workshop may compile."""

    constant = True

    def __init__(self, plain: Callable[..., Tensor], workshop: Workshop) -> None:
        super().__init__(plain)
        self.workshop = workshop

    def of(self, plain: Callable[..., Tensor]) -> Self:
        """Another function of the same workshop."""
        return type(self)(plain, self.workshop)

    def run(self, *operands: Tensor) -> Tensor:
        """Compute, by the program that was compiled for such operands or as it is written."""
        return self.plain(*operands) if recording() else self.workshop.run(self, operands)


__all__ = ["Fused", "Workshop", "agrees"]
