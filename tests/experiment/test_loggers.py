"""Logs for other people's dashboards, with the real packages where they are installed."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.errors import UsageError
from coterie.experiment.config import load
from coterie.experiment.loggers import SINKS, Logging, with_logs
from coterie.experiment.run import resume, run

MEASURE = "distance_to_optimum"


def quiet(name: str, is_baseline: bool) -> None:
    return None


def config(*logs: str, rounds: int = 3) -> Any:
    flags = {"run.problem": "quadratic", "run.method": "meritfed", "run.rounds": rounds, "run.baselines": []}
    return load(None, {"run.log": list(logs)}, flags)


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def begin(self, settings: Any, done: int) -> None:
        self.heard.append(("begin", settings["run.method"], done))

    def log(self, round: int, values: Any) -> None:
        self.heard.append((round, dict(values)))

    def end(self, summary: Any) -> None:
        self.heard.append(("end", summary["outcome"]))


def test_a_sink_of_ones_own_hears_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = Kept()
    monkeypatch.setitem(SINKS, "tensorboard", lambda folder: kept)
    summary = run(config("tensorboard"), tmp_path / "a", quiet)
    assert kept.heard[0] == ("begin", "meritfed", 0)
    assert kept.heard[-1] == ("end", "finished")
    assert [round for round, _ in kept.heard[1:-1]] == [0, 1, 2, 3]
    last = kept.heard[-2][1]
    assert last[MEASURE] == summary["final"][MEASURE]
    assert last["communication/bytes_up"] == summary["communication"]["bytes_up"]
    weights = [value for key, value in last.items() if key.startswith("weights/")]
    assert weights == pytest.approx(summary["weights"])


def test_from_python(tmp_path: Path) -> None:
    import torch

    kept = Kept()
    shards = [(torch.randn(8, 2), torch.randint(0, 2, (8,))) for _ in range(3)]
    problem = coterie.Weighting.on(shards, shards[0], model=torch.nn.Linear(2, 2), loss="cross_entropy")
    coterie.fit(problem, coterie.methods.meritfed(), rounds=2, observer=Logging(kept))
    assert len(kept.heard) == 5


def test_a_missing_package_is_named_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in SINKS:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UsageError, match=rf"pip install 'coterie\[{name}\]'"):
            run(config(name), tmp_path / "a", quiet)
    assert not (tmp_path / "a").exists()
    with pytest.raises(UsageError, match=r"run\.log"):
        config("nonsense")
    assert with_logs(None, tmp_path, None) is None


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="coterie[tensorboard] is not installed")
    summary = run(config("tensorboard"), tmp_path / "a", quiet)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "a" / "logs" / "tensorboard"))
    found.Reload()
    scalars = found.Scalars(MEASURE)
    assert [one.step for one in scalars] == [0, 1, 2, 3]
    assert scalars[-1].value == pytest.approx(summary["final"][MEASURE], rel=1e-6)
    assert "weights/client_0" in found.Tags()["scalars"]


def test_mlflow(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow = pytest.importorskip("mlflow", reason="coterie[mlflow] is not installed")
        run(config("mlflow", rounds=2), tmp_path / "a", quiet)
        config_file = tmp_path / "a" / "config.toml"
        config_file.write_text(config_file.read_text().replace("rounds = 2", "rounds = 3"))
        summary = resume(tmp_path / "a", quiet)
        folder = tmp_path / "a" / "logs" / "mlflow"
        client = mlflow.MlflowClient(tracking_uri=(folder / "store").resolve().as_uri())
        name = (folder / "run").read_text()
        found = client.get_run(name)
        history = client.get_metric_history(name, MEASURE)
    assert found.data.params["run.method"] == "meritfed"
    assert found.data.tags["outcome"] == "finished"
    assert {one.step for one in history} == {0, 1, 2, 3}
    assert history[-1].value == pytest.approx(summary["final"][MEASURE])


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("wandb", reason="coterie[wandb] is not installed")
        monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
        run(config("wandb"), tmp_path / "a", quiet)
    files = [path for path in (tmp_path / "a" / "logs" / "wandb").rglob("*.wandb") if path.stat().st_size]
    assert len(files) == 1
    assert "offline-run" in str(files[0])
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["outcome"] == "finished"
