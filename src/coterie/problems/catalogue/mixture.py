"""`mixture`: the target knows some classes only; friends hold those and others mixed (MeritFed, sections 4.2 and 4.3).

Client 0 is the target itself: its rows are of the home classes. Clients 1 … friends−1 hold a share α of home classes
and the rest of near ones; the others are strangers, with far classes only. Rows are dealt at random and no two clients
hold the same one. The target is judged on home classes: its validation rows, and the test rows, are of these.

Images (CIFAR-10; digits are not in the paper): home 0–2, near 3–5, far 6–9. `validation` rows of each home class are
cut off the published test part (of digits, half of the rows are kept for the test). Pixels are standardised by channel
over the training part. The paper gives the rows and clients nowhere; the numbers here are those of the authors' code,
20 clients of 750 rows, which however leaves out class 9.

GoEmotions: home are the emotions of Ekman's joy, near is neutral; far are the other groups of emotions: one to a
stranger, in turn, filled up with neutral where a group has run out of rows. Validation are the home rows of the
published dev part, at most `validation` of each emotion. The paper tunes BERT; here `fine_tune` tunes any encoder of
that family (`encoder`, a folder or an installed package), and without it the encoder is fixed and a head is trained.

`validation = 0` is the paper's setting without extra data: the target's goal is the loss on its own training rows.
SGD on these alone, which the paper calls SGD-Ideal, is `local-train` here; `sgd-ideal` averages all the friends.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from coterie.errors import UsageError
from coterie.federation import Shard
from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.catalogue.byzantine import Attackers, AttackOption, with_attackers
from coterie.problems.data.examples import Examples
from coterie.problems.data.goemotions import goemotions
from coterie.problems.data.load import load
from coterie.problems.data.partition import set_apart, thinned
from coterie.problems.models import FlatModel, build
from coterie.problems.models.text import DEFAULT_ENCODER, TextClassifier, open_encoder, with_adapters
from coterie.problems.tasks.supervised import Supervised
from coterie.problems.weighting import Weighting, weighting
from coterie.settings import Count, Name, Positive, Probability

HOME, NEAR, FAR = (0, 1, 2), (3, 4, 5), ((6, 7, 8, 9),)
TUNED_AT_ONCE = 32  # rows of text whose activations are in memory together


class MixturePlan(NamedTuple):
    """Sizes and model of a data set. validation is by class."""

    clients: int
    friends: int
    rows: int
    validation: int
    model: str


PLANS = {
    "digits": MixturePlan(12, 5, 30, 20, "mlp"),
    "cifar10": MixturePlan(20, 11, 750, 300, "small-cnn"),
    "goemotions": MixturePlan(20, 11, 1000, 1000, "logistic"),  # more than the dev part has of any emotion
}


class Source(NamedTuple):
    """Rows with their network, and which classes are whose."""

    train: Examples
    valid: Examples
    test: Examples
    net: nn.Module
    home: tuple[int, ...]
    near: tuple[int, ...]
    far: tuple[tuple[int, ...], ...]
    fills: bool = False  # whether near classes fill up strangers whose own have run out
    block: int | None = None


def mixture(
    context: Context,
    *,
    data: Literal["digits", "cifar10", "goemotions"] = "digits",
    share: Probability = 0.9,
    model: Name | None = None,
    clients: Count | None = None,
    friends: Count | None = None,
    rows: Count | None = None,
    validation: Annotated[int, Field(ge=0)] | None = None,
    selection: Annotated[int, Field(ge=0)] = 0,
    skew: Positive | None = None,
    encoder: Name | None = None,
    fine_tune: bool = False,
    lora: Count | None = None,
    tokens: Count = 64,
    attack: AttackOption = "none",
    attackers: Attackers = 0.4,
    strength: Positive | None = None,
    attack_from: Count = 1,
) -> Weighting:
    """The target knows some classes, friends mix them with others, and strangers have none of them.

    The settings encoder, fine_tune, lora and tokens are for goemotions, where model names the head.

    Args:
        share: α, share of the target's classes in a friend's rows.
        friends: number of friends, the target included.
        validation: validation rows per class; 0 for none.
        encoder: text encoder by name or folder.
        fine_tune: train the encoder too, not only the head.
        lora: train LoRA adapters of this rank in the encoder, and the head; the encoder itself is fixed.
        tokens: longest text in tokens.
        attack_from: first round in which the attackers attack.

    Example:
        >>> from coterie.problems import Context
        >>> problem = mixture(Context(0), clients=4, friends=2, rows=20)
        >>> problem.clients, problem.friends
        (4, 2)
    """
    plan = PLANS[data]
    clients = clients or plan.clients
    friends = friends or min(plan.friends, clients)
    if friends > clients:
        raise UsageError(f"problem.friends is {friends}, but there are only {clients} clients; lower it.")
    if data != "goemotions" and (encoder is not None or fine_tune or lora):
        raise UsageError(
            "problem.encoder, problem.fine_tune and problem.lora are for texts, and "
            f"{data} are images; use problem.data=goemotions."
        )
    if fine_tune and lora:
        raise UsageError("problem.fine_tune trains the whole encoder, problem.lora adapters of it; choose one of them.")
    draw, wanted = Draw.of(context.seed).phase("mixture"), plan.validation if validation is None else validation
    if data == "goemotions":
        tuning = Tuning(encoder or DEFAULT_ENCODER, fine_tune, lora, tokens)
        source = _comments(tuning, model or plan.model, wanted, draw, context)
    else:
        source = _images(data, model or plan.model, wanted, draw, context)
    dealt = _dealt(source, share, clients, friends, rows or plan.rows, draw.phase("train"))
    chooses, tested = set_apart((source.test.x, source.test.y), selection, draw.phase("selection"))
    problem = weighting(
        thinned([(source.train.x[mine], source.train.y[mine]) for mine in dealt], skew, draw.phase("skew")),
        (source.valid.x, source.valid.y) if len(source.valid.y) else None,
        FlatModel(source.net),
        "cross_entropy",
        test=tested,
        selection=chooses,
        friends=friends,
        **context.tensor_options,
    )
    return with_attackers(_with_own_rows(problem, source.block), attack, attackers, strength, attack_from)


def _with_own_rows(problem: Weighting, block: int | None) -> Weighting:
    """The target as client 0: it holds training rows, and validation rows where there are some."""
    task = problem.task
    if block is not None and isinstance(task, Supervised):
        task = replace(task, block=block)
    valid = None if problem.target is None else problem.target.valid
    return replace(problem, task=task, target=Shard(task, problem.train.client(0), valid))


def _dealt(source: Source, share: float, clients: int, friends: int, rows: int, draw: Draw) -> list[Tensor]:
    """Row numbers by client; no row is dealt twice."""
    labels = source.train.y
    home, near, *far = (
        _deck(labels, classes, draw.step(i)) for i, classes in enumerate((source.home, source.near, *source.far))
    )
    mixed = round(share * rows)
    parts = [_take(home, rows), *(_take(home, mixed) + _take(near, rows - mixed) for _ in range(friends - 1))]
    turns = cycle(far)
    for _ in range(clients - friends):
        mine = next(filter(None, (_take(deck, rows) for deck in islice(turns, len(far)))), [])
        parts.append(mine + _take(near, rows - len(mine)) if source.fills else mine)
    for k, part in enumerate(parts):
        if len(part) < rows:
            raise UsageError(
                f"client {k} of {clients} finds {len(part)} rows of its classes left, not problem.rows = {rows}; "
                f"lower problem.rows, problem.friends or problem.clients."
            )
    return [torch.tensor(part) for part in parts]


def _deck(labels: Tensor, classes: tuple[int, ...], draw: Draw) -> Iterator[int]:
    """The rows of some classes in random order, to be dealt."""
    rows = _of(labels, classes)
    return iter(rows[draw.permutation(len(rows))].tolist())


def _take(deck: Iterator[int], count: int) -> list[int]:
    """The next rows, as many as are left."""
    return list(islice(deck, count))


def _of(labels: Tensor, classes: tuple[int, ...]) -> Tensor:
    return torch.isin(labels, torch.tensor(classes)).nonzero()[:, 0]


def _images(data: str, model: str, validation: int, draw: Draw, context: Context) -> Source:
    found = load(data)
    train, test = found.parts(len(found.train.y) // 2, draw.phase("test part"))
    scale = found.scale()
    x = scale(train.x)
    mean, width = (of(x, (0, 2, 3), keepdim=True)[0] for of in (torch.mean, torch.std))
    train = Examples(x.sub_(mean).div_(width), train.y)

    def standard(rows: Tensor) -> Examples:
        return Examples(scale(test.x[rows]).sub_(mean).div_(width), test.y[rows])

    chosen = _first_of_each(test.y, HOME, validation, draw.phase("validation"))
    left = _of(test.y, HOME)
    left = left[~torch.isin(left, chosen)]
    for c in HOME:
        if not bool((test.y[left] == c).any()):
            raise UsageError(
                f"class {c} has {int((test.y == c).sum())} test rows; problem.validation = {validation} leaves none "
                "to test on. Lower it."
            )
    net = build(model, found.shape, found.classes, context.seed)
    return Source(train, standard(chosen), standard(left), net, HOME, NEAR, FAR)


class Tuning(NamedTuple):
    """A text encoder, and what of it is trained: all, LoRA adapters of a rank, or nothing."""

    encoder: str
    whole: bool
    lora: int | None
    tokens: int


def _comments(tuning: Tuning, model: str, validation: int, draw: Draw, context: Context) -> Source:
    found = goemotions()
    home = found.ekman["joy"]
    encoder, tokens = open_encoder(tuning.encoder), tuning.tokens
    trained = tuning.whole or tuning.lora is not None
    if tuning.lora is not None:
        encoder = with_adapters(encoder, tuning.lora, context.seed)
    parts = (found.train, found.dev, found.test)
    texts = [text for part in parts for text in part.texts]
    x = encoder.tokenize(texts, tokens) if trained else encoder.embed(texts, tokens)
    inputs = torch.split(x, [len(part.y) for part in parts])
    train, dev, test = (Examples(rows, part.y) for rows, part in zip(inputs, parts, strict=True))
    head = build(model, (encoder.width,), len(found.emotions), context.seed)
    chosen = _first_of_each(dev.y, home, validation, draw.phase("validation"))
    tested = _of(test.y, home)
    return Source(
        train,
        Examples(dev.x[chosen], dev.y[chosen]),
        Examples(test.x[tested], test.y[tested]),
        TextClassifier(encoder, head) if trained else head,
        home,
        (found.neutral,),
        tuple(emotions for group, emotions in found.ekman.items() if group != "joy"),
        fills=True,
        block=TUNED_AT_ONCE if trained else None,
    )


def _first_of_each(labels: Tensor, classes: tuple[int, ...], count: int, draw: Draw) -> Tensor:
    """At most so many rows of each class, at random."""
    order = draw.permutation(len(labels))
    return torch.cat([order[labels[order] == c][:count] for c in classes])
