"""One published idea a file."""

from coterie.methods.afl import afl
from coterie.methods.base import Method
from coterie.methods.bilevel import bilevel
from coterie.methods.bilevel_accelerated import bilevel_accelerated
from coterie.methods.ditto import ditto
from coterie.methods.exact_gd import exact_gd
from coterie.methods.fedavg import fedavg
from coterie.methods.fedavg_s import fedavg_s
from coterie.methods.fednest import fednest, fednest_sgd
from coterie.methods.fixed_weights import fixed_weights
from coterie.methods.lfednest import lfednest, lfednest_nonalt, lfednest_svrg
from coterie.methods.local_svrg import local_svrg
from coterie.methods.local_train import local_train
from coterie.methods.meritfed import meritfed
from coterie.methods.pfedme import pfedme
from coterie.methods.primal_dual import primal_dual
from coterie.methods.rfho import rfho
from coterie.methods.sustain import sustain
from coterie.problems.view import View

__all__ = [
    "Method",
    "View",
    "afl",
    "bilevel",
    "bilevel_accelerated",
    "ditto",
    "exact_gd",
    "fedavg",
    "fedavg_s",
    "fednest",
    "fednest_sgd",
    "fixed_weights",
    "lfednest",
    "lfednest_nonalt",
    "lfednest_svrg",
    "local_svrg",
    "local_train",
    "meritfed",
    "pfedme",
    "primal_dual",
    "rfho",
    "sustain",
]
