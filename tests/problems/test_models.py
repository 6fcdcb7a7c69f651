"""Networks: the patch layers are torch's own in value and derivative, and every model works under vmap."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

from coterie.errors import UsageError
from coterie.numerics.derivatives import hessian_vector
from coterie.problems.models import MODELS, FlatModel, build
from coterie.problems.models.layers import BatchStatisticsNorm2d, PatchConv2d
from coterie.problems.models.resnet import Block

SHAPES = [(1, 28, 28, 4, 1), (3, 32, 32, 4, 1), (3, 8, 8, 2, 1), (2, 7, 7, 2, 1), (2, 9, 6, 3, 0), (1, 5, 5, 4, 2)]


@pytest.mark.parametrize(("channels", "height", "width", "kernel", "padding"), SHAPES)
def test_a_patch_convolution_is_a_convolution(
    channels: int, height: int, width: int, kernel: int, padding: int
) -> None:
    torch.manual_seed(0)
    ours = PatchConv2d(channels, 5, kernel, padding)
    theirs = nn.Conv2d(channels, 5, kernel, kernel, padding)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(6, channels, height, width)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-6, rtol=1e-6)
    for mine, other in zip(_gradients(ours, x), _gradients(theirs, x), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("channels", "height", "width", "kernel", "padding"), SHAPES)
def test_prepared_images_give_the_same_values(
    channels: int, height: int, width: int, kernel: int, padding: int
) -> None:
    torch.manual_seed(0)
    layer = PatchConv2d(channels, 5, kernel, padding)
    x = torch.randn(6, channels, height, width)
    torch.testing.assert_close(layer(layer.prepare(x)), layer(x), atol=1e-6, rtol=1e-6)


def test_a_model_prepares_inputs_only_where_its_first_layer_can() -> None:
    x = torch.randn(4, 1, 16, 16)
    cnn, other = (FlatModel(build(name, (1, 16, 16), 10, seed=0)) for name in ("cnn", "logistic"))
    assert cnn.prepare(x).dim() == 5
    torch.testing.assert_close(cnn(cnn.start, cnn.prepare(x)), cnn(cnn.start, x), atol=1e-6, rtol=1e-6)
    assert other.prepare(x) is x


def test_batch_statistics_norm_is_batch_norm_in_training() -> None:
    torch.manual_seed(0)
    ours, theirs = BatchStatisticsNorm2d(3).eval(), nn.BatchNorm2d(3).train()
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(3))
        theirs.bias.copy_(torch.randn(3))
        ours.weight.copy_(theirs.weight)
        ours.bias.copy_(theirs.bias)
    x = 4 + 3 * torch.randn(8, 3, 5, 4)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-6, rtol=1e-5)
    for mine, other in zip(_gradients(ours, x), _gradients(theirs, x), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
    assert set(ours.state_dict()) == {"weight", "bias"}


def _gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Of a curved function of the output, by all parameters and by the input."""
    x = x.clone().requires_grad_()
    value = layer(x).sin().sum()
    return list(torch.autograd.grad(value, [*layer.parameters(), x]))


def _torch_twin(model: nn.Sequential) -> nn.Sequential:
    """The paper's network as one would write it with torch's own layers."""
    twin = nn.Sequential(*(_torch_layer(layer) for layer in model))
    twin.load_state_dict(model.state_dict(), strict=False)
    return twin.train()


def _torch_layer(layer: nn.Module) -> nn.Module:
    if isinstance(layer, PatchConv2d):
        return nn.Conv2d(layer.in_channels, layer.out_channels, layer.side, layer.side, layer.border)
    return nn.BatchNorm2d(layer.num_features) if isinstance(layer, BatchStatisticsNorm2d) else layer


@pytest.mark.parametrize(("shape", "size"), [((1, 28, 28), 363), ((3, 32, 32), 1488), ((1, 8, 8), 910)])
def test_the_papers_cnn_is_that_of_torchs_layers(shape: tuple[int, ...], size: int) -> None:
    model = build("cnn", shape, 10, seed=3)
    flat = FlatModel(model)
    assert flat.size == size
    assert flat.mixes_rows
    x = torch.rand(20, *shape)
    assert isinstance(model, nn.Sequential)
    torch.testing.assert_close(flat(flat.start, x), _torch_twin(model)(x), atol=1e-6, rtol=1e-5)


def _loss(model: FlatModel, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(theta, x), y)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "resnet18"])  # the narrow one is the same code
def test_models_work_client_by_client_under_vmap(name: str) -> None:
    shape = (1, 12, 12) if name == "resnet18-narrow" else (1, 28, 28)
    model = FlatModel(build(name, shape, 10, seed=0)).to(dtype=torch.float64, device="cpu")
    torch.manual_seed(0)
    thetas = model.start + 0.01 * torch.randn(3, model.size, dtype=torch.float64)
    v = torch.randn(3, model.size, dtype=torch.float64)
    x, y = torch.rand(3, 6, *shape, dtype=torch.float64), torch.randint(10, (3, 6))

    def gradient(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return grad(lambda t: _loss(model, t, x, y))(theta)

    def product(theta: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return hessian_vector(lambda t: _loss(model, t, x, y), theta, v)

    together = vmap(gradient)(thetas, x, y)
    curved = vmap(product)(thetas, v, x, y)
    for k in range(3):
        torch.testing.assert_close(together[k], gradient(thetas[k], x[k], y[k]))
        step = 1e-6 / float(v[k].norm())
        ahead, behind = (gradient(thetas[k] + s * step * v[k], x[k], y[k]) for s in (1, -1))
        torch.testing.assert_close(curved[k], (ahead - behind) / (2 * step), atol=2e-5, rtol=1e-4)


def test_the_cnns_hessian_is_symmetric_and_that_of_its_twin() -> None:
    model = build("cnn", (1, 8, 8), 3, seed=0).double()
    assert isinstance(model, nn.Sequential)
    flat, twin = FlatModel(model), _torch_twin(model).double()
    torch.manual_seed(0)
    x, y = torch.rand(12, 1, 8, 8, dtype=torch.float64), torch.randint(3, (12,))
    hessians = [jacrev(grad(lambda t, m=m: _loss(m, t, x, y)))(flat.start) for m in (flat, FlatModel(twin))]
    torch.testing.assert_close(hessians[0], hessians[1])
    torch.testing.assert_close(hessians[0], hessians[0].mT)


def test_lenet5_has_its_known_size() -> None:
    assert FlatModel(build("lenet5", (1, 28, 28), 10, seed=0)).size == 61_706
    assert FlatModel(build("lenet5", (1, 32, 32), 10, seed=0)).size == 61_706
    assert build("lenet5", (3, 32, 32), 10, seed=0)(torch.rand(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(("shape", "size"), [((3, 32, 32), 122_570), ((1, 28, 28), 93_322), ((1, 8, 8), 60_554)])
def test_the_small_cnn_has_about_a_hundred_thousand_parameters(shape: tuple[int, ...], size: int) -> None:
    model = FlatModel(build("small-cnn", shape, 10, seed=0))
    assert model.size == size
    assert not model.mixes_rows
    assert model(model.start, torch.rand(2, *shape)).shape == (2, 10)


def test_resnet18_has_its_known_size() -> None:
    model = FlatModel(build("resnet18", (3, 32, 32), 10, seed=0))
    assert model.size == 11_173_962
    assert model.mixes_rows
    narrow = build("resnet18-narrow", (3, 32, 32), 10, seed=0)
    assert FlatModel(narrow).size == 701_466
    assert sum(isinstance(part, nn.Conv2d) and part.kernel_size == (3, 3) for part in narrow.modules()) == 17


def test_resnet18_halves_the_image_three_times() -> None:
    narrow = build("resnet18-narrow", (3, 32, 32), 7, seed=0)
    assert isinstance(narrow, nn.Sequential)
    x, sizes = torch.rand(2, 3, 32, 32), []
    for layer in narrow:
        x = layer(x)
        sizes += [tuple(x.shape[1:])] if isinstance(layer, Block) else []
    assert sizes[::2] == sizes[1::2] == [(16, 32, 32), (32, 16, 16), (64, 8, 8), (128, 4, 4)]
    assert x.shape == (2, 7)


def test_a_block_with_silent_convolutions_is_its_shortcut() -> None:
    x = torch.randn(4, 3, 6, 6)
    block = Block(3, 3, 1)
    nn.init.zeros_(block.second_norm.weight)
    assert torch.equal(block(x), x.relu())
    wider = Block(3, 5, 2)
    nn.init.zeros_(wider.second_norm.weight)
    torch.testing.assert_close(wider(x), wider.shortcut(x).relu())


@pytest.mark.parametrize("name", ["cnn", "lenet5", "small-cnn", "resnet18"])
def test_convolutions_refuse_what_is_no_image(name: str) -> None:
    with pytest.raises(UsageError, match=r"needs images.*shape \(54,\).*logistic"):
        build(name, (54,), 7, seed=0)
    with pytest.raises(UsageError, match="at least"):
        build(name, (1, 3, 40), 7, seed=0)


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_fixes_the_start_and_nothing_else(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (FlatModel(build(name, (1, 28, 28), 10, seed)).start for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
