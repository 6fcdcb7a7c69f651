"""What is minimised: model, losses, shards, target, measures."""

from coterie.problems.base import Context
from coterie.problems.tasks.sets import Ball, Box, Simplex
from coterie.problems.tasks.variables import PerClient
from coterie.problems.weighting import Weighting, weighting

__all__ = ["Ball", "Box", "Context", "PerClient", "Simplex", "Weighting", "weighting"]
