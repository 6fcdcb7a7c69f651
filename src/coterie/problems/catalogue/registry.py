"""All problems, in one tuple. Command line, configuration and docs follow from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from inspect import signature
from typing import Any

from coterie import plugins
from coterie.errors import UsageError
from coterie.problems.base import Problem
from coterie.settings import documented


@dataclass(frozen=True)
class ProblemEntry(plugins.Entry):
    """A problem in the registry; see `plugins.Entry` for the other fields.

    Args:
        baselines: methods that a run compares with.
        tuned: settings of methods that suit it, by method.
    """

    baselines: tuple[str, ...] = ()
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def make(self) -> Callable[..., Problem]:
        """The factory: it takes a context, and the settings by name."""
        return documented(self.found("coterie.problems"), "problem")


CATALOGUE: tuple[tuple[str, str, str], ...] = (
    ("friends", "catalogue.friends", "digits at 15 clients; 5 are the target's friends, 10 have permuted labels"),
    ("files", "files", "tables or pictures of your own: one file per client, and the target's file"),
    ("study", "sites", "tables at sites that keep their rows (`coterie study`), and the coordinator's own"),
    ("groups", "catalogue.groups", "a minority and a majority with their own classes, labels or turned images"),
    (
        "mean-estimation",
        "catalogue.mean_estimation",
        "the mean of N(0, I) with friends, near and far clients; the optimum is known",
    ),
    (
        "mixture",
        "catalogue.mixture",
        "the target knows some classes, friends mix them with others, strangers have none of them",
    ),
    ("dirichlet", "catalogue.dirichlet", "classes in Dirichlet proportions; every client has test rows of its own"),
    ("heart-disease", "catalogue.heart_disease", "patients of four hospitals (FLamby), one is the target"),
    ("femnist", "catalogue.leaf", "handwritten characters in LEAF's format; every writer is a client"),
    ("shakespeare", "catalogue.leaf", "the next letter, in LEAF's format; every role is a client"),
    ("sketch", "catalogue.sketch", "a network learnt over a slow connection; images, i.i.d. or by classes"),
    ("quadratic", "catalogue.quadratic", "linear regression with known θ*(w), F(w), ∇F(w) and w*"),
    ("toy-cosine", "catalogue.toy_cosine", "quadratics with a cosine; F(w) and ∇F(w) known, noise by choice"),
    (
        "noisy-clients",
        "catalogue.noisy_clients",
        "three clean clients that split the classes, seven with random labels",
    ),
    ("nested-quadratic", "catalogue.nested_quadratic", "bilevel, with known y*(x), f(x), ∇f(x) and x*"),
    ("simulated", "catalogue.simulated", "bilevel: benchmark_bilevel's quadratic over clients, with known h(x) and h*"),
    ("minimax-quadratic", "catalogue.minimax_quadratic", "minimax, with a known saddle point"),
    ("hyper-representation", "catalogue.hyper_representation", "bilevel: the backbone outside, the head inside"),
    ("loss-tuning", "catalogue.loss_tuning", "bilevel: a loss tuned for long-tailed classes, a network inside"),
    ("meta-learning", "catalogue.meta_learning", "compositional: a start that is good after one gradient step"),
    (
        "hyper-cleaning",
        "catalogue.hyper_cleaning",
        "bilevel: weights of corrupted rows that clients keep, a model inside",
    ),
    ("ridge-path", "catalogue.ridge_path", "bilevel: ridge penalties, one per feature or per client; h(x) is known"),
    (
        "penalty-tuning",
        "catalogue.penalty_tuning",
        "bilevel: one penalty per class of a classifier; digits or Covertype",
    ),
    (
        "distributionally-robust",
        "catalogue.distributionally_robust",
        "minimax: a model for the worst mixture of clients, weights on the simplex",
    ),
    (
        "submodels",
        "catalogue.submodels",
        "a network of which most clients can afford only a share; few classes per client",
    ),
)
"""Name, module below `coterie.problems`, and summary."""

BASELINES: dict[str, tuple[str, ...]] = {
    "friends": ("local-train", "fedavg"),
    "files": ("local-train", "fedavg"),
    "study": ("local-train", "fedavg"),
    "mean-estimation": ("sgd-full", "sgd-ideal"),
    "mixture": ("local-train", "sgd-full"),
    "noisy-clients": ("fixed-weights",),
}

NESTED = ("fednest", "fednest-sgd", "lfednest", "lfednest-svrg", "lfednest-nonalt")
AVERAGES = ("sgd-full", "sgd-ideal", "fedadp", "tawt")
MINIMAX = {"outer_step": 0.1, "step": 0.5, "local_steps": 5, "batch": "all"}
BILEVEL = {"outer_step": 0.3, "step": 0.5, "local_steps": 5, "terms": 20, "lipschitz": 5.0, "batch": "all"}
SIMULATED = {"outer_step": 1.0, "step": 3.0, "local_steps": 10, "terms": 20, "lipschitz": 4.0, "batch": "all"}
GLOBAL = {"series": "cg", "terms": 10}  # conjugate gradients on the mean Hessian
RIDGE = {**GLOBAL, "outer_step": 10.0, "step": 1.0, "local_steps": 5, "batch": "all"}
CLEANING = {**GLOBAL, "outer_step": 300.0, "step": 2.0, "local_steps": 5, "batch": "all"}
CLEANING_LOCAL = {"outer_step": 600.0, "step": 0.4, "system_step": 0.4, "batch": "all"}
PENALTIES = {**GLOBAL, "outer_step": 5.0, "step": 1.0, "local_steps": 5, "batch": "all"}
ROBUST = {"outer_step": 0.5, "step": 0.5, "local_steps": 1, "batch": "all"}
IMAGES = {"outer_step": 0.3, "step": 1.0, "local_steps": 25, "lipschitz": 400.0, "batch": 32}
LIGHT = {name: {**IMAGES, "outer_step": 0.03} for name in NESTED[2:]}  # local hypergradients need smaller steps
TUNING = {"outer_step": 10.0, "step": 0.5, "local_steps": 10, "lipschitz": 100.0, "batch": 32}
PLAIN = {"step": 0.25, "batch": 100}  # 25 times the paper's: hundreds of rounds instead of thousands
WHOLE = {"step": 0.5, "local_steps": 1, "batch": 128}
FILES = {
    "meritfed": {"step": 0.5, "mirror_step": 3.0, "mirror_steps": 3, "batch": 128},
    "local-train": WHOLE,
    "fedavg": WHOLE,
}
NOISY = {"step": 0.2, "outer_step": 0.05}
ONE_LOOK = {"step": 0.03, "batch": 1, "target_batch": 1}
TUNED: dict[str, dict[str, dict[str, Any]]] = {
    "friends": {
        "meritfed": {"step": 1.0, "mirror_step": 0.01},
        "fednest-weights": {"step": 1.0, "batch": 20, "series": "cg"},
    },
    "files": FILES,
    "study": FILES,
    "mean-estimation": {
        **dict.fromkeys(AVERAGES, PLAIN),
        # the step falls as 1/√t: with a constant one the weights fit the 1,000 validation rows in a long run
        **{key: {**PLAIN, "mirror_step": "power(12.0, 0.5)"} for key in ("meritfed", "meritfed-zo")},
    },
    "mixture": {key: {"step": 0.1, "batch": 20} for key in (*AVERAGES, "meritfed")},
    "toy-cosine": {
        "primal-dual": {**ONE_LOOK, "dual_step": 0.03},
        "sustain": {**ONE_LOOK, "series_step": 0.03},
        "rfho": ONE_LOOK,
        "exact-gd": ONE_LOOK,
        "fednest-weights": {"step": 0.03, "outer_step": 0.005, "lipschitz": 33.0, "batch": 1, "anchor": 1},
        "afl": {"step": 0.03, "batch": 1},
        "fixed-weights": {"step": 0.03, "batch": 1},
    },
    "noisy-clients": {
        "primal-dual": {"step": 0.1, "dual_step": 0.1, "outer_step": 0.01, "target_batch": 64},
        "sustain": {**NOISY, "series_step": 0.2, "target_batch": 64},
        "rfho": {"step": 0.2, "outer_step": 0.005, "target_batch": 64},
        "fednest-weights": {**NOISY, "local_steps": 1, "terms": 1, "lipschitz": 5.0, "anchor": 64},
        "afl": {"step": 0.2, "outer_step": 0.01},
        "fixed-weights": {"step": 0.2},
    },
    "nested-quadratic": dict.fromkeys(NESTED, BILEVEL),
    "simulated": {key: SIMULATED if key in NESTED[2:] else {**SIMULATED, **GLOBAL} for key in NESTED},
    "minimax-quadratic": {**{key: {**MINIMAX, "outer_steps": 5} for key in NESTED}, "fedavg-s": MINIMAX},
    "ridge-path": dict.fromkeys(NESTED[:2], RIDGE),
    "hyper-cleaning": {
        **dict.fromkeys(NESTED[:2], CLEANING),
        "soba": {"step": 0.4, "outer_step": 100.0},
        # these need problem.own=false, which makes the gradient by x a mean over the clients
        **dict.fromkeys(("fedbio", "fedbioacc", "simfbo"), CLEANING_LOCAL),
    },
    "penalty-tuning": dict.fromkeys(NESTED[:2], PENALTIES),
    "distributionally-robust": dict.fromkeys((*NESTED, "fedavg-s"), ROBUST),
    "hyper-representation": {**dict.fromkeys(NESTED, IMAGES), **LIGHT},
    "loss-tuning": dict.fromkeys(NESTED, TUNING),
    "meta-learning": {key: {"outer_step": 0.5, "step": 1.0, "local_steps": 1} for key in NESTED},
}

PROBLEMS: tuple[ProblemEntry, ...] = tuple(
    ProblemEntry(name, home, summary, baselines=BASELINES.get(name, ()), tuned=TUNED.get(name, {}))
    for name, home, summary in CATALOGUE
)


def problem_entry(name: str) -> ProblemEntry:
    """The entry of that name: coterie's own, or a plug-in's; an unknown one is an error that lists the nearest.

    Args:
        name: a registered name, package.module:factory, or file.py:factory.
    """
    return plugins.entry("problem", name, PROBLEMS, _outside)


@cache
def _outside(plugin: plugins.Plugin, factory: Callable[..., Any]) -> ProblemEntry:
    """The entry of a plug-in."""
    first = next(iter(signature(factory).parameters.values()), None)
    if first is None or first.kind is first.KEYWORD_ONLY or first.default is not first.empty:
        raise UsageError(
            f"run.problem = {plugin.name}: the first parameter of {factory.__name__} must be the Context (seed, dtype, "
            f"device); write def {factory.__name__}(context: coterie.problems.Context, *, …)."
        )
    remedy = "return what coterie.problems.weighting(…) or coterie.Nested(…).on(…) makes."
    make = plugins.returning(factory, Problem, f"run.problem = {plugin.name}", remedy)
    return ProblemEntry(plugin.name, "", plugins.summary(factory), plugin.source, make)
