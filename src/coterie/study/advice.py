"""The advice of a study: the same code as with files, in one exchange; every partner's rows stay where they are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coterie.advise.advise import Mine, Partner, Say, advise_on, ask, mine_of
from coterie.engines.embedded import plan_of
from coterie.errors import UsageError
from coterie.experiment.build import run_name, using_threads
from coterie.experiment.config import Config
from coterie.federation import Federation, Stack
from coterie.federation.remote import Policy, RemoteEngine, Transport
from coterie.problems.sites.agreement import Agreement
from coterie.problems.sites.folder import Study
from coterie.problems.sites.holding import Plan
from coterie.problems.sites.terms import own_tables

LONGEST_RUN = 64  # letters and digits by which nodes know a run
SILENT = "it did not answer"


def own_rows(study: Study) -> Mine:
    """The coordinator's rows as they stand.

    Args:
        study: the study.
    """
    return mine_of(own_tables(study.data, study.terms), study.terms.missing)


def advice_plan(config: Config, study: Study, agreement: Agreement) -> Plan:
    """What sites are told: the coordinator's columns, words and classes; every site keeps its rows as they stand.

    Args:
        config: of problem study.
        study: the study.
        agreement: what its sites agreed on.
    """
    return plan_of(config, agreement)._replace(preparation=own_rows(study).prepared.as_dict(), scaling="none")


def advise_once(
    config: Config,
    study: Study,
    agreement: Agreement,
    transport: Transport,
    folder: Path,
    *,
    measure: str = "auto",
    cautious: bool = False,
    say: Say = lambda text: None,
    force: bool = False,
) -> dict[str, Any]:
    """With whom should the coordinator train? A site that does not answer, or refuses, is left out and named.

    Args:
        config: run and problem study.
        study: the study.
        agreement: what its sites agreed on.
        transport: reaches the sites.
        folder: where advice.json and model/ go.
        measure: what to decide by.
        cautious: use partners' models only where they are better by a standard error.
        say: called with progress messages.
        force: empty an existing folder first.
    """
    mine, names = own_rows(study), [site.name for site in agreement.sites]
    labels = torch.zeros(1, dtype=torch.int64 if mine.goal.classes else torch.float32)
    counts = torch.tensor([site.rows for site in agreement.sites])
    form = Stack((torch.zeros(1, mine.inputs.shape[1]), labels), torch.zeros_like(counts), torch.ones_like(counts))
    waiting = Policy(config.federation.timeout, config.federation.retries, 1, config.federation.patience)
    engine = RemoteEngine(transport, None, form, run=f"advice{run_name(config)}"[:LONGEST_RUN], policy=waiting)
    engine.connect()
    fed = replace(Federation.on(engine, book=engine.book), ids=torch.tensor(engine.present))
    say(f"asking {len(names)} sites for their models")
    sent = ask(fed, mine)
    partners = [
        Partner(name, site.rows, sent.get(k), "" if k in sent else SILENT)
        for k, (name, site) in enumerate(zip(names, agreement.sites, strict=True))
    ]
    notes = [f"{name} takes no part: {reason}" for name, reason in agreement.left_out.items()]
    options: dict[str, Any] = {"measure": measure, "cautious": cautious, "say": say, "force": force}
    with using_threads(1):
        return advise_on(mine, partners, config, folder, notes=notes, **options).advice


def advise_trial(
    config: Config,
    folder: Path,
    *,
    measure: str = "auto",
    cautious: bool = False,
    say: Say = lambda text: None,
    force: bool = False,
) -> dict[str, Any]:
    """The advice of a study on one machine: every file is read by itself, and answers orders only.

    Args:
        config: of problem study, with the pattern of the sites' files.
        folder: where the advice goes.
        measure: what to decide by.
        cautious: as for `advise_once`.
        say: called with progress messages.
        force: empty an existing folder first.
    """
    from coterie.engines.embedded import OPEN as ADMITTED
    from coterie.engines.embedded import agreed, examined_sites
    from coterie.federation.remote import Address, InProcess, Node
    from coterie.problems.sites.holding import Choices, prepared_node

    if not config.problem["sites"]:
        raise UsageError("an advice on one machine needs the sites' files; add --sites 'sites/*.csv'.")
    study = Study.read(config.problem["folder"])
    sites = examined_sites(study, config.problem["sites"], Choices(unseen=config.problem["unseen"]))
    agreement = agreed(study, sites)
    agreement.write(study.folder)
    plan, nodes = advice_plan(config, study, agreement), dict[Address, Node]()
    for k, present in enumerate(agreement.sites):
        tables = sites[present.name].tables
        assert tables is not None
        nodes[present.name] = prepared_node(tables, study.terms, plan, k, policy=ADMITTED)
    options: dict[str, Any] = {"measure": measure, "cautious": cautious, "say": say, "force": force}
    return advise_once(config, study, agreement, InProcess(nodes), folder, **options)
