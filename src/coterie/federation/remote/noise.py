"""Clipping and noise at a node, from the operating system's entropy, and the budget of its clients.

The mechanism is that of `stages/privacy.py`. In the open, a client adds noise of deviation z C to its reply. In a
secure sum it adds its part, of deviation z C/√t, where t clients must stay to the end: so the sum, which is all that
the server sees, has noise of deviation z C at least, and one client changes it by C at most, because coefficients are
at most 1. Numbers of a secure sum are rounded to fixed point after the noise; replies in the open are floating-point
numbers, whose last digits are not considered.
"""

import json
import math
import os
import secrets
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation.api import Call, lengths, scaled
from coterie.federation.remote.messages import NoiseOrder
from coterie.federation.remote.policy import NodePolicy, PolicyError
from coterie.federation.tree import Tree, tensors


def gaussian(count: int) -> NDArray[np.float64]:
    """So many independent numbers of N(0, 1), by the method of Box and Muller from the entropy of the system."""
    half = (count + 1) // 2
    words = np.frombuffer(secrets.token_bytes(16 * half), dtype="<u8").reshape(2, half)
    u, v = ((words >> np.uint64(11)) + 0.5) / 2.0**53  # in (0, 1)
    radius, angle = np.sqrt(-2.0 * np.log(u)), 2.0 * np.pi * v
    numbers: NDArray[np.float64] = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return numbers


def hidden(call: Call, clients: Tensor, values: Tree, noise: NoiseOrder, *, summed: bool) -> Tree:
    """Replies whose updates are clipped and, unless they are summed, noisy.

    Args:
        call: what was asked.
        clients: the places of the clients, [a].
        values: their results, stacked.
        noise: the clip and the noise multiplier.
        summed: whether they go into a secure sum, where noise comes later.
    """
    if not all(leaf.is_floating_point() for leaf in tensors(values)):
        raise PolicyError("the result holds whole numbers, which noise cannot hide")

    def hide(updates: list[Tensor]) -> list[Tensor]:
        factor = (noise.clip / lengths(updates)).clamp(max=1.0)
        short = [scaled(leaf, factor) for leaf in updates]
        if summed or not noise.multiplier:
            return short
        deviation = noise.clip * noise.multiplier
        return [
            leaf + deviation * torch.from_numpy(gaussian(leaf.numel())).reshape(leaf.shape).to(leaf) for leaf in short
        ]

    return call.changed(clients, values, hide, reports=True)


class Budget:
    """What the clients of a node have spent of their privacy, over all runs; with a folder, restarts do not forget it.

    T uploads with noise multiplier z are worth one Gaussian mechanism of multiplier z/√T; what is kept is Σ T/z².
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / "budget.json"
        self.spent = 0.0
        if self._path is not None and self._path.is_file():
            try:
                self.spent = float(json.loads(self._path.read_text(encoding="utf-8"))["spent"])
            except (ValueError, TypeError, KeyError):
                raise UsageError(f"{self._path} is damaged; it says what was spent of this site's privacy.") from None

    def spend(self, noise: NoiseOrder | None, policy: NodePolicy) -> float:
        """Count one upload, or raise `PolicyError` where the site's budget does not allow it; ε after it.

        Args:
            noise: what the order asks for.
            policy: the policy of the node.
        """
        if not policy.epsilon:
            return math.inf
        if noise is None or not noise.multiplier:
            raise PolicyError(
                f"this site has a budget of epsilon = {policy.epsilon:g}, and the order asks for no noise; "
                "run with privacy.clip and privacy.noise"
            )
        after = self.spent + 1.0 / noise.multiplier**2
        epsilon = _epsilon(1.0 / math.sqrt(after), policy.delta)
        if epsilon > policy.epsilon:
            raise PolicyError(
                f"this upload would bring the site's privacy loss to {epsilon:.3g}, above its budget of "
                f"epsilon = {policy.epsilon:g} at delta = {policy.delta:g}; ask for more noise or fewer rounds"
            )
        self.spent = after
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = self._path.with_suffix(".new")
            draft.write_text(json.dumps({"spent": after}), encoding="utf-8")
            os.replace(draft, self._path)
        return epsilon


def _epsilon(multiplier: float, delta: float) -> float:
    from coterie.federation.stages.privacy import epsilon

    try:
        return epsilon(multiplier, 1, delta)
    except UsageError as error:
        raise PolicyError(f"the budget of this site cannot be computed: {error}") from None
