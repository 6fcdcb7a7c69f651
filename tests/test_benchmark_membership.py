"""The membership attack: a model that knows its rows gives them away, one that says nothing does not."""

import numpy as np
import pytest
from benchmarks.membership import attacked

from coterie.ensemble.goal import Goal


class Knows:
    """A model that is right on some rows and says nothing about others."""

    def __init__(self, rows: np.ndarray, labels: np.ndarray) -> None:
        self.known = {row.tobytes(): label for row, label in zip(rows, labels, strict=True)}

    def scores(self, inputs: np.ndarray, goal: Goal) -> np.ndarray:
        """5 for the label of a known row."""
        return np.array(
            [
                5.0 * np.eye(goal.outputs)[self.known[r.tobytes()]] if r.tobytes() in self.known else [0, 0]
                for r in inputs
            ]
        )


@pytest.mark.parametrize(("knows", "auc", "share"), [(True, 1.0, 1.0), (False, 0.5, 0.0)])
def test_rows_that_a_model_knows_are_found(knows: bool, auc: float, share: float) -> None:
    draw = np.random.default_rng(0)
    members, fresh = ((draw.normal(size=(40, 2)), draw.integers(0, 2, 40)) for _ in range(2))
    nothing = Knows(np.zeros((0, 2)), np.zeros(0))
    model = Knows(*members) if knows else nothing
    assert attacked(model, nothing, members, fresh)[:3] == [auc, auc, share]
