"""What is minimised: model, losses, shards, target, measures."""

from coterie.problems.base import Context
from coterie.problems.weighting import Weighting, weighting

__all__ = ["Context", "Weighting", "weighting"]
