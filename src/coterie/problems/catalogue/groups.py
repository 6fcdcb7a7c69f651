"""`groups`: two groups of clients; the target belongs to one of them ('Adaptively weighted nodes', section G.1 to G.3).

The classes are merged into four, and each group draws from the merged classes with probabilities of its own
(setting 1). The majority may also see four labels permuted (2), its images turned by 90° (3), or both (4); a target
from the majority sees what the majority sees.

Rows: a holder (a client, the validation set, the test set) draws a merged class for every row, then rows of that class
without repetition; where a class has fewer rows than are drawn, they are used over again, equally often. Clients draw
independently of each other, so two may hold the same row: as in the paper, whose 15 · 4000 draws ask for more rows of
some classes than there are. The test set comes from the published test part; where there is none (digits, covtype) a
third of the rows, chosen by the seed, is kept for it. Validation is drawn from the training part, as in the paper, and
its rows are then withheld from all clients (the paper does not say; its theory needs them to be independent).

With `everyone`, each client is a target too: it draws validation rows of its own as its group draws, from a quarter of
the training part that nobody trains on, and its model is tested on test rows of its group.

Digits, and setting 2 on covtype, are not in the paper: digits takes MNIST's classes and probabilities, and covtype's
labels are permuted by the rule that gives the printed permutations.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.catalogue.byzantine import Attackers, AttackOption, with_attackers
from coterie.problems.data.examples import DataSet, Examples, Scale
from coterie.problems.data.load import load
from coterie.problems.data.partition import thinned
from coterie.problems.models import FlatModel, build
from coterie.problems.weighting import Weighting, weighting
from coterie.settings import Count, Name, NonNegative, Positive

Group = Literal["minority", "majority"]
TEST_SHARE = 3  # one row in so many is for the test where there is no test part
VALIDATION_SHARE = 4  # and of the others, one in so many for validation where everyone is a target


@dataclass(frozen=True)
class GroupsPlan:
    """The paper's choices for a data set: merged classes, their probabilities a group, sizes, model."""

    merged: tuple[tuple[int, ...], ...]
    minority: tuple[float, ...]
    majority: tuple[float, ...]
    train: int = 4000
    validation: int = 500
    test: int = 5000
    model: str = "cnn"

    def shares(self, group: Group) -> tuple[float, ...]:
        """P₁ … P₄ of a group."""
        return self.minority if group == "minority" else self.majority

    def relabelled(self, classes: int) -> Tensor:
        """The label that the majority gives to each class: the first classes of C1 … C4 move on in a cycle.

        This rule gives both printed permutations, 2→0→1→5→2 and 1→0→2→5→1.
        """
        first = torch.tensor([members[0] for members in self.merged])
        labels = torch.arange(classes)
        labels[first] = first.roll(-1)
        return labels


_TEN = ((2, 4, 6), (0, 3), (1, 8), (5, 7, 9))
_GREY = GroupsPlan(_TEN, (0.42, 0.08, 0.38, 0.12), (0.12, 0.38, 0.08, 0.42))
PLANS: dict[str, GroupsPlan] = {
    "digits": GroupsPlan(_TEN, _GREY.minority, _GREY.majority, train=100, validation=60, test=300),
    "mnist": _GREY,
    "fashion-mnist": _GREY,
    "cifar10": GroupsPlan(((1, 9), (0, 8), (2, 3, 4), (5, 6, 7)), (0.36, 0.04, 0.54, 0.06), (0.04, 0.36, 0.06, 0.54)),
    "covtype": GroupsPlan(
        ((0,), (1,), (2,), (3, 4, 5, 6)),
        (0.72, 0.14, 0.12, 0.02),
        (0.10, 0.82, 0.06, 0.02),
        train=40_000,
        validation=5_000,
        test=50_000,
        model="logistic",
    ),
}


def groups(
    context: Context,
    *,
    data: Literal["digits", "mnist", "fashion-mnist", "cifar10", "covtype"] = "digits",
    setting: Annotated[int, Field(ge=1, le=4)] = 1,
    target: Group = "minority",
    model: Name | None = None,
    clients: Count = 15,
    minority: Count | None = None,
    train: Count | None = None,
    validation: Count | None = None,
    test: Count | None = None,
    selection: Annotated[int, Field(ge=0)] = 0,
    everyone: bool = False,
    l2: NonNegative = 0.0,
    skew: Positive | None = None,
    attack: AttackOption = "none",
    attackers: Attackers = 0.4,
    strength: Positive | None = None,
    attack_from: Count = 1,
) -> Weighting:
    """A minority (a third of the clients) and a majority; the first clients are always those of the target's group.

    Where the target belongs to the majority, the majority comes first. Model and sizes default to the paper's for the
    data set.

    Args:
        setting: how the groups differ beside their class shares: 1 not at all, 2 by labels, 3 by rotation, 4 by both.
        target: the group of the target.
        minority: number of minority clients; a third if not set.
        train: training rows per client.
        l2: strength of the penalty ½ l2 ‖θ‖² on the model; with a linear model it is the μ of the paper's theorems.
        attack_from: first round in which the attackers attack.

    Example:
        >>> from coterie.problems import Context
        >>> problem = groups(Context(0), clients=6, train=20)
        >>> problem.clients, problem.friends
        (6, 2)
    """
    plan = PLANS[data]
    few = max(1, clients // 3) if minority is None else minority
    _check_groups(few, clients, target)
    source = load(data)
    _check_rotation(setting, source)
    draw = Draw.of(context.seed).phase("groups")
    home, away = _pools(source, plan, draw.phase("test part"))
    turn = 1 if bool(draw.phase("turn").bernoulli(0.5)) else -1  # a quarter, in a direction drawn once
    view = _View(source.scale(torch.cat(home.rows)), plan.relabelled(source.classes), setting, turn)

    def rows(pool: _Pool, group: Group, count: int, at: Draw) -> tuple[Tensor, Tensor]:
        return view(pool.examples, pool.sample(at, plan.shares(group), count), group)

    aside = home.part(VALIDATION_SHARE, draw.phase("validation part")) if everyone else home
    valid = aside.sample(draw.phase("validation"), plan.shares(target), validation or plan.validation)
    tests = away.sample(draw.phase("test"), plan.shares(target), test or plan.test)
    tested = view(away.examples, tests, target)
    chooses = rows(away.without(tests), target, selection, draw.phase("selection")) if selection else None
    home = home.without(torch.cat(aside.rows) if everyone else valid)
    nodes = [*range(clients)] if target == "minority" else [*range(few, clients), *range(few)]  # its group comes first
    kinds: list[Group] = ["minority" if node < few else "majority" for node in nodes]
    owners = list(zip(nodes, kinds, strict=True))
    own: dict[str, Any] = {}
    if everyone:
        at, count = draw.phase("validation"), validation or plan.validation
        both = list(dict.fromkeys(kinds))  # the target's group is the first
        own["valid"] = [rows(aside, kind, count, at.client(node)) for node, kind in owners]
        own["tests"] = [tested, *(rows(away, kind, test or plan.test, draw.phase("other test")) for kind in both[1:])]
        own["groups"] = [both.index(kind) for kind in kinds]

    shards = [rows(home, kind, train or plan.train, draw.phase("train").client(node)) for node, kind in owners]
    problem = weighting(
        thinned(shards, skew, draw.phase("skew")),
        view(home.examples, valid, target),
        FlatModel(build(model or plan.model, source.shape, source.classes, context.seed)),
        "cross_entropy",
        l2=l2,
        test=tested,
        selection=chooses,
        friends=few if target == "minority" else clients - few,
        **context.tensor_options,
        **own,
    )
    return with_attackers(problem, attack, attackers, strength, attack_from)


class _Pool(NamedTuple):
    """Rows that may be drawn, by merged class."""

    examples: Examples
    rows: tuple[Tensor, ...]
    merged: tuple[tuple[int, ...], ...]

    def sample(self, draw: Draw, shares: tuple[float, ...], count: int) -> Tensor:
        """Row numbers: a merged class by its share for each, then a row of it."""
        edges = torch.tensor(shares, dtype=torch.float64).cumsum(0)[:-1]
        kinds = torch.bucketize(draw.phase("class").uniform(count, dtype=torch.float64), edges, right=True)
        chosen = torch.empty(count, dtype=torch.int64)
        for c, rows in enumerate(self.rows):
            places = (kinds == c).nonzero()[:, 0]
            if len(places) and not len(rows):
                raise UsageError(
                    f"no rows of classes {', '.join(map(str, self.merged[c]))} are left to draw from; "
                    f"lower problem.validation or use a larger data set."
                )
            order = draw.phase("row").step(c).permutation(len(rows))
            chosen[places] = rows[order[torch.arange(len(places)) % max(1, len(rows))]]
        return chosen

    def part(self, share: int, draw: Draw) -> "_Pool":
        """One in so many rows of each merged class."""
        orders = [draw.step(c).permutation(len(rows)) for c, rows in enumerate(self.rows)]
        kept = [rows[order[: len(rows) // share]] for rows, order in zip(self.rows, orders, strict=True)]
        return self._replace(rows=tuple(rows.sort().values for rows in kept))

    def without(self, taken: Tensor) -> "_Pool":
        """The same without some rows."""
        free = torch.ones(len(self.examples.y), dtype=torch.bool)
        free[taken] = False
        return self._replace(rows=tuple(rows[free[rows]] for rows in self.rows))


class _View(NamedTuple):
    """How a group sees rows: the majority by other labels or turned, as the setting says."""

    scale: Scale
    labels: Tensor
    setting: int
    turn: int

    def __call__(self, examples: Examples, rows: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """Inputs and labels of these rows."""
        x, y = examples.x[rows], examples.y[rows]
        if group == "majority" and self.setting in (2, 4):
            y = self.labels[y]
        if group == "majority" and self.setting in (3, 4):
            x = torch.rot90(x, self.turn, (-2, -1))
        return self.scale(x), y


def _pools(source: DataSet, plan: GroupsPlan, draw: Draw) -> tuple[_Pool, _Pool]:
    """The training and the test rows; where there is no test part, a third of the rows is set apart by the seed."""
    everything = torch.arange(len(source.train.y))
    if source.test is not None:
        return _pool(source.train, everything, plan), _pool(source.test, torch.arange(len(source.test.y)), plan)
    order = draw.permutation(len(everything))
    cut = len(everything) // TEST_SHARE
    return _pool(source.train, order[cut:], plan), _pool(source.train, order[:cut], plan)


def _pool(examples: Examples, rows: Tensor, plan: GroupsPlan) -> _Pool:
    rows = rows.sort().values
    kinds = [torch.isin(examples.y[rows], torch.tensor(members)) for members in plan.merged]
    return _Pool(examples, tuple(rows[kind] for kind in kinds), plan.merged)


def _check_groups(few: int, clients: int, target: Group) -> None:
    if few > clients:
        raise UsageError(f"problem.minority is {few}, but there are only {clients} clients; lower it.")
    if few == clients and target == "majority":
        raise UsageError(
            f"all {clients} clients are the minority, so the target has no majority to belong to; "
            f"lower problem.minority or raise problem.clients."
        )


def _check_rotation(setting: int, source: DataSet) -> None:
    if setting in (3, 4) and not source.holds_images:
        pictures = ", ".join(name for name in PLANS if name != source.name)
        raise UsageError(
            f"problem.setting = {setting} turns images, but {source.name} has none; "
            f"use setting 1 or 2, or problem.data = {pictures}."
        )
