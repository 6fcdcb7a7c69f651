"""`femnist` and `shakespeare`: LEAF's users as clients (Caldas et al. 2018).

Every user is a client with training and test rows of its own, of unequal size. The target is one of them; a share of
every user's training rows is set aside for validation. Files are read in LEAF's format (problems/data/leaf.py).
"""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.catalogue.holders import of_holders
from coterie.problems.data.leaf import LETTERS, Reader, characters, leaf_folder, next_letters, read_leaf
from coterie.problems.models import FlatModel, build
from coterie.problems.weighting import Weighting
from coterie.settings import Count, Name

Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Number = Annotated[int, Field(ge=0)]


def femnist(
    context: Context,
    *,
    folder: Name | None = None,
    clients: Count | None = None,
    target: Number = 0,
    validation: Share = 0.2,
    model: Name = "lenet5",
) -> Weighting:
    """Handwritten digits and letters of 62 classes; every writer is a client.

    Args:
        folder: LEAF's folder with train/ and test/; by default femnist/ in the data folder.
        clients: how many writers, drawn at random; all if not set.
        target: number of the writer whose model is wanted.
        validation: share of every writer's training rows that judges models; 0 for none, then there is no target.

    Example:
        `coterie run --problem femnist --set problem.folder=leaf/data/femnist/data --set problem.clients=20`
    """
    net = build(model, (1, 28, 28), 62, context.seed)
    return _of_users(context, "femnist", folder, characters, clients, net, target=target, validation=validation)


def shakespeare(
    context: Context,
    *,
    folder: Name | None = None,
    clients: Count | None = None,
    target: Number = 0,
    validation: Share = 0.2,
    hidden: Count = 256,
    layers: Count = 2,
) -> Weighting:
    """The next letter in the plays of Shakespeare; every speaking role is a client. LEAF's network: an LSTM.

    Args:
        folder: LEAF's folder with train/ and test/; by default shakespeare/ in the data folder.
        clients: how many roles, drawn at random; all if not set.
        target: number of the role whose model is wanted.
        validation: share of every role's training rows that judges models; 0 for none, then there is no target.
        hidden: units per layer of the LSTM.
        layers: layers of the LSTM.

    Example:
        `coterie run --problem shakespeare --set problem.folder=leaf/data/shakespeare/data --set problem.clients=20`
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed)
        net = NextLetter(hidden, layers)
    return _of_users(context, "shakespeare", folder, next_letters, clients, net, target=target, validation=validation)


class NextLetter(nn.Module):
    """LEAF's network: letters as 8 numbers, an LSTM over the text, and one score per letter from its last state."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 8)
        self.read = nn.LSTM(8, hidden, layers, batch_first=True)
        self.score = nn.Linear(hidden, len(LETTERS))

    def forward(self, text: Tensor) -> Tensor:
        """[n, length] numbers of letters to [n, letters]."""
        return self.score(self.read(self.embed(text))[0][:, -1])


def _of_users(
    context: Context, name: str, folder: str | None, reader: Reader, clients: int | None, net: nn.Module, **more: Any
) -> Weighting:
    """The problem of the users that are drawn, with a note that names the files."""
    draw, where = Draw.of(context.seed).phase(name), leaf_folder(name, folder)
    found = read_leaf(where, reader)
    users = [user for user in found.users if len(user.train.y) > 1]
    if clients is not None and clients > len(users):
        raise UsageError(f"problem.clients is {clients}, but {where} has {len(users)} users with rows; lower it.")
    chosen = [users[k] for k in draw.phase("users").subset(len(users), clients or len(users)).tolist()]
    note = f"{name}: {len(chosen)} of {len(users)} users of {where}; sha256 of its files {found.digest}"
    return of_holders(context, chosen, FlatModel(net), draw=draw, notes=(note,), **more)
