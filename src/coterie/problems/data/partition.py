"""How labelled rows are dealt to clients: row numbers by client, equal in number; what is left over is dropped."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from coterie.errors import UsageError, unknown
from coterie.numerics import Draw


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
    """Exactly `classes` classes per client, neighbours on a ring of all classes, and equally many rows of each."""
    count = int(labels.max()) + 1
    if classes > count:
        raise UsageError(f"there are {count} classes, not {classes}; lower problem.classes.")
    ring = draw.phase("ring").permutation(count)
    holds = ring[(torch.arange(clients)[:, None] + torch.arange(classes)) % count].tolist()  # [clients][classes]
    holders = Counter(c for mine in holds for c in mine)
    order = draw.phase("rows").permutation(len(labels))
    rows = {c: order[labels[order] == c] for c in holders}
    each = min(_share(len(rows[c]), holders[c], "holders of one class") for c in holders)
    pieces = {c: iter(rows[c][: each * holders[c]].view(-1, each)) for c in holders}
    return [torch.cat([next(pieces[c]) for c in mine]) for mine in holds]


PARTITIONS: dict[str, Callable[[Tensor, int, int, Draw], list[Tensor]]] = {
    "iid": iid,
    "shards": shards,
    "classes": by_class,
}


def partition(name: str, labels: Tensor, clients: int, classes: int, draw: Draw) -> list[Tensor]:
    """The partition of that name."""
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    return PARTITIONS[name](labels, clients, classes, draw.phase(name))


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
