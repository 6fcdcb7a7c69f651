"""Predictions of a stored model for rows of a file, with the preprocessing that it was trained with."""

import csv
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from coterie.ensemble.stack import Stack, read_stack
from coterie.errors import UsageError, clean
from coterie.problems.files.prepare import Preparation
from coterie.problems.files.problem import network
from coterie.problems.files.reading import (
    Block,
    Source,
    Unreadable,
    blocks_of,
    columns_of,
    form_of,
    image_blocks,
    numbers,
    with_dates,
    with_semicolons,
    words,
)
from coterie.problems.files.tables import MISSING
from coterie.problems.models import FlatModel
from coterie.problems.models.flat import STATISTICS
from coterie.storage import cell

LARGEST = 64 << 20  # bytes of preprocess.json
MOST = 1 << 26  # numbers of one input


class Predictions(NamedTuple):
    """A header, one row per row of the file, and what should be known of them."""

    header: list[str]
    rows: list[list[Any]]
    notes: list[str]

    def write(self, stream: IO[str], *, raw: bool = False) -> None:
        """As CSV.

        Args:
            stream: a text file that is open for writing.
            raw: leave words as they are, even where a spreadsheet would take them for a formula.
        """
        writer = csv.writer(stream, lineterminator="\n")
        for row in [self.header, *self.rows]:
            writer.writerow(row if raw else [cell(value) for value in row])


Extent = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
Text = Annotated[str, Field(strict=True, max_length=10_000)]


class _Architecture(BaseModel):
    """The network of preprocess.json: a name and two plain arguments."""

    name: Text
    shape: Annotated[list[Extent], Field(min_length=1, max_length=4)]
    outputs: Extent


class _Numeric(BaseModel):
    name: Text
    mean: float
    deviation: float
    indicator: bool
    fill: float = 0.0
    slopes: list[float] = []


class _Worded(BaseModel):
    name: Text
    words: list[Text]
    missing: bool


class _Image(BaseModel):
    shape: Annotated[list[Extent], Field(min_length=1, max_length=3)]
    unit: Annotated[float, Field(gt=0.0)]


class _Baseline(BaseModel):
    edges: list[float]
    rates: list[float]


class _Columns(BaseModel):
    """What preprocess.json must hold of columns and classes; it may have come from anywhere."""

    label: Text
    kind: Literal["classification", "regression"]
    numeric: list[_Numeric]
    categorical: list[_Worded]
    image: _Image | None
    classes: list[Text]
    class_counts: list[int]
    label_mean: float
    label_deviation: float
    dates: list[Text] = []
    missing: list[Text] = []
    event: Text | None = None
    baseline: _Baseline | None = None


class _Stored(_Columns):
    model: _Architecture


class _Part(BaseModel):
    holder: Text
    kind: Literal["linear", "trees"]
    slope: float
    weight: Annotated[float, Field(ge=0.0, le=1.0)]


class _Stack(BaseModel):
    """A stack of models, as an advice delivers it."""

    classes: Annotated[int, Field(ge=0, le=1 << 16)]
    edges: Annotated[list[float], Field(max_length=1 << 10)]
    members: Annotated[list[_Part], Field(min_length=1, max_length=1 << 16)]
    pooled: Annotated[list[Annotated[list[Literal["linear", "trees"]], Field(max_length=2)]], Field(max_length=1 << 16)]


class _StoredStack(_Columns):
    stack: _Stack


Net = nn.Module | Stack


def load_model(folder: Path, *, best: bool = False) -> tuple[Net, Preparation]:
    """The model of a result folder, and how rows become its inputs. Both are data: nothing in them is run.

    Args:
        folder: a result folder with preprocess.json and model.safetensors.
        best: take the model with the lowest validation loss, not the last one.
    """
    stored_model = folder / ("model-best.safetensors" if best else "model.safetensors")
    path = folder / "preprocess.json"
    if not path.is_file():
        raise UsageError(
            f"{folder} has no preprocess.json; name the result folder of a run on files, or an advice's model."
        )
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"preprocess.json is larger than {LARGEST >> 20} MiB")
        data = json.loads(path.read_text(encoding="utf-8"))
        net, prepared = _of_stack(folder, data) if "stack" in data else _of_network(stored_model, data)
    except FileNotFoundError as error:
        raise UsageError(f"{error.filename or stored_model} is missing.") from None
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise UsageError(f"the model in {folder} is damaged: {clean(where)}: {error.errors()[0]['msg']}.") from None
    except (OSError, TypeError, ValueError, RuntimeError, RecursionError, SafetensorError) as error:
        first = clean((str(error).splitlines() or [type(error).__name__])[0])
        raise UsageError(f"the model in {folder} is damaged: {first}.") from None
    return net, prepared


def _of_network(path: Path, data: Any) -> tuple[Net, Preparation]:
    stored = _Stored.model_validate(data)
    prepared, about = Preparation.from_dict(stored.model_dump()), stored.model
    shape = tuple(about.shape)
    if (shape, about.outputs) != (prepared.shape, prepared.outputs) or prod(shape) > MOST:
        raise ValueError("the network's inputs or outputs do not fit the columns and classes")
    if {len(column.slopes) for column in prepared.numeric} not in ({0}, {len(prepared.numeric)}, set()):
        raise ValueError("the slopes of its imputation do not fit the columns")
    return _filled(about.name, shape, about.outputs, path), prepared


def _of_stack(folder: Path, data: Any) -> tuple[Net, Preparation]:
    """Its inputs are columns as they stand in the file."""
    stored = _StoredStack.model_validate(data)
    prepared = Preparation.from_dict(stored.model_dump()).as_it_stands()
    if stored.stack.classes != len(prepared.classes) or bool(stored.stack.edges) != (prepared.form.event is not None):
        raise ValueError("the model does not fit the classes")
    return read_stack(folder, stored.stack.model_dump(), prod(prepared.shape)), prepared


def _filled(name: str, shape: tuple[int, ...], outputs: int, path: Path) -> nn.Module:
    """The named network with the file's state; before memory is taken for it, the two must agree.

    Batch norm without running statistics in the file (of a private run) uses the rows at hand.
    """
    make = network(name)
    with safe_open(path, "pt") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    if ":" not in name:  # a network of coterie's own can be made without memory; admitted code is trusted
        with torch.device("meta"):
            _same(make(shape, outputs, 0), found)
    net = make(shape, outputs, 0)
    _same(net, found)
    net.load_state_dict(load_file(path), strict=False)
    if all(name in found for name, _ in net.named_buffers() if name.endswith(STATISTICS)):
        return net.eval()
    flat = FlatModel(net)
    return flat.module(flat.start)


def _same(net: nn.Module, found: dict[str, tuple[int, ...]]) -> None:
    wanted = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    if any(name.startswith("client_0.") for name in found):
        raise ValueError("it holds one model per client; predict needs a run that trains one model")
    buffers = {name for name, _ in net.named_buffers()}  # a private run does not store them
    names = (wanted.keys() - (buffers - found.keys())) | found.keys()
    odd = sorted(name for name in names if wanted.get(name) != found.get(name))
    if odd:
        here, there = wanted.get(odd[0], "nothing"), found.get(odd[0], "nothing")
        raise ValueError(f"{odd[0]} should be {here} by its architecture, and the file has {there}")


def predict(folder: Path, file: Path, *, best: bool = False) -> Predictions:
    """Labels and, for classes, probabilities; for a number, its value in the label's own units.

    For a time with an event, the risk: how many times the target's baseline hazard; of an advice's model, the
    probabilities that the event comes later than some times.
    """
    net, prepared = load_model(folder, best=best)
    if not file.exists():
        raise UsageError(f"there is no file {file}.")
    notes: list[str] = []
    return _table(net, prepared, outputs_of(net, prepared, file, notes), notes)


def outputs_of(net: Net, prepared: Preparation, source: Source, notes: list[str]) -> Tensor:
    """What a model makes of the rows of a table, [rows, outputs].

    Args:
        net: the model.
        prepared: how rows become its inputs.
        source: a file, or a table that a program holds.
        notes: what should be known of the rows is appended.
    """
    name = source if isinstance(source, Path) else source.name
    outputs = []
    try:
        for inputs in _inputs(prepared, source, notes):
            with torch.no_grad():
                outputs.append(net(inputs))
    except Unreadable as error:
        raise UsageError(f"{name}: {error}. {error.remedy}".rstrip()) from None
    if not outputs:
        raise UsageError(f"{name} has no rows.")
    return torch.cat(outputs)


def shares_of(outputs: Tensor) -> Tensor:
    """The probabilities of the classes, [rows, classes].

    Args:
        outputs: of a classifier.
    """
    return torch.softmax(outputs.double(), 1)


def values_of(prepared: Preparation, outputs: Tensor) -> Tensor:
    """The predicted numbers in the label's own units, [rows].

    Args:
        prepared: how the label was scaled.
        outputs: of a model that predicts a number.
    """
    return outputs.flatten().double() * prepared.label_deviation + prepared.label_mean


def _table(net: Net, prepared: Preparation, outputs: Tensor, notes: list[str]) -> Predictions:
    label = prepared.form.label
    if isinstance(net, Stack) and net.goal.edges:
        beyond = outputs.flip(1).cumsum(1).flip(1)[:, 1:].tolist()
        header = ["row", *(f"p({label}>{edge:.6g})" for edge in net.goal.edges)]
        return Predictions(header, [[i + 1, *(f"{p:.6f}" for p in row)] for i, row in enumerate(beyond)], notes)
    if prepared.form.event is not None:
        risks = outputs.flatten().double().exp().tolist()
        return Predictions(["row", "risk"], [[i + 1, f"{v:.9g}"] for i, v in enumerate(risks)], notes)
    if not prepared.classes:
        values = values_of(prepared, outputs).tolist()
        return Predictions(["row", label], [[i + 1, f"{v:.9g}"] for i, v in enumerate(values)], notes)
    shares = shares_of(outputs)
    header = ["row", label, *(f"p({name})" for name in prepared.classes)]
    best = shares.argmax(1).tolist()
    rows = [
        [i + 1, prepared.classes[k], *(f"{p:.6f}" for p in row)]
        for i, (k, row) in enumerate(zip(best, shares.tolist(), strict=True))
    ]
    return Predictions(header, rows, notes)


def _inputs(prepared: Preparation, file: Source, notes: list[str]) -> Iterator[Tensor]:
    """The model's inputs, a block of rows at a time."""
    form = prepared.form
    if form.image is not None and isinstance(file, Path) and form_of(file) == "images":
        for pictures, _ in image_blocks(file, form.image[-1]):
            yield torch.from_numpy(pictures.astype(np.float32) / np.float32(form.unit))
        return
    if form.image is None:
        lacking = [name for name in form.features if name not in columns_of(file)]
        if lacking:
            raise Unreadable(f"lacks the columns {', '.join(map(repr, lacking))} that the model was trained with")
    unseen: dict[str, set[str]] = {}
    done, commas = 0, with_semicolons(file)
    for block in blocks_of(file, form.numeric):
        block = with_dates(block, form.dates, _missing(prepared), done)
        if form.image is not None:
            array = next((v for v in block.values() if isinstance(v, np.ndarray) and v.ndim > 1), None)
            if array is None:
                raise Unreadable("holds no pictures")
            yield torch.from_numpy(array.reshape(len(array), *form.image).astype(np.float32) / np.float32(form.unit))
            continue
        rows = len(next(iter(block.values())))
        yield torch.from_numpy(prepared.inputs(*_coded(prepared, block, done, unseen, commas)))
        done += rows
    for name, found in unseen.items():
        listed = ", ".join(map(repr, sorted(found)[:5]))
        notes.append(f"column {name!r} has words that no training file had: {listed}; they count as no category")


def _missing(prepared: Preparation) -> frozenset[str]:
    return MISSING | frozenset(prepared.missing)


def _coded(
    prepared: Preparation, block: Block, before: int, unseen: dict[str, set[str]], commas: bool
) -> tuple[np.ndarray, np.ndarray]:
    rows, missing = len(next(iter(block.values()))), _missing(prepared)
    table = np.empty((rows, len(prepared.numeric)))
    for j, column in enumerate(prepared.numeric):
        values, bad, word = numbers(block[column.name], missing, commas)
        if bad is not None:
            raise Unreadable(
                f"column {column.name!r} holds {word!r} in row {before + bad + 1:,}, where numbers are needed"
            )
        table[:, j] = values
    codes = np.empty((rows, len(prepared.worded)), dtype=np.int64)
    for j, worded in enumerate(prepared.worded):
        number: dict[str | None, int] = {word: i for i, word in enumerate(worded.words)}
        found = words(block[worded.name], missing)
        codes[:, j] = [-1 if word is None else number.get(word, -2) for word in found]
        strange = {word for word in found if word is not None and word not in number}
        if strange:
            unseen.setdefault(worded.name, set()).update(strange)
    return table, codes
