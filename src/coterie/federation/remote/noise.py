"""Clipping and noise at a node, from the operating system's entropy.

The mechanism is that of `stages/privacy.py`. In the open, a client adds noise of deviation z C to its reply. In a
secure sum it adds its part, of deviation z C/√t, where t clients must stay to the end: so the sum, which is all that
the server sees, has noise of deviation z C at least, and one client changes it by C at most, because coefficients are
at most 1. Numbers of a secure sum are rounded to fixed point after the noise; replies in the open are floating-point
numbers, whose last digits are not considered.
"""

import secrets

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.federation.api import Call, lengths, scaled
from coterie.federation.remote.messages import NoiseOrder
from coterie.federation.remote.policy import PolicyError
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
