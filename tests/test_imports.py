"""What is not needed is not imported: each takes about as long as importing torch. One process looks at all of it."""

import json
import subprocess
import sys

import pytest

CODE = """
import json
import sys

from coterie.problems import Context
from coterie.problems.catalogue.friends import friends

seen = {}
friends(Context(0))
seen["problem"] = list(sys.modules)

import coterie.cli
import coterie.problems.catalogue.mixture

seen["encoder"] = list(sys.modules)

from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds

for method, problem in [("meritfed", "friends"), ("fednest", "hyper-representation")]:
    names = {"run.method": method, "run.problem": problem, "run.rounds": 1, "problem.clients": 5}
    parts = assemble(load(None, names))
    assert run_rounds(parts, None).summary["outcome"] == "finished"
seen["training"] = list(sys.modules)
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, set[str]]:
    """The modules that are there after a problem was built, before an encoder is opened, and after training."""
    done = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True, timeout=300)
    return {when: set(names) for when, names in json.loads(done.stdout).items()}


@pytest.mark.parametrize(
    ("when", "names"),
    [("problem", {"sklearn", "scipy"}), ("encoder", {"transformers"}), ("training", {"torch._dynamo"})],
)
def test_what_is_not_needed_is_not_imported(seen: dict[str, set[str]], when: str, names: set[str]) -> None:
    assert "coterie.problems" in seen[when]
    assert not names & seen[when]
