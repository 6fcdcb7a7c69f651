"""Trees of tensors: what is sent, returned and remembered is a tensor or nested tuples, lists and dicts of them."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten as tree_flatten  # offered to the other modules, like the next three
from torch.utils._pytree import tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

Tree = Any


class Size(NamedTuple):
    """How much a tree weighs on the wire."""

    floats: int = 0
    bytes: int = 0

    def __add__(self, other: "Size") -> "Size":  # type: ignore[override]
        return Size(self.floats + other.floats, self.bytes + other.bytes)

    def times(self, n: int) -> "Size":
        """n copies."""
        return Size(self.floats * n, self.bytes * n)


def tensors(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in a fixed order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def size(tree: Tree) -> Size:
    """Numbers and bytes of all tensors of a tree; everything else is not sent."""
    leaves = tensors(tree)
    return Size(sum(t.numel() for t in leaves), sum(t.numel() * t.element_size() for t in leaves))


def mapped(f: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """f at every tensor; other leaves stay."""
    return tree_map(lambda leaf: f(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def rows(tree: Tree, ids: Tensor | slice) -> Tree:
    """Some rows of a stacked tree."""
    return mapped(lambda t: t[ids], tree)


def row(tree: Tree, index: int) -> Tree:
    """One row of a stacked tree."""
    return mapped(lambda t: t[index], tree)


def put(tree: Tree, where: Tensor, new: Tree) -> Tree:
    """A stacked tree with the rows where this holds replaced; the others, and leaves without new rows (None), keep
    every bit."""
    leaves, structure = tree_flatten(tree)
    index = where.nonzero()[:, 0]
    news = tree_flatten(new)[0]
    changed = [old if row is None else old.index_copy(0, index, row) for old, row in zip(leaves, news, strict=True)]
    return tree_unflatten(changed, structure)


def joined(trees: list[Tree]) -> Tree:
    """Stacked trees one after the other, in one layout: the bits of a product with these rows depend on it."""
    columns = zip(*(tree_flatten(t)[0] for t in trees), strict=True)
    leaves = [
        column[0] if column[0] is None else column[0].contiguous() if len(column) == 1 else torch.cat(column)
        for column in columns
    ]
    return tree_unflatten(leaves, tree_flatten(trees[0])[1])


def stack(trees: list[Tree]) -> Tree:
    """Trees of equal structure, stacked along a new first dimension."""
    leaves, structure = zip(*(tree_flatten(t) for t in trees), strict=True)
    if len(trees) == 1:
        return tree_unflatten([leaf[None] for leaf in leaves[0]], structure[0])
    return tree_unflatten([torch.stack(list(column)) for column in zip(*leaves, strict=True)], structure[0])


def named_leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """(path, leaf) pairs; the paths name the leaves in checkpoints."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        yield "".join(str(key) for key in path).lstrip("."), leaf
