"""Linear sketches S: R^d → R^p that are never sent: each is a pure function of (kind, p, d, seed), and matrix-free.

    gaussian   dense, entries N(0, 1/d), made tile by tile; O(pd) a product, memory bounded
    hadamard   p rows of a randomised orthogonal transform; O(d log d), SSᵀ = I
    sign       a few entries ±1 per column, dealt evenly to the rows; O(d), SSᵀ = I with one entry per column

All have rows of unit length (in expectation), so SSᵀ ≈ I, ‖S‖ ≈ 1, and a step that suits one kind suits the others.
`apply` and `adjoint` work on the last dimension, so [K, d] is one call, and under `vmap`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from math import sqrt
from operator import add
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.errors import UsageError, unknown
from coterie.numerics.draws import Draw
from coterie.numerics.tracing import remembered

Kind = Literal["gaussian", "hadamard", "sign"]
TILE = 32  # rows of a dense sketch that are made and multiplied at once; the bits of a product depend on it
FACTOR = 64  # the largest Hadamard matrix that is written out


@dataclass(frozen=True)
class Sketch(ABC):
    """S, through its products.

    Args:
        size: p.
        dimension: d.
        seed: what makes it.
    """

    size: int
    dimension: int
    seed: int = 0

    @abstractmethod
    def apply(self, v: Tensor) -> Tensor:
        """S v: [..., d] to [..., p]."""

    @abstractmethod
    def adjoint(self, x: Tensor) -> Tensor:
        """Sᵀ x: [..., p] to [..., d]."""

    @property
    def orthogonal(self) -> bool:
        """Whether SSᵀ = I to rounding, so that Sᵀ is the pseudo-inverse."""
        return False

    @property
    def norm_squared(self) -> float:
        """An upper estimate of ‖S‖², by power iteration with a margin of 5 %; 1 where SSᵀ = I.

        A proximal-gradient step must not exceed its inverse.
        """
        return 1.0 if self.orthogonal else 1.05 * power_iteration(self)


@dataclass(frozen=True)
class Gaussian(Sketch):
    """Entries N(0, 1/d). Row i is the stream of the counter-based generator Philox with the key (seed, i).

    Draw's own Gaussians are as good but take three times as long. `kept` bytes of tiles stay in memory, the others
    are made anew for every product; what is kept changes no bit.
    """

    kept: int = 1 << 28
    _tiles: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def tile(self, start: int) -> Tensor:
        """Rows start … start + TILE − 1, [≤ TILE, d], in float32."""
        if start in self._tiles:
            return self._tiles[start]
        stop = min(start + TILE, self.size)
        rows = np.empty((stop - start, self.dimension), dtype=np.float32)
        for row, i in zip(rows, range(start, stop), strict=True):
            stream = np.random.Generator(np.random.Philox(key=(self.seed, i)))
            stream.standard_normal(out=row, dtype=np.float32)
        tile = torch.from_numpy(rows).mul_(1.0 / sqrt(self.dimension))
        if (len(self._tiles) + 1) * 4 * TILE * self.dimension <= self.kept:
            self._tiles[start] = tile
        return tile

    def apply(self, v: Tensor) -> Tensor:
        """S v."""
        return torch.cat([v @ self.tile(i).to(v).T for i in range(0, self.size, TILE)], -1)

    def adjoint(self, x: Tensor) -> Tensor:
        """Sᵀ x, summed tile by tile in order."""
        total = x[..., :TILE] @ self.tile(0).to(x)
        for i in range(TILE, self.size, TILE):
            total = total + x[..., i : i + TILE] @ self.tile(i).to(x)
        return total

    @property
    def norm_squared(self) -> float:
        """(1 + √(p/d) + 3/√d)², exceeded with a probability below e^(−9/2) (Davidson and Szarek 2001)."""
        return (1.0 + sqrt(self.size / self.dimension) + 3.0 / sqrt(self.dimension)) ** 2


@dataclass(frozen=True)
class Hadamard(Sketch):
    """p rows, drawn without replacement, of Q = H_last D₂ H_first D₁, orthogonal for every d.

    D are random signs; H_first and H_last are the Walsh–Hadamard transform of the first and of the last 2^m ≤ d
    coordinates, which overlap because 2^m > d/2. Padding to a power of two would cost as much and lose SSᵀ = I.
    """

    signs: Tensor = field(init=False, repr=False, compare=False)
    rows: Tensor = field(init=False, repr=False, compare=False)  # [p], of Q
    place: Tensor = field(init=False, repr=False, compare=False)  # [d], where a row of Q stands among these; p if not

    def __post_init__(self) -> None:
        draw = Draw.of(self.seed).phase("hadamard")
        rows = draw.phase("rows").permutation(self.dimension)[: self.size]
        place = torch.full((self.dimension,), self.size).index_copy(0, rows, torch.arange(self.size))
        object.__setattr__(self, "signs", _signs(draw.phase("signs"), 2, self.dimension))
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "place", place)

    def apply(self, v: Tensor) -> Tensor:
        """S v."""
        first, last = self.signs.to(v)
        return _last(_first(v * first) * last)[..., self.rows.to(v.device)]

    def adjoint(self, x: Tensor) -> Tensor:
        """Sᵀ x."""
        first, last = self.signs.to(x)
        v = torch.cat([x, x.new_zeros(*x.shape[:-1], 1)], -1)[..., self.place.to(x.device)]
        return _first(_last(v) * last) * first

    @property
    def orthogonal(self) -> bool:
        """SSᵀ = I."""
        return True


class Deal(NamedTuple):
    """d columns with signs, dealt evenly to p rows: column `order[i]` goes to row i mod p."""

    order: Tensor  # [d], the columns in the order in which they are dealt
    row: Tensor  # [d], the row of each column
    sign: Tensor  # [d], int8
    size: int

    def sums(self, v: Tensor) -> Tensor:
        """Σ of sign · v over the columns of each row, [..., p]."""
        each = -(-len(self.order) // self.size)
        dealt = (v * self.sign.to(v))[..., self.order.to(v.device)]
        short = each * self.size - len(self.order)
        if short:
            dealt = torch.cat([dealt, v.new_zeros(*v.shape[:-1], short)], -1)
        return dealt.reshape(*v.shape[:-1], each, self.size).sum(-2)

    def spread(self, x: Tensor) -> Tensor:
        """sign · x of each column's row, [..., d]: the adjoint of `sums`."""
        return x[..., self.row.to(x.device)] * self.sign.to(x)


def deal(draw: Draw, size: int, dimension: int) -> Deal:
    """A random deal."""
    order = draw.phase("order").permutation(dimension)
    row = torch.empty_like(order)
    row[order] = torch.arange(dimension) % size
    return Deal(order, row, _signs(draw.phase("signs"), dimension), size)


@dataclass(frozen=True)
class SparseSign(Sketch):
    """`nonzeros` entries ± a column, one in each of so many independent deals of the d columns to the p rows.

    A deal is balanced: every row gets ⌊d/p⌋ or ⌈d/p⌉ columns. With one deal the rows have disjoint supports.
    """

    nonzeros: int = 4
    deals: tuple[Deal, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        draw = Draw.of(self.seed).phase("sign")
        deals = tuple(deal(draw.step(j), self.size, self.dimension) for j in range(self.nonzeros))
        object.__setattr__(self, "deals", deals)

    def apply(self, v: Tensor) -> Tensor:
        """S v."""
        return reduce(add, (deal.sums(v) for deal in self.deals)) * self._scale.to(v)

    def adjoint(self, x: Tensor) -> Tensor:
        """Sᵀ x."""
        x = x * self._scale.to(x)
        return reduce(add, (deal.spread(x) for deal in self.deals))

    @property
    def _scale(self) -> Tensor:
        counts = torch.full((self.size,), float(self.dimension // self.size), dtype=torch.float64)
        counts[: self.dimension % self.size] += 1.0
        return (self.nonzeros * counts).rsqrt()

    @property
    def orthogonal(self) -> bool:
        """With one entry per column."""
        return self.nonzeros == 1


@dataclass(frozen=True)
class CountSketch:
    """The table of Charikar et al. 2002: `rows` deals of the coordinates to `columns` buckets each, [rows · columns].

    `estimate` gives every coordinate back as the median over the rows; large coordinates are found, small ones drown.
    """

    rows: int
    columns: int
    dimension: int
    seed: int = 0
    deals: tuple[Deal, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        draw = Draw.of(self.seed).phase("count sketch")
        deals = tuple(deal(draw.step(j), self.columns, self.dimension) for j in range(self.rows))
        object.__setattr__(self, "deals", deals)

    @property
    def size(self) -> int:
        """Numbers in a table."""
        return self.rows * self.columns

    def apply(self, v: Tensor) -> Tensor:
        """The table of v, laid out row after row."""
        return torch.cat([deal.sums(v) for deal in self.deals], -1)

    def adjoint(self, x: Tensor) -> Tensor:
        """Σ over the rows of sign · bucket."""
        return self._by_row(x).sum(-2)

    def estimate(self, x: Tensor) -> Tensor:
        """The median over the rows of sign · bucket, for every coordinate; the mean of the middle two if even."""
        found = self._by_row(x).sort(-2).values
        return (found[..., (self.rows - 1) // 2, :] + found[..., self.rows // 2, :]) / 2

    def _by_row(self, x: Tensor) -> Tensor:
        tables = x.reshape(*x.shape[:-1], self.rows, self.columns).unbind(-2)
        return torch.stack([deal.spread(table) for deal, table in zip(self.deals, tables, strict=True)], -2)


@remembered(4)
def sketch(kind: Kind, size: int, dimension: int, seed: int = 0) -> Sketch:
    """The sketch of that kind; 1 ≤ p < d. Asking again gives the same object while it is remembered."""
    if not 1 <= size < dimension:
        raise UsageError(
            f"a sketch of {size} numbers for {dimension} parameters: the size must be at least 1 and below "
            f"{dimension}; larger saves nothing, use uncompressed."
        )
    if kind not in SKETCHES:
        raise unknown("sketch", kind, SKETCHES)
    return SKETCHES[kind](size, dimension, seed)


SKETCHES: dict[str, Callable[[int, int, int], Sketch]] = {
    "gaussian": Gaussian,
    "hadamard": Hadamard,
    "sign": SparseSign,
}


@remembered(4)
def count_table(rows: int, columns: int, dimension: int, seed: int = 0) -> CountSketch:
    """The count sketch of that form, remembered as `sketch` remembers."""
    return CountSketch(rows, columns, dimension, seed)


@remembered(32)
def power_iteration(S: Sketch, *, steps: int = 30) -> float:
    """‖S‖², from below, by power iteration on SSᵀ from a fixed start."""
    x = Draw.of(0).phase("power iteration").normal(S.size, dtype=torch.float64)
    value = 0.0
    for _ in range(steps):
        x = S.apply(S.adjoint(x / x.norm()))
        value = float(x.norm())
    return value


def _signs(draw: Draw, *shape: int) -> Tensor:
    """±1, in int8."""
    return (1 - 2 * (draw.bits(*shape) & 1)).to(torch.int8)


def _first(v: Tensor) -> Tensor:
    """The transform of the first 2^m ≤ d coordinates; the others stay."""
    n = 1 << (v.shape[-1].bit_length() - 1)
    return torch.cat([walsh_hadamard(v[..., :n]), v[..., n:]], -1)


def _last(v: Tensor) -> Tensor:
    """The transform of the last 2^m ≤ d coordinates; the others stay."""
    rest = v.shape[-1] - (1 << (v.shape[-1].bit_length() - 1))
    return torch.cat([v[..., :rest], walsh_hadamard(v[..., rest:])], -1)


def walsh_hadamard(v: Tensor) -> Tensor:
    """The orthonormal Walsh–Hadamard transform of the last dimension, a power of two; it is its own inverse.

    H of size ab is H_a ⊗ H_b: products with a few small matrices, which beat log₂ n passes of sums and differences.
    """
    n, factors = v.shape[-1], _factors(v.shape[-1])
    v = v.reshape(*v.shape[:-1], *factors)
    for k, size in enumerate(factors):
        v = (v.movedim(k - len(factors), -1) @ _matrix(size).to(v)).movedim(-1, k - len(factors))
    return v.flatten(-len(factors)) * n**-0.5


def _factors(n: int) -> tuple[int, ...]:
    """Powers of two up to FACTOR whose product is n."""
    return (n,) if n <= FACTOR else (FACTOR, *_factors(n // FACTOR))


@remembered(FACTOR.bit_length())
def _matrix(size: int) -> Tensor:
    """The ±1 Hadamard matrix."""
    H = torch.ones(1, 1)
    while len(H) < size:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H
