"""The verdict on each partner: one rule from six numbers of its message, so that nothing on a page contradicts it.

helps     the model with it is likely better than mine by more than MATTERS.
nothing   it adds nothing that can be seen.
left out  its models are no better than chance on my rows, or it sent none.
differs   a column, the classes or the labels in a region differ; a remedy is named.
copy      its models know my rows.

The weights of the rule were fitted on federations of public tables (benchmarks/tables) and checked on tables that the
fit had not seen.
"""

from math import exp, log
from typing import Literal, NamedTuple

from coterie.advise.decide import Judged

Verdict = Literal["helps", "nothing", "left out", "differs", "copy"]
VERDICTS: tuple[Verdict, ...] = ("helps", "nothing", "left out", "differs", "copy")
MATTERS = 0.005  # in the measure: less is not worth the trouble
WEIGHTS = {"pair": 0.17, "chance": -0.12, "weight": -0.09, "against": 0.32, "size": 0.61, "own": -0.19}
OFFSET = -0.91
FAR = 8.0  # standard errors beyond which a number tells no more


class Signs(NamedTuple):
    """The six numbers: z of its gain beside me alone, z against permuted labels, its share of the stack, z of its model
    against mine, log of its rows over mine, log of mine over 100."""

    pair: float
    chance: float
    weight: float
    against: float
    size: float
    own: float

    @staticmethod
    def of(judged: Judged, rows: int, own_rows: int) -> "Signs":
        """Those of one partner."""

        def bounded(z: float) -> float:
            return max(-FAR, min(FAR, z))

        return Signs(
            bounded(judged.gain.z),
            bounded(judged.z),
            judged.weight,
            bounded(judged.against),
            log(max(1, rows) / own_rows),
            log(own_rows / 100.0),
        )


def probability(signs: Signs, gain: float) -> float:
    """That a partner improves the model by more than MATTERS.

    Args:
        signs: its six numbers.
        gain: what was seen on my rows; not above MATTERS the probability stays below a half.
    """
    logit = OFFSET + sum(WEIGHTS[name] * value for name, value in signs._asdict().items())
    found = 1.0 / (1.0 + exp(-max(-30.0, min(30.0, logit))))
    return found if gain > MATTERS else min(found, 0.49)


def verdict(*, copy: bool, differs: bool, admitted: bool, chance: float) -> Verdict:
    """The word for one partner.

    Args:
        copy: whether its models know my rows.
        differs: whether something at it was named.
        admitted: whether its models are better than chance on my rows.
        chance: the probability that it helps.
    """
    if copy:
        return "copy"
    if differs:
        return "differs"
    if not admitted:
        return "left out"
    return "helps" if chance >= 0.5 else "nothing"
