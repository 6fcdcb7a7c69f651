"""All methods, in one tuple. Command line, configuration, conformance tests and docs follow from it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from coterie.errors import unknown
from coterie.methods.base import Method
from coterie.methods.baselines.ditto import ditto
from coterie.methods.baselines.fedavg import fedavg
from coterie.methods.baselines.fixed_weights import fixed_weights
from coterie.methods.baselines.local_svrg import local_svrg
from coterie.methods.baselines.local_train import local_train
from coterie.methods.baselines.pfedme import pfedme
from coterie.methods.baselines.sgd_full import sgd_full
from coterie.methods.baselines.sgd_ideal import sgd_ideal
from coterie.methods.compressed.count_sketch import count_sketch
from coterie.methods.compressed.fedsep import fedsep
from coterie.methods.compressed.fedsep_redraw import fedsep_redraw
from coterie.methods.compressed.top_k import top_k
from coterie.methods.compressed.uncompressed import uncompressed
from coterie.methods.nested.fedavg_s import fedavg_s
from coterie.methods.nested.fednest import fednest, fednest_sgd
from coterie.methods.nested.lfednest import lfednest, lfednest_nonalt, lfednest_svrg
from coterie.methods.robust import coordinate_median, geometric_median, krum, multi_krum, trimmed_mean
from coterie.methods.submodels.ds_fl import ds_fl
from coterie.methods.submodels.fed_et import fed_et
from coterie.methods.submodels.feddf import feddf
from coterie.methods.submodels.feddst import feddst
from coterie.methods.submodels.federated_dropout import federated_dropout
from coterie.methods.submodels.fedrolex import fedrolex
from coterie.methods.submodels.fedsep_submodel import fedsep_submodel
from coterie.methods.submodels.flash import flash
from coterie.methods.submodels.heterofl import heterofl
from coterie.methods.submodels.homogeneous import homogeneous
from coterie.methods.submodels.zerofl import zerofl
from coterie.methods.weights.afl import afl
from coterie.methods.weights.bilevel import bilevel
from coterie.methods.weights.bilevel_accelerated import bilevel_accelerated
from coterie.methods.weights.collaborate import collaborate
from coterie.methods.weights.exact_gd import exact_gd
from coterie.methods.weights.fedadp import fedadp
from coterie.methods.weights.meritfed import meritfed
from coterie.methods.weights.meritfed_zo import meritfed_zo
from coterie.methods.weights.primal_dual import primal_dual
from coterie.methods.weights.rfho import rfho
from coterie.methods.weights.sustain import sustain
from coterie.methods.weights.tawt import tawt

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


class MethodEntry(NamedTuple):
    """A method: its name, factory, paper, what it is, whether it learns weights, and its paper's grid for `tune`."""

    name: str
    make: Callable[..., Method]
    paper: str
    summary: str
    learns_weights: bool = False
    grid: Mapping[str, tuple[Any, ...]] = MappingProxyType({})


METHODS: tuple[MethodEntry, ...] = (
    MethodEntry("bilevel", bilevel, WEIGHTED_NODES, "weights by hypergradients (Alg. 3)", True, BILEVEL_GRID),
    MethodEntry(
        "bilevel-accelerated",
        bilevel_accelerated,
        WEIGHTED_NODES,
        "accelerated, for convex F (Alg. 2)",
        True,
        BILEVEL_GRID,
    ),
    MethodEntry(
        "ditto",
        ditto,
        "Li et al. 2021",
        "global model, proximal personal steps at the target, or at everyone",
        grid={"method.penalty": (0.05, 0.1, 0.2)},
    ),
    MethodEntry("local-svrg", local_svrg, WEIGHTED_NODES, "variance-reduced averaging with fixed weights (Alg. 1)"),
    MethodEntry(
        "pfedme",
        pfedme,
        "T Dinh et al. 2020",
        "Moreau envelopes, personalised at the target, or at everyone",
        grid={"method.penalty": (5.0, 10.0, 15.0)},
    ),
    MethodEntry("fedavg", fedavg, "McMahan et al. 2017", "plain averaging of local walks"),
    MethodEntry("local-train", local_train, "baseline", "the target alone, on its own rows, or everyone alone"),
    MethodEntry("meritfed", meritfed, MERITFED, "mirror descent on the target's loss", True),
    MethodEntry("meritfed-zo", meritfed_zo, MERITFED, "the same by losses alone, without the target's gradients", True),
    MethodEntry("collaborate", collaborate, "beyond MeritFed", "every client a target: a matrix of weights", True),
    MethodEntry("fedadp", fedadp, "Wu and Wang 2021", "weights by the angle to the global gradient", True),
    MethodEntry("tawt", tawt, "Chen et al. 2021", "weights by the cosine to the target's gradient", True),
    MethodEntry("sgd-full", sgd_full, MERITFED, "parallel SGD over everybody"),
    MethodEntry("sgd-ideal", sgd_ideal, MERITFED, "parallel SGD over the true friends, where they are known"),
    MethodEntry("primal-dual", primal_dual, "Primal–dual weighting", "saddle point of an augmented Lagrangian", True),
    MethodEntry("sustain", sustain, "Khanduri et al. 2021", "one loop, recursive momentum on both levels", True),
    MethodEntry("rfho", rfho, "Franceschi et al. 2017", "forward-mode derivative of the training itself", True),
    MethodEntry("afl", afl, "Mohri et al. 2019", "minimax over mixtures of the clients", True),
    MethodEntry("exact-gd", exact_gd, "baseline", "exact hypergradient by a dense Hessian; small models", True),
    MethodEntry("krum", krum, "Blanchard et al. 2017", "robust: the walk nearest to most others"),
    MethodEntry("multi-krum", multi_krum, "Blanchard et al. 2017", "robust: the mean of the walks nearest to most"),
    MethodEntry("coordinate-median", coordinate_median, "Yin et al. 2018", "robust: the median by coordinate"),
    MethodEntry("trimmed-mean", trimmed_mean, "Yin et al. 2018", "robust: the mean by coordinate without extremes"),
    MethodEntry("geometric-median", geometric_median, "Pillutla et al. 2022", "robust: least distance to all walks"),
    MethodEntry("fixed-weights", fixed_weights, "baseline", "gradient descent with weights that are given"),
    MethodEntry("fednest", fednest, FEDNEST, "nested problems by global hypergradients and corrected walks", True),
    MethodEntry("fednest-sgd", fednest_sgd, FEDNEST, "FedNest with plain local walks in the inner problem"),
    MethodEntry("lfednest", lfednest, FEDNEST, "light: local hypergradients, plain local walks"),
    MethodEntry("lfednest-svrg", lfednest_svrg, FEDNEST, "light, with corrected walks in the inner problem"),
    MethodEntry("lfednest-nonalt", lfednest_nonalt, FEDNEST, "each client solves its own nested problem"),
    MethodEntry("fedavg-s", fedavg_s, "Hou et al. 2021", "simultaneous federated gradient descent–ascent"),
    MethodEntry("fedsep-submodel", fedsep_submodel, FEDSEP, "sub-models that suit a client's data"),
    MethodEntry("heterofl", heterofl, "Diao et al. 2021", "sub-models of the first kernels"),
    MethodEntry("federated-dropout", federated_dropout, "Caldas et al. 2018", "sub-models of random kernels"),
    MethodEntry("fedrolex", fedrolex, "Alam et al. 2022", "sub-models of a rolling window of kernels"),
    MethodEntry("zerofl", zerofl, "Qiu et al. 2022", "sparse steps, the largest weights uploaded"),
    MethodEntry("feddst", feddst, "Bibikar et al. 2022", "sparse networks whose masks move"),
    MethodEntry("flash", flash, "Babakniya et al. 2022", "sparse networks, masks by sensitivity, then fixed"),
    MethodEntry("feddf", feddf, "Lin et al. 2020", "networks of several sizes, fused by distillation"),
    MethodEntry("ds-fl", ds_fl, "Itahara et al. 2020", "soft labels of public rows instead of networks"),
    MethodEntry("fed-et", fed_et, "Cho et al. 2022", "small networks teach a large one"),
    MethodEntry("homogeneous", homogeneous, "baseline", "the same sub-model at all clients: smallest or largest"),
    MethodEntry("fedsep", fedsep, FEDSEP, "two layers: talks through a sketch, learns in the full space"),
    MethodEntry("fedsep-redraw", fedsep_redraw, FEDSEP, "FedSep with a new sketch every round, and error feedback"),
    MethodEntry("uncompressed", uncompressed, "baseline", "local walks sent whole, with a server step"),
    MethodEntry("top-k", top_k, "Stich et al. 2018", "the largest entries of local walks, with error feedback"),
    MethodEntry("count-sketch", count_sketch, "Rothchild et al. 2020", "FetchSGD: count sketches up, top-k down"),
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
