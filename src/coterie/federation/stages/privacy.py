"""Clipping and noise at the clients: a mechanism, a stage that applies it, and accountants.

Instead of its update u_k (its result, or the difference from where it started, as the work declares; and reports that
are no update with it), over all its tensors together, a client sends

    u_k min(1, C / ‖u_k‖) + z C ξ,   ξ ~ N(0, I),   C = clip, z = noise.

Every upload is a Gaussian mechanism by itself, and whatever the server makes of it later, learned weights too, is
post-processing. Two runs are neighbours if one client's uploads are 0 before the noise in one of them: (ε, δ) is per
client, not per row. `epsilon` holds against a server that sees every upload and knows who took part: T uploads of the
client that was asked most often are one Gaussian mechanism of noise z/√T. Participation is drawn independently of the
data, so this holds for the participation that was drawn.

Amplification by sampling (`epsilon_sampled`) needs more than sampling: nobody may learn who took part, and the noise
must not depend on it. Here each participant brings its own noise, and means are divided by the number of participants,
so that a model tells who took part. With probability q the client's upload is N(u, z²C²), otherwise there is none:

    δ'(ε) = q δ(ε)   for one round, in place of   ε' = log(1 + q (e^ε − 1)),   δ' = q δ,

hence only δ shrinks. No run claims the amplified value; `unamplified` gives the reason.

The noise is drawn from the run's seed, so that runs can be repeated: whoever knows the seed can subtract it. This shows
what privacy costs; it protects nobody in a network, where a node would have to draw noise that only it knows. What the
promise does not cover is listed in every summary (`experiment.build.not_covered`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite, sqrt
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation.api import Call, Replies, lengths, scaled
from coterie.federation.stages.base import Asked, Stage
from coterie.federation.tree import tree_leaves
from coterie.federation.work import name_of
from coterie.numerics import Draw

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512)  # of Rényi divergences; whole ones need no series


@dataclass(frozen=True)
class Mechanism:
    """The largest length C of an update, and the noise in lengths, z."""

    clip: float
    noise: float = 0.0


class PrivacyState(NamedTuple):
    """How many uploads each client has made, [n], and the largest number that one client made in one round."""

    uploads: Tensor
    at_once: int = 0


@dataclass(frozen=True)
class Privacy(Stage):
    """A stage in which each client hides its updates, and its uploads are counted.

    Args:
        mechanism: what clients do with each upload.
        run: a name of the run; runs of other names have independent noise, also with the same seed.
        delta: δ of the ε that is recorded.
        released: the noise multipliers of what every client released before the first round.

    Example:
        >>> Privacy(Mechanism(clip=1.0)).start(2, torch.device("cpu")).uploads.tolist()
        [0, 0]
    """

    key: ClassVar[str] = "privacy"

    mechanism: Mechanism
    run: str = ""
    delta: float = 1e-5
    released: tuple[float, ...] = ()

    def start(self, n: int, device: torch.device) -> PrivacyState:
        """Nobody has uploaded anything."""
        return PrivacyState(torch.zeros(n, dtype=torch.int64, device=device))

    def before(self, call: Call, ids: Tensor, state: PrivacyState) -> Asked:
        """Everybody is asked, and each upload counts, whatever becomes of it."""
        uploads = state.uploads.index_add(0, ids, torch.ones_like(ids))
        return Asked(ids, (), state._replace(uploads=uploads))

    def apply(self, call: Call, replies: Replies, state: PrivacyState) -> tuple[Replies, PrivacyState]:
        """What leaves a client is clipped and noisy; a reply that noise cannot hide is refused."""
        leaves = tree_leaves(replies.values)
        if not leaves:
            return replies, state
        if not all(leaf.is_floating_point() for leaf in leaves):
            raise sends_whole_numbers(name_of(call.work))
        # a method may give one draw to two works; the number of the upload keeps their noise independent
        draw = call.draw.phase(f"privacy {self.run}").client(replies.ids).step(state.uploads[replies.ids])

        def hide(updates: list[Tensor]) -> list[Tensor]:
            return clipped_and_noisy(updates, self.mechanism, draw)

        return replies._replace(values=call.changed(replies.ids, replies.values, hide, reports=True)), state

    def finished(self, before: PrivacyState, after: PrivacyState) -> PrivacyState:
        """With the most uploads of one client in one round."""
        at_once = int((after.uploads - before.uploads).max())
        return after._replace(at_once=max(before.at_once, at_once))

    def undone(self, before: PrivacyState, after: PrivacyState) -> PrivacyState:
        """What was uploaded is known to the server and spent, also where it changed nothing."""
        return after

    def record(self, state: PrivacyState) -> dict[str, Any]:
        """The budget: uploads, the most in one round, and ε (None where it is infinite)."""
        uploads = int(state.uploads.max())
        spent = epsilon(composed([(self.mechanism.noise, uploads), *((z, 1) for z in self.released)]), 1, self.delta)
        return {"uploads": uploads, "uploads_a_round": state.at_once, "epsilon": spent if isfinite(spent) else None}


@dataclass(frozen=True)
class SitePrivacy(Privacy):
    """The same where nodes draw the noise themselves: here uploads are counted only."""

    def apply(self, call: Call, replies: Replies, state: PrivacyState) -> tuple[Replies, PrivacyState]:
        """What arrives is noisy already."""
        return replies, state


def sends_whole_numbers(work: str) -> UsageError:
    """The refusal of a work whose replies noise cannot hide."""
    return UsageError(
        f"{work} sends whole numbers beside real ones, which noise cannot hide; "
        "choose a method that sends real numbers only, or leave [privacy] out."
    )


def clipped_and_noisy(updates: list[Tensor], mechanism: Mechanism, draw: Draw) -> list[Tensor]:
    """The Gaussian mechanism, for many clients at once.

    Args:
        updates: the tensors of an update, each with one row per client.
        mechanism: the clip and the noise multiplier.
        draw: one draw per client.
    """
    C, z = mechanism.clip, mechanism.noise
    factor = (C / lengths(updates)).clamp(max=1.0)
    short = [scaled(leaf, factor) for leaf in updates]
    if not z:
        return short
    return [
        leaf + z * C * draw.step(i).normal(leaf[0].numel(), dtype=leaf.dtype).reshape(leaf.shape)
        for i, leaf in enumerate(short)
    ]


def composed(releases: Iterable[tuple[float, int]]) -> float:
    """The noise multiplier of the one Gaussian mechanism that is worth as much as all these together, adaptively.

    Args:
        releases: pairs of a noise multiplier z and how often it was used, T; 1/z'² = Σ T/z².
    """
    used = [(z, T) for z, T in releases if T]
    if not all(z for z, _ in used):
        return 0.0
    total = sum(T / z**2 for z, T in used)
    return 1.0 / sqrt(total) if total else inf


def epsilon(noise: float, uploads: int, delta: float) -> float:
    """ε of so many Gaussian mechanisms one after the other: exactly that of one with noise z / √T."""
    single = composed([(noise, uploads)])
    if single in (0.0, inf):
        return inf if single == 0.0 else 0.0
    return float(library().get_epsilon_gaussian(single, delta))


@cache
def epsilon_sampled(noise: float, rounds: int, at_once: int, delta: float, probability: float) -> float:
    """ε of sums to which a trusted aggregator adds noise z C once, if nobody learns who took part (Rényi divergences).

    A yardstick for what a trusted aggregator would be worth; uploads of this library do not meet the conditions.

    Args:
        noise: z.
        rounds: how many sums are released.
        at_once: how many sums per round the same participants contribute to.
        delta: δ.
        probability: that a client takes part in a round, independently of all others.
    """
    most = epsilon(noise, rounds * at_once, delta)
    if not rounds * at_once or not noise or probability >= 1.0:
        return most
    dp = library()
    accountant = dp.rdp.RdpAccountant(ORDERS)
    accountant.compose(dp.PoissonSampledDpEvent(probability, dp.GaussianDpEvent(noise / sqrt(at_once))), rounds)
    return min(float(accountant.get_epsilon(delta)), most)


def unamplified(probability: float, *, fixed_number: bool, weights: bool, events: bool) -> str:
    """Why sampling the participants is worth nothing in a run: the first reason that applies.

    Args:
        probability: that a client takes part in a round.
        fixed_number: whether a fixed number of participants is drawn instead.
        weights: whether learned weights are recorded.
        events: whether there are events that name clients.
    """
    if fixed_number:
        return "a fixed number of participants is drawn, not each client independently"
    if probability >= 1.0:
        return "every client takes part in every round"
    if weights:
        return "weights.csv shows who took part: the weights of the others do not change"
    if events:
        return "events.jsonl names participants"
    return "each participant brings its own noise and metrics.jsonl counts uploads, so participation is not hidden"


def library() -> Any:
    """dp-accounting, or an error that says how to get it."""
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise UsageError(
            "privacy.noise needs the accountant of dp-accounting; install it by: pip install 'coterie[privacy]'. "
            "Without it set privacy.noise=0, which only clips."
        ) from None
    return dp_accounting
