"""Randomness as a pure function of (seed, round, phase, client, step, slot).

A draw is a 64-bit key; every coordinate is folded into it by the finaliser of SplitMix64, and the slot-th number of
a draw is the hash of key and slot. There is no generator and no hidden state, so a number does not depend on which
clients are present, in which order or where they are computed, or whether the run was interrupted. Keys are tensors:
under `vmap`, or with a vector of client ids, one call draws for all clients.
"""

from dataclasses import dataclass, field
from math import prod, tau
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.numerics.control import transformed
from coterie.numerics.roots import square_root
from coterie.numerics.tracing import recording

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_COORDINATES = {"seed": 1, "round": 2, "phase": 3, "client": 4, "step": 5}
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_STRIDE, _FACTOR1, _FACTOR2 = map(_signed, (_GOLDEN, _MIX1, _MIX2))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (int64's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FACTOR1
    x = (x ^ _shift(x, 27)) * _FACTOR2
    return x ^ _shift(x, 31)


def _mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` of unsigned words."""
    for bits, factor in ((30, _MIX1), (27, _MIX2)):
        x = x ^ (x >> np.uint64(bits))
        x *= np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def _plain(x: Tensor) -> bool:
    """Whether a tensor's numbers lie in this process's memory, with nothing around that must see the operations."""
    return type(x) is Tensor and x.device.type == "cpu" and not transformed() and not recording()


def _mix_word(x: int) -> int:
    """`_mix` of one unsigned word."""
    x = ((x ^ (x >> 30)) * _MIX1) & _WORD
    x = ((x ^ (x >> 27)) * _MIX2) & _WORD
    return x ^ (x >> 31)


_SLOTS = torch.arange(1, (1 << 16) + 1, dtype=torch.int64) * _STRIDE
"""The words of the first slots. To a compiler they are constants, which products of torch.arange would not be."""


def _slots(n: int, device: torch.device) -> Tensor:
    """The words of slots 1 … n."""
    if n > len(_SLOTS):
        return torch.arange(1, n + 1, dtype=torch.int64, device=device) * _STRIDE
    return _SLOTS[:n] if device.type == "cpu" else _SLOTS[:n].to(device)


@dataclass(frozen=True)
class Draw:
    """A place in the tree of random numbers. Fold in coordinates, then ask for values.

    Args:
        key: all coordinates, as one word.
        label: the names of the phases, for errors.
    """

    key: Tensor
    label: str = field(default="", kw_only=True)

    @staticmethod
    def of(seed: int, device: torch.device | str = "cpu") -> "Draw":
        """The root for one seed."""
        return Draw(torch.zeros((), dtype=torch.int64, device=device))._fold("seed", seed)

    def round(self, index: int) -> "Draw":
        """The draws of one round."""
        return self._fold("round", index)

    def phase(self, name: str) -> "Draw":
        """The draws of one named purpose within a round."""
        label = f"{self.label}/{name}" if self.label else name
        return Draw(self._fold("phase", crc32(name.encode())).key, label=label)

    def client(self, ids: int | Tensor) -> "Draw":
        """The draws of one client, or of each of a vector of clients."""
        return self._fold("client", ids)

    def step(self, index: int | Tensor) -> "Draw":
        """The draws of one local step."""
        return self._fold("step", index)

    def _fold(self, coordinate: str, value: int | Tensor) -> "Draw":
        tag = _COORDINATES[coordinate]
        if self.key.dim() == 0 and _plain(self.key):
            # in Python's integers: a single key is not worth twenty tensor operations
            salted = _mix_word((int(self.key) * _GOLDEN + tag) & _WORD)
            if not isinstance(value, Tensor) or value.dim() == 0:
                mixed = _signed(_mix_word(salted ^ (int(value) & _WORD)))
                return Draw(torch.scalar_tensor(mixed, dtype=torch.int64), label=self.label)
            return Draw(_mix(value.to(torch.int64) ^ _signed(salted)), label=self.label)
        # A vector of int32 ids would otherwise turn the scalar key into int32.
        word = value.to(torch.int64) if isinstance(value, Tensor) else _signed(int(value))
        return Draw(_mix(_mix(self.key * _STRIDE + tag) ^ word), label=self.label)

    def bits(self, *shape: int) -> Tensor:
        """Uniform int64 words of shape key.shape + shape."""
        count = prod(shape)
        if count <= len(_SLOTS) and self.key.dim() == 0 and _plain(self.key):
            return torch.from_numpy(self._words(count).view(np.int64)).view(shape)
        words = _mix(self.key[..., None] + _slots(count, self.key.device))
        return words.reshape((*self.key.shape, *shape))

    def _words(self, count: int) -> NDArray[np.uint64]:
        """The first words of a single key, by numpy: it starts an operation in a fraction of torch's time."""
        return _mix_array(_SLOTS[:count].numpy().view(np.uint64) + np.uint64(int(self.key) & _WORD))

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform on [0, 1), with every bit of the dtype's mantissa random."""
        digits = _DIGITS[dtype]
        return _shift(self.bits(*shape), 64 - digits).to(dtype) * 2.0**-digits

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard Gaussians (Box and Muller)."""
        u = self.uniform(2, *shape, dtype=dtype)
        radius, angle = u.unbind(self.key.dim())
        return square_root(-2.0 * torch.log1p(-radius)) * torch.cos(tau * angle)

    def sphere(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform on the unit sphere of R^n."""
        v = self.normal(n, dtype=dtype)
        return v / v.norm(dim=-1, keepdim=True)

    def bernoulli(self, probability: float, *shape: int) -> Tensor:
        """True with the given probability."""
        return self.uniform(*shape, dtype=torch.float32) < probability

    def integers(self, high: int | Tensor, *shape: int) -> Tensor:
        """Uniform on {0 … high − 1}, high < 2³¹; high may be one number per key."""
        if isinstance(high, Tensor):
            high = high.reshape(high.shape + (1,) * len(shape))
        return (_shift(self.bits(*shape), 33) * high) >> 31

    def batches(self, count: int | Tensor, size: int, steps: int) -> Tensor:
        """Row numbers [steps, size] below count, with replacement: the batches of all local steps at once."""
        return self.integers(count, steps, size)

    def of_batch(self, index: Tensor) -> Tensor:
        """Keys [size] of a batch's rows: by all row numbers of the batch, and by the place in it."""
        place = _slots(index.shape[-1], index.device)
        whole = _mix(self.key + _mix(index + place).sum(-1))
        return _mix(whole[..., None] + place)

    def permutation(self, n: int, count: int | Tensor | None = None) -> Tensor:
        """A random order of {0 … n − 1}; with count ≤ n, the numbers below count come first."""
        words = _shift(self.bits(n), 1)
        if count is not None:
            below = torch.arange(n, device=words.device) < (count[..., None] if isinstance(count, Tensor) else count)
            words = torch.where(below, words, torch.iinfo(torch.int64).max)
        return words.argsort(dim=-1, stable=True)

    def subset(self, n: int, size: int, count: int | Tensor | None = None) -> Tensor:
        """size distinct numbers below n (below count, if given), ascending."""
        if count is None and 0 < size <= n <= len(_SLOTS) and self.key.dim() == 0 and _plain(self.key):
            words = self._words(n) >> np.uint64(1)
            chosen = np.flatnonzero(words <= np.partition(words, size - 1)[size - 1])
            if len(chosen) == size:  # unless two words are equal: the order decides
                return torch.from_numpy(chosen)
        return self.permutation(n, count)[..., :size].sort(dim=-1).values
