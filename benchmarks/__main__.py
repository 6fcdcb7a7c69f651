"""`make bench`: coterie beside a plain per-client PyTorch loop doing the same arithmetic. Ratios within one run.

The two sides alternate and medians are compared, so that other load on the machine hits both alike. Prints a table and,
with --json FILE, writes the figures.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from coterie.federation import Federation, LocalEngine
from coterie.methods.works import gradient, sgd_walk
from coterie.numerics import Draw
from coterie.problems import Weighting, weighting
from coterie.problems.models import FlatModel

Side = Callable[[], Tensor]


def random_problem(net: nn.Module, shape: tuple[int, ...], clients: int, rows: int) -> Weighting:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients, rows, *shape, generator=generator)
    y = torch.randint(0, 10, (clients, rows), generator=generator)
    return weighting([(x[k], y[k]) for k in range(clients)], (x[0], y[0]), FlatModel(net), "cross_entropy")


def loop_walk(net: nn.Module, problem: Weighting, steps: int, batch: int, step: float) -> Tensor:
    """What research code does: copy the model, walk, add to the average; one client after the other."""
    total = torch.zeros_like(problem.start)
    for k in range(problem.clients):
        rows = problem.train.client(k)
        parameters = list(net.parameters())
        with torch.no_grad():
            nn.utils.vector_to_parameters(problem.start.clone(), parameters)
        for index in Draw.of(0).phase("walk").client(k).batches(rows.count, batch, steps):
            some = rows.take(index)
            loss = nn.functional.cross_entropy(net(some.inputs), some.labels)
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for p, g in zip(parameters, gradients, strict=True):
                    p -= step * g
        total += nn.utils.parameters_to_vector(parameters).detach() / problem.clients
    return total


def loop_gradients(net: nn.Module, problem: Weighting) -> Tensor:
    out = []
    for k in range(problem.clients):
        parameters = list(net.parameters())
        with torch.no_grad():
            nn.utils.vector_to_parameters(problem.start.clone(), parameters)
        rows = problem.train.client(k).all()
        loss = nn.functional.cross_entropy(net(rows.inputs), rows.labels)
        out.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]))
    return torch.stack(out)


def compare(name: str, ours: Side, theirs: Side, repeats: int) -> dict[str, float | str]:
    """Medians of alternating runs, after one of each to warm up; the two results must agree."""
    difference = float((ours() - theirs()).abs().max())
    if difference > 1e-4:
        raise SystemExit(f"{name}: the two sides differ by {difference:g}; the comparison would mean nothing")
    seconds: dict[str, list[float]] = {"ours": [], "loop": []}
    for _ in range(repeats):
        for side, run in (("ours", ours), ("loop", theirs)):
            start = perf_counter()
            run()
            seconds[side].append(perf_counter() - start)
    ours_ms, loop_ms = (1e3 * statistics.median(seconds[side]) for side in ("ours", "loop"))
    return {"workload": name, "coterie_ms": ours_ms, "loop_ms": loop_ms, "ratio": loop_ms / ours_ms}


def logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def walk_workload(name: str, net: nn.Module, clients: int, repeats: int) -> dict[str, float | str]:
    problem = random_problem(net, (1, 8, 8), clients, 100)
    fed = Federation.on(LocalEngine(problem.task, problem.train, None, problem.target))
    walk = {"steps": 5, "batch": 20, "step": 0.1}
    return compare(
        name,
        lambda: fed.mean(sgd_walk, problem.start, draw=Draw.of(0).phase("walk"), **walk),
        lambda: loop_walk(net, problem, **walk),
        repeats,
    )


def gradient_workload(name: str, net: nn.Module, clients: int, repeats: int) -> dict[str, float | str]:
    problem = random_problem(net, (1, 8, 8), clients, 100)
    fed = Federation.on(LocalEngine(problem.task, problem.train, None, problem.target))
    return compare(
        name,
        lambda: fed.gather(gradient, problem.start, draw=Draw.of(0), batch="all").rows,
        lambda: loop_gradients(net, problem),
        repeats,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = [
        walk_workload("FedAvg round, logistic regression, 15 clients", logistic(), 15, options.repeats),
        walk_workload("FedAvg round, logistic regression, 500 clients", logistic(), 500, options.repeats),
        walk_workload("FedAvg round, MLP 64-64-10, 15 clients", mlp(), 15, options.repeats),
        gradient_workload("all gradients, MLP 64-64-10, 15 clients", mlp(), 15, options.repeats),
    ]
    print(f"{'workload':50} {'coterie ms':>11} {'plain loop ms':>14} {'ratio':>7}")
    for row in results:
        print(f"{row['workload']:50} {row['coterie_ms']:11.2f} {row['loop_ms']:14.2f} {row['ratio']:7.1f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
