"""Folders of CSV files to try `coterie advise` on: real tables split into sites, with known friends and strangers.

breast-cancer, digits   scikit-learn's: target and friends draw from the same rows; strangers' labels are shuffled
covtype                 Covertype, where it is there: sites are parts of its wilderness areas; the target is of one
heart                   Heart Disease, where it is there: four hospitals, split as FLamby does; one is the target
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from coterie.errors import UsageError, unknown
from coterie.numerics import Draw
from coterie.problems.data.covtype import covtype
from coterie.problems.data.heart import HOSPITALS, read_patients, test_rows
from coterie.problems.data.sets import locate

EXAMPLES = ("breast-cancer", "digits", "covtype", "heart")
AREAS = ("rawah", "neota", "comanche", "poudre")
MEASURED = (
    *("elevation", "aspect", "slope", "to_water_horizontal", "to_water_vertical", "to_road"),
    *("shade_9am", "shade_noon", "shade_3pm", "to_fire"),
)
HEART: tuple[tuple[str, dict[int, str] | None], ...] = (  # columns as UCI describes them, with the words for codes
    *(("age", None), ("sex", {0: "female", 1: "male"})),
    ("chest_pain", {1: "typical angina", 2: "atypical angina", 3: "no angina", 4: "asymptomatic"}),
    *(("blood_pressure", None), ("cholesterol", None), ("high_blood_sugar", {0: "no", 1: "yes"})),
    ("resting_ecg", {0: "normal", 1: "ST-T abnormality", 2: "hypertrophy"}),
    *(("max_heart_rate", None), ("exercise_angina", {0: "no", 1: "yes"}), ("st_depression", None)),
)


class Written(NamedTuple):
    """What an example's folder holds: the setting that names its label, and who is a friend where that is known."""

    label: str
    friends: list[str]
    strangers: list[str]
    others: tuple[str, ...] = ()


def write_example(
    folder: Path,
    data: str = "breast-cancer",
    *,
    seed: int = 0,
    friends: int = 3,
    strangers: int = 3,
    own: int = 60,
    centre: str = "cleveland",
) -> Written:
    """Write mine.csv and sites/*.csv, one file per partner; for heart also test.csv, the centre's test rows.

    Args:
        folder: where to write; it must not hold an example yet.
        data: breast-cancer, digits, covtype or heart.
        seed: decides the split; that of heart is FLamby's.
        friends: partners with true labels (of breast-cancer and digits).
        strangers: partners with shuffled labels (of breast-cancer and digits).
        own: the target's rows (of breast-cancer and digits).
        centre: the hospital that is the target (of heart).
    """
    if data not in EXAMPLES:
        raise unknown("example", data, EXAMPLES)
    if (folder / "sites").exists() or (folder / "mine.csv").exists():
        raise UsageError(f"{folder} holds an example already; name another folder, or remove it first.")
    if centre not in HOSPITALS:
        raise unknown("centre", centre, HOSPITALS)
    paths = locate("heart-disease") if data == "heart" else {}
    try:
        (folder / "sites").mkdir(parents=True)
        if data == "heart":
            return _heart(folder, paths, centre)
        if data == "covtype":
            return _covtype(folder, seed)
        return _embedded(folder, data, seed, friends, strangers, own)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}.") from None


def _embedded(folder: Path, data: str, seed: int, friends: int, strangers: int, own: int) -> Written:
    from sklearn.datasets import load_breast_cancer, load_digits

    bunch = load_breast_cancer() if data == "breast-cancer" else load_digits()
    label = "diagnosis" if data == "breast-cancer" else "digit"
    names = [str(name).replace(" ", "_") for name in bunch.feature_names]
    words = [str(name) for name in bunch.target_names]
    draw = Draw.of(seed).phase("example")
    order = draw.permutation(len(bunch.target)).tolist()
    partners = friends + strangers
    each = (len(order) - own) // max(1, partners)
    if partners < 1 or own < 1 or each < 10:
        raise UsageError(
            f"{data} has {len(order)} rows; {own} of your own leave {max(0, each)} for each of {partners} partners; "
            "10 are needed. Lower --friends, --strangers or --own."
        )

    def table(rows: Sequence[int], shown: Sequence[int]) -> Iterable[list[Any]]:
        return ([*bunch.data[i].tolist(), words[bunch.target[j]]] for i, j in zip(rows, shown, strict=True))

    _write(folder / "mine.csv", [*names, label], table(order[:own], order[:own]))
    titles = _titles(partners)
    chosen = draw.phase("who").permutation(partners).tolist()  # so that names do not tell who is a friend
    good = sorted(titles[k] for k in chosen[:friends])
    for k, title in enumerate(titles):
        rows = order[own + k * each : own + (k + 1) * each]
        mix = draw.phase("labels").client(k).permutation(each).tolist()
        shown = rows if title in good else [rows[i] for i in mix]
        _write(folder / "sites" / f"{title}.csv", [*names, label], table(rows, shown))
    return Written(label, [f"{t}.csv" for t in good], [f"{t}.csv" for t in titles if t not in good])


def _titles(count: int) -> list[str]:
    known = ("north", "south", "east", "west", "harbour", "valley", "lakeside", "hillside")
    return list(known[:count]) if count <= len(known) else [f"site{k:02d}" for k in range(count)]


def _covtype(folder: Path, seed: int, rows: int = 1500, own: int = 300) -> Written:
    """Two sites an area; the target is of Rawah."""
    source = covtype()
    draw = Draw.of(seed).phase("example")
    area, soil = (source.train.x[:, a:b].argmax(1) for a, b in ((10, 14), (14, 54)))
    header = [*MEASURED, "soil", "cover"]

    def table(index: torch.Tensor) -> Iterable[list[Any]]:
        x, y, kind = (t[index].tolist() for t in (source.train.x[:, :10], source.train.y, soil))
        return ([*numbers, f"type{s + 1}", f"cover{c + 1}"] for numbers, s, c in zip(x, kind, y, strict=True))

    friends: list[str] = []
    others: list[str] = []
    for k, name in enumerate(AREAS):
        members = (area == k).nonzero()[:, 0]
        members = members[draw.client(k).permutation(len(members))]
        if k == 0:
            _write(folder / "mine.csv", header, table(members[:own]))
        for half in (0, 1):
            start = own + half * rows
            title = f"{name}-{'ab'[half]}.csv"
            _write(folder / "sites" / title, header, table(members[start : start + rows]))
            (friends if k == 0 else others).append(title)
    return Written("cover", friends, others)


def _heart(folder: Path, paths: dict[str, Path], centre: str) -> Written:
    """FLamby's training rows of every hospital, and the target's test rows."""
    header = [*(name for name, _ in HEART), "disease"]

    def cell(value: float, words: dict[int, str] | None) -> str:
        return (words or {}).get(int(value), f"{value:g}")

    def table(patients: np.ndarray) -> Iterable[list[Any]]:
        for *fields, stage in patients.tolist():
            cells = [cell(value, words) for value, (_, words) in zip(fields, HEART, strict=True)]
            yield [*cells, "yes" if stage > 0 else "no"]

    for name in HOSPITALS:
        patients = read_patients(paths[f"processed.{name}.data"])
        tested = test_rows((patients[:, -1] > 0).astype(np.int64))
        own = name == centre
        _write(folder / "mine.csv" if own else folder / "sites" / f"{name}.csv", header, table(patients[~tested]))
        if own:
            _write(folder / "test.csv", header, table(patients[tested]))
    return Written("disease", [], [], tuple(f"{name}.csv" for name in HOSPITALS if name != centre))


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
