"""Smaller networks cut out of a large one: the same outputs, really smaller, counted, or refused with the reason."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from coterie.errors import UsageError
from coterie.problems.models import FlatModel, build
from coterie.problems.models.submodel import Anatomy, Scaler, anatomy, places

SHAPES = {"small-cnn": (1, 8, 8), "cnn": (1, 8, 8), "lenet5": (1, 12, 12), "mlp": (1, 8, 8), "resnet18": (3, 8, 8)}


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    width = {"small-cnn": 8, "resnet18": 8}.get(name)
    return build(name, SHAPES[name], 5, 0, width), SHAPES[name]


def with_norms() -> nn.Module:
    """Norms between layers, one without parameters of its own, and two kinds of pooling."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.GELU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(8, 4, 2), nn.BatchNorm2d(4, affine=False), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Dropout(0.5), nn.Linear(8, 3)),
    )


CASES = {name: network(name) for name in SHAPES} | {"norms": (with_norms(), (1, 8, 8))}
every = pytest.mark.parametrize(("net", "shape"), CASES.values(), ids=CASES)


def some(cut: Anatomy, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Random kernels, and θ far from the start, so that biases and norms matter."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(cut.kernels, generator=generator)
    theta = torch.randn(len(cut.owner), generator=generator, dtype=torch.float64)
    return cut.top(share, score), theta


@every
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_a_sub_model_is_the_masked_model(net, shape, share):
    cut, whole = anatomy(net, shape), FlatModel(net.double())
    part = FlatModel(cut.carved(share, scaled=False).double())
    inputs = torch.randn(6, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for seed in range(3):
        a, theta = some(cut, share, seed)
        index = cut.index(a, share)
        assert len(index) == part.size == cut.parameters(share)
        masked = whole(cut.gated(theta, a), inputs)
        torch.testing.assert_close(part(theta[index], inputs), masked, rtol=1e-9, atol=1e-9)
        assert share == 1.0 or not torch.allclose(masked, whole(theta, inputs))


@every
def test_the_first_kernels_are_the_module_that_is_carved(net, shape):
    cut = anatomy(net, shape)
    part = FlatModel(cut.carved(0.5, scaled=False))
    assert torch.equal(part.start, FlatModel(net).start[cut.index(cut.first(0.5), 0.5)].to(part.start))


def test_a_carved_module_is_an_ordinary_smaller_one():
    net, shape = network("resnet18")
    part = anatomy(net, shape).carved(0.25, scaled=False)
    sizes = {name: (m.out_channels, m.in_channels) for name, m in part.named_modules() if isinstance(m, nn.Conv2d)}
    assert sizes["0"] == (2, 3)
    assert sizes["5.first"] == (4, 2)
    assert sizes["5.shortcut.0"] == (4, 2)
    assert sizes["10.second"] == (16, 16)
    assert (part[-1].in_features, part[-1].out_features) == (16, 5)
    assert part[1].num_features == 2
    assert net[0].out_channels == 8, "the network itself was cut"


def test_scalers_put_out_as_much_as_if_nothing_was_missing():
    """Without norms, dividing what kernels put out by the share is dividing their parameters by it."""
    net, shape = network("small-cnn")
    cut, whole = anatomy(net, shape), FlatModel(net.double())
    module = cut.carved(0.25, scaled=True)
    assert [m.factor for m in module.modules() if isinstance(m, Scaler)] == [4.0] * 4
    assert not any(isinstance(m, Scaler) for m in cut.carved(1.0, scaled=True).modules())
    a, theta = some(cut, 0.25, 0)
    inputs = torch.randn(6, *shape, dtype=torch.float64)
    scaled = FlatModel(module.double())(theta[cut.index(a, 0.25)], inputs)
    torch.testing.assert_close(scaled, whole(cut.gated(theta, 4.0 * a), inputs))


def test_what_is_added_stands_or_falls_together():
    net, shape = network("resnet18")
    cut = anatomy(net, shape)
    assert len(cut.sizes) == 12  # four stages, and the inner convolution of each of eight blocks
    assert sum(cut.sizes) == (8 + 16 + 32 + 64) * 3
    owners = {name: axes[0] for name, axes in cut.axes.items()}
    trunk = [owners[name] for name in ("0.weight", "1.bias", "3.second.weight", "4.second_norm.weight")]
    assert all(torch.equal(one, trunk[0]) for one in trunk)
    assert torch.equal(owners["5.shortcut.0.weight"], owners["5.second.weight"])
    assert torch.equal(owners["5.second.weight"], owners["6.second.weight"])
    assert not torch.equal(owners["6.first.weight"], owners["6.second.weight"])


def by_hand() -> Anatomy:
    """64 · 4 · 9 + 64 · 8 + 8 · 3 = 2840 multiply-adds; half of it 64 · 2 · 9 + 32 · 4 + 4 · 3 = 1292."""
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return anatomy(nn.Sequential(*layers, nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)), (1, 8, 8))


def test_work_and_parameters_by_hand():
    cut = by_hand()
    assert (cut.flops(1.0), cut.flops(0.5)) == (2 * 2840, 2 * 1292)
    assert cut.parameters(1.0) == (4 * 9 + 4) + (64 * 8 + 8) + (8 * 3 + 3)
    assert cut.parameters(0.5) == (2 * 9 + 2) + (32 * 4 + 4) + (4 * 3 + 3)
    a = torch.tensor([1.0, 0.5, 0.0, 0.0, *[0.25] * 8], requires_grad=True)
    work = cut.work(a)
    assert float(work.detach()) == 64 * 9 * 1.5 + 16 * 1.5 * 2 + 3 * 2
    work.backward()
    assert a.grad.tolist() == [64 * 9 + 16 * 2] * 4 + [16 * 1.5 + 3] * 8


def test_work_of_a_resnet_falls_with_the_square_of_the_share():
    net, shape = network("resnet18")
    cut = anatomy(net, shape)
    whole, half = cut.flops(1.0), cut.flops(0.5)
    assert 0.25 < half / whole < 0.26  # only the first and the last layer fall in proportion
    assert 0.24 < cut.parameters(0.5) / cut.parameters(1.0) < 0.26


def test_which_kernels():
    cut = by_hand()
    assert cut.names == ("0", "4")
    assert cut.sizes == (4, 8)
    assert cut.first(0.5).tolist() == [1, 1, 0, 0, *[1, 1, 1, 1, 0, 0, 0, 0]]
    assert cut.window(0.5, 3).tolist() == [1, 0, 0, 1, *[0, 0, 0, 1, 1, 1, 1, 0]]
    score = torch.tensor([0.1, 0.9, 0.5, 0.2, *[0.0] * 6, 1.0, 2.0])
    assert cut.top(0.25, score).tolist() == [0, 1, 0, 0] + [0] * 6 + [1, 1]
    assert cut.top(0.25, torch.zeros(2, 12)).tolist() == [[1, 0, 0, 0] + [1, 1] + [0] * 6] * 2, "ties: the first"
    assert cut.counts(0.7) == (2, 5)
    assert sum(cut.window(0.25, t).long() for t in range(8)).tolist() == [2] * 12, "a rolling window is fair"


@settings(deadline=None, max_examples=30)
@given(st.lists(st.permutations([True] * 3 + [False] * 4), min_size=1, max_size=4))
def test_places_are_those_that_are_kept(rows):
    keep = torch.tensor(rows)
    expected = [[j for j, kept in enumerate(row) if kept] for row in rows]
    assert places(keep, 3).tolist() == expected
    assert torch.func.vmap(lambda row: places(row, 3))(keep).tolist() == expected


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([nn.Conv2d(1, 4, 3), nn.Sigmoid()], r"layer 1 is a Sigmoid.*supported are Sequential, resnet Block, Conv2d"),
        ([nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4))], r"layer 0\.1 is a GroupNorm"),
        ([Doubled(nn.Conv2d(1, 4, 3))], r"layer 0 is a Doubled"),
        ([nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3, groups=2)], r"layer 1 is a convolution in 2 groups"),
        ([nn.Flatten(), nn.Linear(64, 3)], r"no hidden layer.*small-cnn"),
        ([nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(99, 3)], r"layer 2 takes 99 inputs, which 4 channels"),
        ([nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)], r"does not take inputs of shape \(1, 8, 8\)"),
    ],
)
def test_what_cannot_be_cut_is_named(layers, text):
    with pytest.raises(UsageError, match=text):
        anatomy(nn.Sequential(*layers), (1, 8, 8))


def test_a_frozen_parameter_is_named():
    net, shape = network("mlp")
    net[1].bias.requires_grad_(False)
    with pytest.raises(UsageError, match=r"1\.bias is frozen"):
        anatomy(net, shape)


def test_a_layer_without_a_kernel_is_refused():
    with pytest.raises(UsageError, match=r"capacity of 0\.125 leaves layer 0 none of its 4 kernels.*1/4.*capacities"):
        by_hand().counts(0.125)
