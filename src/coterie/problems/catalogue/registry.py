"""All problems, in one tuple. Command line, configuration and docs follow from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from inspect import signature
from typing import Any

from coterie import plugins
from coterie.errors import UsageError, unknown
from coterie.problems.base import Problem
from coterie.settings import documented


@dataclass(frozen=True)
class ProblemEntry:
    """A problem in the registry.

    Args:
        name: its name; the factory has the same one with underscores.
        home: the module below `coterie.problems` that defines the factory. It is imported when the problem is used.
        summary: what it is, in one line.
        baselines: methods that a run compares with.
        tuned: settings of methods that suit it, by method.
        source: where it comes from: coterie, a distribution with its version, or a file.
        factory: the factory itself, where it is somebody else's.
    """

    name: str
    home: str
    summary: str
    baselines: tuple[str, ...] = ()
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: str = plugins.OWN
    factory: Callable[..., Problem] | None = None

    @cached_property
    def make(self) -> Callable[..., Problem]:
        """The factory: it takes a context, and the settings by name."""
        if self.factory is not None:
            return documented(self.factory, "problem")
        found = getattr(import_module(f"coterie.problems.{self.home}"), self.name.replace("-", "_"))
        return documented(found, "problem")


NESTED = ("fednest", "fednest-sgd", "lfednest", "lfednest-svrg", "lfednest-nonalt")
MINIMAX = {"outer_step": 0.1, "step": 0.5, "local_steps": 5, "batch": "all"}
ALTERNATING = {**MINIMAX, "outer_steps": 5}
BILEVEL = {"outer_step": 0.3, "step": 0.5, "local_steps": 5, "terms": 20, "lipschitz": 5.0, "batch": "all"}
IMAGES = {"outer_step": 0.3, "step": 1.0, "local_steps": 25, "lipschitz": 400.0, "batch": 32}
LIGHT = {name: {**IMAGES, "outer_step": 0.03} for name in NESTED[2:]}  # local hypergradients need smaller steps
TUNING = {"outer_step": 10.0, "step": 0.5, "local_steps": 10, "lipschitz": 100.0, "batch": 32}
META = {"outer_step": 0.5, "step": 1.0, "local_steps": 1}
PLAIN = {"step": 0.25, "batch": 100}  # 25 times the paper's: hundreds of rounds instead of thousands
MEAN_ESTIMATION = {
    **dict.fromkeys(("sgd-full", "sgd-ideal", "fedadp", "tawt"), PLAIN),
    "meritfed": {**PLAIN, "mirror_step": 4.0},
    "meritfed-zo": {**PLAIN, "mirror_step": 4.0},
}
MIXTURE = {
    **{name: {"step": 0.1, "batch": 20} for name in ("sgd-full", "sgd-ideal", "fedadp", "tawt")},
    "meritfed": {"step": 0.1, "batch": 20},
}
FILES = {
    "meritfed": {"step": 0.5, "mirror_step": 3.0, "mirror_steps": 3, "batch": 128},
    "local-train": {"step": 0.5, "local_steps": 1, "batch": 128},
    "fedavg": {"step": 0.5, "local_steps": 1, "batch": 128},
}

PROBLEMS: tuple[ProblemEntry, ...] = (
    ProblemEntry(
        "friends",
        "catalogue.friends",
        "digits at 15 clients; 5 are the target's friends, 10 have permuted labels",
        ("local-train", "fedavg"),
        {
            "meritfed": {"step": 1.0, "mirror_step": 0.01},
            "fednest-weights": {"step": 1.0, "batch": 20, "series": "cg"},
        },
    ),
    ProblemEntry(
        "files",
        "files",
        "tables or pictures of your own: one file per client, and the target's file",
        ("local-train", "fedavg"),
        FILES,
    ),
    ProblemEntry(
        "study",
        "sites",
        "tables at sites that keep their rows (`coterie study`), and the coordinator's own",
        ("local-train", "fedavg"),
        FILES,
    ),
    ProblemEntry(
        "groups", "catalogue.groups", "a minority and a majority with their own classes, labels or turned images"
    ),
    ProblemEntry(
        "mean-estimation",
        "catalogue.mean_estimation",
        "the mean of N(0, I) with friends, near and far clients; the optimum is known",
        ("sgd-full", "sgd-ideal"),
        MEAN_ESTIMATION,
    ),
    ProblemEntry(
        "mixture",
        "catalogue.mixture",
        "the target knows some classes, friends mix them with others, strangers have none of them",
        ("local-train", "sgd-full"),
        MIXTURE,
    ),
    ProblemEntry("heart-disease", "catalogue.heart_disease", "patients of four hospitals (FLamby), one is the target"),
    ProblemEntry("femnist", "catalogue.leaf", "handwritten characters in LEAF's format; every writer is a client"),
    ProblemEntry("shakespeare", "catalogue.leaf", "the next letter, in LEAF's format; every role is a client"),
    ProblemEntry("sketch", "catalogue.sketch", "a network learnt over a slow connection; images, i.i.d. or by classes"),
    ProblemEntry("quadratic", "catalogue.quadratic", "linear regression with known θ*(w), F(w), ∇F(w) and w*"),
    ProblemEntry(
        "toy-cosine",
        "catalogue.toy_cosine",
        "quadratics with a cosine; F(w) and ∇F(w) known, noise by choice",
        tuned={
            "primal-dual": {"step": 0.03, "dual_step": 0.03, "batch": 1, "target_batch": 1},
            "sustain": {"step": 0.03, "series_step": 0.03, "batch": 1, "target_batch": 1},
            "rfho": {"step": 0.03, "batch": 1, "target_batch": 1},
            "exact-gd": {"step": 0.03, "batch": 1, "target_batch": 1},
            "fednest-weights": {"step": 0.03, "outer_step": 0.005, "lipschitz": 33.0, "batch": 1, "anchor": 1},
            "afl": {"step": 0.03, "batch": 1},
            "fixed-weights": {"step": 0.03, "batch": 1},
        },
    ),
    ProblemEntry(
        "noisy-clients",
        "catalogue.noisy_clients",
        "three clean clients that split the classes, seven with random labels",
        ("fixed-weights",),
        {
            "primal-dual": {"step": 0.1, "dual_step": 0.1, "outer_step": 0.01, "target_batch": 64},
            "sustain": {"step": 0.2, "series_step": 0.2, "outer_step": 0.05, "target_batch": 64},
            "rfho": {"step": 0.2, "outer_step": 0.005, "target_batch": 64},
            "fednest-weights": {
                "step": 0.2,
                "outer_step": 0.05,
                "local_steps": 1,
                "terms": 1,
                "lipschitz": 5.0,
                "anchor": 64,
            },
            "afl": {"step": 0.2, "outer_step": 0.01},
            "fixed-weights": {"step": 0.2},
        },
    ),
    ProblemEntry(
        "nested-quadratic",
        "catalogue.nested_quadratic",
        "bilevel, with known y*(x), f(x), ∇f(x) and x*",
        tuned=dict.fromkeys(NESTED, BILEVEL),
    ),
    ProblemEntry(
        "minimax-quadratic",
        "catalogue.minimax_quadratic",
        "minimax, with a known saddle point",
        tuned={**dict.fromkeys(NESTED, ALTERNATING), "fedavg-s": MINIMAX},
    ),
    ProblemEntry(
        "hyper-representation",
        "catalogue.hyper_representation",
        "bilevel: the backbone outside, the head inside",
        tuned={**dict.fromkeys(NESTED, IMAGES), **LIGHT},
    ),
    ProblemEntry(
        "loss-tuning",
        "catalogue.loss_tuning",
        "bilevel: a loss tuned for long-tailed classes, a network inside",
        tuned=dict.fromkeys(NESTED, TUNING),
    ),
    ProblemEntry(
        "meta-learning",
        "catalogue.meta_learning",
        "compositional: a start that is good after one gradient step",
        tuned=dict.fromkeys(NESTED, META),
    ),
    ProblemEntry(
        "submodels",
        "catalogue.submodels",
        "a network of which most clients can afford only a share; few classes per client",
    ),
)


def problem_entry(name: str) -> ProblemEntry:
    """The entry of that name: coterie's own, or a plug-in's; an unknown one is an error that lists the nearest.

    Args:
        name: a registered name, package.module:factory, or file.py:factory.
    """
    for entry in PROBLEMS:
        if entry.name == name:
            return entry
    plugin = plugins.find("problem", name)
    if plugin is None:
        registered = (other.name for other in plugins.registered("problem"))
        raise unknown("problem", name, (*(entry.name for entry in PROBLEMS), *registered))
    return _outside(plugin, plugin.load("run.problem"))


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
    return ProblemEntry(plugin.name, "", plugins.summary(factory), source=plugin.source, factory=make)
