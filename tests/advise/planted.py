"""Federations with planted partners, small and quick: files in a folder, or plain arrays."""

import csv
from pathlib import Path
from typing import Any

import numpy as np

from coterie.ensemble.goal import Goal
from coterie.ensemble.message import Message, message_of

NAMES = ("age", "dose", "weight", "pulse", "sugar")
Rows = tuple[np.ndarray, np.ndarray]


def rows(n: int, seed: int, kind: str = "friend", *, classes: int = 2, number: bool = False) -> Rows:
    """Rows of a world in which four columns tell the label; partners of some kinds live in another one."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, 5))
    x[:, 2] = 0.6 * x[:, 0] + 0.8 * x[:, 2]
    signal = x @ [1.5, -1.2, 0.0, 1.0, -0.8] + 1.2 * random.normal(size=n)
    y = signal if number else np.digitize(signal, np.linspace(-1.0, 1.0, classes + 1)[1:-1]).astype(float)
    if kind == "shuffled":
        y = random.permutation(y)
    elif kind == "opposite":
        y = -y if number else classes - 1 - y
    elif kind == "noise":
        x = random.normal(size=x.shape)
    return x * [9.0, 2.0, 12.0, 8.0, 1.0] + [60.0, 20.0, 70.0, 75.0, 5.0], y


def message(goal: Goal, x: np.ndarray, y: np.ndarray) -> Message:
    """What a partner with these rows sends."""
    return message_of(x, y, goal, 20)


def write(path: Path, x: np.ndarray, y: np.ndarray, names: tuple[str, ...] = NAMES, **more: Any) -> Path:
    """A CSV file; classes are words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = bool((y == y.round()).all())
    labels = [f"c{int(v)}" for v in y] if whole else [f"{v:.6g}" for v in y]
    columns = {name: ["" if np.isnan(v) else f"{v:.7g}" for v in x[:, j]] for j, name in enumerate(names)}
    columns |= {**more, "label": labels}
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    return path


def federation(folder: Path, kinds: dict[str, str], own: int = 60, size: int = 200, **world: Any) -> dict[str, Any]:
    """My file and one for each partner, by name and kind; the settings that an advice needs."""
    write(folder / "mine.csv", *rows(own, 1, **world))
    for k, (name, kind) in enumerate(kinds.items()):
        write(folder / "sites" / f"{name}.csv", *rows(size, 10 + k, kind, **world))
    return settings(folder)


def settings(folder: Path, **flags: Any) -> dict[str, Any]:
    """Of an advice on the files of a folder."""
    where = {"run.problem": "files", "problem.clients": f"{folder}/sites/*.csv"}
    return {**where, "problem.target": f"{folder}/mine.csv", "problem.label": "label", **flags}
