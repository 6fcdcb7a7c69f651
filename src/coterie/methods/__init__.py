"""One published idea a file."""

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
from coterie.methods.compressed.two_layer import by_objective, two_layer
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
from coterie.problems.base import View

__all__ = [
    "Method",
    "View",
    "afl",
    "bilevel",
    "bilevel_accelerated",
    "by_objective",
    "collaborate",
    "coordinate_median",
    "count_sketch",
    "ditto",
    "ds_fl",
    "exact_gd",
    "fed_et",
    "fedadp",
    "fedavg",
    "fedavg_s",
    "feddf",
    "feddst",
    "federated_dropout",
    "fednest",
    "fednest_sgd",
    "fedrolex",
    "fedsep",
    "fedsep_redraw",
    "fedsep_submodel",
    "fixed_weights",
    "flash",
    "geometric_median",
    "heterofl",
    "homogeneous",
    "krum",
    "lfednest",
    "lfednest_nonalt",
    "lfednest_svrg",
    "local_svrg",
    "local_train",
    "meritfed",
    "meritfed_zo",
    "multi_krum",
    "pfedme",
    "primal_dual",
    "rfho",
    "sgd_full",
    "sgd_ideal",
    "sustain",
    "tawt",
    "top_k",
    "trimmed_mean",
    "two_layer",
    "uncompressed",
    "zerofl",
]
