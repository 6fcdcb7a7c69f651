"""Compressed replies on a network: a node sends messages of its results, and the server expands them.

The stage `stages/compression.py` makes and understands the messages. What a node has not sent yet of a work's uploads
is client memory: one tuple of errors per client and work, in versions that never change, kept where all client memory
is kept. The server's state holds the versions. So a repeated order adds the same errors again, and a resumed run
continues where it stopped.
"""

from typing import Any

import torch
from torch import Tensor

from coterie.federation.api import Call, Channel
from coterie.federation.remote.codec import digest
from coterie.federation.remote.expectations import Form
from coterie.federation.remote.messages import CompressOrder, MemoryVersions, Step
from coterie.federation.stages.compression import Compression, channel_draw
from coterie.federation.tree import Tree, tree_flatten, tree_unflatten
from coterie.numerics.sparse import Sparse


def compress_order(channel: Channel, step: Step, clients: tuple[int, ...], lost: set[int]) -> CompressOrder:
    """How the node of these clients compresses its reply.

    Args:
        channel: the compression, and the versions of what the clients have not sent yet.
        step: what they are asked for.
        clients: their numbers.
        lost: those among them whose node has lost what they remember; their errors begin at 0 again.
    """
    compression, errors = channel.compression, None
    if channel.errors is not None:
        versions = channel.errors.payload.versions.tolist()
        before = tuple(0 if k in lost else versions[k] for k in clients)
        named = digest((step, before))
        errors = MemoryVersions(before, tuple(digest(("errors", named, k)) for k in clients), None)
    return CompressOrder(compression.name, float(compression.ratio), compression.feedback, errors)


def message_form(call: Call, form: Form, compression: Compression) -> Form:
    """The form of what travels of one client's result, given that of the result."""
    parts: list[Any] = []
    leaves: list[Any] = []
    for leaf, count in zip(form.leaves, _counts(call, form, compression), strict=True):
        sparse = bool(count) and compression.name == "top-k"
        parts.append(Sparse(torch.empty(0), torch.empty(0)) if sparse else 0)
        values = (leaf[0], (count,)) if count else leaf
        leaves += [values, (torch.int32, (count,))] if sparse else [values]
    return Form(tree_flatten(tuple(parts))[1], tuple(leaves))


def expanded(call: Call, ids: Tensor, messages: tuple[Tree, ...], form: Form, compression: Compression) -> Tree:
    """The results that messages of these clients stand for.

    Args:
        call: what was asked.
        ids: the clients, [a], in the order of the rows of the messages.
        messages: what arrived, one per leaf of the result.
        form: the form of one client's result.
        compression: what the nodes compressed by.
    """
    draw, counts = channel_draw(call), _counts(call, form, compression)
    updates = list(messages)
    for i, (leaf, count) in enumerate(zip(form.leaves, counts, strict=True)):
        if count:
            flat = compression.understood(messages[i], torch.Size(leaf[1]).numel(), draw.step(i))
            updates[i] = flat.reshape(len(ids), *leaf[1])
    results = tree_flatten(call.results(ids, tree_unflatten(updates, form.structure)))[0]
    mixed = [result if count else whole for result, whole, count in zip(results, messages, counts, strict=True)]
    return tree_unflatten(mixed, form.structure)


def _counts(call: Call, form: Form, compression: Compression) -> list[int]:
    """How many numbers are sent of each leaf of a result; 0 where it is sent whole."""

    def like(leaf: Any) -> Any:
        return torch.empty((1, *leaf[1]), dtype=leaf[0], device="meta") if isinstance(leaf, tuple) else None

    return compression.cuts(call, tree_unflatten([like(leaf) for leaf in form.leaves], form.structure))
