"""only_where computes the costly branch for the true rows alone, with the same numbers as one by one."""

import torch
from torch import Tensor
from torch.func import vmap

from coterie.numerics.control import Flags, Levels, only_where

x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
kept = torch.zeros(6, 4), torch.full((6,), -1.0)
mask = torch.tensor([True, False, False, True, True, False])


def squares(v: Tensor) -> tuple[Tensor, Tensor]:
    return v * v, (v * v).sum()


def one(flag: Tensor, a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return only_where(flag, squares, (a, b), (v,))


def test_rows_are_replaced_exactly_where_the_mask_says() -> None:
    squared, total = vmap(one)(mask, *kept, x)
    assert torch.equal(squared, torch.where(mask[:, None], x * x, kept[0]))
    assert torch.equal(total, torch.where(mask, (x * x).sum(1), kept[1]))


def test_vmap_equals_one_by_one() -> None:
    together = vmap(one)(mask, *kept, x)
    alone = [one(mask[i], kept[0][i], kept[1][i], x[i]) for i in range(6)]
    for column, part in enumerate(together):
        assert torch.equal(part, torch.stack([row[column] for row in alone]))


def test_only_the_true_rows_are_computed() -> None:
    seen: list[int] = []

    def counting(v: Tensor) -> tuple[Tensor]:
        seen.append(1)
        return (v,)

    vmap(lambda flag, v: only_where(flag, counting, (v,), (v,)))(torch.zeros(6, dtype=torch.bool), x)
    assert seen == []
    vmap(lambda flag, v: only_where(flag, counting, (v,), (v,)))(mask, x)
    assert seen == [1, 1, 1]


def test_operands_common_to_all_rows_need_no_copies() -> None:
    common = torch.arange(4.0)
    out = vmap(lambda flag, v: only_where(flag, lambda a, c: (a + c,), (v,), (v, common)))(mask, x)[0]
    assert torch.equal(out, torch.where(mask[:, None], x + common, x))


def test_a_function_of_all_levels_sees_each_operand_once_with_its_levels_in_front() -> None:
    seen: list[tuple[torch.Size, ...]] = []

    def products(flags: Flags, a: Tensor, b: Tensor) -> Tensor:
        seen.append((a.shape, b.shape))
        assert flags == ((True, True), (True, False))  # clients: both; points: the first alone
        return (a * b[:, None]).sum(-1)

    function, random = Levels(products), torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 3, 4, generator=random), torch.randn(5, 4, generator=random)  # clients last, points before
    found = vmap(vmap(function, in_dims=(1, None)), in_dims=(2, 1))(a, b)
    assert seen == [((4, 3, 5), (4, 5))]
    torch.testing.assert_close(found, torch.einsum("dpk,dk->kp", a, b))
