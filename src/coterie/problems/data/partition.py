"""How rows are dealt to clients: row numbers by client, equal in number but for skewed ones; the rest is dropped."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from coterie.errors import UsageError, unknown
from coterie.numerics import Draw

Labelled = tuple[Tensor, Tensor]


def set_apart(rows: Labelled, count: int, draw: Draw) -> tuple[Labelled | None, Labelled]:
    """Rows for choosing among models and settings, and the others: nobody trains on either.

    Args:
        rows: inputs and labels of test rows.
        count: how many to set apart; none if 0.
        draw: says which.

    Example:
        >>> import torch
        >>> from coterie.numerics import Draw
        >>> selection, test = set_apart((torch.arange(5.0), torch.arange(5)), 2, Draw.of(0))
        >>> len(selection[1]), len(test[1]), sorted([*selection[1].tolist(), *test[1].tolist()])
        (2, 3, [0, 1, 2, 3, 4])
    """
    if count == 0:
        return None, rows
    x, y = rows
    if count >= len(y):
        raise UsageError(f"there are {len(y)} test rows; problem.selection = {count} leaves none to test on. Lower it.")
    order = draw.permutation(len(y))
    kept, chosen = order[count:].sort().values, order[:count].sort().values
    return (x[chosen], y[chosen]), (x[kept], y[kept])


def iid(labels: Tensor, clients: int, classes: int, draw: Draw) -> list[Tensor]:
    """Shuffled, then dealt evenly."""
    each = _share(len(labels), clients, "clients")
    order = draw.permutation(len(labels))
    return list(order[: each * clients].view(clients, each))


def shards(labels: Tensor, clients: int, classes: int, draw: Draw) -> list[Tensor]:
    """Sorted by label and cut into clients × classes shards; every client gets `classes` of them (McMahan et al. 2017).

    So most clients see that many classes; a shard that lies across a border of two adds one.
    """
    pieces = clients * classes
    each = _share(len(labels), pieces, "shards (problem.clients × problem.classes)")
    shuffled = draw.phase("rows").permutation(len(labels))
    by_label = shuffled[labels[shuffled].argsort(stable=True)]
    cut = by_label[: each * pieces].view(pieces, each)
    deal = draw.phase("deal").permutation(pieces).view(clients, classes)
    return [cut[mine].reshape(-1) for mine in deal]


def by_class(labels: Tensor, clients: int, classes: int, draw: Draw) -> list[Tensor]:
    """Exactly `classes` classes per client, dealt at random, and equally many rows of each.

    Classes are dealt client by client, first those with the fewest holders so far, ties at random: so every set of
    classes can occur, and the numbers of holders of two classes differ by one at most.
    """
    count = _class_count(labels, classes)
    holders = torch.zeros(count, dtype=torch.float64)
    ties = draw.phase("classes").uniform(clients, count, dtype=torch.float64)
    holds = []
    for tie in ties:
        mine = (holders + tie).argsort(stable=True)[:classes]
        holders[mine] += 1
        holds.append(mine.tolist())
    return _by_holders(labels, holds, draw)


def ring(labels: Tensor, clients: int, classes: int, draw: Draw) -> list[Tensor]:
    """Exactly `classes` classes per client, neighbours on a ring of all classes, and equally many rows of each.

    Only as many sets of classes occur as there are classes, which makes federated learning harder than `by_class`.
    """
    count = _class_count(labels, classes)
    order = draw.phase("ring").permutation(count)
    holds = order[(torch.arange(clients)[:, None] + torch.arange(classes)) % count].tolist()
    return _by_holders(labels, holds, draw)


def _class_count(labels: Tensor, classes: int) -> int:
    count = int(labels.max()) + 1
    if classes > count:
        raise UsageError(f"there are {count} classes, not {classes}; lower problem.classes.")
    return count


def _by_holders(labels: Tensor, holds: list[list[int]], draw: Draw) -> list[Tensor]:
    """Rows by client, equally many of each of its classes, [clients][classes]."""
    holders = Counter(c for mine in holds for c in mine)
    order = draw.phase("rows").permutation(len(labels))
    rows = {c: order[labels[order] == c] for c in holders}
    each = min(_share(len(rows[c]), holders[c], "holders of one class") for c in holders)
    pieces = {c: iter(rows[c][: each * holders[c]].view(-1, each)) for c in holders}
    return [torch.cat([next(pieces[c]) for c in mine]) for mine in holds]


def dirichlet(labels: Tensor, clients: int, alpha: float, draw: Draw, *, capped: bool = False) -> list[Tensor]:
    """Every class is shared out among the clients in proportions drawn from Dirichlet(α, …, α) (Hsu et al. 2019).

    So clients differ in their classes and in size; nobody has fewer than two rows.

    Args:
        labels: the label of each row.
        clients: how many parts.
        alpha: α.
        draw: the randomness.
        capped: class after class, a client that has an even share of all rows gets no more, as in PFLlib.
    """
    count = int(labels.max()) + 1
    shares = _proportions(count, clients, alpha, draw.phase("shares"))
    order = draw.phase("rows").permutation(len(labels))
    parts: list[list[Tensor]] = [[] for _ in range(clients)]
    for c in range(count):
        mine, share = order[labels[order] == c], shares[c]
        if capped:
            sizes = torch.tensor([sum(map(len, part)) for part in parts])
            open_ = (sizes < len(labels) / clients).double()
            share = share * open_ if float(share @ open_) > 0.0 else open_
        for k, piece in enumerate(torch.split(mine, apportioned(len(mine), share / share.sum()))):
            parts[k].append(piece)
    return _filled([torch.cat(part) for part in parts], len(labels))


def quantity(labels: Tensor, clients: int, alpha: float, draw: Draw) -> list[Tensor]:
    """Sizes in proportions drawn from Dirichlet(α, …, α), rows at random; nobody has fewer than two rows."""
    share = _proportions(1, clients, alpha, draw.phase("shares"))[0]
    order = draw.phase("rows").permutation(len(labels))
    return _filled(list(torch.split(order, apportioned(len(order), share))), len(labels))


def thinned(shards: list[Labelled], alpha: float | None, draw: Draw) -> list[Labelled]:
    """Shards of which clients keep unequal parts: client k keeps, of its rows of class c, a share in proportion to its
    part of Dirichlet(α, …, α); the client with the largest part keeps all. So sizes and classes become unequal.

    Args:
        shards: inputs and labels by client.
        alpha: α; None keeps all rows.
        draw: the randomness.
    """
    if alpha is None:
        return shards
    count = max(int(y.max()) for _, y in shards) + 1
    shares = _proportions(count, len(shards), alpha, draw.phase("shares"))
    shares = shares / shares.max(dim=1, keepdim=True).values
    kept = []
    for k, (x, y) in enumerate(shards):
        order = draw.phase("rows").client(k).permutation(len(y))
        place = torch.zeros(len(y), dtype=torch.float64)  # of a row among those of its class, from 0 to 1
        for c in range(count):
            mine = order[y[order] == c]
            place[mine] = torch.arange(len(mine), dtype=torch.float64) / max(1, len(mine))
        chosen = place < shares[y.long(), k]
        chosen[place.argsort(stable=True)[:2]] = True  # nobody is left without rows
        kept.append((x[chosen], y[chosen]))
    return kept


def _proportions(draws: int, clients: int, alpha: float, draw: Draw) -> Tensor:
    """Rows of Dirichlet(α, …, α), [draws, clients]: Gamma variates by the inverse of their distribution function."""
    from scipy.special import gammaincinv  # takes a fifth of a second, and few partitions need it

    uniform = draw.uniform(draws, clients, dtype=torch.float64).clamp(min=1e-300)
    gamma = torch.from_numpy(np.asarray(gammaincinv(alpha, uniform.numpy())))
    largest = torch.nn.functional.one_hot(uniform.argmax(1), clients)  # where all are too small to be told from 0
    gamma = torch.where(gamma.sum(1, keepdim=True) > 0, gamma, largest.double())
    return gamma / gamma.sum(1, keepdim=True)


def apportioned(rows: int, share: Tensor) -> list[int]:
    """Whole numbers with this sum, as near to the shares as can be (largest remainders)."""
    exact = share * rows
    counts = exact.floor()
    left = rows - int(counts.sum())
    counts[(exact - counts).argsort(descending=True, stable=True)[:left]] += 1
    return [int(count) for count in counts]


def _filled(parts: list[Tensor], rows: int) -> list[Tensor]:
    """The parts, those of fewer than two rows filled up from the largest."""
    _share(rows, 2 * len(parts), "clients, two to each")
    while (short := min(range(len(parts)), key=lambda k: len(parts[k]))) is not None and len(parts[short]) < 2:
        rich = max(range(len(parts)), key=lambda k: len(parts[k]))
        parts[short], parts[rich] = torch.cat([parts[short], parts[rich][-1:]]), parts[rich][:-1]
    return parts


SKEWED: dict[str, Callable[[Tensor, int, float, Draw], list[Tensor]]] = {"dirichlet": dirichlet, "quantity": quantity}
EVEN: dict[str, Callable[[Tensor, int, int, Draw], list[Tensor]]] = {
    "iid": iid,
    "shards": shards,
    "classes": by_class,
    "ring": ring,
}


def partition(name: str, labels: Tensor, clients: int, classes: int, draw: Draw, alpha: float = 0.5) -> list[Tensor]:
    """The partition of that name.

    Args:
        name: one of `EVEN` or `SKEWED`.
        labels: the label of each row.
        clients: how many parts.
        classes: classes per client, for those that use it.
        draw: the randomness.
        alpha: α of the Dirichlet distribution, for those that use it.
    """
    if name in SKEWED:
        return SKEWED[name](labels, clients, alpha, draw.phase(name))
    if name not in EVEN:
        raise unknown("partition", name, [*EVEN, *SKEWED])
    return EVEN[name](labels, clients, classes, draw.phase(name))


def split(rows: Tensor, share: float, draw: Draw) -> tuple[Tensor, Tensor]:
    """A client's rows in two parts at random, the first with that share of them; neither is empty."""
    if len(rows) < 2:
        raise UsageError("a client has 1 row, which cannot be split into train and validation; lower problem.clients.")
    order = draw.permutation(len(rows))
    first = min(max(1, round(share * len(rows))), len(rows) - 1)
    return rows[order[:first]], rows[order[first:]]


def long_tail(labels: Tensor, largest: int, smallest: int, draw: Draw) -> Tensor:
    """Rows of an imbalanced set: class c keeps largest·(smallest/largest)^(c/(C−1)) of its rows, or all it has."""
    counts = long_tail_counts(int(labels.max()) + 1, largest, smallest)
    order = draw.permutation(len(labels))
    kept = [order[labels[order] == c][:count] for c, count in enumerate(counts)]
    return torch.cat(kept)


def long_tail_counts(classes: int, largest: int, smallest: int) -> list[int]:
    """How many rows each class keeps; 10 classes from 6000 to 60: 6000, 3597, 2156, 1293, 775, …, 60."""
    return [round(largest * (smallest / largest) ** (c / max(1, classes - 1))) for c in range(classes)]


def _share(rows: int, holders: int, what: str) -> int:
    if rows < holders:
        raise UsageError(f"{rows} rows cannot be dealt to {holders} {what}; lower problem.clients.")
    return rows // holders
