"""Keys, streams, sealed boxes and shares: thin calls of the package `cryptography`, and Shamir's scheme."""

import secrets
from collections.abc import Mapping, Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
KEY = 32  # bytes
PRIME = 2**521 - 1
SHARE = 66  # bytes of a number below the prime
KEYS = 2 * KEY  # bytes of a client's two public keys
BOX = 2 * SHARE + 16  # bytes of two shares, sealed
_ONCE = bytes(12)  # every key seals one box, so the nonce may be constant


def key_pair() -> tuple[bytes, bytes]:
    """A private and a public key of X25519, from the operating system's entropy."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    private = X25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def public_of(private: bytes) -> bytes:
    """The public key of a private one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def context(*parts: bytes | str | int) -> bytes:
    """A digest of parts in order; no two lists of parts have the same."""
    state = sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()


def derived(secret: bytes, about: bytes) -> bytes:
    """A key for one use from a secret (HKDF with SHA-256)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY, salt=None, info=about).derive(secret)


def agreed(private: bytes, public: bytes, about: bytes) -> bytes:
    """The key for one use that two clients derive from their key pairs (X25519, then HKDF)."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return derived(secret, about)


def stream(key: bytes, count: int) -> Words:
    """So many words of the stream of a key (ChaCha20)."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    made = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
    return np.frombuffer(made, dtype="<u8").astype(np.uint64, copy=False)


def sealed(key: bytes, inside: bytes, about: bytes) -> bytes:
    """A box that only who has the key can open, and that fits this context only (ChaCha20-Poly1305)."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(_ONCE, inside, about)


def opened(key: bytes, box: bytes, about: bytes) -> bytes | None:
    """What is inside a box; None where it was sealed with another key, for another context, or was altered."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(_ONCE, box, about)
    except InvalidTag:
        return None


def split(secret: bytes, places: int, needed: int) -> list[bytes]:
    """Shares of a secret for the places 1 … n, of which `needed` give the secret and fewer tell nothing of it."""
    coefficients = [int.from_bytes(secret, "little"), *(secrets.randbelow(PRIME) for _ in range(needed - 1))]
    return [_at(coefficients, x).to_bytes(SHARE, "little") for x in range(1, places + 1)]


def _at(coefficients: Sequence[int], x: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * x + coefficient) % PRIME
    return total


def factors(places: Sequence[int]) -> list[int]:
    """What the shares at these places are multiplied by, so that their sum is the secret (Lagrange, at 0)."""
    found = []
    for i in places:
        above, below = 1, 1
        for j in places:
            if j != i:
                above, below = above * j % PRIME, below * (j - i) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return found


def secret_of(shares: Mapping[int, bytes], weights: Sequence[int] | None = None) -> bytes | None:
    """The secret of shares by place; None where they are not shares of one secret of the right length.

    Args:
        shares: exactly as many as are needed.
        weights: `factors` of their places, where several secrets have the same ones.
    """
    weights = factors(list(shares)) if weights is None else weights
    pairs = zip(weights, shares.values(), strict=True)
    secret = sum(w * int.from_bytes(share, "little") for w, share in pairs) % PRIME
    return secret.to_bytes(KEY, "little") if secret < 1 << (8 * KEY) else None
