"""What the target could do without anybody: gradient-boosted trees on its own rows, cross-fitted on the same folds."""

from typing import Any

import numpy as np
from torch import Tensor

from coterie.advise.splits import Splits

MOST_COLUMNS = 512
ORDERS = 1  # trees have a line of their own and no test: one order is enough


def boosted(inputs: Tensor, labels: Tensor, splits: Splits, classes: int | None, seed: int) -> np.ndarray | None:
    """Held-out predictions [orders, n, outputs] of scikit-learn's HistGradientBoosting; None for very wide inputs.

    Args:
        inputs: the target's prepared rows, [n, …].
        labels: their labels, [n].
        splits: the folds that the other strategies are judged on.
        classes: how many classes there are; None for a number.
        seed: the trees' random state.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    x, y = inputs.flatten(1).double().numpy(), labels.numpy()
    if x.shape[1] > MOST_COLUMNS:
        return None
    Model: Any = HistGradientBoostingRegressor if classes is None else HistGradientBoostingClassifier
    held = np.zeros((min(ORDERS, splits.repeats), len(x), classes or 1))
    with threadpool_limits(1):  # waiting threads take longer than the work where others use the machine
        for r, folds in enumerate(splits.folds[:ORDERS].numpy()):
            for f in range(splits.F):
                test, train = folds == f, folds != f
                known = np.unique(y[train])
                if classes is not None and len(known) == 1:
                    held[r, test, int(known[0])] = 1.0
                    continue
                model = Model(random_state=seed).fit(x[train], y[train])
                if classes is None:
                    held[r, test, 0] = model.predict(x[test])
                else:
                    held[r][np.ix_(test, known.astype(int))] = model.predict_proba(x[test])
    return held
