"""Tables of a few hospitals: numbers, words, dates, missing values and a label, drawn from a seed."""

import csv
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

SITES = ("east", "north", "south")
Row = dict[str, Any]


def rows(seed: int, count: int, words: tuple[str, ...] = ("acute", "chronic", "mild")) -> list[Row]:
    """One row per patient."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        age, dose = round(float(rng.normal(60, 9)), 3), round(float(rng.normal(4.0, 0.6)), 4)
        pain = str(rng.choice(words))
        score = (age - 60) / 9 + 2 * (dose - 4.0) / 0.6 + (pain == "acute") + rng.normal(0, 0.7)
        found.append(
            {
                "age": "" if rng.random() < 0.05 else age,
                "dose": dose,
                "pain": pain,
                "seen": f"20{rng.integers(10, 20)}-{rng.integers(1, 13):02}-{rng.integers(1, 28):02}",
                "sick": int(score > 0.3),
            }
        )
    return found


def write(path: Path, table: list[Row], change: Callable[[Row], Mapping[str, Any]] = lambda row: row) -> Path:
    """A CSV file of these rows, each changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    changed = [dict(change(row)) for row in table]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(changed[0]))
        writer.writeheader()
        writer.writerows(changed)
    return path


def hospitals(folder: Path, sites: tuple[str, ...] = SITES, count: int = 60) -> tuple[Path, dict[str, Path]]:
    """The coordinator's file, and one per site."""
    mine = write(folder / "mine.csv", rows(1, 80))
    sizes = {name: count + 7 * k for k, name in enumerate(sites)}
    files = {
        name: write(folder / "sites" / f"{name}.csv", rows(10 + k, n)) for k, (name, n) in enumerate(sizes.items())
    }
    return mine, files


def private_values(folder: Path) -> list[bytes]:
    """Numbers of the sites' rows, but for those that the coordinator has too: texts, bytes of float64 and float32."""
    found: list[bytes] = []
    own = set(re.findall(r"\d+\.\d{3,}", (folder / "mine.csv").read_text()))
    for path in (folder / "sites").glob("*.csv"):
        for text in re.findall(r"\d+\.\d{3,}", path.read_text()):
            if text in own:
                continue
            found += [text.encode(), struct.pack("<d", float(text)), struct.pack("<f", float(text))]
    return [value for value in found if len(value) > 4] + [value for value in found if len(value) == 4 and value[0]]
