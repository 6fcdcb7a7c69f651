"""How much several sums of the same updates tell of one of them.

Sums Σ_k a_k u_k with known coefficients a are rows of a matrix. Client k is determined by them as far as the unit
vector e_k lies in the span of the rows: its leverage h_k = ‖P e_k‖² is 1 where u_k can be computed from the sums, 1/n
for the plain sum of n, and a_k²/Σa² for one weighted sum. A run keeps h_k ≤ 1/partners for every client: nobody is
hidden less than in a sum of so many equals. That bounds one client's share of the weight, refuses the same question
with other partners, and limits how many weighted sums of the same gradients a mirror descent may ask for.
"""

import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.errors import UsageError
from coterie.federation.secure import Refusal

STEPS = 512  # that are remembered
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
        sums = [*self._shown.get(question, []), scales]
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

    def note(self, question: int, scales: dict[int, float]) -> None:
        """Remember a sum that is shown."""
        while len(self._shown) >= STEPS and question not in self._shown:
            self._shown.pop(next(iter(self._shown)))
        known = self._shown.setdefault(question, [])
        if scales not in known:
            known.append(scales)


class KeptExposure(Exposure):
    """The same over restarts: every sum is a line of a file, which is on the disk before the sum is shown.

    Args:
        path: the file. A last line that is cut off belongs to a sum that was never shown.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._lines = 0
        if not path.is_file():
            return
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
        try:
            for line in lines:
                entry = json.loads(line)
                super().note(int(entry["question"]), {int(k): float(a) for k, a in entry["scales"].items()})
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UsageError(
                f"{path} is damaged; it says which sums of this site's updates were shown. Restore it; without it a "
                "server could ask for other sums of the same updates."
            ) from None
        self._rewrite()

    def note(self, question: int, scales: dict[int, float]) -> None:
        """Remember a sum that is shown, also after a restart."""
        if scales in self._shown.get(question, []):
            return
        super().note(question, scales)
        if self._lines >= 4 * STEPS:
            self._rewrite()
            return
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(question, scales))
            file.flush()
            os.fsync(file.fileno())
        self._lines += 1

    def _rewrite(self) -> None:
        """The file with what is still remembered."""
        lines = [_line(question, scales) for question, sums in self._shown.items() for scales in sums]
        draft = self._path.with_suffix(".new")
        draft.write_text("".join(lines), encoding="utf-8")
        os.replace(draft, self._path)
        self._lines = len(lines)


def _line(question: int, scales: dict[int, float]) -> str:
    return json.dumps({"question": question, "scales": scales}) + "\n"


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
