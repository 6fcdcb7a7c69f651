"""Secure sums: the server learns the sum over clients of what they computed, and no summand.

The protocol is that of Bonawitz et al. (2017, "Practical secure aggregation for privacy-preserving machine learning")
for a server that follows it and is curious. Every sum has keys of its own, so that no mask is used twice:

    keys     each client draws two X25519 key pairs and shows the public keys
    shares   each client draws a seed, and splits the seed and its second private key among all clients by Shamir's
             scheme; each share is sealed for its receiver and goes through the server
    masked   each client encodes its numbers in fixed point, adds the stream of its seed, and for every other client the
             stream of their common key: plus for one of the two, minus for the other. All arithmetic is modulo 2^64
    reveal   the clients that are still there show their shares of the seeds of those whose numbers arrived, and of the
             private keys of those who left before. So the server takes off exactly the masks that do not cancel

Primitives are those of the package `cryptography`: X25519, HKDF with SHA-256, ChaCha20 for streams, ChaCha20-Poly1305
for shares. Shamir's scheme is in Python integers modulo the prime 2^521 − 1. Flower ships the same protocol; its pieces
are not used here, because its masks come from NumPy's generator with a seed of 32 bits, which can be tried out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

from coterie.errors import RunError, UsageError

FEWEST_BITS = 8


class Refusal(RunError):
    """A client does not do what it is asked for in a secure run, and why."""


@dataclass(frozen=True)
class Secure:
    """What a secure run promises.

    Args:
        reveal: the most numbers that one client shows by one `gather`.
        threshold: the share of the clients of a sum that must stay to the end; above a half.
        range: the largest magnitude of a number that can be summed.
        partners: a client is hidden at least as well as in a sum of so many equals.

    Example:
        >>> Secure().needed(10), Secure().needed(3)
        (7, 2)
    """

    reveal: int = 4
    threshold: float = 2 / 3
    range: float = 1e6
    partners: int = 2

    def needed(self, clients: int) -> int:
        """How many of so many clients must stay to the end."""
        return max(self.partners, ceil(self.threshold * clients - 1e-9))

    def bits(self, clients: int) -> int:
        """Binary digits after the point, such that the sum over so many clients cannot overflow 64 bits."""
        return 62 - ceil(log2(self.range * clients))

    def check(self, clients: int, *, at: str = "federation") -> None:
        """Refuse settings with which no sum over so many clients can be made.

        Args:
            clients: how many take part in a sum.
            at: the table of the settings, for the error.
        """
        if clients < max(2, self.partners):
            raise UsageError(
                f"{at}.secure sums over {clients} client{'s' if clients != 1 else ''} would show single updates: "
                f"{at}.partners = {self.partners} asks for more; let more clients take part ({at}.count, {at}.active)."
            )
        if self.bits(clients) < FEWEST_BITS:
            raise UsageError(
                f"{at}.range = {self.range:g} for {clients} clients leaves {self.bits(clients)} binary digits after "
                f"the point of 64; lower it to at most {2.0 ** (62 - FEWEST_BITS) / clients:.2g}."
            )


def checked_library(missing: Callable[[str], Exception] = UsageError) -> None:
    """Refuse to begin without the package `cryptography`."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise missing(
            "federation.secure needs the package cryptography; install it by: pip install 'coterie[secure]'."
        ) from None
