"""How long a run on a network will take, as its reader is told before it starts."""

from coterie.experiment.build import assemble
from coterie.experiment.config import Config
from coterie.numerics import Draw


def exchanges_of(config: Config) -> int:
    """Exchanges per round, counted on one round in this process."""
    parts = assemble(config.with_run(engine="local", baselines=[]))
    draw = Draw.of(config.run.seed, device=parts.fed.sizes.device).round(0)
    before = parts.fed.ledger.total.rounds  # what preparing the rows took
    parts.method.round(parts.fed.begin(1, draw), parts.method.init(parts.problem, parts.fed.n), draw)
    return parts.fed.ledger.total.rounds - before


def time_text(seconds: float) -> str:
    """Seconds, as a reader wants them.

    Example:
        >>> time_text(300)
        '5 min'
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
