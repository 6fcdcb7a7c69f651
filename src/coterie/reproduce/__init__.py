"""Tables and figures of the papers that can be run again, ours beside theirs; all of them in one tuple."""

from coterie.errors import unknown
from coterie.reproduce import beyond, fednest, fedsep, meritfed, primal_dual, weighted_nodes
from coterie.reproduce.study import MEASURED, Study, Table, check_stored, markdown, reproduce

STUDIES: tuple[Study, ...] = (
    *weighted_nodes.STUDIES,
    *fednest.STUDIES,
    *primal_dual.STUDIES,
    *fedsep.STUDIES,
    *meritfed.STUDIES,
    *beyond.STUDIES,
)


def study(name: str) -> Study:
    """By name."""
    for one in STUDIES:
        if one.name == name:
            return one
    raise unknown("reproduction", name, [one.name for one in STUDIES])


__all__ = ["MEASURED", "STUDIES", "Study", "Table", "check_stored", "markdown", "reproduce", "study"]
