"""FedSep: Figure 2 (accuracy at equal bytes) and Table 1 (sub-models)."""

from collections.abc import Callable
from typing import Any

from coterie.reproduce.study import Column, Row, Settings, Study, Table, flat, printed, slug

SIZE = "sketch.size"
DENSE = {"method.sketch": "gaussian", "method.decode_steps": 6, "method.encode_steps": 6}  # p ≪ d is well conditioned
WITH_SIZE: dict[str, Callable[[int], dict[str, Any]]] = {
    "fedsep": lambda p: {"method.size": p},
    "fedsep, dense sketch": lambda p: {"method.size": p, **DENSE},
    "fedsep-redraw": lambda p: {"method.size": p},
    "top-k": lambda p: {"method.k": p // 2},
    "top-k, dense down": lambda p: {"method.k": p // 2, "method.down": "dense"},
    "count-sketch": lambda p: {"method.columns": p, "method.k": p // 2, "method.server_step": 0.3},
    "uncompressed": lambda p: {},
}
COLUMN = "sketch.column"


def _sketch_adjusted(settings: dict[str, Any]) -> dict[str, Any]:
    settings = dict(settings)
    size, column = settings.pop(SIZE), settings.pop(COLUMN)
    return {**settings, "run.method": column.partition(",")[0], **WITH_SIZE[column](size)}


def _sketch_folder(s: Settings) -> str:
    size = s.get("method.size", s.get("method.columns", 2 * s.get("method.k", 0)))
    name = s["run.method"] + ("-dense-down" if s.get("method.down") == "dense" else "")
    name += "-dense-sketch" if s.get("method.sketch") == "gaussian" else ""
    return f"{s['problem.data']}-{s['problem.partition']}-{size}-{name}-{s['run.seed']}"


def _figure2(partition: str) -> dict[str, Table]:
    few = _sketches("digits", partition, (200, 2000), 20)
    return {"small": few, "paper": _sketches("mnist", partition, (100, 500, 1000, 2000, 5000), 60)}


def _sketches(data: str, partition: str, sizes: tuple[int, ...], rounds: int) -> Table:
    columns = [Column(name, {COLUMN: name}, "final:test_accuracy") for name in WITH_SIZE]
    moved = Column("MB moved (equal bytes)", {COLUMN: "fedsep"}, "megabytes", ".2f")
    common = {"run.problem": "sketch", "run.rounds": rounds, "run.record": max(1, rounds // 5), "run.checkpoint": 20}
    return Table(
        f"{data}, {partition}, 10 clients, {rounds} rounds; all move the same, but for dense down and uncompressed.",
        tuple(Row(str(size), {SIZE: size}) for size in sizes),
        (*columns, moved),
        {**common, "problem.data": data, "problem.partition": partition, "federation.mode": "sequential"},
        corner="p",
        adjust=_sketch_adjusted,
        name=_sketch_folder,
    )


PRINTED = printed("fedsep-table1")  # CIFAR-10, ResNet-18
ROWS = tuple(dict.fromkeys(row for row, _ in PRINTED))


def _submodel_row(name: str, more: dict[str, Any]) -> Row:
    method, _, size = name.partition(", ")
    return Row(name, {"run.method": method, **({"method.size": size} if size else {}), **more})


def _submodel_folder(s: Settings) -> str:
    name = s["run.method"] + (f"-{s['method.size']}" if "method.size" in s else "")
    return f"{s['problem.data']}-{s['problem.classes']}-{s['run.seed']}-{slug(name)}"


def _submodels(
    common: dict[str, Any],
    rounds: int,
    seeds: tuple[int, ...],
    rows: tuple[str, ...],
    about: str,
    special: dict[str, dict[str, Any]] | None = None,
) -> Table:
    """special is what single rows have at this scale."""
    columns = [Column(f"{k} classes, %", {"problem.classes": k}, "tail:3:test_accuracy", ".1f", 100.0) for k in (2, 5)]
    return Table(
        about,
        tuple(_submodel_row(name, (special or {}).get(name, {})) for name in rows),
        (*columns, Column("MB up", {"problem.classes": 2}, "megabytes_up", ".0f")),
        flat(
            run={"problem": "submodels", "rounds": rounds, "record": max(1, rounds // 30), "checkpoint": 25},
            method={"local_steps": 10, "batch": 20},
        )
        | common,
        seeds,
        corner="method",
        printed={key: value for key, value in PRINTED.items() if key[0] in rows},
        name=_submodel_folder,
    )


LARGE = flat(
    problem={"clients": 100, "test": 2000}, federation={"count": 10, "mode": "sequential"}, method={"step": 0.05}
)
STUDIES = (
    Study("fedsep-figure2", "fedsep", "Figure 2: accuracy at equal bytes in both directions, i.i.d.", _figure2("iid")),
    Study("fedsep-figure2-classes", "fedsep", "Figure 2: the same with two classes per client", _figure2("classes")),
    Study(
        "fedsep-table1",
        "fedsep-submodels",
        "Table 1: sub-models by what clients can afford, two and five classes per client",
        {
            "small": _submodels(
                {"problem.data": "digits", "problem.clients": 20, "method.step": 0.1},
                20,
                (0,),
                ("fedsep-submodel", "fedrolex", "heterofl", "federated-dropout"),
                "Digits, 20 clients, 20 rounds; the paper: CIFAR-10, ResNet-18, 100 clients.",
            ),
            "fashion-mnist": _submodels(
                {"problem.data": "fashion-mnist", "problem.width": 16, **LARGE},
                200,
                (0, 1, 2),
                ROWS,
                "Fashion-MNIST, small-cnn-norm of width 16, 100 clients, 10 a round, 200 rounds; the paper: CIFAR-10, "
                "ResNet-18.",
                {name: {"method.distil_steps": 10} for name in ("feddf", "fed-et")},  # half the default
            ),
            "resnet18": _submodels(
                {"problem.data": "cifar10", "problem.model": "resnet18", "problem.width": 16, **LARGE}
                | {"method.local_steps": 5},
                30,
                (0,),
                ("fedsep-submodel", "fedrolex", "heterofl", "federated-dropout", "homogeneous, smallest"),
                "CIFAR-10, ResNet-18 of width 16, 100 clients, 10 a round, 30 rounds of 5 steps: a short run.",
            ),
            "paper": _submodels(
                {"problem.data": "cifar10", "problem.model": "resnet18", "problem.width": 64, **LARGE},
                800,
                (0, 1, 2),
                ROWS,
                "CIFAR-10, ResNet-18, 100 clients, 10 a round. This takes days; fashion-mnist is a scale between.",
            ),
        },
    ),
)
