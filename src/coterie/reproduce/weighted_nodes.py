"""Adaptively weighted nodes: Table 3 at equal rounds of communication, with Figures 1, 2 and 4–9; Tables 4 and 5."""

from typing import Any

from coterie.reproduce.study import Budget, Column, Curve, Row, Settings, Study, Table, Tuning, printed

STEPS: dict[str, Any] = {"method.step": 0.05, "method.local_steps": 10, "method.batch": 50}
SELDOM = {"run.record": 40, "run.checkpoint": 200}  # as often as local-svrg, whose round has 41 exchanges
OWN: dict[str, dict[str, Any]] = {
    "bilevel": {"method.outer_step": 0.025, "method.cap": 1 / 3},
    "local-train": {**STEPS, "method.refresh": 0.02, **SELDOM},
    "local-svrg": {},
    "fedavg": {**STEPS, **SELDOM},
    "ditto": SELDOM,
    "pfedme": {"method.penalty": 5.0, "method.personal_every": 10, **SELDOM},  # as often as any record needs it
}
MAIN = dict.fromkeys(("local-train", "local-svrg", "fedavg"), "step") | {"bilevel": "outer_step"}
VALUES: dict[str, tuple[float, ...]] = {
    "bilevel": (0.025, 0.02, 0.015),
    "ditto": (0.05, 0.1, 0.2),
    "pfedme": (5.0, 10.0, 15.0),
    "step": (0.05, 0.02, 0.01),
}
"""The paper's values of each method's main setting."""
SIZES = {"mnist": "4,000 rows, 500 validation, 5,000", "covtype": "40,000 rows, 5,000 validation, 50,000"}
REFRESHING = ("bilevel", "local-train", "local-svrg")
CURVES = (
    Curve("test_accuracy", "exchanges"),
    Curve("test_accuracy", "points"),
    Curve("friends_weight", "exchanges"),
)
SELECTION = 500
FULL, HALF = 1660, 830  # 20 and 10 outer rounds of bilevel at τ = 10
PICTURES = ("fashion-mnist", "mnist", "cifar10")
SEEDS = {"fashion-mnist": (0, 1, 2, 3, 4), "mnist": (0, 1, 2)}


def _grids(count: int, local_steps: tuple[int, ...]) -> dict[str, tuple[Settings, ...]]:
    """The first values of each method's main setting, with each number of local steps."""
    return {
        name: tuple(
            {f"method.{MAIN.get(name, 'penalty')}": value, "method.local_steps": tau}
            for value in VALUES.get(name, VALUES["step"])[:count]
            for tau in local_steps
        )
        for name in OWN
    }


def _adjusted(settings: dict[str, Any]) -> dict[str, Any]:
    data, method = settings["problem.data"], settings["run.method"]
    if data != "covtype":
        return settings
    return {**settings, "method.batch": 400, **({"method.refresh": 0.01} if method in REFRESHING else {})}


def _folder(s: Settings) -> str:
    names = (s["problem.data"], s["problem.setting"], s["problem.target"], s["run.seed"], s["run.method"])
    return "-".join(map(str, names))


def _name(data: str, target: str) -> str:
    more = ("" if data == "fashion-mnist" else f"-{data}") + ("" if target == "minority" else f"-{target}")
    return f"weighted-nodes-table3{more}"


def _columns(own: dict[str, dict[str, Any]]) -> tuple[Column, ...]:
    methods = [Column(m, {"run.method": m, **settings}, "best:test_accuracy") for m, settings in own.items()]
    bilevel = methods[0].settings
    weight = Column("friends' weight", bilevel, "final:friends_weight", of="bilevel")
    return (*methods, weight)


def _table(
    data: str, target: str, amount: int, grids: dict[str, tuple[Settings, ...]], seeds: tuple[int, ...]
) -> Table:
    settings = (1, 2) if data == "covtype" else (1, 2, 3, 4)
    common = {"run.problem": "groups", "problem.data": data, "problem.target": target, "problem.selection": SELECTION}
    return Table(
        f"15 clients of {SIZES.get(data, SIZES['mnist'])} test rows; test accuracy where that on {SELECTION} further "
        "rows of the target's distribution, which train nothing, was best.",
        tuple(Row(str(s), {"problem.setting": s}) for s in settings),
        _columns(OWN),
        {**common, "run.compile": False, "federation.mode": "vmap"},
        seeds=seeds,
        corner="setting",
        printed=printed(_name(data, target)),
        adjust=_adjusted,
        name=_folder,
        budget=Budget("exchanges", amount),
        tuning=Tuning(grids, {"problem.setting": 2, "run.seed": 1000}),
        curves=CURVES,
    )


ROUNDS = {"bilevel": 16, "local-train": 60, "local-svrg": 22, "ditto": 880, "pfedme": 150}
UNEQUAL: dict[str, dict[str, Any]] = {
    "bilevel": {"method.cap": 1 / 3},
    "local-train": {"method.step": 0.05, "method.local_steps": 50, "method.batch": 50, "method.refresh": 0.02},
    "ditto": {"run.record": 20, "run.checkpoint": 100},
    "pfedme": {"method.penalty": 5.0, "run.record": 5, "run.checkpoint": 50},
}


def _unequal(data: str, target: str) -> Table:
    """As it was run before budgets were equal, so that the stored results can be checked."""

    def adjusted(settings: dict[str, Any]) -> dict[str, Any]:
        if settings["run.method"] == "bilevel" and target == "majority":
            settings = {**settings, "run.rounds": 20}
        elif settings["run.method"] == "bilevel" and settings["problem.setting"] in (1, 3):
            settings = {**settings, "run.rounds": 40, "method.outer_step": 0.025}
        elif settings["run.method"] == "bilevel" and data == "mnist":
            settings = {**settings, "run.rounds": 28}
        return _adjusted(settings)

    own = {name: {"run.rounds": rounds, **UNEQUAL.get(name, {})} for name, rounds in ROUNDS.items()}
    return Table(
        f"15 clients of {SIZES.get(data, SIZES['mnist'])} test rows; fixed settings, test accuracy at the best "
        "validation accuracy. Budgets are unequal: bilevel has 1,328 to 3,320 rounds of communication, local-svrg 902, "
        "ditto 880, pfedme 150.",
        tuple(Row(str(s), {"problem.setting": s}) for s in ((1, 2) if data == "covtype" else (1, 2, 3, 4))),
        _columns(own),
        {
            "run.problem": "groups",
            "problem.data": data,
            "problem.target": target,
            "run.compile": True,
            "federation.mode": "vmap",
        },
        seeds=(0, 1, 2),
        corner="setting",
        printed=printed(_name(data, target)),
        adjust=adjusted,
        name=_folder,
    )


def _small(data: str, target: str) -> Table:
    """Digits for Fashion-MNIST, which needs no download; a tenth of the rows of the other data sets."""
    digits = data == "fashion-mnist"
    named = "Digits instead of the paper's data" if digits else data
    sizes = {"problem.train": 400, "problem.validation": 100, "problem.test": 1000, "problem.selection": 100}
    words = (
        "400 rows, 100 validation and 1,000 test rows" if not digits else "100 rows, 60 validation and 300 test rows"
    )
    own = {
        name: {
            **{k: v for k, v in settings.items() if not k.startswith("run.")},
            "run.record": 1 if name == "bilevel" else 10,
        }
        for name, settings in OWN.items()
    }
    return Table(
        f"{named}, 15 clients of {words}; test accuracy where that on further rows, which train nothing, was best.",
        tuple(Row(str(s), {"problem.setting": s}) for s in ((1, 2) if data == "covtype" else (2, 4))),
        _columns(own),
        {
            "run.problem": "groups",
            "problem.data": "digits" if digits else data,
            "problem.target": target,
            "federation.mode": "vmap",
            "run.checkpoint": 50,
            **({"problem.selection": 60} if digits else sizes),
        },
        corner="setting",
        budget=Budget("exchanges", 200),
        curves=CURVES,
    )


def _study(data: str, target: str) -> Study:
    seeds = SEEDS.get(data, (0,))
    tables = {
        "small": _small(data, target),
        "half": _table(data, target, HALF, _grids(2, (10,)), seeds[:3]),
        "paper": _table(data, target, FULL, _grids(3, (10, 20)), seeds),
        "unequal": _unequal(data, target),
    }
    named = f"{data}{'; digits at scale small' if data == 'fashion-mnist' else ''}"
    return Study(_name(data, target), "weighted-nodes", f"Table 3, {target} target ({named})", tables)


def _validation(target: str, sizes: tuple[int, ...], data: tuple[str, ...], common: Settings, **more: Any) -> Table:
    paper = printed(f"weighted-nodes-table{4 if target == 'minority' else 5}")
    columns = [Column(d, {"problem.data": d}, "best:test_accuracy") for d in data]
    columns += [Column(f"friends' weight, {d}", {"problem.data": d}, "final:friends_weight") for d in data]
    return Table(
        "Setting 2, bilevel with fixed settings; test accuracy where that on further rows was best.",
        tuple(Row(str(size), {"problem.validation": size}) for size in sizes),
        tuple(columns),
        {
            "run.problem": "groups",
            "run.method": "bilevel",
            "problem.setting": 2,
            "problem.target": target,
            "federation.mode": "vmap",
            **OWN["bilevel"],
            **common,
        },
        corner="n_valid",
        printed={key: v for key, v in paper.items() if key[0] in map(str, sizes) and key[1] in data},
        **more,
    )


def _validation_study(target: str) -> Study:
    number = 4 if target == "minority" else 5
    at_size: dict[str, Any] = {"run.compile": False, "problem.selection": SELECTION}
    sizes = (100, 200, 500, 1000)
    scales = {
        "small": _validation(
            target, (30, 60, 120), ("digits",), {"problem.selection": 60}, budget=Budget("exchanges", 200)
        ),
        "half": _validation(target, sizes, ("fashion-mnist",), at_size, budget=Budget("exchanges", HALF)),
        "paper": _validation(target, sizes, PICTURES, at_size, budget=Budget("exchanges", FULL), seeds=(0, 1, 2)),
    }
    what = f"Table {number}: validation sets of different sizes, {target} target"
    return Study(f"weighted-nodes-table{number}", "weighted-nodes", what, scales)


STUDIES = (
    *(_study(data, target) for data in (*PICTURES, "covtype") for target in ("minority", "majority")),
    *(_validation_study(target) for target in ("minority", "majority")),
)
