"""What privacy costs: the accuracy of MeritFed in the open, in secure sums, and in secure sums with noise at the sites.

    python -m benchmarks.private [--problems friends heart] [--seeds 0 1 2] [--page]

Every client is a node of its own in this process, so that the protocol is run as on a network and each client adds its
part of the noise from the system's entropy. All arms of a problem have the same settings and the same number of rounds:

    in the open   the plain method, `solver = "mirror"`
    projected     the plain method in secure sums, one mirror step per round; the rule of leverages may refuse it
    lagged        one sum and one number per client and round
    clipped       lagged, with updates of length `privacy.clip` at most and no noise; with the small steps of the next
    epsilon       the same with noise; z is that of the exact Gaussian mechanism for all uploads of the run

`--page` writes the table into docs/secure.md, from what is stored. Fed-Heart-Disease needs
`coterie data get heart-disease`.
"""

import argparse
import json
from datetime import date
from math import sqrt
from pathlib import Path
from time import process_time
from typing import Any

from coterie.experiment.build import assemble
from coterie.experiment.config import Config, load
from coterie.experiment.loop import run_rounds
from coterie.federation.remote import PERMISSIVE, InProcess, node_for
from coterie.federation.stages.privacy import library
from coterie.reproduce import markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
STORED, PAGE = DOCS / "results" / "measured" / "private.json", DOCS / "secure.md"
BEGIN, END = "<!-- measured: private -->", "<!-- end of measured -->"
DELTA = 1e-5
EPSILONS = (8.0, 3.0, 1.0)
PROBLEMS: dict[str, dict[str, Any]] = {
    "friends": {
        "run.problem": "friends",
        "run.rounds": 20,
        "problem.model": "logistic",
        "problem.clients": 20,
        "problem.friends": 10,
        "method.step": 1.5,
        "method.mirror_step": 0.1,
        "method.tie": 0.3,
        "privacy.clip": 1.0,
    },
    "heart": {
        "run.problem": "heart-disease",
        "run.rounds": 20,
        "method.step": 0.5,
        "method.mirror_step": 0.1,
        "method.tie": 0.3,
        "privacy.clip": 1.0,
    },
}
IN_THE_OPEN, PROJECTED, LAGGED, CLIPPED = "in the open", "secure, projected", "secure, lagged", "secure, clipped"
ARMS: dict[str, dict[str, Any]] = {
    IN_THE_OPEN: {"federation.clip": "none"},
    PROJECTED: {"federation.secure": True, "method.solver": "projected", "method.mirror_steps": 1},
    LAGGED: {"federation.secure": True, "method.solver": "lagged"},
}
SLOW = {**ARMS[LAGGED], "method.mirror_step": 2e-4, "method.tie": 0.5}
NOISY: dict[str, dict[str, Any]] = {
    "friends": {**SLOW, "method.step": 0.3},
    "heart": {**SLOW, "method.step": 0.1},
}
"""Of the arms with noise. The slope of the weights is noisy too: larger steps would put all weight on one client, whose
update no sum can hide, and the run would end. Smaller steps of the model average the noise over rounds."""


def arm(problem: str, seed: int, settings: dict[str, Any], *, private: bool = False, noise: float = 0.0) -> Config:
    """The configuration of one run."""
    given = {"run.method": "meritfed", "run.baselines": [], "run.engine": "embedded", "run.threads": 1}
    given |= {**PROBLEMS[problem], **settings, "run.seed": seed}
    clip = given.pop("privacy.clip")
    hidden = {"privacy.clip": clip, "privacy.noise": noise, "privacy.delta": DELTA} if private else {}
    return load(flags={**given, **hidden})


def on_nodes(config: Config) -> dict[str, Any]:
    """The summary of a run, each client at a node of its own."""

    def nodes(config: Config, problem: Any) -> InProcess:
        return InProcess({k: node_for(problem, (k,), policy=PERMISSIVE) for k in range(problem.clients)})

    summary: dict[str, Any] = run_rounds(assemble(config, nodes), None).summary
    return summary


def multiplier(target: float, uploads: int) -> float:
    """The noise multiplier z with which so many uploads cost ε at δ: σ(ε, δ) √T."""
    return float(library().get_sigma_gaussian(target, DELTA)) * sqrt(uploads)


def measured(problem: str, seed: int) -> dict[str, tuple[float | None, float]]:
    """By arm, the accuracy on the target's test rows (None where the run was refused) and the noise multiplier."""
    found: dict[str, tuple[float | None, float]] = {}

    def note(name: str, summary: dict[str, Any], noise: float = 0.0) -> None:
        done = summary["outcome"] == "finished"
        found[name] = (summary["final"]["test_accuracy"] if done else None, noise)
        print(f"{problem} seed {seed} {name}: {found[name]} {summary['message'][:150]}", flush=True)

    for name, settings in ARMS.items():
        note(name, on_nodes(arm(problem, seed, settings)))
    clipped = on_nodes(arm(problem, seed, NOISY[problem], private=True))
    note(CLIPPED, clipped)
    uploads = clipped["privacy"]["uploads"]
    for target in EPSILONS:
        noise = multiplier(target, uploads)
        summary = on_nodes(arm(problem, seed, NOISY[problem], private=True, noise=noise))
        if summary["outcome"] == "finished":
            assert abs(summary["privacy"]["epsilon"] - target) < 1e-3
        note(f"ε = {target:g}", summary, noise)
    return found


def result(problems: list[str], seeds: list[int]) -> dict[str, Any]:
    """The table as docs/results keeps it."""
    runs = {problem: [measured(problem, seed) for seed in seeds] for problem in problems}
    names = list(runs[problems[0]][0])

    def cells(name: str) -> list[dict[str, Any]]:
        made = []
        for problem in problems:
            accuracies = [found[name][0] for found in runs[problem]]
            made.append({"values": [round(100 * value, 2) for value in accuracies if value is not None]})
            noise = runs[problem][0][name][1]  # the same for all seeds
            made.append({"mean": round(noise, 2)} if noise else {})
        return made

    columns = [
        column
        for problem in problems
        for column in ({"name": f"{problem}, accuracy %", "form": ".1f"}, {"name": f"z, {problem}", "form": ".1f"})
    ]
    sizes = "; ".join(f"{problem}: {_written(PROBLEMS[problem])}" for problem in problems)
    slow = "; ".join(f"{problem}: {_written(NOISY[problem])}" for problem in problems)
    about = f"δ = {DELTA:g}; {sizes}. Clipped and with noise: {slow}. No accuracy: refused by the rule of leverages."
    return {
        "name": "private",
        "page": "secure",
        "what": "What privacy costs MeritFed",
        "scale": "small",
        "about": about,
        "seeds": seeds,
        "date": date.today().isoformat(),
        "corner": "run",
        "columns": columns,
        "rows": [{"name": name, "cells": cells(name)} for name in names],
    }


def _written(settings: dict[str, Any]) -> str:
    """Numbers among settings, in words."""
    return ", ".join(f"{key} = {value:g}" for key, value in settings.items() if type(value) in (int, float))


def page(text: str, found: dict[str, Any]) -> str:
    """A page with the table of a result between its marks."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"the page has no {BEGIN} … {END}")
    return f"{before}{mark}\n\n{markdown(found)}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--page", action="store_true", help="only write the table of the stored result into its page")
    given = parser.parse_args()
    if not given.page:
        begun = process_time()
        found = result(given.problems, given.seeds)
        STORED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{process_time() - begun:.0f} s of processor time; wrote {STORED}")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), json.loads(STORED.read_text(encoding="utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
