"""All methods, in one tuple. Command line, configuration, conformance tests and docs follow from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any

from coterie.errors import unknown
from coterie.methods.base import Method

FEDNEST = "FedNest (Tarzanagh et al. 2022)"
FEDSEP = "FedSep (Li and Huang 2023)"
MERITFED = "MeritFed (Tupitsa et al. 2024)"
WEIGHTED_NODES = "Adaptively weighted nodes (2023)"


BILEVEL_GRID = {
    "method.step": (0.05, 0.02, 0.01),
    "method.system_step": (5e-4, 2e-4, 1e-4),
    "method.local_steps": (10, 20),
    "method.outer_step": (0.025, 0.02, 0.015),
}


@dataclass(frozen=True)
class MethodEntry:
    """A method in the registry.

    Args:
        name: its name; the factory has the same one with underscores.
        home: the module below `coterie.methods` that defines the factory. It is imported when the method is used.
        paper: where it was published.
        summary: what it does, in one line.
        learns_weights: whether it learns client weights.
        grid: the paper's grid, for `coterie tune`.
    """

    name: str
    home: str
    paper: str
    summary: str
    learns_weights: bool = False
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @cached_property
    def make(self) -> Callable[..., Method]:
        """The factory, which takes the settings by name."""
        factory: Callable[..., Method] = getattr(import_module(f"coterie.methods.{self.home}"), self.identifier)
        return factory

    @property
    def identifier(self) -> str:
        """The name of the factory."""
        return self.name.replace("-", "_")


METHODS: tuple[MethodEntry, ...] = (
    MethodEntry("bilevel", "weights.bilevel", WEIGHTED_NODES, "weights by hypergradients (Alg. 3)", True, BILEVEL_GRID),
    MethodEntry(
        "bilevel-accelerated",
        "weights.bilevel_accelerated",
        WEIGHTED_NODES,
        "accelerated, for convex F (Alg. 2)",
        True,
        BILEVEL_GRID,
    ),
    MethodEntry(
        "ditto",
        "baselines.ditto",
        "Li et al. 2021",
        "global model, proximal personal steps at the target, or at everyone",
        grid={"method.penalty": (0.05, 0.1, 0.2)},
    ),
    MethodEntry(
        "local-svrg", "baselines.local_svrg", WEIGHTED_NODES, "variance-reduced averaging with fixed weights (Alg. 1)"
    ),
    MethodEntry(
        "pfedme",
        "baselines.pfedme",
        "T Dinh et al. 2020",
        "Moreau envelopes, personalised at the target, or at everyone",
        grid={"method.penalty": (5.0, 10.0, 15.0)},
    ),
    MethodEntry("fedavg", "baselines.fedavg", "McMahan et al. 2017", "plain averaging of local walks"),
    MethodEntry(
        "local-train", "baselines.local_train", "baseline", "the target alone, on its own rows, or everyone alone"
    ),
    MethodEntry("meritfed", "weights.meritfed", MERITFED, "mirror descent on the target's loss", True),
    MethodEntry(
        "meritfed-zo", "weights.meritfed_zo", MERITFED, "the same by losses alone, without the target's gradients", True
    ),
    MethodEntry(
        "collaborate", "weights.collaborate", "beyond MeritFed", "every client a target: a matrix of weights", True
    ),
    MethodEntry("fedadp", "weights.fedadp", "Wu and Wang 2021", "weights by the angle to the global gradient", True),
    MethodEntry("tawt", "weights.tawt", "Chen et al. 2021", "weights by the cosine to the target's gradient", True),
    MethodEntry("sgd-full", "baselines.sgd_full", MERITFED, "parallel SGD over everybody"),
    MethodEntry(
        "sgd-ideal", "baselines.sgd_ideal", MERITFED, "parallel SGD over the true friends, where they are known"
    ),
    MethodEntry(
        "primal-dual", "weights.primal_dual", "Primal–dual weighting", "saddle point of an augmented Lagrangian", True
    ),
    MethodEntry(
        "sustain", "weights.sustain", "Khanduri et al. 2021", "one loop, recursive momentum on both levels", True
    ),
    MethodEntry(
        "rfho", "weights.rfho", "Franceschi et al. 2017", "forward-mode derivative of the training itself", True
    ),
    MethodEntry("afl", "weights.afl", "Mohri et al. 2019", "minimax over mixtures of the clients", True),
    MethodEntry(
        "exact-gd", "weights.exact_gd", "baseline", "exact hypergradient by a dense Hessian; small models", True
    ),
    MethodEntry("krum", "robust", "Blanchard et al. 2017", "robust: the walk nearest to most others"),
    MethodEntry("multi-krum", "robust", "Blanchard et al. 2017", "robust: the mean of the walks nearest to most"),
    MethodEntry("coordinate-median", "robust", "Yin et al. 2018", "robust: the median by coordinate"),
    MethodEntry("trimmed-mean", "robust", "Yin et al. 2018", "robust: the mean by coordinate without extremes"),
    MethodEntry("geometric-median", "robust", "Pillutla et al. 2022", "robust: least distance to all walks"),
    MethodEntry("fixed-weights", "baselines.fixed_weights", "baseline", "gradient descent with weights that are given"),
    MethodEntry(
        "fednest", "nested.fednest", FEDNEST, "nested problems by global hypergradients and corrected local steps"
    ),
    MethodEntry(
        "fednest-weights", "weights.fednest_weights", FEDNEST, "FedNest with client weights as outer variable", True
    ),
    MethodEntry("fednest-sgd", "nested.fednest", FEDNEST, "FedNest with plain local walks in the inner problem"),
    MethodEntry("lfednest", "nested.lfednest", FEDNEST, "light: local hypergradients, plain local walks"),
    MethodEntry("lfednest-svrg", "nested.lfednest", FEDNEST, "light, with corrected walks in the inner problem"),
    MethodEntry("lfednest-nonalt", "nested.lfednest", FEDNEST, "each client solves its own nested problem"),
    MethodEntry("fedavg-s", "nested.fedavg_s", "Hou et al. 2021", "simultaneous federated gradient descent–ascent"),
    MethodEntry("fedsep-submodel", "submodels.fedsep_submodel", FEDSEP, "sub-models that suit a client's data"),
    MethodEntry("heterofl", "submodels.heterofl", "Diao et al. 2021", "sub-models of the first kernels"),
    MethodEntry(
        "federated-dropout", "submodels.federated_dropout", "Caldas et al. 2018", "sub-models of random kernels"
    ),
    MethodEntry("fedrolex", "submodels.fedrolex", "Alam et al. 2022", "sub-models of a rolling window of kernels"),
    MethodEntry("zerofl", "submodels.zerofl", "Qiu et al. 2022", "sparse steps, the largest weights uploaded"),
    MethodEntry("feddst", "submodels.feddst", "Bibikar et al. 2022", "sparse networks whose masks move"),
    MethodEntry(
        "flash", "submodels.flash", "Babakniya et al. 2022", "sparse networks, masks by sensitivity, then fixed"
    ),
    MethodEntry("feddf", "submodels.feddf", "Lin et al. 2020", "networks of several sizes, fused by distillation"),
    MethodEntry("ds-fl", "submodels.ds_fl", "Itahara et al. 2020", "soft labels of public rows instead of networks"),
    MethodEntry("fed-et", "submodels.fed_et", "Cho et al. 2022", "small networks teach a large one"),
    MethodEntry(
        "homogeneous", "submodels.homogeneous", "baseline", "the same sub-model at all clients: smallest or largest"
    ),
    MethodEntry("fedsep", "compressed.fedsep", FEDSEP, "two layers: talks through a sketch, learns in the full space"),
    MethodEntry(
        "fedsep-redraw", "compressed.fedsep_redraw", FEDSEP, "FedSep with a new sketch every round, and error feedback"
    ),
    MethodEntry("uncompressed", "compressed.uncompressed", "baseline", "local walks sent whole, with a server step"),
    MethodEntry(
        "top-k", "compressed.top_k", "Stich et al. 2018", "the largest entries of local walks, with error feedback"
    ),
    MethodEntry(
        "count-sketch", "compressed.count_sketch", "Rothchild et al. 2020", "FetchSGD: count sketches up, top-k down"
    ),
)


def learns_weights(name: str) -> bool:
    """Whether a method is registered as one that learns weights; one's own methods are not."""
    return any(entry.learns_weights for entry in METHODS if entry.name == name)


def method_entry(name: str) -> MethodEntry:
    """The entry of that name; an unknown one is an error that lists the nearest."""
    for entry in METHODS:
        if entry.name == name:
            return entry
    raise unknown("method", name, (entry.name for entry in METHODS))
