"""MeritFed: mean estimation (figures 1 to 3) and the mixtures of its sections 4.2 and 4.3."""

from typing import Any

from coterie.reproduce.study import Budget, Column, Curve, Row, Study, Table, flat

SHIFTS = (0.001, 0.01, 0.1)
AUTHORS = {0.001: 3.5, 0.01: 4.5, 0.1: 12.5}  # the mirror steps in the authors' code
FRESH = 100  # rows per round
LEAST = "means.least"  # α is the authors', but not below this


def _merit(**more: Any) -> dict[str, Any]:
    return flat(run={"method": "meritfed"}, method=more)


OF_AUTHORS: dict[str, dict[str, Any]] = {  # the angle to the gradient that client 0 sends itself; c = 100 γ
    "fedadp": {"run.method": "fedadp", "method.angle": "client", "method.smooth": False},
    "tawt": {"run.method": "tawt", "method.angle": "client"},
}
MEANS = (
    Row("sgd-full", {"run.method": "sgd-full"}),
    Row("sgd-ideal", {"run.method": "sgd-ideal"}),
    Row("fixed-weights, w*", {"run.method": "fixed-weights", "method.weights": "opt"}),
    Row("fedadp", {"run.method": "fedadp"}),
    Row("fedadp, authors", OF_AUTHORS["fedadp"]),
    Row("tawt", {"run.method": "tawt"}),
    Row("tawt, authors", OF_AUTHORS["tawt"]),
    Row("meritfed MD, 10 steps", _merit()),
    Row("meritfed MD, 10 steps, continued mean", _merit(average="continue")),
    # 50 steps by the second-order model, which is exact here and takes one exchange instead of 50
    Row("meritfed MD, 50 steps", _merit(mirror_steps=50, solver="quadratic")),
    Row("meritfed SMD, 10 steps", _merit(mirror="smd", mirror_batch=100)),
    Row("meritfed-zo, 10 steps", {"run.method": "meritfed-zo", "method.mirror_batch": 100}),
    Row("meritfed MD, 10 steps, fresh rows", {**_merit(data="fresh", mirror_batch=FRESH), LEAST: 7.0}),
)


def _means_adjusted(settings: dict[str, Any]) -> dict[str, Any]:
    settings = dict(settings)
    least = settings.pop(LEAST, 0.0)
    if settings["run.method"].startswith("meritfed"):
        settings["method.mirror_step"] = max(least, AUTHORS[settings["problem.shift"]])
    if settings.get("method.data") == "fresh":
        settings["problem.validation"] = FRESH * settings["run.rounds"]
    return settings


def _means(common: dict[str, Any], rounds: int, seeds: int, about: str, geometry: str) -> Table:
    columns = [Column(f"‖x‖², μ = {mu:g}", {"problem.shift": mu}, "final:objective", ".1e", 10.0) for mu in SHIFTS]
    columns += [Column(f"far weight, μ = {mu:g}", {"problem.shift": mu}, "final:far_weight") for mu in SHIFTS]
    run = {"problem": "mean-estimation", "rounds": rounds, "record": max(1, rounds // 10), "checkpoint": rounds}
    return Table(
        about,
        MEANS,
        tuple(columns),
        {
            **flat(run=run, method={"batch": 100}, federation={"mode": "vmap"}),
            "problem.geometry": geometry,
            **common,
        },
        tuple(range(seeds)),
        corner="method",
        adjust=_means_adjusted,
        budget=Budget("rounds", rounds),
    )


def _both_scales(geometry: str, words: str) -> dict[str, Table]:
    few = flat(method={"step": 0.25}, problem={"samples": 200, "near": 19, "far": 10})
    return {
        "small": _means(few, 120, 1, f"34 clients of 200 samples, γ = .25; α by the authors' code; {words}.", geometry),
        "paper": _means(
            {"method.step": 0.01},
            3000,
            5,
            f"150 clients of 1,000 samples in R¹⁰, γ = .01, batches of 100, α by the authors' code; {words}.",
            geometry,
        ),
    }


METHODS = (
    "meritfed SMD",
    "meritfed MD",
    "sgd-full",
    "sgd-ideal",
    "fedadp, authors",
    "tawt, authors",
    "fedadp",
    "tawt",
    "local-train",
)
ENCODER: dict[str, Any] = {"batch": 40, "target": 40, "mode": "sequential", "selection": 200}
PLANS: dict[str, dict[str, Any]] = {  # data: rounds, step and batches, how clients are run
    "digits": {"rounds": 200, "step": 0.1, "batch": 20, "target": 30, "mode": "vmap", "selection": 100},
    "cifar10": {"rounds": 120, "step": 0.1, "batch": 40, "target": 50, "mode": "sequential", "selection": 600},
    "goemotions": {"rounds": 200, "step": 0.05, "batch": 40, "target": 30, "mode": "vmap", "selection": 200},
    # the encoder itself is trained, with the paper's step
    "goemotions, full": {"rounds": 20, "step": 0.01, **ENCODER},
    # the step of the head: with .01 adapters hardly move in 100 rounds
    "goemotions, LoRA": {"rounds": 100, "step": 0.05, **ENCODER},
}
TRAINED: dict[str, dict[str, Any]] = {
    "goemotions, full": {"problem.fine_tune": True},
    "goemotions, LoRA": {"problem.lora": 8},
}
SHARES = (0.5, 0.7, 0.9, 0.99)


def _mixed(name: str, target_batch: int) -> dict[str, Any]:
    merit = {"run.method": "meritfed", "method.mirror_step": 0.1, "method.average": "continue"}
    own: dict[str, dict[str, Any]] = {
        "meritfed SMD": {**merit, "method.mirror": "smd", "method.mirror_batch": target_batch},
        "meritfed MD": {**merit, "method.mirror": "md"},
        "fedadp, authors": OF_AUTHORS["fedadp"],
        "tawt, authors": OF_AUTHORS["tawt"],
        "tawt": {"method.target_batch": target_batch},
        "local-train": {"method.local_steps": 1},
    }
    return {"run.method": name, **own.get(name, {})}


def _mixture(plan_name: str, shares: tuple[float, ...], seeds: tuple[int, ...], *, plain: bool = False) -> Table:
    """plain is the paper's other setting: no validation rows, the goal is the target's own training loss."""
    plan, data = PLANS[plan_name], plan_name.partition(",")[0]
    columns = [Column(f"α = {share:g}", {"problem.share": share}, "best:test_accuracy") for share in shares]
    columns += [
        Column(f"friends' weight, {column.name}", column.settings, "final:friends_weight") for column in columns
    ]
    rows = "without validation rows" if plain else "with validation rows"
    return Table(
        f"{plan_name}, {rows}, the same steps and batches for all; test accuracy on the target's classes where the "
        "accuracy on selection rows was best.",
        tuple(Row(name, _mixed(name, plan["target"])) for name in METHODS),
        tuple(columns),
        flat(
            run={"problem": "mixture", "record": max(1, plan["rounds"] // 20), "checkpoint": 20},
            problem={"data": data, "selection": plan["selection"], **({"validation": 0} if plain else {})},
            federation={"mode": plan["mode"], "target": 0},
            method={"step": plan["step"], "batch": plan["batch"]},
        )
        | TRAINED.get(plan_name, {}),
        seeds,
        corner="method",
        budget=Budget("rounds", plan["rounds"]),
        curves=(Curve("test_accuracy", "round"),),
    )


STUDIES = (
    Study(
        "meritfed-means",
        "meritfed",
        "Figures 1 to 3: mean estimation with friends, near and far clients",
        _both_scales("paper", "means as in the text"),
    ),
    Study(
        "meritfed-means-authors",
        "meritfed",
        "Figures 1 to 3 with the means of the authors' code",
        _both_scales("authors", "means as in the authors' code"),
    ),
    Study(
        "meritfed-cifar10",
        "meritfed",
        "section 4.2: a target with three classes of CIFAR-10 among friends and strangers",
        {"small": _mixture("digits", SHARES, (0, 1, 2)), "paper": _mixture("cifar10", SHARES, (0, 1, 2))},
    ),
    Study(
        "meritfed-cifar10-plain",
        "meritfed",
        "section 4.2 without validation rows: the goal is the target's training loss",
        {
            "small": _mixture("digits", SHARES, (0, 1, 2), plain=True),
            "paper": _mixture("cifar10", SHARES, (0, 1, 2), plain=True),
        },
    ),
    Study(
        "meritfed-goemotions",
        "meritfed",
        "section 4.3: GoEmotions, a head on a fixed encoder, the encoder in full, or LoRA adapters",
        {
            "small": _mixture("digits", (0.5, 0.9), (0, 1)),
            "paper": _mixture("goemotions", SHARES, (0, 1, 2)),
            "full": _mixture("goemotions, full", SHARES, (0, 1, 2)),
            "lora": _mixture("goemotions, LoRA", SHARES, (0, 1, 2)),
        },
    ),
)
