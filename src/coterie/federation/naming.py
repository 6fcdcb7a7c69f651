"""The names of works: one table and one resolver, for ledgers, orders to nodes, settings and checkpoints.

A built-in work is called family/verb-noun, whatever file it is in: the registry of methods and `FAMILIES` say which
module defines a family, so that a node imports that module only, and only if it is admitted. A work of your own has
such a name too, or it is called module:function. No name leads to the import of a module that is neither coterie's own
nor admitted.
"""

import re
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from typing import Any

FAMILIES = {
    "shared": "coterie.methods.shared.works",
    "hessian": "coterie.methods.shared.hessian",
    "mirror": "coterie.methods.weights.mirror",
    "fednest": "coterie.methods.nested.works",
    "submodels": "coterie.methods.submodels.carving",
    "two-layer": "coterie.methods.compressed.two_layer",
    "advise": "coterie.advise.screening",
    "contributions": "coterie.advise.contributions",
    "files": "coterie.problems.files.prepare",
    "file-checks": "coterie.problems.files.faults",
    "private-files": "coterie.problems.files.private",
    "measures": "coterie.problems.tasks.personal",
}
"""Which module defines the works of a family that is not called after a method; those of a method are in its file."""

FORMER = {
    "coterie.experiment.contributions:set_gradients": "contributions/set-gradients",
    "coterie.experiment.screening:arm_gradients": "advise/arm-gradients",
    "coterie.experiment.screening:fold_gradients": "advise/fold-gradients",
    "coterie.experiment.screening:held_out_errors": "advise/held-out-errors",
    "coterie.methods.afl:loss_and_gradient": "afl/loss-and-gradient",
    "coterie.methods.bilevel:merit": "bilevel/merit",
    "coterie.methods.carving:learn": "submodels/learn",
    "coterie.methods.collaborate:validation_gradient": "collaborate/validation-gradient",
    "coterie.methods.collaborate:walk_and_gradient": "collaborate/steps-and-gradient",
    "coterie.methods.count_sketch:sketched_walk": "count-sketch/sketched-steps",
    "coterie.methods.ditto:both_walks": "ditto/both-models",
    "coterie.methods.ditto:proximal_walk": "ditto/personal-model",
    "coterie.methods.ds_fl:learn_and_tell": "ds-fl/learn-and-predict",
    "coterie.methods.feddst:dynamic_steps": "feddst/dynamic-steps",
    "coterie.methods.fednest_weights:corrected_walk": "fednest-weights/corrected-steps",
    "coterie.methods.fednest_weights:own_hessian_product": "fednest-weights/hessian-product",
    "coterie.methods.fednest_weights:slope": "fednest-weights/slope",
    "coterie.methods.fedsep:sketch_decode": "fedsep/sketch-decode",
    "coterie.methods.fedsep:sketch_encode": "fedsep/sketch-encode",
    "coterie.methods.fedsep_redraw:redrawn_round": "fedsep-redraw/client-round",
    "coterie.methods.fedsep_submodel:decode_and_learn": "fedsep-submodel/decode-and-learn",
    "coterie.methods.flash:fixed_steps": "flash/fixed-steps",
    "coterie.methods.flash:sensitivities": "flash/sensitivities",
    "coterie.methods.hessian:weighted_products": "hessian/weighted-products",
    "coterie.methods.local_svrg:begin_model": "local-svrg/begin-model",
    "coterie.methods.local_svrg:begin_system": "local-svrg/begin-system",
    "coterie.methods.local_svrg:output_average": "local-svrg/output-average",
    "coterie.methods.local_svrg:walk_alone": "local-svrg/steps-alone",
    "coterie.methods.local_svrg:walk_model": "local-svrg/model-steps",
    "coterie.methods.local_svrg:walk_system": "local-svrg/system-steps",
    "coterie.methods.local_train:walk_on": "local-train/own-steps",
    "coterie.methods.mirror:goal_gradient": "mirror/goal-gradient",
    "coterie.methods.mirror:goal_losses": "mirror/goal-losses",
    "coterie.methods.mirror:goal_model": "mirror/goal-model",
    "coterie.methods.nested_works:hessian_product": "fednest/hessian-product",
    "coterie.methods.nested_works:hypergradient": "fednest/hypergradient",
    "coterie.methods.nested_works:inner_gradient": "fednest/inner-gradient",
    "coterie.methods.nested_works:inner_sgd_walk": "fednest/inner-sgd-steps",
    "coterie.methods.nested_works:inner_svrg_walk": "fednest/inner-svrg-steps",
    "coterie.methods.nested_works:local_nested_walk": "fednest/local-nested-steps",
    "coterie.methods.nested_works:local_outer_walk": "fednest/local-outer-steps",
    "coterie.methods.nested_works:outer_svrg_walk": "fednest/outer-svrg-steps",
    "coterie.methods.nested_works:outer_y_gradient": "fednest/outer-y-gradient",
    "coterie.methods.nested_works:simultaneous_walk": "fednest/simultaneous-steps",
    "coterie.methods.pfedme:both_points": "pfedme/both-models",
    "coterie.methods.pfedme:moreau_walk": "pfedme/moreau-steps",
    "coterie.methods.pfedme:personal_model": "pfedme/personal-model",
    "coterie.methods.primal_dual:gradient_alone": "primal-dual/gradient-alone",
    "coterie.methods.primal_dual:gradient_and_product": "primal-dual/gradient-and-product",
    "coterie.methods.sustain:combined_gradient": "sustain/combined-gradient",
    "coterie.methods.sustain:slope": "sustain/slope",
    "coterie.methods.sustain:weighted_products": "sustain/weighted-products",
    "coterie.methods.top_k:sparse_walk": "top-k/sparse-steps",
    "coterie.methods.two_layer:client_round": "two-layer/client-round",
    "coterie.methods.two_layer:descend": "two-layer/descend",
    "coterie.methods.two_layer:implicit": "two-layer/implicit",
    "coterie.methods.works:goal_gradient": "shared/goal-gradient",
    "coterie.methods.works:goal_loss_and_gradient": "shared/goal-loss-and-gradient",
    "coterie.methods.works:gradient": "shared/gradient",
    "coterie.methods.works:sgd_walk": "shared/local-steps",
    "coterie.methods.zerofl:sparse_steps": "zerofl/sparse-steps",
    "coterie.problems.files.prepare:category_counts": "files/category-counts",
    "coterie.problems.files.prepare:column_moments": "files/column-moments",
    "coterie.problems.files.prepare:dictionary_size": "files/dictionary-size",
    "coterie.problems.personal:judged": "measures/judged",
}
"""What the works were called up to version 0.1: understood for one version in ledgers, checkpoints and orders."""

_WORD = "[a-z0-9]+(-[a-z0-9]+)*"
STABLE = re.compile(f"{_WORD}/{_WORD}", re.ASCII)
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_TABLE: dict[str, Any] = {}


class UnknownWork(LookupError):
    """A name that is no work's, or of a work that is not admitted, and why."""


def register(name: str, function: Callable[..., Any]) -> None:
    """Enter a work in the table; a name that is malformed, taken or reserved for coterie is refused."""
    module = function.__module__
    if "/" in name:
        if not STABLE.fullmatch(name):
            raise TypeError(f"{name!r} is no name of a work; write family/verb-noun, in lowercase with hyphens")
        family = name.partition("/")[0]
        if (home := home_of(family)) not in (None, module):
            raise TypeError(f"{name}: the family {family!r} belongs to {home}; choose another one")
    known = _TABLE.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (module, function.__qualname__):
        raise TypeError(f"{module} calls a work {name}, and so does {known.__module__}; rename one of them")
    _TABLE[name] = function


def home_of(family: str) -> str | None:
    """The module of coterie that defines the works of a family; None where it is somebody else's."""
    if family in FAMILIES:
        return FAMILIES[family]
    return _families_of_methods().get(family)


@cache
def _families_of_methods() -> dict[str, str]:
    """By method, its module; looked up when it is needed, because methods come after the federation."""
    from coterie.methods.registry import METHODS

    return {entry.name: f"coterie.methods.{entry.home}" for entry in METHODS}


def current(name: str) -> str:
    """The name that a work has today, given that or a former one."""
    return FORMER.get(name, name)


def find(name: str, modules: Collection[str] | None = None) -> Any:
    """The work of that name.

    Args:
        name: family/verb-noun or module:function; a former name is understood.
        modules: the modules whose works are admitted ("package.*" stands for all modules of a package); they are
            imported where needed. None: coterie's own, and whatever this process has defined.
    """
    name = current(name)
    family, slash, _ = name.partition("/")
    module, colon, attribute = name.partition(":")
    if slash and STABLE.fullmatch(name):
        if (home := home_of(family)) is not None:
            _load(home, modules)
        elif name not in _TABLE:  # one of the operator's own modules may define it
            for own in modules or ():
                if not own.endswith(".*"):
                    _load(own, modules)
    elif colon and DOTTED.fullmatch(module) and DOTTED.fullmatch(attribute):
        if modules is not None:
            _load(module, modules)
    else:
        raise UnknownWork(f"{name[:80]!r} is not of the form family/verb-noun or module:function")
    found = _TABLE.get(name)
    if found is None:
        raise UnknownWork(f"{name} is no work that is known here; is the same version of coterie installed?")
    if modules is not None:
        _check(found.__module__, modules)
    return found


def _load(module: str, modules: Collection[str] | None) -> None:
    if modules is not None:
        _check(module, modules)
    try:
        import_module(module)
    except ImportError:
        raise UnknownWork(f"there is no {module} here; is the same version of coterie installed?") from None


def _check(module: str, modules: Collection[str]) -> None:
    if not admits(modules, module):
        raise UnknownWork(f"{module} is not among the modules that are admitted here")


def admits(modules: Collection[str], module: str) -> bool:
    """Whether a module is among those listed; "package.*" stands for all modules below a package."""
    return module in modules or any(entry.endswith(".*") and module.startswith(entry[:-1]) for entry in modules)
