"""Faults that only show when all rows are known, or when files are compared: found before anything is trained.

What can be read in two ways (another unit, another coding of the label, a code for no value, an impossible number) is
never corrected without consent: it ends the run with a proposal, and a setting accepts or declines that. Rows of the
target that a partner holds too are removed at the partner.

The comparisons take quantiles of each column, and how many rows agree with the target's by hash. Both are in the
ledger. Under [privacy] no file is compared with another, and only the target's own rows are looked at.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Ledger, Shard, Static, work
from coterie.federation.ledger import Entry
from coterie.federation.tree import Tree
from coterie.numerics import Draw
from coterie.problems.files.findings import Finding, Findings
from coterie.problems.files.prepare import ROWS, Quantiles, column_quantiles, dictionaries, federation_of, in_order
from coterie.problems.files.store import RowBuffer
from coterie.problems.files.tables import Tables

SAMPLED = 50_000  # rows that say what is usual in a column
FEWEST = 10  # numbers other than 0 that a column needs to be compared
HUGE, APART = 1e5, 100.0  # times the 90 % quantile of the magnitudes, and times the largest of the others
ZERO = 2.0  # interquartile ranges between the target's lower quartile and 0, for zeros to be doubted
OUTSIDE = 2.0  # ranges of the others between them and a code for no value
NINES = tuple(sign * (10.0**digits - 1) for digits in range(2, 13) for sign in (1, -1))
LONG = 9999.0  # from here on a code for no value need not repeat
NEAR = 0.15  # decades from a power of ten per decade, for one or two of them
CHANCE = 4.0  # times as many equal rows as chance would give are no chance
DISTINCT = 0.95  # of the target's rows must differ from each other, else equal rows are no copies
TRUE = frozenset({"1", "true", "t", "yes", "y", "positive", "pos", "present", "ja", "oui", "si"})
FALSE = frozenset({"0", "false", "f", "no", "n", "negative", "neg", "absent", "nein", "non"})
UNIT_HINTS = {1: "millimetres and centimetres", 2: "per cent and shares", 3: "grams and kilograms"}
REPAIR = "problem.repair=true accepts every proposal."


@dataclass(frozen=True)
class Consent:
    """Which proposals are accepted.

    Args:
        units: by file and column, what the numbers are divided by; 1 says that they are right.
        align_labels: True uses proposed codings of the label, False none, a mapping is used as it is; None asks.
        repair: every proposal is accepted.
        keep: columns that are not looked at.
        strangers: a partner none of whose classes is known is a note, and no fault.
    """

    units: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    align_labels: bool | Mapping[str, str] | None = None
    repair: bool = False
    keep: tuple[str, ...] = ()
    strangers: bool = False


def examined(tables: Tables, consent: Consent, *, private: bool, cache: str | None = None) -> tuple[Tables, Ledger]:
    """The same tables without faults, with what was done, and what was moved; doubtful faults end the run.

    Args:
        tables: everybody's rows. Numbers and codes are corrected in place.
        consent: which corrections are accepted.
        private: compare no file with another, and look at the target's rows only.
        cache: folder for rows that exceed memory.
    """
    doubts, treated = Findings(), Findings()
    tables = tables._replace(holders=tuple(replace(holder) for holder in tables.holders))
    _convert(tables, consent, treated)
    if tables.form.kind == "classification":
        _align(tables, consent, doubts, treated, private=private)
    if tables.form.image is None:
        _extremes(tables, consent, doubts, treated, private=private)
    if private or tables.form.image is not None:
        doubts.settle(len(tables.holders))
        known = [found for found in treated.found if not private or found.file == tables.holders[-1].name]
        return tables._replace(findings=(*tables.findings, *known)), Ledger()
    fed = federation_of(tables)
    if tables.numbers.shape[1]:
        each, _ = fed.gather(column_quantiles, draw=Draw.of(0))
        own = fed.ask_target(column_quantiles, draw=Draw.of(0))
        partners = [Quantiles(*one) for one in zip(*each, strict=True)]
        _units(tables, partners, Quantiles(*own), consent, doubts, treated)
        _zeros(tables, [*partners, Quantiles(*own)], consent, treated)
    doubts.settle(len(tables.holders))
    lists = dictionaries(tables.holders)
    shards = [Shard(None, tables.stack.client(k), lists.client(k)) for k in range(len(tables.holders))]
    mine, often = np.unique(np.concatenate(list(row_hashes(shards[-1]))), return_counts=True)
    if len(mine) >= DISTINCT * tables.holders[-1].rows:
        hashes = torch.from_numpy(mine.view(np.int64))
        copied, ids = fed.gather(shared_rows, hashes, draw=Draw.of(0))
        rows = np.array([tables.holders[k].rows for k in ids.tolist()])
        suspects = {k for k, found in zip(ids.tolist(), copied.numpy() > by_chance(often, rows), strict=True) if found}
        if suspects:
            tables = _without_copies(tables, shards, mine, suspects, treated, cache)
    return tables._replace(findings=(*tables.findings, *treated.found)), fed.ledger


def by_chance(often: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Up to how many of a partner's rows may equal some of the target's without being copies.

    The target's own rows tell how likely two rows are to be equal: a table of few distinct rows has some of its own.

    Args:
        often: how often each distinct row of the target occurs.
        rows: how many rows the partners have.

    Example:
        >>> import numpy as np
        >>> by_chance(np.ones(100), np.array([50])).tolist()  # no row of yours is there twice
        [0.0]
        >>> by_chance(np.array([1] * 96 + [2] * 2), np.array([50])).round(1).tolist()
        [12.1]
    """
    n = often.sum()
    pairs = float((often * (often - 1)).sum() / 2)
    if pairs == 0.0:
        return np.zeros(len(rows))
    return np.asarray(CHANCE * rows * n * pairs / (n * (n - 1) / 2) + CHANCE)


def examined_alone(
    tables: Tables, usual: Quantiles | None, consent: Consent
) -> tuple[Tables, dict[str, list[Finding]], list[Finding]]:
    """One file against the summary of the target's: the same without faults, doubts by kind, and what was done.

    Args:
        tables: the rows of one holder, then the target as a holder without rows, whose words are its summary.
        usual: quantiles of the target's columns of numbers; None compares no units.
        consent: which corrections are accepted.
    """
    doubts: dict[str, Findings] = {"label": Findings(), "values": Findings(), "unit": Findings()}
    treated = Findings()
    tables = tables._replace(holders=tuple(replace(holder) for holder in tables.holders))
    _convert(tables, consent, treated)
    if tables.form.kind == "classification":
        _align(tables, consent, doubts["label"], treated, private=False)
    _extremes(tables, consent, doubts["values"], treated, private=False)
    if usual is not None and tables.form.numbers():
        shard = Shard(None, tables.stack.client(0), None)
        own = Quantiles(*column_quantiles(shard, None, None, Static(), Draw.of(0)))
        _units(tables, [own], usual, consent, doubts["unit"], treated)
    return tables, {kind: found.found for kind, found in doubts.items() if found.found}, treated.found


def together(*ledgers: Ledger) -> Ledger:
    """What was moved in all."""
    entries: dict[str, Entry] = {}
    for ledger in ledgers:
        for cause, entry in ledger.by_cause.items():
            entries[cause] = entries.get(cause, Entry()).plus(entry)
    whole = Ledger(entries)
    for ledger in ledgers:
        whole.seen.merge(ledger.seen)
    return whole


def as_note(finding: Finding) -> str:
    """One line for a page or a terminal."""
    end = "" if finding.what.endswith("?") else "."
    return f"{finding.file}: {finding.what}" + (f"{end} {finding.remedy.rstrip('.')}" if finding.remedy else "")


def _rows(tables: Tables, k: int) -> slice:
    start = int(tables.stack.offsets[k])
    return slice(start, start + tables.holders[k].rows)


def _convert(tables: Tables, consent: Consent, treated: Findings) -> None:
    """Divide what problem.units names."""
    columns = tables.form.numbers()
    names = [holder.name for holder in tables.holders[:-1]]
    for file, factors in consent.units.items():
        if file not in names:
            raise UsageError(f"problem.units names {file!r}, which is none of the partners' files: {', '.join(names)}.")
        k = names.index(file)
        for column, factor in factors.items():
            if column not in columns:
                raise UsageError(
                    f"problem.units of {file}: {column!r} is none of the columns of numbers: {', '.join(columns)}."
                )
            if factor != 1.0:
                tables.numbers[_rows(tables, k), columns.index(column)] /= factor
                treated.add(file, f"column {column!r} was divided by {factor:,.15g} (problem.units)")


def proposed_coding(theirs: set[str], mine: set[str]) -> dict[str, str]:
    """The target's class for each class of a partner that the target lacks, where the coding can be guessed.

    Tried in turn: the same but for capitals; words for true and false; abbreviations; two numbers by their order.

    Args:
        theirs: the classes of a partner.
        mine: the classes of the target.

    Example:
        >>> sorted(proposed_coding({"Yes", "No"}, {"0", "1"}).items())
        [('No', '0'), ('Yes', '1')]
    """
    strange = theirs - mine
    cased = {word: [m for m in mine if m.casefold() == word.casefold()] for word in strange}
    if found := {word: near[0] for word, near in cased.items() if len(near) == 1}:
        return found
    if not strange or len(mine) != 2:
        return {}
    true, false = ([m for m in mine if m.casefold() in known] for known in (TRUE, FALSE))
    if len(true) == len(false) == 1 and all(word.casefold() in TRUE | FALSE for word in strange):
        return {word: (true if word.casefold() in TRUE else false)[0] for word in strange}
    short = {w: [m for m in mine if _abbreviates(w.casefold(), m.casefold())] for w in strange}
    if all(len(near) == 1 for near in short.values()) and len({near[0] for near in short.values()}) == len(strange):
        return {word: near[0] for word, near in short.items()}
    ordered = [sorted(words, key=in_order) for words in (theirs, mine)]
    if len(theirs) == 2 and all(in_order(word)[0] == 0 for words in ordered for word in words):
        return dict(zip(*ordered, strict=True))
    return {}


def _abbreviates(a: str, b: str) -> bool:
    return a[:1].isalpha() and (a.startswith(b) or b.startswith(a))


def _align(tables: Tables, consent: Consent, doubts: Findings, treated: Findings, *, private: bool) -> None:
    """The labels of partners in the target's coding, by proposal and consent. Under [privacy] nothing is reported."""
    *partners, target = tables.holders
    mine, accepted = set(target.words[-1]), consent.align_labels
    if accepted is False:
        return
    for k, holder in enumerate(partners):
        theirs = set(holder.words[-1])
        if theirs <= mine:
            continue
        if isinstance(accepted, Mapping):
            coding = {word: accepted[word] for word in theirs if word in accepted}
        else:
            coding = proposed_coding(theirs, mine)
        if strange := sorted(set(coding.values()) - mine):
            raise UsageError(
                f"problem.align_labels leads to {', '.join(map(repr, strange))}, no class of {target.name}: "
                f"{', '.join(map(repr, sorted(mine, key=in_order)))}."
            )
        if not coding:
            if not theirs & mine and not private:
                (treated if consent.strangers else doubts).add(
                    holder.name, *_nothing_in_common(theirs, mine, target.name)
                )
            continue
        shown = ", ".join(f"{word} → {coding[word]}" for word in sorted(coding, key=in_order))
        if accepted or consent.repair:
            _recode(tables, k, coding)
            treated.add(holder.name, f"classes in another coding were aligned: {shown}")
        elif not private:
            listed = ", ".join(map(repr, sorted(theirs, key=in_order)[:5]))
            doubts.add(
                holder.name,
                f"its classes {listed} are not those of {target.name}: the same in another coding? Proposed: {shown}",
                'Set problem.align_labels=true to use the proposed codings, problem.align_labels={theirs = "mine"} for '
                f"your own, or problem.align_labels=false to train them as other classes; {REPAIR}",
            )


def _nothing_in_common(theirs: set[str], mine: set[str], target: str) -> tuple[str, str]:
    """What is wrong with a partner all of whose classes are unknown to the target, and the remedy."""
    own, others = sorted(mine, key=in_order), sorted(theirs, key=in_order)
    pairs = ", ".join(f'{_key(word)} = "{own[min(i, len(own) - 1)]}"' for i, word in enumerate(others[:3]))
    return (
        f"none of its classes {', '.join(map(repr, others[:5]))} is a class of {target}, which has "
        f"{', '.join(map(repr, own[:5]))}",
        f"Say which is which, for example problem.align_labels={{{pairs}}}, or set problem.align_labels=false to train "
        "them as other classes.",
    )


def _recode(tables: Tables, k: int, coding: Mapping[str, str]) -> None:
    """Other words for a holder's classes; two old ones may become one."""
    known: dict[str, int] = {}
    codes = [known.setdefault(coding.get(word, word), len(known)) for word in tables.holders[k].words[-1]]
    column = tables.codes[_rows(tables, k), -1]
    column.copy_(torch.tensor([*codes, -1], dtype=column.dtype)[column.long()])
    tables.holders[k].words = [*tables.holders[k].words[:-1], known]


@dataclass
class _Column:
    """What one column holds: codes of nines and huge numbers with their counts, and the range of all others."""

    odd: dict[float, int] = field(default_factory=dict)
    low: float = np.inf
    high: float = -np.inf

    def far(self) -> dict[float, int]:
        """The values that cannot be measurements like the others."""
        spread, largest = self.high - self.low, max(abs(self.low), abs(self.high))
        return {
            value: count
            for value, count in self.odd.items()
            if np.isfinite(spread) and (self._code(value, count, spread) or self._huge(value, largest))
        }

    def _code(self, value: float, count: int, spread: float) -> bool:
        beyond = max(value - self.high, self.low - value)
        return value in NINES and beyond > OUTSIDE * spread > 0 and (count > 1 or abs(value) >= LONG)

    def _huge(self, value: float, largest: float) -> bool:
        return value not in NINES and abs(value) >= APART * largest


def odd_values(x: np.ndarray) -> list[_Column]:
    """For each column of one holder's numbers [n, p], the values that are far outside the others.

    Args:
        x: numbers, NaN where missing.
    """
    usual = np.array([_usual(column) for column in np.abs(x[:: max(1, len(x) // SAMPLED)]).T])
    columns = [_Column() for _ in usual]
    for start in range(0, len(x), ROWS):
        block = x[start : start + ROWS]
        odd = np.abs(block) > HUGE * usual
        for code in NINES:
            odd |= block == code
        for value, j in zip(block[odd].tolist(), np.nonzero(odd)[1].tolist(), strict=True):
            columns[j].odd[value] = columns[j].odd.get(value, 0) + 1
        others = (
            np.where(odd | np.isnan(block), np.inf, block).min(0),
            np.where(odd | np.isnan(block), -np.inf, block).max(0),
        )
        for column, low, high in zip(columns, *others, strict=True):
            column.low, column.high = min(column.low, float(low)), max(column.high, float(high))
    return columns


def _usual(magnitudes: np.ndarray) -> float:
    """The 90 % quantile of the numbers other than 0; ∞ where they are few."""
    known = magnitudes[magnitudes > 0]
    return float(np.sort(known)[int(0.9 * (len(known) - 1))]) if len(known) >= FEWEST else np.inf


def _extremes(tables: Tables, consent: Consent, doubts: Findings, treated: Findings, *, private: bool) -> None:
    """Codes for no value and impossible numbers, at each holder on its own."""
    columns, found = tables.form.numbers(), []
    for k, holder in enumerate(tables.holders):
        if private and k < len(tables.holders) - 1:
            continue
        x = tables.numbers[_rows(tables, k)].numpy()
        for j, (name, column) in enumerate(zip(columns, odd_values(x), strict=True)):
            if name not in consent.keep and (far := column.far()):
                found.append((holder.name, name, column, far))
                if consent.repair and name != tables.form.label:
                    x[np.isin(x[:, j], list(far)), j] = np.nan
    values = sorted({value for *_, far in found for value in far})
    for file, name, column, far in found:
        shown = ", ".join(f"{value:.15g} in {count} row{'s' if count > 1 else ''}" for value, count in far.items())
        kind = "a code for no value" if set(far) <= set(NINES) else "impossible"
        what = f"column {name!r} holds {shown}, far outside the others ({column.low:.4g} to {column.high:.4g}): {kind}?"
        if name == tables.form.label:
            doubts.add(file, what, f"Correct the labels, delete the rows, or set problem.keep=['{name}'].")
        elif consent.repair:
            treated.add(file, f"{what} Read as missing", f"problem.keep=['{name}'] uses it all the same")
        else:
            listed = ", ".join(f"'{value:.15g}'" for value in values)
            doubts.add(
                file,
                what,
                f"Set problem.missing=[{listed}] to read such values as missing, or problem.keep=['column'] if they "
                f"are right; {REPAIR}",
            )


def decades(theirs: Quantiles, mine: Quantiles) -> list[tuple[int, float]]:
    """For each column, the power of ten by which a partner's numbers are off (0 for none), and the shift in decades.

    All quantiles of log₁₀|x| must be shifted by about the same whole number of decades, by more than the column varies
    by itself, beyond what so few rows leave open.

    Args:
        theirs: the partner's quantiles.
        mine: the target's.
    """
    found = []
    for n, m, a, b in zip(theirs.nonzero.tolist(), mine.nonzero.tolist(), theirs.logs, mine.logs, strict=True):
        if min(n, m) < FEWEST:
            found.append((0, 0.0))
            continue
        gap = a - b
        shift = float(gap.median())
        power = round(shift)
        width = max(float(a[2] - a[0]), float(b[2] - b[0]))
        tolerance = NEAR * min(2, abs(power)) + 2 * width * (1 / n + 1 / m) ** 0.5
        fits = float((gap - power).abs().max()) <= min(tolerance, 0.5) and abs(shift) >= 1.5 * width
        found.append((power if fits else 0, shift))
    return found


def _units(
    tables: Tables, each: list[Quantiles], own: Quantiles, consent: Consent, doubts: Findings, treated: Findings
) -> None:
    """Columns that are a power of ten larger or smaller at one partner than in the target's file."""
    *partners, target = tables.holders
    shifts = [decades(theirs, own) for theirs in each]
    found = []
    for j, column in enumerate(tables.form.numbers()):
        if column in consent.keep:
            continue
        honest = max((abs(one[j][1]) for one in shifts if one[j][0] == 0), default=0.0)
        off = [k for k, one in enumerate(shifts) if one[j][0] and abs(one[j][1]) >= 2 * honest]
        off = [k for k in off if column not in consent.units.get(partners[k].name, {})]
        found += [(k, j, column, shifts[k][j][0], len(off)) for k in off]
    proposal: dict[str, dict[str, float]] = {}
    for k, _, column, power, _ in found:
        proposal.setdefault(partners[k].name, {})[column] = 10.0**power
    for k, j, column, power, alike in found:
        here, there = float(own.middle[j]), float(each[k].middle[j])
        times = f"{10.0 ** abs(power):,.0f} times {'larger' if power > 0 else 'smaller'}"
        hint = f", such as {UNIT_HINTS[abs(power)]}" if abs(power) in UNIT_HINTS else ""
        what = f"column {column!r} is about {times} than in {target.name} (median {there:,.6g}, not {here:,.6g})"
        if alike > 1 and 2 * alike > len(partners):
            hint += f"; {alike} of {len(partners)} partners differ like this, so {target.name} may be the odd one"
        if consent.repair:
            tables.numbers[_rows(tables, k), j] /= 10.0**power
            treated.add(partners[k].name, f"{what}: divided by {10.0**power:,.15g}")
            continue
        doubts.add(
            partners[k].name,
            f"{what}: another unit{hint}?",
            f"Set problem.units={_inline(proposal)} to divide by that; write 1 for a column that is right, or "
            f"problem.keep=['column']; {REPAIR}",
        )


def _zeros(tables: Tables, each: list[Quantiles], consent: Consent, treated: Findings) -> None:
    """Zeros where the target's quartiles leave no place for them: reported, and missing only with consent."""
    mine = each[-1]
    bound = mine.low - ZERO * (mine.high - mine.low)
    impossible = (bound > 0) & (mine.nonzero >= FEWEST) & (mine.least > bound)
    for k, (holder, found) in enumerate(zip(tables.holders, each, strict=True)):
        alone = impossible & ((found.least > bound) | (found.nonzero == 0))
        for j, column in enumerate(tables.form.numbers()):
            zeros = int(found.zeros[j])
            if not zeros or not alone[j] or column in (*consent.keep, tables.form.label):
                continue
            what = (
                f"column {column!r} is 0 in {zeros:,} of {zeros + int(found.nonzero[j]):,} rows: a code for no value?"
            )
            if consent.repair:
                part = tables.numbers[_rows(tables, k), j]
                part[part == 0.0] = torch.nan
                treated.add(holder.name, f"{what} Read as missing")
            else:
                treated.add(
                    holder.name,
                    what,
                    "Used as it is; leave such fields empty, or set problem.repair=true to read them as missing",
                )


def _inline(proposal: Mapping[str, Mapping[str, float]]) -> str:
    """As TOML on one line."""
    inner = (
        f'"{file}" = {{{", ".join(f"{_key(c)} = {factor:.15g}" for c, factor in columns.items())}}}'
        for file, columns in proposal.items()
    )
    return f"{{{', '.join(inner)}}}"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'


def row_hashes(shard: Shard) -> Iterator[np.ndarray]:
    """A hash of each row, numbers to twelve digits, words and the label; a block of rows at a time, uint64."""
    assert shard.train is not None
    assert shard.valid is not None
    places, letters = (column.numpy() for column in shard.valid.columns)
    digests = [int.from_bytes(blake2b(bytes(word).rstrip(b"\0"), digest_size=8).digest(), "little") for word in letters]
    known = np.array(digests, dtype=np.uint64)
    for batch in shard.train.blocks(ROWS):
        numbers, codes = (column.numpy() for column in batch.columns)
        fraction, exponent = np.frexp(np.where(np.isnan(numbers), np.pi * 2.0**900, numbers))
        parts = [(np.round(fraction * 2.0**40).astype(np.int64) * 4096 + exponent).astype(np.uint64)]
        for j in range(codes.shape[1]):
            own = np.append(known[places == j], np.uint64(0))
            parts.append(own[codes[:, j]][:, None])
        table = np.concatenate(parts, axis=1)
        total = np.zeros(len(table), dtype=np.uint64)
        for j in range(table.shape[1]):
            total = _mixed(total * np.uint64(0x9E3779B97F4A7C15) + table[:, j])
        yield total


def _mixed(x: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood's finaliser (SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@work("file-checks/shared-rows", update=None, mode="sequential")
def shared_rows(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """How many of a holder's rows have a hash on the target's list."""
    mine = shared.numpy().view(np.uint64)
    return torch.tensor(sum(int(_among(hashes, mine).sum()) for hashes in row_hashes(shard)))


def _among(hashes: np.ndarray, listed: np.ndarray) -> np.ndarray:
    """Which hashes are on a sorted list."""
    place = np.searchsorted(listed, hashes).clip(max=len(listed) - 1)
    return np.asarray(listed[place] == hashes)


def _without_copies(
    tables: Tables, shards: list[Shard], mine: np.ndarray, suspects: set[int], treated: Findings, cache: str | None
) -> Tables:
    """The same without the suspects' rows that the target has; a partner that has no others is left out."""
    target = tables.holders[-1]
    numbers = RowBuffer(tuple(tables.numbers.shape[1:]), "float64", mapped=tables.mapped, folder=cache)
    codes = RowBuffer(tuple(tables.codes.shape[1:]), "int32", mapped=tables.mapped, folder=cache)
    left = []
    for k, (holder, shard) in enumerate(zip(tables.holders, shards, strict=True)):
        before, start = numbers.rows, _rows(tables, k).start
        for hashes in row_hashes(shard):
            stop = start + len(hashes)
            fresh = ~_among(hashes, mine) if k in suspects else np.ones(len(hashes), dtype=bool)
            numbers.append(tables.numbers[start:stop].numpy()[fresh])
            codes.append(tables.codes[start:stop].numpy()[fresh])
            start = stop
        rows = numbers.rows - before
        if rows < holder.rows:
            what = f"{holder.rows - rows:,} of {holder.rows:,} rows are also in {target.name}"
            end = "they were removed" if rows else "the file is left out"
            treated.add(holder.name, f"{what}; {end}", "Rows that you have already cannot help you")
        if rows:
            left.append(replace(holder, rows=rows))
    if len(left) < 2:
        raise UsageError(
            f"no partner has a row that {target.name} lacks; there is nobody to learn from. "
            "Name the partners' own files."
        )
    return tables._replace(holders=tuple(left), numbers=numbers.tensor(), codes=codes.tensor())
