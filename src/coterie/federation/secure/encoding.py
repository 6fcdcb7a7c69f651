"""Real numbers as words of 64 bits, in fixed point: sums of words are words of sums."""

import numpy as np
from numpy.typing import NDArray

from coterie.federation.secure import Refusal, Secure
from coterie.federation.secure.primitives import Words

Numbers = NDArray[np.float64]


class Unfit(Refusal):
    """Numbers that cannot be summed; how large they are is not told."""


def encoded(values: Numbers, secure: Secure, clients: int) -> Words:
    """The words of some numbers; numbers that are not finite or out of range are refused, never cut.

    Args:
        values: the numbers.
        secure: the settings of the run, among them the range.
        clients: how many clients the sum is over.
    """
    largest = float(np.abs(values).max(initial=0.0))
    if not np.isfinite(largest):
        raise Unfit("not finite")
    if largest > secure.range:
        raise Unfit(f"a number exceeds federation.range = {secure.range:g} in magnitude; raise it")
    words: Words = np.rint(values * 2.0 ** secure.bits(clients)).astype(np.int64).view(np.uint64)
    return words


def decoded(words: Words, secure: Secure, clients: int) -> Numbers:
    """The numbers of words."""
    numbers: Numbers = words.view(np.int64) / 2.0 ** secure.bits(clients)
    return numbers
