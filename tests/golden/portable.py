"""Digests of small portable runs of every method: `python tests/golden/portable.py --write` makes portable.json anew.

Without --write the digests are printed as JSON. A case is a method on a small problem in one precision; its digest is
over all tensors of the final state, what clients remember included, and over all recorded measures.
"""

import json
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

os.environ["COTERIE_PORTABLE"] = "1"  # before torch is used

import torch

from coterie import machine

HERE = Path(__file__).parent
STORED = HERE / "portable.json"
DTYPES = ("float32", "float64")


def digest(result: Any) -> str:
    """Of everything that a run computed."""
    from test_conformance import values

    seen = sha256()
    for name, value in values(result.state):
        plain = (
            value.detach().contiguous().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        )
        seen.update(name.encode() + plain)
    lines = [{k: v for k, v in line.items() if k not in ("seconds", "friends_spread")} for line in result.history]
    for line in lines:  # rows touched are counted, not computed; digests are older than the count and than the spread
        line["communication"] = {k: v for k, v in line["communication"].items() if k != "points"}
    seen.update(json.dumps(lines, sort_keys=True).encode())
    return seen.hexdigest()[:16]


def digests(cases: list[str] | None) -> dict[str, str]:
    """By case, "method on problem in dtype": those that are named, or one problem of every method."""
    sys.path.insert(0, str(HERE.parent / "methods"))
    from test_conformance import FIRST, Case, assemble, run_rounds

    names = cases or [f"{case.method} on {case.problem} in {dtype}" for case in FIRST for dtype in DTYPES]
    found = {}
    for name in names:
        method, _, problem, _, dtype = name.split()
        config = Case(method, problem).config(rounds=2, dtype=dtype).with_run(portable=True)
        found[name] = digest(run_rounds(assemble(config), None))
    return found


def main() -> None:
    write = "--write" in sys.argv
    stored = json.loads(STORED.read_text()) if STORED.is_file() else {}
    found = digests(None if write else list(stored["digests"]))
    if not write:
        print(json.dumps(found))
        return
    version = torch.__version__.partition("+")[0]
    platform = {k: machine.platform()[k] for k in ("blas", "branch", "kernels", "processor", "libc")}
    STORED.write_text(json.dumps({"torch": version, "made on": platform, "digests": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
