"""Networks of patches with batch norm, differentiated by hand: the derivatives of torch's layers and autograd."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from coterie.federation import Batch
from coterie.numerics import Draw
from coterie.numerics.proximal import Pull, proximal_point
from coterie.problems.models import FlatModel, build, tiled
from coterie.problems.models.layers import BatchStatisticsNorm2d, PatchConv2d
from coterie.problems.models.tiled import Tiled
from coterie.problems.tasks.supervised import Supervised

CLIENTS, POINTS, ROWS, CLASSES = 4, 2, 6, 3
SHAPES = {"grey": (1, 17, 16), "colours": (3, 18, 16), "small": (1, 8, 9)}


class Case:
    """A task with all clients' points, directions and batches; and the same network of torch's own layers."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float64, l2: float = 0.1) -> None:
        shape = SHAPES[name]
        module = build("cnn", shape, CLASSES, seed=0)
        self.model = FlatModel(module).to(dtype=dtype, device="cpu")
        self.task = Supervised.of(self.model, "cross_entropy", l2=l2, classes=CLASSES)
        self.usual = nn.Sequential(*map(_usual, module)).to(dtype)
        size = self.model.size
        self.theta = self.model.start + 0.2 * Draw.of(1).normal(CLIENTS, POINTS, size, dtype=dtype)
        self.v = Draw.of(2).normal(CLIENTS, size, dtype=dtype)
        self.images = Draw.of(3).normal(CLIENTS, ROWS, *shape, dtype=dtype)
        self.x = self.model.prepare(self.images.flatten(0, 1)).unflatten(0, (CLIENTS, ROWS))
        self.y = Draw.of(4).integers(CLASSES, CLIENTS, ROWS)
        self.weight = torch.arange(CLIENTS * ROWS, dtype=dtype).view(CLIENTS, ROWS) % 3

    def loss(self, k: int, weighted: bool):
        """θ ↦ the loss of a client's batch by torch's own layers."""

        def loss(theta: Tensor) -> Tensor:
            outputs = functional_call(self.usual, self.model.unflatten(theta), (self.images[k],))
            by_row = F.cross_entropy(outputs, self.y[k], reduction="none")
            mean = by_row @ self.weight[k] / self.weight[k].sum() if weighted else by_row.mean()
            return mean + 0.05 * theta.square().sum()

        return loss

    def batch(self, k: int, weighted: bool = False) -> Batch:
        return Batch((self.x[k], self.y[k]), self.weight[k] if weighted else None)


def _usual(layer: nn.Module) -> nn.Module:
    """torch's layer of the same kind and shape."""
    if isinstance(layer, PatchConv2d):
        return nn.Conv2d(layer.in_channels, layer.out_channels, layer.side, stride=layer.side, padding=layer.border)
    return nn.BatchNorm2d(layer.num_features, track_running_stats=False) if hasattr(layer, "num_features") else layer


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_derivatives_are_those_of_torchs_layers(name: str, weighted: bool) -> None:
    case = Case(name)
    loss, theta, v = case.loss(0, weighted), case.theta[0, 0], case.v[0]
    batch = case.batch(0, weighted)
    torch.testing.assert_close(case.task.gradient(theta, batch), grad(loss)(theta), rtol=1e-10, atol=1e-12)
    product = grad(lambda t: grad(loss)(t) @ v)(theta)
    torch.testing.assert_close(case.task.hvp(theta, v, batch), product, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", SHAPES)
def test_a_product_is_the_difference_of_gradients(name: str) -> None:
    case, h = Case(name), 1e-5
    theta, v, batch = case.theta[0, 0], case.v[0] / case.v[0].norm(), case.batch(0)
    ahead, behind = (case.task.gradient(theta + sign * h * v, batch) for sign in (1, -1))
    torch.testing.assert_close(case.task.hvp(theta, v, batch), (ahead - behind) / (2 * h), rtol=1e-5, atol=1e-7)


@pytest.mark.chunk_free
@pytest.mark.parametrize("name", SHAPES)
def test_the_bits_of_a_client_do_not_depend_on_the_others(name: str) -> None:
    case = Case(name, torch.float32)
    gradient, hvp, theta, v, x, y = case.task.gradient, case.task.hvp, case.theta, case.v, case.x, case.y
    gradients = vmap(lambda t, x, y: gradient(t, Batch((x, y))))(theta[:, 0], x, y)
    assert torch.equal(gradients, torch.stack([gradient(theta[k, 0], case.batch(k)) for k in range(CLIENTS)]))
    products = vmap(lambda t, d, x, y: hvp(t, d, Batch((x, y))))(theta[:, 0], v, x, y)
    assert torch.equal(products, torch.stack([hvp(theta[k, 0], v[k], case.batch(k)) for k in range(CLIENTS)]))

    def pairs(part: slice) -> Tensor:
        """Both points of each of these clients."""
        at_both = vmap(gradient, in_dims=(0, None))
        return vmap(lambda points, x, y: at_both(points, Batch((x, y))))(theta[part], x[part], y[part])

    assert torch.equal(pairs(slice(1, 3)), pairs(slice(None))[1:3])
    torch.testing.assert_close(pairs(slice(None))[:, 0], gradients)


PULL = Pull(penalty=2.0, step=0.1, steps=7, accuracy=1e-3)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_a_proximal_point_is_that_of_torchs_layers(name: str, weighted: bool) -> None:
    case = Case(name, l2=0.0)
    loss, center = case.loss(0, weighted), case.theta[0, 0]
    plain = proximal_point(lambda t: grad(loss)(t) - 0.1 * t, center, PULL)  # the loss of a case has a ridge of .1
    found = case.task.proximal_point(center, case.batch(0, weighted), PULL)
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(found, center, atol=1e-3)


@pytest.mark.chunk_free
@pytest.mark.parametrize("name", SHAPES)
def test_the_bits_of_a_proximal_point_do_not_depend_on_other_clients(name: str) -> None:
    case = Case(name, torch.float32, l2=0.0)
    centers = case.theta[:, 0]
    whole = vmap(lambda t, x, y: case.task.proximal_point(t, Batch((x, y)), PULL))(centers, case.x, case.y)
    one = [case.task.proximal_point(centers[k], case.batch(k), PULL) for k in range(CLIENTS)]
    assert torch.equal(whole, torch.stack(one))
    two = vmap(lambda t, x, y: case.task.proximal_point(t, Batch((x, y)), PULL))(centers[1:3], case.x[1:3], case.y[1:3])
    assert torch.equal(whole[1:3], two)


def test_a_client_that_is_accurate_enough_stays_where_it_is_while_the_others_move() -> None:
    case = Case("grey", l2=0.0)
    centers, pull = case.theta[:, 0], PULL._replace(steps=1)
    norms = torch.stack([case.task.gradient(centers[k], case.batch(k)).square().sum() for k in range(CLIENTS)])
    between = pull._replace(accuracy=float(norms.sort().values[1:3].mean()))
    found = vmap(lambda t, x, y: case.task.proximal_point(t, Batch((x, y)), between))(centers, case.x, case.y)
    stayed = (found == centers).all(1)
    assert stayed.tolist() == (norms < between.accuracy).tolist()
    assert stayed.sum() == 2


def test_a_ridge_keeps_the_plain_proximal_point(calls) -> None:
    case = Case("grey")
    found = case.task.proximal_point(case.theta[0, 0], case.batch(0), PULL)
    loss = case.loss(0, weighted=False)
    torch.testing.assert_close(found, proximal_point(grad(loss), case.theta[0, 0], PULL), rtol=1e-9, atol=1e-11)
    assert calls == ["_gradients"] * PULL.steps


def test_levels_of_vmap_may_come_in_any_order() -> None:
    case = Case("grey")
    theta, x, y, weight = case.theta, case.x, case.y, case.weight
    expected = torch.stack(
        [torch.stack([case.task.gradient(theta[k, p], case.batch(k)) for k in range(CLIENTS)]) for p in range(POINTS)]
    )
    points_first = vmap(lambda own: vmap(lambda t, x, y: case.task.gradient(t, Batch((x, y))))(own, x, y), in_dims=1)
    torch.testing.assert_close(points_first(theta), expected)
    common = vmap(lambda x, y: case.task.gradient(theta[0, 0], Batch((x, y))))(x, y)  # one point for all clients
    torch.testing.assert_close(common[1], case.task.gradient(theta[0, 0], case.batch(1)))
    shared = vmap(lambda t: case.task.gradient(t, case.batch(0)))(theta[:, 0])  # one batch for all points
    torch.testing.assert_close(shared[2], case.task.gradient(theta[2, 0], case.batch(0)))
    weighted = vmap(lambda t, x, y, w: case.task.gradient(t, Batch((x, y), w)))(theta[:, 0], x, y, weight)
    torch.testing.assert_close(weighted[3], case.task.gradient(theta[3, 0], case.batch(3, weighted=True)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was computed by hand."""
    seen: list[str] = []
    for name in ("_gradients", "_products", "_proximal_points"):
        plain = getattr(Tiled, name)

        def counted(self: Tiled, *args: object, plain=plain, name=name) -> Tensor:
            seen.append(name)
            return plain(self, *args)

        monkeypatch.setattr(Tiled, name, counted)
    tiled._of_all.cache_clear()
    yield seen
    tiled._of_all.cache_clear()


def test_it_is_used_where_nothing_differentiates_around_it_and_nowhere_else(calls, monkeypatch) -> None:
    case = Case("grey")
    theta, v, batch = case.theta[0, 0], case.v[0], case.batch(0)
    plain = grad(case.loss(0, weighted=False))(theta)
    case.task.gradient(theta, batch)
    case.task.hvp(theta, v, batch)
    replace(case.task, l2=0.0).proximal_point(theta, batch, PULL)
    assert calls == ["_gradients", "_products", "_proximal_points"]
    calls.pop()
    twice = grad(lambda t: case.task.gradient(t, batch) @ v)(theta)  # a derivative around it
    torch.testing.assert_close(twice, case.task.hvp(theta, v, batch))
    images = Batch((case.images[0], case.y[0]))  # not cut into patches beforehand
    torch.testing.assert_close(case.task.gradient(theta, images), plain)
    with torch.autocast("cpu"):  # other numbers than the layers would take
        case.task.gradient(theta, batch)
    monkeypatch.setattr(tiled, "wanted", lambda: True)  # portable processes keep torch's layers
    torch.testing.assert_close(case.task.gradient(theta, batch), plain)
    assert calls == ["_gradients", "_products", "_products"]


def test_other_networks_are_left_alone() -> None:
    plain = build("cnn", SHAPES["grey"], CLASSES, seed=0)
    assert Tiled.of(plain) is not None
    layers = list(plain)
    assert Tiled.of(nn.Sequential(*layers[:6], nn.Dropout(), *layers[6:])) is None
    assert Tiled.of(nn.Sequential(layers[0], nn.BatchNorm2d(1), *layers[2:])) is None
    assert Tiled.of(nn.Sequential(*layers[:2], nn.Tanh(), *layers[3:])) is None
    assert Tiled.of(layers[-1]) is None
    layers[1].weight.requires_grad_(False)
    assert Tiled.of(plain) is None
    listening = build("cnn", SHAPES["grey"], CLASSES, seed=0)
    listening[0].register_forward_hook(lambda *_: None)
    assert Tiled.of(listening) is None
    assert isinstance(listening[1], BatchStatisticsNorm2d)
