"""Recorded graphs compute nothing twice, and give the same numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from coterie.federation.shards import Rows
from coterie.numerics.programs import namespace, record

K, N, B, P, H = 3, 5, 4, 6, 2


def rounded(graph: Any, inputs: list[Tensor]) -> list[Tensor]:
    names = namespace()
    exec(graph.text, names)
    return names["forward"](None, *inputs, *graph.constants)


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(4 * N, P, generator=generator, dtype=torch.float64)
    weights = torch.randn(K, P, H, generator=generator, dtype=torch.float64)
    rows = torch.randint(0, N, (K, B), generator=generator)
    return [table, weights, torch.tensor([N, 0, 3 * N]), rows]


def client(between: Callable[[Tensor], Tensor], whole_first: bool = True) -> Callable[..., Tensor]:
    """Works of one client: a layer on all rows, and on a batch of them."""

    def work(table: Tensor, weights: Tensor, offset: Tensor, index: Tensor) -> Tensor:
        rows = Rows((table,), offset, torch.tensor(N), N)
        batches = (rows.all, lambda: rows.at(index))
        layers = [F.relu(between(b().inputs.view(-1, P) @ weights)) for b in batches[:: 1 if whole_first else -1]]
        return torch.cat([layer.sum(0) * (i + 1) for i, layer in enumerate(layers)])

    return work


@pytest.mark.parametrize(
    ("between", "products"),
    [
        (lambda z: z, 1),
        (lambda z: 2.0 * z.tanh() + 1.0, 1),
        (lambda z: z - z.mean(0), 1),  # a batch has its own mean: rows of the product are looked up
        (lambda z: z + torch.arange(len(z))[:, None], 1),
    ],
    ids=["linear", "by row", "mean", "by place"],
)
def test_batches_are_looked_up_in_what_is_computed_of_all_rows(
    between: Callable[[Tensor], Tensor], products: int
) -> None:
    given = inputs()
    work = vmap(client(between), in_dims=(None, 0, 0, 0))
    graph = record(lambda *t: [work(*t)], given)
    assert graph.text.count("aten.bmm.default") == products
    torch.testing.assert_close(rounded(graph, given)[0], work(*given))


def test_a_batch_that_comes_first_is_computed() -> None:
    given = inputs()
    work = vmap(client(lambda z: z, whole_first=False), in_dims=(None, 0, 0, 0))
    graph = record(lambda *t: [work(*t)], given)
    assert graph.text.count("aten.bmm.default") == 2
    assert "gather" not in graph.text, "row numbers are sums again"
    torch.testing.assert_close(rounded(graph, given)[0], work(*given))


def test_other_weights_are_not_looked_up() -> None:
    given = inputs()

    def work(table: Tensor, weights: Tensor, offset: Tensor, index: Tensor) -> Tensor:
        rows = Rows((table,), offset, torch.tensor(N), N)
        return (rows.all().inputs @ weights).sum(0) + (rows.at(index).inputs @ (weights + 1.0)).sum(0)

    many = vmap(work, in_dims=(None, 0, 0, 0))
    graph = record(lambda *t: [many(*t)], given)
    assert graph.text.count("aten.bmm.default") == 2
    torch.testing.assert_close(rounded(graph, given)[0], many(*given))


@pytest.mark.parametrize("left", [True, False])
def test_rows_of_all_clients_meet_a_common_matrix_in_one_product(left: bool) -> None:
    rows, matrix = inputs()[0].view(4, N, P), inputs()[1][0]

    def layer(x: Tensor) -> Tensor:
        return matrix.T @ x.T if left else x @ matrix

    def both(stacked: Tensor, common: Tensor) -> list[Tensor]:
        shared = common.expand(4, *common.shape)
        product = torch.bmm(shared.mT, stacked.mT) if left else torch.bmm(stacked, shared)
        return [product, product.sum(0)]

    graph = record(both, [rows, matrix])
    assert "bmm" not in graph.text
    assert graph.text.count("aten.mm.default") == 1
    found, total = rounded(graph, [rows, matrix])
    expected = torch.stack([layer(x) for x in rows])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(total, expected.sum(0))


def test_matrices_of_their_own_keep_their_products() -> None:
    rows, weights = inputs()[0].view(4, N, P)[:K], inputs()[1]
    graph = record(lambda x, w: [torch.bmm(x, w)], [rows, weights])
    assert graph.text.count("aten.bmm.default") == 1
