"""The table "who sees what" of docs/SECURITY.md, one row per method, from rehearsals in which no client is asked.

python tests/secure/seen.py           print the table
python tests/secure/seen.py --write   write it into docs/SECURITY.md; refused where that would delete a disclosure
"""

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / name) for name in ("methods", "secure")]

from test_conformance import CASES  # noqa: E402

from coterie.experiment.build import build_problem_and_method  # noqa: E402
from coterie.experiment.config import FederationTable, resolve  # noqa: E402
from coterie.experiment.rehearsal import Prospect, rehearsed  # noqa: E402
from coterie.federation.account import Viewer  # noqa: E402
from coterie.methods.registry import METHODS, method_entry  # noqa: E402

PAGE = HERE.parents[1] / "docs" / "SECURITY.md"
BEGIN, END = "<!-- who sees what: tests/secure/seen.py -->", "<!-- end of who sees what -->"
SETTING = {"meritfed": {"solver": "lagged"}, "primal-dual": {"scalar": "client"}}
HEAD = (
    "| method | the server, of each client | the server, with `federation.secure` | the server, of a target that is a "
    "client |\n|---|---|---|---|"
)
UNLIMITED = 10**9
LAYERED = ("fedper", "fedrep", "fedbn")  # their settings name layers, which the small models do not have by default
CHECK = (
    "docs/SECURITY.md and the rehearsal differ. First find out which of them is right: what the page says and the "
    "rehearsal does not find may be shown with other settings than those of `prospect`, or in later rounds. Then run "
    "python tests/secure/seen.py --write, which adds what is missing and deletes nothing."
)


def prospect(name: str, *, secure: bool = False, target: Any = "server") -> Prospect:
    """What a rehearsal of a method on a small problem finds."""
    case = next(case for case in CASES if case.method == name)
    tables = case.config(dtype="float64", mode="vmap", rounds=2).as_dict()
    tables.pop("version")
    if name not in LAYERED:  # the quick settings of tests name steps, and spare methods the questions that choose them
        tables["method"] = {}
    tables["method"] |= SETTING.get(name, {}) if secure else {}
    problem, method = build_problem_and_method(resolve(tables))
    return rehearsed(method, problem, FederationTable(secure=secure, reveal=UNLIMITED, target=target))


def seen(found: Prospect, viewer: Viewer, *, of_target: bool = False) -> str:
    """What somebody sees, in words: kinds, and the works that they are the results of."""
    kinds: dict[str, list[str]] = {}
    for row in found.seen.rows(viewer):
        if row.what != "sizes" and (row.what == "of the target") == of_target:
            kinds.setdefault(row.what, []).append(f"`{row.cause}`")
    texts = [f"{'' if of_target else f'{what}: '}{', '.join(sorted(causes))}" for what, causes in sorted(kinds.items())]
    return "; ".join(texts) or "nothing"


def row(name: str) -> str:
    """One line of the table."""
    entry, plain = method_entry(name), prospect(name)
    assert not plain.cut, (name, plain.cut)
    hidden = "cannot be secure"
    if entry.secure != "no":
        found = prospect(name, secure=True)
        assert not found.cut, (name, found.cut)
        setting = ", ".join(f"`{key} = {value}`" for key, value in SETTING.get(name, {}).items())
        hidden = f"{seen(found, 'server')}{f' ({setting})' if setting else ''}"
    of_target = "asks none"
    if "target" in entry.make().needs:
        of_target = seen(prospect(name, target=0), "server", of_target=True)
    return f"| `{name}` | {seen(plain, 'server')} | {hidden} | {of_target} |"


def table() -> str:
    """All rows."""
    return "\n".join([HEAD, *(row(entry.name) for entry in METHODS)])


def rows_of(text: str) -> dict[str, str]:
    """The rows of a table by method."""
    return {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}


def shown() -> dict[str, str]:
    """The rows of the page by method."""
    return rows_of(PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0])


def deleted(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The disclosures, by method and column, that one table has and the other has not."""
    found = []
    for name, line in before.items():
        columns = zip(line.split("|")[2:], after.get(name, "").split("|")[2:] or [""] * line.count("|"), strict=False)
        for old, new in columns:
            lost = set(re.findall(r"`[^`]+`", old)) - set(re.findall(r"`[^`]+`", new))
            found += [f"{name}: {cause} of{old}" for cause in sorted(lost)]
    return found


def main() -> None:
    made = table()
    if "--write" not in sys.argv:
        print(made)
        return
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    old, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{PAGE} has no {BEGIN} … {END}")
    if lost := deleted(rows_of(old), rows_of(made)):
        remedy = (
            "Where one is not shown with any settings any more, delete it from the page by hand, and run this again."
        )
        raise SystemExit("\n".join([f"this would delete disclosures from {PAGE}:", *lost, remedy]))
    PAGE.write_text(f"{before}{mark}\n{made}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
