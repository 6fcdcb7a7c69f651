"""What surrounds a job of a study: late and silent sites, runs of one configuration, resumed runs, processes."""

import json
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_nodes import Recorded, made, nodes

from coterie.engines import follow
from coterie.engines.lifetime import free_ports
from coterie.errors import RunError
from coterie.experiment.config import Config, load
from coterie.study import coordinator
from coterie.study.home import RECEIVED, Home
from coterie.study.jobs import perform
from coterie.study.supervise import Task, listens


class Link:
    """Stands for FLARE: a job is done at once, by the sites that are connected, unless one of them is stuck."""

    def __init__(self, homes: dict[str, Home]) -> None:
        self.homes, self.stuck, self.jobs = homes, set[str](), list[dict[str, Any]]()

    def connected(self) -> dict[str, str]:
        return dict.fromkeys(self.homes, "")

    def submit(self, job: dict[str, Any], told: dict[str, Any], answer: Path) -> str:
        self.jobs.append(job)
        if not self.silent():
            network = Recorded(nodes({site: self.homes[site] for site in told["sites"]}, told))
            follow.write_result(answer, lambda: perform(job, lambda sites: network))
        return "1"

    def status(self, number: str) -> str:
        return "FINISHED:EXECUTION_EXCEPTION"

    def silent(self) -> list[str]:
        return sorted(self.stuck & set(self.jobs[-1].get("sites", self.homes)))


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Link, list[str]]:
    """A study, its network, and what the coordinator is told."""
    found, homes = made(tmp_path)
    link, said = Link(homes), list[str]()
    monkeypatch.setattr(coordinator, "network", lambda engine: SimpleNamespace(FlareLink=lambda study: link))
    monkeypatch.setattr(coordinator, "listens", lambda host, port: True)
    monkeypatch.setattr(coordinator, "stderr_logger", lambda options: said.append)
    monkeypatch.setattr(coordinator, "CONNECT", 0.01)
    monkeypatch.setattr(coordinator, "PATIENCE", 0.2)
    monkeypatch.setattr(follow, "STATUS_EVERY", 0.0)
    return found._replace(ports=(1, 2)), link, said


def run(study: Any, folder: Path, *, resume: bool = False, **options: Any) -> dict[str, Any]:
    study.write()
    flags = {"run.problem": "study", "run.engine": "nvflare", "problem.folder": str(study.folder), "run.rounds": 1}
    config: Config = load(folder / "config.toml") if resume else load(None, {"run.baselines": []}, flags)
    watch: Callable[..., None] = lambda name, is_baseline: None  # noqa: E731
    return coordinator.launch(config, folder, watch, force=False, resume=resume, options=options)


def test_an_absent_site_is_named_and_takes_no_part(study: Any) -> None:
    found, link, said = study
    del link.homes["south"]
    agreement = coordinator.agreed(found, said.append)
    assert [site.name for site in agreement.sites] == ["east", "north"]
    assert agreement.left_out == {"south": "it is not there"}
    link.homes.clear()
    with pytest.raises(RunError, match="no site of demo is connected"):
        coordinator.agreed(found, said.append)


def test_late_sites_are_awaited_by_name(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, link, said = study
    late, waits = {"south": link.homes.pop("south")}, list[float]()

    def arrive(seconds: float) -> None:
        waits.append(seconds)
        link.homes |= late

    monkeypatch.setattr(coordinator, "CONNECT", 60.0)
    monkeypatch.setattr(coordinator.time, "sleep", arrive)
    assert coordinator.connected(found, said.append) == ["east", "north", "south"]
    assert said == ["waiting for south to connect, 60 s at most"]
    assert len(waits) == 1


def test_a_silent_site_does_not_end_the_handshake(study: Any) -> None:
    found, link, said = study
    link.stuck = {"north"}
    agreement = coordinator.agreed(found, said.append)
    assert [site.name for site in agreement.sites] == ["east", "south"]
    assert agreement.left_out == {"north": "it is connected, but silent"}
    assert "  north takes no part: it is connected, but silent" in said
    link.stuck = set(link.homes)
    with pytest.raises(RunError, match=r"start `coterie site join` there again. Ask again with: coterie study status"):
        coordinator.agreed(found, said.append)


def test_a_run_that_is_resumed_shares_as_it_was_told(study: Any, tmp_path: Path) -> None:
    found, link, _ = study
    for folder, share in ((tmp_path / "shared", True), (tmp_path / "kept", False)):
        run(found, folder, share=share)
        run(found, folder, resume=True)
        assert [job["share"] for job in link.jobs[-2:] if job["stage"] == "train"][-1] is share


def test_two_runs_of_one_configuration_have_two_names(study: Any, tmp_path: Path) -> None:
    found, link, _ = study
    for name in ("one", "two"):
        assert len(run(found, tmp_path / name, share=True)["received"]) == len(link.homes)
    folders = {path.name for path in (link.homes["north"].folder / RECEIVED).iterdir()}
    assert len(folders) == 2
    run(found, tmp_path / "two", resume=True)  # the same run
    assert {path.name for path in (link.homes["north"].folder / RECEIVED).iterdir()} == folders


SERVER = """
import pathlib, socket, sys, time
while not pathlib.Path("go").exists():
    time.sleep(0.05)
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    time.sleep(600)
"""


def test_a_server_is_said_to_listen_when_it_does(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    task = Task([sys.executable, "-c", SERVER, str(port)], {}, str(tmp_path), str(tmp_path / "log"), port, "it listens")
    command = [sys.executable, "-P", "-m", "coterie.study.supervise", json.dumps(task)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        try:
            assert select.select([serving.stdout], [], [], 2.0)[0] == []
            (tmp_path / "go").touch()
            assert serving.stdout.readline() == "it listens\n"
            assert listens("127.0.0.1", port)
        finally:
            serving.terminate()
    assert serving.returncode == 0
    assert not listens("127.0.0.1", port)


LIGHT = {
    "waiting": "import coterie.study.supervise",
    "a site's process of a job": "from coterie.study.sides import StudyClient; StudyClient('')\n"
    "from nvflare.fuel.utils.import_utils import optional_import\n"
    "assert not optional_import('nvflare.app_opt.pt.decomposers', name='TensorDecomposer')[1]",
}


@pytest.mark.parametrize("what", LIGHT)
def test_whoever_hands_bytes_on_imports_no_torch(what: str) -> None:
    if "nvflare" in LIGHT[what]:
        pytest.importorskip("nvflare")
    heavy = "[name for name in sys.modules if name.startswith(('torch.', 'sklearn'))]"
    code = f"{LIGHT[what]}\nimport sys\nassert not {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True)
