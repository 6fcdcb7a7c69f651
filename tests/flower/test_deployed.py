"""The same methods on a SuperLink and SuperNodes of this machine, whole and with parts of it killed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="the extra coterie[flower] is not installed")

from federations import begin, end, events, rounds, until

from coterie.engines.flower.deployment import NAME, Deployment
from coterie.experiment.config import Config
from coterie.experiment.loop import Result
from deployable import (
    ELSEWHERE,
    EVERY_KIND,
    assert_as_locally,
    configuration,
    deployable,
    locally,
    on_problem,
    saved_model,
)

pytestmark = [pytest.mark.flower, pytest.mark.slow]


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink and three SuperNodes."""
    with Deployment(tmp_path_factory.mktemp("f")) as deployment:
        deployment.superlink()
        for k in range(3):
            deployment.supernode(k, 3)
        yield deployment


@pytest.mark.parametrize(
    "settings",
    [
        {"run__method": "meritfed"},
        {"run__method": "ditto", "method__everyone": True, "problem__everyone": True},
        {"run__problem": "quadratic", "run__method": "exact-gd", "run__rounds": 1},
    ],
    ids=["meritfed", "ditto with memory", "exact-gd"],
)
def test_a_run_on_flower_is_the_local_one(flower: Deployment, settings: dict[str, object], tmp_path: Path) -> None:
    config = configuration(**settings)
    local = locally(config)
    said = end(flower, begin(flower, config, tmp_path / "out"))
    assert "summary" in said, said
    assert said["summary"]["outcome"] == "finished"
    assert events(tmp_path / "out") == []
    ledger = json.loads((tmp_path / "out" / "ledger.json").read_text())
    wire = ledger.pop("wire")
    assert ledger == local.ledger.as_dict()
    assert wire["bytes_up"] > ledger["total"]["bytes_up"]
    saved = load_file(tmp_path / "out" / "model.safetensors")
    theta = torch.cat([t.reshape(-1) for t in saved.values()])
    names = saved_model(config, local)
    torch.testing.assert_close(theta, names, rtol=1e-5, atol=1e-5)
    if local.view.weights is not None:
        weights = torch.tensor(said["summary"]["weights"])
        torch.testing.assert_close(weights, local.view.weights, rtol=1e-5, atol=1e-5)


def by_command(config: Config, folder: Path, *more: str, **environment: str) -> dict[str, Any]:
    """The summary that `coterie run` prints."""
    folder.mkdir()
    (folder / "config.toml").write_text(config.as_toml())
    command = ["run", str(folder / "config.toml"), "--out", str(folder / "out"), "--json", *more]
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_command_line_on_an_existing_federation(flower: Deployment, tmp_path: Path) -> None:
    """`--superlink` names it in Flower's configuration; nothing is started and nothing ended."""
    config = configuration()
    said = by_command(config, tmp_path / "a", "--superlink", "coterie", FLWR_HOME=str(flower.folder / "flwr"))
    assert said["weights"] == pytest.approx(locally(config).view.weights.tolist(), abs=1e-5)
    assert flower.ended() == []


def test_flowers_simulation_gives_the_local_result(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra coterie[flower-simulation] is not installed")
    config = configuration(run__method="bilevel", run__rounds=1)
    said = by_command(config, tmp_path / "a", "--set", "engine.simulation=true")
    assert said["weights"] == pytest.approx(locally(config).view.weights.tolist(), abs=1e-5)
    assert said["communication"] == locally(config).ledger.as_dict()["total"]


def test_a_supernode_is_killed_and_comes_back(flower: Deployment, tmp_path: Path) -> None:
    """In mid-round; the others go on, the event is recorded, and it takes part again under a new node id."""
    config = configuration(run__rounds=12, federation__timeout=60.0)
    answer = begin(flower, config, tmp_path / "out")
    until(lambda: rounds(tmp_path / "out") >= 1, flower)
    flower.kill("supernode-1")
    until(lambda: any(e["client"] == 1 for e in events(tmp_path / "out")), flower)
    flower.supernode(1, 3)
    said = end(flower, answer)
    assert said["summary"]["outcome"] == "finished", said
    kinds = [(e["client"], e["event"]) for e in events(tmp_path / "out") if "client" in e]
    assert {k for k, _ in kinds} == {1}
    assert {kind for _, kind in kinds} & {"lost", "timeout"}
    assert (1, "rejoined") in kinds


def test_all_are_killed_and_the_run_is_resumed(flower: Deployment, tmp_path: Path) -> None:
    """Also the SuperLink: the outcome is clean, the checkpoint is kept, and a new federation goes on."""
    config = configuration(
        run__rounds=3, run__method="ditto", method__everyone=True, problem__everyone=True, federation__timeout=60.0
    ).with_federation(patience=90.0)
    answer = begin(flower, config, tmp_path / "out")
    until(lambda: rounds(tmp_path / "out") >= 1 or answer.exists(), flower)
    for k in range(3):
        flower.kill(f"supernode-{k}")
    said = end(flower, answer)
    assert said["summary"]["outcome"] == "failed"
    assert "all 3 clients are gone" in said["summary"]["message"]
    flower.kill("superlink")
    flower.superlink()
    for k in range(3):
        flower.supernode(k, 3)
    said = end(flower, begin(flower, config.with_federation(patience=300.0), tmp_path / "out", resume=True))
    assert said["summary"]["outcome"] == "finished"
    theta = torch.cat([t.reshape(-1) for t in load_file(tmp_path / "out" / "model.safetensors").values()])
    torch.testing.assert_close(theta, saved_model(config, locally(config)), rtol=1e-5, atol=1e-5)
    assert "memory lost" not in {e["event"] for e in events(tmp_path / "out")}


HOSTILE = """
import random
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from coterie.engines.flower.envelope import KIND, opened, sealed
from coterie.engines.flower.tryout import client

app = ClientApp()


def lie(data):
    return random.choice([b"", data[:-7], data + bytes(99), data.replace(b"float32", b"float64"), bytes(2_000_000)])


@app.query(KIND)
def answer(message, context):
    reply = client(message, context)
    if context.node_config["partition-id"] != 1 or b'"whoami"' in opened(message.content):
        return reply
    return Message(RecordDict({KIND: sealed(lie(opened(reply.content)))}), reply_to=message)
"""


def test_a_hostile_client_is_named_and_the_others_go_on(flower: Deployment, tmp_path: Path) -> None:
    said = end(flower, begin(flower, configuration(run__rounds=3), tmp_path / "out", client=HOSTILE))
    assert said["summary"]["outcome"] == "finished"
    kinds = [(e["round"], e["client"], e["event"]) for e in events(tmp_path / "out")]
    assert kinds == [(t, 1, "rejected") for t in (1, 2, 3)]
    assert said["summary"]["final"]["effective_clients"] <= 3


def test_no_method_is_left_out() -> None:
    tried = set().union(*(on_problem(settings)[1] for settings in EVERY_KIND))
    assert deployable() == tried | ELSEWHERE


@pytest.mark.parametrize("settings", EVERY_KIND, ids=lambda s: s.get("run__problem"))
def test_every_method_gives_the_local_result(flower: Deployment, settings: dict[str, object], tmp_path: Path) -> None:
    """One after the other in a single run of Flower: the first is the method, the others are its baselines."""
    config, local = on_problem(settings)
    all_as_locally(flower, config, local, tmp_path / "out")


def test_krum_gives_the_local_result_among_five(tmp_path: Path) -> None:
    config = configuration(run__method="krum", run__rounds=1, problem__clients=5)
    local = {name: locally(config.for_baseline(name)) for name in ("krum", "multi-krum")}
    (tmp_path / "f").mkdir()
    with Deployment(tmp_path / "f") as flower:
        flower.superlink()
        for k in range(5):
            flower.supernode(k, 5)
        all_as_locally(flower, config, local, tmp_path / "out")


def all_as_locally(flower: Deployment, config: Config, local: dict[str, Result], folder: Path) -> None:
    others = [name for name in local if name != config.run.method]
    said = end(flower, begin(flower, config.with_run(baselines=others), folder))
    assert said["summary"]["outcome"] == "finished", said
    assert_as_locally(folder, config, local)


def test_a_folder_of_the_connection_s_name_is_not_taken_for_an_app(
    flower: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below a clone of coterie: there Flower's commands failed, and the run was given up after a minute."""
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "pyproject.toml").write_text('[project]\nname = "other"\nversion = "1"\n')
    monkeypatch.chdir(tmp_path)
    answer = begin(flower, configuration(run__rounds=1), tmp_path / "out")
    runs = flower.flwr("list", NAME)["runs"]
    assert flower.status(str(runs[0]["run-id"])) != "unknown"
    assert end(flower, answer)["summary"]["outcome"] == "finished"
