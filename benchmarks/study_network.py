"""Fed-Heart-Disease as a study in four network namespaces: a coordinator and three sites, joined by a bridge.

    python -m benchmarks.study_network --folder four      (as root, on Linux)

Needs the data set heart-disease and coterie[nvflare]. Prints how long handshake, training and advice take, how far
model and advice are from those of one process, and what happens when one site's link is down for a minute.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from coterie.engines.lifetime import Lifetime
from coterie.experiment.watching import terminable
from coterie.problems.files.example import write_example

COORDINATOR, SITES, BRIDGE = "coterie0", ("hungarian", "switzerland", "va"), "coteriebr"
SAME = ("federation.clip=none", "federation.mode=sequential", "federation.chunk=1", "run.threads=1", "run.baselines=[]")
OUTAGE = 60.0  # seconds


def ip(*words: str) -> None:
    """Run `ip` with these words."""
    subprocess.run(["ip", *words], check=True)


@contextmanager
def namespaces() -> Iterator[dict[str, str]]:
    """A namespace with an address for the coordinator and for each site; the namespaces by name."""
    with ExitStack() as stack:
        ip("link", "add", BRIDGE, "type", "bridge")
        stack.callback(ip, "link", "del", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        found = {}
        for i, name in enumerate(("coordinator", *SITES)):
            space = found[name] = f"coterie{i}"
            ip("netns", "add", space)
            stack.callback(ip, "netns", "del", space)
            ip("link", "add", f"cot{i}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", f"cot{i}", "master", BRIDGE, "up")
            ip("-n", space, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield found


class Cast:
    """The processes of the study, each in its namespace and with a state folder of its own."""

    def __init__(self, folder: Path, spaces: dict[str, str], life: Lifetime) -> None:
        self.folder, self.spaces, self.life = folder, spaces, life

    def command(self, who: str, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.spaces[who], sys.executable, "-m", "coterie", *words]

    def environment(self, who: str) -> dict[str, str]:
        state = {"XDG_STATE_HOME": str(self.folder / f"state-{who}"), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **self.life.environment, **state}

    def start(self, who: str, *words: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{who}-{words[1]}.out").open("wb") as output:
            return subprocess.Popen(
                self.command(who, *words),
                cwd=self.folder,
                env=self.environment(who),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def do(self, *words: str, fine: bool = True) -> str:
        done = subprocess.run(
            self.command("coordinator", *words),
            cwd=self.folder,
            env=self.environment("coordinator"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if fine and done.returncode:
            sys.exit(done.stdout + done.stderr)
        return done.stdout + done.stderr

    def timed(self, what: str, *words: str) -> str:
        begun = time.monotonic()
        said = self.do(*words)
        expected = re.search(r"about [^:]*: .* exchanges of [\d.]+ s", said, re.IGNORECASE)
        print(f"{what}: {time.monotonic() - begun:.0f} s{f' ({expected[0]})' if expected else ''}", flush=True)
        return said


def difference(a: Path, b: Path) -> float:
    """The largest difference between two models."""
    one, other = load_file(a), load_file(b)
    return max(float((one[key] - other[key]).abs().max()) for key in one)


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a value of JSON."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, float):
        yield value


def outage(cast: Cast, sets: list[str]) -> None:
    """A training during which the link of one site is down for a minute."""
    patient = ["--set", "federation.timeout=10.0", "--rounds", "150"]
    running = cast.start("coordinator", "run", "--study", "study", "--out", "cut", *patient, *sets)
    recorded, events = cast.folder / "cut" / "metrics.jsonl", cast.folder / "cut" / "events.jsonl"
    while not recorded.is_file() or len(recorded.read_text().splitlines()) < 5:
        time.sleep(0.5)
    ip("link", "set", "cot3", "down")
    time.sleep(OUTAGE)
    before = len(recorded.read_text().splitlines())
    ip("link", "set", "cot3", "up")
    back = time.monotonic()
    running.wait()
    print(f"link of {SITES[2]} down for {OUTAGE:.0f} s; the run was in round {before - 1}, and ended with", flush=True)
    print(json.loads((cast.folder / "cut" / "summary.json").read_text())["outcome"], f"{time.monotonic() - back:.0f} s")
    for line in events.read_text().splitlines()[:12]:
        print("  ", line)


def compare(cast: Cast, count: int, sets: list[str]) -> None:
    """Training and advice over the network, and in one process."""
    folder = cast.folder
    rounds = ("--method", "meritfed", "--rounds", str(count))
    cast.timed(f"training of {count} rounds", "run", "--study", "study", *rounds, "--out", "out", *sets)
    cast.timed("advice", "advise", "--study", "study", "--set", "run.threads=1", "--out", "advice")
    files = ("problem.clients=sites/*.csv", "problem.target=mine.csv", "problem.label=disease")
    named = [word for setting in files for word in ("--set", setting)]
    cast.timed("training in one process", "run", "--problem", "files", *rounds, "--out", "here", *named, *sets)
    trial = ("--sites", "sites/*.csv", "--set", "run.threads=1", "--out", "trial")
    cast.timed("advice in one process", "advise", "--study", "study", *trial)
    models = [folder / name / "model.safetensors" for name in ("out", "here", "advice/model", "trial/model")]
    print("largest differences: model", difference(*models[:2]), "model of the advice", difference(*models[2:]))
    pages = [list(numbers(json.loads((folder / name / "advice.json").read_text()))) for name in ("advice", "trial")]
    print("numbers of the advice", max(abs(a - b) for a, b in zip(*pages, strict=True)))
    print("wire:", json.loads((folder / "out" / "ledger.json").read_text()).get("wire"))


def main() -> None:
    """Do it all, in the order of the page docs/studies.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("four"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--outage-alone", action="store_true", help="leave the comparison with one process out")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True)
    write_example(folder, "heart", centre="cleveland")
    sets = [word for setting in SAME for word in ("--set", setting)]
    with terminable(), namespaces() as spaces, Lifetime("study") as life:
        cast = Cast(folder, spaces, life)
        new = ("--label", "disease", "--data", "mine.csv", "--partners", ",".join(SITES), "--host", "10.77.0.1")
        cast.do("study", "new", "study", *new)
        cast.start("coordinator", "study", "serve", "study")
        for site in SITES:
            mine = ("--invitation", f"study/invitations/{site}.invite", "--data", f"sites/{site}.csv")
            cast.start(site, "site", "join", *mine)
        while cast.do("study", "status", "study", "--json", fine=False).count('"connected": true') < len(SITES):
            time.sleep(1.0)
        print(cast.timed("handshake", "study", "status", "study", "--ask"))
        if not options.outage_alone:
            compare(cast, options.rounds, sets)
        outage(cast, sets)


if __name__ == "__main__":
    main()
