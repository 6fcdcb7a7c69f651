"""`files`: tables or pictures of your own, one file or folder per client, and a target whose rows judge the weights.

The target's file is split, class by class, into rows that take part in the training as the last client (`own`), rows
that judge the weights, and rows for the test (`test`). Alone, the target learns from all but the test rows. With
`everyone`, every client is a target, and its file is split in the same shares.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from coterie.consent import resolve
from coterie.errors import UsageError
from coterie.federation import Ledger, Rows, Shard, Stack
from coterie.federation.mapped import is_mapped
from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.files.faults import Consent, as_note, examined, together
from coterie.problems.files.findings import Finding
from coterie.problems.files.frames import given
from coterie.problems.files.prepare import Impute, Preparation, Scaling, baseline_of, learnt, own_scaled, transformed
from coterie.problems.files.private import learnt_privately
from coterie.problems.files.tables import MISSING, Holder, Options, Tables, expand, notes_on, read
from coterie.problems.models import MODELS, FlatModel, build
from coterie.problems.tasks.supervised import LOSSES, RowLoss, Supervised, cross_entropy
from coterie.problems.weighting import Weighting, weighting
from coterie.settings import Count, Name, NonNegative, Positive, StatisticsPrivacy

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
ME = "(the target)"
UNCOMPARED = "under [privacy] no file is compared with yours: other units, codings and copies were not looked for"


Columns = tuple[Tensor, ...]


@dataclass(frozen=True)
class PreparedFiles:
    """All files read and prepared, in common columns: the clients' rows, and the target's in random order from row
    `begin` on."""

    context: Context
    holders: tuple[Holder, ...]
    preparation: Preparation
    spent: Ledger
    columns: tuple[Tensor, Tensor]
    begin: int
    model: FlatModel
    model_settings: dict[str, Any]
    loss: RowLoss
    l2: float
    balance: bool
    notes: tuple[str, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def target_rows(self) -> int:
        """How many rows the target has."""
        return self.holders[-1].rows

    @property
    def partners(self) -> tuple[str, ...]:
        """The clients' names, without the target."""
        return tuple(holder.name for holder in self.holders[:-1])

    @property
    def stack(self) -> Stack:
        """The partners' rows."""
        counts = torch.tensor([holder.rows for holder in self.holders[:-1]])
        return Stack(self.columns, counts.cumsum(0) - counts, counts)

    def _target_parts(self, own: float, test: float) -> tuple[Columns, ...]:
        """The target's rows for training, validation and test, as views."""
        end = self.begin + self.target_rows
        return _cut(tuple(column[self.begin : end] for column in self.columns), divided(self.target_rows, own, test))

    def split(self, own: float, test: float) -> Weighting:
        """The weighting problem with these shares of the target's rows for training and for the test."""
        mine, valid, tested = self._target_parts(own, test)
        stack, names, length = self.stack, self.partners, len(mine[-1])
        if length:
            offsets = torch.cat([stack.offsets, torch.tensor([self.begin])])
            stack = Stack(self.columns, offsets, torch.cat([stack.counts, torch.tensor([length])]))
            names = (*names, ME)
        plain = weighting(
            stack,
            valid,
            self.model,
            name_of_loss(self.loss, self.preparation),
            test=tested if len(tested[-1]) else None,
            l2=self.l2,
            dtype=self.context.dtype,
            device=self.context.device,
        )
        most = torch.tensor([length + len(valid[-1])])  # alone, the target learns from all but the test rows
        return self._complete(plain, Stack(plain.train.columns, torch.tensor([self.begin]), most).client(0), names)

    def _complete(self, plain: Weighting, mine: Rows, names: tuple[str, ...]) -> Weighting:
        """The problem with what the files add: weighed classes, the target's rows, names, notes and artifacts."""
        task = plain.task
        assert isinstance(task, Supervised)
        assert plain.target is not None
        if self.balance:
            task = balanced(task, self.preparation, self.context)
        stored = {**self.preparation.as_dict(), "model": self.model_settings, "clients": list(names)}
        who = "clients: " + ", ".join(f"{k} {name}" for k, name in enumerate(names))
        released = None if self.context.statistics is None else self.context.statistics.noise
        return replace(
            plain,
            task=task,
            target=Shard(task, mine, plain.target.valid),
            names=names,
            notes=(who, *self.notes),
            artifacts={"preprocess.json": stored},
            spent=self.spent,
            released=released,
        )

    @property
    def own_name(self) -> str:
        """The target's name among the clients, where every client is a target."""
        return self.holders[-1].name

    def everyone(self, own: float, test: float) -> Weighting:
        """The problem in which every client is a target, the holder of the target's file last.

        Args:
            own: share of each client's rows that train.
            test: share of each client's rows for the test; the rest validates.
        """
        if is_mapped(self.columns):
            raise UsageError("problem.everyone keeps all rows in memory; leave problem.cache out.")
        check_parts([(holder.name, holder.rows) for holder in self.holders], own, test)
        draw, stack = Draw.of(self.context.seed).phase("files"), self.stack
        shards = []
        for k in range(len(stack)):
            rows = slice(int(stack.offsets[k]), int(stack.offsets[k] + stack.counts[k]))
            held = tuple(column[rows] for column in self.columns)
            shards.append(in_parts(held, own, test, draw, k, bool(self.preparation.classes)))
        shards.append(self._target_parts(own, test))
        train, valid, tests = (list(part) for part in zip(*shards, strict=True))
        plain = weighting(
            train,
            valid[-1],
            self.model,
            name_of_loss(self.loss, self.preparation),
            test=tests[-1] if test else None,
            valid=valid,
            tests=tests if test else None,
            l2=self.l2,
            dtype=self.context.dtype,
            device=self.context.device,
        )
        return self._complete(plain, plain.train.client(len(stack)), (*self.partners, self.own_name))


def divided(rows: int, own: float, test: float) -> tuple[int, int, int]:
    """How many of some rows train, validate and test.

    Args:
        rows: how many there are.
        own: share of those that train.
        test: share of those for the test; the rest validates.

    Example:
        >>> divided(60, 0.4, 0.2)
        (24, 24, 12)
    """
    trained, tested = round(own * rows), round(test * rows)
    return trained, rows - trained - tested, tested


def _cut(columns: Columns, parts: tuple[int, ...]) -> tuple[Columns, ...]:
    pieces = [torch.split(column, list(parts)) for column in columns]
    return tuple(tuple(piece[i] for piece in pieces) for i in range(len(parts)))


def in_parts(columns: Columns, own: float, test: float, draw: Draw, client: int, by_class: bool) -> tuple[Columns, ...]:
    """A client's rows for training, validation and test, where every client is a target: class by class, at random.

    Args:
        columns: inputs and labels of the client's rows.
        own: share of the rows that train.
        test: share of the rows for the test; the rest validates.
        draw: of the problem's files.
        client: the number of the client.
        by_class: whether labels are classes.
    """
    order = shuffled(columns[-1], draw.phase("everyone").client(client), by_class)
    return _cut(tuple(column[order] for column in columns), divided(len(order), own, test))


def check_parts(holders: list[tuple[str, int]], own: float, test: float) -> None:
    """Refuse clients whose rows are too few to train, validate and test, where every client is a target."""
    if not own:
        raise UsageError("problem.own = 0 leaves no rows to train; where every client is a target it must be positive.")
    for name, rows in holders:
        parts = divided(rows, own, test)
        if min(parts[: 3 if test else 2]) < 1:
            raise UsageError(
                f"{name} has {rows} rows, of which {parts[0]} would train, {parts[1]} validate and {parts[2]} test; "
                "where every client is a target each needs some of all. Leave it out, or change problem.own and "
                "problem.test."
            )


def name_of_loss(loss: RowLoss, prepared: Preparation) -> str | RowLoss:
    """The loss as `weighting` takes it."""
    return "cross_entropy" if prepared.classes and loss is cross_entropy else loss


def balanced(task: Supervised, prepared: Preparation, context: Context) -> Supervised:
    """The task with classes weighed by their inverse frequency at all holders."""
    counts = torch.tensor(prepared.class_counts, dtype=context.dtype, device=context.device)
    weights = counts.sum() / (len(counts) * counts.clamp(min=1.0))
    return replace(task, loss_by_row=_balanced(task.loss_by_row, weights))


def _balanced(loss: RowLoss, weights: Tensor) -> RowLoss:
    return lambda outputs, labels: loss(outputs, labels) * weights[labels.long()]


def checked_tables(
    clients: str,
    target: str,
    label: str = "label",
    *,
    kind: Literal["auto", "classification", "regression"] = "auto",
    categorical: list[str] | None = None,
    drop: list[str] | None = None,
    missing: list[str] | None = None,
    side: int | None = None,
    cache: str | None = None,
    keep: list[str] | None = None,
    units: dict[str, dict[str, Positive]] | None = None,
    align_labels: bool | dict[str, str] | None = None,
    repair: bool = False,
    event: str | None = None,
    private: bool = False,
    partial: bool = False,
) -> tuple[Tables, Ledger]:
    """Everybody's rows, read and checked, and what was moved for it. Arguments are those of `files`.

    Args:
        clients: pattern of the clients' files.
        target: the target's file.
        label: column to predict.
        kind: of the label.
        categorical: columns of numbers that are categories.
        drop: columns to leave out.
        missing: further words that mean a missing value.
        side: of pictures.
        cache: folder for rows that exceed memory.
        keep: columns that are used as they are.
        units: what numbers are divided by.
        align_labels: codings of the label.
        repair: accept every proposal.
        event: column that tells whether the event happened.
        private: compare no file with another.
        partial: whether clients may lack columns of the target; their values are missing then.
    """
    if not clients or not target:
        raise UsageError(
            "problem files needs your data: set problem.clients='sites/*.csv', problem.target=mine.csv and "
            "problem.label=column. To try it, write an example with `coterie data example DIR`."
        )
    columns = tuple(categorical or ()), tuple(drop or ()), MISSING | frozenset(missing or ())
    options = Options(label, None if kind == "auto" else kind, *columns, side, cache)
    options = options._replace(keep=tuple(keep or ()), private=private, event=event, partial=partial)
    held = given(clients, target)
    if held is None:
        tables = read(*expand(clients, target), options)
    else:
        tables = read(held.partners, held.goal, options, held.names)
    consent = Consent(units or {}, align_labels, repair, options.keep, strangers=partial)
    return examined(tables, consent, private=private, cache=cache)


def load_files(
    context: Context,
    *,
    clients: str,
    target: str,
    label: Name = "label",
    kind: Literal["auto", "classification", "regression"] = "auto",
    model: Name = "logistic",
    loss: Name = "auto",
    missing: list[str] | None = None,
    balance: bool = False,
    l2: NonNegative = 0.01,
    cache: str | None = None,
    scaling: Scaling = "common",
    impute: Impute = "mean",
    event: Name | None = None,
    **reading: Any,
) -> PreparedFiles:
    """Read and check the files (`checked_tables`), learn the preparation, lay out the rows, and make the model."""
    make, row_loss = network(model), named_loss(loss)  # before long files are read
    private = context.statistics
    _check_private(private, scaling, impute)
    if event is not None:
        _check_event(event, private, {"kind": kind != "auto", "balance": balance, "loss": loss != "auto"})
    reading |= {"kind": kind, "missing": missing, "cache": cache, "event": event, "private": private is not None}
    tables, compared = checked_tables(clients, target, label, **reading)
    if private is None:
        prepared, spent = learnt(tables, scaling, impute)
    else:
        prepared, spent = learnt_privately(tables, private, context.seed)
        prepared = own_scaled(tables, prepared, -1) if scaling == "own" else prepared
    prepared = prepared._replace(missing=tuple(missing or ()))
    if event is not None:
        prepared = prepared._replace(baseline=baseline_of(tables), label_mean=0.0, label_deviation=1.0)
    if balance and not prepared.classes:
        raise UsageError("problem.balance weighs classes, and this label is a number; leave it out.")
    draw = Draw.of(context.seed).phase("files").step(0)

    def order(labels: Tensor) -> Tensor:
        return shuffled(labels, draw, bool(prepared.classes))

    inputs, labels, begin, holders = transformed(tables, prepared, order, folder=cache, by_centre=scaling == "own")
    if empty := [holder.name for holder in holders if not holder.rows]:
        raise UsageError(
            f"{', '.join(empty)} has no row of a declared class ({', '.join(map(repr, prepared.classes[:8]))}); "
            "leave it out, or declare its classes in privacy.categories."
        )
    net = make(prepared.shape, prepared.outputs, context.seed)
    if row_loss is None:
        row_loss = LOSSES["hazard" if event else "cross_entropy" if prepared.classes else "squared"]
    model_settings = {"name": model, "shape": list(prepared.shape), "outputs": prepared.outputs}
    return PreparedFiles(
        context,
        holders,
        prepared,
        together(compared, spent),
        (inputs, labels),
        begin,
        FlatModel(net),
        model_settings,
        row_loss,
        l2,
        balance,
        (*map(as_note, tables.findings), *([UNCOMPARED] if private else notes_on(tables))),  # those name clients' words
        tables.findings,
    )


def _check_event(event: str, private: StatisticsPrivacy | None, others: dict[str, bool]) -> None:
    """Refuse what does not go with a time-and-event label."""
    if given := [f"problem.{name}" for name, is_set in others.items() if is_set]:
        raise UsageError(
            f"problem.event={event!r} makes the label a time to an event, which has its own kind and loss; leave out "
            f"{' and '.join(given)}, or problem.event."
        )
    if private is not None:
        raise UsageError("[privacy] does not cover the hazard of a time-and-event label; leave problem.event out.")


def _check_private(private: StatisticsPrivacy | None, scaling: str, impute: str) -> None:
    if private is not None and (scaling == "robust" or impute != "mean"):
        raise UsageError(
            "problem.scaling='robust' and problem.impute='median' or 'regression' need statistics of the clients that "
            "[privacy] does not cover; use scaling='common' or 'own' and impute='mean'."
        )


def files(
    context: Context,
    *,
    clients: str = "",
    target: str = "",
    label: Name = "label",
    kind: Literal["auto", "classification", "regression"] = "auto",
    model: Name = "logistic",
    loss: Name = "auto",
    categorical: list[str] | None = None,
    drop: list[str] | None = None,
    missing: list[str] | None = None,
    balance: bool = False,
    l2: NonNegative = 0.01,
    own: Fraction = 0.4,
    test: Fraction = 0.2,
    side: Count | None = None,
    cache: str | None = None,
    scaling: Scaling = "common",
    impute: Impute = "mean",
    keep: list[str] | None = None,
    units: dict[str, dict[str, Positive]] | None = None,
    align_labels: bool | dict[str, str] | None = None,
    repair: bool = False,
    event: Name | None = None,
    everyone: bool = False,
) -> Weighting:
    """Tables or pictures of your own: one file per client, found by a pattern, and the target's file.

    Clients come in the order of their file names. Code of your own (package.module:name) must be admitted
    (`coterie.consent`).

    Args:
        clients: pattern of the clients' files, such as sites/*.csv.
        target: the target's file.
        label: column to predict.
        kind: classification or regression; auto decides by the target's labels.
        model: a network's name, or package.module:factory, called with the shape of an input and the number of outputs.
        loss: auto, a name, or package.module:function (outputs, labels) → one number per row.
        categorical: columns of numbers that are categories.
        drop: columns to leave out.
        missing: further words that mean a missing value.
        balance: weigh classes by their inverse frequency.
        l2: strength of the quadratic penalty.
        own: share of the target's rows that train; of every client's rows with everyone.
        test: share of these rows for the test; the rest judges the weights.
        side: pictures are scaled to side × side pixels.
        cache: folder for rows that exceed memory.
        scaling: numbers by common mean and deviation, by each centre's own, or robustly by medians and quartiles.
        impute: what stands for a missing number: the mean, the median, or a regression on the other columns.
        keep: columns of the target's file that are used as they are, whatever they look like.
        units: by partner's file and column, what the numbers are divided by to have the target's unit.
        align_labels: whether proposed codings of the label are used, or the coding itself; asks if not set.
        repair: accept every proposal that a data fault comes with.
        event: column that tells whether the event happened (1, yes) at the time that label is, or the row was censored.
        everyone: every client is a target; its file is split into rows that train, validate and test.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from coterie.problems.files.example import write_example
        >>> with TemporaryDirectory() as name:
        ...     label = write_example(Path(name), own=30).label
        ...     problem = files(Context(), clients=f"{name}/sites/*.csv", target=f"{name}/mine.csv", label=label)
        >>> problem.clients
        7
    """
    check_shares(own, test)
    data = load_files(
        context,
        clients=clients,
        target=target,
        label=label,
        kind=kind,
        model=model,
        loss=loss,
        categorical=categorical,
        drop=drop,
        missing=missing,
        balance=balance,
        l2=l2,
        side=side,
        cache=cache,
        scaling=scaling,
        impute=impute,
        keep=keep,
        units=units,
        align_labels=align_labels,
        repair=repair,
        event=event,
    )
    return data.everyone(own, test) if everyone else data.split(own, test)


def check_shares(own: float, test: float) -> None:
    """Refuse shares of the target's rows that leave too few to judge the weights."""
    if own + test > 0.9:
        raise UsageError(
            f"problem.own = {own:g} and problem.test = {test:g} leave {max(0.0, 1 - own - test):.0%} of the target's "
            "rows to judge the weights; together they may be 0.9 at most."
        )


def shuffled(labels: Tensor, draw: Draw, by_class: bool) -> Tensor:
    """A random order in which every stretch has its share of each class (of large and small labels, in regression)."""
    order = draw.permutation(len(labels))
    if not by_class:
        return order
    order = order[labels[order].argsort(stable=True)]  # class after class, at random within
    sorted_labels = labels[order]
    counts = torch.bincount(sorted_labels)
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts)[sorted_labels]
    jitter = draw.phase("spread").uniform(len(counts), dtype=torch.float64)[sorted_labels]
    position = (rank + jitter) / counts[sorted_labels]  # each class is spread evenly over [0, 1)
    return order[position.argsort(stable=True)]


def network(name: str) -> Callable[[tuple[int, ...], int, int], nn.Module]:
    """How the network is made of the shape of an input, the number of outputs and a seed."""
    if ":" not in name:
        known = "logistic" if name == "linear" else name
        if known not in MODELS:
            build(known, (1,), 1, 0)  # says which names are near
        return lambda shape, outputs, seed: build(known, shape, outputs, seed)
    factory = resolve(name, "problem.model")

    def make(shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                net = factory(shape, outputs)
        except Exception as error:  # the user's own code may raise anything
            raise UsageError(
                f"problem.model: {name} failed when called with shape {shape} and {outputs} outputs: "
                f"{type(error).__name__}: {error}."
            ) from None
        if not isinstance(net, nn.Module):
            raise UsageError(
                f"problem.model: {name} returned a {type(net).__name__}, not a torch.nn.Module; it is called with the "
                "shape of one input and the number of outputs, and must return the network."
            )
        return net

    return make


def named_loss(name: str) -> RowLoss | None:
    """The loss of that name, or of one's own; None for auto."""
    if name == "auto":
        return None
    if ":" in name:
        return resolve(name, "problem.loss")
    if name not in LOSSES:
        Supervised.of(None, name)  # type: ignore[arg-type]  # says which names are near
    return LOSSES[name]
