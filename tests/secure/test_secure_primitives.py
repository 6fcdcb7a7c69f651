"""Keys, shares and fixed point: what they must do, and what they must refuse."""

import secrets

import numpy as np
import pytest

from coterie.errors import UsageError
from coterie.federation.secure import Refusal, Secure
from coterie.federation.secure import primitives as p
from coterie.federation.secure.encoding import decoded, encoded
from coterie.federation.secure.exposure import Exposure, leverages

pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")


def test_both_sides_agree_on_a_key_and_another_context_gives_another() -> None:
    (a, pa), (b, pb) = p.key_pair(), p.key_pair()
    about = p.context("mask", 1, 2)
    assert p.agreed(a, pb, about) == p.agreed(b, pa, about)
    assert p.agreed(a, pb, about) != p.agreed(a, pb, p.context("mask", 12))
    assert p.public_of(a) == pa


def test_the_stream_is_that_of_rfc_8439() -> None:
    """The first block of ChaCha20 for a key of zeros, a nonce of zeros and a counter of 0 (RFC 8439, A.1, vector 1)."""
    words = p.stream(bytes(32), 8)
    expected = bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert words.astype("<u8").tobytes() == expected


def test_a_box_opens_with_its_key_in_its_context_only() -> None:
    key, box = bytes(32), p.sealed(bytes(32), b"share", b"here")
    assert p.opened(key, box, b"here") == b"share"
    assert p.opened(key, box, b"there") is None
    assert p.opened(secrets.token_bytes(32), box, b"here") is None
    assert p.opened(key, bytes([box[0] ^ 1]) + box[1:], b"here") is None


def test_shares_give_the_secret_and_too_few_do_not() -> None:
    secret = secrets.token_bytes(32)
    shares = dict(enumerate(p.split(secret, 7, 4), 1))
    for chosen in ((1, 2, 3, 4), (7, 5, 3, 1), (2, 4, 6, 7)):
        assert p.secret_of({k: shares[k] for k in chosen}) == secret
    assert p.secret_of({k: shares[k] for k in (1, 2, 3)}) != secret
    assert p.secret_of({**{k: shares[k] for k in (1, 2, 3)}, 4: shares[5]}) != secret


def test_three_shares_of_four_fit_every_secret() -> None:
    """What too few shares leave open is everything: for any other secret there is a fourth share."""
    shares = dict(enumerate(p.split(bytes(32), 4, 4), 1))
    other = int.from_bytes(secrets.token_bytes(32), "little")
    weights = p.factors([1, 2, 3, 4])
    rest = sum(w * int.from_bytes(shares[k], "little") for k, w in zip((1, 2, 3), weights, strict=False))
    fourth = (other - rest) * pow(weights[3], -1, p.PRIME) % p.PRIME
    forged = {**{k: shares[k] for k in (1, 2, 3)}, 4: fourth.to_bytes(p.SHARE, "little")}
    assert p.secret_of(forged) == other.to_bytes(32, "little")


def test_sums_of_words_are_words_of_sums() -> None:
    secure, rng = Secure(), np.random.default_rng(0)
    values = rng.normal(size=(10, 100)) * 1e3
    total = np.sum([encoded(v, secure, 10) for v in values], axis=0, dtype=np.uint64)
    assert np.abs(decoded(total, secure, 10) - values.sum(0)).max() <= 10 * 2.0 ** -(secure.bits(10) + 1)


def test_the_range_holds_for_everybody_at_its_end() -> None:
    secure = Secure(range=3.0)
    for sign in (-1.0, 1.0):
        words = [encoded(np.array([3.0 * sign]), secure, 50) for _ in range(50)]
        assert decoded(np.sum(words, axis=0, dtype=np.uint64), secure, 50)[0] == 150.0 * sign


@pytest.mark.parametrize(("value", "said"), [(3.1, "exceeds"), (np.nan, "not finite"), (-np.inf, "not")])
def test_what_does_not_fit_is_refused(value: float, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        encoded(np.array([0.0, value]), Secure(range=3.0), 3)


@pytest.mark.parametrize(
    ("secure", "clients", "said"),
    [(Secure(), 1, "single updates"), (Secure(partners=4), 3, "partners = 4"), (Secure(range=1e18), 50, "lower it")],
)
def test_settings_that_cannot_hold_are_refused(secure: Secure, clients: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        secure.check(clients)


def test_leverage_is_one_where_a_client_can_be_computed() -> None:
    both = leverages(np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]))
    assert both == pytest.approx([0.5, 0.5, 1.0])
    w = np.array([0.6, 0.3, 0.1])
    assert leverages(w[None]) == pytest.approx(w**2 / (w**2).sum())


def test_the_same_question_with_other_partners_is_refused() -> None:
    exposure = Exposure()
    everyone, without = {0: 1.0, 1: 1.0, 2: 1.0}, {0: 1.0, 1: 1.0}
    exposure.check(7, everyone, 2)
    exposure.note(7, everyone)
    exposure.check(7, everyone, 2)  # the same again tells nothing new
    exposure.check(8, without, 2)  # another question
    with pytest.raises(Refusal, match="100% of the update of client 2"):
        exposure.check(7, without, 2)


def test_a_weight_that_shows_one_client_is_refused() -> None:
    with pytest.raises(Refusal, match="of the update of client 1"):
        Exposure().check(1, {0: 0.1, 1: 1.0, 2: 0.1}, 2)
