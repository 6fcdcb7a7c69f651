"""The methods of the leaderboard, each with the settings that all its runs have and a grid of four settings.

Grids are of equal size, so that everybody is tuned with the same effort: four step sizes, or two step sizes and two
values of the setting that matters most beside it. Whatever has local steps takes 5 of them on batches of 20.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from coterie.methods.registry import METHODS
from coterie.reproduce.study import Settings

STEPS = (0.03, 0.1, 0.3, 1.0)
LOCAL = {"method.local_steps": 5, "method.batch": 20}
ALONE = "local-train"


class Entrant(NamedTuple):
    """A method: what all its runs have, and what is tried."""

    settings: Settings
    grid: tuple[Settings, ...]


def _tuned(method: str, second: Mapping[str, tuple[Any, Any]] | None = None, **settings: Any) -> Entrant:
    """A method with local steps; second is a setting with two values, tried with two step sizes."""
    own = {f"method.{key}": value for key, value in settings.items()}
    return Entrant({"run.method": method, **LOCAL, **own}, _grid(STEPS[1:3], second))


def _grid(steps: tuple[float, float], second: Mapping[str, tuple[Any, Any]] | None) -> tuple[Settings, ...]:
    if second is None:
        return tuple({"method.step": step} for step in STEPS)
    ((key, values),) = second.items()
    return tuple({"method.step": step, f"method.{key}": value} for step in steps for value in values)


def _without_local_steps(
    method: str, second: Mapping[str, tuple[Any, Any]] | None = None, steps: tuple[float, float] = (0.1, 0.3)
) -> Entrant:
    """A method that asks for gradients, or chooses its number of local steps itself."""
    return Entrant({"run.method": method}, _grid(steps, second))


COMMON: dict[str, Entrant] = {
    "fedavg": _tuned("fedavg"),
    "fedprox": _tuned("fedprox", {"penalty": (0.01, 0.3)}),
    "scaffold": _tuned("scaffold"),
    "fedavgm": _tuned("fedavgm", {"momentum": (0.5, 0.9)}),
    "fedadam": _tuned("fedadam", {"server_step": (0.01, 0.03)}),
    "fedyogi": _tuned("fedyogi", {"server_step": (0.01, 0.03)}),
    "qffl": _tuned("qffl", {"fairness": (0.2, 2.0)}),
}
"""One model for all, whoever wants it."""

PFEDME: dict[str, Any] = {"inner_steps": 5, "inner_step": 0.1}
TARGET: dict[str, Entrant] = {
    ALONE: _tuned(ALONE),
    **COMMON,
    "geometric-median": _tuned("geometric-median"),
    "ditto": _tuned("ditto", {"penalty": (0.1, 1.0)}),
    "pfedme": _tuned("pfedme", {"penalty": (5.0, 15.0)}, **PFEDME),
    "feddisco": _tuned("feddisco", {"severity": (0.1, 0.5)}),
    "fedawa": _tuned("fedawa", {"weight_step": (0.001, 0.01)}),
    "fedce": _tuned("fedce", {"combine": ("product", "sum")}),
    "fedlaw": _tuned("fedlaw", {"weight_step": (0.01, 0.1)}),
    "meritfed": _tuned("meritfed", {"mirror_step": (0.3, 3.0)}),
    "meritfed-sums": _tuned("meritfed", {"mirror_step": (0.3, 3.0)}, solver="lagged"),
    "fedadp": _without_local_steps("fedadp"),
    "tawt": _without_local_steps("tawt"),
    "afl": _without_local_steps("afl", {"outer_step": (0.005, 0.05)}),
    "primal-dual": _without_local_steps("primal-dual", {"outer_step": (0.005, 0.05)}),
    "bilevel": _without_local_steps("bilevel", {"outer_step": (0.02, 0.2)}, (0.05, 0.2)),
}
"""A model for one target."""

EVERYONE: dict[str, Entrant] = {
    ALONE: _tuned(ALONE, everyone=True),
    **COMMON,
    "ditto": _tuned("ditto", {"penalty": (0.1, 1.0)}, everyone=True),
    "pfedme": _tuned("pfedme", {"penalty": (5.0, 15.0)}, everyone=True, **PFEDME),
    "apfl": _tuned("apfl", {"mixing": (0.25, 0.75)}),
    "fedper": _tuned("fedper"),
    "fedrep": _tuned("fedrep"),
    "fedbn": _tuned("fedbn"),
    "fedfomo": _tuned("fedfomo", {"downloads": (2, 5)}),
    "fedamp": _tuned("fedamp", {"width": (0.1, 1.0)}),
    "apple": _tuned("apple", {"weight_step": (0.01, 0.1)}),
    "fedala": _tuned("fedala", {"weight_step": (0.3, 1.0)}),
    "pfedgraph": _tuned("pfedgraph", {"graph_penalty": (0.2, 0.8)}),
    "cobo": _tuned("cobo", {"pull": (0.3, 1.0)}),
    "dpfl": _tuned("dpfl", {"budget": (2, 5)}),
    "fedcollab": _tuned("fedcollab", {"generalisation": (0.3, 1.0)}),
    "ifca": _tuned("ifca", {"clusters": (2, 4)}),
    "collaborate": _tuned("collaborate", {"mirror_step": (0.5, 2.0)}),
}
"""A model for every client."""

ENTRANTS = {"target": TARGET, "everyone": EVERYONE}
NEEDS_NORM = ("fedbn",)  # only where the model has batch norm
SECURE = {entry.name for entry in METHODS if entry.secure == "yes"} | {"meritfed-sums"}
"""What needs sums and single numbers only."""
