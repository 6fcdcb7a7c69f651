"""How long a run on a network will take, as its reader is told before it starts."""

from coterie.experiment.build import build_problem_and_method
from coterie.experiment.config import Config
from coterie.experiment.rehearsal import rehearsed


def exchanges_of(config: Config) -> int:
    """Exchanges per round, as a rehearsal without clients asks for them."""
    problem, method = build_problem_and_method(config.with_run(engine="local", baselines=[]))
    return rehearsed(method, problem, config.federation).exchanges


def time_text(seconds: float) -> str:
    """Seconds, as a reader wants them.

    Example:
        >>> time_text(300)
        '5 min'
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
