"""FedSep: Figures 2 to 4 (accuracy at equal bytes, local steps), Table 1 and Figure 5 (sub-models)."""

from collections.abc import Callable, Mapping
from typing import Any

from coterie.reproduce.study import Budget, Column, Curve, Row, Settings, Study, Table, Tuning, flat, printed, slug

SIZE, WHICH, DIMENSION = "sketch.size", "sketch.method", "sketch.dimension"
ACCURACY = "final:test_accuracy"
SKETCHES: dict[str, Callable[[int], dict[str, Any]]] = {
    "fedsep": lambda p: {"method.size": p},
    "fedsep-redraw": lambda p: {"method.size": p},
    "top-k": lambda p: {"method.k": p // 2},
    "top-k, dense down": lambda p: {"method.k": p // 2, "method.down": "dense"},
    "count-sketch": lambda p: {"method.columns": p, "method.k": p // 2},
    "uncompressed": lambda p: {},
}
PAPER_SIZES = (10, 100, 500, 1000, 2000, 5000, 10000, 20000)
TUNED = (0.3, 1.0, 3.0)  # server steps; FedSep's are multiples of its default, d/(p + 200)
CHOSEN_ON_MNIST = {  # by p: server steps of fedsep, fedsep-redraw, top-k and count-sketch, out of TUNED
    100: (1.0, 1.0, 3.0, 0.3),
    1000: (1.0, 1.0, 3.0, 0.3),
    20000: (1.0, 1.0, 1.0, 1.0),
}


def _sketch_adjusted(settings: dict[str, Any]) -> dict[str, Any]:
    """A run of one method with p numbers each way; the server step of FedSep is a multiple of its default."""
    settings = dict(settings)
    size, name, dimension = settings.pop(SIZE), settings.pop(WHICH), settings.pop(DIMENSION, None)
    method = name.partition(",")[0]
    step = settings.get("method.server_step")
    if None not in (step, dimension) and method.startswith("fedsep"):
        settings["method.server_step"] = round(step * max(1.0, dimension / (size + 200)), 4)
    return {**settings, "run.method": method, **SKETCHES[name](size)}


def _sketch_folder(s: Settings) -> str:
    size = s.get("method.size", s.get("method.columns", 2 * s.get("method.k", 0)))
    name = s["run.method"] + ("-dense-down" if s.get("method.down") == "dense" else "")
    return f"{s['problem.data']}-{s['problem.partition']}-{size}-{name}-{s['run.seed']}"


COMPRESSED = tuple(name for name in SKETCHES if name != "uncompressed")
IID = {"problem.partition": "iid"}


def _compared(
    data: str, model: str, dimension: int, rows: tuple[Row, ...], rounds: int, test: int, about: str, **more: Any
) -> Table:
    """Figure 2: accuracy after the same rounds, and what they moved."""
    columns = (
        Column("i.i.d.", IID, ACCURACY),
        Column("two classes", {"problem.partition": "classes"}, ACCURACY),
        Column("MB moved", IID, "megabytes", ".3g"),
    )
    common = flat(
        run={"problem": "sketch", "record": rounds, "checkpoint": 20},  # only the end is read
        problem={"data": data, "model": model, "test": test, "selection": test // 3},
        federation={"mode": more.pop("mode", "sequential")},
    )
    return Table(
        f"{data}, model {model} with {dimension:,} parameters, 10 clients, 5 local steps of 0.1; p numbers each way "
        f"per client and round, but for dense down and uncompressed. {about}",
        rows,
        columns,
        {**common, DIMENSION: dimension},
        (0, 1, 2),
        corner="numbers sent, method",
        adjust=_sketch_adjusted,
        name=_sketch_folder,
        budget=Budget("rounds", rounds),
        **more,
    )


def _sketch_rows(sizes: tuple[int, ...], names: tuple[str, ...]) -> tuple[Row, ...]:
    """One row per p and method; what p does not change, once."""
    pairs = [(size, name) for size in sizes for name in names]
    rows = [Row(f"p = {size}, {name}", {SIZE: size, WHICH: name}) for size, name in pairs]
    return (*rows, Row("uncompressed", {SIZE: sizes[-1], WHICH: "uncompressed"}))


def _sketches(
    data: str, model: str, dimension: int, sizes: tuple[int, ...], rounds: int, test: int, **more: Any
) -> Table:
    """The server step is chosen for every p and method."""
    rows = _sketch_rows(sizes, COMPRESSED)
    about = "Server steps are chosen i.i.d. with seed 1000."
    tuning = Tuning(
        {row.name: tuple({"method.server_step": step} for step in TUNED) for row in rows},
        {**IID, "run.seed": 1000},
        "final:selection_accuracy",
    )
    return _compared(data, model, dimension, rows, rounds, test, about, tuning=tuning, **more)


def _by_steps_of_mnist(data: str, model: str, dimension: int, rounds: int, test: int) -> Table:
    """The server steps that the scale paper chose on MNIST, so that no grid is run."""
    names = ("fedsep", "fedsep-redraw", "top-k", "count-sketch")
    steps = {
        f"p = {p}, {name}": step for p, of in CHOSEN_ON_MNIST.items() for name, step in zip(names, of, strict=True)
    }
    rows = _sketch_rows(tuple(CHOSEN_ON_MNIST), names)
    chosen = tuple(Row(row.name, {**row.settings, "method.server_step": steps.get(row.name, 1.0)}) for row in rows)
    return _compared(data, model, dimension, chosen, rounds, test, "Server steps are those chosen on MNIST.")


def _local_steps(data: str, model: str, size: int, rounds: int, mode: str) -> Table:
    """Figure 4: I local steps at a fixed p."""
    return Table(
        f"{data}, model {model}, 10 clients, p = {size}, local steps of 0.1.",
        tuple(
            Row(f"I = {steps}", {"method.local_steps": steps, "run.method": "fedsep"}) for steps in (2, 5, 10, 20, 50)
        ),
        tuple(
            Column(name, {"problem.partition": partition}, ACCURACY)
            for name, partition in (("i.i.d.", "iid"), ("two classes", "classes"))
        ),
        flat(
            run={"problem": "sketch", "record": max(1, rounds // 10), "checkpoint": 20},
            problem={"data": data, "model": model},
            method={"size": size},
            federation={"mode": mode},
        ),
        (0, 1, 2),
        corner="local steps",
        budget=Budget("rounds", rounds),
        curves=(Curve("test_accuracy", "round"),),
    )


PRINTED = printed("fedsep-table1")  # CIFAR-10, ResNet-18
CHEAP, PRINTED_DECODE = "fedsep-submodel, one gradient", "fedsep-submodel, as printed"  # the first: not in the paper
ROWS = ("fedsep-submodel", CHEAP, *dict.fromkeys(row for row, _ in PRINTED if row != "fedsep-submodel"))
OPTIONS: dict[str, dict[str, Any]] = {
    "smallest": {"method.size": "smallest"},
    "largest": {"method.size": "largest"},
    "one gradient": {"method.choose": "saliency"},
    "as printed": {
        "method.choose": "relaxed",
        "method.budget": "flops",
        "method.decode_step": 0.01,
        "method.decode_steps": 10,
    },
}


def _submodel_row(name: str, more: Mapping[str, Any]) -> Row:
    method, _, option = name.partition(", ")
    return Row(name, {"run.method": method, **OPTIONS.get(option, {}), **more})


def _submodel_folder(s: Settings) -> str:
    name = s["run.method"] + (f"-{s['method.size']}" if "method.size" in s else "")
    name += f"-{s['method.choose']}" if "method.choose" in s else ""
    return f"{s['problem.data']}-{s['problem.classes']}-{s['run.seed']}-{slug(name)}"


def _submodels(
    common: dict[str, Any],
    rounds: int,
    rows: tuple[str, ...],
    about: str,
    steps: tuple[float, ...],
    special: Mapping[str, Mapping[str, Any]] | None = None,
) -> Table:
    """special is what single rows have at this scale; one step size per method is chosen with five classes."""
    own = {"feddst": {"method.until": max(1, rounds // 2)}, **(special or {})}
    columns = [
        *(Column(f"{k} classes, %", {"problem.classes": k}, "tail:3:test_accuracy", ".1f", 100.0) for k in (2, 5)),
        *(
            Column(f"{k} classes, halfway, %", {"problem.classes": k}, f"at:{rounds // 2}:test_accuracy", ".1f", 100.0)
            for k in (2, 5)
        ),
        Column("MB up", {"problem.classes": 2}, "megabytes_up", ".3g"),
    ]
    return Table(
        about,
        tuple(_submodel_row(name, own.get(name, {})) for name in rows),
        tuple(columns),
        flat(
            run={"problem": "submodels", "record": max(1, rounds // 20), "checkpoint": 25},
            method={"local_steps": 10, "batch": 20},
        )
        | common,
        (0, 1, 2),
        corner="method",
        printed={key: value for key, value in PRINTED.items() if key[0] in rows},
        name=_submodel_folder,
        budget=Budget("rounds", rounds),
        tuning=Tuning(
            {name: tuple({"method.step": step} for step in steps) for name in rows},
            {"problem.classes": 5, "run.seed": 1000},
            "tail:3:selection_accuracy",
        ),
    )


def _short(rows: tuple[str, ...]) -> Table:
    """Five classes, few rounds and one step size for all: minutes, where the tables above take hours."""
    return Table(
        "Digits, small-cnn-norm of width 16, 20 clients, all active, 10 local steps of 0.1 for all; not tuned. The "
        "paper: CIFAR-10, ResNet-18, 100 clients.",
        tuple(_submodel_row(name, {}) for name in rows),
        (Column("5 classes, %", {"problem.classes": 5}, "final:test_accuracy", ".1f", 100.0),),
        flat(
            run={"problem": "submodels", "record": 20},
            problem={"data": "digits"},
            method={"step": 0.1},
            federation={"mode": "sequential"},
        ),
        (0, 1, 2),
        corner="method",
        printed={key: value for key, value in PRINTED.items() if key[0] in rows and key[1].startswith("5")},
        name=_submodel_folder,
        budget=Budget("rounds", 20),
    )


def _classes(common: dict[str, Any], rounds: int, about: str) -> Table:
    """Figure 5: FedSep with K classes per client."""
    return Table(
        about,
        tuple(Row(f"K = {k}", {"problem.classes": k, "run.method": "fedsep-submodel"}) for k in (2, 4, 5, 8)),
        (
            Column("accuracy, %", {}, "tail:3:test_accuracy", ".1f", 100.0),
            Column("loss", {}, "tail:3:test_loss", ".2f"),
        ),
        flat(run={"problem": "submodels", "record": max(1, rounds // 20), "checkpoint": 25}) | common,
        (0, 1, 2),
        corner="classes per client",
        budget=Budget("rounds", rounds),
        curves=(Curve("test_accuracy", "round"), Curve("test_loss", "round")),
    )


PERCEPTRON = flat(
    problem={"data": "digits", "model": "mlp", "clients": 20, "scalers": False, "test": 500, "selection": 200},
    federation={"mode": "vmap"},
)
DIGITS = flat(
    problem={"data": "digits", "width": 64, "clients": 20, "test": 500, "selection": 200},
    federation={"mode": "sequential"},
)
LARGE = flat(problem={"clients": 100, "test": 3000, "selection": 1000}, federation={"count": 10, "mode": "sequential"})
SHORT_DISTILLATION = {name: {"method.distil_steps": 10} for name in ("feddf", "fed-et")}
STUDIES = (
    Study(
        "fedsep-figure2",
        "fedsep",
        "Figures 2 and 3: accuracy at equal bytes in both directions, i.i.d. and with two classes per client",
        {
            "small": _sketches("digits", "mlp", 4810, (10, 50, 200, 1000), 40, 600, mode="vmap"),
            "paper": _sketches("mnist", "conv4", 24234, PAPER_SIZES, 60, 10000),
            "cifar10": _sketches("cifar10", "conv4", 97866, PAPER_SIZES, 200, 10000),
            "cifar10-short": _by_steps_of_mnist("cifar10", "conv4", 97866, 60, 10000),
        },
    ),
    Study(
        "fedsep-figure4",
        "fedsep",
        "Figure 4: accuracy by local steps",
        {
            "small": _local_steps("digits", "mlp", 500, 40, "vmap"),
            "paper": _local_steps("mnist", "conv4", 2000, 60, "sequential"),
        },
    ),
    Study(
        "fedsep-table1",
        "fedsep-submodels",
        "Table 1: sub-models by what clients can afford, two and five classes per client",
        {
            "small": _short(("fedsep-submodel", CHEAP, PRINTED_DECODE, "fedrolex", "heterofl", "federated-dropout")),
            "perceptron": _submodels(
                PERCEPTRON,
                60,
                ROWS,
                "Digits, perceptron of 64 hidden units, 20 clients, all active; the paper: CIFAR-10, ResNet-18, 100 "
                "clients.",
                (0.05, 0.2, 0.5),
            ),
            "digits": _submodels(
                DIGITS,
                40,
                ROWS,
                "Digits, small-cnn-norm of width 64, 20 clients, all active; the paper: CIFAR-10, ResNet-18, 100 "
                "clients.",
                (0.05, 0.1, 0.2),
            ),
            "fashion-mnist": _submodels(
                {"problem.data": "fashion-mnist", "problem.width": 64, **LARGE},
                400,
                ROWS,
                "Fashion-MNIST, small-cnn-norm of width 64, 100 clients, 10 per round; the paper: CIFAR-10, ResNet-18. "
                "This takes a day.",
                (0.02, 0.05, 0.1),
                SHORT_DISTILLATION,
            ),
            "paper": _submodels(
                {"problem.data": "cifar10", "problem.model": "resnet18", "problem.width": 64, **LARGE},
                800,
                ROWS,
                "CIFAR-10, ResNet-18, 100 clients, 10 per round. This takes weeks on a processor.",
                (0.02, 0.05, 0.1),
            ),
        },
    ),
    Study(
        "fedsep-figure5",
        "fedsep-submodels",
        "Figure 5: FedSep by classes per client",
        {
            "small": _classes(
                {**PERCEPTRON, "method.step": 0.2}, 60, "Digits, perceptron of 64 hidden units, 20 clients, all active."
            ),
            "paper": _classes(
                {"problem.data": "cifar10", "problem.model": "resnet18", "problem.width": 64, **LARGE},
                800,
                "CIFAR-10, ResNet-18, 100 clients, 10 per round. CIFAR-100 is not among the data sets.",
            ),
        },
    ),
)
