"""Figures 1 and 2 of the paper on primal–dual weighting: weight learners on `toy-cosine`, as a table and JSON.

    python -m benchmarks.toy_cosine [--repeats 20] [--rounds 200] [--out DIR]

Deterministic: exact estimates, everybody active. Noisy: σ = 0.5 on every estimate, each client active with probability
½. K is the number of inner steps (primal–dual, rfho, exact-gd, fednest) and of Hessian products (sustain, fednest).
All methods have the same step on θ and on w; the paper does not say which it took.

The repeats (problems of seeds 0 … 19) run side by side: one `vmap` of the methods' own `round`. For that the repeats
share their active sets, and replies are not screened. fednest looks at its values while it runs, so it cannot be
vmapped; only five of its repeats run, one after the other, at the same settings. Results are added to those that --out
already holds, so that the table can be made in several sittings (--methods, --noise, --steps).
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from coterie.errors import NoClients
from coterie.federation import Call, Federation, LocalEngine, Participation, Static
from coterie.federation.api import Replies
from coterie.federation.tree import tree_flatten, tree_unflatten
from coterie.methods import Method, afl, exact_gd, fednest_weights, primal_dual, rfho, sustain
from coterie.numerics import Draw
from coterie.problems import Context, Weighting
from coterie.problems.catalogue.toy_cosine import Cosines, CosineTask, ExactCosine, toy_cosine

NOISE, ACTIVE = 0.5, 0.5
STEP, OUTER_STEP = 0.03, 0.005
POINTS = 10
FEWER = 5  # repeats of a method that cannot be vmapped


class Entry(NamedTuple):
    """A row of the table: how the method is made for K inner steps, and whether its rounds can be vmapped."""

    name: str
    make: Callable[[int, Any], Method]
    vectorised: bool = True
    uses_k: bool = True


def entries() -> list[Entry]:
    """The methods with their settings. b is the batch: 1 look, or all."""
    steps = {"step": STEP, "outer_step": OUTER_STEP}
    return [
        Entry(
            "primal-dual",
            lambda k, b: primal_dual(**steps, dual_step=STEP, local_steps=k, batch=b, target_batch=b),
        ),
        Entry(
            "exact-gd",
            lambda k, b: exact_gd(**steps, inner="gradient", local_steps=k, batch=b, target_batch=b),
        ),
        Entry(
            "sustain",
            lambda k, b: sustain(**steps, series_step=STEP, local_steps=k, ask="all", batch=b, target_batch=b),
        ),
        Entry("rfho", lambda k, b: rfho(**steps, carry=False, local_steps=k, ask="all", batch=b, target_batch=b)),
        Entry("rfho, Z carried", lambda k, b: rfho(**steps, local_steps=k, ask="all", batch=b, target_batch=b)),
        Entry(
            "fednest",
            lambda k, b: fednest_weights(
                step=STEP,
                outer_step=OUTER_STEP,
                inner_rounds=k,
                local_steps=1,
                terms=k,
                lipschitz=1 / STEP,
                batch=b,
                anchor=b,
            ),
            vectorised=False,
        ),
        Entry("afl", lambda k, b: afl(**steps, batch=b), uses_k=False),
    ]


@dataclass(frozen=True)
class SideBySide(Federation):
    """A federation whose verbs hold no data-dependent Python, so that a round can be vmapped over repeats."""

    sets: Iterator[Tensor] | None = None

    def sample(self, **_: Any) -> "SideBySide":
        return self if self.sets is None else replace(self, ids=next(self.sets))

    def _ask(
        self, work: Any, shared: Any, memory: Any, draw: Draw, static: dict[str, Any], **_: Any
    ) -> Iterator[Replies]:
        if not len(self.ids):
            raise NoClients("nobody is active")
        return self.engine.execute(Call(work, shared, memory, Static(**static), draw), self.ids)


def active_sets(n: int, seed: int) -> Iterator[Tensor]:
    """A fresh active set each time."""
    draw, turn = Draw.of(seed).phase("active sets"), 0
    while True:
        yield Participation(ACTIVE).draw(n, draw.step(turn))
        turn += 1


class Tensors(NamedTuple):
    """What differs between the repeats' problems."""

    functions: tuple[Tensor, ...]
    pools: tuple[Tensor, ...]


def tensors(problem: Weighting) -> Tensors:
    f, task = problem.exact.functions, problem.task
    return Tensors(tuple(getattr(f, field.name) for field in fields(f)), (task.nu, task.epsilon, task.E))


def stacked(values: list[Any]) -> Any:
    leaves = [tree_flatten(v)[0] for v in values]
    return tree_unflatten([torch.stack(column) for column in zip(*leaves, strict=True)], tree_flatten(values[0])[1])


def side_by_side(method: Method, problems: list[Weighting], rounds: int, noisy: bool) -> Iterator[tuple[int, Tensor]]:
    """(round, weights [repeats, N]) after every round. A repeat whose values are not finite keeps those before."""
    model, first = problems[0].task.model, problems[0]
    many = stacked([tensors(p) for p in problems])
    sets = active_sets(first.clients, 0) if noisy else None
    leaves, form = tree_flatten(method.init(first, first.clients))
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    plain = [None if t else leaf for leaf, t in zip(leaves, is_tensor, strict=True)]
    states = [torch.stack([leaf] * len(problems)) for leaf, t in zip(leaves, is_tensor, strict=True) if t]

    def state_of(moving: list[Tensor]) -> Any:
        supply = iter(moving)
        return tree_unflatten([next(supply) if t else p for t, p in zip(is_tensor, plain, strict=True)], form)

    def one(mine: Tensors, moving: list[Tensor], key: Tensor, fed_of: Callable[[LocalEngine], Federation]) -> Any:
        task = CosineTask(Cosines(*mine.functions), model, *mine.pools)
        goal = replace(first.target, task=task)
        fed = fed_of(LocalEngine(task, first.train, None, goal))
        out = tree_flatten(method.round(fed, state_of(moving), Draw(key)))[0]
        plain[:] = [None if t else leaf for leaf, t in zip(out, is_tensor, strict=True)]
        return [leaf for leaf, t in zip(out, is_tensor, strict=True) if t]

    ids = torch.arange(first.clients)
    for t in range(rounds):
        keys = torch.stack([Draw.of(seed).round(t).key for seed in range(len(problems))])
        now = ids if sets is None else next(sets)
        before = list(plain)

        def fed_of(engine: LocalEngine, now: Tensor = now, t: int = t) -> Federation:
            return SideBySide(engine, now, round=t, sets=sets)

        try:
            new = vmap(lambda mine, moving, key, f=fed_of: one(mine, moving, key, f))(many, states, keys)
        except NoClients:
            plain[:] = before
        else:
            fine = torch.stack([torch.isfinite(n.flatten(1)).all(1) for n in new]).all(0)
            states = [
                torch.where(fine.reshape(-1, *(1,) * (n.dim() - 1)), n, s) for n, s in zip(new, states, strict=True)
            ]
        yield t + 1, method.view(state_of(states)).weights


def one_after_the_other(
    method: Method, problems: list[Weighting], rounds: int, noisy: bool
) -> Iterator[tuple[int, Tensor]]:
    """The same through the ordinary federation."""
    participation = Participation(ACTIVE if noisy else 1.0)
    histories = []
    for seed, problem in enumerate(problems):
        engine = LocalEngine(problem.task, problem.train, None, problem.target)
        fed, state = Federation.on(engine, participation=participation), method.init(problem, problem.clients)
        weights = []
        for t in range(rounds):
            draw = Draw.of(seed).round(t)
            with suppress(NoClients):
                state = method.round(fed.begin(t + 1, draw), state, draw)
            weights.append(method.view(state).weights)
        histories.append(torch.stack(weights))
    yield from enumerate(torch.stack(histories, dim=1), start=1)


def measures(problems: list[Weighting], W: Tensor) -> tuple[Tensor, Tensor]:
    """F(w) and stationarity of every repeat."""
    parts = stacked([tensors(p).functions for p in problems])

    def both(functions: tuple[Tensor, ...], w: Tensor) -> tuple[Tensor, Tensor]:
        exact = ExactCosine(Cosines(*functions))
        return exact.objective(w), exact.stationarity(w)

    return vmap(both)(parts, W)


def curve(entry: Entry, k: int, noisy: bool, problems: list[Weighting], rounds: int) -> dict[str, Any]:
    """One method at one K: F and stationarity along the rounds, mean and standard error over the repeats."""
    start = perf_counter()
    method = entry.make(k, 1 if noisy else "all")
    play = side_by_side if entry.vectorised else one_after_the_other
    problems = problems if entry.vectorised else problems[:FEWER]
    every = max(1, rounds // POINTS)
    line: dict[str, Any] = {"method": entry.name, "K": k, "noisy": bool(noisy), "repeats": len(problems)}
    line |= {name: [] for name in ("round", "objective", "objective_se", "stationarity", "stationarity_se")}
    for t, W in play(method, problems, rounds, noisy):
        if t % every and t != rounds:
            continue
        F, station = measures(problems, W)
        line["round"].append(t)
        for name, values in (("objective", F), ("stationarity", station)):
            line[name].append(float(values.mean()))
            line[f"{name}_se"].append(float(values.std() / len(values) ** 0.5))
    return line | {"final": F.tolist(), "seconds": round(perf_counter() - start, 2)}


def table(lines: list[dict[str, Any]], ks: list[int]) -> str:
    """Markdown: F(w) − F* and stationarity at the end. F* is the least F that any line found for the same problem."""
    least = torch.full((max(line["repeats"] for line in lines),), torch.inf, dtype=torch.float64)
    for line in lines:
        some = slice(line["repeats"])
        least[some] = torch.minimum(least[some], torch.tensor(line["final"], dtype=torch.float64))
    out = [f"mean F* = {float(least.mean()):.3f}", ""]
    for noisy in (False, True):
        out += [f"### {'noisy, each client active with probability ½' if noisy else 'deterministic'}", ""]
        heads = [f"F − F*, K = {k}" for k in ks] + [f"stationarity, K = {k}" for k in ks]
        out += ["| method | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        for name in [e.name for e in entries()]:
            mine = {line["K"]: line for line in lines if line["method"] == name and line["noisy"] == noisy}
            if not mine:
                continue  # this setting was not asked for
            found = [mine.get(k, mine[min(mine)]) for k in ks]
            gaps = [torch.tensor(x["final"]) - least[: x["repeats"]] for x in found]
            cells = [f"{float(gap.mean()):.4f} ± {float(gap.std()) / len(gap) ** 0.5:.4f}" for gap in gaps]
            cells += [f"{x['stationarity'][-1]:.1e}" for x in found]
            out.append(f"| {name} | " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.toy_cosine", description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 5, 10], help="values of K")
    parser.add_argument("--methods", nargs="+", help="rows of the table; all by default")
    parser.add_argument("--noise", type=int, nargs="+", choices=[0, 1], default=[0, 1], help="settings: 0, 1 or both")
    parser.add_argument("--out", type=Path, help="folder for toy_cosine.json and toy_cosine.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = {"repeats": options.repeats, "rounds": options.rounds, "step": STEP, "outer_step": OUTER_STEP}
    lines = kept(options.out, about)
    for noisy in options.noise:
        sigma = NOISE if noisy else 0.0
        problems = [toy_cosine(Context(seed, torch.float64), noise=sigma) for seed in range(options.repeats)]
        for entry in entries():
            if options.methods and entry.name not in options.methods:
                continue
            for k in options.steps if entry.uses_k else options.steps[:1]:
                line = curve(entry, k, noisy, problems, options.rounds)
                lines = [other for other in lines if key(other) != key(line)] + [line]
                print(f"{entry.name}, K = {k}, {'noisy' if noisy else 'exact'}: {line['seconds']} s", flush=True)
                write(options.out, about, lines, options.steps)
    print(table(lines, options.steps))


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["method"], line["K"], line["noisy"]


def kept(folder: Path | None, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of earlier runs with the same settings, so that the table can be made in several sittings."""
    path = None if folder is None else folder / "toy_cosine.json"
    if path is None or not path.is_file():
        return []
    found = json.loads(path.read_text())
    return found["lines"] if found["about"] == about else []


def write(folder: Path | None, about: dict[str, Any], lines: list[dict[str, Any]], ks: list[int]) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toy_cosine.json").write_text(json.dumps({"about": about, "lines": lines}, indent=1) + "\n")
    (folder / "toy_cosine.md").write_text(table(lines, ks) + "\n")


if __name__ == "__main__":
    main()
