"""Models of which a part is common and the rest stays at the clients: FedPer, FedRep and FedBN.

θ_k = (x, v_k): the server has x, client k keeps v_k, and neither is ever sent the other's part. So a round moves |x|
numbers each way per client.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Memory, Shard, Static, Tree, Work, moved_from, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, personal_models
from coterie.methods.shared.works import local_sgd
from coterie.settings import Count, Name

Personal = Literal["norm"] | Count | list[Name]
"""The personal part: the parameters of batch norm, those of so many last layers, or those with such names (* and ?)."""


class PartlyPersonalState(NamedTuple):
    """The common part x, the personal parts v_k, and where the numbers of θ are in (x, v), [d]."""

    x: Tensor
    v: Memory
    places: Tensor


class Split(NamedTuple):
    """Which numbers of θ are common and which are personal, by number; θ = (x, v)[places]."""

    common: Tensor
    own: Tensor
    places: Tensor

    @staticmethod
    def of(model: Any, personal: Any) -> "Split":
        """The split of a model; both sides compute it from the model's parameter names.

        Args:
            model: a `FlatModel`.
            personal: see `Personal`.
        """
        is_own = model.entries(personal_names(model, personal))
        common, own = (~is_own).nonzero()[:, 0], is_own.nonzero()[:, 0]
        return Split(common, own, torch.cat([common, own]).argsort())

    def join(self, x: Tensor, v: Tensor) -> Tensor:
        """θ."""
        return torch.cat([x, v])[self.places]

    def cut(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """x and v."""
        return theta[self.common], theta[self.own]


def personal_names(model: Any, personal: Any) -> tuple[str, ...]:
    """The names of the parameters that clients keep."""
    names: tuple[str, ...] = model.parameter_names
    if personal == "norm":
        return tuple(model.norm_parameters)
    if isinstance(personal, int):
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))[-personal:]
        return tuple(name for name in names if name.rpartition(".")[0] in layers)
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in personal))


@work("parts/local-steps", update=moved_from())
def steps_on_both(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """Local steps on both parts at once: the common one is uploaded, the personal one kept."""
    split = Split.of(shard.task.model, static.personal)
    return split.cut(local_sgd(shard, split.join(shared, private), None, static, draw))


def partly_personal(
    name: str, steps: Work, personal: Any, weights: Literal["sizes", "uniform"], local: Mapping[str, Any]
) -> Method:
    """The method that averages the common part of what `steps` gives at every client.

    Args:
        name: of the method.
        steps: the clients' work: it is sent x, has v_k, and returns both.
        personal: see `Personal`.
        weights: of the average.
        local: settings of the work.
    """

    def init(problem: Problem, n: int) -> PartlyPersonalState:
        _check(name, problem.task.model, personal)
        split = Split.of(problem.task.model, personal)
        x, v = split.cut(problem.start)
        return PartlyPersonalState(x, Memory.start(v, n), split.places)

    def round(fed: Federation, s: PartlyPersonalState, draw: Draw) -> PartlyPersonalState:
        w = fed.sizes.to(s.x) if weights == "sizes" else None
        at = draw.phase("walk")
        x, v = fed.mean(steps, s.x, weights=w, memory=s.v, draw=at, personal=personal, **local)
        return PartlyPersonalState(x, v, s.places)

    def view(s: PartlyPersonalState) -> View:
        v = personal_models(s.v)
        return View(torch.cat([s.x.expand(len(v), -1), v], 1)[:, s.places])

    return Method(name, init, round, view, needs=frozenset({"gradient", "everyone"}))


def _check(method: str, model: Any, personal: Any) -> None:
    """Both parts must have parameters, or it is another method."""
    names, own = model.parameter_names, personal_names(model, personal)
    if 0 < len(own) < len(names):
        return
    found = "all parameters of this model" if own else "no parameter of this model"
    instead = "local-train with everyone" if own else "fedavg"
    raise UsageError(
        f"method.personal = {personal!r} makes {found} personal ({', '.join(names)}), and {method} needs both kinds; "
        f'name some of them, such as method.personal=["{names[-1]}"], choose another problem.model, or use {instead}.'
    )
