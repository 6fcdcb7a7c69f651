"""All methods, in one tuple. Command line, configuration, conformance tests and docs follow from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from typing import Any

from coterie import plugins
from coterie.errors import unknown
from coterie.methods.base import About, Method, validated

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
        source: where it comes from: coterie, a distribution with its version, or a file.
        factory: the factory itself, where it is somebody else's.
    """

    name: str
    home: str
    paper: str
    summary: str
    learns_weights: bool = False
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    source: str = plugins.OWN
    factory: Callable[..., Method] | None = None

    @cached_property
    def make(self) -> Callable[..., Method]:
        """The factory, which takes the settings by name."""
        if self.factory is not None:
            return self.factory
        factory: Callable[..., Method] = getattr(import_module(f"coterie.methods.{self.home}"), self.identifier)
        return factory

    @property
    def identifier(self) -> str:
        """The name of the factory."""
        return self.name.replace("-", "_")


METHODS: tuple[MethodEntry, ...] = (
    MethodEntry(
        "bilevel",
        "weights.bilevel",
        WEIGHTED_NODES,
        "client weights by hypergradient descent (Alg. 3)",
        True,
        BILEVEL_GRID,
    ),
    MethodEntry(
        "bilevel-accelerated",
        "weights.bilevel_accelerated",
        WEIGHTED_NODES,
        "accelerated hypergradient descent on the weights, for convex F (Alg. 2)",
        True,
        BILEVEL_GRID,
    ),
    MethodEntry(
        "ditto",
        "baselines.ditto",
        "Li et al. 2021",
        "averaged global model, proximal personal steps for the target or for every client",
        grid={"method.penalty": (0.05, 0.1, 0.2)},
    ),
    MethodEntry(
        "local-svrg",
        "baselines.local_svrg",
        WEIGHTED_NODES,
        "variance-reduced local steps, averaged with fixed weights (Alg. 1)",
    ),
    MethodEntry(
        "pfedme",
        "baselines.pfedme",
        "T Dinh et al. 2020",
        "Moreau envelopes, personal models for the target or for every client",
        grid={"method.penalty": (5.0, 10.0, 15.0)},
    ),
    MethodEntry("fedavg", "baselines.fedavg", "McMahan et al. 2017", "plain average of local updates"),
    MethodEntry(
        "local-train",
        "baselines.local_train",
        "baseline",
        "training on the target's own rows alone, or every client alone",
    ),
    MethodEntry(
        "meritfed", "weights.meritfed", MERITFED, "client weights by mirror descent on the target's loss", True
    ),
    MethodEntry(
        "meritfed-zo",
        "weights.meritfed_zo",
        MERITFED,
        "MeritFed from losses of the target alone, without its gradients",
        True,
    ),
    MethodEntry(
        "collaborate",
        "weights.collaborate",
        "beyond MeritFed",
        "every client is a target, with a matrix of learned weights",
        True,
    ),
    MethodEntry("fedadp", "weights.fedadp", "Wu and Wang 2021", "weights by the angle to the global gradient", True),
    MethodEntry("tawt", "weights.tawt", "Chen et al. 2021", "weights by the cosine to the target's gradient", True),
    MethodEntry("sgd-full", "baselines.sgd_full", MERITFED, "parallel SGD over all clients"),
    MethodEntry(
        "sgd-ideal", "baselines.sgd_ideal", MERITFED, "parallel SGD over the true friends, where they are known"
    ),
    MethodEntry(
        "primal-dual",
        "weights.primal_dual",
        "Primal–dual weighting",
        "client weights at the saddle point of an augmented Lagrangian",
        True,
    ),
    MethodEntry(
        "sustain",
        "weights.sustain",
        "Khanduri et al. 2021",
        "client weights in one loop, with recursive momentum on both levels",
        True,
    ),
    MethodEntry(
        "rfho",
        "weights.rfho",
        "Franceschi et al. 2017",
        "client weights by forward-mode differentiation through training",
        True,
    ),
    MethodEntry(
        "afl", "weights.afl", "Mohri et al. 2019", "minimax over mixtures of the clients, without a target", True
    ),
    MethodEntry(
        "exact-gd", "weights.exact_gd", "baseline", "exact hypergradient by a dense Hessian; small models", True
    ),
    MethodEntry("krum", "robust", "Blanchard et al. 2017", "robust: the update nearest to most others"),
    MethodEntry(
        "multi-krum", "robust", "Blanchard et al. 2017", "robust: the mean of the updates nearest to most others"
    ),
    MethodEntry("coordinate-median", "robust", "Yin et al. 2018", "robust: the median of the updates per coordinate"),
    MethodEntry(
        "trimmed-mean", "robust", "Yin et al. 2018", "robust: the mean of the updates per coordinate, without extremes"
    ),
    MethodEntry(
        "geometric-median", "robust", "Pillutla et al. 2022", "robust: the point of least distance to all updates"
    ),
    MethodEntry("fixed-weights", "baselines.fixed_weights", "baseline", "gradient descent with weights that are given"),
    MethodEntry(
        "fednest",
        "nested.fednest",
        FEDNEST,
        "nested problems by global hypergradients and variance-reduced local steps",
    ),
    MethodEntry(
        "fednest-weights", "weights.fednest_weights", FEDNEST, "FedNest with client weights as outer variable", True
    ),
    MethodEntry("fednest-sgd", "nested.fednest", FEDNEST, "FedNest with plain local steps in the inner problem"),
    MethodEntry("lfednest", "nested.lfednest", FEDNEST, "light FedNest: local hypergradients, plain local steps"),
    MethodEntry(
        "lfednest-svrg",
        "nested.lfednest",
        FEDNEST,
        "light FedNest with variance-reduced local steps in the inner problem",
    ),
    MethodEntry(
        "lfednest-nonalt", "nested.lfednest", FEDNEST, "light FedNest where each client solves its own nested problem"
    ),
    MethodEntry("fedavg-s", "nested.fedavg_s", "Hou et al. 2021", "simultaneous federated gradient descent–ascent"),
    MethodEntry("fedsep-submodel", "submodels.fedsep_submodel", FEDSEP, "sub-models chosen by each client's data"),
    MethodEntry("heterofl", "submodels.heterofl", "Diao et al. 2021", "sub-models of the first kernels"),
    MethodEntry(
        "federated-dropout", "submodels.federated_dropout", "Caldas et al. 2018", "sub-models of random kernels"
    ),
    MethodEntry("fedrolex", "submodels.fedrolex", "Alam et al. 2022", "sub-models of a rolling window of kernels"),
    MethodEntry(
        "zerofl", "submodels.zerofl", "Qiu et al. 2022", "sparse local steps; the largest weights are uploaded"
    ),
    MethodEntry("feddst", "submodels.feddst", "Bibikar et al. 2022", "sparse networks whose masks move"),
    MethodEntry(
        "flash", "submodels.flash", "Babakniya et al. 2022", "sparse networks, masks by sensitivity, then fixed"
    ),
    MethodEntry("feddf", "submodels.feddf", "Lin et al. 2020", "networks of several sizes, fused by distillation"),
    MethodEntry(
        "ds-fl", "submodels.ds_fl", "Itahara et al. 2020", "exchange of soft labels for public rows instead of networks"
    ),
    MethodEntry("fed-et", "submodels.fed_et", "Cho et al. 2022", "small networks teach a large one"),
    MethodEntry(
        "homogeneous", "submodels.homogeneous", "baseline", "the same sub-model at all clients: smallest or largest"
    ),
    MethodEntry("fedsep", "compressed.fedsep", FEDSEP, "communication through a sketch, training in the full space"),
    MethodEntry(
        "fedsep-redraw",
        "compressed.fedsep_redraw",
        FEDSEP,
        "FedSep with a new sketch in every round, and error feedback",
    ),
    MethodEntry(
        "uncompressed", "compressed.uncompressed", "baseline", "local updates sent whole, with a server step size"
    ),
    MethodEntry(
        "top-k", "compressed.top_k", "Stich et al. 2018", "the largest entries of local updates, with error feedback"
    ),
    MethodEntry(
        "count-sketch", "compressed.count_sketch", "Rothchild et al. 2020", "FetchSGD: count sketches up, top-k down"
    ),
)


def learns_weights(name: str) -> bool:
    """Whether one of coterie's own methods learns weights; others say so themselves, `Method.learns_weights`."""
    return any(entry.learns_weights for entry in METHODS if entry.name == name)


def method_entry(name: str) -> MethodEntry:
    """The entry of that name: coterie's own, or a plug-in's; an unknown one is an error that lists the nearest.

    Args:
        name: a registered name, package.module:factory, or file.py:factory.
    """
    for entry in METHODS:
        if entry.name == name:
            return entry
    plugin = plugins.find("method", name)
    if plugin is None:
        registered = (other.name for other in plugins.registered("method"))
        raise unknown("method", name, (*(entry.name for entry in METHODS), *registered))
    return _outside(plugin, plugin.load("run.method"))


@cache
def _outside(plugin: plugins.Plugin, factory: Callable[..., Any]) -> MethodEntry:
    """The entry of a plug-in."""
    about = getattr(factory, "about", None)
    if not isinstance(about, About):
        factory, about = validated(factory), About()
    make = plugins.returning(factory, Method, f"run.method = {plugin.name}", "mark the factory with @validated.")
    return MethodEntry(plugin.name, "", about.paper, plugins.summary(factory), *about[1:], plugin.source, make)
