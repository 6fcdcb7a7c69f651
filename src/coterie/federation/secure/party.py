"""A client's side of one secure sum. It answers four questions, each once and in order, or refuses by name."""

import secrets
from collections.abc import Mapping, Sequence

import numpy as np

from coterie.federation.secure import Refusal, Secure
from coterie.federation.secure.primitives import (
    KEY,
    SHARE,
    Words,
    agreed,
    context,
    derived,
    key_pair,
    opened,
    sealed,
    split,
    stream,
)

Keys = Mapping[int, bytes]
STAGES = ("keys", "shares", "masked", "reveal")


class Party:
    """One client in one sum.

    Args:
        client: its number.
        run: the name of the run.
        phase: the number of the sum.
        secure: what the client asks of a sum.
    """

    def __init__(self, client: int, run: str, phase: int, secure: Secure) -> None:
        self.client, self.run, self.phase, self.secure = client, run, phase, secure
        self._sealing, self._masking = key_pair(), key_pair()
        self._seed = secrets.token_bytes(KEY)
        self._publics: dict[int, bytes] = {}
        self._received: dict[int, bytes] = {}
        self.needed = 0
        self._next = 0

    def keys(self) -> bytes:
        """Both public keys: that for sealing, then that for masks."""
        self._turn("keys")
        return self._sealing[1] + self._masking[1]

    def shares(self, publics: Keys, needed: int) -> dict[int, bytes]:
        """The boxes with the shares for all others, by receiver.

        Args:
            publics: the public keys of all clients of the sum, with one's own.
            needed: how many of them must stay to the end.
        """
        self._turn("shares")
        if publics.get(self.client) != self._sealing[1] + self._masking[1]:
            raise Refusal("the list of keys does not hold this client's own")
        if len(publics) < max(2, self.secure.partners):
            raise Refusal(f"a sum of {len(publics)} would show single updates; partners = {self.secure.partners}")
        if not len(publics) / 2 < needed <= len(publics):
            raise Refusal(f"a threshold of {needed} of {len(publics)} clients; it must be above a half")
        if len(set(publics.values())) < len(publics):
            raise Refusal("two clients have the same keys")
        self._publics, self.needed = dict(publics), needed
        places = self._places()
        seeds, privates = (split(secret, len(places), needed) for secret in (self._seed, self._masking[0]))
        boxes = {}
        for receiver, place in places.items():
            inside = seeds[place - 1] + privates[place - 1]
            if receiver == self.client:
                self._received[receiver] = inside
            else:
                about = self._about("share", self.client, receiver)
                boxes[receiver] = sealed(agreed(self._sealing[0], publics[receiver][:KEY], about), inside, about)
        return boxes

    def masked(self, boxes: Mapping[int, bytes], about: bytes, words: Words) -> Words:
        """The words under all masks.

        Args:
            boxes: the boxes for this client, by sender; whoever sent none has left.
            about: a digest of what is summed. Clients that were told different things have masks that do not cancel.
            words: the encoded numbers.
        """
        self._turn("masked")
        if not boxes.keys() <= self._publics.keys() - {self.client}:
            raise Refusal("a share of a client that is not in this sum")
        if len(boxes) + 1 < self.needed:
            raise Refusal(f"{len(boxes) + 1} clients are left of {self.needed} that are needed")
        for sender, box in boxes.items():
            of = self._about("share", sender, self.client)
            inside = opened(agreed(self._sealing[0], self._publics[sender][:KEY], of), box, of)
            if inside is None or len(inside) != 2 * SHARE:
                raise Refusal(f"the share of client {sender} was altered, or is of another sum")
            self._received[sender] = inside
        total: Words = words + stream(derived(self._seed, about), len(words))
        for other in boxes:
            mask = stream(agreed(self._masking[0], self._publics[other][KEY:], about), len(words))
            total = total + mask if self.client < other else total - mask
        return total

    def reveal(self, survivors: Sequence[int]) -> dict[int, bytes]:
        """One share of each client of the sum: of its seed where its numbers arrived, else of its private key.

        Args:
            survivors: the clients whose numbers arrived.
        """
        self._turn("reveal")
        stayed = set(survivors)
        if len(stayed) < len(survivors) or not stayed <= self._received.keys() or self.client not in stayed:
            raise Refusal("the list of survivors does not fit the sum")
        if len(stayed) < max(self.needed, self.secure.partners):
            raise Refusal(f"a sum of {len(stayed)} clients would be shown, and {self.needed} are needed")
        return {k: both[:SHARE] if k in stayed else both[SHARE:] for k, both in self._received.items()}

    def _places(self) -> dict[int, int]:
        return {client: place for place, client in enumerate(sorted(self._publics), 1)}

    def _about(self, kind: str, sender: int, receiver: int) -> bytes:
        return context("coterie", kind, self.run, self.phase, sender, receiver)

    def _turn(self, stage: str) -> None:
        """Each question once, in order: a second answer could be compared with the first."""
        at = STAGES.index(stage)
        if at != self._next:
            raise Refusal(f"{stage!r} was asked out of turn in this sum; each question is answered once")
        self._next = at + 1


def unmasking(
    uploads: Mapping[int, Words],
    dropped: Mapping[int, bytes],
    publics: Keys,
    seeds: Mapping[int, bytes],
    about: bytes,
) -> Words:
    """The sum of what is under the masks, by the server.

    Args:
        uploads: the masked words of the clients that stayed.
        dropped: the private keys for masks of the clients that left after they had sent shares.
        publics: all public keys.
        seeds: the seeds of the clients that stayed.
        about: the digest of what is summed.
    """
    total: Words = np.sum(np.stack(list(uploads.values())), axis=0, dtype=np.uint64)
    for seed in seeds.values():
        total = total - stream(derived(seed, about), len(total))
    for gone, private in dropped.items():
        for client in uploads:
            mask = stream(agreed(private, publics[client][KEY:], about), len(total))
            total = total - mask if client < gone else total + mask
    return total
