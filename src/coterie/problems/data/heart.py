"""Heart Disease (Janosi et al.; UCI): patients of four hospitals, prepared as FLamby's Fed-Heart-Disease.

Slope, ca and thal are left out, then rows with a missing value; chest pain and resting ECG become indicators without
their first level. Of each hospital 66 % are for training and 34 % for the test, split by FLamby's seed with the same
share of the sick; inputs are standardised by the hospital's own training rows (du Terrail et al. 2022).
"""

from pathlib import Path

import numpy as np
import torch
from sklearn.model_selection import train_test_split

from coterie.problems.data.examples import Examples, Holder
from coterie.problems.data.files import damaged, lines
from coterie.problems.data.sets import locate

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
SEED, TRAIN = 43, 0.66  # FLamby's
FIELDS, KEPT = 14, (*range(10), 13)
CATEGORIES = ((2, (2, 3, 4)), (6, (1, 2)))  # column, levels but the first
PLAIN = (0, 1, 3, 4, 5, 7, 8, 9)
TINY = 1e-9


def heart_disease_hospitals() -> tuple[Holder, ...]:
    """Cleveland (199 and 104 patients), Hungary (172, 89), Switzerland (30, 16) and Long Beach (85, 45).

    A patient has 13 standardised inputs; label 1 is disease.
    """
    paths = locate("heart-disease")
    return tuple(prepared(name, read_patients(paths[f"processed.{name}.data"])) for name in HOSPITALS)


def read_patients(path: Path) -> np.ndarray:
    """The rows without a missing value, [n, 11]: ten inputs and the label."""
    rows = []
    for number, line in enumerate(lines(path), 1):
        fields = line.decode("ascii", "replace").strip().split(",")
        if len(fields) != FIELDS:
            raise damaged(path, f"line {number} has {len(fields)} fields, not {FIELDS}")
        wanted = [fields[i] for i in KEPT]
        if "?" in wanted:
            continue
        try:
            rows.append([float(field) for field in wanted])
        except ValueError:
            raise damaged(path, f"line {number} holds something that is no number") from None
    if not rows or not np.isfinite(rows).all():
        raise damaged(path, "it holds no complete patients" if not rows else "it holds numbers that are not finite")
    return np.array(rows)


def prepared(name: str, patients: np.ndarray) -> Holder:
    """Indicators, the split and the scale."""
    y = (patients[:, -1] > 0).astype(np.int64)
    indicators = [patients[:, column] == level for column, levels in CATEGORIES for level in levels]
    x = torch.from_numpy(np.column_stack([patients[:, PLAIN], *indicators]).astype(np.float32))
    tested = torch.from_numpy(test_rows(y))
    mean, deviation = x[~tested].mean(0), x[~tested].std(0) + TINY
    x, labels = (x - mean) / deviation, torch.from_numpy(y)
    train, test = (Examples(x[rows], labels[rows]) for rows in (~tested, tested))
    return Holder(name, train, test)


def test_rows(y: np.ndarray) -> np.ndarray:
    """Which of a hospital's rows FLamby tests on, by their labels, [n]."""
    even = y if all((y == label).sum() > 2 for label in np.unique(y)) and len(np.unique(y)) > 1 else None
    _, held_out = train_test_split(
        np.arange(len(y)), test_size=1.0 - TRAIN, train_size=TRAIN, random_state=SEED, stratify=even
    )
    tested = np.zeros(len(y), dtype=bool)
    tested[held_out] = True
    return tested
