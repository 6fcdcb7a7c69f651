"""[privacy] of a run: the stage that hides uploads, the names of its noise, and what was spent and is not covered."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coterie.errors import UsageError
from coterie.experiment.checkpoint import MAY_CHANGE
from coterie.experiment.config import DECISIVE, ONLY_SIMULATED, Config
from coterie.federation.stages import privacy as mechanism
from coterie.federation.stages.privacy import Mechanism, Privacy, SitePrivacy
from coterie.federation.work import Handle, with_recall
from coterie.methods import Method
from coterie.problems.base import Problem
from coterie.settings import StatisticsPrivacy

if TYPE_CHECKING:
    from coterie.experiment.build import Parts


def statistics_privacy(config: Config) -> StatisticsPrivacy | None:
    """How the clients of problem `files` hide their statistics; None without noise, where nothing is promised."""
    table = config.privacy
    if config.run.problem != "files":
        for setting in ("statistics", "bounds", "categories"):
            if getattr(table, setting) is not None:
                raise UsageError(
                    f"privacy.{setting} is for problem files; {config.run.problem} learns no statistics from its "
                    "clients. Leave it out."
                )
    if not table.noise:
        return None
    return StatisticsPrivacy(table.statistics or table.noise, table.bounds or {}, table.categories or {})


def privacy_stage(method: Method, problem: Problem, config: Config) -> Privacy:
    """How clients hide their uploads; refused without the accountant, or if the method sends whole numbers.

    On a network the nodes clip and draw noise themselves, and the server counts.
    """
    table = config.privacy
    assert table.clip is not None
    if table.noise:
        mechanism.library()
    for work in method.whole_numbers:
        raise mechanism.sends_whole_numbers(work)
    kind = Privacy if config.run.engine == "local" else SitePrivacy
    return kind(Mechanism(table.clip, table.noise), noise_name(config), table.delta, released(problem))


def noise_name(config: Config) -> str:
    """A name of all settings that decide what clients upload; a resumed run has the same.

    Runs that differ have independent noise: equal noise would cancel between a run and its baselines.
    """
    left_out = MAY_CHANGE | {"federation.mode"}  # settled by measurement
    return config.digest((*DECISIVE, "federation.", "faults.", "privacy."), left_out)


def released(problem: Problem) -> tuple[float, ...]:
    """The noise multipliers of what every client released while the problem was made."""
    return () if problem.released is None else (problem.released,)


def budget(parts: "Parts", state: Any, events: Mapping[str, int]) -> dict[str, Any]:
    """What a run has spent of its privacy, and what that does not cover; JSON has no infinity: None."""
    config, problem = parts.config, parts.problem
    table, federation = config.privacy, config.federation
    view = parts.method.view(state)
    spent = {key: view.more[key] for key in ("uploads", "uploads_a_round", "epsilon")}
    if noises := released(problem):
        spent["epsilon_statistics"] = mechanism.epsilon(mechanism.composed((z, 1) for z in noises), 1, table.delta)
    reason = mechanism.unamplified(
        federation.active,
        fixed_number=federation.count is not None,
        weights=view.weights is not None,
        events=bool(events),
    )
    sampled = {"epsilon_sampled": None, "epsilon_sampled_reason": reason}
    return {**table.model_dump(exclude_none=True), **spent, **sampled, "not_covered": not_covered(parts, state)}


def not_covered(parts: "Parts", state: Any) -> list[str]:
    """What leaves clients without noise, or is known of them otherwise, though [privacy] is on."""
    config, problem, method = parts.config, parts.problem, parts.method
    target = config.federation.target
    known = sorted(method.needs & ONLY_SIMULATED)
    exact = problem.spent is not None and not released(problem)
    found = {
        "updates: privacy.noise = 0 clips them and adds no noise": not config.privacy.noise,
        "statistics: means, deviations, words and class counts of the clients' rows are exact": exact,
        "the seed: noise is drawn from run.seed, and whoever knows it can subtract the noise": bool(
            config.privacy.noise and config.run.engine == "local"
        ),
        "sizes: every client's number of rows is used as it is": True,
        "participation: who takes part, answers or fails is recorded": True,
        f"the target{'' if target == 'server' else f' (client {target})'}: its rows are used without noise": (
            problem.target is not None
        ),
        "measures: losses and accuracies in the records are computed without noise": True,
        "client memory: personal models in the records are without noise": _shows_memory(method, state),
        f"prior knowledge: {method.name} knows the {' and '.join(known)} in advance": bool(known),
        f"baselines ({', '.join(config.run.baselines or ())}): each spends a budget of its own on the same rows": bool(
            config.run.baselines
        ),
    }
    return [text for text, applies in found.items() if applies]


def _shows_memory(method: Method, state: Any) -> bool:
    """Whether what is recorded of a state is taken from client memory."""
    asked: list[Handle] = []

    def recall(handle: Handle) -> Any:
        asked.append(handle)
        return handle.start

    method.view(with_recall(state, recall))
    return bool(asked)
