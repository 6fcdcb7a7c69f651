"""Networks whose layers are exchanged for quicker ones: the same functions, and the user's module as it was."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from coterie.federation import Batch
from coterie.numerics.convolutions import Geometry, few_pixels
from coterie.problems.models import FlatModel, build, flat
from coterie.problems.models.native import NativeConv2d, NativeMaxPool2d, with_native_layers
from coterie.problems.tasks.supervised import Supervised

NETWORKS = {
    "lenet5": ((1, 28, 28), {}),
    "small-cnn": ((1, 16, 16), {}),
    "small-cnn-norm": ((3, 16, 16), {}),
    "wide-cnn": ((3, 20, 20), {}),
    "conv4": ((3, 10, 10), {}),
    "resnet18": ((3, 16, 16), {"width": 16}),
}


class Again(nn.Module):
    """Few pixels, many outputs, and layers that are used once, twice, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Conv2d(3, 48, 3, stride=2, padding=1), nn.Conv2d(48, 48, 3, padding=1)
        self.idle, self.last = nn.Conv2d(48, 48, 3), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(torch.tanh(self.first(x)))))).mean((2, 3)))


Again.__module__ = "coterie.tests"  # one of ours, whose images may have their channels last


class Viewing(nn.Module):
    """A forward that relies on the usual layout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 16, 3)
        self.last = nn.Linear(16 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(nn.functional.max_pool2d(self.convolution(x), 2)).view(len(x), -1))


def batch(shape: tuple[int, ...], rows: int = 5, classes: int = 10, dtype: torch.dtype = torch.float64) -> Batch:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, *shape, dtype=dtype, generator=random)
    return Batch((x, torch.randint(0, classes, (rows,), generator=random)), None)


def task(net: nn.Module) -> Supervised:
    """By its layers and autograd, not by hand."""
    model = FlatModel(net)
    model.chain = None
    return Supervised.of(model, "cross_entropy", l2=0.01, classes=10)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_the_values_and_derivatives_of_torchs_layers(name, monkeypatch):
    shape, options = NETWORKS[name]
    net, some = build(name, shape, 10, seed=0, **options).double(), batch(shape)
    quick, plain = task(net), task(net)
    with quick.model._copy() as module:  # one is made, which is used from then on
        assert any(isinstance(part, NativeConv2d) for part in module.modules())
    monkeypatch.setattr(flat, "with_native_layers", lambda module: module)
    theta, v = plain.model.start, torch.linspace(-1.0, 1.0, plain.model.size, dtype=torch.float64)
    for mine, expected in (
        (quick.loss(theta, some), plain.loss(theta, some)),
        (quick.gradient(theta, some), plain.gradient(theta, some)),
        (quick.hvp(theta, v, some), plain.hvp(theta, v, some)),
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


def test_a_gradient_is_the_same_to_the_bit_when_it_is_computed_again():
    quick, some = task(build("small-cnn", (1, 16, 16), 10, seed=0)), batch((1, 16, 16), dtype=torch.float32)
    assert torch.equal(quick.gradient(quick.model.start, some), quick.gradient(quick.model.start, some))


def test_a_forward_of_somebody_else_gets_the_usual_layout():
    some = batch((1, 8, 8), classes=3)
    net = Viewing().double()
    quick = task(net)
    torch.testing.assert_close(quick.outputs(quick.model.start, some), net(some.inputs))
    assert quick.gradient(quick.model.start, some).isfinite().all()


def test_parameters_that_forward_does_not_use_have_no_slope():
    class Idle(Viewing):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(2, 2)

    quick, some = task(Idle().double()), batch((1, 8, 8), classes=3)
    theta, used = quick.model.start, ~quick.model.entries(("idle.weight", "idle.bias"))
    plain = Supervised.of(quick.model, "cross_entropy", classes=10)
    assert not plain.gradient(theta, some)[~used].any()
    assert not plain.hvp(theta, torch.ones_like(theta), some)[~used].any()
    assert plain.gradient(theta, some)[used].any()


def test_weights_that_a_hook_makes_of_others_have_the_right_product():
    layer = nn.Conv2d(1, 2, 3)
    layer.raw = nn.Parameter(layer.weight.detach().clone())
    del layer.weight
    layer.register_forward_pre_hook(lambda layer, _: setattr(layer, "weight", layer.raw**3))  # as weight_norm does
    net = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(72, 3)).double()
    quick, some = task(net), batch((1, 8, 8), classes=3)
    theta, v = quick.model.start, torch.linspace(-1.0, 1.0, quick.model.size, dtype=torch.float64)
    ahead, behind = (quick.gradient(theta + e * v, some) for e in (1e-5, -1e-5))
    torch.testing.assert_close(quick.hvp(theta, v, some), (ahead - behind) / 2e-5, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("channels", [8, 16])
def test_channels_are_last_where_all_convolutions_have_many(channels):
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, channels, 3))
    output = with_native_layers(net)(torch.randn(2, 1, 12, 12))
    assert output.is_contiguous(memory_format=torch.channels_last) == (channels == 16)
    assert type(net[2]) is NativeMaxPool2d


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 2, 3, groups=2),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, padding="valid"),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.MaxPool2d(3, 1),
        nn.MaxPool2d(2, ceil_mode=True),
    ],
    ids=str,
)
def test_other_layers_stay_torchs(layer):
    x = torch.randn(2, 2, 7, 7)
    expected = layer(x)
    exchanged = with_native_layers(nn.Sequential(layer))
    assert type(exchanged[0]) in (nn.Conv2d, nn.MaxPool2d)
    assert torch.equal(exchanged(x), expected)


def test_under_vmap_layers_do_what_torchs_do(monkeypatch):
    net, some = build("small-cnn", (1, 16, 16), 10, seed=0), batch((1, 16, 16), dtype=torch.float32)
    found = []
    for layers in (with_native_layers, lambda module: module):
        monkeypatch.setattr(flat, "with_native_layers", layers)
        model = FlatModel(net)
        thetas = torch.stack([model.start, 2.0 * model.start])
        found.append(vmap(lambda theta, model=model: model(theta, some.inputs))(thetas))
    assert torch.equal(*found)


def test_what_is_saved_has_torchs_layers():
    quick, some = task(build("small-cnn", (1, 16, 16), 10, seed=0)), batch((1, 16, 16), dtype=torch.float32)
    quick.gradient(quick.model.start, some)
    assert not any(
        isinstance(p, NativeConv2d | NativeMaxPool2d) for p in quick.model.module(quick.model.start).modules()
    )


def test_few_pixels_are_products_wherever_layers_are_used(monkeypatch):
    """Memory is used again meanwhile, so one that two writers had would be seen."""
    monkeypatch.setattr("coterie.numerics.memory.LARGE", 1)
    net, some = Again().double(), batch((3, 6, 6), rows=2)
    quick = task(net)
    with quick.model._copy() as module:
        assert module.twice.channels_last
        assert few_pixels(torch.Size((2, 48, 3, 3)), module.twice.weight.shape, Geometry((1, 1), (1, 1)))
    monkeypatch.setattr(flat, "with_native_layers", lambda module: module)
    plain, found = task(net), []
    for scale in (1.0, 0.5, -2.0):
        theta = scale * plain.model.start
        found.append((quick.gradient(theta, some), plain.gradient(theta, some)))
        torch.testing.assert_close(quick.hvp(theta, theta, some), plain.hvp(theta, theta, some))
    for mine, expected in found:
        torch.testing.assert_close(mine, expected)


def test_a_graph_can_be_run_through_twice():
    net, some = Again().double(), batch((3, 6, 6), rows=2)
    model = FlatModel(net)
    theta = model.start.clone().requires_grad_()
    loss = model(theta, some.columns[0]).square().sum()
    one = torch.autograd.grad(loss, theta, retain_graph=True)[0]
    kept = one.clone()
    two = torch.autograd.grad(2 * loss, theta)[0]
    assert torch.equal(one, kept)
    assert torch.equal(two, 2 * kept)
