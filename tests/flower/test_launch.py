"""What is said and written before anything is started; needs no Flower."""

import sys
import tomllib
from pathlib import Path

import pytest

from coterie.cli import engines
from coterie.engines.estimate import exchanges_of
from coterie.engines.flower import deployment
from coterie.engines.flower.launch import cost_text, write_app
from coterie.errors import UsageError
from deployable import configuration, locally


@pytest.mark.parametrize("method", ["meritfed", "bilevel", "primal-dual", "fedavg"])
def test_exchanges_are_counted_not_typed_in(method: str) -> None:
    config = configuration(run__method=method)
    assert exchanges_of(config) * 2 == locally(config).ledger.total.rounds


def test_the_cost_is_told_with_settings_that_lower_it() -> None:
    text = cost_text(configuration(run__method="fedavg", run__rounds=7, problem__clients=9), 9)
    assert "fedavg: 7 rounds × 1 exchanges × about" in text
    assert "federation.count=3" in text
    assert "method.local_steps=" in text


def test_an_app_carries_its_configuration(tmp_path: Path) -> None:
    config = configuration()
    settings = {"folder": "/out", "answer": "", "memory": "", "nodes": "", "force": False, "resume": True}
    app = write_app(tmp_path / "app", config=config.as_toml(), **settings)
    about = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert tomllib.loads(about["config"]["config"])["run"]["method"] == "meritfed"
    assert about["config"]["resume"] is True
    for component in about["components"].values():
        module = component.partition(":")[0]
        assert (app / (module.replace(".", "/") + ".py")).is_file()


def test_an_engine_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'coterie\[flower\]'"):
        engines.launcher("flower")


def test_commands_of_flower_run_in_the_deployment_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere Flower would take a folder `coterie` for an app; a project's relative path still means the same."""
    program = tmp_path / "flwr"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps({{'run-id': [os.getcwd(), *sys.argv[1:3]]}}))\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(deployment, "_program", lambda name: str(program))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    with deployment.Deployment() as flower:
        assert flower.submit(Path("project")) == str([str(flower.folder), "run", str(tmp_path / "project")])
