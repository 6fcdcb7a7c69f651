"""Adaptively weighted nodes: Table 3, test accuracy at the best validation accuracy."""

from typing import Any

from coterie.reproduce.study import Column, Row, Settings, Study, Table, printed

ROUNDS = {"bilevel": 16, "local-train": 60, "local-svrg": 22, "ditto": 880, "pfedme": 150}
SMALL_ROUNDS = {"bilevel": 40, "local-train": 200, "fedavg": 200, "ditto": 200}
OWN: dict[str, dict[str, Any]] = {
    "local-train": {"method.step": 0.05, "method.local_steps": 50, "method.batch": 50, "method.refresh": 0.02},
    "ditto": {"run.record": 20, "run.checkpoint": 100},
    "pfedme": {"method.penalty": 5.0, "run.record": 5, "run.checkpoint": 50},
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


def _name(data: str, target: str) -> str:
    more = ("" if data == "fashion-mnist" else f"-{data}") + ("" if target == "minority" else f"-{target}")
    return f"weighted-nodes-table3{more}"


def _at_paper_size(data: str, target: str) -> Table:
    columns = [
        Column(m, {"run.method": m, "run.rounds": ROUNDS[m], **OWN.get(m, {})}, "best:test_accuracy") for m in ROUNDS
    ]
    weight = Column("friends' weight", columns[0].settings, "final:friends_weight")
    common = {"run.problem": "groups", "problem.data": data, "problem.target": target}
    return Table(
        f"15 clients of {SIZES.get(data, SIZES['mnist'])} test rows; fixed settings, test accuracy at the best "
        "validation accuracy.",
        tuple(Row(str(s), {"problem.setting": s}) for s in (1, 2, 3, 4)),
        (*columns, weight),
        {**common, "run.compile": True, "federation.mode": "vmap"},
        seeds=(0, 1, 2),
        corner="setting",
        printed=printed(_name(data, target)),
        adjust=_adjusted,
        name=_folder,
    )


SMALL = Table(
    "Digits instead of the paper's data: the default sizes of problem groups, 40 rounds of bilevel (others: 200).",
    tuple(Row(str(s), {"problem.setting": s}) for s in (2, 4)),
    (
        *(
            Column(m, {"run.method": m, "run.rounds": rounds}, "best:test_accuracy")
            for m, rounds in SMALL_ROUNDS.items()
        ),
        Column("friends' weight", {"run.method": "bilevel", "run.rounds": 40}, "final:friends_weight"),
    ),
    {"run.problem": "groups", "federation.mode": "vmap", "run.record": 2, "run.checkpoint": 20},
    corner="setting",
)


def _study(data: str, target: str) -> Study:
    what = f"Table 3, {data}, {target} target"
    scales = {"small": SMALL, "paper": _at_paper_size(data, target)}
    return Study(_name(data, target), "weighted-nodes", what, scales)


STUDIES = tuple(
    _study(data, target)
    for data in ("fashion-mnist", "mnist", "cifar10", "covtype")
    for target in ("minority", "majority")
)
