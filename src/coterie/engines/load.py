"""Nodes in the processes that Flower and FLARE keep at a client: of its own rows, or of a configured problem."""

import os
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from coterie.consent import load as load_code
from coterie.engines.own import ClientData
from coterie.errors import UsageError
from coterie.experiment.config import Config, plugins_in, resolve
from coterie.federation.remote import Node, Store, node_policy
from coterie.plugins import require_admitted

NO_NUMBER = "this SuperNode has no number; start it with --node-config 'partition-id=0 num-partitions=5'."


def load_node(
    load: Callable[[], ClientData | Node],
    *,
    client: int | None,
    memory: Path | None,
    modules: Iterable[str] = (),
    shares_memory: bool = False,
    policy: str | None = None,
) -> Node:
    """The node that a process serves.

    Args:
        load: what gives the client's rows, or a whole node; it is called after the number of threads is set.
        client: the number of the client, which `ClientData` needs.
        memory: the folder in which client memory is kept; without one it ends with the process.
        modules: modules with works of one's own that a server may name; the path of a `.py` file stands for the
            module in it.
        shares_memory: whether the server may ask for client memory, for its records.
        policy: the path of a policy file; COTERIE_NODE_POLICY comes before it. Without either, a whole node keeps
            its own policy, and rows get the default one.
    """
    torch.set_num_threads(int(os.environ.get("COTERIE_THREADS", "1")))
    loaded = load()
    if isinstance(loaded, Node):
        loaded.policy = node_policy(policy, loaded.policy)
        return loaded
    if not isinstance(loaded, ClientData):
        raise UsageError(f"the loader returned a {type(loaded).__name__}; let it return a coterie.flower.ClientData.")
    if client is None:
        raise UsageError(NO_NUMBER)
    return loaded.node(
        client,
        modules=tuple(load_code(entry, "modules") if entry.endswith(".py") else entry for entry in modules),
        store=Store(client_folder(memory, client)),
        shares_memory=shares_memory,
        policy=node_policy(policy),
    )


def client_folder(memory: Path | None, client: int) -> Path | None:
    """Where the memory of one client is kept."""
    return None if memory is None else memory / f"client-{client}"


def read_config(text: str) -> Config:
    """The configuration that an app or a job carries; what it names of others' code must be admitted on this machine.

    The processes that `coterie run` starts itself inherit its consent.
    """
    tables = tomllib.loads(text)
    tables.pop("version", None)
    run = tables.get("run", {})
    names = [run.get("method", ""), run.get("problem", ""), *(run.get("baselines") or [])]
    if not all(isinstance(name, str) for name in names):
        raise UsageError("the configuration of this job names a method or problem that is no text.")
    require_admitted(plugins_in(names[0], names[1], names[2:]))
    return resolve(tables)
