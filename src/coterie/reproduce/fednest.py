"""FedNest: the minimax problem, hyper-representation, loss tuning."""

from typing import Any

from coterie.reproduce.study import Column, Row, Study, Table, flat

MINIMAX = flat(
    run={"problem": "minimax-quadratic", "dtype": "float64", "rounds": 60, "checkpoint": 60}, problem={"spread": 0.5}
)
EPOCHS = (0, 10, 20, 30, 40, 50, 60)


def _minimax(clients: int) -> Table:
    return Table(
        f"{clients} clients, τ = 5, α = .1, β = .5, curvatures spread by ± 50 %: distance to the saddle point.",
        (
            Row("FedNest", {"run.method": "fednest"}),
            Row("LFedNest", {"run.method": "lfednest"}),
            Row("FedAvg-S", {"run.method": "fedavg-s"}),
            Row("FedNest, a tenth of the clients", {"run.method": "fednest", "federation.count": clients // 10}),
        ),
        tuple(Column(str(t), {}, f"at:{t}:distance_to_optimum", ".1e") for t in EPOCHS),
        {**MINIMAX, "problem.clients": clients},
        corner="epochs",
    )


IMAGES = tuple(Row(name, {"run.method": name}) for name in ("fednest", "fednest-sgd", "lfednest"))
MNIST = flat(
    problem={"data": "mnist", "clients": 100},
    federation={"count": 10, "mode": "vmap"},
    method={"batch": 64},
    run={"record": 5},
)
HYPER = {"run.problem": "hyper-representation"}


def _hyper(common: dict[str, Any], seeds: tuple[int, ...], about: str) -> Table:
    columns = [
        Column(f"{words}, %", {"problem.partition": partition}, "best:test_accuracy", ".1f", 100.0)
        for partition, words in (("iid", "i.i.d."), ("shards", "shards (two classes per client)"))
    ]
    rounds = Column("rounds of communication", {"problem.partition": "shards"}, "rounds", ".0f")
    return Table(about, IMAGES, (*columns, rounds), {**HYPER, **common}, seeds)


def _tuning(common: dict[str, Any], epochs: tuple[int, ...], seeds: tuple[int, ...], about: str) -> Table:
    return Table(
        about,
        (
            Row("fednest, tuned", {"run.method": "fednest"}),
            Row("untuned", {"run.method": "fednest", "method.outer_step": 0.0}),
        ),
        tuple(Column(f"{t} epochs, %", {}, f"at:{t}:balanced_accuracy", ".1f", 100.0) for t in epochs),
        {"run.problem": "loss-tuning", "run.rounds": epochs[-1], "run.record": epochs[0], **common},
        seeds,
    )


LONG_TAIL = {**MNIST, "problem.imbalance": 100.0, "method.step": 1.5, "method.local_steps": 15, "method.terms": 3}
STUDIES = (
    Study(
        "fednest-minimax",
        "fednest",
        "the minimax problem: linear convergence, and who stalls",
        {"small": _minimax(20), "paper": _minimax(100)},
    ),
    Study(
        "fednest-hyper-representation",
        "fednest",
        "hyper-representation on MNIST, i.i.d. and two classes per client",
        {
            "small": _hyper(
                {"run.rounds": 40, "run.record": 2}, (0,), "Digits, the problem's default sizes, 40 epochs."
            ),
            "paper": _hyper(
                {**MNIST, "run.rounds": 160},
                (1, 2, 3),
                "100 clients, 10 an epoch, 160 epochs; test accuracy where the validation accuracy was best.",
            ),
        },
    ),
    Study(
        "fednest-loss-tuning",
        "fednest",
        "loss tuning on long-tailed MNIST: class-balanced test accuracy",
        {
            "small": _tuning({}, (10, 20), (0,), "Digits, the problem's default sizes."),
            "paper": _tuning(LONG_TAIL, (10, 20, 30, 40), (0, 1, 2, 3), "100 clients, 10 an epoch, i.i.d."),
        },
    ),
)
