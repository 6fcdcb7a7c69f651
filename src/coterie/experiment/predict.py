"""Predictions of a stored model for rows of a file, with the preprocessing that it was trained with."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from coterie.errors import UsageError
from coterie.problems.files.prepare import Preparation
from coterie.problems.files.problem import network
from coterie.problems.files.reading import (
    Block,
    Unreadable,
    blocks_of,
    columns_of,
    form_of,
    image_blocks,
    numbers,
    words,
)
from coterie.problems.files.tables import MISSING
from coterie.problems.models import FlatModel


class Predictions(NamedTuple):
    """A header, a row a row of the file, and what should be known of them."""

    header: list[str]
    rows: list[list[Any]]
    notes: list[str]

    def write(self, stream: IO[str]) -> None:
        """As CSV."""
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows(self.rows)


def load_model(folder: Path, *, best: bool = False) -> tuple[nn.Module, Preparation]:
    """The network of a result folder, and how rows become its inputs.

    Args:
        folder: a result folder with preprocess.json.
        best: take the model with the lowest validation loss, not the last one.
    """
    stored_model = folder / ("model-best.safetensors" if best else "model.safetensors")
    path = folder / "preprocess.json"
    if not path.is_file():
        raise UsageError(
            f"{folder} has no preprocess.json; name the result folder of a run on files, or an advice's model."
        )
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        prepared, about = Preparation.from_dict(stored), stored["model"]
        net = network(about["name"])(tuple(about["shape"]), about["outputs"], 0)
        net.load_state_dict(load_file(stored_model), strict=False)
    except FileNotFoundError as error:
        raise UsageError(f"{error.filename or stored_model} is missing.") from None
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"the model in {folder} is damaged: {str(error).splitlines()[0]}.") from None
    flat = FlatModel(net)  # batch norm as in training: by the rows at hand
    return flat.module(flat.start), prepared


def predict(folder: Path, file: Path, *, best: bool = False) -> Predictions:
    """Labels and, for classes, probabilities; for a number, its value in the label's own units."""
    net, prepared = load_model(folder, best=best)
    if not file.exists():
        raise UsageError(f"there is no file {file}.")
    notes: list[str] = []
    outputs = []
    try:
        for inputs in _inputs(prepared, file, notes):
            with torch.no_grad():
                outputs.append(net(inputs))
    except Unreadable as error:
        raise UsageError(f"{file}: {error}. {error.remedy}".rstrip()) from None
    if not outputs:
        raise UsageError(f"{file} has no rows.")
    return _table(prepared, torch.cat(outputs), notes)


def _table(prepared: Preparation, outputs: Tensor, notes: list[str]) -> Predictions:
    label = prepared.form.label
    if not prepared.classes:
        values = (outputs.flatten().double() * prepared.label_deviation + prepared.label_mean).tolist()
        return Predictions(["row", label], [[i + 1, f"{v:.9g}"] for i, v in enumerate(values)], notes)
    shares = torch.softmax(outputs.double(), 1)
    header = ["row", label, *(f"p({name})" for name in prepared.classes)]
    best = shares.argmax(1).tolist()
    rows = [
        [i + 1, prepared.classes[k], *(f"{p:.6f}" for p in row)]
        for i, (k, row) in enumerate(zip(best, shares.tolist(), strict=True))
    ]
    return Predictions(header, rows, notes)


def _inputs(prepared: Preparation, file: Path, notes: list[str]) -> Iterator[Tensor]:
    """The model's inputs, a block of rows at a time."""
    form = prepared.form
    if form.image is not None and form_of(file) == "images":
        for pictures, _ in image_blocks(file, form.image[-1]):
            yield torch.from_numpy(pictures.astype(np.float32) / np.float32(form.unit))
        return
    if form.image is None:
        lacking = [name for name in form.features if name not in columns_of(file)]
        if lacking:
            raise Unreadable(f"lacks the columns {', '.join(map(repr, lacking))} that the model was trained with")
    unseen: dict[str, set[str]] = {}
    done = 0
    for block in blocks_of(file, form.numeric):
        if form.image is not None:
            array = next((v for v in block.values() if isinstance(v, np.ndarray) and v.ndim > 1), None)
            if array is None:
                raise Unreadable("holds no pictures")
            yield torch.from_numpy(array.reshape(len(array), *form.image).astype(np.float32) / np.float32(form.unit))
            continue
        rows = len(next(iter(block.values())))
        yield torch.from_numpy(prepared.inputs(*_coded(prepared, block, done, unseen)))
        done += rows
    for name, found in unseen.items():
        listed = ", ".join(map(repr, sorted(found)[:5]))
        notes.append(f"column {name!r} has words that no training file had: {listed}; they count as no category")


def _coded(
    prepared: Preparation, block: Block, before: int, unseen: dict[str, set[str]]
) -> tuple[np.ndarray, np.ndarray]:
    rows = len(next(iter(block.values())))
    table = np.empty((rows, len(prepared.numeric)))
    for j, column in enumerate(prepared.numeric):
        values, bad, word = numbers(block[column.name], MISSING)
        if bad is not None:
            raise Unreadable(
                f"column {column.name!r} holds {word!r} in row {before + bad + 1:,}, where numbers are needed"
            )
        table[:, j] = values
    codes = np.empty((rows, len(prepared.worded)), dtype=np.int64)
    for j, worded in enumerate(prepared.worded):
        number: dict[str | None, int] = {word: i for i, word in enumerate(worded.words)}
        found = words(block[worded.name], MISSING)
        codes[:, j] = [-1 if word is None else number.get(word, -2) for word in found]
        strange = {word for word in found if word is not None and word not in number}
        if strange:
            unseen.setdefault(worded.name, set()).update(strange)
    return table, codes
