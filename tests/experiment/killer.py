"""Starts coterie's command line again and again and kills it. Torch is imported once; every start is a fork.

    killer.py random COUNT SEED TOTAL FOLDER -- ARGUMENTS OF RUN     at random moments, then lets it finish
    killer.py signals COUNT SEED TOTAL FOLDER -- ARGUMENTS OF RUN    the same with SIGKILL, SIGTERM and SIGINT in turn,
                                                                     and a calm run beside it
    killer.py points STRIDE FOLDER -- ARGUMENTS OF RUN               at every STRIDE-th step of writing, a folder each

Prints JSON: what was killed and where.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first gradient imports it, and every fork would do so again

import coterie.experiment.run
import coterie.methods.baselines.fedavg
import coterie.methods.baselines.local_train
import coterie.methods.weights.meritfed
import coterie.problems.catalogue.quadratic
import coterie.report.terminal  # noqa: F401  (as above)
from coterie.cli import main

STEPS = ((os, "fsync"), (os, "replace"), (os, "unlink"), (tempfile, "mkstemp"))


def start(arguments: list[str], folder: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """A process that runs the command line; its pid. What it says on standard error is kept beside the folder."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        out, err = os.open(os.devnull, os.O_WRONLY), os.open(f"{folder}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(err, 2)
        prepare()
        sys.argv = ["coterie", *arguments]
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """The exit code of a child once it has ended, −9 if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def command(folder: Path, arguments: list[str]) -> list[str]:
    """Resume if there is something to resume, as a user would."""
    return ["resume", str(folder)] if (folder / "config.toml").exists() else ["run", "--out", str(folder), *arguments]


def progress(folder: Path) -> int:
    """Rounds that are safe on disk, of the run and its baselines."""
    newest = 0
    for place in (folder, *(folder / "baselines").glob("*")):
        newest += max((int(path.name[:8]) for path in (place / "checkpoint").glob("0*.safetensors")), default=0)
    return newest


def signal_at_random(count: int, seed: int, total: int, folder: Path, arguments: list[str]) -> dict[str, Any]:
    every = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    calm = folder.with_name("calm")
    code = ended(start(command(calm, arguments), calm))
    return {**kill_at_random(count, seed, total, folder, arguments, every), "calm": code}


def kill_at_random(
    count: int, seed: int, total: int, folder: Path, arguments: list[str], signals: tuple[int, ...] = (signal.SIGKILL,)
) -> dict[str, Any]:
    chance = random.Random(seed)
    half_written, rounds, codes = 0, [], []
    for turn, target in enumerate(sorted(chance.sample(range(total * 3 // 4), count))):
        number = signals[turn % len(signals)]
        death = Death(folder, max(target, progress(folder) + 2), number, chance.randrange(1 << 30))
        codes.append([number, ended(start(command(folder, arguments), folder, death.await_round))])
        half_written += any(True for _ in folder.rglob(".*.tmp"))
        rounds.append(progress(folder))
    codes = [[number, -signal.SIGKILL if code == -signal.SIGALRM else code] for number, code in codes]
    kills = sum(code == -signal.SIGKILL for _, code in codes)
    code = ended(start(command(folder, arguments), folder))
    return {"kills": kills, "half_written": half_written, "rounds": rounds, "code": code, "codes": codes}


@dataclass
class Death:
    """A signal to this very process, by a timer of the kernel within two rounds of the given one.

    Sent from outside, after looking at the folder, or by a thread, it came ten rounds late where rounds are quick.
    """

    folder: Path
    target: int
    number: int
    seed: int

    def await_round(self) -> None:
        real, chance, since, rounds = os.replace, random.Random(self.seed), time.process_time(), 0

        def replace(*args: Any, **kwargs: Any) -> None:
            nonlocal since, rounds
            real(*args, **kwargs)
            if Path(args[1]).name.endswith(".safetensors"):
                # in processor time, which a slow disk or a busy machine does not stretch
                took, since, rounds = time.process_time() - since, time.process_time(), rounds + 1
                if rounds > 1 and progress(self.folder) >= self.target:  # the first one took a start, too
                    os.replace = real
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 2 * took))

        def strike(*_: Any) -> None:
            os.kill(os.getpid(), self.number)
            if chance.random() < 0.5:  # impatient users press Ctrl-C twice
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 0.01))

        os.replace = replace
        if self.number != signal.SIGKILL:  # else the timer's own signal ends the process at once, as SIGKILL does
            signal.signal(signal.SIGALRM, strike)


def kill_at_points(stride: int, folder: Path, arguments: list[str]) -> dict[str, Any]:
    deaths, point = [], 1
    while True:
        place = folder / f"at_{point:03d}"
        code = ended(start(command(place, arguments), place, lambda at=point: die_at(at)))
        if code != -signal.SIGKILL:
            return {"deaths": deaths, "code": code, "whole": str(place)}
        left = [path.name for path in place.rglob(".*.tmp")]
        finished = ended(start(command(place, arguments), place))
        deaths.append({"folder": str(place), "left": left, "code": finished})
        point += stride


def die_at(point: int) -> None:
    """From now on, the point-th step of writing is the last thing this process does: before it, or after it."""
    passed = 0

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed == point:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            passed += 1
            if passed == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return step

    for owner, name in STEPS:
        setattr(owner, name, deadly(getattr(owner, name)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    cut = sys.argv.index("--")
    mode, *numbers, where = sys.argv[1:cut]
    work = {"random": kill_at_random, "signals": signal_at_random, "points": kill_at_points}[mode]
    print(json.dumps(work(*map(int, numbers), Path(where), sys.argv[cut + 1 :])))
