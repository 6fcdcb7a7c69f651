"""Data sets by name."""

from collections.abc import Callable
from functools import partial

from coterie.problems.data.cifar import cifar10
from coterie.problems.data.covtype import covtype
from coterie.problems.data.digits import digits
from coterie.problems.data.examples import DataSet
from coterie.problems.data.idx import images
from coterie.settings import chosen

LOADERS: dict[str, Callable[[], DataSet]] = {
    "digits": lambda: DataSet("digits", 10, digits()),
    "mnist": partial(images, "mnist"),
    "fashion-mnist": partial(images, "fashion-mnist"),
    "cifar10": cifar10,
    "covtype": covtype,
}


def load(name: str) -> DataSet:
    """A data set from where it lies; nothing is kept, so a second call reads it again."""
    return chosen("data set", name, LOADERS)()
