"""Vectors with few entries, as they are sent: k values and k indices of four bytes each."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sparse(NamedTuple):
    """Values [..., k] and where they stand, [..., k] int32."""

    values: Tensor
    places: Tensor

    def dense(self, dimension: int) -> Tensor:
        """The vector [..., dimension]; entries that are not named are 0, and names of no entry are ignored."""
        places = self.places.long()
        inside = (places >= 0) & (places < dimension)
        zeros = self.values.new_zeros(*self.values.shape[:-1], dimension + 1)  # the last is for what is ignored
        return zeros.scatter(-1, torch.where(inside, places, dimension), self.values)[..., :dimension]

    @staticmethod
    def nothing(k: int, like: Tensor) -> "Sparse":
        """A message of k zeros, at the first k places."""
        return Sparse(like.new_zeros(k), torch.arange(k, dtype=torch.int32, device=like.device))


def top_k(v: Tensor, k: int) -> Sparse:
    """The k entries of largest magnitude. ‖v − top_k(v)‖² ≤ (1 − k/d) ‖v‖²."""
    index = v.abs().topk(k, dim=-1).indices
    return Sparse(v.gather(-1, index), index.to(torch.int32))


def largest(scores: Tensor, k: int) -> Tensor:
    """Which k entries of each row are largest, [..., n] bool; of equal ones the first, and NaN counts as infinite.

    By the k-th value and not by sorting, which takes five times as long.

    Args:
        scores: one or more rows of numbers, [..., n].
        k: how many of each row, 1 ≤ k ≤ n.

    Example:
        >>> largest(torch.tensor([3.0, 1.0, 3.0, 3.0]), 2)
        tensor([ True, False,  True, False])
    """
    scores = torch.where(scores.isnan(), torch.inf, scores)
    least = scores.kthvalue(scores.shape[-1] - k + 1, dim=-1, keepdim=True).values
    over, tied = scores > least, scores == least
    return over | (tied & (tied.cumsum(-1, dtype=torch.int32) <= k - over.sum(-1, keepdim=True)))
