"""coterie from Python: `fit` trains a problem with a method; `Fit` and `Fits`, in `fitted.py`, are the results."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, overload
from warnings import warn

import tomli_w
import torch
from torch import Tensor, nn

from coterie import machine
from coterie.errors import UsageError
from coterie.experiment.build import (
    Parts,
    assemble_locally,
    check_needs,
    check_schedules,
    make_problem,
    threads_for,
)
from coterie.experiment.checkpoint import MAY_CHANGE
from coterie.experiment.compiling import Choice
from coterie.experiment.config import OWN_DATA, PLATFORM, Config, FederationTable, RunTable, checked_table
from coterie.experiment.loop import Interrupted, Observer, Result, check_stop, run_rounds, stored
from coterie.experiment.records import prepare
from coterie.experiment.run import finished, recorded_tables
from coterie.fitted import Fit, Fits
from coterie.methods import Method
from coterie.methods.registry import method_entry
from coterie.problems.base import Problem, View
from coterie.problems.catalogue.registry import problem_entry
from coterie.problems.nested import NestedProblem
from coterie.problems.tasks.supervised import Supervised
from coterie.schedules import FUNCTION
from coterie.settings import checked
from coterie.stop import Rule, rule
from coterie.storage import sole_user, sweep, write_atomically

KEYS = {"target_at": "target"}
SHOWN = 32  # clients, and rows of each, that tell one problem from another
Start = nn.Module | Mapping[str, Tensor] | Tensor | Fit


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during `fit`; `fit` is what was trained until then. With out=, its checkpoint is written."""

    def __init__(self, fit: Fit) -> None:
        again = fit.summary["message"]
        super().__init__(f"stopped after {fit.summary['rounds']} rounds{f'; {again}' if again else ''}")
        self.fit = fit


@dataclass(frozen=True)
class Named:
    """A problem of the registry, made anew for every seed; `coterie.problem` makes it."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: Literal["float32", "float64"] = "float32"
    device: str = "cpu"


def problem(
    name: str, *, dtype: machine.DtypeLike = "float32", device: machine.DeviceLike = "cpu", **settings: Any
) -> Named:
    """A registered problem for `fit`, by the name that `coterie run --problem` takes.

    `fit` makes it with its seed, as the command line does, and a folder of `fit(…, out=…)` can be resumed by
    `coterie resume`.

    Args:
        name: see `coterie list problems`.
        dtype: "float32" or "float64", or torch's types of these names.
        device: cpu, cuda, cuda:N or mps.
        settings: of the problem; see `coterie list problems NAME`.

    Example:
        >>> import coterie
        >>> quadratic = coterie.problem("quadratic", clients=5)
        >>> coterie.fit(quadratic, coterie.methods.fedavg(step=0.1), rounds=2).summary["problem"]
        'quadratic'
    """
    numbers = machine.checked_dtype(dtype)
    return Named(name, checked(problem_entry(name).make, "problem", settings), numbers, str(device))


@overload
def fit(
    problem: Problem | Named,
    method: Method,
    rounds: int = 100,
    *,
    seed: int = 0,
    seeds: None = None,
    start: Start | Callable[[int], Start] | None = None,
    stop: Rule | str | Callable[[list[dict[str, Any]]], Any] | None = None,
    out: str | Path | None = None,
    record: int = 1,
    evaluate: int | Literal["auto", "all"] = "auto",
    checkpoint: int = 1,
    threads: int | Literal["auto"] = "auto",
    compile: Choice = "auto",
    portable: bool = False,
    observer: Observer | None = None,
    **federation: Any,
) -> Fit: ...
@overload
def fit(
    problem: Problem | Named,
    method: Method,
    rounds: int = 100,
    *,
    seeds: Sequence[int],
    start: Start | Callable[[int], Start] | None = None,
    stop: Rule | str | Callable[[list[dict[str, Any]]], Any] | None = None,
    out: str | Path | None = None,
    record: int = 1,
    evaluate: int | Literal["auto", "all"] = "auto",
    checkpoint: int = 1,
    threads: int | Literal["auto"] = "auto",
    compile: Choice = "auto",
    portable: bool = False,
    observer: Observer | None = None,
    **federation: Any,
) -> Fits: ...
def fit(
    problem: Problem | Named,
    method: Method,
    rounds: int = 100,
    *,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    start: Start | Callable[[int], Start] | None = None,
    stop: Rule | str | Callable[[list[dict[str, Any]]], Any] | None = None,
    out: str | Path | None = None,
    record: int = 1,
    evaluate: int | Literal["auto", "all"] = "auto",
    checkpoint: int = 1,
    threads: int | Literal["auto"] = "auto",
    compile: Choice = "auto",
    portable: bool = False,
    observer: Observer | None = None,
    **federation: Any,
) -> Fit | Fits:
    """Train. The same problem, settings and seed give the same result, bit for bit.

    All clients are in this process. Ctrl-C and SIGTERM are raised again as `Stopped`, a KeyboardInterrupt that holds
    what was trained until then; with `out`, after the checkpoint is written.

    Args:
        problem: the clients and what they minimise: `coterie.Weighting.on(…)`, `coterie.Nested(…).on(…)` and its like,
            or a registered one, `coterie.problem("friends")`.
        method: how to train, for example `coterie.methods.meritfed(step=0.1)`. Its steps may be schedules
            (`coterie.schedules`), lists, or functions of the round.
        rounds: how many rounds to train.
        seed: fixes every draw. A problem of your own starts at its model for every seed, unless `start` says otherwise.
        seeds: train once for each of these seeds and return `Fits`, with stacked arrays.
        start: where to start: a module, a state dict, a flat tensor, or an earlier `Fit` (its trained variables); or a
            function that gives one of these for a seed.
        stop: when to end early: `coterie.stop.patience("validation_loss", 20)`, its text, or a function of the record
            (a list with one dict per recorded round) that returns True or a reason.
        out: a result folder for records and checkpoints, the same that `coterie run` writes. The same call again
            resumes it, or returns the stored result if it has ended. With seeds, each has its folder below it.
        record: how many rounds lie between two entries of the history.
        evaluate: how many test rows the entries before the last are measured on, always the same; "all", or "auto" for
            at most 10,000. The last entry is measured on all of them, and so are validation rows always.
        checkpoint: how many rounds lie between two checkpoints, with out.
        threads: how many threads compute.
        compile: whether rounds are compiled: True, False, a number for from that round on, or "auto" where that was
            measured to pay; what was chosen is `fit.summary["compile"]`.
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
    if not isinstance(problem, Problem | Named):
        raise UsageError(
            f"fit takes a problem first, not a {type(problem).__name__}; make one by coterie.Weighting.on(…), "
            "coterie.Nested(…).on(…) or coterie.problem(name)."
        )
    if not isinstance(method, Method):
        raise UsageError(f"{method!r} is no method; make one, for example coterie.methods.meritfed(step=0.1).")
    values = {
        "method": method.name,
        "problem": problem.name if isinstance(problem, Named) and start is None else OWN_DATA,
        "rounds": rounds,
        "record": record,
        "evaluate": evaluate,
        "checkpoint": checkpoint,
        "threads": threads,
        "compile": compile,
        "portable": portable,
        "stop": None if stop is None else rule(stop).data,
        "baselines": [],
    }
    ending = None if stop is None else rule(stop)
    call = _Call(problem, method, values, federation, start, ending, observer)
    if seeds is None:
        return call.once(seed, None if out is None else Path(out))
    if not isinstance(seeds, Iterable) or not list(seeds):
        raise UsageError(f"seeds is {seeds!r}; give a list of whole numbers, for example seeds=[0, 1, 2].")
    listed = list(seeds)
    if len(set(listed)) < len(listed):
        raise UsageError(f"seeds {listed} name one twice; give each once.")
    if len(listed) > 1 and isinstance(problem, Problem) and not callable_start(start):
        warn(
            "the seeds change the draws but not the start: every fit begins with the same parameters. Give "
            "start=function of the seed, for example start=lambda seed: make_model(seed), for other starts.",
            UserWarning,
            stacklevel=2,
        )
    folders = [None if out is None else Path(out) / f"seed-{seed}" for seed in listed]
    return Fits(tuple(call.once(seed, folder) for seed, folder in zip(listed, folders, strict=True)))


def callable_start(start: Any) -> bool:
    """Whether a start is a function of the seed; modules can be called too, and are none."""
    return callable(start) and not isinstance(start, nn.Module)


@dataclass(frozen=True)
class _Call:
    """The arguments of a call of `fit`, for one seed after the other."""

    problem: Problem | Named
    method: Method
    run: Mapping[str, Any]
    federation: Mapping[str, Any]
    start: Any
    stop: Rule | None
    observer: Observer | None

    def once(self, seed: int, folder: Path | None) -> Fit:
        """The fit of one seed."""
        parts = self.parts(seed, folder)
        notes = []
        if seed and isinstance(self.problem, Problem) and self.start is None:
            notes = [f"seed {seed} fixes the draws; the start is the model as it was given, whatever the seed"]
        try:
            return _fit(parts, self.result(parts, folder, notes), folder)
        except Interrupted as end:
            raise Stopped(_fit(parts, end.result, folder)) from None

    def parts(self, seed: int, folder: Path | None) -> Parts:
        """The live objects, with everything refused that can be refused before the first round."""
        values = {**self.run, "seed": seed}
        named = self.problem if isinstance(self.problem, Named) and self.start is None else None
        if isinstance(self.problem, Problem):
            values["dtype"] = str(self.problem.start.dtype).removeprefix("torch.")
            values["device"] = str(self.problem.start.device)
        else:
            values |= {"dtype": self.problem.dtype, "device": self.problem.device}
        run = checked_table(RunTable, "run", values)
        machine.require(run.portable)
        check_schedules(self.method, run.rounds)
        config = Config(run, dict(self.method.settings), dict(named.settings) if named else {}, FederationTable())
        problem = self.problem
        if isinstance(problem, Named):
            wanted = replace(config, problem=dict(problem.settings)).with_run(problem=problem.name)
            problem = make_problem(wanted)
        if self.start is not None:
            problem = with_start(problem, self.start(seed) if callable_start(self.start) else self.start)
        check_needs(self.method, problem, run.problem)
        if named is not None and run.threads == "auto":
            config = config.with_run(threads=threads_for(problem))
        elif named is None and folder is not None:
            config = replace(config, problem={"fingerprint": fingerprint(problem)})
        known = {} if folder is None else recorded_tables(folder / "config.toml")  # what was measured before
        options, mode = _options(self.federation), known.get("federation", {}).get("mode")
        if options.mode == "auto" and mode in ("vmap", "sequential"):
            options = options.model_copy(update={"mode": mode})
        if config.run.compile == "auto":
            config = config.with_run(compile=known.get("run", {}).get("compile", "auto"))
        return assemble_locally(replace(config, federation=options), problem, self.method)

    def result(self, parts: Parts, folder: Path | None, notes: list[str]) -> Result:
        """Train, or go on in the folder; a run that has ended is read."""
        check_stop(parts, self.stop)
        if folder is None:
            return run_rounds(parts, None, self.observer, stop=self.stop, notes=notes)
        if not (folder / "config.toml").is_file():
            prepare(folder, force=False)
        again = f"the same call of coterie.fit with out={str(folder)!r}"
        if parts.config.run.problem != OWN_DATA and self.is_data():
            again = f"coterie resume {folder}"
        with sole_user(folder):
            begun = (folder / "config.toml").is_file()
            if begun:
                _check_same(folder, parts.config)
            if begun and finished(folder, parts.config.run) is not None:
                return stored(parts, folder)
            sweep(folder)
            sweep(folder / "checkpoint")
            write_atomically(folder / "config.toml", _record(folder / "config.toml", parts.config).encode())
            more: dict[str, Any] = {"stop": self.stop, "again": again, "notes": notes}
            return run_rounds(parts, folder, self.observer, resume=begun, **more)

    def is_data(self) -> bool:
        """Whether the method and the rule of stopping are what a file can hold, so that the command line resumes."""
        try:
            method_entry(self.method.name)
        except UsageError:
            return False
        functions = [*(plan.data for plan in self.method.schedules.values()), self.run["stop"]]
        return not any(isinstance(data, str) and data.startswith(FUNCTION) for data in functions)


def _fit(parts: Parts, result: Result, folder: Path | None) -> Fit:
    """The fit; what a folder holds of it may change later, so its record is read now."""
    parts = parts._replace(config=result.config)
    return Fit(parts, result._replace(record=result.history), folder)


def _record(file: Path, config: Config) -> str:
    """The text of config.toml; a run that is resumed keeps the platform that it was begun on."""
    begun_on = recorded_tables(file).get(PLATFORM)
    return config.as_record() if begun_on is None else f"{config.as_toml()}\n{tomli_w.dumps({PLATFORM: begun_on})}"


def _check_same(folder: Path, config: Config) -> None:
    """Refuse to go on in the folder of another call, by the first setting that differs."""
    there, here = recorded_tables(folder / "config.toml"), tomllib.loads(config.as_toml())
    usual = Config(RunTable(), {}, {}, FederationTable()).settings()  # what a setting is that a file does not hold
    for table in ("run", "method", "problem", "federation"):
        made, wanted = there.get(table, {}), here[table]
        for key in sorted({*made, *wanted}):
            name = f"{table}.{key}"
            before, now = (values.get(key, usual.get(name)) for values in (made, wanted))
            if before == now or name in MAY_CHANGE:
                continue
            differs = f"{name} = {_plain(before)}, not {_plain(now)}"
            if key == "fingerprint":
                differs = "a problem of other rows, or of another start"
            raise UsageError(
                f"{folder} was made with {differs}; call fit with the same arguments to resume it, or choose another "
                "out=."
            )


def _plain(value: Any) -> str:
    return "not set" if value is None else repr(value)


def fingerprint(problem: Problem) -> str:
    """A digest that tells one problem from another: the start, the sizes of all shards, and some rows of some clients.

    Args:
        problem: any problem.
    """
    digest = blake2b(digest_size=8)
    chosen = torch.linspace(0, problem.clients - 1, min(problem.clients, SHOWN)).long().tolist()
    rows = [problem.train.client(k) for k in dict.fromkeys(chosen)]
    if problem.target is not None and problem.target.valid is not None:
        rows.append(problem.target.valid)
    tensors = [problem.start, problem.train.counts]
    for part in rows:
        index = torch.arange(min(SHOWN, int(part.count)), device=problem.train.counts.device)
        tensors += part.take(index).columns
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(
            f"{tuple(plain.shape)}{plain.dtype}".encode() + plain.view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def with_start(problem: Problem, start: Start) -> Problem:
    """The same problem with another start.

    Args:
        problem: any problem.
        start: a module or its state dict, a flat tensor, an earlier fit; for a nested problem a dict with x and y.
    """
    view = _start_of(problem, start)
    theta = view.model.detach().to(problem.start).clone()
    if isinstance(problem, NestedProblem):
        x, y = copy(problem.task.x), copy(problem.task.y)
        x.start = theta
        y.start = y.start if view.inner is None else view.inner.detach().to(y.start).clone()
        return replace(problem, task=replace(problem.task, x=x, y=y), start=theta)
    if not isinstance(problem.task, Supervised):
        return replace(problem, start=theta)
    model = copy(problem.task.model)
    model.start = theta
    task = replace(problem.task, model=model)
    target = None if problem.target is None else replace(problem.target, task=task)
    return replace(problem, task=task, target=target, start=theta)


def _start_of(problem: Problem, start: Any) -> View:
    """A start as flat vectors, checked against the problem's own."""
    if isinstance(start, Fit):
        view = start._result.view
        _check_size("the fit's model", view.model, problem.start)
        if isinstance(problem, NestedProblem) and view.inner is not None:
            _check_size("the fit's inner variable", view.inner, problem.inner_start)
        return view
    if isinstance(start, Tensor):
        _check_size("start", start, problem.start)
        return View(start)
    if isinstance(start, nn.Module):
        start = {**start.state_dict(), **dict(start.named_parameters())}
    if not isinstance(start, Mapping):
        raise UsageError(
            f"start is a {type(start).__name__}; give a module, its state dict, a flat tensor, an earlier fit, or a "
            "function of the seed that returns one of these."
        )
    if isinstance(problem, NestedProblem):
        own = {"x": problem.start, "y": problem.inner_start}
    elif isinstance(problem.task, Supervised):
        own = problem.task.model.unflatten(problem.start)
    else:
        raise UsageError("this problem has no named parameters; give start as a flat tensor.")
    for name in own.keys() - start.keys():
        raise UsageError(f"start lacks {name}; it must have {', '.join(own)}.")
    flat = {}
    for name, like in own.items():
        value = torch.as_tensor(start[name])
        if value.numel() != like.numel() or (not isinstance(problem, NestedProblem) and value.shape != like.shape):
            raise UsageError(f"start's {name} has shape {tuple(value.shape)}, the problem's {tuple(like.shape)}.")
        flat[name] = value.detach().reshape(-1).to(problem.start)
    if isinstance(problem, NestedProblem):
        return View(flat["x"], None, flat["y"])
    return View(torch.cat(list(flat.values())))


def _check_size(what: str, given: Tensor, own: Tensor) -> None:
    if given.shape != own.shape:
        raise UsageError(f"{what} has shape {tuple(given.shape)}, the problem's start {tuple(own.shape)}.")


def _options(federation: Mapping[str, Any]) -> FederationTable:
    """The keywords of `fit` as [federation]; its target, a place, is target_at here, where target means rows."""
    return checked_table(FederationTable, "federation", {KEYS.get(key, key): v for key, v in federation.items()})
