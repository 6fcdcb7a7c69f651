"""Any method over a line that compresses uploads; the clients' errors become part of its state.

What a method uploads is found out by trying its first round once, so that the state has its final form from the
start, and a resumed run is as exact as without compression. An upload that first appears in a later round is
compressed without error feedback.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from coterie.federation import Federation
from coterie.federation.api import Book
from coterie.federation.stages.compression import Compressed, Compression, Errors, forgotten
from coterie.methods.base import Method
from coterie.numerics import Draw
from coterie.problems.base import Problem, View


class CompressedState(NamedTuple):
    """The method's own state, and what the clients have not got across yet, by upload."""

    inner: Any
    errors: Errors


def compressed(method: Method, everyone: Federation, compression: Compression) -> Method:
    """The same method with compressed uploads, for this federation."""
    tried: list[Errors] = []

    def first_errors(state: Any) -> Errors:
        if not compression.feedback:
            return {}
        if not tried:
            line = Compressed(everyone.engine, compression, {}, is_new=True)
            method.round(replace(everyone, engine=line, book=Book()), state, Draw.of(0, everyone.sizes.device))
            tried.append(forgotten(line.errors))
        return dict(tried[0])

    def init(problem: Problem, n: int) -> CompressedState:
        state = method.init(problem, n)
        return CompressedState(state, first_errors(state))

    def round(fed: Federation, s: CompressedState, draw: Draw) -> CompressedState:
        line = Compressed(fed.engine, compression, dict(s.errors))
        inner = method.round(replace(fed, engine=line), s.inner, draw)
        return CompressedState(inner, line.errors)

    def rejected(before: CompressedState, after: CompressedState) -> CompressedState:
        return before._replace(inner=method.rejected(before.inner, after.inner))

    def view(s: CompressedState) -> View:
        return method.view(s.inner)

    return replace(method, init=init, round=round, view=view, rejected=rejected)
