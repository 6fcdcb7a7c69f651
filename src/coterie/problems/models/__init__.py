"""Models as flat vectors, and the papers' networks."""

from coterie.problems.models.flat import FlatModel
from coterie.problems.models.zoo import MODELS, build

__all__ = ["MODELS", "FlatModel", "build"]
