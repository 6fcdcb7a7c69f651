"""A site's own side: it reads its own file, compares it with the terms of the study, and answers orders on its rows.

Faults are reported here in full, with values; the coordinator learns their kind and the study's columns only. In the
stage "agree" a node answers the works on raw rows by which all agree on scales and categories; in the stage "train" it
holds the model's inputs, made with what was agreed.
"""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie import __version__
from coterie.errors import UsageError
from coterie.federation import LocalEngine, Shard, Stack, Static, work
from coterie.federation.remote import Names, Node, NodePolicy, Store
from coterie.federation.remote.messages import Order, Step
from coterie.federation.tree import Tree, size
from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.files import reading
from coterie.problems.files.faults import Consent, examined_alone
from coterie.problems.files.findings import Findings
from coterie.problems.files.prepare import Preparation, dictionaries, model_rows, own_scaled
from coterie.problems.files.problem import (
    balanced,
    check_parts,
    check_shares,
    in_parts,
    name_of_loss,
    named_loss,
    network,
)
from coterie.problems.files.reading import Unreadable
from coterie.problems.files.tables import Tables, read_alone
from coterie.problems.models import FlatModel
from coterie.problems.sites.terms import Terms
from coterie.problems.tasks.supervised import LOSSES, Supervised
from coterie.problems.weighting import weighting

RAW = Names(works=frozenset({__name__, "coterie.problems.files.prepare"}))
"""The works that run on raw rows, and no others: means, deviations, quantiles, categories with their counts."""
HOME, INSTANCE = "COTERIE_SITE", "instance"  # the variable that names a site's home, and the file of its number
Unseen = Literal["refuse", "share", "missing"]


@dataclass(frozen=True)
class Choices:
    """What a site decides on its own file; the table [data] of its settings.

    Args:
        missing: words that stand for no value in this file.
        keep: columns that are used as they are, whatever they look like.
        units: by column, what the numbers are divided by to have the study's unit; 1 says that they are right.
        align_labels: true uses the proposed coding of the label, a table is the coding itself.
        unseen: categories that the study does not know: "refuse" says so and stops, "share" lets these words leave
            with their counts, "missing" reads them as missing, so that they do not leave.
    """

    missing: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    units: Mapping[str, float] = field(default_factory=dict)
    align_labels: bool | Mapping[str, str] | None = None
    unseen: Unseen = "refuse"

    @staticmethod
    def of(values: Mapping[str, Any]) -> "Choices":
        """Choices from a table of TOML, checked."""
        known = [f.name for f in fields(Choices)]
        if strange := sorted(values.keys() - set(known)):
            raise UsageError(f"data.{strange[0]} is no setting of a site; the settings are {', '.join(known)}.")
        units, coding = values.get("units", {}), values.get("align_labels")
        lists = {key: values.get(key, ()) for key in ("missing", "keep")}
        for key, value in lists.items():
            if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
                raise UsageError(f'data.{key} must be a list of texts, such as ["unknown"].')
        if not isinstance(units, Mapping) or not all(type(v) in (int, float) and v > 0 for v in units.values()):
            raise UsageError("data.units must give a positive number by column, such as {weight = 1000}.")
        if coding is not None and not isinstance(coding, bool | Mapping):
            raise UsageError("data.align_labels must be true, false, or a table of this file's words and the study's.")
        if (unseen := values.get("unseen", "refuse")) not in ("refuse", "share", "missing"):
            raise UsageError(f"data.unseen must be refuse, share or missing, not {unseen!r}.")
        return Choices(tuple(lists["missing"]), tuple(lists["keep"]), dict(units), coding, unseen)


class Fault(NamedTuple):
    """Something that is wrong with a site's file.

    Args:
        kind: in one word, for the coordinator.
        what: with values, for the site.
        remedy: what to do about it, at the site.
        columns: columns of the study that it is about.
    """

    kind: str
    what: str
    remedy: str = ""
    columns: tuple[str, ...] = ()

    @property
    def public(self) -> str:
        """The report to the coordinator: the kind and columns of the study, no value and no other name."""
        return ABOUT[self.kind] + (f": {', '.join(map(repr, self.columns))}" if self.columns else "")


ABOUT = {
    "file": "its file cannot be read",
    "columns": "its file lacks columns of the study",
    "numbers": "its file has words where the study has numbers",
    "rows": "it has fewer rows than the study asks for",
    "words": "a column of words looks like an identifier",
    "label": "its label is coded otherwise",
    "values": "it has codes for no value, or impossible numbers",
    "unit": "a column seems to have another unit",
    "unseen": "it has categories that the study does not know",
    "policy": "the policy of the site does not admit it",
    "version": "it has another version of coterie",
    "study": "it was invited to another study, or under other terms",
    "invitation": "it joined with an invitation that another one has replaced; join with the newest one",
}
WHERE = "in [data] of your settings, the file that you name with --policy"
REMEDIES = {
    "columns": "Rename or add the column in a copy of the file.",
    "numbers": f'Correct the column, or name words that stand for no value: missing = ["unknown"] {WHERE}.',
    "label": f"Set align_labels = true to use the proposed coding, or write your own, {WHERE}.",
    "values": f'Read such values as missing: missing = ["99"] with the values, or keep = ["column"] if they are right, '
    f"{WHERE}.",
    "unit": f"Set units = {{column = factor}}, which divides by the factor, {WHERE}; write 1 if the numbers are right.",
    "unseen": f'Set unseen = "share" to let these words leave with their counts, or "missing" to read them as missing, '
    f"{WHERE}.",
    "words": "Leave the study, or ask the coordinator to leave the column out.",
}


def _remedy(kind: str, what: str, column: str | None, own: list[str], terms: Terms) -> str:
    """What to do about a fault, with its own column, factor and words where they are known."""
    if kind == "unit" and column is not None and (size := re.search(r"about ([\d,.]+) times (larger|smaller)", what)):
        factor = float(size[1].replace(",", ""))
        shown = f"{factor if size[2] == 'larger' else 1 / factor:g}"
        return REMEDIES["unit"].replace("column = factor", f'"{column}" = {shown}')
    if kind == "label" and "Proposed" not in what and own and terms.classes:
        pairs = zip(own, terms.classes, strict=False)
        coding = ", ".join(f'"{word}" = "{known}"' for word, known in pairs)
        return f"Write which class is which, such as align_labels = {{{coding}}}, {WHERE}."
    if kind == "values" and column is not None:
        return REMEDIES["values"].replace('"column"', f'"{column}"')
    return REMEDIES[kind]


class Examined(NamedTuple):
    """A site's file, read: its rows (None where they cannot be used), faults, and notes on what was done."""

    tables: Tables | None
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return 0 if self.tables is None else self.tables.holders[0].rows

    @property
    def public(self) -> str:
        """The report of the faults to the coordinator."""
        return "; ".join(dict.fromkeys(fault.public for fault in self.faults))


def examine(path: Path, terms: Terms, choices: Choices = Choices()) -> Examined:  # noqa: B008
    """Read a site's file and compare it with the terms; everything that is wrong, at once.

    Args:
        path: the site's file.
        terms: those that the site was invited with.
        choices: what the site has decided.

    Example:
        >>> examine(Path("theirs.csv"), terms).faults  # doctest: +SKIP
    """
    if not path.is_file():
        what = f"{path} is a folder; a study is for tables" if path.is_dir() else f"there is no file {path}"
        return Examined(None, (Fault("file", what, "Name the file of your rows: CSV, or Parquet."),), ())
    try:
        columns = reading.columns_of(path)
    except Unreadable as error:
        return Examined(None, (Fault("file", f"{path.name}: {error}", error.remedy),), ())
    wanted = (*terms.form.features, terms.label)
    surplus = [name for name in columns if name not in wanted]
    notes = [f"columns that are not part of the study and are not used: {', '.join(surplus)}"] if surplus else []
    if lacking := [name for name in wanted if name not in columns]:
        return Examined(None, tuple(_lacking(lacking, surplus, terms.label)), tuple(notes))
    findings = Findings()
    tables = read_alone(path, terms.form, terms.options(choices.missing, choices.keep), findings)
    if tables is None:
        return Examined(None, tuple(_read_fault(found.what, terms) for found in findings.found), tuple(notes))
    faults = []
    if tables.holders[0].rows < terms.least_rows:
        rows = tables.holders[0].rows
        what = f"{path.name} has {rows} row{'' if rows == 1 else 's'}; the study asks for {terms.least_rows}"
        faults.append(Fault("rows", what, "Give more rows, or ask the coordinator to lower least_rows."))
    both = tables._replace(holders=(*tables.holders, terms.stand_in()))
    consent = Consent({path.name: dict(choices.units)}, choices.align_labels, keep=choices.keep)
    try:
        both, doubts, treated = examined_alone(both, terms.quantiles, consent)
    except UsageError as error:  # of a coding of its own
        raise UsageError(str(error).replace("problem.", "data.")) from None
    own = sorted(tables.holders[0].words[-1]) if terms.classes else []
    for kind, found in doubts.items():
        for one in found:
            named = _named_in(one.what, terms)
            remedy = _remedy(kind, one.what, named[0] if named else None, own, terms)
            faults.append(Fault(kind, one.what, remedy, named))
    notes += [one.what for one in treated]
    tables = both._replace(holders=both.holders[:1])
    faults += _unseen(tables, terms, choices, notes)
    return Examined(tables, tuple(faults), tuple(notes))


def _lacking(lacking: list[str], surplus: list[str], label: str) -> list[Fault]:
    faults = []
    for name in lacking:
        near = [other for other in surplus if _plain(other) == _plain(name)] or get_close_matches(name, surplus, 1, 0.8)
        what = f"there is no column {name!r}" + (", the label" if name == label else "")
        what += f"; {near[0]!r} may be the same" if near else ""
        faults.append(Fault("columns", what, REMEDIES["columns"], (name,)))
    return faults


def _plain(name: str) -> str:
    """The words of a name in one order, without case and signs."""
    return "".join(sorted(re.findall(r"[^\W_]+", name.casefold())))


def _named_in(what: str, terms: Terms) -> tuple[str, ...]:
    return tuple(name for name in (*terms.form.features, terms.label) if f"column {name!r}" in what)


def _read_fault(what: str, terms: Terms) -> Fault:
    if "identifier" in what:
        kind = "words"
    elif "no rows" in what:
        kind = "rows"
    elif "where the target's file has numbers" in what:
        kind = "numbers"
    else:
        kind = "file"
    return Fault(
        kind, what.replace("the target's file has", "the study has"), REMEDIES.get(kind, ""), _named_in(what, terms)
    )


def _unseen(tables: Tables, terms: Terms, choices: Choices, notes: list[str]) -> list[Fault]:
    """Words that the study does not know; with unseen = "missing" they become missing, in place."""
    holder, faults = tables.holders[0], []
    for j, (column, known) in enumerate(zip(terms.worded, terms.words, strict=False)):
        own = holder.words[j]
        strange = sorted(own.keys() - set(known))
        if not strange:
            continue
        shown = ", ".join(map(repr, strange[:8])) + (f" and {len(strange) - 8} more" if len(strange) > 8 else "")
        what = f"column {column!r} has words that the study does not know: {shown}"
        if choices.unseen == "refuse":
            faults.append(Fault("unseen", what, REMEDIES["unseen"], (column,)))
        elif choices.unseen == "share":
            notes.append(f"{what}; they leave this site with their counts")
        else:
            notes.append(f"{what}; they are read as missing")
            kept = [word for word in own if word not in strange]
            number = {word: i for i, word in enumerate(kept)}
            recoded = torch.tensor([*(number.get(word, -1) for word in own), -1], dtype=tables.codes.dtype)
            tables.codes[:, j] = recoded[tables.codes[:, j].long()]
            holder.words = [*holder.words[:j], number, *holder.words[j + 1 :]]
    return faults


@work("sites/hello", update=None, mode="sequential")
def hello(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> tuple[Tensor, Tensor]:
    """A site's clock, in seconds, and the number that it drew when it joined; 0 where it did not."""
    number = Path(os.environ.get(HOME, ""), INSTANCE) if os.environ.get(HOME) else None
    drawn = int(number.read_text(encoding="ascii")) if number is not None and number.is_file() else 0
    return torch.tensor(time.time(), dtype=torch.float64), torch.tensor(drawn)


@work("sites/receive", update=None, mode="sequential")
def receive(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """A model for the site, which its node keeps if its policy says so; the reply says that it has come."""
    return torch.ones(())


class RawNode(Node):
    """A node over raw rows. Its lists of words are no rows: their number is not held against the policy."""

    def _fewest_rows(self, order: Order, step: Step) -> int | None:
        return int(self.engine.train.counts[self._places(order)].min())


def raw_engine(tables: Tables) -> LocalEngine:
    """The raw rows of all holders of some tables (train) and their own lists of words (valid)."""
    return LocalEngine(None, tables.stack, dictionaries(tables.holders), None, "sequential")


def raw_node(tables: Tables, client: int, *, policy: NodePolicy, store: Store | None = None) -> Node:
    """The node of a site in the stage "agree"."""
    return RawNode(raw_engine(tables), (client,), RAW, store=store or Store(), policy=policy)


class Plan(NamedTuple):
    """What a job tells sites of the training: what was agreed, and the model; all of it plain data.

    Args:
        preparation: scales, categories and classes that all agreed on, as `Preparation.as_dict` gives them.
        model: the name of a network.
        loss: the name of a loss; auto decides by the label.
        l2: strength of the quadratic penalty.
        balance: whether classes are weighed by their inverse frequency.
        dtype: float32 or float64.
        seed: the seed of the model's start.
        scaling: numbers by what was agreed, by each site's own mean and deviation, or none: rows as they stand.
        everyone: whether every site is a target, and splits its rows into those that train, validate and test.
        own: with everyone, the share of rows that train.
        test: with everyone, the share of rows for the test; the rest validates.
    """

    preparation: dict[str, Any]
    model: str = "logistic"
    loss: str = "auto"
    l2: float = 0.01
    balance: bool = False
    dtype: str = "float32"
    seed: int = 0
    scaling: str = "common"
    everyone: bool = False
    own: float = 0.4
    test: float = 0.2


class PreparedNode(Node):
    """A node over the model's inputs; where the site is a target, with rows on which it alone tests its model."""

    tests: Stack | None = None


def prepared_node(
    tables: Tables,
    terms: Terms,
    plan: Plan,
    client: int,
    *,
    policy: NodePolicy,
    store: Store | None = None,
    shares_memory: bool = False,
) -> PreparedNode:
    """The node of a site in the stage "train": the model's inputs, made of its own rows with what was agreed.

    Args:
        tables: the site's rows.
        terms: those that the site was invited with.
        plan: what the job says.
        client: the number of the site's client.
        policy: what the coordinator may ask for.
        store: where client memory is kept.
        shares_memory: whether the coordinator may ask for client memory.
    """
    prepared = Preparation.from_dict(plan.preparation)
    if prepared.form != terms.form:
        raise UsageError(ABOUT["study"])
    context = Context(plan.seed, getattr(torch, plan.dtype))
    if plan.scaling == "own":
        prepared = own_scaled(tables, prepared, 0)
    if plan.scaling == "none":
        prepared = prepared.as_it_stands()
    inputs, labels = (torch.from_numpy(part) for part in model_rows(tables, prepared, 0))
    if not len(labels):
        raise UsageError("no row has a class of the study")
    net = FlatModel(network(plan.model)(prepared.shape, prepared.outputs, plan.seed))
    loss = named_loss(plan.loss) or LOSSES["cross_entropy" if prepared.classes else "squared"]
    options: dict[str, Any] = {"l2": plan.l2, "dtype": context.dtype}
    count = torch.tensor([len(labels)])
    train: Any = Stack((inputs, labels), torch.zeros_like(count), count)
    if plan.everyone:
        if not all(isinstance(share, float) and 0.0 <= share < 1.0 for share in (plan.own, plan.test)):
            raise UsageError("the shares of rows that train and test must lie between 0 and 1")
        check_shares(plan.own, plan.test)
        check_parts([("this site", len(labels))], plan.own, plan.test)
        draw = Draw.of(plan.seed).phase("files")
        parts = in_parts((inputs, labels), plan.own, plan.test, draw, client, bool(prepared.classes))
        train, options["valid"], tests = ([part] for part in parts)
        options["tests"] = tests if plan.test else None
    problem = weighting(train, None, net, name_of_loss(loss, prepared), **options)
    task = problem.task
    assert isinstance(task, Supervised)
    if plan.balance:
        task = balanced(task, prepared, context)
    engine = LocalEngine(task, problem.train, problem.valid, None, "sequential")
    own: dict[str, Any] = {"store": store or Store(), "policy": policy, "shares_memory": shares_memory}
    node = PreparedNode(engine, (client,), Names(), model=size(problem.start), **own)
    node.tests = problem.tests
    return node


def same_version(other: str) -> str | None:
    """Why a job or an invitation of another version of coterie is not taken; None where the versions agree."""
    if other == __version__:
        return None
    return (
        f"the coordinator has coterie {other[:40]} and this site {__version__}; install the same one on both sides: "
        f"pip install coterie=={other[:40]}"
    )
