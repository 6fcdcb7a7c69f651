"""Covertype (Blackard and Dean): 581,012 lines of 54 integer features and a class from 1 to 7, plain or gzipped."""

import warnings
from pathlib import Path

import numpy as np
import torch

from coterie.problems.data.examples import DataSet, Examples
from coterie.problems.data.files import damaged, lines
from coterie.problems.data.sets import locate

FEATURES = 54
MEASURED = 10  # elevation, aspect, slope, distances and hillshades; the rest is one-hot


def covtype() -> DataSet:
    """All rows; it was published in one part."""
    path = locate("covtype")["covtype.data"]
    table = read_table(path)
    labels = torch.from_numpy(table[:, FEATURES].astype(np.int64)) - 1
    if int(labels.min()) < 0 or int(labels.max()) > 6:
        low, high = int(labels.min()) + 1, int(labels.max()) + 1
        raise damaged(path, f"it has classes from {low} to {high}, where they are 1 … 7")
    return DataSet("covtype", 7, Examples(torch.from_numpy(table)[:, :FEATURES], labels), measured=MEASURED)


def read_table(path: Path) -> np.ndarray:
    """The lines as int16, straight from the stream: the text is never in memory as a whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an empty file: said better below
        try:
            table = np.loadtxt(lines(path), delimiter=",", dtype=np.int16, comments=None, ndmin=2)
        except ValueError as error:
            raise damaged(path, str(error).partition(";")[0].rstrip(".")) from None
    if not table.size:
        raise damaged(path, "it holds no rows")
    if table.shape[1] != FEATURES + 1:
        raise damaged(path, f"its lines have {table.shape[1]} numbers, not {FEATURES} features and a class")
    return table
