"""The weighting problem: whose data make a model that is good for the target?

min_w F(w) = L_0(θ*(w))   s.t.   θ*(w) = argmin_θ Σ_k w_k L_k(θ)
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from coterie import machine
from coterie.errors import UsageError, gist
from coterie.federation import Federation, Rows, Shard, Stack, pack
from coterie.federation.mapped import Collate
from coterie.measures import Measure, RowsOf, computed, own_measures
from coterie.numerics import Draw
from coterie.problems.base import Problem, Task, View
from coterie.problems.models import FlatModel
from coterie.problems.models.probing import probe
from coterie.problems.models.statistics import running_statistics
from coterie.problems.tasks.personal import group_weights, judge, personal_measures
from coterie.problems.tasks.supervised import LOSSES, RowLoss, Supervised, check_labels, cross_entropy


@dataclass(frozen=True)
class Weighting(Problem):
    """Shards, target, model, loss and measures.

    Where every client is a target, `valid` are its validation rows, `tests` the rows that its own model is tested on,
    and `groups`, if known, say who draws from one distribution. `selection` are rows for choosing among models and
    settings: they train neither the model nor the weights, and are no test rows.
    """

    task: Task
    _: KW_ONLY
    test: Rows | None = None
    tests: Stack | None = None
    selection: Rows | None = None

    @classmethod
    def on(
        cls,
        shards: Iterable[Any],
        target: Any = None,
        *,
        model: nn.Module,
        loss: str | RowLoss,
        test: Any = None,
        validation: Iterable[Any] | None = None,
        tests: Iterable[Any] | None = None,
        collate: Collate | None = None,
        l2: float = 0.0,
        dtype: machine.DtypeLike = "float32",
        device: machine.DeviceLike = "cpu",
        measures: Sequence[Measure] = (),
    ) -> "Weighting":
        """The weighting problem of your own data and model, for `coterie.fit`.

        A shard is a pair (inputs, labels) of tensors or arrays, or a torch Dataset of such pairs. Inputs may be a tuple
        (the model is called with these arguments) or a dict (with these named arguments); a dict of columns with an
        entry "labels" is a shard too. Shards may differ in size. np.memmap arrays, and Datasets of more than 512 MiB,
        stay on disk.

        Args:
            shards: one training shard per client.
            target: the validation shard that defines the goal: a client gets weight if it lowers the loss on these
                rows. Methods that learn no weights, such as fedavg, need none.
            model: any torch.nn.Module. It is the start, and is not changed.
            loss: "cross_entropy", "squared", or a function of (outputs, labels) that returns one number per row.
            test: rows that are only measured.
            validation: one validation shard per client, where every client is a target (`coterie.methods.collaborate`).
            tests: one test shard per client, which are only measured; with validation.
            collate: makes a shard of a list of items, for items of unequal length: it pads them. Shards are then
                Datasets or lists of items.
            l2: strength of the penalty ½ l2 ‖θ‖².
            dtype: "float32" or "float64", or torch's types of these names.
            device: cpu, cuda, cuda:N or mps.
            measures: measures of your own beside loss and accuracy, each a `coterie.Measure` with the function
                `of(outputs, labels)`, on test rows if there are some, or on those that its `rows` names.

        Example:
            >>> import torch, coterie
            >>> x = torch.randn(20, 4)
            >>> problem = coterie.Weighting.on(
            ...     [(x, x.sum(1)), (x, -x.sum(1))], target=(x, x.sum(1)), model=torch.nn.Linear(4, 1), loss="squared"
            ... )
            >>> problem.clients
            2
        """
        if not isinstance(model, nn.Module):
            raise UsageError(f"model is a {type(model).__name__}, not a torch.nn.Module.")
        if not isinstance(shards, Iterable):
            raise UsageError(f"shards is a {type(shards).__name__}; give one shard per client, in a list.")
        if not isinstance(loss, str) and not callable(loss):
            raise UsageError(f"loss is {loss!r}; give a name or a function (outputs, labels) → one number per row.")
        if not isinstance(l2, int | float) or not 0.0 <= l2 < math.inf:
            raise UsageError(f"l2 is {l2!r}; it must be a number of at least 0.")
        numbers = machine.checked_dtype(dtype)
        if collate is not None and not callable(collate):
            raise UsageError(f"collate is {collate!r}; give a function of a list of items that returns a shard.")
        return weighting(
            list(shards),
            target,
            FlatModel(model),
            loss,
            test=test,
            valid=None if validation is None else list(validation),
            tests=None if tests is None else list(tests),
            collate=collate,
            l2=l2,
            dtype=getattr(torch, numbers),
            device=machine.checked_device(device, numbers),
            measures=measures,
        )

    def __repr__(self) -> str:
        return f"<coterie.Weighting of {self.clients} clients, {self.start.numel()} parameters, {self.start.dtype}>"

    @property
    def offers(self) -> frozenset[str]:
        """What methods may rely on."""
        abilities = {
            "target": self.target,
            "friends": self.friends,
            "optimal-weights": self.best_weights,
            "everyone": self.valid,
            "groups": self.groups,
            "classes": self.task.classes,
        }
        return self.task.offers | {name for name, value in abilities.items() if value is not None}

    def measure(self, view: View) -> dict[str, float]:
        """What the record says of a model, or of one per client, and of the weights."""
        theta = view.model
        measures = {} if self.tests is None else personal_measures(self.task, theta, self.tests, "personal")
        if view.weights is not None and view.weights.dim() == 2 and self.groups is not None:
            measures |= group_weights(view.weights, self.groups)
        if theta.dim() == 2:
            if self.valid is not None:
                measures |= personal_measures(self.task, theta, self.valid, "validation")
            return measures
        for rows, name in ((self.test, "test"), (self.selection, "selection")):
            if rows is not None:
                measures |= self.task.measure(theta, rows, name)
        measures |= self.validate(view)
        measures |= self._own(theta)
        if self.exact is not None:
            measures |= self.exact.measure(view)
        return measures

    def with_test_rows(self, most: int, draw: Draw) -> "Weighting":
        """The same problem with a sample of its test rows; see the base class."""
        test = self.test
        if test is None or test.capacity <= most:
            return self
        taken = test.take(draw.subset(test.capacity, most))
        offset, count = torch.zeros_like(test.offset), torch.full_like(test.count, most)
        return replace(self, test=Rows(taken.columns, offset, count, most))

    def _own(self, theta: Tensor) -> dict[str, float]:
        """The measures that were given to `on`."""
        held = {"test": self.test, "validation": None if self.target is None else self.target.valid}
        measures: dict[str, float] = {}
        for rows, part in held.items():
            wanted = [m for m in self.declares if m.rows == rows and m.of is not None]
            if wanted and part is not None and isinstance(self.task, Supervised):
                outputs, labels = self.task.outputs_and_labels(theta, part)
                measures |= {m.name: computed(m, outputs, labels) for m in wanted}
        return measures

    def validate(self, view: View) -> dict[str, float]:
        """The part of the measures that the target's validation rows tell of one model for all."""
        if view.model.dim() == 2 or self.target is None or self.target.valid is None:
            return {}
        return self.task.measure(view.model, self.target.valid, "validation")

    def by_client(self, view: View) -> dict[str, list[float]]:
        """Accuracy of each client's model on its own test and validation rows, and the number of its test rows."""
        if self.tests is None or self.task.classes is None:
            return {}
        held = {"accuracy": self.tests, "validation_accuracy": self.valid}
        measured = {
            name: judge(self.task, view.model, rows)[:, 1].cpu().double().tolist()
            for name, rows in held.items()
            if rows is not None
        }
        return {**measured, "rows": [float(count) for count in self.tests.counts]}

    def named(self, view: View) -> dict[str, Tensor]:
        """The model's parameters by name, as saved; with one model per client, the client comes before the name."""
        if view.model.dim() == 1:
            return self.task.model.state_dict(view.model, view.buffers)
        return self.task.model.state_dicts(view.model, view.buffers)

    def finished(self, fed: Federation, view: View) -> View:
        """The view with running statistics for batch norm, where the model has some."""
        model = self.task.model
        if not isinstance(model, FlatModel) or not model.normalised or not isinstance(self.task, Supervised):
            return view
        sample = self.task.inputs(self.train.client(0).take(self.train.counts.new_zeros(2)))
        return view._replace(buffers=running_statistics(fed, model, sample, view.model, view.weights))


def weighting(
    shards: Sequence[Any] | Stack,
    target: Any,
    model: FlatModel,
    loss: str | RowLoss,
    *,
    test: Any = None,
    selection: Any = None,
    valid: Sequence[Any] | None = None,
    tests: Sequence[Any] | None = None,
    groups: Sequence[int] | None = None,
    friends: int | None = None,
    collate: Collate | None = None,
    l2: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    measures: Sequence[Measure] = (),
    **more: Any,
) -> Weighting:
    """A weighting problem from raw shards, checked: the classes fit the model, the model fits the inputs.

    Where every client is a target: valid has one shard per client; tests one per group, or per client without groups.

    Args:
        shards: one training shard per client.
        target: the validation shard that defines the goal; None if there is no target, or if every client is one.
        model: the model, which is the start.
        loss: "cross_entropy", "squared", or a function of (outputs, labels) that returns one number per row.
        test: rows that are only measured.
        selection: rows that are only measured, for choosing among models and settings.
        valid: one validation shard per client, where every client is a target.
        tests: one test shard per group or client; with valid.
        groups: the group of each client, for tests; by default each client is its own.
        friends: how many clients, the first ones, are known friends of the target; None if unknown.
        collate: makes a shard of a list of items of unequal length.
        l2: strength of the penalty ½ l2 ‖θ‖².
        dtype: type of all numbers.
        device: where they are computed.
        measures: measures of your own beside loss and accuracy.
        more: other fields of the problem, by name.
    """
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    train = (shards if isinstance(shards, Stack) else pack(shards, collate=collate)).to(**options)

    given = {
        "the target": ("target", None if target is None else [target]),
        "the test set": ("test set", None if test is None else [test]),
        "the selection rows": ("selection rows", None if selection is None else [selection]),
        "validation": ("validation set of client", valid),
        "the test sets": ("test set", tests),
    }
    packed = {
        name: pack(parts, who=who, collate=collate).to(**options)
        for name, (who, parts) in given.items()
        if parts is not None
    }
    notes = (*more.pop("notes", ()), *_converted(model, dtype))
    model = model.to(**options).called_with(train.names)
    of = list(range(len(train)) if groups is None else groups)
    _check_everyone(len(train), packed.get("validation"), packed.get("the test sets"), of)
    for who, part in packed.items():
        _check_form(part, train, who, padded=collate is not None)
    task = Supervised.of(model, loss, l2=l2)
    outputs = _outputs(task, train.client(0))
    labels = {who: part.columns[-1] for who, part in (("the clients", train), *packed.items())}
    if task.loss_by_row is cross_entropy or (outputs > 1 and all(_are_classes(y, outputs) for y in labels.values())):
        task = replace(task, classes=outputs)
    for who, column in labels.items():
        check_labels(task, column, who)
    _check_loss(task, train.client(0))
    if model.unknown or task.loss_by_row not in LOSSES.values():
        _probe(task, train.client(0))
    packed = {who: _prepared(model, part) for who, part in packed.items()}
    goal, held_out, chooses, own, own_tests = (packed.get(who) for who in given)
    numbers = torch.tensor(of, device=device)
    held: dict[RowsOf, Stack | None] = {"test": held_out, "validation": goal}
    return Weighting(
        task,
        _prepared(model, train),
        None if goal is None else Shard(task, None, goal.client(0)),
        model.start,
        test=None if held_out is None else held_out.client(0),
        selection=None if chooses is None else chooses.client(0),
        valid=own,
        friends=friends,
        tests=None if own_tests is None else own_tests.shared_by(numbers),
        groups=None if groups is None else numbers,
        notes=notes,
        **more,
        declares=own_measures(measures, [name for name in held if held[name] is not None], "test=… or target=…"),
    )


def _check_everyone(clients: int, valid: Stack | None, tests: Stack | None, groups: list[int]) -> None:
    """Every client needs validation rows, a group, and test rows if there are some."""
    if valid is not None and len(valid) != clients:
        raise UsageError(f"there are {len(valid)} validation sets for {clients} clients; give one per client.")
    if len(groups) != clients:
        raise UsageError(f"there are {len(groups)} group numbers for {clients} clients; give one per client.")
    if tests is not None and len(tests) != max(groups) + 1:
        of = "clients; give one per client" if max(groups) + 1 == clients else "groups; give one per group"
        raise UsageError(f"there are {len(tests)} test sets for {max(groups) + 1} {of}.")


def _are_classes(labels: Any, outputs: int) -> bool:
    """Whether labels of an own loss are class numbers of the model's outputs, so that there is an accuracy."""
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.dtype == torch.bool:
        return False
    if labels.is_floating_point() or labels.is_complex():
        return False
    return int(labels.min()) >= 0 and int(labels.max()) < outputs


def _check_form(part: Stack, train: Stack, who: str, *, padded: bool) -> None:
    """All rows must have the form of the clients' rows; padded ones may differ in length."""
    if len(part.columns) != len(train.columns) or part.names != train.names:
        raise UsageError(
            f"the rows of {who} have {len(part.columns)} columns {part.names or ''}, those of the clients "
            f"{len(train.columns)} {train.names or ''}; bring all to one form."
        )
    for mine, reference in zip(part.columns[:-1] or part.columns, train.columns, strict=False):
        if mine.shape[1:] != reference.shape[1:] and not padded:
            raise UsageError(
                f"the rows of {who} have shape {tuple(mine.shape[1:])}, those of the clients "
                f"{tuple(reference.shape[1:])}; bring all to one form."
            )


def _converted(model: FlatModel, dtype: torch.dtype) -> Iterator[str]:
    """A note where the model's own numbers are shorter than those that are computed with."""
    if model.start.dtype in (torch.bfloat16, torch.float16):
        own = str(model.start.dtype).removeprefix("torch.")
        yield f"the model's {own} parameters are computed in {dtype}. {machine.HALF}"


def _probe(task: Supervised, rows: Rows) -> None:
    """Find dropout and attention, refuse models that keep state, and see whether vmap can run it."""
    index = torch.zeros(2, dtype=torch.int64, device=rows.offset.device)
    batch, theta = rows.take(index), task.model.start
    probe([task.model], lambda: task.loss_by_row(task.outputs(theta, batch), batch.labels))
    if task.dropout:
        batch = batch._replace(keys=index)
    two = torch.stack([theta, theta])
    columns = tuple(torch.stack([column, column]) for column in batch.columns)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message="There is a performance drop")  # a loop over clients, hidden
            vmap(lambda t, rows: task.gradient(t, batch._replace(columns=rows)))(two, columns)
            vmap(lambda t, rows: task.hvp(t, t, batch._replace(columns=rows)))(two, columns)
    except Exception as error:
        task.model.vmaps = False
        task.model.reason = gist(error)


def _prepared(model: FlatModel, part: Stack) -> Stack:
    """The rows in the form that costs the model least."""
    if part.mapped:
        return part
    inputs, *others = part.columns
    return replace(part, columns=(model.prepare(inputs), *others))


def _outputs(task: Supervised, rows: Rows) -> int:
    """The number of outputs, found by running the model on two rows; a misfit is explained."""
    index = torch.arange(min(2, int(rows.count)), device=rows.offset.device)
    inputs = task.inputs(rows.take(index))
    try:
        with torch.no_grad():
            out = task.model(task.model.start, inputs)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        shapes = " and ".join(str(tuple(t.shape)) for t in (inputs if isinstance(inputs, tuple) else (inputs,)))
        given = f" given as {', '.join(task.model.names)}" if task.model.names else ""
        raise UsageError(f"the model does not take inputs of shape {shapes}{given}: {_first_line(error)}") from None
    return int(out.shape[1]) if out.dim() > 1 else 1


def _check_loss(task: Supervised, rows: Rows) -> None:
    """A loss must give one number per row: a mean would count padding, and weigh unequal shards wrongly."""
    index = torch.zeros(2, dtype=torch.int64, device=rows.offset.device)
    batch = rows.take(index)
    try:
        with torch.no_grad():
            losses = task.loss_by_row(task.outputs(task.model.start, batch), batch.labels)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise UsageError(
            f"the loss does not take the model's outputs with labels of shape {tuple(batch.labels.shape)}: "
            f"{_first_line(error)}"
        ) from None
    if not isinstance(losses, Tensor) or losses.shape != (2,):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise UsageError(
            f"the loss gives {shape} for two rows, not one number per row; take its unreduced form, "
            'for example nn.CrossEntropyLoss(reduction="none").'
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
