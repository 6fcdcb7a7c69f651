"""The server's side of your own Flower app: any method of coterie with the clients of a Flower federation."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from coterie import machine
from coterie.engines.flower.transport import FlowerTransport
from coterie.engines.own import at_server, run_here
from coterie.experiment.watching import end_with_parent
from coterie.methods import Method
from coterie.problems.tasks.supervised import RowLoss


def server_app(
    model: nn.Module | Callable[[], nn.Module],
    loss: str | RowLoss,
    method: Method,
    *,
    clients: int,
    target: Any = None,
    test: Any = None,
    rounds: int = 10,
    out: str | Path = "runs/flower",
    seed: int = 0,
    l2: float = 0.0,
    dtype: machine.DtypeLike = "float32",
    nodes: Mapping[int, int] | None = None,
    everyone: bool = False,
    modules: tuple[str, ...] = (),
    **federation: Any,
) -> ServerApp:
    """A ServerApp that trains and writes a result folder; a run that is in the folder is resumed.

    Args:
        model: the module that is trained, or a function that makes it.
        loss: the name of a loss, or a function of (outputs, labels) that returns one number per row.
        method: a method of coterie, such as `coterie.methods.meritfed()`.
        clients: the number of clients.
        target: the validation rows that define the goal, or a function that loads them.
        test: rows that are only measured on, or a function that loads them.
        rounds: rounds of training; the app's run setting `rounds` comes before it.
        out: the result folder; the app's run setting `out` comes before it.
        seed: the seed of all draws.
        l2: weight of the penalty on the squared norm of the parameters.
        dtype: "float32" or "float64".
        nodes: the client of each registered node, by Flower's id, where nodes are authenticated. Without it a node's
            partition-id is believed.
        everyone: whether clients have validation rows of their own.
        modules: modules with works of your own.
        federation: settings of [federation]: timeout, quorum, patience, active, norm …

    Example:
        >>> app = server_app(net, "cross_entropy", methods.meritfed(), clients=3, target=rows)  # doctest: +SKIP
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        end_with_parent()
        settings = context.run_config
        problem = at_server(
            _value(model), loss, clients, _value(target), _value(test), l2=l2, dtype=dtype, everyone=everyone
        )
        run_here(
            problem,
            method,
            FlowerTransport(grid, nodes),
            Path(str(settings.get("out") or out)),
            {"rounds": int(settings.get("rounds") or rounds), "seed": seed, "dtype": machine.checked_dtype(dtype)},
            federation,
            modules=modules,
        )

    return app


def _value(value: Any) -> Any:
    """A value, or the result of the function for it; a module is a value."""
    return value() if callable(value) and not isinstance(value, nn.Module) else value
