"""All methods, by family. Command line, configuration, conformance tests and docs follow from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from coterie import plugins
from coterie.methods.base import About, Method, validated

FEDBIO = "FedBiO (Li, Huang and Huang 2023)"
FEDNEST = "FedNest (Tarzanagh et al. 2022)"
FEDSEP = "FedSep (Li and Huang 2023)"
MERITFED = "MeritFed (Tupitsa et al. 2024)"
SOBA = "SOBA/SABA (Dagréou et al. 2022)"
WEIGHTED_NODES = "Adaptively weighted nodes (2023)"


@dataclass(frozen=True)
class MethodEntry(plugins.Entry):
    """A method in the registry; see `plugins.Entry` for the other fields.

    Args:
        paper: where it was published.
        learns_weights: whether it learns client weights.
        grid: the paper's grid, for `coterie tune`.
        secure: whether it can be run with federation.secure: "yes", "no", the setting that it needs, or "" if unknown.
    """

    paper: str = ""
    learns_weights: bool = False
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    secure: str = ""

    @cached_property
    def make(self) -> Callable[..., Method]:
        """The factory, which takes the settings by name."""
        return self.found("coterie.methods")


FAMILIES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "weights.": (
        ("bilevel", WEIGHTED_NODES, "client weights by hypergradient descent (Alg. 3)"),
        (
            "bilevel-accelerated",
            WEIGHTED_NODES,
            "accelerated hypergradient descent on the weights, for convex F (Alg. 2)",
        ),
        ("meritfed", MERITFED, "client weights by mirror descent on the target's loss"),
        ("meritfed-zo", MERITFED, "MeritFed from losses of the target alone, without its gradients"),
        ("collaborate", "beyond MeritFed", "every client is a target, with a matrix of learned weights"),
        ("fedadp", "Wu and Wang 2021", "weights by the angle to the global gradient"),
        ("tawt", "Chen et al. 2021", "weights by the cosine to the target's gradient"),
        ("primal-dual", "Primal–dual weighting", "client weights at the saddle point of an augmented Lagrangian"),
        ("sustain", "Khanduri et al. 2021", "client weights in one loop, with recursive momentum on both levels"),
        ("rfho", "Franceschi et al. 2017", "client weights by forward-mode differentiation through training"),
        ("afl", "Mohri et al. 2019", "minimax over mixtures of the clients, without a target"),
        ("exact-gd", "baseline", "exact hypergradient by a dense Hessian; small models"),
        ("fednest-weights", FEDNEST, "FedNest with client weights as outer variable"),
        ("fedlaw", "Li et al. 2023", "weights and shrinkage of the averaged model, learned on the target's rows"),
        ("fedawa", "Shi et al. 2025", "weights under which the clients' updates agree with their sum"),
        ("feddisco", "Ye et al. 2023", "weights by size and by how evenly the classes are distributed"),
        ("fedce", "Jiang et al. 2023", "weights by contribution: what updates and rows add to those of the others"),
    ),
    "collaboration.": (
        ("fedfomo", "Zhang et al. 2021", "every client mixes the downloaded models that lower its validation loss"),
        ("fedamp", "Huang et al. 2021", "similar models are drawn to each other by attentive messages"),
        ("apple", "Luo and Wu 2022", "every client learns how to combine the core models of all"),
        ("fedala", "Zhang et al. 2023", "every client mixes the global model into its own, entry by entry"),
        ("pfedgraph", "Ye et al. 2023b", "a collaboration graph by the cosine between updates and by sizes"),
        ("cobo", "Hashemi et al. 2024", "pairs of clients are linked if their gradients agree half-way"),
        ("dpfl", "Kharrat et al. 2025", "every client chooses collaborators greedily by its validation loss"),
        ("fedcollab", "Bao et al. 2023", "coalitions by divergence and size before training, then averaging in each"),
    ),
    "baselines.": (
        (
            "ditto",
            "Li et al. 2021",
            "averaged global model, proximal personal steps for the target or for every client",
        ),
        ("local-svrg", WEIGHTED_NODES, "variance-reduced local steps, averaged with fixed weights (Alg. 1)"),
        ("pfedme", "T Dinh et al. 2020", "Moreau envelopes, personal models for the target or for every client"),
        ("fedavg", "McMahan et al. 2017", "plain average of local updates"),
        ("fedprox", "Li et al. 2020", "average of local steps that a proximal term holds near the common model"),
        ("scaffold", "Karimireddy et al. 2020", "average of local steps corrected by control variates"),
        ("fedper", "Arivazhagan et al. 2019", "the last layers stay at the client, the others are averaged"),
        ("fedrep", "Collins et al. 2021", "an averaged representation below heads that clients fit first"),
        ("fedbn", "Li et al. 2021", "batch norm stays at the client, all other parameters are averaged"),
        ("apfl", "Deng et al. 2020", "a learned mixture of the common model and a model of the client's own"),
        ("ifca", "Ghosh et al. 2020", "several models; every client joins the one that fits its data best"),
        ("qffl", "Li et al. 2020", "clients with a larger loss count more, so that accuracies become even"),
        ("local-train", "baseline", "training on the target's own rows alone, or every client alone"),
        ("sgd-full", MERITFED, "parallel SGD over all clients"),
        ("sgd-ideal", MERITFED, "parallel SGD over the true friends, where they are known"),
        ("fixed-weights", "baseline", "gradient descent with weights that are given"),
    ),
    "baselines.fedopt": (
        ("fedavgm", "Hsu et al. 2019", "FedAvg with momentum at the server"),
        ("fedadam", "Reddi et al. 2021", "FedAvg with Adam at the server"),
        ("fedyogi", "Reddi et al. 2021", "FedAvg with Yogi at the server"),
    ),
    "robust": (
        ("krum", "Blanchard et al. 2017", "robust: the update nearest to most others"),
        ("multi-krum", "Blanchard et al. 2017", "robust: the mean of the updates nearest to most others"),
        ("coordinate-median", "Yin et al. 2018", "robust: the median of the updates per coordinate"),
        ("trimmed-mean", "Yin et al. 2018", "robust: the mean of the updates per coordinate, without extremes"),
        ("geometric-median", "Pillutla et al. 2022", "robust: the point of least distance to all updates"),
    ),
    "nested.fednest": (
        ("fednest", FEDNEST, "nested problems by global hypergradients and variance-reduced local steps"),
        ("fednest-sgd", FEDNEST, "FedNest with plain local steps in the inner problem"),
    ),
    "nested.lfednest": (
        ("lfednest", FEDNEST, "light FedNest: local hypergradients, plain local steps"),
        ("lfednest-svrg", FEDNEST, "light FedNest with variance-reduced local steps in the inner problem"),
        ("lfednest-nonalt", FEDNEST, "light FedNest where each client solves its own nested problem"),
    ),
    "nested.": (
        ("fedavg-s", "Hou et al. 2021", "simultaneous federated gradient descent–ascent"),
        ("soba", SOBA, "nested problems in one loop: inner variable, linear system and outer variable move together"),
        ("saba", SOBA, "SOBA with variance reduction over clients, by tables that stay at them"),
        ("ma-soba", "Chen et al. 2023", "SOBA with a moving average of the outer direction"),
        ("stocbio", "Ji et al. 2021", "inner steps, a Neumann series for the hypergradient, an outer step"),
        ("f2sa", "Kwon et al. 2023", "nested problems by first derivatives alone, with a growing penalty"),
        ("fedbio", FEDBIO, "nested problems by local steps on x, y and the linear system between them"),
        ("fedbioacc", FEDBIO, "FedBiO with recursive momentum, which corrects local steps"),
        ("simfbo", "Yang, Xiao and Ji 2023", "nested problems in one loop, with step sizes of the server's own"),
        ("fedmbo", "Huang, Zhang and Ji 2023", "nested problems by hypergradients from parallel chains of clients"),
    ),
    "submodels.": (
        ("fedsep-submodel", FEDSEP, "sub-models chosen by each client's data"),
        ("heterofl", "Diao et al. 2021", "sub-models of the first kernels"),
        ("federated-dropout", "Caldas et al. 2018", "sub-models of random kernels"),
        ("fedrolex", "Alam et al. 2022", "sub-models of a rolling window of kernels"),
        ("zerofl", "Qiu et al. 2022", "sparse local steps; the largest weights are uploaded"),
        ("feddst", "Bibikar et al. 2022", "sparse networks whose masks move"),
        ("flash", "Babakniya et al. 2022", "sparse networks, masks by sensitivity, then fixed"),
        ("feddf", "Lin et al. 2020", "networks of several sizes, fused by distillation"),
        ("ds-fl", "Itahara et al. 2020", "exchange of soft labels for public rows instead of networks"),
        ("fed-et", "Cho et al. 2022", "small networks teach a large one"),
        ("homogeneous", "baseline", "the same sub-model at all clients: smallest or largest"),
    ),
    "compressed.": (
        ("fedsep", FEDSEP, "communication through a sketch, training in the full space"),
        ("fedsep-redraw", FEDSEP, "FedSep with a new sketch in every round, and error feedback"),
        ("uncompressed", "baseline", "local updates sent whole, with a server step size"),
        ("top-k", "Stich et al. 2018", "the largest entries of local updates, with error feedback"),
        ("count-sketch", "Rothchild et al. 2020", "FetchSGD: count sketches up, top-k down"),
    ),
}
"""Name, paper and summary by module; below a package, which ends in a dot, every method has a module of its name."""

BILEVEL_GRID = {
    "method.step": (0.05, 0.02, 0.01),
    "method.system_step": (5e-4, 2e-4, 1e-4),
    "method.local_steps": (10, 20),
    "method.outer_step": (0.025, 0.02, 0.015),
}
PRIMAL_DUAL_GRID = {"method.step": (0.1, 0.01, 0.001), "method.outer_step": (0.1, 0.01, 0.001, 0.0001)}
"""That of the paper on primal–dual weighting, for all methods that it compares."""
GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "bilevel": BILEVEL_GRID,
    "bilevel-accelerated": BILEVEL_GRID,
    **dict.fromkeys(("primal-dual", "sustain", "rfho", "afl", "fednest-weights"), PRIMAL_DUAL_GRID),
    "fixed-weights": {"method.step": PRIMAL_DUAL_GRID["method.step"]},
    "ditto": {"method.penalty": (0.05, 0.1, 0.2)},
    "pfedme": {"method.penalty": (5.0, 10.0, 15.0)},
    "fedprox": {"method.penalty": (0.001, 0.01, 0.1, 1.0)},
    "qffl": {"method.fairness": (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0)},
}

SECURE = {
    **dict.fromkeys(("bilevel", "bilevel-accelerated", "fednest-weights", "sustain"), "yes"),
    **dict.fromkeys(("ditto", "local-svrg", "pfedme", "fedavg", "local-train", "sgd-full", "sgd-ideal"), "yes"),
    **dict.fromkeys(("fedprox", "scaffold", "fedavgm", "fedadam", "fedyogi"), "yes"),
    **dict.fromkeys(("fedper", "fedrep", "fedbn", "apfl", "qffl"), "yes"),
    **dict.fromkeys(("fednest", "fednest-sgd", "lfednest", "lfednest-svrg", "lfednest-nonalt", "fedavg-s"), "yes"),
    **dict.fromkeys(("soba", "saba", "ma-soba", "stocbio", "f2sa", "fedbio", "fedbioacc", "simfbo"), "yes"),
    **dict.fromkeys(("fedsep", "uncompressed", "fedala", "feddisco"), "yes"),
    "meritfed": 'solver = "lagged" or "projected"',
    "primal-dual": 'scalar = "client"',
}
"""The methods that need sums and single numbers only, as they are or with a setting; a test rehearses all of them."""

LEARNING = ("weights.", "collaboration.")
"""The families that learn whom to learn from."""
WITHOUT_WEIGHTS = ("fedala",)  # it has one weight per parameter, and none per client

METHODS: tuple[MethodEntry, ...] = tuple(
    MethodEntry(
        name,
        home + name.replace("-", "_") if home.endswith(".") else home,
        summary,
        paper=paper,
        learns_weights=home in LEARNING and name not in WITHOUT_WEIGHTS,
        grid=GRIDS.get(name, {}),
        secure=SECURE.get(name, "no"),
    )
    for home, methods in FAMILIES.items()
    for name, paper, summary in methods
)


def learns_weights(name: str) -> bool:
    """Whether one of coterie's own methods learns weights; others say so themselves, `Method.learns_weights`."""
    return any(entry.learns_weights for entry in METHODS if entry.name == name)


def method_entry(name: str) -> MethodEntry:
    """The entry of that name: coterie's own, or a plug-in's; an unknown one is an error that lists the nearest.

    Args:
        name: a registered name, package.module:factory, or file.py:factory.
    """
    return plugins.entry("method", name, METHODS, _outside)


@cache
def _outside(plugin: plugins.Plugin, factory: Callable[..., Any]) -> MethodEntry:
    """The entry of a plug-in."""
    about = getattr(factory, "about", None)
    if not isinstance(about, About):
        factory, about = validated(factory), About()
    make = plugins.returning(factory, Method, f"run.method = {plugin.name}", "mark the factory with @validated.")
    return MethodEntry(plugin.name, "", plugins.summary(factory), plugin.source, make, **about._asdict())
