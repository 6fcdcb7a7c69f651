"""Result folders made up for tests, with hostile text where asked for."""

import json
import math
from pathlib import Path
from typing import Any

from coterie.measures import declared

CONFIG = """version = 1
[run]
method = {method}
problem = "friends"
rounds = {rounds}
seed = {seed}
baselines = []
[method]
step = 0.5
[problem]
clients = {clients}
[federation]
active = 1.0
"""


def moved(t: int, each: int = 1000) -> dict[str, int]:
    return {"rounds": t, "floats_up": t, "floats_down": t, "bytes_up": t * each, "bytes_down": 2 * t * each}


def make(
    folder: Path,
    *,
    method: str = "meritfed",
    clients: int = 6,
    rounds: int = 20,
    seed: int = 0,
    friends: int | None = 2,
    best: float = 0.9,
    matrix: bool = False,
    events: tuple[dict[str, Any], ...] = (),
    cause: str = "shared/gradient",
    finished: bool = True,
    baselines: tuple[str, ...] = (),
    with_weights: bool = True,
    each: int = 1000,
    names: tuple[str, ...] = (),
) -> Path:
    """A run whose first clients win."""
    folder.mkdir(parents=True, exist_ok=True)
    toml = CONFIG.format(method=json.dumps(method), rounds=rounds, seed=seed, clients=clients)
    (folder / "config.toml").write_text(toml, encoding="utf-8")
    metrics, rows = [], []
    weights: Any = []
    for t in range(rounds + 1):
        share = t / max(1, rounds)
        weights = [math.exp(-4 * share * k / clients) for k in range(clients)]
        weights = [w / sum(weights) for w in weights]
        line = {"round": t, "test_accuracy": 0.1 + (best - 0.1) * share + 0.001 * seed, "test_loss": 2.3 - 2 * share}
        line |= {
            "effective_clients": 1 / sum(w * w for w in weights),
            "seconds": 0.1 * t,
            "communication": moved(t, each),
        }
        metrics.append(json.dumps(line))
        if matrix:
            half = clients // 2
            weights = [[((i < half) == (k < half) and 1 / half) or 0.0 for k in range(clients)] for i in range(clients)]
            rows += [",".join([str(t), str(i), *map(str, row)]) for i, row in enumerate(weights)]
        else:
            rows.append(",".join([str(t), *(f"{w:.9g}" for w in weights)]))
    keys = ["round", "target"] if matrix else ["round"]
    head = ",".join([*keys, *(f"client_{k}" for k in range(clients))])
    (folder / "weights.csv").write_text("\n".join([head, *rows]) + "\n" if with_weights else "")
    (folder / "metrics.jsonl").write_text("\n".join(metrics) + "\n")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if finished:
        entry = moved(rounds, each)
        (folder / "ledger.json").write_text(json.dumps({"total": entry, "by_cause": {cause: entry}}))
        summary = {"method": method, "problem": "friends", "seed": seed, "rounds": rounds, "outcome": "finished"}
        summary |= {"message": "", "final": json.loads(metrics[-1]), "weights": weights if with_weights else None}
        summary |= {"measures": [measure.as_dict() for measure in declared((), json.loads(metrics[-1]))]}
        summary |= {"friends": friends, "communication": entry, "seconds": 1.0}
        summary |= {"names": list(names)} if names else {}
        (folder / "summary.json").write_text(json.dumps(summary))
    for name in baselines:
        make(folder / "baselines" / name, method=name, rounds=rounds, best=0.5, with_weights=False, each=0)
    return folder
