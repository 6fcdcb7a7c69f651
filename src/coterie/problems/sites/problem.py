"""`study`: files that stay where they are. The coordinator has its own rows and what all sites agreed on.

The rows that stand for a site's are zeros; they have the form of its rows and their number. The coordinator is the
target: its file is split as in problem `files`. With `everyone`, every site is a target too: it splits its own rows,
and the coordinator measures its own model only.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Stack
from coterie.numerics import Draw
from coterie.problems.base import Context, View
from coterie.problems.files.prepare import Preparation, model_rows, own_scaled
from coterie.problems.files.problem import Fraction, PreparedFiles, check_shares, named_loss, network, shuffled
from coterie.problems.files.tables import Holder
from coterie.problems.models import FlatModel
from coterie.problems.sites.agreement import Agreement
from coterie.problems.sites.folder import Study
from coterie.problems.sites.holding import Unseen
from coterie.problems.sites.terms import own_tables
from coterie.problems.tasks.supervised import LOSSES
from coterie.problems.weighting import Weighting
from coterie.settings import Name, NonNegative

COORDINATOR = "(the coordinator)"
HOW = "problem study is run by: coterie run --study DIR, or on one machine with --sites 'sites/*.csv'"


@dataclass(frozen=True)
class AtCoordinator(PreparedFiles):
    """The coordinator's rows, prepared, and after them zeros for those of the sites, which are elsewhere."""

    @property
    def stack(self) -> Stack:
        """One part per site, of as many zeros as it has rows."""
        counts = torch.tensor([holder.rows for holder in self.holders[:-1]])
        return Stack(self.columns, torch.full_like(counts, self.target_rows), counts)

    @property
    def own_name(self) -> str:
        """The coordinator; the name of its file is nobody's business."""
        return COORDINATOR

    def everyone(self, own: float, test: float) -> Weighting:
        """The problem in which every site is a target; its rows for validation and test are at the site."""
        plain = super().everyone(own, test)
        values = {field.name: getattr(plain, field.name) for field in fields(plain)}
        return OwnMeasures(**{**values, "tests": None})


@dataclass(frozen=True)
class OwnMeasures(Weighting):
    """Every site is a target, and the coordinator, the last client, has no rows but its own to measure with."""

    def measure(self, view: View) -> dict[str, float]:
        """The coordinator's own model on its own test and validation rows."""
        own = view._replace(model=view.model[-1], weights=None) if view.model.dim() == 2 else view
        return super().measure(own)


def load_study(
    context: Context,
    study: Study,
    agreement: Agreement,
    *,
    model: str = "logistic",
    loss: str = "auto",
    balance: bool = False,
    l2: float = 0.01,
) -> AtCoordinator:
    """The coordinator's side of a study: its own rows with what was agreed, laid out as problem `files` lays them out.

    Args:
        context: seed and numbers.
        study: the study.
        agreement: what its sites agreed on.
        model: a network's name.
        loss: auto, or a name.
        balance: weigh classes by their inverse frequency.
        l2: strength of the quadratic penalty.
    """
    if agreement.terms != study.terms.digest:
        raise UsageError("the terms of the study have changed since its sites agreed; start a new run.")
    make, row_loss = network(model), named_loss(loss)
    tables = own_tables(study.data, study.terms)
    prepared = Preparation.from_dict(agreement.preparation)
    if study.terms.scaling == "own":
        prepared = own_scaled(tables, prepared, 0)
    if balance and not prepared.classes:
        raise UsageError("problem.balance weighs classes, and this label is a number; leave it out.")
    inputs, labels = (torch.from_numpy(part) for part in model_rows(tables, prepared, 0))
    taken = shuffled(labels, Draw.of(context.seed).phase("files").step(0), bool(prepared.classes))
    most = max(site.rows for site in agreement.sites)

    def laid_out(column: Tensor) -> Tensor:
        return torch.cat([column[taken], column.new_zeros(most, *column.shape[1:])])

    own = replace(tables.holders[0], rows=len(taken))
    return AtCoordinator(
        replace(context, statistics=None),  # those of the handshake were exact
        (*(Holder(site.name, Path(site.name), site.rows) for site in agreement.sites), own),
        prepared,
        agreement.ledger,
        (laid_out(inputs), laid_out(labels)),
        0,
        FlatModel(make(prepared.shape, prepared.outputs, context.seed)),
        {"name": model, "shape": list(prepared.shape), "outputs": prepared.outputs},
        row_loss or LOSSES["cross_entropy" if prepared.classes else "squared"],
        l2,
        balance,
        tuple(f"{name} takes no part: {reason}" for name, reason in agreement.left_out.items()),
    )


def study(
    context: Context,
    *,
    folder: str = "",
    agreement: str = "",
    sites: str = "",
    unseen: Unseen = "refuse",
    model: Name = "logistic",
    loss: Name = "auto",
    balance: bool = False,
    l2: NonNegative = 0.01,
    own: Fraction = 0.4,
    test: Fraction = 0.2,
    everyone: bool = False,
) -> Weighting:
    """Tables at sites that keep their rows, and the coordinator's own, which is the target.

    Args:
        folder: the folder of the study, made by `coterie study new`.
        agreement: what the sites agreed on, by its digest in the folder; `coterie run --study` makes it.
        sites: pattern of the sites' files, for a trial on one machine.
        unseen: in a trial, what sites do with categories that the study does not know.
        model: a network's name.
        loss: auto, or a name.
        balance: weigh classes by their inverse frequency.
        l2: strength of the quadratic penalty.
        own: share of the target's rows that train; of every site's rows with everyone.
        test: share of these rows for the test; the rest judges the weights.
        everyone: every site is a target; it splits its own rows into those that train, validate and test.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from coterie.engines.embedded import agreed, examined_sites
        >>> from coterie.problems.files.example import write_example
        >>> from coterie.problems.sites.holding import Choices
        >>> from coterie.problems.sites.terms import terms_of
        >>> with TemporaryDirectory() as name:
        ...     label, mine = write_example(Path(name), own=30).label, Path(name, "mine.csv")
        ...     made = Study(Path(name, "study"), "trial", terms_of(mine, label)[0], mine, "embedded")
        ...     _ = made.write()
        ...     agreement = agreed(made, examined_sites(made, f"{name}/sites/*.csv", Choices()))
        ...     _ = agreement.write(made.folder)
        ...     problem = study(Context(), folder=str(made.folder), agreement=agreement.digest)
        >>> problem.clients
        7
    """
    if not folder or not agreement:
        raise UsageError(f"{HOW}.")
    check_shares(own, test)
    found = Study.read(folder)
    data = load_study(
        context, found, Agreement.read(found.folder, agreement), model=model, loss=loss, balance=balance, l2=l2
    )
    return data.everyone(own, test) if everyone else data.split(own, test)
