"""TLS and node authentication: the example of the docs works, and whoever has no key is refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra coterie[flower] is not installed")

from federations import begin, end, events, until

from coterie.engines.flower.deployment import OFFLINE, Deployment, Keys
from coterie.engines.lifetime import Lifetime, free_ports
from deployable import configuration

pytestmark = [pytest.mark.flower, pytest.mark.slow]
BIN = Path(sys.executable).parent
PAGE = Path(__file__).parents[2] / "docs" / "flower.md"


def commands(word: str = "openssl") -> str:
    """The lines of the docs that make certificates and a key, or those that have another word."""
    (block,) = (found for found in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S) if word in found)
    return block


def test_the_lines_of_the_docs_connect_a_node(tmp_path: Path) -> None:
    """As printed, in one shell, but for the ports."""
    subprocess.run(["bash", "-e", "-c", commands()], cwd=tmp_path, check=True, capture_output=True)
    port, own = free_ports(2)
    *before, superlink, register, supernode = commands("flower-supernode").replace("8000", str(port)).splitlines()
    wait = f"until (: < /dev/tcp/127.0.0.1/{port}) 2> /dev/null; do sleep 0.2; done"
    supernode += f" --host 127.0.0.1 --port {own} &"
    seen = "until flwr supernode list mine --format json | tee nodes.json | grep -q online; do sleep 1; done"
    with Lifetime("flower") as life, (tmp_path / "log").open("wb") as log:  # a pipe would stay open with the processes
        done = subprocess.run(
            ["bash", "-e", "-c", "\n".join([*before, superlink, wait, register, supernode, seen])],
            cwd=tmp_path,
            env={**os.environ, **OFFLINE, **life.environment, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=300,
        )
    assert done.returncode == 0, (tmp_path / "log").read_text()[-2000:]
    assert json.loads((tmp_path / "nodes.json").read_text())["success"]


def test_with_keys(tmp_path: Path) -> None:
    subprocess.run(["bash", "-e", "-c", commands()], cwd=tmp_path, check=True, capture_output=True)
    for name in ("node1", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", tmp_path / name], check=True)
    keys = Keys(tmp_path / "ca.crt", tmp_path / "server.pem", tmp_path / "server.key")
    os.mkdir(tmp_path / "f")
    with Deployment(tmp_path / "f", keys) as flower:
        flower.superlink()
        ids = [
            flower.flwr("supernode", "register", str(tmp_path / f"node{k}.pub"), "coterie")["node-id"] for k in (0, 1)
        ]
        for k in (0, 1):
            flower.supernode(k, 2, "--auth-supernode-private-key", str(tmp_path / f"node{k}"))
        flower.supernode(1, 2, "--auth-supernode-private-key", str(tmp_path / "stranger"), name="stranger")
        flower.supernode(1, 2, name="without-key")
        flower.supernode(1, 2, "--max-retries", "1", name="plain", insecure=True)
        until(lambda: {"stranger", "without-key", "plain"} <= set(flower.ended()))
        for name in ("stranger", "without-key", "plain"):
            assert flower.processes[name].returncode != 0, name
        config = configuration(run__rounds=1, problem__clients=2)
        nodes = {str(node): k for k, node in enumerate(ids)}
        said = end(flower, begin(flower, config, tmp_path / "out", nodes=nodes))
        assert said["summary"]["outcome"] == "finished", said
        assert events(tmp_path / "out") == []
        swapped = {str(node): 1 - k for k, node in enumerate(ids)}  # as if each had claimed to be the other
        config = config.with_federation(patience=60.0)
        said = end(flower, begin(flower, config, tmp_path / "lies", nodes=swapped))
        assert "0 of 2 clients" in said["error"]
