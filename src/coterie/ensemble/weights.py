"""A gate, and weights learned in the space of predictions: the papers' bilevel problem where it is convex.

Which models may take part is decided by an exact permutation test on the target's rows; theirs are recalibrated by a
level and a slope; the weights are found by EM (least squares for a number). Everything is done for many sets of rows at
once: masks [B, n] say which rows each of B problems sees.

The idea of weighing sources by their predictions: MixMin (Thudi and others, ICML 2025), FENS (Allouah and others,
NeurIPS 2024), super learner (van der Laan, Polley and Hubbard 2007), stacking (Wolpert 1992).
"""

import numpy as np
from scipy.optimize import nnls
from scipy.stats import false_discovery_control, norm

from coterie.ensemble.goal import LEAST, WIDEST, Goal

LEVEL = 0.05
EM_STEPS, NEWTON_STEPS = 30, 12  # EM that stops early keeps weights near equal ones, which is safer with few rows
PRIOR = 1.0  # rows that say "level 0, slope 1"
TOGETHER = 1e3  # how firmly weights of least squares add up to 1


def permutation_z(goal: Goal, distribution: np.ndarray, labels: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """By mask: the loss against that of permuted labels, in exact standard deviations (negative: smaller).

    The mean and variance over all permutations are Hoeffding's (1951).

    Args:
        goal: the kind of the label.
        distribution: a model's predictions of all rows, [n, …].
        labels: [n].
        masks: which rows count, [B, n].

    Example:
        >>> p = np.array([[0.9, 0.1], [0.8, 0.2], [0.2, 0.8], [0.1, 0.9]])
        >>> permutation_z(Goal(2), p, np.array([0, 0, 1, 1]), np.ones((1, 4), bool)).round(2)
        array([-1.7])
    """
    if not goal.classes and not goal.edges:
        return np.array([_correlation_z(distribution[m, 0], labels[m]) for m in masks])
    losses, types = goal.losses_by_type(distribution), goal.types(labels)
    found = np.zeros(len(masks))
    for b, mask in enumerate(masks):
        a, own = losses[mask], types[mask]
        n, counts = len(own), np.bincount(own, minlength=losses.shape[1])
        share = counts / n
        rows, columns = a @ share, a.mean(0)
        grand = float(columns @ share)
        apart = np.square(a - rows[:, None] - columns + grand) @ counts
        deviation = np.sqrt(apart.sum() / max(1, n - 1))
        observed = a[np.arange(n), own].sum()
        found[b] = (observed - n * grand) / deviation if deviation > LEAST else 0.0
    return found


def _correlation_z(values: np.ndarray, labels: np.ndarray) -> float:
    spread = values.std() * labels.std()
    if spread <= LEAST * LEAST:
        return 0.0
    return -float(((values - values.mean()) * (labels - labels.mean())).mean() / spread) * np.sqrt(len(labels) - 1.0)


def admitted(z: np.ndarray) -> np.ndarray:
    """Whose better model is better than chance, false discoveries controlled over the partners.

    Args:
        z: of the models of each partner, [K, models]; NaN for one that does not take part.
    """
    if not len(z):
        return np.zeros(0, dtype=bool)
    best = np.where(np.isnan(z), np.inf, z).min(1)
    p = np.minimum(1.0, z.shape[1] * norm.cdf(best))
    return np.asarray(false_discovery_control(p) <= LEVEL)


def recalibrated(
    goal: Goal, scores: np.ndarray, labels: np.ndarray, masks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Levels [B, q] and slopes [B] ≥ 0 by which scores [n, q] fit the labels best; of few rows near 0 and 1.

    Args:
        goal: the kind of the label.
        scores: of a model.
        labels: [n].
        masks: which rows each fit sees, [B, n].
    """
    if goal.classes:
        levels, slopes = _newton(scores, labels.astype(int), masks)
    elif goal.edges:
        rows, place, happened = goal.expanded(labels)
        level, slopes = _newton_of_hazards(scores[rows, place], happened, masks[:, rows])
        levels = np.repeat(level[:, None], goal.outputs, axis=1)
    else:
        levels, slopes = _line(scores[:, 0], labels, masks)
    usable = np.isfinite(slopes) & np.isfinite(levels).all(1)  # of scores too large to be squared nothing is left
    return np.where(usable[:, None], levels, 0.0), np.where(usable, slopes, 0.0)


def _line(values: np.ndarray, labels: np.ndarray, masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    levels, slopes = np.zeros((len(masks), 1)), np.ones(len(masks))
    for b, mask in enumerate(masks):
        v, y = values[mask], labels[mask]
        square = np.square(v - v.mean()).sum()
        prior = PRIOR * max(float(v.var()), LEAST)
        slopes[b] = max(0.0, (((v - v.mean()) * (y - y.mean())).sum() + prior) / (square + prior))
        levels[b] = y.mean() - slopes[b] * v.mean()
    return levels, slopes


def _newton(logits: np.ndarray, labels: np.ndarray, masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Levels of all classes (the first is 0) and slopes, by Newton's method for all masks at once."""
    n, C = logits.shape
    logits = logits - logits.mean(1, keepdims=True)
    design = np.zeros((n, C, C))  # levels of classes 1 … C − 1, then the slope
    design[:, np.arange(1, C), np.arange(C - 1)] = 1.0
    design[:, :, C - 1] = logits
    start = np.zeros(C)
    start[-1] = 1.0
    theta = np.tile(start, (len(masks), 1))
    weight = masks.astype(float)
    wanted = design[np.arange(n), labels]
    for _ in range(NEWTON_STEPS):
        p = Goal(C).distribution(np.einsum("ncd,bd->bnc", design, theta))
        mean = np.einsum("bnc,ncd->bnd", p, design)
        gradient = np.einsum("bn,bnd->bd", weight, mean - wanted) + PRIOR * (theta - start)
        second = np.einsum("bn,bnc,ncd,nce->bde", weight, p, design, design, optimize=True)
        second -= np.einsum("bn,bnd,bne->bde", weight, mean, mean, optimize=True)
        step = np.linalg.solve(second + PRIOR * np.eye(C), gradient[..., None])[..., 0]
        theta -= step * np.minimum(1.0, 4.0 / np.maximum(LEAST, np.abs(step).max(1)))[:, None]
    levels = np.hstack([np.zeros((len(masks), 1)), theta[:, :-1]])
    against = theta[:, -1] < 0.0
    if against.any():  # the best level without the scores
        levels[against] = _newton(np.zeros_like(logits), labels, masks)[0][against]
    return levels, np.maximum(0.0, theta[:, -1])


def _newton_of_hazards(scores: np.ndarray, happened: np.ndarray, masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Level and slope of logarithms of hazards, for all masks at once; an interval counts as a Poisson number."""
    theta, start = np.tile([0.0, 1.0], (len(masks), 1)), np.array([0.0, 1.0])
    centre = scores.mean() if len(scores) else 0.0
    design = np.stack([np.ones(len(scores)), scores - centre], axis=1)
    for _ in range(NEWTON_STEPS):
        rate = np.exp(np.clip(theta @ design.T + centre, -WIDEST, WIDEST)) * masks
        gradient = (rate - masks * happened) @ design + PRIOR * (theta - start)
        second = np.einsum("bm,md,me->bde", rate, design, design, optimize=True) + PRIOR * np.eye(2)
        step = np.linalg.solve(second, gradient[..., None])[..., 0]
        theta -= step * np.minimum(1.0, 1.0 / np.maximum(LEAST, np.abs(step).max(1)))[:, None]
    slopes = np.maximum(0.0, theta[:, 1])
    return theta[:, 0] + (1.0 - slopes) * centre, slopes


def mixed(weights: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Distributions [M, n, q] by weights [M]."""
    return np.asarray(np.tensordot(weights, members, axes=1))


def weights_of(goal: Goal, members: np.ndarray, labels: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """The weights on the simplex [B, M] with which members [B, M, n, q] predict the labels best.

    Args:
        goal: the kind of the label.
        members: distributions, for each problem its own.
        labels: [n].
        masks: which rows each problem sees, [B, n].

    Example:
        >>> right, wrong = np.array([[0.9, 0.1], [0.1, 0.9]]), np.array([[0.1, 0.9], [0.9, 0.1]])
        >>> weights_of(Goal(2), np.stack([right, wrong])[None], np.array([0, 1]), np.ones((1, 2), bool)).round(3)
        array([[1., 0.]])
    """
    B, M = members.shape[:2]
    if not goal.classes and not goal.edges:
        return np.stack([_least_squares(members[b, :, masks[b], 0], labels[masks[b]]) for b in range(B)])
    losses = np.stack([[goal.losses(one, labels) for one in problem] for problem in members])
    likelihood = np.exp(-losses).transpose(0, 2, 1) * masks[:, :, None]  # [B, n, M]; rows that do not count are 0
    counts = masks.sum(1, keepdims=True)
    weights = np.full((B, M), 1.0 / M)
    for _ in range(EM_STEPS):
        total = np.einsum("bnm,bm->bn", likelihood, weights)
        weights = weights * np.einsum("bnm,bn->bm", likelihood, masks / np.where(total > 0, total, 1.0)) / counts
    return weights / weights.sum(1, keepdims=True)


def _least_squares(predicted: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Of rows [n, M]: weights that are not negative and add up to 1."""
    firm = TOGETHER * np.sqrt(len(labels))
    system = np.vstack([predicted, np.full(predicted.shape[1], firm)])
    found = nnls(system, np.append(labels, firm))[0]
    return np.asarray(found / max(found.sum(), LEAST))
