"""NVIDIA FLARE itself, on loopback: values, resume, a compute process that is killed, a site that is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from networks import network
from test_conformance import recorded
from test_methods import EVERY, config_of

from coterie.experiment.build import assemble
from coterie.experiment.config import Config
from coterie.experiment.loop import Result, run_rounds
from deployable import EVERY_KIND, assert_as_locally, configuration, locally, on_problem

pytestmark = [
    pytest.mark.nvflare,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("nvflare") is None, reason="NVIDIA FLARE is not installed: coterie[nvflare]"),
    pytest.mark.filterwarnings("ignore"),  # what FLARE does in this process is not ours
]
COMPUTE = "coterie.engines.nvflare.compute"


def deployed(method: str, rounds: int, **federation: Any) -> Config:
    case = next(c for c in EVERY if c.method == method)
    slow = {"timeout": 30.0, "patience": 300.0, **federation}
    config = config_of(case, rounds=rounds, **slow).with_run(engine="nvflare")
    return Config(config.run, config.method, {**config.problem, "clients": 3}, config.federation)


def launched(config: Config, folder: Path, *, resume: bool = False) -> dict[str, Any]:
    from coterie.engines.nvflare.launch import launch

    return launch(config, folder, lambda *_: None, force=False, resume=resume, options={"json": True})


def mine(mark: str) -> dict[int, str]:
    """The processes of this test by their command: those that inherited its mark."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"COTERIE_TEST={mark}".encode() in (place / "environ").read_bytes():
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def when_begun(folder: Path, strike: Callable[[], None]) -> threading.Thread:
    """Strike once when some rounds are recorded."""

    def wait() -> None:
        path = folder / "metrics.jsonl"
        while not (path.is_file() and path.read_text().count("\n") > 3):
            time.sleep(0.05)
        strike()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def events(folder: Path) -> list[tuple[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(line["event"], line.get("client")) for line in lines]


def test_values_memory_and_resume_are_those_of_nodes_in_this_process(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    config = deployed("ditto", 4)
    run_rounds(assemble(config, network()), whole)
    launched(config.with_run(rounds=2), broken)
    again = (broken / "config.toml").read_text().replace("rounds = 2", "rounds = 4")
    (broken / "config.toml").write_text(again)
    assert launched(config, broken, resume=True)["outcome"] == "finished"
    assert events(broken) == [("resumed", None)]
    assert recorded(whole) == recorded(broken)
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()


def test_the_target_may_be_a_site(tmp_path: Path) -> None:
    whole, there = tmp_path / "whole", tmp_path / "there"
    whole.mkdir()
    config = deployed("meritfed", 2, target=1)
    run_rounds(assemble(config, network()), whole)
    launched(config, there)
    assert recorded(whole) == recorded(there)


LAGGED = {"secure": True, "method": {"solver": "lagged", "mirror_step": 0.01}}
DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "more in sums only": ("secure = true\nreveal = 3", {}),
    "fewer than the model has parameters; set reveal_total": ("secure = true", {**LAGGED, "rounds": 9}),
    "the target's reply to mirror/goal-gradient leaves it as it is": ("secure = true", {**LAGGED, "target": 1}),
    "the order asks for no noise": ("epsilon = 3.0", {}),
    "rows, fewer than least_batch = 1000": ("least_batch = 1000", {}),
}


@pytest.mark.parametrize("said", DOORS)
def test_side_doors_are_shut_at_sites_of_flare(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites whose operators name a strict policy refuse by name; the same nodes are asked in tests/secure."""
    text, options = DOORS[said]
    settings = {**options}
    own, rounds = settings.pop("method", {}), settings.pop("rounds", 2)
    (tmp_path / "node.toml").write_text(text)
    monkeypatch.setenv("COTERIE_NODE_POLICY", str(tmp_path / "node.toml"))
    config = deployed("meritfed", rounds, clip="none", **settings)
    config = replace(config, method={**config.method, **own})
    launched(config, tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert any(said in line.get("reason", "") for line in lines), lines[:3]


def test_a_killed_compute_process_costs_a_retry_and_a_killed_site_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"{os.getpid()}-{time.time_ns()}"
    monkeypatch.setenv("COTERIE_TEST", mark)
    folder = tmp_path / "out"
    struck: list[int] = []

    def strike() -> None:
        children = [pid for pid, command in mine(mark).items() if COMPUTE in command]
        os.kill(children[0], signal.SIGKILL)
        time.sleep(5.0)  # it is asked again; then a whole site goes
        site = [pid for pid, command in mine(mark).items() if "/site-2" in command or "uid=site-2" in command]
        struck.extend([children[0], *site])
        for pid in site:
            os.kill(pid, signal.SIGKILL)

    thread = when_begun(folder, strike)
    begun = time.monotonic()
    summary = launched(deployed("fedavg", 400, timeout=10.0), folder)
    thread.join(60.0)
    assert len(struck) > 1
    assert summary["outcome"] == "finished"
    told = events(folder)
    of = {client: [event for event, whose in told if whose == client] for client in (0, 1, 2)}
    struck_child = [of[client] for client in (0, 2) if of[client]]  # none where the next child was quick enough
    assert all(some[-1] == "rejoined" for some in struck_child)
    assert of[1][-1] == "lost"
    assert {event for event, _ in told} <= {"timeout", "lost", "rejoined"}
    assert time.monotonic() - begun < 600.0
    assert not any("nvflare" in command for pid, command in mine(mark).items() if pid != os.getpid())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_only_loopback_is_listened_on_and_nothing_is_left(how: signal.Signals, tmp_path: Path) -> None:
    """Before, FLARE's server stayed on all interfaces, its sites restarted themselves, and their keys were there."""
    psutil = pytest.importorskip("psutil", reason="psutil is not installed")
    mark, folder = f"{os.getpid()}-{time.time_ns()}", tmp_path / "out"
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "COTERIE_TEST": mark, "TMPDIR": str(tmp_path / "tmp")}
    sizes = ["--set", "problem.clients=3", "--set", "problem.friends=1", "--rounds", "100000", "--out", str(folder)]
    command = [sys.executable, "-m", "coterie", "run", "--engine", "nvflare", "--problem", "quadratic", *sizes]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        while not (folder / "metrics.jsonl").is_file() and process.poll() is None:
            time.sleep(0.1)
        assert process.poll() is None
        listening = set()
        for pid in mine(mark):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                found = psutil.Process(pid).net_connections("tcp")
                listening |= {line.laddr.ip for line in found if line.status == psutil.CONN_LISTEN}
        keys = list((tmp_path / "tmp").rglob("*.key"))
        process.send_signal(how)
        said = process.communicate()[1].decode()
    assert listening == {"127.0.0.1"}
    assert len(keys) >= 4  # of the server and of three sites
    assert how is signal.SIGKILL or "coterie resume" in said
    deadline = time.monotonic() + 120.0
    while mine(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert mine(mark) == {}
    assert [place.name for place in (tmp_path / "tmp").glob("coterie-*")] in ([], [f"coterie-{os.getuid()}"])


@pytest.mark.parametrize("settings", EVERY_KIND, ids=lambda s: s.get("run__problem"))
def test_every_method_gives_the_local_result(settings: dict[str, object], tmp_path: Path) -> None:
    """One after the other in a single job: the first is the method, the others are its baselines."""
    config, local = on_problem(settings, "nvflare")
    all_as_locally(config, local, tmp_path / "out")


def test_krum_gives_the_local_result_among_five(tmp_path: Path) -> None:
    config = configuration("nvflare", run__method="krum", run__rounds=1, problem__clients=5)
    local = {name: locally(config.for_baseline(name)) for name in ("krum", "multi-krum")}
    all_as_locally(config, local, tmp_path / "out")


def test_exact_gradients_give_the_local_result(tmp_path: Path) -> None:
    config = configuration("nvflare", run__problem="quadratic", run__method="exact-gd", run__rounds=1)
    all_as_locally(config, {"exact-gd": locally(config)}, tmp_path / "out")


def all_as_locally(config: Config, local: dict[str, Result], folder: Path) -> None:
    others = [name for name in local if name != config.run.method]
    assert launched(config.with_run(baselines=others), folder)["outcome"] == "finished"
    assert_as_locally(folder, config, local)
