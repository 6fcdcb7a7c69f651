"""FedAvg over very many small clients on Ray: seconds a round and memory with 1 and 2 processes, beside one process.

python -m benchmarks.ray_clients [--clients 100000] [--rounds 3] [--json FILE]
python -m benchmarks.ray_clients --exchange          # milliseconds an exchange, beside Ray's own call

Each client has 100 rows of 8 features and two classes (logistic regression). Not named ray.py: it would hide Ray.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from coterie.experiment.build import federate, federate_remotely
from coterie.experiment.config import EngineTable, FederationTable
from coterie.federation.remote import Message
from coterie.federation.shards import Stack
from coterie.methods.baselines.fedavg import fedavg
from coterie.numerics import Draw
from coterie.problems.models import FlatModel
from coterie.problems.weighting import weighting

ROWS, FEATURES, CHUNK = 100, 8, 5000
MEGABYTE = 1 << 20


def problem_of(clients: int) -> Any:
    """Rows of every client in one tensor; each has its own separating direction near the common one."""
    make = torch.Generator().manual_seed(0)
    inputs = torch.randn(clients * ROWS, FEATURES, generator=make)
    way = torch.ones(FEATURES) + 0.3 * torch.randn(clients, FEATURES, generator=make)
    labels = (inputs.view(clients, ROWS, FEATURES) @ way[:, :, None] > 0).flatten().long()
    counts = torch.full((clients,), ROWS)
    train = Stack((inputs, labels), counts.cumsum(0) - counts, counts)
    torch.manual_seed(0)
    return weighting(train, None, FlatModel(nn.Linear(FEATURES, 2)), "cross_entropy")


class Watched:
    """The most memory of its own that each process had, sampled; actors from when they are there."""

    def __init__(self) -> None:
        self.everybody = {"server": os.getpid()}
        self.most: dict[str, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watched":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.2):
            for name, pid in list(self.everybody.items()):
                self.most[name] = max(self.most.get(name, 0), _own(pid))


def _own(pid: int) -> int:
    """Anonymous memory in megabytes: without files, and without what is shared through Ray's store."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("RssAnon")), 0)


def _busy(pid: int) -> float:
    """Seconds of processor time that a process has had: on a busy machine these tell more than the clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one(clients: int, workers: int, rounds: int) -> dict[str, Any]:
    """Rounds with so many actors, or with none, in this process."""
    from coterie.engines.ray.group import cargo
    from coterie.engines.ray.launch import cluster, groups

    torch.set_num_threads(1)
    result: dict[str, Any] = {"clients": clients, "workers": workers}
    table = FederationTable(mode="vmap", chunk=CHUNK, timeout=600.0, patience=600.0)
    clock = time.perf_counter()
    with cluster(EngineTable(workers=workers)) if workers else nullcontext(), Watched() as watched:
        result["start_seconds"] = time.perf_counter() - clock
        problem = problem_of(clients)
        clock = time.perf_counter()
        transport = None
        if workers:
            from coterie.engines.ray.transport import RayTransport

            cargoes = [
                cargo(problem, some, at_target=False, mode="vmap", chunk=CHUNK, threads=1)
                for some in groups(clients, CHUNK, workers)
            ]
            transport = RayTransport(cargoes, memory=None, patience=600.0, chosen={})
            fed, _ = federate_remotely(problem, table, transport, "bench")
        else:
            fed, _ = federate(problem, table)
        result["deal_seconds"] = time.perf_counter() - clock
        method, draw = fedavg(), Draw.of(0)
        state, times = method.init(problem, clients), []
        everybody = watched.everybody
        if transport is not None:
            everybody.update({f"actor {group}": pid for group, pid in transport.processes.items()})
        for t in range(rounds):
            if t == 1:  # the first round also warms up
                before = {name: _busy(pid) for name, pid in everybody.items()}
            clock = time.perf_counter()
            state = method.round(fed.begin(t + 1, draw.round(t)), state, draw.round(t))
            times.append(time.perf_counter() - clock)
        busy = {name: (_busy(pid) - before[name]) / (rounds - 1) for name, pid in everybody.items()}
        if transport is not None:
            transport.close()
    result["round_seconds"] = times
    result["busy_seconds_a_round"] = busy
    result["digest"] = float(state.x.double().sum())
    result["megabytes"] = watched.most
    result["rows_megabytes"] = sum(c.numel() * c.element_size() for c in problem.train.columns) // MEGABYTE
    return result


def exchange(repeats: int = 100) -> list[dict[str, Any]]:
    """An exchange of coterie's beside the same bytes by Ray alone, with 4 actors."""
    import numpy as np

    from coterie.engines.ray.group import cargo
    from coterie.engines.ray.launch import cluster, groups

    found = []
    with cluster(EngineTable(workers=4)):
        import ray

        from coterie.engines.ray.transport import RayTransport

        problem = problem_of(8)
        cargoes = [cargo(problem, some, at_target=False, mode="vmap", chunk=2, threads=1) for some in groups(8, 2, 4)]
        transport = RayTransport(cargoes, memory=None, patience=600.0, chosen={})

        class Echo:
            def back(self, data: Any) -> Any:
                return data.tobytes()[:100]  # takes what came, and says about as much as a refusal

        raw = [ray.remote(Echo).options(num_cpus=0).remote() for _ in range(4)]
        for floats in (400, 1_000_000):
            data = np.random.default_rng(0).standard_normal(floats).astype(np.float32).view(np.uint8)
            heads = [b"cot1" + (2).to_bytes(4, "little") + f"{i:02}".encode() for i in range(4)]
            nonsense = {i: Message(head, (data,)) for i, head in enumerate(heads)}

            def by_ray(data: Any = data) -> None:
                sent = ray.put(data) if data.nbytes > 100_000 else data
                ray.get([actor.back.remote(sent) for actor in raw])

            def by_coterie(nonsense: dict[int, Message] = nonsense) -> None:
                # refused by the codec, so that what is measured is the way and not the work
                answers = transport.exchange(nonsense, range(4), 60.0)
                assert len(answers) == 4

            times: dict[str, list[float]] = {"ray": [], "coterie": []}
            for i in range(repeats + 5):
                for name, call in (("ray", by_ray), ("coterie", by_coterie)):
                    clock = time.perf_counter()
                    call()
                    if i >= 5:
                        times[name].append(1000.0 * (time.perf_counter() - clock))
            found.append({"floats": floats, **{name: (min(some), median(some)) for name, some in times.items()}})
        transport.close()
    return found


def main() -> None:
    """Each case in a process of its own, so that peaks do not mix."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--exchange", action="store_true")
    parser.add_argument("--one", type=int)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(one(given.clients, given.one, given.rounds)))
        return
    if given.exchange:
        found = exchange()
    else:
        command = [sys.executable, "-m", "benchmarks.ray_clients", f"--clients={given.clients}"]
        command += [f"--rounds={given.rounds}"]
        found = []
        for workers in given.workers:
            said = subprocess.run(
                [*command, f"--one={workers}"],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            found.append(json.loads(said.stdout.splitlines()[-1]))
    for line in found:
        print(json.dumps(line))
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
