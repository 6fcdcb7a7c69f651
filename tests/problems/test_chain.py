"""Convolutional networks that are differentiated by hand: the derivatives of torch's layers and autograd."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from coterie.federation import Batch
from coterie.numerics import Draw
from coterie.problems.models import FlatModel, build
from coterie.problems.models.chain import Chain
from coterie.problems.models.layers import Scaler
from coterie.problems.tasks.supervised import Supervised

ROWS, CLASSES = 6, 3


def strided() -> nn.Sequential:
    """Without pooling, with a stride, a border and dilation, and a convolution without units."""
    first, second = nn.Conv2d(2, 16, 3, stride=2, padding=(1, 0)), nn.Conv2d(16, 17, 2, dilation=2)
    return nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(17 * 3 * 2, CLASSES))


def pooled_alone() -> nn.Sequential:
    """Pooling without units, of an odd number of pixels; few channels, so they stay outermost."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3 * 4 * 3, 5), nn.ReLU(), nn.Linear(5, CLASSES)
    )


def pooled_first() -> nn.Sequential:
    """Pooling before the units."""
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 3 * 2, CLASSES))


def scaled() -> nn.Sequential:
    """As sub-models are: factors behind layers, and torch's own batch norm, here by the batch at hand."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 3, 3), Scaler(2.0)),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Sequential(nn.Linear(3 * 3 * 2, 5), Scaler(4.0)),
        nn.ReLU(),
        nn.Linear(5, CLASSES),
    )


def scaled_alone() -> nn.Sequential:
    """Factors without norm, so that products are by hand too."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        Scaler(2.0),
        nn.ReLU(),
        nn.Conv2d(3, 4, 2),
        Scaler(0.5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, CLASSES),
    )


NETWORKS = {
    "small-cnn-norm": ((1, 9, 8), lambda: build("small-cnn-norm", (1, 9, 8), CLASSES, seed=0)),
    "scaled": ((2, 8, 7), scaled),
    "scaled alone": ((2, 8, 7), scaled_alone),
    "lenet5": ((1, 12, 12), lambda: build("lenet5", (1, 12, 12), CLASSES, seed=0)),
    "lenet5 of colours": ((3, 14, 12), lambda: build("lenet5", (3, 14, 12), CLASSES, seed=0)),
    "small-cnn": ((1, 9, 8), lambda: build("small-cnn", (1, 9, 8), CLASSES, seed=0)),
    "wide-cnn": ((3, 16, 17), lambda: build("wide-cnn", (3, 16, 17), CLASSES, seed=0)),
    "conv4": ((3, 9, 9), lambda: build("conv4", (3, 9, 9), CLASSES, seed=0)),
    "strided": ((2, 10, 9), strided),
    "pooled alone": ((2, 10, 8), pooled_alone),
    "pooled first": ((2, 8, 7), pooled_first),
}


def example(
    name: str, *, weighted: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[Supervised, Tensor, Batch]:
    """A task, a point and a batch; some numbers of the images are equal, so that maxima have ties."""
    shape, make = NETWORKS[name]
    model = FlatModel(make()).to(dtype=dtype, device="cpu")
    task = Supervised.of(model, "cross_entropy", l2=0.1, classes=CLASSES)
    theta = (0.1 * Draw.of(1).normal(model.size, dtype=torch.float64)).to(dtype)
    x = Draw.of(2).normal(ROWS, *shape, dtype=torch.float64).to(dtype)
    x[:, :, : shape[1] // 2] = x[:, :, : shape[1] // 2].round()
    x[0] = 0.0
    weight = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0, 3.0], dtype=dtype) if weighted else None
    return task, theta, Batch((x, Draw.of(3).integers(CLASSES, ROWS)), weight)


def loss_of_module(task: Supervised, module: nn.Module, batch: Batch):
    """θ ↦ L(θ) by torch's own layers and losses."""
    module = module.to(batch.inputs.dtype)

    def loss(theta: Tensor) -> Tensor:
        outputs = functional_call(module, task.model.unflatten(theta), (batch.inputs,))
        by_row = nn.functional.cross_entropy(outputs, batch.labels, reduction="none")
        mean = by_row.mean() if batch.weight is None else (by_row * batch.weight).sum() / batch.weight.sum()
        return mean + 0.05 * theta.square().sum()

    return loss


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_derivatives_are_those_of_the_module(name, weighted):
    task, theta, batch = example(name, weighted=weighted)
    assert task.model.chain is not None
    loss = loss_of_module(task, NETWORKS[name][1](), batch)
    v = Draw.of(4).normal(len(theta), dtype=torch.float64)
    torch.testing.assert_close(task.gradient(theta, batch), grad(loss)(theta), rtol=1e-10, atol=1e-12)
    value, slope = task.loss_and_gradient(theta, batch)
    torch.testing.assert_close(value, loss(theta), rtol=1e-12, atol=1e-12)
    assert torch.equal(slope, task.gradient(theta, batch))
    known = grad(lambda t: grad(loss)(t) @ v)(theta)
    torch.testing.assert_close(task.hvp(theta, v, batch), known, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_product_is_how_the_gradient_moves(name):
    task, theta, batch = example(name)
    batch = Batch(
        (Draw.of(5).normal(*batch.inputs.shape, dtype=torch.float64), batch.labels)
    )  # no ties: units are kinks
    v, t = Draw.of(4).normal(len(theta), dtype=torch.float64), 1e-7
    moved = (task.gradient(theta + t * v, batch) - task.gradient(theta - t * v, batch)) / (2 * t)
    torch.testing.assert_close(task.hvp(theta, v, batch), moved, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_single_precision_is_close_to_double(name):
    task, theta, batch = example(name, dtype=torch.float32)
    double, exact, rows = example(name)
    v = Draw.of(4).normal(len(theta), dtype=torch.float64)
    found = torch.cat([task.gradient(theta, batch), task.hvp(theta, v.float(), batch)]).double()
    known = torch.cat([double.gradient(exact, rows), double.hvp(exact, v, rows)])
    assert (found - known).norm() <= 1e-5 * known.norm()


def test_images_may_have_any_layout():
    task, theta, batch = example("small-cnn")
    other = batch.inputs.transpose(2, 3).contiguous().transpose(2, 3)
    assert not other.is_contiguous()
    assert torch.equal(task.gradient(theta, Batch((other, batch.labels))), task.gradient(theta, batch))


def test_nothing_that_is_given_changes():
    task, theta, batch = example("lenet5")
    v = Draw.of(4).normal(len(theta), dtype=torch.float64)
    before = [tensor.clone() for tensor in (theta, v, batch.inputs)]
    task.gradient(theta, batch)
    task.hvp(theta, v, batch)
    assert all(map(torch.equal, before, (theta, v, batch.inputs)))


def test_it_is_left_alone_under_derivatives_and_many_clients():
    task, theta, batch = example("lenet5")
    at = theta.clone().requires_grad_()
    slope = task.gradient(at, batch)
    assert slope.requires_grad
    both = vmap(lambda t: task.gradient(t, batch))(torch.stack([theta, theta]))
    torch.testing.assert_close(both[1], slope.detach())


def test_it_is_left_alone_where_kernels_are_held(monkeypatch):
    task, _, batch = example("lenet5")
    chain = task.model.chain
    assert chain is not None
    assert chain.takes(batch.inputs)
    monkeypatch.setenv("COTERIE_PORTABLE", "1")
    assert not chain.takes(batch.inputs)


def test_no_rows_are_not_its_business():
    task, _, batch = example("lenet5")
    assert task.model.chain is not None
    assert not task.model.chain.takes(batch.inputs[:0])
    assert not task.model.chain.takes(batch.inputs[0])


def without_offset() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.Flatten(), nn.Linear(8, 2))


def frozen() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    net[0].weight.requires_grad_(False)
    return net


def heard() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    net[0].register_forward_hook(lambda module, args, output: 2 * output)
    return net


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(3, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(3, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(0, 2), nn.Linear(8, 2)),
        nn.Conv2d(1, 2, 3),
        without_offset(),
        frozen(),
        heard(),
    ],
    ids=lambda module: str(module).replace("\n", ""),
)
def test_other_modules_are_none(module):
    assert Chain.of(module) is None


def test_tied_layers_are_none():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    net[4].weight = net[2].weight
    assert FlatModel(net).chain is None
