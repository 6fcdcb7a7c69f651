"""Federated bilevel, side by side (docs/bilevel.md): every solver on the same problems, at equal exchanges.

Nothing is tuned here but the steps of row weights: settings are those that `coterie run --method M --problem P` uses,
the registry's for the problem or what a solver chooses by itself.
"""

from dataclasses import replace

from coterie.reproduce.study import Budget, Column, Curve, Row, Settings, Study, Table, flat

PAGE = "../bilevel"
SOLVERS = (
    "fednest",
    "fednest-sgd",
    "lfednest",
    "lfednest-svrg",
    "lfednest-nonalt",
    "soba",
    "saba",
    "ma-soba",
    "stocbio",
    "f2sa",
    "fedbio",
    "fedbioacc",
    "simfbo",
    "fedmbo",
    "exact-gd",
    "primal-dual",
    "sustain",
    "rfho",
)
"""All methods that take a bilevel problem; a test compares with the registry."""
DENSE = ("exact-gd", "rfho")
"""Those that store a matrix of the size d_y × d_x, or solve with one: too large where x or y is."""
CLEANING_STEPS: dict[str, Settings] = {
    **{name: {"method.outer_step": 3000.0} for name in ("fednest", "fednest-sgd")},
    **{name: flat(method={"step": 0.4, "outer_step": 1000.0}) for name in ("soba", "saba", "ma-soba")},
    **{name: {} for name in ("fedbio", "fedbioacc", "simfbo")},
}
"""Solvers whose steps were tried on shared row weights; an automatic choice of steps would take all exchanges."""
WEIGHT_LEARNERS = ("fednest-weights", "bilevel", "exact-gd", "primal-dual", "sustain", "rfho", "meritfed")
SCALABLE = tuple(name for name in SOLVERS if name not in DENSE)

EXACT = flat(run={"dtype": "float64", "record": 5, "checkpoint": 10_000}, federation={"mode": "vmap"})
ACCURATE = flat(run={"record": 5, "checkpoint": 10_000}, federation={"mode": "vmap"})
SPENT = (
    Column("exchanges", {}, "rounds", ".0f"),
    Column("million numbers", {}, "floats", ".2f", 1e-6),
    Column("seconds", {}, "seconds", ".1f"),
)


def _table(
    about: str,
    solvers: tuple[str, ...],
    columns: tuple[Column, ...],
    common: Settings,
    exchanges: int,
    measure: str,
) -> Table:
    """Solvers × what they reach and spend, three seeds."""
    return Table(
        about,
        tuple(Row(name, {"run.method": name}) for name in solvers),
        (*columns, *SPENT),
        common,
        (0, 1, 2),
        corner="solver",
        budget=Budget("exchanges", exchanges),
        curves=(Curve(measure),),
    )


def _gaps(problem: Settings, exchanges: int, about: str) -> Table:
    """The gap h(x) − h* at the end, and the exchanges until it is small."""
    columns = (
        Column("gap", {}, "final:gap", ".1e"),
        Column("exchanges to 1e-3", {}, "reach:gap:1e-3", ".0f"),
        Column("exchanges to 1e-6", {}, "reach:gap:1e-6", ".0f"),
    )
    return _table(about, SOLVERS, columns, {**EXACT, **problem}, exchanges, "gap")


ACCURACY = Column("test accuracy, %", {}, "final:test_accuracy", ".1f", 100.0)


def _accuracy(problem: Settings, exchanges: int, about: str) -> Table:
    """Test accuracy at the end."""
    return _table(about, SCALABLE, (ACCURACY,), {**ACCURATE, **problem}, exchanges, "test_accuracy")


def _cleaning(data: str, exchanges: int, about: str) -> Table:
    """Test accuracy, and how much weight is on rows with true labels: weights kept by clients, and shared."""
    share = Column("weight on true labels, %", {}, "final:clean_share", ".1f", 100.0)
    common = {**ACCURATE, **flat(run={"problem": "hyper-cleaning"}, problem={"data": data})}
    table = _table(about, (), (ACCURACY, share), common, exchanges, "test_accuracy")
    kept = tuple(Row(f"{name}, weights kept", {"run.method": name}) for name in ("fednest", "soba"))
    shared = tuple(
        Row(name, {"run.method": name, "problem.own": False, **steps}) for name, steps in CLEANING_STEPS.items()
    )
    return replace(table, rows=(*kept, *shared))


def _weights(clients: int, exchanges: int) -> Table:
    """F(w) at the end; its least value is 0."""
    columns = (
        Column("F(w)", {}, "final:objective", ".1e"),
        Column("exchanges to 1e-3", {}, "reach:objective:1e-3", ".0f"),
    )
    about = f"{clients} clients, half of them friends of the target; the least F(w) is 0."
    common = {**EXACT, **flat(run={"problem": "quadratic"}, problem={"clients": clients, "friends": clients // 2})}
    return _table(about, WEIGHT_LEARNERS, columns, common, exchanges, "objective")


CLEANING = (
    "half of the train labels drawn anew. The first rows keep the weights at the clients; the others share them, with "
    "outer steps as many times as large as there are clients"
)
STUDIES = (
    Study(
        "bilevel-quadratic",
        PAGE,
        "every bilevel solver on nested-quadratic, whose optimum is known",
        {
            "small": _gaps(
                {"run.problem": "nested-quadratic"}, 400, "10 clients, 6 + 8 dimensions, condition 5; float64."
            ),
            "paper": _gaps(
                flat(run={"problem": "nested-quadratic"}, problem={"clients": 100, "condition": 20.0}),
                4000,
                "100 clients, 6 + 8 dimensions, condition 20; float64.",
            ),
        },
    ),
    Study(
        "bilevel-simulated",
        PAGE,
        "every bilevel solver on benchmark_bilevel's simulated quadratic",
        {
            "small": _gaps({"run.problem": "simulated"}, 400, "16 clients, 100 + 100 dimensions; float64."),
            "paper": _gaps({"run.problem": "simulated"}, 4000, "16 clients, 100 + 100 dimensions; float64."),
        },
    ),
    Study(
        "bilevel-cleaning",
        PAGE,
        "weights of corrupted rows, kept by the clients or shared",
        {
            "small": _cleaning("digits", 60, f"Digits, 10 clients, {CLEANING}."),
            "paper": _cleaning("mnist", 1000, f"MNIST, 10 clients, {CLEANING}."),
        },
    ),
    Study(
        "bilevel-representation",
        PAGE,
        "the backbone outside, the head inside: digits, or MNIST at scale paper",
        {
            "small": _accuracy(
                flat(run={"problem": "hyper-representation"}, problem={"hidden": 32}),
                60,
                "Digits, 20 clients, 32 hidden units.",
            ),
            "mnist": _accuracy(
                flat(
                    run={"problem": "hyper-representation"},
                    problem={"data": "mnist", "clients": 100},
                    federation={"count": 10},
                ),
                200,
                "MNIST, 10 of 100 clients in every round, 200 hidden units.",
            ),
            "paper": _accuracy(
                flat(run={"problem": "hyper-representation"}, problem={"data": "mnist", "clients": 100}),
                1000,
                "MNIST, 100 clients, 200 hidden units.",
            ),
        },
    ),
    Study(
        "bilevel-weights",
        PAGE,
        "client weights as the outer variable: learners on a least-squares problem with known F",
        {"small": _weights(8, 100), "paper": _weights(40, 2000)},
    ),
)
