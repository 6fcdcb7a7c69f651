"""Fed-Heart-Disease: one advice per hospital, judged on FLamby's test rows beside FLamby's stored baselines.

    python -m benchmarks.heart                       all four hospitals; a table in markdown
    python -m benchmarks.heart --centres va --folder heart --json heart.json

Needs the data set heart-disease (`coterie data get heart-disease`). Each hospital's folder has the files, and its
advice/ the page. A folder that has an advice already is not trained again.
"""

import argparse
import csv
import json
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from sklearn.feature_extraction import DictVectorizer
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from coterie.advise.advise import advise
from coterie.advise.page import write
from coterie.errors import CoterieError
from coterie.experiment import config as configuration
from coterie.experiment.predict import predict
from coterie.problems.data.heart import HOSPITALS
from coterie.problems.files.example import write_example

FLAMBY = {  # test accuracy, mean of five seeds, as stored with FLamby (du Terrail et al. 2022)
    "pooled": (0.783, 0.764, 0.750, 0.644),
    "alone": (0.746, 0.746, 0.725, 0.702),
    "FedAvg": (0.731, 0.719, 0.650, 0.640),
    "FedYogi": (0.760, 0.753, 0.738, 0.676),
}
MODELS = ("alone", "delivered", "all pooled")
SICK = "yes"


def rows_of(*paths: Path) -> tuple[list[dict[str, Any]], np.ndarray]:
    """The inputs of files as dictionaries, numbers as numbers, and who is sick."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            rows.extend(csv.DictReader(file))
    sick = np.array([row.pop("disease") == SICK for row in rows])
    return [{name: _number(value) for name, value in row.items()} for row in rows], sick


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def pooled(folder: Path) -> np.ndarray:
    """Probabilities of disease for the test rows, by scikit-learn's logistic regression on everybody's rows."""
    x, y = rows_of(folder / "mine.csv", *sorted((folder / "sites").glob("*.csv")))
    regression = LogisticRegressionCV(
        Cs=10, cv=5, scoring="neg_log_loss", l1_ratios=(0.0,), use_legacy_attributes=False
    )
    model = make_pipeline(DictVectorizer(sparse=False), StandardScaler(), regression).fit(x, y)
    return np.asarray(model.predict_proba(rows_of(folder / "test.csv")[0])[:, 1])


def predicted(folder: Path, name: str) -> np.ndarray:
    """Probabilities of disease for the test rows, by a model of the advice."""
    table = predict(folder / "advice" / name, folder / "test.csv")
    return np.array([float(row[table.header.index(f"p({SICK})")]) for row in table.rows])


def judged(p: np.ndarray, sick: np.ndarray) -> dict[str, float | None]:
    """Accuracy with its 95 % interval (Wilson), and the area under the ROC curve where both classes have two rows.

    Example:
        >>> judged(np.array([0.9, 0.2, 0.6, 0.1]), np.array([True, False, False, True]))["accuracy"]
        0.5
    """
    n, accuracy, z = len(sick), float(((p > 0.5) == sick).mean()), 1.96
    middle = (accuracy + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(accuracy * (1 - accuracy) / n + z * z / (4 * n * n))
    auc = float(roc_auc_score(sick, p)) if min(sick.sum(), (~sick).sum()) > 1 else None
    return {"accuracy": accuracy, "low": middle - half, "high": middle + half, "auc": auc}


def centre(folder: Path, name: str, seed: int = 0) -> dict[str, Any]:
    """The advice for one hospital, or the reason why there is none, and its models on the test rows."""
    if not (folder / "mine.csv").exists():
        write_example(folder, "heart", centre=name)
    flags = {"run.problem": "files", "run.seed": seed, "problem.label": "disease"}
    flags |= {"problem.clients": f"{folder}/sites/*.csv", "problem.target": f"{folder}/mine.csv"}
    _, sick = rows_of(folder / "test.csv")
    tested = {"all pooled": judged(pooled(folder), sick)}
    rows = {"tested_rows": len(sick), "tested_healthy": int((~sick).sum())}
    if not (folder / "advice" / "advice.json").exists():
        try:
            advise(configuration.load(None, {}, flags), folder / "advice")
        except CoterieError as error:
            return {"centre": name, **rows, "refused": str(error), "tested": tested}
        write(folder / "advice")
    advice = json.loads((folder / "advice" / "advice.json").read_text(encoding="utf-8"))
    tested |= {"alone": judged(predicted(folder, "alone"), sick), "delivered": judged(predicted(folder, "model"), sick)}
    return {
        "centre": name,
        **rows,
        "headline": advice["headline"],
        "warnings": advice["warnings"],
        "verdicts": {partner["name"]: partner["verdict"] for partner in advice["partners"]},
        "answer": advice["worth_it"],
        "measure": advice["measure"]["name"],
        "gain": advice["delivered"]["gain"],
        "cross_validated": {
            "alone": advice["alone"]["values"][advice["alone"]["choice"]],
            "delivered": advice["delivered"]["values"],
        },
        "tested": tested,
    }


def shown(found: list[dict[str, Any]]) -> str:
    """Two tables in markdown: the advice, and accuracy and AUC on the test rows."""
    lines = ["| centre | verdicts | answer | cross-validated AUC, accuracy: alone | delivered | gain, 95 % interval |"]
    lines.append("|---|---|---|---|---|---|")
    for one in found:
        if "refused" in one:
            lines.append(f"| {one['centre']} | refused: {' '.join(one['refused'].split())} | | | | |")
            continue
        verdicts = ", ".join(f"{file.removesuffix('.csv')} {verdict}" for file, verdict in one["verdicts"].items())
        alone, delivered = (one["cross_validated"][key] for key in ("alone", "delivered"))
        gain = one["gain"]
        lines.append(
            f"| {one['centre']} | {verdicts} | {one['answer']} | {alone['auc']:.3f}, {alone['accuracy']:.3f} | "
            f"{delivered['auc']:.3f}, {delivered['accuracy']:.3f} | {one['measure']} {gain['value']:+.3f} "
            f"[{gain['low']:+.3f}, {gain['high']:+.3f}] |"
        )
    names = [one["centre"] for one in found]
    lines += ["", "| test accuracy (AUC) | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for model in MODELS:
        cells = [_cell(one["tested"].get(model)) for one in found]
        lines.append(
            f"| coterie, {model} | ".replace("coterie, all pooled", "scikit-learn, all pooled")
            + " | ".join(cells)
            + " |"
        )
    for method, values in FLAMBY.items():
        lines.append(
            f"| FLamby, {method} | " + " | ".join(f"{values[HOSPITALS.index(name)]:.3f}" for name in names) + " |"
        )
    return "\n".join(lines)


def _cell(entry: dict[str, float | None] | None) -> str:
    if entry is None:
        return "–"
    auc = "–" if entry["auc"] is None else f"{entry['auc']:.3f}"
    return f"{entry['accuracy']:.3f} [{entry['low']:.2f}, {entry['high']:.2f}] ({auc})"


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heart", description=__doc__)
    parser.add_argument("--centres", nargs="+", choices=HOSPITALS, default=list(HOSPITALS))
    parser.add_argument("--folder", type=Path, help="keep files and pages there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    with TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        found = [centre(folder / name, name, given.seed) for name in given.centres]
    print(shown(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
