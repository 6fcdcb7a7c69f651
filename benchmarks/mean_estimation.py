"""Figures 1 to 3 of MeritFed: `mean-estimation` at the paper's size, as a table, JSON and an SVG figure.

    python -m benchmarks.mean_estimation [--rounds 3000] [--seeds 5] [--out DIR] [--figure FILE.svg]
    python -m benchmarks.mean_estimation --trade

150 clients of 1000 samples in R^10, μ ∈ {.001, .01, .1}, γ = .01, batches of 100; errors are ‖x‖², means over seeds.
All μ and seeds run side by side: one `vmap` of the methods' own `round`. Results are added to those that --out holds,
so that the table can be made in several sittings (--methods; without names it runs nothing). --trade compares the
solvers of the auxiliary problem on `friends` instead: what they find, and what they exchange with the target.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import log10
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from benchmarks.toy_cosine import SideBySide
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.federation import Call, LocalEngine, Replies, Shard, Static
from coterie.federation.tree import tree_flatten, tree_unflatten
from coterie.methods import Method, fedadp, fixed_weights, meritfed, meritfed_zo, sgd_full, sgd_ideal, tawt
from coterie.methods.shared.works import gradient
from coterie.numerics import Draw
from coterie.problems import Context, Weighting
from coterie.problems.catalogue.mean_estimation import mean_estimation

PLAIN: dict[str, Any] = {"step": 0.01, "batch": 100}
SHIFTS = (0.001, 0.01, 0.1)
AUTHORS = {0.001: 3.5, 0.01: 4.5, 0.1: 12.5}
"""The mirror steps in the authors' code."""
FRESH = 100  # rows a round
POINTS = 80


class Line(NamedTuple):
    """A row of the table: how the method is made for its α, and whether the target has new rows for every round."""

    name: str
    make: Callable[[Any], Method]
    fresh: bool = False
    least: float = 0.0  # α is the authors', but not below this


def merit(alpha: Any, **settings: Any) -> Method:
    """meritfed without the check of its settings, because α is a vector here, with an entry for each μ."""
    return meritfed.__wrapped__(**PLAIN, mirror_step=alpha, **settings)


LINES = (
    Line("sgd-full", lambda alpha: sgd_full(**PLAIN)),
    Line("sgd-ideal", lambda alpha: sgd_ideal(**PLAIN)),
    Line("fixed-weights, w*", lambda alpha: fixed_weights(**PLAIN, weights="opt")),
    Line("fedadp", lambda alpha: fedadp(**PLAIN)),
    Line("fedadp, target's angle", lambda alpha: fedadp(**PLAIN, angle="target", smooth=False)),
    Line("tawt", lambda alpha: tawt(**PLAIN)),
    Line("meritfed MD, 10 steps", merit),
    # 50 steps by the second-order model, which is exact here and takes one exchange instead of 50
    Line("meritfed MD, 50 steps", lambda alpha: merit(alpha, mirror_steps=50, solver="quadratic")),
    Line(
        "meritfed MD, 50 steps, cut after 1000",
        lambda alpha: merit(alpha, mirror_steps=50, solver="quadratic", cut=1000),
    ),
    Line("meritfed SMD, 10 steps", lambda alpha: merit(alpha, mirror="smd", mirror_batch=100)),
    Line(
        "meritfed-zo, 10 steps",
        lambda alpha: meritfed_zo.__wrapped__(**PLAIN, mirror_step=alpha, mirror_batch=100),
    ),
    Line(
        "meritfed MD, 10 steps, fresh rows",
        lambda alpha: merit(alpha, data="fresh", mirror_batch=FRESH),
        fresh=True,
        least=7.0,
    ),
)


@dataclass(frozen=True)
class Replay(LocalEngine):
    """Clients whose batches were drawn before: L_k is quadratic with ∇²L = 2I/d, so g_k(x) = g_k(0) + 2x/d."""

    at_zero: Tensor | None = None

    def execute(self, call: Call, ids: Tensor) -> Iterator[Replies]:
        if call.work is not gradient or dict(call.static) != {"batch": PLAIN["batch"]}:
            raise ValueError(f"{call.work} was not drawn before")
        yield Replies(ids, self.at_zero[ids] + 2.0 / len(call.shared) * call.shared, None)


@cache
def made(seeds: int, **settings: Any) -> list[Weighting]:
    """The problems of all μ and seeds, seeds within μ."""
    return [mean_estimation(Context(seed), shift=mu, **settings) for mu in SHIFTS for seed in range(seeds)]


def batches(seeds: int, rounds: int) -> Tensor:
    """g_k(0) of every round, seed and client for μ = 0, on the batches that the methods draw, [rounds, seeds, K, d]."""
    problems = [mean_estimation(Context(seed), shift=0.0) for seed in range(seeds)]
    first = problems[0]
    rows, ids = torch.stack([p.train.columns[0] for p in problems]), torch.arange(first.clients)

    def one(train: Tensor, key: Tensor) -> Tensor:
        engine = LocalEngine(first.task, replace(first.train, columns=(train,)), None, None)
        static, draw = Static(batch=PLAIN["batch"]), Draw(key).phase("gradient")
        return next(engine.execute(Call(gradient, torch.zeros_like(first.start), None, static, draw), ids)).values

    return torch.stack([vmap(one)(rows, keys(seeds, t)) for t in range(rounds)])


def keys(seeds: int, t: int) -> Tensor:
    return torch.stack([Draw.of(seed).round(t).key for seed in range(seeds)])


def side_by_side(line: Line, problems: list[Weighting], drawn: Tensor) -> Iterator[tuple[int, Any]]:
    """(round, view) after every round, all tensors with a first dimension for the problems."""
    first, copies = problems[0], len(SHIFTS)
    ids, seeds = torch.arange(first.clients), len(problems) // copies
    held_out = torch.stack([p.target.valid.columns[0] for p in problems])
    offsets = torch.zeros(len(problems), first.clients, 1)  # 2/d of what μ adds to a near client's samples
    near = slice(int(first.exact.sizes[0]), int(first.exact.sizes[:2].sum()))
    offsets[:, near] = 2 / len(first.start) * torch.tensor(SHIFTS).repeat_interleave(seeds)[:, None, None]
    alphas = torch.tensor([max(line.least, AUTHORS[mu]) for mu in SHIFTS]).repeat_interleave(seeds)
    starts = [tree_flatten(line.make(1.0).init(p, p.clients)) for p in problems]
    leaves, form = starts[0]
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    plain = [None if t else leaf for leaf, t in zip(leaves, is_tensor, strict=True)]
    columns = zip(*(leaves for leaves, _ in starts), strict=True)
    states = [torch.stack(column) for column, t in zip(columns, is_tensor, strict=True) if t]

    def state_of(moving: list[Tensor]) -> Any:
        supply = iter(moving)
        return tree_unflatten([next(supply) if t else p for t, p in zip(is_tensor, plain, strict=True)], form)

    def one(at_zero: Tensor, rows: Tensor, alpha: Tensor, moving: list[Tensor], key: Tensor) -> list[Tensor]:
        target = Shard(first.task, None, replace(first.target.valid, columns=(rows,)))
        fed = SideBySide(Replay(first.task, first.train, None, target, at_zero=at_zero), ids)
        out = tree_flatten(line.make(alpha).round(fed, state_of(moving), Draw(key)))[0]
        plain[:] = [None if t else leaf for leaf, t in zip(out, is_tensor, strict=True)]
        return [leaf for leaf, t in zip(out, is_tensor, strict=True) if t]

    for t, at_zero in enumerate(drawn):
        at_zero = at_zero.repeat(copies, 1, 1) - offsets
        states = vmap(one)(at_zero, held_out, alphas, states, keys(seeds, t).repeat(copies))
        yield t + 1, line.make(1.0).view(state_of(states))


def curves(line: Line, drawn: Tensor) -> list[dict[str, Any]]:
    """Errors along the rounds, mean over the seeds, and where the weight is at the end; one entry a μ."""
    rounds, seeds = drawn.shape[:2]
    problems = made(seeds, validation=FRESH * rounds) if line.fresh else made(seeds)
    every, path = max(1, rounds // POINTS), [torch.ones(len(problems))]
    for t, view in side_by_side(line, problems, drawn):
        if t % every == 0 or t == rounds:
            path.append(view.model.double().square().sum(1))
    errors = torch.stack(path).reshape(-1, len(SHIFTS), seeds)
    shares = [part.sum(1) for part in view.weights.double().split(problems[0].exact.sizes.tolist(), dim=1)]
    shares = torch.stack(shares, dim=1).reshape(len(SHIFTS), seeds, 3)
    effective = (1.0 / view.weights.double().square().sum(1)).reshape(len(SHIFTS), seeds)
    best = torch.stack([p.exact.error(p.best_weights) for p in problems]).reshape(len(SHIFTS), seeds)
    return [
        {
            "method": line.name,
            "shift": mu,
            "seeds": seeds,
            "rounds": rounds,
            "round": [0, *(t for t in range(1, rounds + 1) if t % every == 0 or t == rounds)],
            "error": errors[:, i].mean(1).tolist(),
            "final": errors[-1, i].tolist(),
            "shares": shares[i].mean(0).tolist(),
            "most far": float(shares[i, :, 2].max()),
            "effective": float(effective[i].mean()),
            "expected at w*": float(best[i].mean()),
        }
        for i, mu in enumerate(SHIFTS)
    ]


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: ‖x‖² and how many times less that is than SGD-Ideal's; the far group's weight, mean and worst seed."""
    heads = [f"‖x‖², μ = {mu:g}" for mu in SHIFTS] + [f"far weight, μ = {mu:g}" for mu in SHIFTS]
    out = ["| method | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    found = {(line["method"], line["shift"]): line for line in lines}
    for name in [line.name for line in LINES if (line.name, SHIFTS[0]) in found]:
        errors, far = [], []
        for mu in SHIFTS:
            line, ideal = found[name, mu], found.get(("sgd-ideal", mu))
            final = torch.tensor(line["final"])
            times = "" if ideal is None else f" ({sum(ideal['final']) / float(final.sum()):.2g}×)"
            errors.append(f"{float(final.mean()):.2e} ± {float(final.std()) / len(final) ** 0.5:.1e}{times}")
            far.append(f"{line['shares'][2]:.4f} ({line['most far']:.4f})")
        out.append(f"| {name} | " + " | ".join(errors + far) + " |")
    expected = ", ".join(f"{found[lines[0]['method'], mu]['expected at w*']:.2e}" for mu in SHIFTS) if lines else ""
    return "\n".join([*out, "", f"Expected error of the pooled mean at w*: {expected}."])


WIDTH, HEIGHT = 860, 330
TOP, PANEL_W, PANEL_H, LEFT, GAP = 44, 230, 190, 50, 36
POWERS = range(0, -5, -1)
CURVES = (
    ("sgd-full", "SGD-Full", "a"),
    ("sgd-ideal", "SGD-Ideal", "b"),
    ("fedadp, target's angle", "FedAdp", "c"),
    ("tawt", "TAWT", "d"),
    ("meritfed MD, 10 steps", "MeritFed MD, 10 mirror steps", "e"),
    ("meritfed MD, 50 steps", "MeritFed MD, 50 mirror steps", "f"),
    ("meritfed-zo, 10 steps", "MeritFed, zeroth order", "g"),
    ("meritfed MD, 10 steps, fresh rows", "MeritFed MD, fresh rows", "h"),
)
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 } .small { font-size: 11px }
  .grid { stroke: #8c959f; stroke-opacity: .25 } polyline, .key { fill: none; stroke-width: 1.6 }
  .a { stroke: #6e7781 } .b { stroke: #1a7f37 } .c { stroke: #bc4c00 } .d { stroke: #8250df } .e { stroke: #0969da }
  .f { stroke: #0969da; stroke-dasharray: 5 3 } .g { stroke: #cf222e } .h { stroke: #0969da; stroke-width: 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .b { stroke: #3fb950 } .c { stroke: #f0883e } .d { stroke: #bc8cff } .g { stroke: #ff7b72 }
    .e, .f, .h { stroke: #58a6ff }
  }
"""


def figure(lines: list[dict[str, Any]]) -> str:
    """One panel a μ: ‖x‖² over the rounds, on a logarithmic axis."""
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    parts += ["<title>‖x‖² over the rounds for three values of μ</title>", f"<style>{STYLE}</style>"]
    for i, mu in enumerate(SHIFTS):
        left = LEFT + i * (PANEL_W + GAP)
        mine = {line["method"]: line for line in lines if line["shift"] == mu}
        parts.append(f'<text class="title" x="{left}" y="{TOP - 14}">‖x‖² over the rounds, μ = {mu:g}</text>')
        for power in POWERS:
            y = height(10.0**power)
            parts.append(f'<line class="grid" x1="{left}" x2="{left + PANEL_W}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="small" text-anchor="end" x="{left - 5}" y="{y + 4:.1f}">1e{power}</text>')
        last = max(line["rounds"] for line in mine.values())
        for t in range(0, last + 1, max(1, last // 4)):
            x = left + PANEL_W * t / last
            parts.append(f'<text class="small" text-anchor="middle" x="{x:.1f}" y="{TOP + PANEL_H + 17}">{t}</text>')
        for name, _, colour in CURVES:
            some = zip(mine[name]["round"], mine[name]["error"], strict=True)
            points = " ".join(f"{left + PANEL_W * t / last:.1f},{height(e):.1f}" for t, e in some)
            parts.append(f'<polyline class="{colour}" points="{points}"/>')
    for i, (_, label, colour) in enumerate(CURVES):
        x, y = LEFT + (i % 4) * 203, TOP + PANEL_H + 44 + 22 * (i // 4)
        parts.append(f'<line class="key {colour}" x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}"/>')
        parts.append(f'<text class="small" x="{x + 27}" y="{y}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def height(error: float) -> float:
    return TOP + PANEL_H * log10(min(1.0, max(error, 10.0 ** POWERS[-1]))) / POWERS[-1]


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
    parser.add_argument("--methods", nargs="*", help="rows of the table, by how they begin; all by default")
    parser.add_argument("--out", type=Path, help="folder for mean_estimation.json and mean_estimation.md")
    parser.add_argument("--figure", type=Path, help="where to draw the curves")
    parser.add_argument("--trade", action="store_true", help="compare the solvers on `friends`, and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.trade:
        print(trade())
        return
    path = None if options.out is None else options.out / "mean_estimation.json"
    lines = json.loads(path.read_text()) if path is not None and path.is_file() else []
    chosen = [one for one in LINES if options.methods is None or any(map(one.name.startswith, options.methods))]
    drawn = batches(options.seeds, options.rounds) if chosen else None
    for line in chosen:
        start = process_time()
        found = curves(line, drawn)
        errors = ", ".join(f"{sum(one['final']) / options.seeds:.2e}" for one in found)
        print(f"{line.name}: ‖x‖² = {errors}; {process_time() - start:.0f} s", flush=True)
        lines = [one for one in lines if one["method"] != line.name] + found
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(lines, indent=1) + "\n")
            path.with_suffix(".md").write_text(table(lines) + "\n")
    print(table(lines))
    if options.figure is not None:
        options.figure.write_text(figure(lines))


if __name__ == "__main__":
    main()
