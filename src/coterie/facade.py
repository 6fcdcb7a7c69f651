"""coterie from Python: `fit` trains a problem with a method, and `Fit` is the result."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal
from warnings import warn

from rich.console import Console
from torch import Tensor, nn

from coterie import machine
from coterie.errors import UsageError
from coterie.experiment.build import Parts, assemble_locally, check_needs, federate
from coterie.experiment.config import Config, FederationTable, RunTable, checked_table
from coterie.experiment.loop import Observer, Result, run_rounds
from coterie.experiment.records import Records, prepare, save_model
from coterie.federation.ledger import Ledger
from coterie.methods import Method
from coterie.problems.base import Problem
from coterie.problems.nested import NestedProblem
from coterie.problems.weighting import Weighting
from coterie.report.terminal import comparison_table, matrix_report, weights_table
from coterie.storage import write_atomically, write_json

OWN = "own data"
KEYS = {"target_at": "target"}


@dataclass(frozen=True, repr=False)
class Fit:
    """A trained model, who helped, and what it cost; `coterie.fit` returns it.

    Example:
        >>> import torch, coterie
        >>> shards = [(torch.randn(20, 4), torch.randn(20)) for _ in range(3)]
        >>> problem = coterie.Weighting.on(shards, model=torch.nn.Linear(4, 1), loss="squared")
        >>> fit = coterie.fit(problem, coterie.methods.fedavg(), rounds=2)
        >>> fit
        <coterie.Fit by fedavg: finished, 2 rounds>
        >>> [line["round"] for line in fit.history]
        [0, 1, 2]
        >>> fit.model
        Linear(in_features=4, out_features=1, bias=True)
    """

    _parts: Parts
    _result: Result

    @property
    def weights(self) -> Tensor | None:
        """Learned client weights [K], if the method learns some; where every client is a target, [K, K] by target."""
        return self._result.view.weights

    @property
    def clusters(self) -> list[list[int]]:
        """Groups of clients that learn from each other, where every client is a target."""
        if "clusters" not in self.summary:
            raise UsageError(f"{self.summary['method']} learns no matrix of weights; use methods.collaborate.")
        return [list(cluster) for cluster in self.summary["clusters"]]

    @property
    def model(self) -> nn.Module:
        """The trained model, an ordinary module in evaluation mode; batch norm has running statistics.

        They are those of the clients' training rows at the end, weighed by the learned weights.
        """
        if not isinstance(self._parts.problem, Weighting):
            raise UsageError("a nested problem has no single model; its variables are in fit.variables.")
        if self._result.view.model.dim() == 2:
            raise UsageError("every client has its own model here: client k's is fit.models[k].")
        view = self._result.view
        return self._parts.problem.task.model.module(view.model, view.buffers)

    @property
    def best(self) -> nn.Module:
        """The model of the recorded round with the lowest validation loss; `summary["best"]` has its number."""
        best = self._result.best
        if best is None or not isinstance(self._parts.problem, Weighting) or best.view.model.dim() == 2:
            raise UsageError("there is no best model: it needs validation rows (target=…) and one model for all.")
        return self._parts.problem.task.model.module(best.view.model, best.view.buffers)

    @property
    def models(self) -> list[nn.Module]:
        """The clients' models, where every client is a target."""
        models = self._result.view.model
        if not isinstance(self._parts.problem, Weighting) or models.dim() == 1:
            raise UsageError(f"{self.summary['method']} trains one model for all; it is fit.model.")
        buffers = self._result.view.buffers
        own = ({name: values[k] for name, values in buffers.items()} for k in range(len(models)))
        model = self._parts.problem.task.model
        return [model.module(theta, mine) for theta, mine in zip(models, own, strict=True)]

    @property
    def variables(self) -> dict[str, Tensor]:
        """Every trained tensor by name: a model's parameters, or x and y of a nested problem."""
        return dict(self._parts.problem.named(self._result.view))

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry per recorded round: losses, accuracies, weight statistics, communication."""
        return self._result.history

    @property
    def ledger(self) -> Ledger:
        """What was communicated: rounds, numbers and bytes each way, by cause."""
        return self._result.ledger

    @property
    def summary(self) -> dict[str, Any]:
        """Outcome and final measures."""
        return self._result.summary

    def __repr__(self) -> str:
        return f"<coterie.Fit by {self.summary['method']}: {self.summary['outcome']}, {self.summary['rounds']} rounds>"

    def report(self) -> None:
        """Print who helped and how good the model is."""
        console = Console(highlight=False)
        if "clusters" in self.summary:
            console.print(matrix_report(self.summary["weights"], self.clusters))
        elif self.weights is not None:
            console.print(weights_table(self.weights.tolist(), self._parts.problem.friends))
        console.print(comparison_table(self.summary))

    def save(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write a result folder, as `coterie run` does: summary, metrics, weights, ledger and the model.

        Args:
            folder: where to write; it must be empty or new.
            force: empty an existing folder first.
        """
        folder = Path(folder)
        prepare(folder, force=force)
        with Records(folder, {}) as records:
            for line in self.history:
                records.metrics(line)
            for round_, weights in self._result.weights:
                records.weights(round_, weights)
            for event in self._result.events:
                records.event(event)
            records.flush()
        write_atomically(folder / "config.toml", self._parts.config.as_record().encode())
        write_json(folder / "ledger.json", self.ledger.as_dict())
        write_json(folder / "summary.json", self.summary)
        metadata = {"format": "pt", "coterie_method": self._parts.method.name}
        save_model(folder / "model.safetensors", self._parts.problem.named(self._result.view), metadata)
        if (best := self._result.best) is not None:
            metadata = {**metadata, "coterie_round": str(best.round)}
            save_model(folder / "model-best.safetensors", self._parts.problem.named(best.view), metadata)
        return folder


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during `fit`; `fit` is what was trained until then."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(f"stopped after {fit.summary['rounds']} rounds")
        self.fit = fit


def fit(
    problem: "Problem | Federation",
    method: Method,
    rounds: int = 100,
    *,
    seed: int = 0,
    record: int = 1,
    threads: int | Literal["auto"] = "auto",
    portable: bool = False,
    observer: Observer | None = None,
    **federation: Any,
) -> Fit:
    """Train. The same problem, settings and seed give the same result, bit for bit.

    All clients are in this process. Ctrl-C and SIGTERM are raised again as `Stopped`, a KeyboardInterrupt that holds
    what was trained until then.

    Args:
        problem: the clients and what they minimise: `coterie.Weighting.on(…)`, `coterie.Nested(…).on(…)` and its like.
        method: how to train, for example `coterie.methods.meritfed(step=0.1)`.
        rounds: how many rounds to train.
        seed: fixes every draw.
        record: how many rounds lie between two entries of the history.
        threads: how many threads compute.
        portable: whether Intel and AMD shall give the same bits; it needs COTERIE_PORTABLE=1 before torch is used.
        observer: is called with every recorded round.
        federation: the settings of [federation]: active or count (participation), norm, clip and trust (screening),
            compress, ratio and feedback (compression), guard, target_at (the client that holds the target's rows;
            by default the server), mode, chunk and memory (how clients are computed). mode "auto" is chosen by a short
            measurement, once per problem; set "vmap" or "sequential" for the same bits in every process.

    Example:
        >>> import torch, coterie
        >>> x = torch.randn(20, 4)
        >>> same, opposite = (x, x.sum(1)), (x, -x.sum(1))
        >>> problem = coterie.Weighting.on([same, opposite], target=same, model=torch.nn.Linear(4, 1), loss="squared")
        >>> fit = coterie.fit(problem, coterie.methods.meritfed(mirror_step=1.0), rounds=20)
        >>> bool(fit.weights[0] > fit.weights[1])
        True
    """
    if isinstance(problem, Federation):
        _deprecated("coterie.fit(federation, …)", "coterie.fit(problem, method, …)")
        federation = {**problem.options, **federation}
        problem = problem.problem
    if not isinstance(problem, Problem):
        raise UsageError(
            f"fit takes a problem first, not a {type(problem).__name__}; make one by coterie.Weighting.on(…) or "
            "coterie.Nested(…).on(…)."
        )
    if not isinstance(method, Method):
        raise UsageError(f"{method!r} is no method; make one, for example coterie.methods.meritfed(step=0.1).")
    values = {
        "method": method.name,
        "problem": OWN,
        "rounds": rounds,
        "seed": seed,
        "record": record,
        "threads": threads,
        "portable": portable,
        "dtype": str(problem.start.dtype).removeprefix("torch."),
        "device": str(problem.start.device),
        "baselines": [],
    }
    run = checked_table(RunTable, "run", values)
    machine.require(run.portable)
    check_needs(method, problem, OWN)
    config = Config(run, dict(method.settings), {}, _options(federation))
    parts = assemble_locally(config, problem, method)
    done = Fit(parts, run_rounds(parts, None, observer))
    if done.summary["outcome"] == "stopped":
        raise Stopped(done)
    return done


def _options(federation: Mapping[str, Any]) -> FederationTable:
    """The keywords of `fit` as [federation]; its target, a place, is target_at here, where target means rows."""
    return checked_table(FederationTable, "federation", {KEYS.get(key, key): v for key, v in federation.items()})


@dataclass(frozen=True, repr=False)
class Federation:
    """Deprecated: give `fit` the problem, and these options as its keywords."""

    problem: Problem
    options: Mapping[str, Any]

    @classmethod
    def local(cls, shards: Iterable[Any], target: Any = None, **settings: Any) -> "Federation":
        """Deprecated: write `coterie.Weighting.on(shards, target, …)`."""
        _deprecated("coterie.Federation.local(…)", "coterie.Weighting.on(shards, target=…, model=…, loss=…)")
        of_problem = set(signature(Weighting.on).parameters)
        problem = Weighting.on(shards, target, **{k: v for k, v in settings.items() if k in of_problem})
        return cls._checked(problem, {k: v for k, v in settings.items() if k not in of_problem})

    @classmethod
    def of(cls, problem: NestedProblem, **options: Any) -> "Federation":
        """Deprecated: give the problem to `fit` itself."""
        _deprecated("coterie.Federation.of(problem)", "coterie.fit(problem, method, …)")
        if not isinstance(problem, NestedProblem):
            raise UsageError(f"a {type(problem).__name__} is no nested problem; make one by coterie.Nested(…).on(…).")
        return cls._checked(problem, options)

    @classmethod
    def _checked(cls, problem: Problem, options: Mapping[str, Any]) -> "Federation":
        federate(problem, _options(options))
        return cls(problem, options)

    def __repr__(self) -> str:
        return f"<coterie.Federation of {self.problem.clients} clients>"


def _deprecated(old: str, new: str) -> None:
    warn(f"{old} is deprecated; write {new}, with options of the federation as keywords of fit.", DeprecationWarning, 3)
