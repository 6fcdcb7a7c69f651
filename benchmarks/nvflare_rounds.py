"""NVIDIA FLARE: milliseconds an exchange beside FLARE's own call, and seconds of a bilevel outer round.

python -m benchmarks.nvflare_rounds [--clients 3] [--rounds 2] [--json FILE]

Starts a deployment on loopback and ends it. Not named nvflare.py: it would hide the package.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from nvflare.collab import CollabRecipe, collab

from coterie.engines.follow import interruptible
from coterie.engines.lifetime import Lifetime
from coterie.engines.nvflare.app import Client, Server
from coterie.engines.nvflare.compute import sealed
from coterie.engines.nvflare.launch import deployment
from coterie.engines.nvflare.transport import FlareTransport
from coterie.experiment.config import load
from coterie.federation.remote.codec import encode
from coterie.federation.remote.messages import PROTOCOL, Order

SIZES = (400, 1_000_000)
REPEATS = 30


class Echo(Client):
    """A site that also gives back what it is sent."""

    @collab.publish
    def echo(self, data: bytes) -> bytes:
        """Nothing but the way."""
        return data[:100]


class Measured(Server):
    """The experiment, after some calls were timed."""

    def _run(self, how: dict[str, Any]) -> dict[str, Any]:
        sites = how["sites"]

        def call(site: str, order: bytes, timeout: float) -> Any:
            return collab.get_clients([site])(blocking=False, timeout=timeout, optional=True).handle(order)

        transport = FlareTransport(call, dict.fromkeys(sites), lambda: False)
        hello = encode(Order(PROTOCOL, 1, "whoami", "bench", (), None, ()))
        transport.exchange(dict.fromkeys(sites, hello), sites, 120.0)  # compute processes start
        found = []
        for floats in SIZES:
            data = os.urandom(4 * floats)
            times: dict[str, list[float]] = {"flare": [], "coterie": []}
            for _ in range(REPEATS):
                clock = time.perf_counter()
                assert len(collab.get_clients(sites)(timeout=60.0).echo(data)) == len(sites)
                times["flare"].append(1000.0 * (time.perf_counter() - clock))
                clock = time.perf_counter()
                assert len(transport.exchange(dict.fromkeys(sites, data), sites, 60.0)) == len(sites)  # all refuse it
                times["coterie"].append(1000.0 * (time.perf_counter() - clock))
            found.append({"floats": floats, **{name: (min(some), median(some)) for name, some in times.items()}})
        summary = super()._run(how)
        return {"exchange": found, "rounds": summary["rounds"], "seconds": summary["seconds"], "wire": summary["wire"]}


def main() -> None:
    """Deploy, wait, print."""
    from benchmarks.nvflare_rounds import Echo, Measured  # by the name under which FLARE finds them

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sets = dict(pair.split("=", 1) for pair in given.set)
    config = load(
        sets={
            "problem.clients": given.clients,
            "problem.friends": 1,
            "run.baselines": [],
            "federation.timeout": 300.0,
            "federation.patience": 600.0,
            **sets,
        },
        flags={"run.problem": "friends", "run.method": "bilevel", "run.rounds": given.rounds, "run.engine": "nvflare"},
    )
    sites = [f"site-{k + 1}" for k in range(given.clients)]
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    with interruptible(), Lifetime("nvflare") as life:
        answer = life.folder / "answer.json"
        here = {"sites": sites, "config": config.as_toml()}
        server = {**here, "folder": str(life.folder / "out"), "answer": str(answer), "force": False}
        client = {**here, "memory": "", "load": "", "modules": [], "shares_memory": False}
        recipe = CollabRecipe(
            "bench", Measured(sealed(server)), Echo(sealed(client)), sync_task_timeout=300, min_clients=len(sites)
        )
        clock = time.perf_counter()
        with deployment(life, sites) as poc:
            poc.deploy(recipe.finalize())
            while not answer.exists():
                time.sleep(0.5)
            said = json.loads(answer.read_text())
        said["all_seconds"] = time.perf_counter() - clock
    print(json.dumps(said, indent=2))
    if given.json:
        given.json.write_text(json.dumps(said, indent=2))


if __name__ == "__main__":
    main()
