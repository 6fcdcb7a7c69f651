"""`distributionally-robust`: a model for the worst mixture of clients, a minimax problem on the simplex.

    min_x max_{y ∈ Δ}  Σ_k y_k L_k(x) − ½ρ ‖y − 1/m‖²  =  1/m Σ_k f_k(x, y),    f_k = m y_k L_k(x) − ½ρ ‖y − 1/m‖²

as in agnostic federated learning (Mohri et al. 2019), with a penalty that makes it strongly concave in y: the greater
ρ, the nearer y stays to equal weights. L_k is the cross-entropy of a linear model, plus ½ ridge ‖x‖². Clients have few
classes each, so that a mean of equal weights serves those with difficult classes badly.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.federation import Batch
from coterie.problems.base import Context, View
from coterie.problems.data.dealt import Data, Split, deal, dense, draws, measured, source
from coterie.problems.nested import Minimax, NestedProblem, batch_mean
from coterie.problems.tasks.sets import Simplex
from coterie.problems.tasks.variables import Bound
from coterie.settings import Count, NonNegative, Positive


class WorstMixture:
    """f_k. The client's number is the second column of a batch."""

    def __init__(self, clients: int, penalty: float, ridge: float) -> None:
        self.clients, self.penalty, self.ridge = clients, penalty, ridge

    def __call__(self, x: Bound, y: Tensor, batch: Batch) -> Tensor:
        """The mean over a batch."""
        losses = F.cross_entropy(x(batch.inputs), batch.labels, reduction="none")
        loss = batch_mean(losses, batch) + 0.5 * self.ridge * x.flat.square().sum()
        away = (y - 1.0 / self.clients).square().sum()
        return self.clients * y[batch.columns[1][:1]].sum() * loss - 0.5 * self.penalty * away


def distributionally_robust(
    context: Context,
    *,
    data: Data = "digits",
    clients: Count = 10,
    penalty: Positive = 1.0,
    ridge: NonNegative = 0.01,
    test: Count = 400,
) -> NestedProblem:
    """A linear model (outer variable) against the worst weights of the clients (inner variable, on the simplex).

    80 % of a client's rows are for training; the others say how well the worst client is served.

    Args:
        penalty: ρ, how much unequal weights cost.
        test: digits set aside for the test.

    Example:
        >>> from coterie.problems import Context
        >>> problem = distributionally_robust(Context(0), clients=4)
        >>> problem.inner_start.tolist()
        [0.25, 0.25, 0.25, 0.25]
    """
    draw = draws(context, "distributionally-robust")
    images, held_out = source(data, test, draw.phase("test"))
    dealt = deal(images, held_out, clients, Split("shards", 2, 0.5), 0.8, draw)
    options = context.tensor_options
    x_test, y_test = dealt.test.x.to(context.device, context.dtype), dealt.test.y.to(context.device)

    def measures(view: View) -> dict[str, float]:
        with torch.no_grad():
            net = problem.task.x(view.model)
            by_client = [
                (net(x.to(**options)).argmax(1) == y.to(context.device)).double().mean() for x, y in dealt.valid
            ]
            found = measured(net(x_test), y_test)
        return {**found, "validation_accuracy_worst": float(torch.stack(by_client).min())}

    problem = Minimax(WorstMixture(clients, penalty, ridge)).on(
        [(x, torch.full((len(y),), k), y) for k, (x, y) in enumerate(dealt.train)],
        x=dense([10], tuple(images.x.shape[1:]), context.seed),
        y=torch.full((clients,), 1.0 / clients),
        y_set=Simplex(),
        measures=measures,
        **options,
    )
    return problem
