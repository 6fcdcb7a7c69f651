"""The advice of a study: the same page as with files, while every partner's rows stay where they are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coterie import machine
from coterie.advise.advise import Effort, Network, Say, advise_on
from coterie.advise.mixtures import PartnersLeft
from coterie.errors import RunError, UsageError
from coterie.experiment.config import Config
from coterie.problems.base import Context
from coterie.problems.sites.agreement import Agreement
from coterie.problems.sites.folder import Study
from coterie.problems.sites.problem import load_study

LEFT = "it did not answer during the advice"


def advise_once(
    config: Config,
    study: Study,
    agreement: Agreement,
    network: Network,
    folder: Path,
    effort: Effort = Effort(),  # noqa: B008
    *,
    measure: str = "auto",
    say: Say = lambda text: None,
    force: bool = False,
) -> dict[str, Any]:
    """With whom should the coordinator train? `PartnersLeft` where a site did not answer.

    Args:
        config: run, problem study and method.
        study: the study.
        agreement: what its sites agreed on.
        network: reaches the sites.
        folder: where advice.json, model/ and training/ go.
        effort: how much is done.
        measure: what to decide by.
        say: called with progress messages.
        force: empty an existing folder first.
    """
    settings = {key: config.problem[key] for key in ("model", "loss", "balance", "l2")}
    device = machine.checked_device(config.run.device, config.run.dtype)
    context = Context(config.run.seed, getattr(torch, config.run.dtype), device)
    data = load_study(context, study, agreement, orders=effort.repeats, **settings)
    return advise_on(data, config, folder, effort, measure=measure, say=say, force=force, network=network)


def without(agreement: Agreement, gone: list[int]) -> Agreement:
    """What the others agreed on; means and categories stay as they are.

    Args:
        agreement: of all sites.
        gone: the numbers of those that left.
    """
    names = [agreement.sites[k].name for k in gone]
    rest = tuple(site for k, site in enumerate(agreement.sites) if k not in gone)
    if not rest:
        raise RunError(f"no site is left: {', '.join(names)} did not answer. Look at: coterie study status.")
    return replace(agreement, sites=rest, left_out={**agreement.left_out, **dict.fromkeys(names, LEFT)})


def advise_trial(
    config: Config,
    folder: Path,
    effort: Effort,
    *,
    measure: str = "auto",
    say: Say = lambda text: None,
    force: bool = False,
) -> dict[str, Any]:
    """The advice of a study on one machine: every file is read by itself, and answers orders only.

    Args:
        config: of problem study, with the pattern of the sites' files.
        folder: where the advice goes.
        effort: how much is done.
        measure: what to decide by.
        say: called with progress messages.
        force: empty an existing folder first.
    """
    from coterie.engines.embedded import OPEN as ADMITTED
    from coterie.engines.embedded import agreed, examined_sites, own_node, plan_of
    from coterie.federation.remote import Address, InProcess, Node, Transport
    from coterie.problems.sites.holding import Choices, prepared_node

    if not config.problem["sites"]:
        raise UsageError("an advice on one machine needs the sites' files; add --sites 'sites/*.csv'.")
    study = Study.read(config.problem["folder"])
    sites = examined_sites(study, config.problem["sites"], Choices(unseen=config.problem["unseen"]))
    agreement = agreed(study, sites)
    agreement.write(study.folder)

    def network(config: Config, problem: Any) -> Transport:
        plan, nodes = plan_of(config, agreement), dict[Address, Node]()
        for k, present in enumerate(agreement.sites):
            tables = sites[present.name].tables
            assert tables is not None
            nodes[present.name] = prepared_node(tables, study.terms, plan, k, policy=ADMITTED)
        return InProcess({**nodes, **own_node(problem, len(agreement.sites))})

    while True:
        try:
            return advise_once(config, study, agreement, network, folder, effort, measure=measure, say=say, force=force)
        except PartnersLeft as gone:
            agreement, force = without(agreement, gone.partners), True
            say(f"{', '.join(agreement.left_out)} left; the advice begins again with the others")
