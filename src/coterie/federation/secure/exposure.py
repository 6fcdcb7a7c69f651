"""How much several sums of the same updates tell of one of them.

Sums Σ_k a_k u_k with known coefficients a are rows of a matrix. Client k is determined by them as far as the unit
vector e_k lies in the span of the rows: its leverage h_k = ‖P e_k‖² is 1 where u_k can be computed from the sums, 1/n
for the plain sum of n, and a_k²/Σa² for one weighted sum. A run keeps h_k ≤ 1/partners for every client: nobody is
hidden less than in a sum of so many equals. That bounds one client's share of the weight, refuses the same question
with other partners, and limits how many weighted sums of the same gradients a mirror descent may ask for.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.federation.secure import Refusal

STEPS = 512  # that a server remembers; nodes forget none
RANK = 1e-10  # of the largest singular value, below which fixed point hides a difference
SLACK = 1e-6


def leverages(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """h_k for every column of a matrix of coefficients.

    Example:
        >>> leverages(np.array([[1.0, 1.0, 1.0, 1.0]])).tolist()
        [0.25, 0.25, 0.25, 0.25]
    """
    _, sizes, basis = np.linalg.svd(rows, full_matrices=False)
    kept = basis[sizes > RANK * max(sizes[0], 1e-300)]
    found: NDArray[np.float64] = np.square(kept).sum(0)
    return found


def check_leverage(shown: Sequence[dict[int, float]], scales: dict[int, float], partners: int) -> None:
    """Refuse a sum that, with those shown before of the same updates, would tell too much of one client.

    Args:
        shown: the coefficients of the sums that were shown.
        scales: those of the new one.
        partners: a client must be hidden as in a sum of so many equals.
    """
    sums = [*shown, scales]
    clients = sorted({k for one in sums for k in one})
    rows = np.array([[one.get(k, 0.0) for k in clients] for one in sums])
    h = leverages(rows / np.maximum(np.abs(rows).max(1, keepdims=True), 1e-300))
    worst = int(h.argmax())
    if h[worst] > 1.0 / partners + SLACK:
        which = "this weighted sum" if len(sums) == 1 else f"{len(sums)} sums of the same updates"
        raise Refusal(
            f"{which} would show {h[worst]:.0%} of the update of client {clients[worst]}, and "
            f"partners = {partners} allows {1 / partners:.0%}; ask for fewer sums of the same updates "
            "(method.mirror_steps), keep weights spread (method.cap, method.tie, method.weights = uniform), or let "
            "more clients take part"
        )


class Exposure:
    """The sums that were shown, by the question that the summands answer."""

    def __init__(self) -> None:
        self._shown: dict[int, list[dict[int, float]]] = {}

    def check(self, question: int, scales: dict[int, float], partners: int) -> None:
        """Refuse a sum that, with those shown before, would tell too much of one client.

        Args:
            question: a digest of what the summands are.
            scales: the coefficient of each client.
            partners: a client must be hidden as in a sum of so many equals.
        """
        check_leverage(self._shown.get(question, []), scales, partners)

    def note(self, question: int, scales: dict[int, float]) -> None:
        """Remember a sum that is shown."""
        while len(self._shown) >= STEPS and question not in self._shown:
            self._shown.pop(next(iter(self._shown)))
        known = self._shown.setdefault(question, [])
        if scales not in known:
            known.append(scales)


class Counting(Exposure):
    """The same before a run, where nobody knows the weights yet: only how many sums there will be."""

    def check(self, question: int, scales: dict[int, float], partners: int) -> None:
        """Refuse more different sums of the same updates than the mean of all leverages admits."""
        sums, most = len([*self._shown.get(question, []), scales]), max(1, len(scales) // partners)
        if sums > most:
            raise Refusal(
                f"{sums} sums of the same updates of {len(scales)} clients would show too much of each, and "
                f"partners = {partners} allows {most}; lower method.mirror_steps, or let more clients take part"
            )
