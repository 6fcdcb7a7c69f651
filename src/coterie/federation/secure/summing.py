"""The server's side of a secure sum, and sums among clients of this process, which are really masked too."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.errors import NoClients
from coterie.federation.api import Call, Engine, Failure, orderly, together
from coterie.federation.secure import Refusal, Secure
from coterie.federation.secure.encoding import Numbers, decoded, encoded
from coterie.federation.secure.party import STAGES, Party, unmasking
from coterie.federation.secure.primitives import KEY, Words, context, factors, public_of, secret_of
from coterie.federation.tree import Tree, tree_flatten, tree_map, tree_unflatten
from coterie.federation.work import Each, Static, name_of

Answers = dict[int, Any]
Ask = Callable[[str, dict[int, Any]], Answers]
"""Asks clients one of the four questions, each with a message of its own; the replies of the clients that are there."""


class TooFew(NoClients):
    """A sum for which too few clients stayed: it fails, and nothing is shown."""

    failures: tuple[Failure, ...] = ()


class Sum(NamedTuple):
    """A sum that the server has learned.

    Args:
        numbers: Σ a_k u_k, flat.
        survivors: whose numbers are in it, ascending.
    """

    numbers: Numbers
    survivors: tuple[int, ...]


class Summed(NamedTuple):
    """The sum of a phase as the verbs need it.

    Args:
        values: Σ a_k u_k over the survivors, a tree of float64 tensors.
        like: the types that means over them shall have, a tree of dtypes.
        survivors: the clients in it, ascending.
        memory: what the survivors remember now, stacked, where the work has memory.
        failures: who is missing and why.
        traffic: bytes up and down by question.
    """

    values: list[Tensor]
    like: list[torch.dtype]
    structure: Any
    survivors: Tensor
    memory: Tree
    failures: tuple[Failure, ...]
    traffic: dict[str, tuple[int, int]]


class Task(NamedTuple):
    """What is summed: the run, the number of the sum, a digest of the question, and each client's coefficient."""

    run: str
    phase: int
    question: int
    scales: dict[int, float]

    def about(self, senders: Sequence[int]) -> bytes:
        """A digest of all that clients must agree on for their masks to cancel."""
        scales = ",".join(f"{k}:{self.scales[k].hex()}" for k in sorted(self.scales))
        return context("coterie", "mask", self.run, self.phase, self.question, scales, *map(str, sorted(senders)))


def new_phase() -> int:
    """A number for a sum, which no other sum has."""
    return secrets.randbits(62)


def question(work: str, static: Static | Mapping[str, Any], draw: int, shared: Tree) -> int:
    """A digest of a question to clients: the same for all of them, so without the rows that are each one's own.

    Args:
        work: the name of the work.
        static: its settings.
        draw: the key of its randomness; it counts where batches are drawn, and else changes nothing.
        shared: what clients are sent.
    """
    from coterie.federation.remote.codec import digest  # which is above: engines on networks use this module
    from coterie.federation.remote.policy import is_sampled

    def common(leaf: Any) -> Any:
        return None if isinstance(leaf, Each) else leaf

    return digest((work, dict(static), draw if is_sampled(static) else 0, tree_map(common, shared)))


def question_of(call: Call) -> int:
    """The question of a call."""
    return question(name_of(call.work), call.static, int(call.draw.key), call.shared)


@dataclass
class Summation:
    """One secure sum, seen from the server.

    Args:
        ask: reaches the clients.
        secure: the settings.
        task: what is summed.
        seen: everything that the server received, by question and client.
        traffic: bytes up and down by question.
    """

    ask: Ask
    secure: Secure
    task: Task
    seen: dict[str, Answers] = field(default_factory=dict)
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)

    def run(self) -> Sum:
        """The sum over the clients that stay; `TooFew` where too few do."""
        asked = sorted(self.task.scales)
        needed = self.secure.needed(len(asked))
        publics = self._asked("keys", dict.fromkeys(asked, b""), needed)
        everyone = dict(sorted(publics.items()))
        boxes = self._asked("shares", dict.fromkeys(everyone, (everyone, needed)), needed)
        senders = sorted(boxes)
        letters = {k: {sender: boxes[sender][k] for sender in senders if sender != k} for k in senders}
        uploads = self._asked("masked", letters, needed)
        survivors = sorted(uploads)
        shown = self._asked("reveal", {k: tuple(survivors) for k in survivors}, needed)
        return Sum(self._unmasked(uploads, senders, shown, everyone, needed), tuple(survivors))

    def _unmasked(
        self, uploads: Answers, senders: Sequence[int], shown: Answers, publics: Mapping[int, bytes], needed: int
    ) -> Numbers:
        places = {client: place for place, client in enumerate(sorted(publics), 1)}
        helpers = sorted(shown)[:needed]
        weights = factors([places[k] for k in helpers])
        seeds: dict[int, bytes] = {}
        privates: dict[int, bytes] = {}
        for client in senders:
            secret = secret_of({places[k]: shown[k][client] for k in helpers}, weights)
            stayed = client in uploads
            if secret is None or (not stayed and public_of(secret) != publics[client][KEY:]):
                raise TooFew(f"shares of client {client} do not fit together, so the sum cannot be unmasked")
            (seeds if stayed else privates)[client] = secret
        try:
            words = unmasking(uploads, privates, publics, seeds, self.task.about(senders))
        except ValueError as error:  # a public key that is none
            raise TooFew(f"the sum cannot be unmasked: {error}") from None
        return decoded(words, self.secure, len(self.task.scales))

    def _asked(self, stage: str, messages: dict[int, Any], needed: int) -> Answers:
        answers = self.ask(stage, messages)
        self.seen[stage] = answers
        down = sum(map(size_of, messages.values()))
        self.traffic[stage] = sum(map(size_of, answers.values())), down
        if len(answers) < needed:
            raise TooFew(
                f"{len(answers)} of {len(self.task.scales)} clients answered ({stage}), and a secure sum needs {needed}"
            )
        return answers


def size_of(message: Any) -> int:
    """Bytes of what is sent in a message of the protocol; a number of a client takes 8."""
    if isinstance(message, bytes):
        return len(message)
    if isinstance(message, np.ndarray):
        return message.nbytes
    if isinstance(message, Mapping):
        return sum(8 + size_of(value) for value in message.values())
    if isinstance(message, tuple | list):
        return sum(map(size_of, message))
    return 8


def secure_sum(engine: Engine, call: Call, ids: Tensor, scales: Tensor, secure: Secure) -> Summed:
    """Σ a_k u_k over clients of any engine; one on a network has the protocol in its nodes.

    Args:
        engine: where the clients are.
        call: what each of them computes.
        ids: the clients, ascending.
        scales: their coefficients, [a].
        secure: the settings.
    """
    own = getattr(engine, "secure_sum", None)
    if own is not None:
        found: Summed = own(call, ids, scales, secure)
        return found
    return _in_process(engine, call, ids, scales, secure)


def _in_process(engine: Engine, call: Call, ids: Tensor, scales: Tensor, secure: Secure) -> Summed:
    """The protocol among clients of this process, each with keys of its own."""
    clients = ids.tolist()
    failures: list[Failure] = []
    words: dict[int, Words] = {}
    replies = next(map(orderly, together(engine.execute(call, ids))), None)
    leaves, structure = ([], None) if replies is None else tree_flatten(replies.values)
    if replies is not None:
        failures += replies.failures
        coefficients = dict(zip(clients, scales.tolist(), strict=True))
        for i, client in enumerate(replies.ids.tolist()):
            try:
                words[client] = encoded(coefficients[client] * flat([leaf[i] for leaf in leaves]), secure, len(clients))
            except Refusal as refusal:
                failures.append(Failure(client, "rejected", str(refusal)))
    task = Task("here", new_phase(), question_of(call), dict(zip(clients, scales.tolist(), strict=True)))
    parties = {k: Party(k, task.run, task.phase, secure) for k in clients}

    def ask(stage: str, messages: dict[int, Any]) -> Answers:
        return {k: answer(parties[k], stage, message, task, words[k]) for k, message in messages.items() if k in words}

    summation = Summation(ask, secure, task)
    try:
        total = summation.run()
    except TooFew as error:
        error.failures = tuple(failures)
        raise
    survivors = torch.tensor(total.survivors, device=ids.device)
    assert replies is not None
    kept = torch.isin(replies.ids, survivors)
    memory = replies.only(kept).memory if call.memory is not None else None
    shapes = [(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    values, like = unflattened(total.numbers, shapes, ids.device)
    return Summed(values, like, structure, survivors, memory, tuple(failures), summation.traffic)


def answer(party: Party, stage: str, message: Any, task: Task, words: Words) -> Any:
    """What a client answers to one question of the protocol."""
    if stage == "keys":
        return party.keys()
    if stage == "shares":
        return party.shares(*message)
    if stage == "masked":
        return party.masked(message, task.about([party.client, *message]), words)
    return party.reveal(message)


def flat(leaves: Sequence[Tensor]) -> Numbers:
    """Tensors as one row of numbers."""
    parts = [leaf.detach().cpu().double().reshape(-1).numpy() for leaf in leaves]
    return np.concatenate(parts) if parts else np.zeros(0)


def unflattened(
    numbers: Numbers, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> tuple[list[Tensor], list[torch.dtype]]:
    """A row of numbers as tensors of these shapes, and the types that their means shall have."""
    values, like, at = [], [], 0
    for shape, dtype in shapes:
        count = torch.Size(shape).numel()
        values.append(torch.from_numpy(numbers[at : at + count].copy()).reshape(shape).to(device))
        like.append(dtype if dtype.is_floating_point else torch.get_default_dtype())
        at += count
    return values, like


def mean_of(summed: Summed, mass: float) -> Tree:
    """The sum over its weight, in the types that the replies have."""
    leaves = [(value / mass).to(dtype) for value, dtype in zip(summed.values, summed.like, strict=True)]
    return tree_unflatten(leaves, summed.structure)


__all__ = ["STAGES", "Ask", "Sum", "Summation", "Summed", "Task", "TooFew", "mean_of", "question", "secure_sum"]
