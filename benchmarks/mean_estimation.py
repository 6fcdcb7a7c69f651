"""Figures 1 to 3 of MeritFed at the paper's size, as the stored results meritfed-means and meritfed-means-authors.

    python -m benchmarks.mean_estimation --out DIR [--geometry authors] [--rounds 3000] [--seeds 5]
    python -m benchmarks.mean_estimation --trade

The same runs as `coterie reproduce meritfed-means --scale paper`, on the same draws, in a fraction of the time: all μ
and seeds run side by side, as one `vmap` of the methods' own `round`. Results are added to those that --out holds, so
that the table can be made in several sittings (--methods). `coterie reproduce check` runs a sample of it as usual.
--trade compares the solvers of the auxiliary problem on `friends`: what they find, and what they exchange.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from coterie import methods
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.federation import Call, Federation, LocalEngine, Replies, Shard, Static
from coterie.federation.tree import tree_flatten, tree_unflatten
from coterie.methods import Method
from coterie.methods.shared.works import gradient
from coterie.numerics import Draw
from coterie.problems import Context, Weighting
from coterie.problems.catalogue.mean_estimation import mean_estimation
from coterie.reproduce import markdown, study
from coterie.reproduce.curves import drawn
from coterie.reproduce.meritfed import AUTHORS, FRESH, LEAST, MEANS, SHIFTS
from coterie.reproduce.running import collected
from coterie.reproduce.study import Row
from coterie.storage import write_json

PLAIN: dict[str, Any] = {"step": 0.01, "batch": 100}
STUDY = {"paper": "meritfed-means", "authors": "meritfed-means-authors"}
POINTS, DIMENSION = 60, 10


class Line(NamedTuple):
    """A row of the study: how the method is made for its α, and whether the target has new rows for every round."""

    name: str
    make: Callable[[float], Method]
    fresh: bool
    least: float  # α is the authors', but not below this


def line_of(row: Row) -> Line:
    """The row's method, without the check of its settings and with the α of a μ."""
    name = row.settings["run.method"]
    own = {key.partition(".")[2]: value for key, value in row.settings.items() if key.startswith("method.")}
    factory = getattr(methods, name.replace("-", "_")).__wrapped__

    def make(alpha: float) -> Method:
        mirror = {"mirror_step": alpha} if name.startswith("meritfed") else {}
        made: Method = factory(**PLAIN, **mirror, **own)
        return made

    return Line(row.name, make, own.get("data") == "fresh", row.settings.get(LEAST, 0.0))


@dataclass(frozen=True)
class SideBySide(Federation):
    """A federation whose verbs hold no data-dependent Python, so that a round can be vmapped over seeds."""

    def sample(self, **_: Any) -> "SideBySide":
        return self

    def _ask(
        self, work: Any, shared: Any, memory: Any, draw: Draw, static: dict[str, Any], **_: Any
    ) -> Iterator[Replies]:
        return self.engine.execute(Call(work, shared, memory, Static(**static), draw), self.ids)


@dataclass(frozen=True)
class Replay(LocalEngine):
    """Clients whose batches were drawn before: L_k is quadratic with ∇²L = 2I/d, so g_k(x) = g_k(0) + 2x/d."""

    at_zero: Tensor | None = None

    def execute(self, call: Call, ids: Tensor) -> Iterator[Replies]:
        if call.work is not gradient or dict(call.static) != {"batch": PLAIN["batch"]}:
            raise ValueError(f"{call.work} was not drawn before")
        yield Replies(ids, self.at_zero[ids] + 2.0 / len(call.shared) * call.shared, None)


@cache
def made(seeds: int, shift: float, **settings: Any) -> list[Weighting]:
    """The problems of all seeds."""
    return [mean_estimation(Context(seed), shift=shift, **settings) for seed in range(seeds)]


def batches(seeds: int, rounds: int, geometry: str) -> Tensor:
    """g_k(0) of every round, seed and client for μ = 0, on the batches that the methods draw, [rounds, seeds, K, d]."""
    problems = [mean_estimation(Context(seed), shift=0.0, geometry=geometry) for seed in range(seeds)]
    first = problems[0]
    rows, ids = torch.stack([p.train.columns[0] for p in problems]), torch.arange(first.clients)

    def one(train: Tensor, key: Tensor) -> Tensor:
        engine = LocalEngine(first.task, replace(first.train, columns=(train,)), None, None)
        static, draw = Static(batch=PLAIN["batch"]), Draw(key).phase("gradient")
        return next(engine.execute(Call(gradient, torch.zeros_like(first.start), None, static, draw), ids)).values

    return torch.stack([vmap(one)(rows, keys(seeds, t)) for t in range(rounds)])


def keys(seeds: int, t: int) -> Tensor:
    return torch.stack([Draw.of(seed).round(t).key for seed in range(seeds)])


def side_by_side(method: Method, problems: list[Weighting], drawn: Tensor) -> Iterator[tuple[int, Any]]:
    """(round, view) after every round, all tensors with a first dimension for the problems."""
    first, seeds = problems[0], len(problems)
    ids = torch.arange(first.clients)
    held_out = torch.stack([p.target.valid.columns[0] for p in problems])
    offsets = torch.zeros(len(problems), first.clients, 1)  # 2/d of what μ adds to a near client's samples
    near = slice(int(first.exact.sizes[0]), int(first.exact.sizes[:2].sum()))
    added = torch.stack([p.exact.means[1, :1] for p in problems])  # the same in all coordinates
    offsets[:, near] = 2 / len(first.start) * added.float()[:, None]
    starts = [tree_flatten(method.init(p, p.clients)) for p in problems]
    leaves, form = starts[0]
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    plain = [None if t else leaf for leaf, t in zip(leaves, is_tensor, strict=True)]
    columns = zip(*(leaves for leaves, _ in starts), strict=True)
    states = [torch.stack(column) for column, t in zip(columns, is_tensor, strict=True) if t]

    def state_of(moving: list[Tensor]) -> Any:
        supply = iter(moving)
        return tree_unflatten([next(supply) if t else p for t, p in zip(is_tensor, plain, strict=True)], form)

    def one(at_zero: Tensor, rows: Tensor, moving: list[Tensor], key: Tensor) -> list[Tensor]:
        target = Shard(first.task, None, replace(first.target.valid, columns=(rows,)))
        fed = SideBySide(Replay(first.task, first.train, None, target, at_zero=at_zero), ids)
        out = tree_flatten(method.round(fed, state_of(moving), Draw(key)))[0]
        plain[:] = [None if t else leaf for leaf, t in zip(out, is_tensor, strict=True)]
        return [leaf for leaf, t in zip(out, is_tensor, strict=True) if t]

    for t, at_zero in enumerate(drawn):
        at_zero = at_zero - offsets
        states = vmap(one)(at_zero, held_out, states, keys(seeds, t))
        yield t + 1, method.view(state_of(states))


def values_of(line: Line, drawn: Tensor, geometry: str) -> dict[str, Any]:
    """By μ: errors of every seed along the rounds, and the far clients' weight at the end."""
    rounds, seeds = drawn.shape[:2]
    rows = {"validation": FRESH * rounds} if line.fresh else {}
    every = max(1, rounds // POINTS)
    when = [0, *(t for t in range(1, rounds + 1) if t % every == 0 or t == rounds)]
    errors, far = [], []
    for mu in SHIFTS:
        problems = made(seeds, mu, geometry=geometry, **rows)
        path = [torch.ones(seeds)]
        for t, view in side_by_side(line.make(max(line.least, AUTHORS[mu])), problems, drawn):
            if t in when:
                path.append(view.model.double().square().sum(1))
        errors.append(torch.stack(path).tolist())
        far.append(view.weights.double()[:, int(problems[0].exact.sizes[:2].sum()) :].sum(1).tolist())
    return {"round": when, "errors": errors, "far": far}


def result_of(found: dict[str, dict[str, Any]], geometry: str, seeds: int, seconds: float) -> dict[str, Any]:
    """The stored result of the study, from the values of its lines by name."""
    wanted = study(STUDY[geometry])
    table = replace(wanted.at("paper"), seeds=tuple(range(seeds)))
    result = collected(wanted, table, "paper", Path("nothing is read here"))
    for row in result["rows"]:
        if row["name"] in found:
            line = found[row["name"]]
            columns = [*(errors[-1] for errors in line["errors"]), *line["far"]]
            row["cells"] = [{"values": [float(f"{value:.6g}") for value in values]} for values in columns]
    runs = {(row["name"], mu, seed) for row in result["rows"] for mu in SHIFTS for seed in range(seeds)}
    missing = sorted(f"{name}, μ = {mu:g}, seed {seed}" for name, mu, seed in runs if name not in found)
    del result["missing"], result["runs"]
    panels = [_panel(found, i, f"μ = {mu:g}") for i, mu in enumerate(SHIFTS)]
    more = {"missing": missing, "runs": len(runs)} if missing else {}
    return {**result, "seeds": list(range(seeds)), "seconds": round(seconds), "curves": panels, **more}


def _panel(found: dict[str, dict[str, Any]], i: int, panel: str) -> dict[str, Any]:
    lines = []
    for name, line in found.items():
        by_seed = [[error / DIMENSION for error in errors] for errors in line["errors"][i]]  # the objective is ‖x‖²/d
        mean, least, most = ([float(f"{of(e):.4g}") for e in by_seed] for of in (fmean, min, max))
        lines.append({"name": name, "x": line["round"], "y": mean, "least": least, "most": most})
    return {"measure": "objective", "against": "round", "panel": panel, "lines": lines}


def trade(rounds: int = 200, seeds: int = 3) -> str:
    """Markdown: mirror descent and second-order models of rank r on `friends`, with the target among the clients."""
    solvers = {"mirror": {}} | {f"quadratic, r = {r}": {"solver": "quadratic", "rank": r} for r in (0, 1, 2, 4)}
    solvers |= {"quadratic, r = K − 1": {"solver": "quadratic"}}
    head = ("| α | solver | test accuracy | friends' weight | ‖w − w_mirror‖₁ | exchanges a round | floats a round |",)
    out = [*head, "|---" * 7 + "|"]
    for alpha in (0.01, 0.1):
        reference = []
        for name, settings in solvers.items():
            runs = []
            for seed in range(seeds):
                sets = {f"method.{key}": value for key, value in {"mirror_step": alpha, **settings}.items()}
                flags = {"run.rounds": rounds, "run.seed": seed, "run.baselines": [], "run.record": rounds}
                runs.append(run_rounds(assemble(load(sets={**sets, **BILLED}, flags=flags)), None))
            reference = reference or [run.view.weights for run in runs]
            gap = sum(float((r.view.weights - w).abs().sum()) for r, w in zip(runs, reference, strict=True)) / seeds
            final = [run.summary["final"] for run in runs]
            accuracy, friends = (sum(f[key] for f in final) / seeds for key in ("test_accuracy", "friends_weight"))
            asked = next(e for cause, e in runs[0].ledger.by_cause.items() if ".mirror:" in cause)
            floats = (asked.floats_up + asked.floats_down) / rounds
            out.append(
                f"| {alpha:g} | {name} | {accuracy:.3f} | {friends:.3f} | {gap:.3f} | {asked.rounds // rounds} | "
                f"{floats:,.0f} |"
            )
    return "\n".join(out)


BILLED = {"run.problem": "friends", "run.method": "meritfed", "federation.target": 0, "federation.mode": "vmap"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mean_estimation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--geometry", choices=[*STUDY], default="paper")
    parser.add_argument("--methods", nargs="*", help="rows of the table, by how they begin; all by default")
    parser.add_argument("--out", type=Path, help="folder for the stored result and what it is made of")
    parser.add_argument("--trade", action="store_true", help="compare the solvers on `friends`, and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.trade:
        print(trade())
        return
    out = options.out or Path("runs/means")
    out.mkdir(parents=True, exist_ok=True)
    kept = out / f"{STUDY[options.geometry]}-values.json"
    found = json.loads(kept.read_text()) if kept.is_file() else {"seconds": 0.0, "lines": {}}
    wanted = options.methods
    left = [
        row
        for row in MEANS
        if row.name not in found["lines"] and (wanted is None or any(map(row.name.startswith, wanted)))
    ]
    start = process_time()
    batched = batches(options.seeds, options.rounds, options.geometry) if left else None
    for line in map(line_of, left):
        found["lines"][line.name] = values = values_of(line, batched, options.geometry)
        now = process_time()
        found["seconds"], start = found["seconds"] + now - start, now
        errors = ", ".join(f"{fmean(errors[-1]):.2e}" for errors in values["errors"])
        print(f"{line.name}: ‖x‖² = {errors}", flush=True)
        kept.write_text(json.dumps(found))
    lines = {row.name: found["lines"][row.name] for row in MEANS if row.name in found["lines"]}
    result = result_of(lines, options.geometry, options.seeds, found["seconds"])
    write_json(out / f"{STUDY[options.geometry]}-paper.json", result)
    for chart in drawn(result):
        (out / f"{STUDY[options.geometry]}-{chart.name}.svg").write_text(chart.file(paper=True))
    print(markdown(result))


if __name__ == "__main__":
    main()
