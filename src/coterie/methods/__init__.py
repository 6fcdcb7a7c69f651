"""One published idea a file."""

from coterie.methods.afl import afl
from coterie.methods.base import Method
from coterie.methods.bilevel import bilevel
from coterie.methods.bilevel_accelerated import bilevel_accelerated
from coterie.methods.collaborate import collaborate
from coterie.methods.count_sketch import count_sketch
from coterie.methods.ditto import ditto
from coterie.methods.ds_fl import ds_fl
from coterie.methods.exact_gd import exact_gd
from coterie.methods.fed_et import fed_et
from coterie.methods.fedadp import fedadp
from coterie.methods.fedavg import fedavg
from coterie.methods.fedavg_s import fedavg_s
from coterie.methods.feddf import feddf
from coterie.methods.feddst import feddst
from coterie.methods.federated_dropout import federated_dropout
from coterie.methods.fednest import fednest, fednest_sgd
from coterie.methods.fedrolex import fedrolex
from coterie.methods.fedsep import fedsep
from coterie.methods.fedsep_redraw import fedsep_redraw
from coterie.methods.fedsep_submodel import fedsep_submodel
from coterie.methods.fixed_weights import fixed_weights
from coterie.methods.flash import flash
from coterie.methods.heterofl import heterofl
from coterie.methods.homogeneous import homogeneous
from coterie.methods.lfednest import lfednest, lfednest_nonalt, lfednest_svrg
from coterie.methods.local_svrg import local_svrg
from coterie.methods.local_train import local_train
from coterie.methods.meritfed import meritfed
from coterie.methods.meritfed_zo import meritfed_zo
from coterie.methods.pfedme import pfedme
from coterie.methods.primal_dual import primal_dual
from coterie.methods.rfho import rfho
from coterie.methods.robust import coordinate_median, geometric_median, krum, multi_krum, trimmed_mean
from coterie.methods.sgd_full import sgd_full
from coterie.methods.sgd_ideal import sgd_ideal
from coterie.methods.sustain import sustain
from coterie.methods.tawt import tawt
from coterie.methods.top_k import top_k
from coterie.methods.two_layer import by_objective, two_layer
from coterie.methods.uncompressed import uncompressed
from coterie.methods.zerofl import zerofl
from coterie.problems.view import View

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
