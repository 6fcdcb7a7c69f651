"""Beyond the papers: everyone a target (docs/collaborate.md), clients that attack (docs/byzantine.md)."""

from typing import Any

from coterie.reproduce.study import Budget, Column, Row, Settings, Study, Table, flat

WALK = {"method.step": 0.1}
SIZES = {  # rows to train on for collaborate, and for the others; local steps and batch; rounds
    "digits": (100, 160, 5, 20, 200),
    "fashion-mnist": (4000, 4500, 20, 50, 100),
}
PERSONAL: dict[str, dict[str, Any]] = {
    "collaborate": {"run.method": "collaborate", **WALK},
    "collaborate, trial": {"run.method": "collaborate", **WALK, "method.mirror": "trial"},
    "fedavg": {"run.method": "fedavg", **WALK},
    "local-train": {"run.method": "local-train", **WALK},
    "ditto": {"run.method": "ditto", **WALK, "method.penalty": 0.1},
    "ditto, weak pull": {"run.method": "ditto", **WALK, "method.penalty": 0.01},
    "pfedme": flat(
        run={"method": "pfedme"},
        method={"penalty": 15.0, "inner_step": 0.1, "inner_steps": 5, "local_steps": 10, "batch": 50},
    ),
    "groups known": {"run.method": "collaborate", **WALK, "method.mirror": "off", "method.start": "groups"},
}


def _personal_row(name: str, data: str) -> Row:
    """collaborate learns its weights on a part of its rows; the others train on all of them."""
    own, all_rows, steps, batch, _ = SIZES[data]
    local = {"method.local_steps": steps, "method.batch": batch}
    rows = {"problem.train": own if name.startswith("collaborate") else all_rows}
    return Row(name, {**local, **rows, **PERSONAL[name]})


def _personal(data: str, rounds: int, seeds: tuple[int, ...]) -> Table:
    measures = ("personal_accuracy", "mean"), ("personal_accuracy_worst", "worst client")
    inside = ("group_weight", "weight inside the group"), ("group_weight_least", "least row")
    return Table(
        f"{data}, groups, setting 4, {rounds} rounds; accuracy of each client's model on its own group's rows.",
        tuple(_personal_row(name, data) for name in PERSONAL),
        tuple(Column(words, {}, f"final:{key}") for key, words in (*measures, *inside)),
        flat(
            run={"problem": "groups", "rounds": rounds, "record": 10, "checkpoint": 20},
            problem={"data": data, "setting": 4, "everyone": True},
            federation={"mode": "vmap"},
        ),
        seeds,
        name=_personal_folder,
    )


def _personal_folder(s: Settings) -> str:
    kind = {"trial": "-trial", "off": "-known"}.get(s.get("method.mirror", ""), "")
    pull = "-weak" if s.get("method.penalty") == 0.01 else ""
    return f"{s['problem.data']}-{s['run.rounds']}-{s['run.method']}{kind}{pull}-{s['run.seed']}"


STEP = {"method.step": 0.5, "method.batch": "all"}
ONE_STEP = {**STEP, "method.local_steps": 1}
ROBUST = {**ONE_STEP, "method.attackers": 0.4}
DEFENDERS: dict[str, dict[str, Any]] = {
    "meritfed": {**STEP, "method.mirror_step": 0.2, "method.mirror_steps": 10, "method.cut": 100},
    "primal-dual": {**STEP, "method.dual_step": 0.1, "method.outer_step": 0.005},
    "sgd-full": STEP,
    "krum": ROBUST,
    "multi-krum": ROBUST,
    "coordinate-median": ONE_STEP,
    "trimmed-mean": ROBUST,
    "geometric-median": ONE_STEP,
}
ATTACKS = ("none", "silent", "sign-flip", "noise", "label-flip", "scaled", "alie", "ipm")


def _attacked(friends: int, attacks: tuple[str, ...], rounds: int, seeds: tuple[int, ...]) -> Table:
    who = "5 friends and 10 strangers" if friends == 5 else "friends only"
    return Table(
        f"Digits, 15 clients ({who}), of whom the last 6 attack, 300 validation rows, {rounds} rounds, "
        "federation.clip = 3, without screening of copies and without the guard; test accuracy.",
        tuple(Row(attack, {"problem.attack": attack}) for attack in attacks),
        tuple(Column(m, {"run.method": m, **own}, "final:test_accuracy") for m, own in DEFENDERS.items()),
        flat(
            run={"problem": "friends", "rounds": rounds, "record": rounds, "checkpoint": rounds},
            problem={"friends": friends, "validation": 300},
            # ipm and alie attackers all send the same, which would give them away
            federation={"mode": "vmap", "clip": 3.0, "screen_copies": False, "guard": False},
        ),
        seeds,
        corner="attack",
    )


MEAN_ATTACKS: dict[str, dict[str, Any]] = {  # strengths of MeritFed's authors
    "none": {},
    "silent": {"problem.attack": "silent"},
    "ipm, ε = .1": {"problem.attack": "ipm", "problem.strength": 0.1},
    "noise, σ = 10": {"problem.attack": "noise", "problem.strength": 10.0},
    "alie, z = 100": {"problem.attack": "alie", "problem.strength": 100.0},
    "sign-flip": {"problem.attack": "sign-flip"},
}
MEAN_DEFENDERS: dict[str, dict[str, Any]] = {
    "meritfed": {"method.mirror_step": "power(12.0, 0.5)"},
    "sgd-full": {},
    "sgd-ideal": {},
    "krum": {"method.local_steps": 1, "method.attackers": 50},
    "coordinate-median": {"method.local_steps": 1},
    "trimmed-mean": {"method.local_steps": 1, "method.attackers": 50},
    "geometric-median": {"method.local_steps": 1},
}


def _attacked_means(rounds: int, seeds: tuple[int, ...]) -> Table:
    return Table(
        "Mean estimation, 150 clients: 5 friends, 95 near ones (μ = .001), and 50 who attack, means of the authors' "
        "code, γ = .25, batches of 100, without clipping, screening of copies and guard; ‖x‖² at the end.",
        tuple(Row(name, own) for name, own in MEAN_ATTACKS.items()),
        tuple(Column(m, {"run.method": m, **own}, "final:objective", ".1e", 10.0) for m, own in MEAN_DEFENDERS.items()),
        flat(
            run={"problem": "mean-estimation", "record": rounds, "checkpoint": rounds},
            problem={"shift": 0.001, "geometry": "authors", "far": 50, "distance": 0.0, "attackers": 50},
            federation={"mode": "vmap", "clip": "none", "screen_copies": False, "guard": False},
            method={"step": 0.25, "batch": 100},
        ),
        seeds,
        corner="attack",
        budget=Budget("rounds", rounds),
    )


def _byzantine(friends: int) -> dict[str, Table]:
    few = _attacked(friends, ("none", "sign-flip", "ipm"), 60, (0,))
    return {"small": few, "paper": _attacked(friends, ATTACKS, 200, (0, 1, 2))}


STUDIES = (
    Study(
        "collaborate",
        "../collaborate",
        "everyone finds friends: personal accuracy, and weight inside the own group",
        {
            "small": _personal("digits", 40, (0,)),
            "digits": _personal("digits", 200, (0, 1, 2)),
            "paper": _personal("fashion-mnist", 100, (0, 1, 2)),
        },
    ),
    Study(
        "byzantine",
        "../byzantine",
        "attacks against learned weights and robust means; strangers among the clients",
        _byzantine(5),
    ),
    Study(
        "byzantine-friends-only",
        "../byzantine",
        "the same where everybody is a friend, which is fair to robust means",
        _byzantine(15),
    ),
    Study(
        "byzantine-means",
        "../byzantine",
        "50 of 150 clients attack the estimate of a mean, as in the experiments of MeritFed's authors",
        {"small": _attacked_means(200, (0,)), "paper": _attacked_means(1000, (0, 1, 2, 3, 4))},
    ),
)
