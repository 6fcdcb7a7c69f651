"""Clients at nodes: codec, node and engine without any particular network."""

from coterie.federation.remote.codec import CodecError, Limits, Message, Names
from coterie.federation.remote.engine import Address, Policy, RemoteEngine, Transport
from coterie.federation.remote.inprocess import InProcess
from coterie.federation.remote.messages import Trouble
from coterie.federation.remote.node import Node, Store, node_for

__all__ = [
    "Address",
    "CodecError",
    "InProcess",
    "Limits",
    "Message",
    "Names",
    "Node",
    "Policy",
    "RemoteEngine",
    "Store",
    "Transport",
    "Trouble",
    "node_for",
]
