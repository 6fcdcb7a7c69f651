"""Jobs of a study at its coordinator: the handshake, and a training. An engine's server process runs them.

A job is plain data. `for_sites` is the part that sites see.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch

from coterie import __version__
from coterie.engines.embedded import own_node
from coterie.engines.follow import no_observer
from coterie.engines.load import read_config
from coterie.experiment import run as experiment
from coterie.experiment.build import run_name
from coterie.experiment.config import Config
from coterie.federation import Federation, Stack
from coterie.federation.remote import Address, Beside, Message, Policy, RemoteEngine, Transport, Trouble
from coterie.numerics import Draw
from coterie.problems.sites.agreement import Agreement, agree
from coterie.problems.sites.folder import Study
from coterie.problems.sites.holding import Plan, receive
from coterie.problems.sites.terms import own_tables
from coterie.storage import write_json
from coterie.study.advice import advise_once
from coterie.study.delivery import is_personal, keep_own, parts_for
from coterie.study.kept import MEMBERS, invited

TransportTo = Callable[[Sequence[str]], Transport]
"""What makes a transport to some sites, in the order of their clients."""


class Timed:
    """A transport that notes how long its exchanges take.

    Args:
        inside: the transport.
    """

    def __init__(self, inside: Transport) -> None:
        self.inside, self.seconds = inside, list[float]()

    def nodes(self) -> Mapping[Address, int | None]:
        """The connected nodes."""
        return self.inside.nodes()

    def exchange(
        self, orders: Mapping[Address, Message], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        """Send, wait, collect."""
        begun = monotonic()
        answers = self.inside.exchange(orders, needed, timeout)
        if needed:
            self.seconds.append(monotonic() - begun)
        return answers

    @property
    def typical(self) -> float:
        """The median of what its exchanges took."""
        return round(median(self.seconds), 3) if self.seconds else 0.0


def for_sites(study: Study, stage: str, sites: Sequence[str], plan: Plan | None = None) -> dict[str, Any]:
    """What sites are told of a job.

    Args:
        study: the study.
        stage: agree or train; an advice is a training of one exchange.
        sites: the sites, in the order of their clients.
        plan: what they prepare, for a training.
    """
    job: dict[str, Any] = {
        "study": study.name,
        "terms": study.terms.digest,
        "version": __version__,
        "stage": stage,
        "sites": list(sites),
        "invited": invited(study.folder),
    }
    if plan is not None:
        job["plan"] = plan._asdict()
    return job


def perform(job: Mapping[str, Any], transport_to: TransportTo) -> dict[str, Any]:
    """Do a job in the server process of an engine; its result.

    Args:
        job: the folder of the study and the stage; for agree the sites, why others are left out, and how long to
            wait; for train configuration and folders.
        transport_to: reaches the sites.
    """
    study = Study.read(job["study"])
    if job["stage"] == "agree":
        waiting = Policy(timeout=float(job["timeout"]), patience=float(job["patience"]))
        own = own_tables(study.data, study.terms)
        members = study.folder / MEMBERS
        known = json.loads(members.read_text(encoding="utf-8")) if members.is_file() else {}
        timed = Timed(transport_to(job["sites"]))
        agreement = agree(timed, study.terms, job["sites"], own, waiting, known=known)
        agreement = replace(agreement, seconds=timed.typical, left_out={**agreement.left_out, **job["absent"]})
        agreement.write(study.folder)
        write_json(members, {**known, **{site.name: site.instance for site in agreement.sites}})
        sites = [site._asdict() for site in agreement.sites]
        return {"agreement": agreement.digest, "sites": sites, "left_out": dict(agreement.left_out)}
    config, folder = read_config(job["config"]), Path(job["folder"])
    agreement = Agreement.read(study.folder, config.problem["agreement"])
    if job["stage"] == "advise":
        options = {key: job[key] for key in ("measure", "cautious", "force")}
        return advise_once(config, study, agreement, transport_to([s.name for s in agreement.sites]), folder, **options)
    names = [site.name for site in agreement.sites]

    def network(config: Config, problem: Any) -> Transport:
        transport = transport_to(names)
        own = own_node(problem, len(names))
        return Beside(transport, own["(here)"]) if own else transport

    if (folder / "config.toml").is_file() and not job["force"]:
        summary = experiment.resume(folder, no_observer, network=network)
    else:
        summary = experiment.run(config, folder, no_observer, force=job["force"], network=network)
    if summary["outcome"] == "finished" and is_personal(folder):
        keep_own(folder)
    if job["share"] and summary["outcome"] == "finished":
        summary = {**summary, "received": share(study, transport_to(names), names, folder, run_name(config))}
    return summary


def share(study: Study, transport: Transport, names: Sequence[str], folder: Path, run: str) -> list[str]:
    """Send the model of a result folder to the sites, with how rows become its inputs; the sites that took it.

    Where there is one model per site, each is sent its own model and its own row of the weights.
    """
    stored = json.loads((folder / "preprocess.json").read_text(encoding="utf-8"))
    parts = parts_for(folder, names)
    labels = torch.zeros(1, dtype=torch.int64 if stored["classes"] else torch.float32)
    zeros = torch.zeros(len(names), dtype=torch.int64)
    form = Stack((torch.zeros(1, *stored["inputs"]), labels), zeros, zeros + 1)
    engine = RemoteEngine(transport, None, form, run=run)
    engine.connect()
    fed = replace(Federation.on(engine, book=engine.book), ids=torch.tensor(engine.present))
    return [names[k] for k in fed.gather(receive, parts, draw=Draw.of(0)).ids.tolist()]
