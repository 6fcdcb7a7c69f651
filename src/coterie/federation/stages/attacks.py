"""Byzantine clients: a stage in which some clients send something else than what they computed.

An update u_k is what a client contributes, as its work declares it: its result, or the difference from where it
started. Attackers treat reports that are no update like updates. Per tensor of a reply, with the mean μ and the
standard deviation σ of the honest clients' updates in the same phase:

    sign-flip  −s u_k, s = 1                     noise  u_k + s rms(u_k) ξ, ξ ~ N(0, I), s = 10
    scaled     s u_k, s = 100                    alie   μ − s σ (Baruch et al. 2019), s by the rule in `quiet`
    ipm        −s μ, s = 2 (Xie et al. 2020)     silent  no reply at all
    zero       0: a reply without any help       copy   the update of the first honest client
    label-flip acts on the data, not here

Attackers may answer honestly at first: `Attack.first` is the round in which the attack begins.

Attackers who know the others (alie, ipm), and noise, need all replies of a phase at once: memory for all active
clients' replies, whatever the chunk. Honest replies, whole numbers, client memory and sizes stay as they are, so the
ledger does too; what is asked of the target is never altered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.federation.api import Call, Failure, Replies
from coterie.federation.stages.base import Asked, Stage, StageState
from coterie.federation.tree import put, tensors, tree_flatten, tree_unflatten
from coterie.numerics import Draw
from coterie.numerics.roots import square_root

AttackName = Literal["sign-flip", "noise", "label-flip", "scaled", "alie", "ipm", "silent", "zero", "copy"]


@dataclass(frozen=True)
class Attack(Stage):
    """A stage in which some clients attack.

    Args:
        name: what they send, as above.
        honest: how many clients are honest; those from this number on attack.
        strength: s above; None is the value given there.
        first: the round in which the attack begins; before, everybody is honest.

    Example:
        >>> Attack("ipm", honest=6).on_uploads
        True
    """

    key: ClassVar[str] = "attack"

    name: AttackName
    honest: int
    strength: float | None = None
    first: int = 1

    @property
    def on_uploads(self) -> bool:
        """Whether it alters replies (else it altered data)."""
        return self.name != "label-flip"

    def before(self, call: Call, ids: Tensor, state: StageState) -> Asked:
        """Attackers that are silent are not asked."""
        if self.name != "silent" or self._waits(call):
            return Asked(ids, (), state)
        bad = ids >= self.honest
        missing = tuple(Failure(client, "silent", "no reply") for client in ids[bad].tolist())
        return Asked(ids[~bad], missing, state)

    def needs_all(self, call: Call) -> bool:
        """Whether attackers look at the updates of the others."""
        return self.name not in (*ENTRYWISE, "silent") and not self._waits(call)

    def apply(self, call: Call, replies: Replies, state: StageState) -> tuple[Replies, StageState]:
        """The replies of attackers are altered."""
        bad = replies.ids >= self.honest
        if self.name == "silent" or self._waits(call) or not tensors(replies.values) or not bool(bad.any()):
            return replies, state
        ids = replies.ids[bad]
        draw = call.draw.phase("attack").client(ids)
        leaves, structure = tree_flatten(call.updates(replies.ids, replies.values, reports=True))
        lies = [self._lie(leaf, bad, draw.step(i)) for i, leaf in enumerate(leaves)]
        results = call.results(ids, tree_unflatten(lies, structure), reports=True)
        return replies._replace(values=put(replies.values, bad, results)), state

    def _waits(self, call: Call) -> bool:
        """Whether the attack has not begun; where nobody counts rounds, it has."""
        return 0 < call.round < self.first

    def _lie(self, updates: Tensor, bad: Tensor, draw: Draw) -> Tensor:
        """What the attackers send instead of their rows of one tensor."""
        own = updates[bad]
        if not updates.is_floating_point():
            return own
        rule, usual = RULES[self.name]
        strength = self.strength or usual or quiet(len(bad), len(own))
        sent = rule(updates.reshape(len(updates), -1), bad, strength, draw)
        return sent.expand(len(own), -1).reshape(own.shape)


def sign_flip(U: Tensor, bad: Tensor, s: float, draw: Draw) -> Tensor:
    """−s u_k."""
    return -s * U[bad]


def scaled(U: Tensor, bad: Tensor, s: float, draw: Draw) -> Tensor:
    """s u_k."""
    return s * U[bad]


def noise(U: Tensor, bad: Tensor, s: float, draw: Draw) -> Tensor:
    """u_k + s rms(u_k) ξ: mostly noise, s times as long as the update."""
    own = U[bad]
    rms = square_root(own.square().mean(1, keepdim=True))
    return own + s * rms * draw.normal(own.shape[1], dtype=own.dtype)


def alie(U: Tensor, bad: Tensor, s: float, draw: Draw) -> Tensor:
    """μ − s σ by coordinate: near enough to the honest to be taken for one of them."""
    known = _known(U, bad)
    return known.mean(0, keepdim=True) - s * known.std(0, correction=0, keepdim=True)


def ipm(U: Tensor, bad: Tensor, s: float, draw: Draw) -> Tensor:
    """−s μ: the plain mean of all points backwards if s exceeds the number of honest clients by attacker."""
    return -s * _known(U, bad).mean(0, keepdim=True)


def zero(U: Tensor, bad: Tensor, s: float, draw: Draw) -> Tensor:
    """0, whatever the strength."""
    return torch.zeros_like(U[bad])


def copy(U: Tensor, bad: Tensor, s: float, draw: Draw) -> Tensor:
    """The first honest update, whatever the strength."""
    return _known(U, bad)[:1]


def _known(U: Tensor, bad: Tensor) -> Tensor:
    """The honest rows; the attackers' own where nobody honest is active."""
    return U if bool(bad.all()) else U[~bad]


def quiet(n: int, m: int) -> float:
    """z of alie's paper: Φ(z) = (n − m − s)/(n − m), where s = ⌊n/2⌋ + 1 − m honest clients make m a majority.

    Kept between 0 and Φ⁻¹(1 − 1/(n − m + 1)) where there are too few honest clients or too few are needed.
    """
    honest = max(1, n - m)
    supporters = n // 2 + 1 - m
    share = min(max((honest - supporters) / honest, 0.5), honest / (honest + 1))
    return NormalDist().inv_cdf(share)


Rule = Callable[[Tensor, Tensor, float, Draw], Tensor]

RULES: dict[str, tuple[Rule, float | None]] = {
    "sign-flip": (sign_flip, 1.0),
    "noise": (noise, 10.0),
    "scaled": (scaled, 100.0),
    "alie": (alie, None),
    "ipm": (ipm, 2.0),
    "zero": (zero, 1.0),
    "copy": (copy, 1.0),
}

ENTRYWISE = ("sign-flip", "scaled", "zero")  # these look at nothing but the entry itself, so chunks may pass one by one
