"""The tables of the pages, from the stored results in docs/results.

    python docs/tables.py                                 write every table anew
    python docs/tables.py runs/x/NAME-SCALE.json [...]    take results over first

`coterie reproduce NAME --scale SCALE --out runs/x` writes such a file. A page shows it between two markers,
`<!-- result: NAME SCALE -->` and `<!-- end of result -->`; put the markers where the table is wanted. Between
`<!-- studies -->` and `<!-- end of studies -->` stands what made each of them: command, time, machine. Between
`<!-- count -->` and `<!-- end of count -->` the verdicts of the page's table are counted.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from coterie.reproduce import leaderboard, markdown, study

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS / "results"
NUMBERS = re.compile(r"\[\s+((?:-?[\d.]+(?:e[-+]?\d+)?|null)(?:,\s+(?:-?[\d.]+(?:e[-+]?\d+)?|null))*)\s+\]")
PLACE = re.compile(r"(<!-- result: (?P<name>\S+) (?P<scale>\S+) -->\n).*?(<!-- end of result -->)", re.DOTALL)
LIST = re.compile(r"(<!-- studies -->\n).*?(<!-- end of studies -->)", re.DOTALL)
COUNT = re.compile(r"(<!-- count -->\n).*?(<!-- end of count -->)", re.DOTALL)
VERDICTS = {  # in the second column of a table: one claim, several
    "holds": ("holds", "hold"),
    "in part": ("holds in part", "hold in part"),
    "does not hold": ("does not hold", "do not hold"),
    "not tested": ("could not be tested", "could not be tested"),
}
VERDICT = re.compile(rf"^\| [^|]+ \| ({'|'.join(VERDICTS)}) \|", re.MULTILINE)
CPU = re.compile(r"\(R\)| Processor| @ [\d.]+GHz|cpu ")


def filled(text: str) -> str:
    """A page with its tables as the stored results have them."""

    def table(found: re.Match[str]) -> str:
        if found["name"] == "leaderboard":
            text = leaderboard.page(found["scale"], board(found["scale"]), "images/")
            return f"{found[1]}\n{text}\n{found[4]}"
        stored = RESULTS / f"{found['name']}-{found['scale']}.json"
        return f"{found[1]}\n{markdown(json.loads(stored.read_text(encoding='utf-8')))}\n{found[4]}"

    text = COUNT.sub(lambda found: f"{found[1]}\n{counted(text)}\n\n{found[2]}", PLACE.sub(table, text))
    return LIST.sub(lambda found: f"{found[1]}\n{studies()}\n{found[2]}", text)


def counted(text: str) -> str:
    """How many claims of a page have which verdict."""
    found = VERDICT.findall(text)
    numbers = {verdict: found.count(verdict) for verdict in VERDICTS if verdict in found}
    parts = [f"{count} {VERDICTS[verdict][count > 1]}" for verdict, count in numbers.items()]
    return f"Of {len(found)} claims {', '.join(parts[:-1])} and {parts[-1]}."


def studies() -> str:
    """One line per stored result, but for the leaderboard's: what made it, how long its runs took, and on what."""
    lines = ["| stored result | command | rows | seeds | time | processor | date |", "|---|---|---|---|---|---|---|"]
    for stored in sorted(RESULTS.glob("*.json")):
        result = json.loads(stored.read_text(encoding="utf-8"))
        if not result["name"].startswith(leaderboard.PREFIX):
            lines.append(f"| `{stored.stem}` | {' | '.join(made_by(result))} |")
    return "\n".join(lines) + "\n"


def made_by(result: dict[str, Any]) -> list[str]:
    """The command, how much of the study there is, the time of its runs, processors and date."""
    table = study(result["name"]).scales[result["scale"]]
    parts = [*result.get("earlier", []), result]
    seconds = [part["seconds"] for part in parts if part.get("seconds") is not None]
    rows, there = {row.name for row in table.rows}, {row["name"] for row in result["rows"]}
    processors = dict.fromkeys(CPU.sub("", part.get("platform", {}).get("processor", "")) for part in parts)
    return [
        f"`coterie reproduce {result['name']} --scale {result['scale']}`",
        "all" if rows <= there else f"{len(rows & there)} of {len(rows)}",
        ", ".join(map(str, result["seeds"])) if len(result["seeds"]) < 6 else f"{len(result['seeds'])}",
        duration(sum(seconds)) if seconds else "not kept",
        "; ".join(filter(None, processors)) or "not kept",
        result["date"],
    ]


def duration(seconds: float) -> str:
    """In minutes, or in hours where it is longer than two."""
    return f"{seconds / 3600:.1f} h" if seconds > 7200 else f"{max(1, round(seconds / 60))} min"


def board(scale: str) -> list[Any]:
    """The stored tables of the leaderboard, in its order."""
    files = [RESULTS / f"{leaderboard.PREFIX}{name}-{scale}.json" for name in leaderboard.NAMES]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]


def pages() -> list[Path]:
    """Every page."""
    return sorted(DOCS.rglob("*.md"))


def shown() -> set[str]:
    """The names of the stored results that pages show; the leaderboard shows all of its tables."""
    found = {(f["name"], f["scale"]) for page in pages() for f in PLACE.finditer(page.read_text(encoding="utf-8"))}
    boards = [scale for name, scale in found if name == "leaderboard"]
    tables = {f"{result['name']}-{scale}" for scale in boards for result in board(scale)}
    return {f"{name}-{scale}" for name, scale in found if name != "leaderboard"} | tables


def take(source: Path) -> Path:
    """A result of `coterie reproduce` into docs/results."""
    result = json.loads(source.read_text(encoding="utf-8"))
    out = RESULTS / f"{result['name']}-{result['scale']}.json"
    out.write_text(on_few_lines(json.dumps(result, indent=1, ensure_ascii=False)) + "\n", encoding="utf-8")
    return out


def on_few_lines(text: str) -> str:
    """JSON with every list of numbers on one line."""
    return NUMBERS.sub(lambda found: f"[{', '.join(part.strip() for part in found[1].split(','))}]", text)


def main() -> None:
    for source in sys.argv[1:]:
        print("took over", take(Path(source)))
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            page.write_text(filled(text), encoding="utf-8")
            print("wrote", page)
    for chart in leaderboard.diagrams(leaderboard.summary("small", board("small"))):
        (DOCS / "images" / f"{chart.name}.svg").write_text(chart.file(paper=True), encoding="utf-8")
    for stored in sorted(RESULTS.glob("*.json")):
        if stored.stem not in shown():
            print(f"no page shows {stored.name}; put <!-- result: … --> markers where it belongs")


if __name__ == "__main__":
    main()
