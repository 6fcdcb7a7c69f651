"""Ray itself: the bits of every method, an actor that is killed in mid-round, resume, and what is left behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_conformance import assert_same, recorded
from test_grouped import EVERY, assert_bits, config_of, on_ray
from test_methods import Case, opened

from coterie.engines.ray.launch import actors, cluster, launch, network
from coterie.experiment.build import Network, assemble
from coterie.experiment.config import Config, EngineTable
from coterie.experiment.loop import run_rounds
from coterie.federation.remote.codec import message

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'coterie[ray]'"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves sockets to the end
]


@pytest.fixture(scope="module")
def cores() -> Iterator[None]:
    with cluster(EngineTable(workers=8)):  # room for the actors of several tests; five clients make two groups
        yield


@pytest.fixture(scope="module")
def shared(cores: None) -> Iterator[Network]:
    """Actors know nothing of methods: one pair of them serves all methods on a problem."""
    made: dict[Any, Any] = {}

    def make(config: Config, problem: Any) -> Any:
        key = json.dumps([config.run.problem, config.run.dtype, config.problem, config.federation.target])
        if key not in made:
            for old in made.values():
                old.close()
            made.clear()
            made[key] = actors(config, problem, None)
        return made[key]

    yield make
    for one in made.values():
        one.close()


def case_of(method: str, problem: str = "friends") -> Case:
    return next(case for case in EVERY if (case.method, case.problem) == (method, problem))


def test_tensors_that_orders_share_are_put_into_store_once(cores: None) -> None:
    import ray

    from coterie.engines.ray.transport import _split

    model, own = torch.randn(50_000), torch.randn(3)
    orders = {k: message((k, model)) for k in range(3)} | {3: message((model, own)), 4: message((4, own))}
    parts = _split(orders)
    stored = [tail for _, tail in parts.values()]
    assert stored[0] is stored[1] is stored[2]
    assert stored[3] is not stored[0]
    assert stored[4] is None
    for k, (head, tail) in parts.items():
        assert head + (b"" if tail is None else ray.get(tail).tobytes()) == bytes(orders[k])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", sorted(EVERY, key=lambda case: case.problem), ids=lambda case: f"{case.method}-{case.problem}"
)
def test_every_method_gives_the_local_bits(case: Case, shared: Network) -> None:
    assert_bits(config_of(case), shared)


@pytest.mark.parametrize("method", ["fedavg", "meritfed", "bilevel", "ditto"])
def test_methods_give_the_local_bits(method: str, shared: Network) -> None:
    assert_bits(config_of(next(case for case in EVERY if case.method == method)), shared)


def test_an_actor_killed_in_mid_round_costs_one_retry_and_no_bit(shared: Network) -> None:
    config = config_of(case_of("ditto"), rounds=4)
    whole, calm = run_rounds(assemble(config), None), run_rounds(assemble(on_ray(config), shared), None)
    killed: list[int] = []
    works: list[bool] = []

    def deadly(config: Config, problem: Any) -> Any:
        transport = shared(config, problem)
        call = transport._call

        def shoot(group: int, head: bytes, tail: Any) -> None:
            call(group, head, tail)
            works.append(b'"run"' in head and group == 1)
            if sum(works) == 2 and not killed:  # in the second round: it has something to forget
                killed.append(transport.processes[1])
                os.kill(killed[0], signal.SIGKILL)

        transport._call = shoot
        return transport

    parts = assemble(on_ray(config), deadly)
    broken = run_rounds(parts, None)
    parts.fed.engine.transport.__dict__.pop("_call")
    assert len(killed) == 1
    assert parts.fed.engine.transport.processes[1] != killed[0]
    assert broken.events == []
    assert broken.ledger.wire.exchanges == calm.ledger.wire.exchanges + 1
    assert broken.ledger.by_cause == whole.ledger.by_cause
    assert_same(opened(whole.state, None), opened(broken.state, parts.fed.engine.recall))


def test_a_run_is_resumed_bit_by_bit(cores: None, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    # the clip is written out: where it is not set, the configuration that is read again gets that of networks
    config = on_ray(config_of(case_of("ditto"), rounds=4)).with_federation(clip="none")

    def nobody(name: str, is_baseline: bool) -> None:
        return None

    launch(config, whole, nobody, force=False, resume=False, options={})
    launch(config.with_run(rounds=2), broken, nobody, force=False, resume=False, options={})
    text = (broken / "config.toml").read_text()
    (broken / "config.toml").write_text(text.replace("rounds = 2", "rounds = 4"))
    summary = launch(config, broken, nobody, force=False, resume=True, options={})
    assert summary["outcome"] == "finished"
    events = [json.loads(line)["event"] for line in (broken / "events.jsonl").read_text().splitlines()]
    assert events == ["resumed"]
    assert recorded(whole) == recorded(broken)
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()


def test_only_loopback_is_listened_on_and_actors_are_ended(cores: None) -> None:
    psutil = pytest.importorskip("psutil", reason="psutil is not installed")
    with network(None) as make:
        parts = assemble(on_ray(config_of(case_of("fedavg", "quadratic"))), make)
        pids = set(parts.fed.engine.transport.processes.values())
        assert len(pids) == 2
        family = psutil.Process().children(recursive=True)
        assert pids <= {one.pid for one in family}
        open_to = {
            connection.laddr.ip.removeprefix("::ffff:")
            for one in family
            for connection in one.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert open_to <= {"127.0.0.1", "::1"}
    _, alive = psutil.wait_procs([one for one in family if one.pid in pids], timeout=60.0)
    assert alive == []


CLUSTER = """
import sys, ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_command_line_on_an_existing_cluster(tmp_path: Path) -> None:
    """Its bits are the local ones, and the cluster is there afterwards."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        address = cluster.stdout.readline().strip()
        common = ["--method", "meritfed", "--rounds", "2", "--set", "run.baselines=[]", "--set", "federation.chunk=5"]
        common += ["--set", "federation.mode=vmap", "--set", "run.threads=1", "--json"]
        for name, more in (
            ("local", []),
            ("ray", ["--engine", "ray", "--set", f"engine.address={address}", "--set", "engine.workers=2"]),
        ):
            command = [sys.executable, "-m", "coterie", "run", *common, *more, "--out", str(tmp_path / name)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
            assert done.returncode == 0, done.stderr
        assert cluster.poll() is None
    finally:
        cluster.communicate("", timeout=60)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("local", "ray"))
    assert one == other
