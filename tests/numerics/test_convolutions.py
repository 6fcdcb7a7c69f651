"""Convolutions and pooling of our own: torch's values and derivatives, whichever kernel computes them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from coterie.numerics import convolutions
from coterie.numerics.convolutions import Geometry, convolution, few_pixels, unread_weight_gradients
from coterie.numerics.pooling import max_pool

LAYOUTS = [torch.contiguous_format, torch.channels_last]
CASES = {
    "grey": ((3, 1, 6, 5), (2, 1, 3, 2), Geometry((1, 1), (1, 1))),
    "grey, strided, dilated": ((2, 1, 7, 6), (3, 1, 2, 2), Geometry((2, 2), (0, 1), (2, 2))),
    "small": ((2, 2, 4, 5), (3, 2, 3, 3), Geometry((2, 1), (1, 0))),
    "small, one pixel": ((3, 4, 3, 3), (2, 4, 1, 1), Geometry((2, 2), (0, 0))),
    "large": ((2, 2, 10, 9), (3, 2, 3, 3), Geometry((1, 1), (1, 1))),
    "dilated": ((2, 3, 6, 6), (4, 3, 2, 3), Geometry((1, 2), (0, 1), (2, 1))),
}


def operands(shape: tuple[int, ...], kernel: tuple[int, ...], layout: torch.memory_format) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, dtype=torch.float64, generator=random) for s in (shape, kernel, kernel[:1]))
    return x.to(memory_format=layout).requires_grad_(), w.to(memory_format=layout).requires_grad_(), b.requires_grad_()


def derivatives(y: Tensor, of: tuple[Tensor, ...], *, last: bool = False) -> tuple[Tensor, ...]:
    slope = torch.linspace(-1.0, 1.0, y.numel(), dtype=y.dtype).view(y.shape)
    return torch.autograd.grad(y, of, slope.contiguous(memory_format=torch.channels_last) if last else slope)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("at_once", [1, 1 << 21], ids=["one by one", "together"])
def test_a_convolution_has_torchs_value_and_gradients(name, layout, at_once, monkeypatch):
    monkeypatch.setattr(convolutions, "PATCHES", at_once)
    shape, kernel, geometry = CASES[name]
    given = operands(shape, kernel, layout)
    ours, torchs = convolution(*given, geometry), F.conv2d(*given, *geometry)
    torch.testing.assert_close(ours, torchs)
    for mine, expected in zip(derivatives(ours, given), derivatives(torchs, given), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_convolution_can_be_differentiated_twice(name, layout):
    shape, kernel, geometry = CASES[name]
    given = operands(shape, kernel, layout)

    def run(*tensors: Tensor) -> Tensor:
        return convolution(*tensors, geometry)

    assert gradcheck(run, given)
    assert gradgradcheck(run, given, fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_many_outputs_are_one_product_of_patches_where_channels_are_last(layout, monkeypatch):
    used: list[Any] = []
    by_patches = convolutions._by_patches
    monkeypatch.setattr(convolutions, "_by_patches", lambda *args: used.append(args) or by_patches(*args))
    given = operands((2, 3, 9, 10), (256, 3, 3, 3), layout)
    geometry = Geometry((1, 1), (1, 1))
    ours, torchs = convolution(*given, geometry), F.conv2d(*given, *geometry)
    for mine, expected in zip(derivatives(ours, given), derivatives(torchs, given), strict=True):
        torch.testing.assert_close(mine, expected)
    assert len(used) == (layout == torch.channels_last)


ROWS = {
    "square": ((2, 3, 6, 5), (4, 3, 3, 3), Geometry((1, 1), (1, 1))),
    "wide kernel, no border": ((2, 2, 5, 7), (3, 2, 2, 4), Geometry((1, 1), (0, 0))),
    "one line": ((1, 2, 4, 4), (2, 2, 1, 3), Geometry((1, 1), (0, 2))),
}


@pytest.mark.parametrize("name", ROWS)
def test_large_images_are_one_product_per_row_of_the_kernel(name, monkeypatch):
    used: list[Any] = []
    by_rows = convolutions._by_rows
    monkeypatch.setattr(convolutions, "_by_rows", lambda *args: used.append(args) or by_rows(*args))
    monkeypatch.setattr(convolutions, "LARGE_IMAGE", 1)
    monkeypatch.setattr(convolutions, "WIDE", 1)
    shape, kernel, geometry = ROWS[name]
    given = operands(shape, kernel, torch.channels_last)
    ours, torchs = convolution(*given, geometry), F.conv2d(*given, *geometry)
    for mine, expected in zip(derivatives(ours, given), derivatives(torchs, given), strict=True):
        torch.testing.assert_close(mine, expected)
    assert len(used) == 1
    assert gradgradcheck(lambda *tensors: convolution(*tensors, geometry), given, fast_mode=True)


FEW = {
    "square": ((1, 3, 3, 3), (24, 3, 3, 3), Geometry((1, 1), (1, 1))),
    "strided": ((2, 2, 4, 5), (26, 2, 3, 3), Geometry((2, 2), (1, 1))),
    "dilated, uneven": ((1, 2, 5, 4), (20, 2, 2, 3), Geometry((1, 1), (0, 1), (2, 2))),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", FEW)
def test_few_pixels_are_products_with_the_weights_as_they_are(name, bias, monkeypatch):
    shape, kernel, geometry = FEW[name]
    x, _, _ = operands(shape, kernel, torch.channels_last)
    _, w, b = operands(shape, kernel, torch.contiguous_format)
    assert few_pixels(x.shape, w.shape, geometry)
    given = (x, w, b) if bias else (x, w)

    def run(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return convolution(x, w, b, geometry)

    torchs = F.conv2d(x, w, b if bias else None, *geometry)
    expected = torchs, *derivatives(torchs, given)
    monkeypatch.setattr(F, "conv2d", None)  # torch's kernels are not asked
    monkeypatch.setattr(convolutions, "_torchs", None)
    ours = run(*given)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    for mine, other in zip((ours, *derivatives(ours, given, last=True)), expected, strict=True):
        torch.testing.assert_close(mine, other)
    monkeypatch.undo()
    assert gradcheck(run, given, fast_mode=True)
    assert gradgradcheck(run, given, fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", [*CASES.values(), *ROWS.values(), *FEW.values()], ids=[*CASES, *ROWS, *FEW])
def test_an_activation_may_overwrite_what_a_layer_puts_out(case, layout):
    shape, kernel, geometry = case
    x, _, _ = operands(shape, kernel, layout)
    _, w, b = operands(shape, kernel, torch.contiguous_format)

    def pooled(y: Tensor, pool: Any) -> Tensor:
        y = y.relu_().contiguous()
        return pool(y).mul_(2.0) if min(y.shape[2:]) > 1 else y

    ours = pooled(convolution(x, w, b, geometry), max_pool)
    torchs = pooled(F.conv2d(x, w, b, *geometry), lambda y: F.max_pool2d(y, 2))
    torch.testing.assert_close(derivatives(ours, (x, w, b)), derivatives(torchs, (x, w, b)))


@pytest.mark.parametrize(
    ("images", "weight"),
    [((8, 512, 4, 4), (255, 512, 3, 3)), ((8, 512, 4, 4), (512, 512, 1, 1)), ((1, 1, 2, 2), (99, 1, 3, 3))],
)
def test_many_pixels_single_places_and_grey_images_are_not_few_pixels(images, weight):
    border = Geometry((1, 1), (weight[2] // 2,) * 2)
    assert not few_pixels(torch.Size(images), torch.Size(weight), border)


@pytest.mark.parametrize("bias", [True, False])
def test_only_what_is_asked_for_is_computed(bias):
    x, w, b = operands((2, 2, 5, 5), (3, 2, 3, 3), torch.contiguous_format)
    y = convolution(x.detach(), w, b if bias else None, Geometry((1, 1), (0, 0)))
    expected = F.conv2d(x.detach(), w, b if bias else None)
    torch.testing.assert_close(derivatives(y, (w,)), derivatives(expected, (w,)))


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 3, 5, 7), (1, 1, 4, 5), (2, 2, 2, 3)])
def test_pooling_has_torchs_bits_also_where_numbers_are_equal(shape):
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 3, shape, generator=random).float().requires_grad_()
    ours, torchs = max_pool(x), F.max_pool2d(x, 2)
    assert torch.equal(ours, torchs)
    assert torch.equal(*(derivatives(y, (x,))[0] for y in (ours, torchs)))


def test_pooling_can_be_differentiated_twice():
    x = torch.randn(2, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert gradcheck(max_pool, (x,))
    assert gradgradcheck(max_pool, (x,), fast_mode=True)


@pytest.mark.parametrize("linear", [True, False])
def test_gradients_that_are_not_read_have_the_right_derivatives(linear):
    x, w, b = operands((2, 2, 5, 5), (3, 2, 3, 3), torch.contiguous_format)
    v = torch.randn(w.shape, dtype=w.dtype, generator=torch.Generator().manual_seed(1))
    found = []
    for reading in (nullcontext(), unread_weight_gradients()):
        loss = convolution(x, w, b, Geometry((1, 1), (1, 1)), linear=linear).tanh().sum()
        with reading:
            first = torch.autograd.grad(loss, w, create_graph=True)[0]
            assert torch.autograd.grad(loss, w, retain_graph=True)[0].any()  # nothing will differentiate this one
        found.append((first, torch.autograd.grad(first, w, v)[0]))
    (value, product), (unread, same) = found
    assert torch.equal(product, same)
    assert torch.equal(unread, torch.zeros_like(value) if linear else value)


def test_pooling_hands_on_what_is_no_number():
    x = torch.zeros(1, 1, 2, 8)
    for column, row in ((0, 0), (3, 0), (4, 1), (7, 1)):
        x[0, 0, row, column] = torch.nan
    assert max_pool(x).isnan().all()
