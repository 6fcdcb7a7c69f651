"""The peer pfl (pip install 'pfl[pytorch]'): FedAvg by its simulated backend, in this process.

A user's data set holds the rows of its walk in order, so that one epoch of it is the walk that ours takes; gathering
them, evaluation and metrics are left out, in favour of pfl.
"""

import logging
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.speed.measure import Side
from benchmarks.speed.scene import Shards


def missing() -> str | None:
    """Why pfl cannot be run, if so."""
    try:
        import pfl.model.pytorch  # noqa: F401
    except ImportError as error:
        return f"not installed ({error}); pip install 'pfl[pytorch]'"
    return None


class Named(nn.Module):
    """A network with the loss where pfl looks for it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, float]:
        return {}


class _Once:
    """Users in a fixed order."""

    def __init__(self, ids: list[int]) -> None:
        self.users = cycle(ids)

    def __call__(self) -> int:
        return next(self.users)


def side(net: nn.Module, start: Tensor, shards: Shards, plan: dict[int, Tensor], step: float) -> Side:
    """A FedAvg round over the clients of the plan, which holds their rows by step, [steps, batch]."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    logging.getLogger("pfl").setLevel(logging.ERROR)
    users = {k: tuple(c[rows.flatten()] for c in shards[k]) for k, rows in plan.items()}
    batch = next(iter(plan.values())).shape[1]
    module = Named(net)
    parameters = list(net.parameters())
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    data = FederatedDataset(lambda k: PyTorchTensorDataset(users[k], user_id=str(k)), _Once(list(users)))
    backend = SimulatedBackend(training_data=data, val_data=data)
    train = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=step, local_batch_size=batch)
    # the second of two iterations: pfl evaluates in the first
    params = NNAlgorithmParams(
        central_num_iterations=2, evaluation_frequency=10**6, train_cohort_size=len(users), val_cohort_size=0
    )

    def run() -> Tensor:
        with torch.no_grad():
            nn.utils.vector_to_parameters(start.clone(), parameters)
        algorithm = FederatedAveraging()
        algorithm._current_central_iteration = 1
        algorithm.run(
            params,
            backend,
            model,
            train,
            model_eval_params=NNEvalHyperParams(local_batch_size=batch),
            callbacks=[],
            send_metrics_to_platform=False,
        )
        return nn.utils.parameters_to_vector(parameters).detach().clone()

    return run
