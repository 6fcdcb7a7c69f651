"""What a curious target can learn of a partner's rows from its message: was this row among them?

    python -m benchmarks.membership [--splits 20]      a table in markdown

A partner fits its models on 150 rows. The attacker ranks these and fresh rows of the same distribution by the loss of
the partner's model (Yeom and others 2018), and by that loss less the loss of the same model fitted on 100 other rows,
so that rows that are hard for everybody do not count (Watson and others 2022). Each cell has the AUC of both (0.5 is
guessing), the share of the partner's rows that the better one names while it names one fresh row in a hundred, and the
accuracy of the partner's model on fresh rows.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, make_classification
from sklearn.metrics import roc_auc_score

from coterie.ensemble.goal import Goal
from coterie.ensemble.message import message_of
from coterie.ensemble.models import Model

MEMBERS, REFERENCE, ALARMS = 150, 100, 0.01
LEAVES = (5, 20, 50)
TWO = Goal(2)
Rows = tuple[np.ndarray, np.ndarray]


def three_or_eight() -> Rows:
    """Two digits that look alike."""
    x, y = load_digits(return_X_y=True)
    some = np.isin(y, (3, 8))
    return x[some], (y[some] == 8).astype(int)


TABLES: dict[str, Callable[[], Rows]] = {
    "breast cancer": lambda: load_breast_cancer(return_X_y=True),
    "digits 3 and 8": three_or_eight,
    "generated": lambda: make_classification(2000, 20, n_informative=5, flip_y=0.2, random_state=0),
}


def attacked(model: Model, reference: Model, members: Rows, fresh: Rows) -> list[float]:
    """Both AUC, the share found, and the model's accuracy."""

    def losses(one: Model, rows: Rows) -> np.ndarray:
        return TWO.losses(TWO.distribution(one.scores(rows[0], TWO)), rows[1])

    aucs, found = [], 0.0
    for hard in (0.0, 1.0):
        inside, outside = (hard * losses(reference, rows) - losses(model, rows) for rows in (members, fresh))
        truth = np.repeat([1, 0], [len(inside), len(outside)])
        aucs.append(float(roc_auc_score(truth, np.r_[inside, outside])))
        found = max(found, float((inside > np.quantile(outside, 1.0 - ALARMS)).mean()))
    return [*aucs, found, float((model.scores(fresh[0], TWO).argmax(1) == fresh[1]).mean())]


def of_table(rows: Rows, splits: int) -> dict[str, str]:
    """The cell of every model, of means over splits."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    for seed in range(splits):
        order = np.random.default_rng(seed).permutation(len(rows[1]))
        parts = np.split(order, [MEMBERS, MEMBERS + REFERENCE])
        members, others, fresh = ((rows[0][part].astype(float), rows[1][part]) for part in parts)
        for leaf in LEAVES:
            theirs, mine = (message_of(*part, TWO, leaf) for part in (members, others))
            found[f"trees, leaves of {leaf}"].append(attacked(theirs.trees, mine.trees, members, fresh))
        found["linear"].append(attacked(theirs.linear, mine.linear, members, fresh))
    means = {name: np.mean(each, axis=0) for name, each in found.items()}
    return {name: f"{a:.2f}, {b:.2f}; {share:.0%}; {right:.0%}" for name, (a, b, share, right) in means.items()}


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.membership", description=__doc__)
    parser.add_argument("--splits", type=int, default=20)
    splits = parser.parse_args(arguments).splits
    cells = [of_table(rows(), splits) for rows in TABLES.values()]
    print("| " + " | ".join(["model", *TABLES]) + " |\n|" + "---|" * (len(TABLES) + 1))
    for model in cells[0]:
        print("| " + " | ".join([model, *(table[model] for table in cells)]) + " |")


if __name__ == "__main__":
    main()
