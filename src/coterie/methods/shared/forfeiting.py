"""Any method that learns weights, with clients losing weight where they sent nothing, or another client's update.

Such replies are left out of their phase (`federation.screen_copies`), and a method that sees a smaller active set
leaves the weights of the others as they are. That is right for clients that were not asked, and wrong here: a weight
would report help that was not given. So each round halves the weights of these clients and gives the rest to the
others. A client whose update was 0 once recovers, one that never helps ends at 0.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from coterie.methods.base import Draw, Federation, Method

FIELDS = ("w", "W")  # weights [K] of a state, or by target [K, K]


def forfeiting(method: Method) -> Method:
    """The same method, with weights that idle clients lose.

    Args:
        method: a method that learns weights; its state has them as `w` or `W`.
    """

    def round(fed: Federation, s: Any, draw: Draw) -> Any:
        fed.book.idle.clear()
        after = method.round(fed, s, draw)
        weights = {name: getattr(after, name) for name in FIELDS if isinstance(getattr(after, name, None), Tensor)}
        if not fed.book.idle or not weights:
            return after
        return after._replace(**{name: forfeited(w, fed.book.idle) for name, w in weights.items()})

    return replace(method, round=round)


def forfeited(w: Tensor, idle: Iterable[int]) -> Tensor:
    """Weights after idle clients lost half of theirs to the others.

    Args:
        w: weights on the simplex, [K], or rows of them.
        idle: the clients that did not help.

    Example:
        >>> import torch
        >>> forfeited(torch.tensor([0.5, 0.5]), [1]).tolist()
        [0.6666666865348816, 0.3333333432674408]
    """
    halved = w.clone()
    halved[..., sorted(idle)] *= 0.5
    return halved / halved.sum(-1, keepdim=True)
