"""Any method over stages that remember something: their states become part of the method's state.

So a resumed run goes on exactly where it stopped: with the errors that clients have not sent yet, and with the privacy
budget that is spent.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from coterie.errors import NoClients
from coterie.federation import Engine
from coterie.federation.stages.base import Staged, StageState
from coterie.methods.base import Draw, Federation, Method, Problem, View


class StagedState(NamedTuple):
    """The method's own state, and the states of the stages that have one, by key."""

    inner: Any
    stages: dict[str, StageState]


def with_stages(method: Method, engine: Engine) -> Method:
    """The method with the states of the engine's stages in its own; the method itself where there are none.

    Args:
        method: the method.
        engine: the engine that the rounds will be run on; it has stages if it is `Staged`.

    Example:
        `with_stages(meritfed(), staged(engine, Compression("top-k", 0.1)))` compresses the uploads of MeritFed. Run it
        on a federation with that engine.
    """
    if not isinstance(engine, Staged):
        return method
    stages = [stage for stage in engine.stages if engine.states[stage.key] is not None]
    if not stages:
        return method

    def init(problem: Problem, n: int) -> StagedState:
        states = engine.start()
        return StagedState(method.init(problem, n), {stage.key: states[stage.key] for stage in stages})

    def round(fed: Federation, s: StagedState, draw: Draw) -> StagedState:
        if not isinstance(fed.engine, Staged):
            raise TypeError(f"{method.name} was given stages; run it on a federation whose engine has them")
        line = fed.engine.resumed(s.stages)

        def after(inner: Any) -> StagedState:
            return StagedState(inner, {t.key: t.finished(s.stages[t.key], line.states[t.key]) for t in stages})

        try:
            return after(method.round(replace(fed, engine=line), s.inner, draw))
        except NoClients as error:
            error.state = undone(s, after(s.inner))
            raise

    def undone(before: StagedState, after: StagedState) -> StagedState:
        states = {t.key: t.undone(before.stages[t.key], after.stages[t.key]) for t in stages}
        return after._replace(stages=states)

    def rejected(before: StagedState, after: StagedState) -> StagedState:
        return undone(before, after)._replace(inner=method.rejected(before.inner, after.inner))

    def view(s: StagedState) -> View:
        view = method.view(s.inner)
        shown = {name: value for stage in stages for name, value in stage.record(s.stages[stage.key]).items()}
        return view._replace(more={**view.more, **shown})

    return replace(method, init=init, round=round, view=view, rejected=rejected)
