"""The server's side of a Flower app of one's own: any method of coterie with the clients of a Flower federation."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

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
    dtype: str = "float32",
    nodes: Mapping[int, int] | None = None,
    everyone: bool = False,
    modules: tuple[str, ...] = (),
    **federation: Any,
) -> ServerApp:
    """A ServerApp that trains with `clients` clients and writes a result folder, which it goes on with if it is there.

    target are the validation rows that define the goal, test those that are only measured; either may be a function
    that loads them. `nodes` says which registered node (Flower's id) is which client, where nodes are authenticated;
    else a node is believed its partition-id. `everyone`: clients have validation rows of their own. `modules` are one's
    own modules with works. Other keywords are settings of [federation]: timeout, quorum, patience, active, norm …
    Run settings of the app named `rounds` and `out` come before those given here.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        end_with_parent()
        settings = context.run_config
        problem = at_server(_got(model), loss, clients, _got(target), _got(test), l2=l2, dtype=dtype, everyone=everyone)
        run_here(
            problem,
            method,
            FlowerTransport(grid, nodes),
            Path(str(settings.get("out") or out)),
            {"rounds": int(settings.get("rounds") or rounds), "seed": seed, "dtype": dtype},
            federation,
            modules=modules,
        )

    return app


def _got(value: Any) -> Any:
    """A value, or what the function for it returns; a module is a value."""
    return value() if callable(value) and not isinstance(value, nn.Module) else value
