"""MeritFed: mean estimation (figures 1 to 3) and the mixtures of its sections 4.2 and 4.3."""

from typing import Any

from coterie.reproduce.study import Column, Row, Settings, Study, Table, flat

SHIFTS = (0.001, 0.01, 0.1)
AUTHORS = {0.001: 3.5, 0.01: 4.5, 0.1: 12.5}  # the mirror steps in the authors' code
FRESH = 100  # rows per round
LEAST = "means.least"  # α is the authors', but not below this


def _merit(**more: Any) -> dict[str, Any]:
    return flat(run={"method": "meritfed"}, method=more)


MEANS = (
    Row("sgd-full", {"run.method": "sgd-full"}),
    Row("sgd-ideal", {"run.method": "sgd-ideal"}),
    Row("fixed-weights, w*", {"run.method": "fixed-weights", "method.weights": "opt"}),
    Row("fedadp", {"run.method": "fedadp"}),
    Row("fedadp, target's angle", {"run.method": "fedadp", "method.angle": "target", "method.smooth": False}),
    Row("tawt", {"run.method": "tawt"}),
    Row("meritfed MD, 10 steps", _merit()),
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


def _means(common: dict[str, Any], seeds: int, about: str) -> Table:
    columns = [Column(f"‖x‖², μ = {mu:g}", {"problem.shift": mu}, "final:objective", ".1e", 10.0) for mu in SHIFTS]
    columns += [Column(f"far weight, μ = {mu:g}", {"problem.shift": mu}, "final:far_weight") for mu in SHIFTS]
    return Table(
        about,
        MEANS,
        tuple(columns),
        {"run.problem": "mean-estimation", "method.batch": 100, "federation.mode": "vmap", **common},
        tuple(range(seeds)),
        corner="method",
        adjust=_means_adjusted,
    )


METHODS = ("meritfed", "sgd-full", "sgd-ideal", "fedadp", "tawt", "local-train")
PLANS: dict[str, dict[str, Any]] = {  # data: rounds, step and batches, how clients are run
    "digits": {"rounds": 200, "step": 0.1, "batch": 20, "target": 30, "mode": "vmap"},
    "cifar10": {"rounds": 120, "step": 0.1, "batch": 40, "target": 50, "mode": "sequential"},
    "goemotions": {"rounds": 200, "step": 0.05, "batch": 40, "target": 30, "mode": "vmap"},
}


def _mixed(method: str, target_batch: int) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        "meritfed": {"method.mirror": "smd", "method.mirror_batch": target_batch, "method.mirror_step": 0.1},
        "fedadp": {"method.angle": "target", "method.smooth": False, "method.target_batch": target_batch},
        "tawt": {"method.target_batch": target_batch},
        "local-train": {"method.local_steps": 1},
    }
    return {"run.method": method, **own.get(method, {})}


def _mixture_folder(s: Settings) -> str:
    plain = "-plain" if s.get("problem.validation") == 0 else ""
    return f"{s['problem.data']}{plain}-{s['problem.share']:g}-{s['run.rounds']}-{s['run.seed']}-{s['run.method']}"


def _mixture(data: str, shares: tuple[float, ...], seeds: tuple[int, ...], *, plain: bool = False) -> Table:
    """plain is the paper's other setting: no validation rows, the goal is the target's own training loss."""
    plan = PLANS[data]
    measure = "best:test_accuracy" if data == "cifar10" else "final:test_accuracy"  # there it still moves by .1
    columns = [Column(f"α = {share:g}", {"problem.share": share}, measure) for share in shares]
    columns += [
        Column(f"friends' weight, {column.name}", column.settings, "final:friends_weight") for column in columns
    ]
    return Table(
        f"{data}, {plan['rounds']} rounds, the same steps and batches for all; test accuracy on the target's classes.",
        tuple(Row(name, _mixed(name, plan["target"])) for name in METHODS),
        tuple(columns),
        flat(
            run={"problem": "mixture", "rounds": plan["rounds"], "record": 10, "checkpoint": 20},
            problem={"data": data, **({"validation": 0} if plain else {})},
            federation={"mode": plan["mode"], "target": 0},
            method={"step": plan["step"], "batch": plan["batch"]},
        ),
        seeds,
        corner="method",
        name=_mixture_folder,
    )


STUDIES = (
    Study(
        "meritfed-means",
        "meritfed",
        "Figures 1 to 3: mean estimation with friends, near and far clients",
        {
            "small": _means(
                flat(
                    run={"rounds": 120, "record": 120, "checkpoint": 120},
                    method={"step": 0.25},
                    problem={"samples": 200, "near": 19, "far": 10},
                ),
                1,
                "34 clients of 200 samples, γ = .25, 120 rounds; α as in the authors' code.",
            ),
            "paper": _means(
                {"run.rounds": 3000, "run.record": 300, "run.checkpoint": 300, "method.step": 0.01},
                5,
                "150 clients of 1,000 samples in R¹⁰, γ = .01, batches of 100, 3,000 rounds; α by the authors' code.",
            ),
        },
    ),
    Study(
        "meritfed-cifar10",
        "meritfed",
        "section 4.2: a target with three classes of CIFAR-10 among friends and strangers",
        {"small": _mixture("digits", (0.5, 0.9), (0, 1)), "paper": _mixture("cifar10", (0.5, 0.7, 0.9), (0, 1, 2))},
    ),
    Study(
        "meritfed-cifar10-plain",
        "meritfed",
        "section 4.2 without validation rows: the goal is the target's training loss",
        {
            "small": _mixture("digits", (0.5, 0.9), (0, 1), plain=True),
            "paper": _mixture("cifar10", (0.5, 0.7, 0.9), (0, 1, 2), plain=True),
        },
    ),
    Study(
        "meritfed-goemotions",
        "meritfed",
        "section 4.3: GoEmotions, a head on a fixed encoder",
        {"small": _mixture("digits", (0.5, 0.9), (0, 1)), "paper": _mixture("goemotions", (0.5, 0.9), (0, 1, 2))},
    ),
)
