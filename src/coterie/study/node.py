"""The node that a site's process serves for one job of a study: its own rows from its own file, under its own terms.

A job is plain data: the stage, the sites in the order of their clients and, for training, what was agreed and the name
of the network. It cannot name files, columns or code. What a site does not take part in, it answers with the kind of
the reason only.
"""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from coterie.errors import UsageError
from coterie.federation import LocalEngine, Stack
from coterie.federation.remote import Names, Node, Store
from coterie.federation.remote.messages import REFUSED, Order
from coterie.federation.remote.node import Refused
from coterie.problems.sites.holding import ABOUT, Plan, RawNode, examine, prepared_node, raw_node, same_version
from coterie.study.delivery import files_of, keep
from coterie.study.home import MEMORY, RECEIVED, Home, read_settings
from coterie.study.kept import mark_of

RECEIVE = "sites/receive"
__all__ = ["at_site", "for_flare"]


class Refusing(Node):
    """A node that does nothing and says why, without any value."""

    def __init__(self, home: Home, reason: str) -> None:
        nobody = torch.zeros(1, dtype=torch.int64)
        rows = Stack((torch.zeros(1, 1),), nobody, torch.ones_like(nobody))
        super().__init__(LocalEngine(None, rows, None, None), (0,), journal=home.note)
        self.reason = reason

    def _content(self, order: Order) -> Any:
        raise Refused(REFUSED, self.reason)


class _AtSite(Node):
    """What nodes of a site share: errors leave by their kind only, and a model that is sent is kept if wanted."""

    home: Home
    tests: Stack | None = None

    def _reason(self, error: BaseException) -> str:
        return f"a {type(error).__name__}; the site's journal has the time"

    def _content(self, order: Order) -> Any:
        if order.step is not None and order.step.work == RECEIVE:
            self._receive(order)
        return super()._content(order)

    def _receive(self, order: Order) -> None:
        policy, _ = read_settings(_policy_of(self.home))
        if not policy.receive:
            raise Refused(REFUSED, "this site receives no models (policy.receive)")
        assert order.step is not None
        try:
            files = files_of(order.step.shared)
            keep(self.home.folder / RECEIVED / order.run, files, self.home.invitation.site, self.tests)
        except UsageError as error:
            raise Refused(REFUSED, str(error)) from None


class RawAtSite(_AtSite, RawNode):
    """A site in the stage "agree"."""


class PreparedAtSite(_AtSite):
    """A site in the stage "train"."""


def at_site(home: Home, job: Mapping[str, Any]) -> Node:
    """The node of a site for a job; one that refuses everything where the site takes no part.

    Args:
        home: the site's home.
        job: what the coordinator sent: study, version, stage, sites and, for training, the plan.
    """
    try:
        return _at_site(home, job)
    except UsageError as error:  # its text may hold values: the site's log has it, the coordinator is told the kind
        print(f"coterie site: {error}", flush=True)
        return Refusing(home, ABOUT["file"])


def _at_site(home: Home, job: Mapping[str, Any]) -> Node:
    invitation = home.invitation
    policy, choices = read_settings(_policy_of(home))
    if (other := same_version(str(job.get("version", "")))) is not None:
        return Refusing(home, other)
    if job.get("terms") != invitation.terms.digest or invitation.site not in job.get("sites", ()):
        return Refusing(home, ABOUT["study"])
    if dict(job.get("invited", {})).get(invitation.site, mark_of(invitation)) != mark_of(invitation):
        return Refusing(home, ABOUT["invitation"])
    stage = str(job.get("stage"))
    if stage not in policy.stages:
        return Refusing(home, f"{ABOUT['policy']}: policy.stages lacks {stage[:40]!r}")
    found = examine(Path(home.settings()["data"]), invitation.terms, choices)
    for fault in found.faults:
        print(f"coterie site: {fault.what}. {fault.remedy}", flush=True)
    if found.faults or found.tables is None:
        return Refusing(home, found.public)
    if (reason := policy.refusal(invitation.terms, found.rows)) is not None:
        print(f"coterie site: {reason}", flush=True)
        return Refusing(home, ABOUT["policy"])
    client = list(job["sites"]).index(invitation.site)
    store = Store(home.folder / MEMORY)
    if stage == "agree":  # statistics over all rows, which policy.stages admits and `site check` lists
        exact = replace(policy.node, secure=False, epsilon=0.0)
        return _as_site(raw_node(found.tables, client, policy=exact, store=store), RawAtSite, home)
    plan = Plan(**job["plan"])
    if not _admits(plan.model, policy.models):
        return Refusing(home, f"{ABOUT['policy']}: policy.models does not admit the network")
    options: dict[str, Any] = {"policy": policy.node, "store": store, "shares_memory": policy.shares_memory}
    node = prepared_node(found.tables, invitation.terms, plan, client, **options)
    node.names = Names(node.names.works | {"coterie.problems.sites.holding"}, node.names.records)
    site = _as_site(node, PreparedAtSite, home)
    site.tests = node.tests
    return site


def _as_site(node: Node, kind: type[_AtSite], home: Home) -> _AtSite:
    kept = node.store, node.shares_memory, node.policy, home.note, node.model
    site = kind(node.engine, node.clients, node.names, node.limits, *kept)
    site.home = home
    return site


def _admits(name: str, patterns: tuple[str, ...]) -> bool:
    return ":" not in name and any(fnmatchcase(name, pattern) for pattern in patterns)


def _policy_of(home: Home) -> Path | None:
    policy = home.settings().get("policy")
    return Path(policy) if policy else None


def for_flare(site: str, job: Mapping[str, Any]) -> Node:
    """The loader of FLARE's compute process."""
    return at_site(Home.find(), job)
