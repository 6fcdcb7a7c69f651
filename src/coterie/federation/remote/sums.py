"""Secure sums at a node: the parties of its clients, and what it refuses."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.federation.remote.disclosures import Disclosures
from coterie.federation.remote.messages import SECURE, Order, SecureOrder, Step
from coterie.federation.remote.noise import gaussian
from coterie.federation.secure import Refusal, Secure, checked_library
from coterie.federation.secure.encoding import encoded
from coterie.federation.secure.party import Party
from coterie.federation.secure.primitives import BOX
from coterie.federation.secure.summing import Task, flat, question
from coterie.federation.tree import Tree, tree_flatten

SUMS = 4  # that a node keeps; older ones were given up by the server


@dataclass
class _Sum:
    """A sum in progress: the parties of this node's clients, and what is summed."""

    parties: dict[int, Party]
    task: Task | None = None
    senders: tuple[int, ...] = ()


class Sums:
    """The secure sums of one node.

    Args:
        disclosures: the account of the site, which knows the sums that were shown.
    """

    def __init__(self, disclosures: Disclosures) -> None:
        self._disclosures = disclosures
        self._open: dict[tuple[str, int], _Sum] = {}

    def answer(self, order: Order, run: Callable[[], Tree], partners: int) -> Tensor:
        """The answer to a question of a secure sum, one row per client of the order.

        Args:
            order: the order, whose fields are sound.
            run: runs the order's step; the results of its clients, stacked.
            partners: a client is hidden at least as in a sum of so many equals.
        """
        asked = order.secure
        assert asked is not None
        if order.kind == SECURE[0]:
            return self._keys(order, asked, partners)
        at = self._open.get((order.run, asked.phase))
        if at is None or not set(order.clients) <= at.parties.keys():
            raise Refusal("there is no such sum here: it was shown, given up, or never begun")
        if order.kind == SECURE[1]:
            return self._shares(order, asked, at)
        if order.kind == SECURE[2]:
            assert order.step is not None
            return self._masked(order, asked, at, order.step, run, partners)
        return self._reveal(order, asked, at, partners)

    def _keys(self, order: Order, asked: SecureOrder, partners: int) -> Tensor:
        checked_library(Refusal)
        at = self._open.setdefault((order.run, asked.phase), _Sum({}))
        if again := set(order.clients) & at.parties.keys():
            raise Refusal(f"client {min(again)} takes part in this sum already; every sum has keys of its own")
        while len(self._open) > SUMS:
            self._open.pop(next(iter(self._open)))
        secure = Secure(range=asked.range, partners=partners)
        at.parties |= {k: Party(k, order.run, asked.phase, secure) for k in order.clients}
        return _bytes([at.parties[k].keys() for k in order.clients])

    def _shares(self, order: Order, asked: SecureOrder, at: _Sum) -> Tensor:
        assert asked.keys is not None
        keys = dict(zip(asked.others, map(bytes, asked.keys.numpy()), strict=True))
        rows = []
        for k in order.clients:
            boxes = at.parties[k].shares(keys, asked.needed)
            rows.append(b"".join(boxes.get(other, bytes(BOX)) for other in asked.others))
        return _bytes(rows).reshape(len(rows), len(asked.others), BOX)

    def _masked(
        self, order: Order, asked: SecureOrder, at: _Sum, step: Step, run: Callable[[], Tree], partners: int
    ) -> Tensor:
        assert asked.boxes is not None
        assert asked.scales is not None
        if step.at_target:
            raise Refusal("the target's result is not summed")
        if float(asked.scales.abs().max()) > 1.0:
            raise Refusal("a coefficient exceeds 1")
        scales = dict(zip(asked.everyone, asked.scales.tolist(), strict=True))
        about = question(step.work, step.static, step.draw, step.shared)
        self._disclosures.check_sum(about, scales, partners)
        at.task, at.senders = Task(order.run, asked.phase, about, scales), asked.others
        leaves = tree_flatten(run())[0]
        rows = []
        for i, k in enumerate(order.clients):
            values = scales[k] * flat([leaf[i] for leaf in leaves])
            if order.noise is not None and order.noise.multiplier:
                part = order.noise.multiplier * order.noise.clip / math.sqrt(at.parties[k].needed)
                values = values + part * gaussian(len(values))
            words = encoded(values, at.parties[k].secure, len(asked.everyone))
            boxes = {
                other: bytes(box) for other, box in zip(asked.others, asked.boxes[i].numpy(), strict=True) if other != k
            }
            rows.append(at.parties[k].masked(boxes, at.task.about(asked.others), words).view(np.int64))
        return torch.from_numpy(np.stack(rows))

    def _reveal(self, order: Order, asked: SecureOrder, at: _Sum, partners: int) -> Tensor:
        if at.task is None:
            raise Refusal("nothing was summed yet")
        shown = {k: at.task.scales[k] for k in asked.others}
        self._disclosures.show_sum(at.task.question, shown, partners)  # before anything leaves
        rows = [at.parties[k].reveal(asked.others) for k in order.clients]
        senders = at.senders
        made = _bytes([b"".join(row[k] for k in senders) for row in rows])
        return made.reshape(len(rows), len(senders), -1)


def _bytes(rows: list[bytes]) -> Tensor:
    """Rows of bytes as a tensor."""
    return torch.from_numpy(np.stack([np.frombuffer(row, dtype=np.uint8) for row in rows]).copy())
