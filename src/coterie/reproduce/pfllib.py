"""PFLlib's practical heterogeneous setting (Zhang et al. 2025): Fashion-MNIST at 20 clients, Dirichlet(.1).

Its network (`wide-cnn`), all clients in every round, batches of 10, step size .005, one local epoch, 2,000 rounds. The
printed values are mean accuracies over all clients' test rows, at the best round; here at the last one.

Deviations: every client takes the steps of an average epoch, whatever its size, on batches drawn with replacement; 5 %
of the rows that PFLlib trains on are validation rows. PFLlib does not print λ of Ditto.
"""

from typing import Any

from coterie.reproduce.study import Column, Row, Study, Table, flat, printed

ROWS, CLIENTS, BATCH = 70_000, 20, 10
EPOCH = round(ROWS * 0.75 * 0.95 / CLIENTS / BATCH)  # steps
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "local-train": {"everyone": True},
    "ditto": {"everyone": True, "penalty": 0.1},
    "fedfomo": {"downloads": 5},
    "fedala": {},
    "fedper": {},
    "fedrep": {"head_steps": EPOCH},
    "apfl": {},
    "collaborate": {},
}


def _table(about: str, data: str, rounds: int, steps: int, seeds: tuple[int, ...], **problem: Any) -> Table:
    rows = []
    for name, own in METHODS.items():
        more = {key: min(steps, value) if key.endswith("steps") else value for key, value in own.items()}
        if name == "ditto":
            more["personal_steps"] = steps
        settings = flat(run={"method": name}, method={"local_steps": steps, "batch": BATCH, **more})
        rows.append(Row(name, settings))
    paper = printed("pfllib") if data == "fashion-mnist" else {}
    columns = (
        Column("over test rows", {}, "personal:by_rows", ".1f", 100.0),
        Column("over clients", {}, "final:personal_accuracy", ".1f", 100.0),
        Column("worst client", {}, "final:personal_accuracy_worst", ".1f", 100.0),
        Column("hours", {}, "seconds", ".2f", 1 / 3600),
    )
    record = max(1, rounds // 10)
    return Table(
        about,
        tuple(rows),
        columns,
        flat(
            run={"problem": "dirichlet", "rounds": rounds, "record": record, "checkpoint": record},
            problem={"data": data, "alpha": 0.1, "clients": CLIENTS, "validation": 0.05, **problem},
            method={"step": 0.005},
            federation={"mode": "sequential" if data == "fashion-mnist" else "vmap"},
        ),
        seeds,
        corner="method",
        printed={key: value for key, value in paper.items() if key[0] in METHODS},
    )


STUDIES = (
    Study(
        "pfllib",
        "../leaderboard",
        "PFLlib's practical heterogeneous setting: accuracy at the clients, in per cent",
        {
            "small": _table("Digits and a perceptron, 60 rounds of 7 steps.", "digits", 60, 7, (0,)),
            "short": _table(f"5 of 2,000 rounds, {EPOCH} local steps.", "fashion-mnist", 5, EPOCH, (0,), least=40),
            "paper": _table(f"2,000 rounds of {EPOCH} local steps.", "fashion-mnist", 2000, EPOCH, (0, 1, 2), least=40),
        },
    ),
)
