"""`python -m coterie` is the command line."""

import sys
from pathlib import Path

# Python puts the current folder first on the path of `python -m`; what lies there is not imported by its name alone
if not sys.flags.safe_path and Path(sys.path[0]).resolve() == Path.cwd() != Path(__file__).resolve().parents[1]:
    del sys.path[0]

from coterie.cli import main

main()
