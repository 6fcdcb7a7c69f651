"""All problems, in one tuple. Command line, configuration and docs follow from it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from coterie.errors import unknown
from coterie.problems.catalogue.friends import friends
from coterie.problems.catalogue.groups import groups
from coterie.problems.catalogue.hyper_representation import hyper_representation
from coterie.problems.catalogue.loss_tuning import loss_tuning
from coterie.problems.catalogue.mean_estimation import mean_estimation
from coterie.problems.catalogue.meta_learning import meta_learning
from coterie.problems.catalogue.minimax_quadratic import minimax_quadratic
from coterie.problems.catalogue.mixture import mixture
from coterie.problems.catalogue.nested_quadratic import nested_quadratic
from coterie.problems.catalogue.noisy_clients import noisy_clients
from coterie.problems.catalogue.quadratic import quadratic
from coterie.problems.catalogue.sketch import sketch
from coterie.problems.catalogue.submodels import submodels
from coterie.problems.catalogue.toy_cosine import toy_cosine
from coterie.problems.files import files


class ProblemEntry(NamedTuple):
    """A problem: its name, how it is made, what it is, what a run compares with, and method settings that suit it."""

    name: str
    make: Callable[..., Any]
    summary: str
    baselines: tuple[str, ...] = ()
    tuned: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


NESTED = ("fednest", "fednest-sgd", "lfednest", "lfednest-svrg", "lfednest-nonalt")
MINIMAX = {"outer_step": 0.1, "step": 0.5, "local_steps": 5, "batch": "all"}
ALTERNATING = {**MINIMAX, "outer_steps": 5}
BILEVEL = {"outer_step": 0.3, "step": 0.5, "local_steps": 5, "terms": 20, "lipschitz": 5.0, "batch": "all"}
IMAGES = {"outer_step": 0.3, "step": 1.0, "local_steps": 25, "lipschitz": 400.0, "batch": 32}
LIGHT = {name: {**IMAGES, "outer_step": 0.03} for name in NESTED[2:]}  # local hypergradients bear smaller steps only
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
        friends,
        "digits at 15 clients; 5 are the target's friends, 10 have permuted labels",
        ("local-train", "fedavg"),
        {
            "meritfed": {"step": 1.0, "mirror_step": 0.01},
            "fednest": {"step": 1.0, "batch": 20, "series": "cg"},
        },
    ),
    ProblemEntry(
        "files",
        files,
        "somebody's own tables or pictures, one file a client, and a target's file",
        ("local-train", "fedavg"),
        FILES,
    ),
    ProblemEntry("groups", groups, "a minority and a majority with their own classes, labels or turned images"),
    ProblemEntry(
        "mean-estimation",
        mean_estimation,
        "the mean of N(0, I) with friends, near and far clients; the optimum is known",
        ("sgd-full", "sgd-ideal"),
        MEAN_ESTIMATION,
    ),
    ProblemEntry(
        "mixture",
        mixture,
        "the target knows some classes, friends mix them with others, strangers have none of them",
        ("local-train", "sgd-full"),
        MIXTURE,
    ),
    ProblemEntry("sketch", sketch, "a network learnt over a thin line: images at 10 clients, i.i.d. or by classes"),
    ProblemEntry("quadratic", quadratic, "linear regression with known θ*(w), F(w), ∇F(w) and w*"),
    ProblemEntry(
        "toy-cosine",
        toy_cosine,
        "quadratics with a cosine; F(w) and ∇F(w) known, noise by choice",
        tuned={
            "primal-dual": {"step": 0.03, "dual_step": 0.03, "batch": 1, "target_batch": 1},
            "sustain": {"step": 0.03, "series_step": 0.03, "batch": 1, "target_batch": 1},
            "rfho": {"step": 0.03, "batch": 1, "target_batch": 1},
            "exact-gd": {"step": 0.03, "batch": 1, "target_batch": 1},
            "fednest": {"step": 0.03, "outer_step": 0.005, "lipschitz": 33.0, "batch": 1, "anchor": 1},
            "afl": {"step": 0.03, "batch": 1},
            "fixed-weights": {"step": 0.03, "batch": 1},
        },
    ),
    ProblemEntry(
        "noisy-clients",
        noisy_clients,
        "three clean clients that split the classes, seven with random labels",
        ("fixed-weights",),
        {
            "primal-dual": {"step": 0.1, "dual_step": 0.1, "outer_step": 0.01, "target_batch": 64},
            "sustain": {"step": 0.2, "series_step": 0.2, "outer_step": 0.05, "target_batch": 64},
            "rfho": {"step": 0.2, "outer_step": 0.005, "target_batch": 64},
            "fednest": {"step": 0.2, "outer_step": 0.05, "local_steps": 1, "terms": 1, "lipschitz": 5.0, "anchor": 64},
            "afl": {"step": 0.2, "outer_step": 0.01},
            "fixed-weights": {"step": 0.2},
        },
    ),
    ProblemEntry(
        "nested-quadratic",
        nested_quadratic,
        "bilevel, with known y*(x), f(x), ∇f(x) and x*",
        tuned=dict.fromkeys(NESTED, BILEVEL),
    ),
    ProblemEntry(
        "minimax-quadratic",
        minimax_quadratic,
        "minimax, with a known saddle point",
        tuned={**dict.fromkeys(NESTED, ALTERNATING), "fedavg-s": MINIMAX},
    ),
    ProblemEntry(
        "hyper-representation",
        hyper_representation,
        "bilevel: the backbone outside, the head inside",
        tuned={**dict.fromkeys(NESTED, IMAGES), **LIGHT},
    ),
    ProblemEntry(
        "loss-tuning",
        loss_tuning,
        "bilevel: a loss tuned for long-tailed classes, a network inside",
        tuned=dict.fromkeys(NESTED, TUNING),
    ),
    ProblemEntry(
        "meta-learning",
        meta_learning,
        "compositional: a start that is good after one gradient step",
        tuned=dict.fromkeys(NESTED, META),
    ),
    ProblemEntry(
        "submodels",
        submodels,
        "a network of which most clients can afford a share only; few classes a client",
    ),
)


def problem_entry(name: str) -> ProblemEntry:
    """The entry of that name; an unknown one is an error that lists the nearest."""
    for entry in PROBLEMS:
        if entry.name == name:
            return entry
    raise unknown("problem", name, (entry.name for entry in PROBLEMS))
