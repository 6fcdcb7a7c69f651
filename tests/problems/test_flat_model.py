"""A module as a function of one flat vector: views, no change of the user's module, no hidden state."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from coterie.errors import UsageError
from coterie.problems import weighting
from coterie.problems.models import FlatModel

X = torch.randn(6, 1, 6, 6, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """Two names for one matrix, and a buffer that scales."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(36, 36)
        self.second = nn.Linear(36, 36)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.second(torch.tanh(self.first(x.flatten(1))))


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


@pytest.fixture(params=[plain, normed, Tied], ids=["plain", "normed", "tied"])
def net(request) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return request.param()


def elsewhere(model: FlatModel) -> Tensor:
    return model.start + torch.linspace(-0.1, 0.1, model.size)


def usual(net: nn.Module, theta: Tensor) -> nn.Module:
    """A copy of the module with these parameters in the ordinary way, dropout off, batch norm by the batch."""
    copy = deepcopy(net).eval()
    vector_to_parameters(theta, copy.parameters())
    for part in copy.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.train()
    return copy


def test_the_start_is_the_modules_parameters(net):
    model = FlatModel(net)
    assert torch.equal(model.start, parameters_to_vector(net.parameters()))
    assert model.size == len(model.start) == sum(p.numel() for p in net.parameters())


def test_unflattening_is_views(net):
    model = FlatModel(net)
    theta = elsewhere(model)
    views = model.unflatten(theta)
    assert {name: p.shape for name, p in net.named_parameters()} == {name: v.shape for name, v in views.items()}
    assert all(v.untyped_storage().data_ptr() == theta.untyped_storage().data_ptr() for v in views.values())
    theta.fill_(7.0)
    assert all((v == 7.0).all() for v in views.values())


def test_the_output_is_the_modules_own(net):
    model = FlatModel(net)
    theta = elsewhere(model)
    for x in (X, X[:3]):
        torch.testing.assert_close(model(theta, x), usual(net, theta)(x))
    assert not torch.allclose(model(theta, X), model(model.start, X))


@pytest.mark.parametrize("training", [True, False])
def test_the_given_module_is_untouched(net, training):
    net.train(training)
    state = deepcopy(net.state_dict())
    flags = [part.training for part in net.modules()]
    model = FlatModel(net)
    torch.func.grad(lambda t: model(t, X).square().sum())(elsewhere(model))
    model.module(elsewhere(model))
    model.activation_numbers(X)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert [part.training for part in net.modules()] == flags
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert not any(part._forward_hooks for part in net.modules())


def test_the_model_is_untouched_by_the_given_module(net):
    model = FlatModel(net)
    theta, before = elsewhere(model), FlatModel(net)(elsewhere(model), X)
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.zero_()
    assert torch.equal(model(theta, X), before)
    assert model.start.abs().sum() > 0.0


def test_batch_norm_keeps_no_statistics():
    model = FlatModel(normed())
    theta = elsewhere(model)
    before = model(theta, X)
    model(theta, 100.0 + X)
    assert torch.equal(model(theta, X), before)
    module = model.module(theta)
    assert not dict(module.named_buffers())
    torch.testing.assert_close(module.eval()(X), before)  # in evaluation, too, by the batch
    mean = module[1](module[0](X)).mean((0, 2, 3))
    torch.testing.assert_close(mean, module[1].bias, atol=1e-5, rtol=0.0)


def test_only_batch_norm_mixes_rows(net):
    model = FlatModel(net)
    theta = elsewhere(model)
    assert model.mixes_rows is not torch.allclose(model(theta, X)[:3], model(theta, X[:3]), atol=1e-5)


def test_a_module_with_these_parameters(net):
    model = FlatModel(net)
    theta = elsewhere(model)
    module = model.module(theta)
    assert torch.equal(parameters_to_vector(module.parameters()), theta)
    assert torch.equal(module(X), model(theta, X))
    vector_to_parameters(torch.zeros(model.size), module.parameters())
    assert torch.equal(model.module(theta)(X), model(theta, X))


def test_the_state_fits_a_fresh_module(net):
    model = FlatModel(net)
    theta = elsewhere(model)
    state = model.state_dict(theta)
    fresh = deepcopy(net)
    left_out = fresh.load_state_dict(state, strict=False)
    assert not left_out.unexpected_keys
    assert torch.equal(parameters_to_vector(fresh.parameters()), theta)
    theta.zero_()
    assert all(value.abs().sum() > 0.0 for value in state.values())  # copies


def test_tied_parameters_stay_tied():
    net = Tied()
    model = FlatModel(net)
    assert model.size == 36 * 36 + 2 * 36
    module = model.module(elsewhere(model))
    assert module.first.weight is module.second.weight


def test_other_numbers(net):
    model = FlatModel(net)
    wide = model.to(dtype=torch.float64, device="cpu")
    assert (wide.start.dtype, model.start.dtype) == (torch.float64, torch.float32)
    out = wide(wide.start, X.double())
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.float(), model(model.start, X), atol=1e-5, rtol=1e-5)
    assert all(b.dtype == torch.int64 for name, b in wide.module(wide.start).named_buffers() if name == "seen")


def test_activations_are_counted_row_by_row():
    model = FlatModel(plain())
    layers = 36 + 5 + 5 + 5 + 3
    assert model.activation_numbers(X[:2]) >= 2 * layers
    assert model.activation_numbers(X) == 3 * model.activation_numbers(X[:2])


def test_a_module_without_parameters_is_refused():
    with pytest.raises(UsageError, match="the model ReLU has no parameters; there is nothing to train"):
        FlatModel(nn.ReLU())


def test_frozen_parameters_are_constants_not_variables() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    model = FlatModel(net)
    x = torch.randn(5, 3)
    assert model.size == 4 * 2 + 2
    assert torch.equal(model(model.start, x), net(x))
    assert torch.equal(model.module(model.start + 1.0)[0].weight, net[0].weight)


class Bag(nn.Module):
    """The mean of the words' vectors, then a linear map: inputs are word numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.out(self.words(numbers).mean(1))


def test_inputs_may_be_integers() -> None:
    """They stay integers whatever the parameters are, in vmapped gradients and in packed shards too."""
    model = FlatModel(Bag()).to(dtype=torch.float64, device="cpu")
    numbers = torch.tensor([[[0, 1], [2, 3]], [[4, 4], [5, 6]], [[1, 6], [0, 0]]])

    def gradient(theta: Tensor, some: Tensor) -> Tensor:
        return torch.func.grad(lambda t: model(t, some).square().sum())(theta)

    together = torch.func.vmap(gradient, in_dims=(None, 0))(model.start, numbers)
    for k in range(3):
        torch.testing.assert_close(together[k], gradient(model.start, numbers[k]))
    assert model.activation_numbers(numbers[0]) > 0

    labels = torch.tensor([0, 2])
    problem = weighting([(some, labels) for some in numbers], None, model, "cross_entropy", dtype=torch.float64)
    assert problem.train.columns[0].dtype == torch.int64
    direct = torch.nn.functional.cross_entropy(model(model.start, numbers[1]), labels)
    torch.testing.assert_close(problem.task.full_loss(problem.start, problem.train.client(1)), direct)
