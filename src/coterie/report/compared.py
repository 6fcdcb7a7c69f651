"""A comparison as tables: Markdown, CSV, LaTeX, HTML, and in the terminal."""

import csv
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from coterie.measures import of_result
from coterie.report.page import table, write
from coterie.report.results import is_number, read_all
from coterie.report.svg import esc, size
from coterie.storage import cell, write_atomically


class Row(NamedTuple):
    """One method, as text."""

    method: str
    value: str
    rank: str
    difference: str
    p_t: str
    p_exact: str
    seeds: str
    rounds: str
    moved: str
    seconds: str


def head(result: Mapping[str, Any]) -> Row:
    """The columns' names."""
    label, ahead = of_result(result).label, f"{result['tests']['reference']} is ahead by"
    return Row("method", label, "mean rank", ahead, "p, t", "p, exact", "seeds", "rounds", "moved", "seconds")


def rows(result: Mapping[str, Any]) -> list[Row]:
    """One row per method, best first."""
    measure = of_result(result)
    tests = {test["method"]: test for test in result["tests"]["comparisons"]}
    known = [row for row in result["rows"] if row["mean"] is not None]
    known.sort(key=lambda row: row["mean"], reverse=result["higher_is_better"])
    out = []
    for row in known + [row for row in result["rows"] if row["mean"] is None]:
        test = tests.get(row["method"], {})
        sign = 1 if result["higher_is_better"] else -1
        gap = test.get("difference")
        unfinished = f" ({row['unfinished']} unfinished)" if row["unfinished"] else ""
        out.append(
            Row(
                row["method"],
                "–" if row["mean"] is None else measure.spread(row["mean"], row["std"]),
                "–" if row["rank"] is None else f"{row['rank']:.2g}",
                "" if gap is None else measure.gap(sign * gap),
                _p(test.get("p_holm")),
                _p(test.get("p_exact")),
                f"{len(row['values'])}{unfinished}",
                "–" if row["rounds"] is None else f"{row['rounds']:g}",
                "–" if row["bytes"] is None else size(row["bytes"]),
                "–" if row["seconds"] is None else f"{row['seconds']:.1f}",
            )
        )
    return out


def _p(p: float | None) -> str:
    return "" if p is None else "< 0.001" if p < 1e-3 else f"{p:.2g}"


def caption(result: Mapping[str, Any]) -> str:
    """What the figures are."""
    limit = f"{result['rounds']} rounds"
    if result["budget"] is not None:
        limit = f"at most {size(result['budget'])} moved, at most {limit}"
    if result.get("exchanges") is not None:
        limit = f"{result['exchanges']} rounds of communication, at most {limit}"
    seeds = ", ".join(map(str, result["seeds"]))
    return (
        f"Problem {result['problem']}, {limit}, seeds {seeds}; mean ± standard deviation over seeds. "
        f"p: paired over seeds against {result['tests']['reference']}; t-test (by Holm's rule) and exact sign flips. "
        f"{result['tests']['note']}"
    )


def markdown(result: Mapping[str, Any]) -> str:
    """A Markdown table."""
    lines = [head(result), Row(*["---"] * len(Row._fields)), *rows(result)]
    cells = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*cells, "", caption(result)]) + "\n"


def latex(result: Mapping[str, Any]) -> str:
    """A LaTeX tabular, for booktabs."""

    def line(cells: Row) -> str:
        return " & ".join(_tex(cell) for cell in cells) + r" \\"

    spec = "l" + "r" * (len(Row._fields) - 1)
    body = [rf"\begin{{tabular}}{{{spec}}}", r"\toprule", line(head(result)), r"\midrule", *map(line, rows(result))]
    return "\n".join([f"% {caption(result)}", *body, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _tex(text: str) -> str:
    for mark, written in (("\\", r"\textbackslash{}"), ("&", r"\&"), ("%", r"\%"), ("_", r"\_"), ("#", r"\#")):
        text = text.replace(mark, written)
    return text.replace("±", r"$\pm$").replace("−", "$-$").replace("–", "--").replace("<", "$<$")


def comma_separated(result: Mapping[str, Any]) -> str:
    """One line per run, with plain numbers: for spreadsheets and further analysis."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    measures = list(dict.fromkeys(k for run in result["runs"] for k, v in run["final"].items() if is_number(v)))
    traffic = ("bytes_up", "bytes_down")
    columns = ["method", "seed", "outcome", "rounds", "seconds", *traffic, *measures]
    writer.writerow([cell(value) for value in columns])
    for run in result["runs"]:
        moved = [run["communication"][key] for key in traffic]
        values = [run["final"].get(key) if is_number(run["final"].get(key)) else "" for key in measures]
        row = [run["method"], run["seed"], run["outcome"], run["rounds"], run["seconds"], *moved, *values]
        writer.writerow([cell(value) for value in row])
    return out.getvalue()


def section(result: Mapping[str, Any]) -> str:
    """The part of the page that only a comparison has."""
    inside = table(head(result), rows(result))
    return f"<section><h2>The comparison</h2>{inside}<p>{esc(caption(result))}</p></section>"


def save(result: Mapping[str, Any], folder: Path) -> Path:
    """table.md, table.csv, table.tex, report.html and plots; where the page is."""
    write_atomically(folder / "table.csv", comma_separated(result).encode())
    if result["measure"] is not None:
        write_atomically(folder / "table.md", markdown(result).encode())
        write_atomically(folder / "table.tex", latex(result).encode())
    runs, complaints = read_all([folder / run["folder"] for run in result["runs"]])
    if result["measure"] is not None:  # the page shows it first, too
        chosen = of_result(result)
        runs = [replace(run, measures=(chosen, *(m for m in run.measures if m != chosen))) for run in runs]
    return write(folder, runs, complaints, section(result) if result["measure"] is not None else "")


def _narrow(row: Row) -> tuple[str, ...]:
    """What fits a terminal; the rest is in the files."""
    return row.method, row.value, row.rank, row.difference, row.p_t, row.p_exact, row.moved


def show(console: Console, result: Mapping[str, Any], page: Path) -> None:
    """The table in the terminal."""
    if result["measure"] is None:
        console.print("No run finished with a measure that all of them have; see compare.json.")
    else:
        shown = Table(box=None, pad_edge=False)
        for i, name in enumerate(_narrow(head(result))):
            shown.add_column(name, justify="left" if i == 0 else "right", no_wrap=i < 2)
        for row in rows(result):
            shown.add_row(*_narrow(row))
        console.print(shown)
        console.print(f"\n{caption(result)}")
    files = "table.md, table.csv, table.tex, compare.json"
    console.print(f"\nThe report is in {page}; beside it {files}, plots and the runs.", markup=False)
