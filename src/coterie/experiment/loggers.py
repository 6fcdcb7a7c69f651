"""Other people's dashboards: TensorBoard, MLflow, Weights & Biases, all offline, behind one small interface.

`run.log = ["tensorboard"]` keeps a log in the result folder, below logs/. In Python, `Logging(TensorBoard(folder))` is
an observer for `coterie.fit`. A sink of one's own has three methods.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from coterie.errors import UsageError
from coterie.experiment.build import Parts
from coterie.experiment.loop import Observer
from coterie.experiment.measuring import is_number
from coterie.methods import View


class Sink(Protocol):
    """Where values go."""

    def begin(self, settings: Mapping[str, Any], done: int) -> None:
        """A run starts, or goes on after `done` rounds."""

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """A round was recorded."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run is over."""


class Logging:
    """An observer that tells a sink: measures, bytes moved, and weights by client."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def started(self, parts: Parts, done: int) -> None:
        """Settings first."""
        self.sink.begin(parts.config.settings(), done)

    def recorded(self, line: dict[str, Any], view: View) -> None:
        """Everything that is one number."""
        values = {key: float(value) for key, value in line.items() if is_number(value) and key != "round"}
        values |= {f"communication/{key}": float(value) for key, value in line["communication"].items()}
        if view.weights is not None and view.weights.dim() == 1:
            values |= {f"weights/client_{k}": w for k, w in enumerate(view.weights.tolist())}
        self.sink.log(line["round"], values)

    def ended(self, summary: dict[str, Any]) -> None:
        """Close it."""
        self.sink.end(summary)


class Several:
    """Observers that all hear the same, one after the other."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def started(self, parts: Parts, done: int) -> None:
        """To all."""
        for one in self.observers:
            one.started(parts, done)

    def noted(self, note: str) -> None:
        """To all that listen to notes."""
        for one in self.observers:
            if (noted := getattr(one, "noted", None)) is not None:
                noted(note)

    def recorded(self, line: dict[str, Any], view: View) -> None:
        """To all."""
        for one in self.observers:
            one.recorded(line, view)

    def ended(self, summary: dict[str, Any]) -> None:
        """To all."""
        for one in self.observers:
            one.ended(summary)


class TensorBoard:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _package("tensorboard")

    def begin(self, settings: Mapping[str, Any], done: int) -> None:
        """What a resumed run repeats is purged by the viewer."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(self.folder), purge_step=done + 1 if done else None)
        text = "\n".join(f"    {key} = {value}" for key, value in settings.items())
        self._writer.add_text("settings", text, done)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Scalars."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, round)

    def end(self, summary: Mapping[str, Any]) -> None:
        """To disk."""
        self._writer.close()


class MLflow:
    """A file store for `mlflow ui --backend-store-uri`; a resumed run goes on in its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mlflow = _package("mlflow")

    def begin(self, settings: Mapping[str, Any], done: int) -> None:
        """By the client, so that nothing global is changed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # files are enough, and need no database
        store = (self.folder / "store").resolve().as_uri()
        self._client: Any = self._mlflow.MlflowClient(tracking_uri=store)
        note = self.folder / "run"
        if note.is_file():
            self._run = note.read_text(encoding="utf-8")
            return
        found = self._client.get_experiment_by_name("coterie")
        experiment = found.experiment_id if found else self._client.create_experiment("coterie")
        self._run = self._client.create_run(experiment, run_name=str(settings["run.method"])).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, str(value)[:500])
        note.write_text(self._run, encoding="utf-8")

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Metrics."""
        for key, value in values.items():
            self._client.log_metric(self._run, key, value, step=round)

    def end(self, summary: Mapping[str, Any]) -> None:
        """With its outcome."""
        self._client.set_tag(self._run, "outcome", summary["outcome"])
        self._client.set_terminated(self._run, "FINISHED" if summary["outcome"] == "finished" else "FAILED")


class WandB:
    """An offline run of Weights & Biases, for `wandb sync`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._wandb = _package("wandb")

    def begin(self, settings: Mapping[str, Any], done: int) -> None:
        """Offline, whatever the environment says."""
        self.folder.mkdir(parents=True, exist_ok=True)
        quiet = self._wandb.Settings(silent=True, console="off")
        name = str(settings["run.method"])
        self._run: Any = self._wandb.init(
            project="coterie", name=name, dir=str(self.folder), mode="offline", config=dict(settings), settings=quiet
        )

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(values), step=round)

    def end(self, summary: Mapping[str, Any]) -> None:
        """With its outcome."""
        self._run.summary["outcome"] = summary["outcome"]
        self._run.finish()


SINKS: dict[str, Callable[[Path], Sink]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def _package(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise UsageError(
            f"run.log = {name} needs the package {name}; install it with: pip install 'coterie[{name}]'."
        ) from None


def with_logs(names: Sequence[str] | None, folder: Path, observer: Observer | None) -> Observer | None:
    """The observer, and a log for each name in the result folder; a package that is missing is named."""
    if not names:
        return observer
    logs: list[Observer] = [Logging(SINKS[name](folder / "logs" / name)) for name in names]
    return Several([*([] if observer is None else [observer]), *logs])
