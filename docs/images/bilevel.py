"""Curves of docs/bilevel.md, from the stored results: `python docs/images/bilevel.py`."""

import json
from pathlib import Path

from coterie.reproduce.curves import drawn

HERE = Path(__file__).resolve().parent


def main() -> None:
    for stored in sorted((HERE.parent / "results").glob("bilevel-*.json")):
        for chart in drawn(json.loads(stored.read_text(encoding="utf-8"))):
            out = HERE / f"{stored.stem}.svg"
            out.write_text(chart.file(paper=True), encoding="utf-8")
            print("wrote", out)


if __name__ == "__main__":
    main()
