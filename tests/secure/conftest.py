"""The cases of the methods' conformance tests and the networks of the nodes' tests are used here too."""

import sys
from pathlib import Path

for folder in ("methods", "remote"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
