"""coterie from Python: a federation of one's own data and model, and `fit`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from coterie import machine
from coterie.errors import UsageError
from coterie.experiment.build import Parts, check_needs, checked_device, federate, with_screened_copies
from coterie.experiment.config import Config, FederationTable, RunTable, checked_table
from coterie.experiment.loop import Observer, Result, run_rounds
from coterie.experiment.records import Records, prepare, save_model
from coterie.federation.ledger import Ledger
from coterie.methods import Method
from coterie.problems.base import Problem
from coterie.problems.models import FlatModel
from coterie.problems.nested import NestedProblem
from coterie.problems.tasks.supervised import RowLoss
from coterie.problems.weighting import Weighting, weighting
from coterie.report.terminal import comparison_table, matrix_report, weights_table
from coterie.storage import write_atomically, write_json

OWN = "own data"


@dataclass(frozen=True, repr=False)
class Federation:
    """Clients and what they minimise. Made by `Federation.local` from shards and a model, or by `Federation.of` from a
    nested problem; used by `fit`."""

    problem: Problem
    options: FederationTable
    dtype: str
    device: str

    @classmethod
    def local(
        cls,
        shards: Iterable[Any],
        target: Any = None,
        *,
        model: nn.Module,
        loss: str | RowLoss,
        test: Any = None,
        validation: Iterable[Any] | None = None,
        tests: Iterable[Any] | None = None,
        l2: float = 0.0,
        dtype: Literal["float32", "float64"] = "float32",
        device: str = "cpu",
        **federation: Any,
    ) -> "Federation":
        """All clients in this process. A shard is (inputs, labels) as tensors or arrays, or a torch Dataset.

        target is the validation shard that defines the goal; test, if given, is only measured. Where every client is a
        target (`methods.collaborate`), validation has one shard a client, and tests, if given, too. Other keywords are
        the settings of [federation]: active, count, norm, target_at, mode, chunk, memory. mode "auto" is settled here
        by a short measurement; say "vmap" or "sequential" for the same bits everywhere.
        """
        if not isinstance(model, nn.Module):
            raise UsageError(f"model is a {type(model).__name__}, not a torch.nn.Module.")
        if not isinstance(shards, Iterable):
            raise UsageError(f"shards is a {type(shards).__name__}; give one shard a client, in a list.")
        if not isinstance(loss, str) and not callable(loss):
            raise UsageError(f"loss is {loss!r}; give a name or a function (outputs, labels) → one number a row.")
        if not isinstance(l2, int | float) or not 0.0 <= l2 < math.inf:
            raise UsageError(f"l2 is {l2!r}; it must be a number of at least 0.")
        if "target_at" in federation:
            federation["target"] = federation.pop("target_at")
        options = checked_table(FederationTable, "federation", federation)
        checked_table(RunTable, "run", {"dtype": dtype, "device": device})
        checked_device(device, dtype)
        place: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
        place["valid"] = None if validation is None else list(validation)
        place["tests"] = None if tests is None else list(tests)
        problem = weighting(list(shards), target, FlatModel(model), loss, test=test, l2=l2, **place)
        chosen = federate(problem, options)[1]  # once, so that all fits of one federation agree to the bit
        return cls(problem, options.model_copy(update=chosen), dtype, device)

    @classmethod
    def of(cls, problem: NestedProblem, **federation: Any) -> "Federation":
        """The clients of a nested problem, `coterie.Nested(inner, outer).on(…)` and its like, in this process."""
        if not isinstance(problem, NestedProblem):
            raise UsageError(f"a {type(problem).__name__} is no nested problem; make one by coterie.Nested(…).on(…).")
        options = checked_table(FederationTable, "federation", federation)
        chosen = federate(problem, options)[1]
        dtype, device = str(problem.start.dtype).removeprefix("torch."), str(problem.start.device)
        return cls(problem, options.model_copy(update=chosen), dtype, device)

    def __repr__(self) -> str:
        return f"<coterie.Federation of {self.problem.clients} clients, {self.options.mode}, {self.dtype}>"


@dataclass(frozen=True, repr=False)
class Fit:
    """A trained model, who helped, and what it cost."""

    _parts: Parts
    _result: Result

    @property
    def weights(self) -> Tensor | None:
        """Learned client weights [K], if the method learns some; where every client is a target, [K, K] by target."""
        return self._result.view.weights

    @property
    def clusters(self) -> list[list[int]]:
        """Who belongs together, where every client is a target."""
        if "clusters" not in self.summary:
            raise UsageError(f"{self.summary['method']} learns no matrix of weights; use methods.collaborate.")
        return [list(cluster) for cluster in self.summary["clusters"]]

    @property
    def model(self) -> nn.Module:
        """The trained model, an ordinary module."""
        if not isinstance(self._parts.problem, Weighting):
            raise UsageError("a nested problem has no single model; its variables are in fit.variables.")
        if self._result.view.model.dim() == 2:
            raise UsageError("every client has its own model here: client k's is fit.models[k].")
        return self._parts.problem.task.model.module(self._result.view.model)

    @property
    def best(self) -> nn.Module:
        """The model of the recorded round with the lowest validation loss; `summary["best"]` says which round."""
        best = self._result.best
        if best is None or not isinstance(self._parts.problem, Weighting) or best.view.model.dim() == 2:
            raise UsageError("there is no best model: it needs validation rows (target=…) and one model for all.")
        return self._parts.problem.task.model.module(best.view.model)

    @property
    def models(self) -> list[nn.Module]:
        """The clients' models, where every client is a target."""
        models = self._result.view.model
        if not isinstance(self._parts.problem, Weighting) or models.dim() == 1:
            raise UsageError(f"{self.summary['method']} trains one model for all; it is fit.model.")
        return [self._parts.problem.task.model.module(theta) for theta in models]

    @property
    def variables(self) -> dict[str, Tensor]:
        """Every trained tensor by name: a model's parameters, or x and y of a nested problem."""
        return dict(self._parts.problem.named(self._result.view))

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry a recorded round: losses, accuracies, weight statistics, communication."""
        return self._result.history

    @property
    def ledger(self) -> Ledger:
        """What was moved, by cause."""
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
        """Write a result folder: summary, metrics, weights, ledger and the model."""
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
        about = {"format": "pt", "coterie_method": self._parts.method.name}
        save_model(folder / "model.safetensors", self._parts.problem.named(self._result.view), about)
        if (best := self._result.best) is not None:
            about = {**about, "coterie_round": str(best.round)}
            save_model(folder / "model-best.safetensors", self._parts.problem.named(best.view), about)
        return folder


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during `fit`; `fit` is what was trained until then."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(f"stopped after {fit.summary['rounds']} rounds")
        self.fit = fit


def fit(
    fed: Federation,
    method: Method,
    rounds: int = 100,
    *,
    seed: int = 0,
    record: int = 1,
    threads: int | Literal["auto"] = "auto",
    portable: bool = False,
    observer: Observer | None = None,
) -> Fit:
    """Train. The same federation and seed give the same result, bit for bit.

    Ctrl-C and SIGTERM are raised again as `Stopped`, a KeyboardInterrupt that holds what was trained until then.

    Args:
        fed: the clients and what they minimise.
        method: how to train, for example `coterie.methods.meritfed(step=0.1)`.
        rounds: how many rounds to train.
        seed: fixes every draw.
        record: how many rounds lie between two entries of the history.
        threads: how many threads compute.
        portable: whether Intel and AMD shall give the same bits; it needs COTERIE_PORTABLE=1 before torch is used.
        observer: is told of every recorded round.
    """
    if not isinstance(fed, Federation):
        raise UsageError(
            f"fit takes a federation first, not a {type(fed).__name__}; make one by Federation.local(…) or .of(…)."
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
    }
    run = checked_table(RunTable, "run", {**values, "dtype": fed.dtype, "device": fed.device, "baselines": []})
    machine.require(run.portable)
    check_needs(method, fed.problem, OWN)
    config = Config(run, dict(method.settings), {}, fed.options)
    method, options = with_screened_copies(method, config)
    parts = Parts(config, fed.problem, method, federate(fed.problem, options)[0])
    done = Fit(parts, run_rounds(parts, None, observer))
    if done.summary["outcome"] == "stopped":
        raise Stopped(done)
    return done
