"""Large tensors in memory that is used again.

The C library gives large pieces back to the system when they are freed, and fresh pages cost more than the arithmetic
on them: a step of ResNet-18 spent an eighth of its time on being given a gradient and new weights. Here a piece stays,
and is used again once no tensor has it, views included.
"""

from math import prod
from threading import Lock
from typing import NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from coterie.numerics.control import transformed
from coterie.numerics.tracing import recording

LARGE = 1 << 20  # numbers; smaller pieces the C library keeps itself
KEPT = 1 << 29  # bytes in all
ALIGNED = 64  # bytes, as torch does it: the bits of some products depend on it


class _Piece(NamedTuple):
    """Memory, and the array through which a tensor has it; when the tensor is gone, so is the array."""

    memory: np.ndarray
    lent: "ref[np.ndarray]"


class _Pieces:
    """Pieces that may be in use. Where there are too many the oldest go; tensors that have them are not concerned."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._lock = Lock()

    def take(self, size: int) -> Tensor:
        """An idle piece of this many bytes, else a new one."""
        with self._lock:  # else two threads might take the same
            for i, piece in enumerate(self._pieces):
                if piece.memory.nbytes == size + ALIGNED and piece.lent() is None:
                    self._pieces[i], tensor = _lent(piece.memory)
                    return tensor
            piece, tensor = _lent(np.empty(size + ALIGNED, np.uint8))
            self._pieces.append(piece)
            while sum(one.memory.nbytes for one in self._pieces) > KEPT:
                del self._pieces[0]
            return tensor


def _lent(memory: np.ndarray) -> tuple[_Piece, Tensor]:
    start = -memory.ctypes.data % ALIGNED
    part = memory[start : start + memory.nbytes - ALIGNED]
    return _Piece(memory, ref(part)), torch.from_numpy(part)


_PIECES = _Pieces()


def empty_like(x: Tensor, *shape: int) -> Tensor:
    """A contiguous tensor of any numbers, of x's type and at its device.

    Args:
        x: the tensor to be like.
        shape: another shape than that of x.

    Example:
        >>> empty_like(torch.ones(3), 4, 2).shape
        torch.Size([4, 2])
    """
    wanted = shape or tuple(x.shape)
    if prod(wanted) < LARGE or x.device.type != "cpu" or _seen():
        return x.new_empty(wanted)
    return _PIECES.take(prod(wanted) * x.element_size()).view(x.dtype).view(wanted)


def stepped(x: Tensor, direction: Tensor, step: float) -> Tensor:
    """x − step · direction, as a new tensor.

    Args:
        x: where from.
        direction: a tensor like x.
        step: how far.

    Example:
        >>> stepped(torch.ones(2), torch.tensor([1.0, 2.0]), 0.5)
        tensor([0.5000, 0.0000])
    """
    plain = x.shape == direction.shape and x.dtype == direction.dtype and x.device == direction.device
    if not plain or x.numel() < LARGE or _seen(x, direction):
        return torch.sub(x, direction, alpha=step)
    return torch.sub(x, direction, alpha=step, out=empty_like(x))


def _seen(*tensors: Tensor) -> bool:
    """Whether something watches what is computed, or differentiates it."""
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return differentiated or transformed() or recording()


__all__ = ["LARGE", "empty_like", "stepped"]
