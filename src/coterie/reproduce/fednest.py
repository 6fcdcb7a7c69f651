"""FedNest: the minimax problem (figure 4), hyper-representation (figures 2, 5, 6), loss tuning (figure 3)."""

from itertools import product
from typing import Any

from coterie.reproduce.least import above_the_least
from coterie.reproduce.study import Budget, Column, Curve, Row, Settings, Study, Table, Tuning, flat

MINIMAX = flat(run={"problem": "minimax-quadratic", "dtype": "float64", "checkpoint": 60})
EPOCHS = (0, 10, 20, 30, 40, 50, 60)


def _minimax(clients: int) -> Table:
    """Curvatures that differ from client to client, which the paper's problem has not."""
    return Table(
        f"{clients} clients, b_i ~ N(0, 5²), τ = 5, α = .1, β = .5, curvatures spread by ± 50 %: distance to "
        "the saddle point.",
        (
            Row("FedNest", {"run.method": "fednest"}),
            Row("LFedNest", {"run.method": "lfednest"}),
            Row("FedAvg-S", {"run.method": "fedavg-s"}),
            Row("FedNest, a tenth of the clients", {"run.method": "fednest", "federation.count": clients // 10}),
        ),
        tuple(Column(str(t), {}, f"at:{t}:distance_to_optimum", ".1e") for t in EPOCHS),
        {**MINIMAX, "problem.spread": 0.5, "problem.scale": 5.0, "problem.clients": clients},
        corner="epochs",
        budget=Budget("rounds", 60),
    )


def _figure4_folder(s: Settings) -> str:
    uneven = "-uneven" if "method.local_steps" in s else ""
    few = f"-{s['federation.count']}" if "federation.count" in s else ""
    return f"{s['run.method']}{uneven}{few}-{s['problem.scale']:g}-{s['run.seed']}"


def _figure4(clients: int, seeds: tuple[int, ...]) -> Table:
    """The paper's problem itself: equal curvatures."""
    uneven = [1 + i % 10 for i in range(clients)]
    kinds: dict[str, dict[str, Any]] = {
        "all clients": {},
        "τ_i from 1 to 10": {"method.local_steps": uneven},
        "a tenth of the clients": {"federation.count": clients // 10},
    }
    names = {"FedNest": "fednest", "LFedNest": "lfednest", "FedAvg-S": "fedavg-s"}
    rows = [
        Row(f"{name}, {words}", {"run.method": method, **more})
        for (words, more), (name, method) in product(kinds.items(), names.items())
    ]
    when = ((20, "20 epochs"), (60, "60 epochs"))
    return Table(
        f"{clients} clients, spread 0 (the paper's problem), τ = 5, α = .1, β = .5: distance to the saddle point.",
        tuple(rows),
        tuple(
            Column(f"s = {s:g}, {words}", {"problem.scale": s}, f"at:{t}:distance_to_optimum", ".1e")
            for s, (t, words) in product((1.0, 10.0), when)
        ),
        {**MINIMAX, "problem.spread": 0.0, "problem.clients": clients},
        seeds,
        corner="method",
        name=_figure4_folder,
        budget=Budget("rounds", 60),
        curves=(Curve("distance_to_optimum", "round"),),
    )


FAMILY = ("fednest", "fednest-sgd", "lfednest", "lfednest-svrg", "lfednest-nonalt")
MNIST = flat(
    problem={"data": "mnist", "clients": 100, "selection": 2000},
    federation={"count": 10, "mode": "vmap"},
    method={"batch": 64},
    run={"record": 5, "checkpoint": 50},
)
DIGITS = flat(
    problem={"test": 600, "selection": 200}, federation={"mode": "vmap"}, run={"record": 2, "checkpoint": 1000}
)
REDRAWN = {"method.redraw": True}
HYPER = {"run.problem": "hyper-representation"}
PARTITIONS = (("iid", "i.i.d."), ("shards", "shards"))


def _anew(settings: dict[str, Any]) -> dict[str, Any]:
    """All clients of a run in one phase need not be drawn anew, and cannot be."""
    return {k: v for k, v in settings.items() if k != "method.redraw" or settings["run.method"] != "lfednest-nonalt"}


def _both(read: str) -> tuple[Column, ...]:
    return tuple(Column(f"{words}, %", {"problem.partition": p}, read, ".1f", 100.0) for p, words in PARTITIONS)


def _hyper(data: Settings, exchanges: int, seeds: tuple[int, ...], about: str) -> Table:
    """Figures 2a, 2b and 5: the same rounds of communication and the same grid for everybody."""
    grid = tuple({"method.outer_step": a, "method.step": b} for a, b in product((0.03, 0.1, 0.3), (0.3, 1.0)))
    return Table(
        about,
        tuple(Row(name, {"run.method": name}) for name in FAMILY),
        (*_both("best:test_accuracy"), Column("epochs", {"problem.partition": "shards"}, "final:round", ".0f")),
        {**HYPER, **data, **REDRAWN},
        seeds,
        corner="method",
        adjust=_anew,
        budget=Budget("exchanges", exchanges),
        tuning=Tuning(dict.fromkeys(FAMILY, grid), {"problem.partition": "shards", "run.seed": 1000}),
        curves=(Curve("test_accuracy", "exchanges"),),
    )


def _outer_steps(data: Settings, exchanges: int, seeds: tuple[int, ...], about: str) -> Table:
    """Figure 2c: local steps of FedOut."""
    return Table(
        about,
        tuple(Row(f"τ = {t}", {"run.method": "fednest", "method.outer_steps": t}) for t in (1, 5, 10)),
        _both("best:test_accuracy"),
        {**HYPER, **data, **REDRAWN},
        seeds,
        corner="local steps of FedOut",
        budget=Budget("exchanges", exchanges),
        curves=(Curve("test_accuracy", "exchanges"),),
    )


def _series(data: Settings, rounds: int, seeds: tuple[int, ...], about: str) -> Table:
    """N and ℓ: how much the series for the inverse Hessian matters."""
    rows = [Row(f"N = {n}", {"run.method": "fednest", "method.terms": n}) for n in (1, 2, 5, 20)]
    rows += [Row(f"cg, N = {n}", {"run.method": "fednest", "method.terms": n, "method.series": "cg"}) for n in (5, 20)]
    shards = {"problem.partition": "shards"}
    return Table(
        about,
        tuple(rows),
        tuple(
            Column(f"ℓ = {ell:g}, %", {**shards, "method.lipschitz": ell}, "best:test_accuracy", ".1f", 100.0)
            for ell in (100.0, 400.0)
        ),
        {**HYPER, **data, **REDRAWN},
        seeds,
        corner="series",
        budget=Budget("rounds", rounds),
    )


def _steps(data: Settings, exchanges: int, seeds: tuple[int, ...], about: str) -> Table:
    """Figure 6: step sizes, against communication."""
    return Table(
        about,
        tuple(Row(name, {"run.method": name}) for name in ("fednest", "fednest-sgd", "lfednest", "lfednest-svrg")),
        tuple(
            Column(
                f"α = {a:g}, %",
                {"problem.partition": "shards", "method.outer_step": a},
                "tail:5:test_accuracy",
                ".1f",
                100.0,
            )
            for a in (1.0, 0.3, 0.1, 0.03)
        ),
        {**HYPER, **data, **REDRAWN},
        seeds,
        corner="method",
        budget=Budget("exchanges", exchanges),
        curves=(Curve("test_accuracy", "exchanges"),),
    )


def _tuning(data: Settings, epochs: int, seeds: tuple[int, ...], about: str) -> Table:
    """Figures 3a and 3b: T = 3, everybody the same number of epochs."""
    central = {"problem.clients": 1, "federation.count": 1, "problem.partition": "iid"}
    return Table(
        about,
        (
            *(Row(f"{name}, tuned", {"run.method": name}) for name in ("fednest", "fednest-sgd", "lfednest")),
            Row("untuned", {"run.method": "fednest", "method.outer_step": 0.0}),
            Row("central, tuned", {"run.method": "fednest", **central}),
            Row("central, untuned", {"run.method": "fednest", "method.outer_step": 0.0, **central}),
        ),
        _both("tail:5:balanced_accuracy"),
        {"run.problem": "loss-tuning", "method.inner_rounds": 3, "method.terms": 3, **REDRAWN, **data},
        seeds,
        corner="method",
        budget=Budget("rounds", epochs),
        curves=(Curve("balanced_accuracy", "round"),),
    )


TOY_K = "toy.K"  # inner steps, and Hessian products where there are some
NOISY: dict[str, Any] = {"problem.noise": 0.5, "federation.active": 0.5}
TOY_STEPS = {"method.step": 0.03, "method.outer_step": 0.005}
FEDNEST = {**NOISY, "run.method": "fednest-weights", "method.local_steps": 1, "method.lipschitz": 1 / 0.03}
TOY_ROWS = (
    Row("primal-dual", {**NOISY, "run.method": "primal-dual", "method.dual_step": 0.03}),
    Row("fednest, the same clients in a round", FEDNEST),
    Row("fednest, clients drawn anew", {**FEDNEST, **REDRAWN}),
    Row("exact-gd, without noise", {"run.method": "exact-gd", "method.inner": "gradient", "problem.noise": 0.0}),
)


def _toy_adjusted(settings: dict[str, Any]) -> dict[str, Any]:
    settings = dict(settings)
    k, batch = settings.pop(TOY_K), 1 if settings["problem.noise"] else "all"
    if settings["run.method"] == "fednest-weights":
        inner = {"inner_rounds": k, "terms": k, "batch": batch, "anchor": batch}
    else:
        inner = {"local_steps": k, "batch": batch, "target_batch": batch}
    return {**settings, **flat(method=inner)}


def _toy(ks: tuple[int, ...], rounds: int, seeds: tuple[int, ...]) -> Table:
    return Table(
        "The cosine toy with noise σ = .5, each client active with probability ½, N = 15, η_θ = η_λ = .03, η_w = .005: "
        "F(w) above the least F that a row of the table reached on the same problem.",
        TOY_ROWS,
        tuple(Column(f"F − F*, K = {k}", {TOY_K: k}, "final:objective", ".3f") for k in ks),
        {**flat(run={"problem": "toy-cosine", "dtype": "float64", "record": 20, "checkpoint": 200}), **TOY_STEPS},
        seeds,
        corner="method",
        adjust=_toy_adjusted,
        budget=Budget("rounds", rounds),
    )


LONG_TAIL = {**MNIST, "problem.imbalance": 100.0, "method.step": 1.5, "method.local_steps": 15}
SHORT_TAIL = {**DIGITS, "run.record": 5, "federation.count": 5}
MEAN_OF_LAST = "class-balanced test accuracy, mean of the last five records"
PAPER_SIZE = "MNIST, 100 clients, 10 per phase, drawn anew in each phase"
SMALL = "Digits, 20 clients, all of them, the problem's default sizes"
STUDIES = (
    Study(
        "fednest-minimax",
        "fednest",
        "the minimax problem with unequal curvatures: linear convergence, and who stalls",
        {"small": _minimax(20), "paper": _minimax(100)},
    ),
    Study(
        "fednest-figure4",
        "fednest",
        "Figure 4: the paper's minimax problem, s = 1 and s = 10",
        {"small": _figure4(20, (0,)), "paper": _figure4(100, (0, 1, 2, 3, 4))},
    ),
    Study(
        "fednest-hyper-representation",
        "fednest",
        "Figures 2a, 2b, 5: hyper-representation, i.i.d. and two classes per client",
        {
            "small": _hyper(DIGITS, 400, (0, 1, 2), f"{SMALL}; test accuracy where the accuracy on 200 rows was best."),
            "paper": _hyper(MNIST, 1600, (1, 2, 3), f"{PAPER_SIZE}; test accuracy at the best selection accuracy."),
            "quarter": _hyper(MNIST, 400, (1, 2, 3), f"{PAPER_SIZE}; test accuracy at the best selection accuracy."),
        },
    ),
    Study(
        "fednest-figure2c",
        "fednest",
        "Figure 2c: local steps in FedOut",
        {
            "small": _outer_steps(DIGITS, 200, (0, 1, 2), f"{SMALL}; test accuracy."),
            "paper": _outer_steps(MNIST, 800, (1, 2, 3), f"{PAPER_SIZE}; test accuracy."),
        },
    ),
    Study(
        "fednest-series",
        "fednest",
        "how much the series for the inverse Hessian matters: N and ℓ",
        {
            "small": _series(DIGITS, 40, (0, 1, 2), f"{SMALL}, two classes per client; test accuracy."),
            "paper": _series(MNIST, 160, (1, 2, 3), f"{PAPER_SIZE}, two classes per client; test accuracy."),
        },
    ),
    Study(
        "fednest-figure6",
        "fednest",
        "Figure 6: outer steps against rounds of communication, two classes per client",
        {
            "small": _steps(DIGITS, 200, (0, 1, 2), f"{SMALL}; test accuracy, mean of the last five records."),
            "paper": _steps(MNIST, 800, (1, 2, 3), f"{PAPER_SIZE}; test accuracy, mean of the last five records."),
        },
    ),
    Study(
        "fednest-toy",
        "fednest",
        "FedNest on a weighting problem with noise: the same clients in a round, or others in each phase",
        {"small": _toy((1, 5), 50, (0,)), "paper": _toy((1, 5, 10), 200, (0, 1, 2, 3, 4))},
        above_the_least,
    ),
    Study(
        "fednest-loss-tuning",
        "fednest",
        "Figure 3: loss tuning on long-tailed classes",
        {
            "small": _tuning(
                SHORT_TAIL, 250, (0, 1, 2), f"Digits, 10 clients, 5 per phase, drawn anew, T = 3; {MEAN_OF_LAST}."
            ),
            "paper": _tuning(LONG_TAIL, 250, (0, 1, 2), f"{PAPER_SIZE}, T = 3; {MEAN_OF_LAST}."),
        },
    ),
)
