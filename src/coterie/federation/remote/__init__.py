"""Clients at nodes: codec, node and engine without any particular network."""

from coterie.federation.remote.beside import Beside
from coterie.federation.remote.codec import CodecError, Limits, Message, Names
from coterie.federation.remote.engine import RemoteEngine
from coterie.federation.remote.exchange import Policy, Transport
from coterie.federation.remote.inprocess import InProcess
from coterie.federation.remote.messages import Trouble
from coterie.federation.remote.node import Node, Record, Store, node_for
from coterie.federation.remote.policy import PERMISSIVE, NodePolicy, node_policy
from coterie.federation.remote.roster import Address

__all__ = [
    "PERMISSIVE",
    "Address",
    "Beside",
    "CodecError",
    "InProcess",
    "Limits",
    "Message",
    "Names",
    "Node",
    "NodePolicy",
    "Policy",
    "Record",
    "RemoteEngine",
    "Store",
    "Transport",
    "Trouble",
    "node_for",
    "node_policy",
]
