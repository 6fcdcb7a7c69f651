"""The engine `embedded`: every client at a node of its own in this process, through real bytes but without a network.

A study on one machine runs on it: each site's file is read by itself, and nothing but messages leaves its node.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.errors import UsageError
from coterie.experiment.build import node_of
from coterie.experiment.config import Config
from coterie.experiment.run import Watch, resume, run
from coterie.federation.remote import PERMISSIVE, Address, InProcess, Node, NodePolicy, Store, Transport, node_for
from coterie.problems.files.findings import BadFiles, Finding
from coterie.problems.files.tables import expand, names_of
from coterie.problems.sites.agreement import Agreement, agree
from coterie.problems.sites.folder import Study
from coterie.problems.sites.holding import Choices, Examined, Plan, examine, prepared_node, raw_node
from coterie.problems.sites.terms import own_tables

MEMORY = "clients"
OPEN = NodePolicy(seconds=0.0)  # orders are answered in whatever thread the run is in


def launch(
    config: Config, folder: Path, watch: Watch, *, force: bool, resume: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Run or resume a configuration with a node per client in this process; the summary.

    Args:
        config: the resolved configuration.
        folder: the result folder.
        watch: gives each run its observer.
        force: whether results in the folder may be replaced.
        resume: whether the run in the folder is resumed.
        options: not used.
    """
    if config.run.problem == "study":
        return _study(config, folder, watch, force=force, again=resume)

    def network(config: Config, problem: Any) -> Transport:
        nodes = {k: node_of(config, (k,), folder=folder / MEMORY / f"client-{k}") for k in range(problem.clients)}
        return InProcess(dict(nodes.items()))

    return _run(config, folder, watch, network, force=force, again=resume)


def _run(config: Config, folder: Path, watch: Watch, network: Any, *, force: bool, again: bool) -> dict[str, Any]:
    return resume(folder, watch, network=network) if again else run(config, folder, watch, force=force, network=network)


def _study(config: Config, folder: Path, watch: Watch, *, force: bool, again: bool) -> dict[str, Any]:
    if not config.problem["sites"]:
        raise UsageError(
            "problem study on run.engine = embedded is a trial: name the sites' files, "
            "coterie run --study DIR --sites 'sites/*.csv', or leave the engine out."
        )
    study = Study.read(config.problem["folder"])
    sites = examined_sites(study, config.problem["sites"], Choices(unseen=config.problem["unseen"]))
    if not config.problem["agreement"]:
        agreement = agreed(study, sites)
        agreement.write(study.folder)
        config = replace(config, problem={**config.problem, "agreement": agreement.digest})

    def network(config: Config, problem: Any) -> Transport:
        plan = plan_of(config, Agreement.read(study.folder, config.problem["agreement"]))
        nodes: dict[Address, Node] = {}
        for k, (name, site) in enumerate(sites.items()):
            assert site.tables is not None
            store = Store(folder / MEMORY / name)
            nodes[name] = prepared_node(site.tables, study.terms, plan, k, policy=OPEN, store=store)
        return InProcess({**nodes, **own_node(problem, len(sites))})

    return _run(config, folder, watch, network, force=force, again=again)


def examined_sites(study: Study, pattern: str, choices: Choices) -> dict[str, Examined]:
    """The files that stand for sites in a trial, each read by itself; all their faults end it.

    Args:
        study: the study.
        pattern: of the files.
        choices: what every site decides.
    """
    paths, goal = expand(pattern, str(study.data))
    names = [Path(name).stem for name in names_of([*paths, goal])[:-1]]
    found = {name: examine(path, study.terms, choices) for name, path in zip(names, paths, strict=True)}
    faults = [Finding(name, fault.what, fault.remedy) for name, site in found.items() for fault in site.faults]
    if faults:
        raise BadFiles(faults, len(found))
    return found


def agreed(study: Study, sites: dict[str, Examined]) -> Agreement:
    """What the files of a trial agree on, by the exchanges of a real study."""
    nodes: dict[Address, Node] = {}
    for k, (name, site) in enumerate(sites.items()):
        assert site.tables is not None
        nodes[name] = raw_node(site.tables, k, policy=OPEN)
    return agree(InProcess(nodes), study.terms, list(sites), own_tables(study.data, study.terms))


def plan_of(config: Config, agreement: Agreement) -> Plan:
    """What sites are told of the training.

    Args:
        config: the configuration of the run.
        agreement: what was agreed.
    """
    settings = {key: config.problem[key] for key in ("model", "loss", "l2", "balance", "everyone", "own", "test")}
    scaling = "own" if agreement.scaling == "own" else "common"
    return Plan(agreement.preparation, **settings, dtype=config.run.dtype, seed=config.run.seed, scaling=scaling)


def own_node(problem: Any, client: int) -> dict[Address, Node]:
    """The node of the coordinator's own rows, the last client; none where none of them train."""
    if problem.clients == client:
        return {}
    return {"(here)": node_for(problem, (client,), policy=PERMISSIVE, shares_memory=True)}
