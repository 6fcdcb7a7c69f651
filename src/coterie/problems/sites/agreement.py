"""The handshake of a study at the coordinator: who is there, and what scales and categories all agree on.

The coordinator asks by the federation's verbs for what problem `files` asks for in one process, and only for that:
counts, means and squared deviations by column, categories with their counts. Sites whose file does not fit are named
with the kind of the misfit, and left out.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coterie import __version__
from coterie.errors import NoClients, RunError, UsageError
from coterie.federation import Federation, Ledger, Shard
from coterie.federation.remote import Policy, RemoteEngine, Transport
from coterie.numerics import Draw
from coterie.problems.files.prepare import learnt_from
from coterie.problems.files.tables import Tables
from coterie.problems.sites.holding import hello, raw_engine
from coterie.problems.sites.terms import Terms
from coterie.storage import make_folder, write_json

FOLDER = "agreements"
SECOND = "another site has joined with this invitation before; if it has moved, invite it again"
ABSENT = "it is not there"
FAILED = frozenset({"lost", "timeout", "client error", "rejected", "refused"})


class Present(NamedTuple):
    """A site that answered: its name, its rows as declared, by how many seconds its clock is ahead, and the number that
    it drew when it joined."""

    name: str
    rows: int
    clock: float
    instance: int = 0


@dataclass(frozen=True)
class Agreement:
    """What the sites that take part agreed on.

    Args:
        terms: the digest of the terms.
        sites: the participants, in the order of their clients.
        preparation: scales, categories and classes, as `Preparation.as_dict` gives them.
        moved: the ledger of the handshake.
        left_out: by site, why it does not take part.
        scaling: whether numbers are scaled in common, or by each site's own mean and deviation.
        version: coterie's version at the coordinator.
        seconds: how long one exchange of the handshake took.
        drawn: a word of the run that was begun with it, as two runs may have one configuration.
    """

    terms: str
    sites: tuple[Present, ...]
    preparation: dict[str, Any]
    moved: dict[str, Any]
    left_out: Mapping[str, str]
    scaling: str = "common"
    version: str = __version__
    seconds: float = 0.0
    drawn: str = ""

    @property
    def digest(self) -> str:
        """Names this agreement; clocks and durations do not count."""
        kept = [self.terms, [site[:2] for site in self.sites], self.preparation, self.version]
        kept += [self.drawn] if self.drawn else []
        return blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def ledger(self) -> Ledger:
        """What was moved for it."""
        return Ledger.from_dict(self.moved)

    def write(self, folder: Path) -> Path:
        """Keep it in the folder of a study, under its digest; the file."""
        make_folder(folder / FOLDER)
        path = folder / FOLDER / f"{self.digest}.json"
        write_json(path, {**self.__dict__, "sites": [site._asdict() for site in self.sites]})
        return path

    @staticmethod
    def read(folder: Path, digest: str) -> "Agreement":
        """The agreement of that digest in the folder of a study."""
        path = folder / FOLDER / f"{digest}.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            sites = tuple(Present(**site) for site in data.pop("sites"))
            return Agreement(sites=sites, **data)
        except FileNotFoundError:
            raise UsageError(
                f"{folder} has no agreement {digest!r}; start the run with: coterie run --study."
            ) from None
        except (OSError, TypeError, ValueError, KeyError) as error:
            raise UsageError(f"{path} is damaged ({error}); start a new run with: coterie run --study.") from None


def engine_over(transport: Transport, own: Tables, clients: int, policy: Policy, run: str = "agree") -> RemoteEngine:
    """The sites with their raw rows; the coordinator's own rows are the target's, and show the form.

    Args:
        transport: reaches the sites.
        own: the coordinator's rows.
        clients: how many sites are invited.
        policy: how long to wait.
        run: the name by which sites know the handshake.
    """
    mine = raw_engine(own)
    nobody = torch.zeros(clients, dtype=torch.int64)
    assert mine.valid is not None
    target = Shard(None, mine.train.client(0), mine.valid.client(0))
    stand_in = mine.train.shared_by(nobody), mine.valid.shared_by(nobody)
    return RemoteEngine(transport, None, *stand_in, run=run, target=target, policy=policy)


def agree(
    transport: Transport,
    terms: Terms,
    names: Sequence[str],
    own: Tables,
    policy: Policy = Policy(),  # noqa: B008
    run: str = "agree",
    known: Mapping[str, int] | None = None,
) -> Agreement:
    """Ask all sites that are there; sites that fail on the way are left out, and the others are asked again.

    Args:
        transport: reaches the sites.
        terms: those of the study.
        names: the sites that are invited, in the order of their clients.
        own: the coordinator's rows.
        policy: how long to wait for sites.
        run: the name by which sites know the handshake.
        known: the numbers that sites drew when they joined; whoever has another one is a second site.
    """
    engine = engine_over(transport, own, len(names), policy, run)
    engine.connect()
    left_out: dict[str, str] = {}
    fed = Federation.on(engine, book=engine.book)
    while True:
        _collect(engine, names, left_out)
        here = [k for k in engine.present if names[k] not in left_out]
        if not here:
            told = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            raise RunError(f"no site takes part. {told or 'Start the sites with: coterie site join.'}")
        fed = replace(fed, ids=torch.tensor(here), book=replace(fed.book, ledger=Ledger(wire=fed.ledger.wire)))
        engine.book = engine.exchange.book = fed.book
        before = time.time()
        try:
            (clocks, instances), ids = fed.gather(hello, draw=Draw.of(0))
            after = time.time()
            drawn = dict(zip(ids.tolist(), instances.tolist(), strict=True))
            if others := [k for k, number in drawn.items() if (known or {}).get(names[k], number) != number]:
                left_out |= {names[k]: SECOND for k in others}
                continue
            rows = int(fed.engine.sizes[fed.ids].sum()) + own.holders[0].rows
            prepared = learnt_from(fed, terms.form, rows, terms.scaling, terms.impute)
        except NoClients:  # all of them failed; the events say why
            pass
        failed = [event for event in fed.book.drain() if event["event"] in FAILED and event["client"] in here]
        if not failed:
            break
        for event in failed:
            left_out[names[event["client"]]] = f"{event['event']}: {event['reason']}"
    ahead = {k: _ahead(clock, before, after) for k, clock in zip(ids.tolist(), clocks.tolist(), strict=True)}
    present = tuple(Present(names[k], int(fed.engine.sizes[k]), round(ahead[k], 1), drawn[k]) for k in here)
    absent = [name for k, name in enumerate(names) if k not in here and name not in left_out]
    left_out |= dict.fromkeys(absent, ABSENT)
    prepared = prepared._replace(missing=terms.missing)
    return Agreement(terms.digest, present, prepared.as_dict(), fed.ledger.as_dict(), left_out, terms.scaling)


def _ahead(clock: float, before: float, after: float) -> float:
    """By how much a clock is ahead at least, or behind (negative), that was read between two times of this machine."""
    return min(0.0, clock - before) or max(0.0, clock - after)


def _collect(engine: RemoteEngine, names: Sequence[str], left_out: dict[str, str]) -> None:
    """Why nodes were not admitted, by site."""
    for note in engine.roster.drained():
        if note.kind == "refused" and 0 <= note.client < len(names) and note.client not in engine.present:
            left_out[names[note.client]] = note.reason.removeprefix("a node was not let in: it says: ")
