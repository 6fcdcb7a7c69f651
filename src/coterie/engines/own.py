"""Your own data on a network: the rows of a client at its node, and a run at a server that has no client rows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from coterie import machine
from coterie.errors import UsageError
from coterie.experiment.build import (
    Parts,
    check_deployable,
    check_needs,
    check_schedules,
    federate_remotely,
    run_name,
    site_compression,
    with_screened_copies,
)
from coterie.experiment.checkpoint import available
from coterie.experiment.config import Config, FederationTable, RunTable, checked_table, clipped
from coterie.experiment.loop import Observer, Result, run_rounds
from coterie.experiment.rehearsal import check_secure
from coterie.federation import staged
from coterie.federation.remote import Names, Node, NodePolicy, Store, Transport, node_for
from coterie.methods import Method
from coterie.methods.shared.staged import with_stages
from coterie.problems.base import View
from coterie.problems.models import FlatModel
from coterie.problems.tasks.supervised import RowLoss
from coterie.problems.weighting import Weighting, weighting
from coterie.storage import make_folder, sole_user, write_atomically

OWN = "own data"


class ClientData(NamedTuple):
    """A client's rows, model and loss. Model, loss and l2 must be those of the server.

    Args:
        train: training rows: (inputs, labels) as tensors or arrays, or a torch Dataset.
        model: the module that is trained.
        loss: the name of a loss, or a function of (outputs, labels) that returns one number per row.
        valid: validation rows of this client, needed where it, or every client, is a target.
        l2: weight of the penalty on the squared norm of the parameters.
        dtype: "float32" or "float64".

    Example:
        >>> data = ClientData((torch.randn(20, 4), torch.zeros(20).long()), nn.Linear(4, 2), "cross_entropy")
    """

    train: Any
    model: nn.Module
    loss: str | RowLoss
    valid: Any = None
    l2: float = 0.0
    dtype: machine.DtypeLike = "float32"

    def node(
        self,
        client: int,
        *,
        modules: tuple[str, ...],
        store: Store,
        shares_memory: bool,
        policy: NodePolicy = NodePolicy(),  # noqa: B008
    ) -> Node:
        """The node of this client alone, which answers what its policy admits.

        Args:
            client: the number of the client.
            modules: modules with works of your own that the server may name.
            store: where client memory is kept.
            shares_memory: whether the server may ask for client memory.
            policy: what a server may ask for.
        """
        valid = None if self.valid is None else [self.valid]
        options: dict[str, Any] = {"l2": self.l2, "dtype": getattr(torch, machine.checked_dtype(self.dtype))}
        problem = weighting([self.train], self.valid, FlatModel(self.model), self.loss, valid=valid, **options)
        names = Names().with_modules(*modules)
        node = node_for(problem, (0,), target=problem.target, names=names, store=store, policy=policy)
        node.clients, node.shares_memory = (client,), shares_memory
        return node


@dataclass(frozen=True)
class AtServer(Weighting):
    """A weighting problem at a server without client rows; it measures on the rows of target and test."""

    def measure(self, view: View) -> dict[str, float]:
        """The measures of a model for all on the rows of the target and of the test."""
        return super().measure(view) if view.model.dim() == 1 else {}


def at_server(
    model: nn.Module,
    loss: str | RowLoss,
    clients: int,
    target: Any,
    test: Any,
    *,
    l2: float = 0.0,
    dtype: machine.DtypeLike = "float32",
    everyone: bool = False,
) -> AtServer:
    """The problem of a server without client rows; the rows of the target or of the test show their form."""
    sample = target if target is not None else test
    if sample is None:
        raise UsageError("the server needs some rows to know their form: give target=(inputs, labels), or test.")
    options: dict[str, Any] = {"l2": l2, "dtype": getattr(torch, machine.checked_dtype(dtype))}
    known = weighting([sample], target, FlatModel(model), loss, test=test, **options)
    stand_in = known.train.shared_by(torch.zeros(clients, dtype=torch.int64))
    valid = stand_in if everyone else None
    return AtServer(known.task, stand_in, known.target, known.start, test=known.test, valid=valid)


def run_here(
    problem: AtServer,
    method: Method,
    transport: Transport,
    folder: Path,
    run: Mapping[str, Any],
    federation: Mapping[str, Any],
    observer: Observer | None = None,
    *,
    engine: str = "flower",
    modules: tuple[str, ...] = (),
) -> Result:
    """Run a method with the clients that a transport reaches; a run with a checkpoint in the folder is resumed."""
    values = {"method": method.name, "problem": OWN, "engine": engine, "threads": 1, "baselines": [], **run}
    run_table = checked_table(RunTable, "run", values)
    table = clipped(run_table, checked_table(FederationTable, "federation", federation))
    config = Config(run_table, dict(method.settings), {}, table)
    check_needs(method, problem, OWN)
    check_schedules(method, run_table.rounds)
    check_deployable(config, method, problem)
    check_secure(config, method, problem)
    method, table = with_screened_copies(method, config)
    orders: dict[str, Any] = {"own_rows": True, "method": config.run.method}
    fed, chosen = federate_remotely(problem, table, transport, run_name(config), modules, **orders)
    fed = replace(fed, engine=staged(fed.engine, *site_compression(table)))
    method = with_stages(method, fed.engine)
    config = config.with_federation(**chosen)
    problem = replace(problem, train=replace(problem.train, counts=fed.sizes.clamp(min=1)))
    make_folder(folder)
    with sole_user(folder):
        begun = available(folder / "checkpoint")
        write_atomically(folder / "config.toml", config.as_toml().encode())
        return run_rounds(Parts(config, problem, method, fed), folder, observer, resume=begun)
