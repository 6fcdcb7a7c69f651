"""Clipping and noise at the clients: an engine whose clients hide what they contribute, and what that is worth.

Instead of its update u_k (its result, or the difference from where it started, as the work declares; and reports that
are no update with it), over all tensors of it together, a client sends

    u_k min(1, C / ‖u_k‖) + z C ξ,   ξ ~ N(0, I),   C = clip, z = noise.

Every upload is thus a Gaussian mechanism by itself, and whatever the server makes of it later, learned weights too, is
post-processing. Two runs are neighbours if one client's updates are 0 in one of them: (ε, δ) is by client, not by row.
`epsilon` holds against a server that sees every upload: T uploads of the client that was asked most often.
`epsilon_sampled` holds against those who do not learn who took part in which round, where each does with probability
q = federation.active: R rounds of a sampled mechanism, which is m uploads in one, a Gaussian of noise z / √m.

Not covered: what is asked of the target, sizes, who answers at all, and measures. The noise is drawn from the run's
seed like everything else, so that runs can be repeated: whoever knows the seed can subtract it. This shows what privacy
costs; it protects nobody in a network, where a node would have to draw noise that only it knows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation.api import Call, Engine, Replies, lengths, scaled
from coterie.federation.tree import tree_leaves
from coterie.federation.work import name_of
from coterie.federation.wrapped import Wrapped

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512)  # of Rényi divergences; whole ones need no series


@dataclass(frozen=True)
class Mechanism:
    """The largest length C of an update, and the noise in lengths, z."""

    clip: float
    noise: float = 0.0


@dataclass
class Private(Wrapped):
    """Another engine's clients, each of which hides its updates. `uploads` counts them by client, and changes."""

    engine: Engine
    mechanism: Mechanism
    uploads: Tensor

    def execute(self, call: Call, ids: Tensor) -> Iterator[Replies]:
        """Run a work; what leaves a client is clipped and noisy."""
        self.uploads = self.uploads.index_add(0, ids, torch.ones_like(ids))
        for replies in self.engine.execute(call, ids):
            yield self._hidden(call, replies) if len(replies.ids) else replies

    def _hidden(self, call: Call, replies: Replies) -> Replies:
        leaves = tree_leaves(replies.values)
        if not leaves:
            return replies
        if not all(leaf.is_floating_point() for leaf in leaves):
            raise UsageError(
                f"{name_of(call.work)} sends whole numbers beside real ones, which noise cannot hide; "
                "choose a method that sends real numbers only, or leave [privacy] out."
            )
        C, z = self.mechanism.clip, self.mechanism.noise
        draw = call.draw.phase("privacy").client(replies.ids)

        def stage(updates: list[Tensor]) -> list[Tensor]:
            factor = (C / lengths(updates)).clamp(max=1.0)
            hidden = []
            for i, leaf in enumerate(updates):
                short = scaled(leaf, factor)
                if z:
                    short = short + z * C * draw.step(i).normal(leaf[0].numel(), dtype=leaf.dtype).reshape(leaf.shape)
                hidden.append(short)
            return hidden

        return replies._replace(values=call.changed(replies.ids, replies.values, stage, reports=True))


def innermost(engine: Any, wrap: Callable[[Engine], Engine]) -> Engine:
    """The same engine with a wrapper nearest to the clients, below attacks, faults and compression."""
    return replace(engine, engine=innermost(engine.engine, wrap)) if hasattr(engine, "engine") else wrap(engine)


def epsilon(noise: float, uploads: int, delta: float) -> float:
    """ε of so many Gaussian mechanisms one after the other: exactly that of one with noise z / √T."""
    if not uploads:
        return 0.0
    if not noise:
        return inf
    return float(library().get_epsilon_gaussian(noise / sqrt(uploads), delta))


@cache
def epsilon_sampled(noise: float, rounds: int, at_once: int, delta: float, probability: float) -> float:
    """ε if in each round the client takes part with this probability and nobody learns when: by Rényi divergences."""
    most = epsilon(noise, rounds * at_once, delta)
    if not rounds * at_once or not noise or probability >= 1.0:
        return most
    dp = library()
    accountant = dp.rdp.RdpAccountant(ORDERS)
    accountant.compose(dp.PoissonSampledDpEvent(probability, dp.GaussianDpEvent(noise / sqrt(at_once))), rounds)
    return min(float(accountant.get_epsilon(delta)), most)


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
