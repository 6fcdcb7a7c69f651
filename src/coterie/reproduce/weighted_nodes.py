"""Adaptively weighted nodes: Table 3, test accuracy at the best validation accuracy."""

from typing import Any

from coterie.reproduce.study import Column, Row, Settings, Study, Table

ROUNDS = {"bilevel": 16, "local-train": 60, "local-svrg": 22, "ditto": 880, "pfedme": 150}
METHODS = tuple(ROUNDS)
OWN: dict[str, dict[str, Any]] = {
    "local-train": {"method.step": 0.05, "method.local_steps": 50, "method.batch": 50, "method.refresh": 0.02},
    "ditto": {"run.record": 20, "run.checkpoint": 100},
    "pfedme": {"method.penalty": 5.0, "run.record": 5, "run.checkpoint": 50},
}
PRINTED = {  # data, target: by setting, in the order of METHODS
    ("fashion-mnist", "minority"): (
        (0.776, 0.693, 0.751, 0.730, 0.742),
        (0.775, 0.676, 0.569, 0.720, 0.721),
        (0.773, 0.676, 0.594, 0.686, 0.712),
        (0.766, 0.681, 0.565, 0.697, 0.704),
    ),
    ("fashion-mnist", "majority"): (
        (0.836, 0.743, 0.833, 0.809, 0.830),
        (0.833, 0.734, 0.782, 0.789, 0.809),
        (0.823, 0.726, 0.770, 0.763, 0.787),
        (0.816, 0.701, 0.764, 0.765, 0.791),
    ),
    ("mnist", "minority"): (
        (0.882, 0.785, 0.830, 0.836, 0.857),
        (0.858, 0.787, 0.581, 0.784, 0.751),
        (0.874, 0.780, 0.623, 0.745, 0.720),
        (0.859, 0.765, 0.548, 0.718, 0.693),
    ),
    ("mnist", "majority"): (
        (0.844, 0.755, 0.848, 0.806, 0.832),
        (0.838, 0.765, 0.775, 0.784, 0.791),
        (0.834, 0.770, 0.763, 0.774, 0.765),
        (0.846, 0.748, 0.758, 0.761, 0.769),
    ),
    ("cifar10", "minority"): (
        (0.518, 0.304, 0.297, 0.436, 0.486),
        (0.515, 0.316, 0.287, 0.395, 0.442),
        (0.524, 0.306, 0.308, 0.418, 0.454),
        (0.517, 0.309, 0.361, 0.397, 0.455),
    ),
    ("cifar10", "majority"): (
        (0.593, 0.357, 0.571, 0.502, 0.559),
        (0.598, 0.359, 0.543, 0.495, 0.557),
        (0.586, 0.363, 0.571, 0.499, 0.556),
        (0.594, 0.371, 0.553, 0.499, 0.549),
    ),
}
SIZES = {"mnist": "4,000 rows, 500 validation, 5,000", "covtype": "40,000 rows, 5,000 validation, 50,000"}
LONGER = {"mnist": 28}  # bilevel, minority target
MAJORITY_ROUNDS = 20  # ten of fifteen clients are friends from the start
SLOW = (1, 3)  # settings without permuted labels: strangers are less unlike, and weights move slowly
SLOW_RUN = {"run.rounds": 40, "method.outer_step": 0.025}
REFRESHING = ("bilevel", "local-train", "local-svrg")


def _adjusted(settings: dict[str, Any]) -> dict[str, Any]:
    data, method = settings["problem.data"], settings["run.method"]
    more = _of_bilevel(settings) if method == "bilevel" else {}
    if data == "covtype":
        more |= {"method.batch": 400} | ({"method.refresh": 0.01} if method in REFRESHING else {})
    return {**settings, **more}


def _of_bilevel(settings: dict[str, Any]) -> dict[str, Any]:
    if settings["problem.target"] == "majority":
        return {"run.rounds": MAJORITY_ROUNDS}
    if settings["problem.setting"] in SLOW:
        return dict(SLOW_RUN)
    return {"run.rounds": LONGER.get(settings["problem.data"], settings["run.rounds"])}


def _folder(s: Settings) -> str:
    names = (s["problem.data"], s["problem.setting"], s["problem.target"], s["run.seed"], s["run.method"])
    return "-".join(map(str, names))


def _at_paper_size(data: str, target: str) -> Table:
    columns = [
        Column(m, {"run.method": m, "run.rounds": ROUNDS[m], **OWN.get(m, {})}, "best:test_accuracy") for m in METHODS
    ]
    weight = Column("friends' weight", columns[0].settings, "final:friends_weight")
    common = {"run.problem": "groups", "problem.data": data, "problem.target": target}
    values = PRINTED.get((data, target), ())
    return Table(
        f"15 clients of {SIZES.get(data, SIZES['mnist'])} test rows; fixed settings, test accuracy at the best "
        "validation accuracy.",
        tuple(Row(str(s), {"problem.setting": s}) for s in (1, 2, 3, 4)),
        (*columns, weight),
        {**common, "run.compile": True, "federation.mode": "vmap"},
        seeds=(0, 1, 2),
        corner="setting",
        printed={(str(s), m): v for s, row in enumerate(values, 1) for m, v in zip(METHODS, row, strict=True)},
        adjust=_adjusted,
        name=_folder,
    )


SMALL = Table(
    "Digits instead of the paper's data: the default sizes of problem groups, 40 rounds of bilevel (others: 200).",
    tuple(Row(str(s), {"problem.setting": s}) for s in (2, 4)),
    (
        Column("bilevel", {"run.method": "bilevel", "run.rounds": 40}, "best:test_accuracy"),
        Column("local-train", {"run.method": "local-train", "run.rounds": 200}, "best:test_accuracy"),
        Column("fedavg", {"run.method": "fedavg", "run.rounds": 200}, "best:test_accuracy"),
        Column("ditto", {"run.method": "ditto", "run.rounds": 200}, "best:test_accuracy"),
        Column("friends' weight", {"run.method": "bilevel", "run.rounds": 40}, "final:friends_weight"),
    ),
    {"run.problem": "groups", "federation.mode": "vmap", "run.record": 2, "run.checkpoint": 20},
    corner="setting",
)


def _study(data: str, target: str) -> Study:
    more = ("" if data == "fashion-mnist" else f"-{data}") + ("" if target == "minority" else f"-{target}")
    what = f"Table 3, {data}, {target} target"
    scales = {"small": SMALL, "paper": _at_paper_size(data, target)}
    return Study(f"weighted-nodes-table3{more}", "weighted-nodes", what, scales)


STUDIES = tuple(
    _study(data, target)
    for data in ("fashion-mnist", "mnist", "cifar10", "covtype")
    for target in ("minority", "majority")
)
