"""Tables and figures of the papers that can be run again, ours beside theirs; all of them in one tuple."""

from coterie.reproduce import (
    beyond,
    fednest,
    fedsep,
    leaderboard,
    meritfed,
    nested,
    pfllib,
    primal_dual,
    weighted_nodes,
)
from coterie.reproduce.pages import markdown
from coterie.reproduce.reading import MEASURED
from coterie.reproduce.running import check_stored, reproduce
from coterie.reproduce.study import Study, Table
from coterie.settings import chosen

STUDIES: tuple[Study, ...] = (
    *weighted_nodes.STUDIES,
    *fednest.STUDIES,
    *primal_dual.STUDIES,
    *fedsep.STUDIES,
    *meritfed.STUDIES,
    *beyond.STUDIES,
    *nested.STUDIES,
    *leaderboard.STUDIES,
    *pfllib.STUDIES,
)


def study(name: str) -> Study:
    """By name."""
    return chosen("reproduction", name, {study.name: study for study in STUDIES})


__all__ = ["MEASURED", "STUDIES", "Study", "Table", "check_stored", "markdown", "reproduce", "study"]
